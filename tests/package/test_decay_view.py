"""Figures of decays: what they draw is what was measured, in the fixed colours, and a reader can use them."""

from __future__ import annotations

import numpy as np
import pytest

from o1lab import plots
from o1lab.chains.survival import kaplan_meier
from o1lab.decoding.decay_view import Curve, Rate, dots, hazard, survival
from o1lab.errors import EstimateError
from o1lab.stats import Estimate, proportion


def test_panels_hold_each_curve_from_the_start_to_the_end():
    falls, stays = kaplan_meier([1, 2, 2, 1], 8), kaplan_meier([None] * 4, 8)
    panels = {"one": [Curve("falls", "broken", falls), Curve("law 1", "ideal", [1.0] * 8)]}
    panels["two"] = [Curve("stays", "control", stays)]
    panels["three"] = [Curve("law", "ideal", [0.5, 0.25])]
    figure = survival(panels, "Three decays")
    named = {trace.name: trace for trace in figure.data if trace.name}
    assert list(named["falls"].x) == [0, 1, 2, 8]
    assert list(named["falls"].y) == [100, 50, 0, 0]
    assert list(named["law"].y) == [100, 50, 25]
    assert named["law"].line.dash == "dash"
    assert named["falls"].line.color == plots.COLOURS["broken"]
    assert named["stays"].xaxis == "x2"
    assert [note.text for note in figure.layout.annotations] == ["one", "two", "three"]
    assert figure.layout.legend.y > figure.layout.legend2.y  # beside the curve, not on it
    bands = [trace for trace in figure.data if not trace.name]
    assert len(bands) == 4
    assert (np.diff(bands[0].y) <= 0).all()
    plots.check(plots.captioned(figure, "three"))


def test_a_bin_without_a_fault_stands_at_its_bound():
    bins = [(1, 8, proportion(3, 100)), (9, 16, proportion(0, 50)), (17, 24, None)]
    found, empty, other = hazard([Rate("all", "broken", bins), Rate("b", "broken", bins[:1])], "It falls", mark=8).data[
        :3
    ]
    assert list(found.x) == [4.05]
    assert found.y[0] == pytest.approx(3)
    assert list(empty.x) == [12.05]
    assert empty.y[0] == pytest.approx(100 * proportion(0, 50).high)
    assert (found.marker.symbol, empty.marker.symbol, other.marker.symbol) == ("circle", "arrow-down", "diamond")
    with pytest.raises(EstimateError, match="no hazard to draw"):
        hazard([Rate("none", "broken", [(1, 8, None)])], "Nothing")


def test_dots_show_intervals_and_the_margin():
    rows = {"fp16": Estimate(0, -0.4, 0.5, 1024, "pp"), "3 bit": Estimate(-80, -83, -77, 1024, "pp")}
    figure = dots(rows, "It costs nothing", "points", margin=1, roles={"fp16": "fixed"})
    fp16, three = figure.data
    assert fp16.error_x.array == (0.5,)
    assert fp16.error_x.arrayminus == (0.4,)
    assert (fp16.marker.color, three.marker.color) == (plots.COLOURS["fixed"], plots.COLOURS["broken"])
    assert [(shape.x0, shape.x1) for shape in figure.layout.shapes] == [(-1, 1), (0, 0)]
    plots.check(figure)
