"""Figures of decays: survival curves side by side, the hazard along the chain, arms as dots with intervals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from o1lab import plots
from o1lab.chains.survival import Survival
from o1lab.errors import EstimateError
from o1lab.stats import Estimate

PANELS_HEIGHT = 860
PREDICTED = "ideal"
AGAIN = (None, ("dash", "diamond"), ("dashdot", "x"))
"""Dash and symbol of the second and third line with the same role on the same axes."""


class Curve(NamedTuple):
    """One line of a panel: its name, its role in ``plots.STYLES``, and what was measured or predicted by step."""

    name: str
    role: str
    shares: Survival | Sequence[float]


def _points(shares: Survival | Sequence[float]) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Steps from 0, shares and interval, in %."""
    if isinstance(shares, Survival):
        steps, *rest = shares.steps, shares.share, shares.low, shares.high
    else:
        steps, rest = np.arange(1, len(shares) + 1), [np.asarray(shares, dtype=float)] * 3
    return (np.concatenate([[0], steps]), *(np.concatenate([[100.0], 100 * one]) for one in rest))


def survival(panels: Mapping[str, Sequence[Curve]], title: str) -> go.Figure:
    """Share of chains right through each step, one panel a decay, two panels a row, all on the same scale.

    Measured curves have their 95 % band; a predicted one (a sequence, step 1 on) is dashed. Names stand in the legend
    of each panel.

    Examples
    --------
    >>> from o1lab.chains.survival import kaplan_meier
    >>> made = kaplan_meier([2, None, 5], 8)
    >>> figure = survival({"noise": [Curve("measured", "broken", made), Curve("law", "ideal", [0.9] * 8)]}, "It decays")
    >>> [trace.name for trace in figure.data if trace.name]
    ['measured', 'law']
    """
    rows = -(-len(panels) // 2)
    figure = make_subplots(rows=rows, cols=2, subplot_titles=list(panels), vertical_spacing=0.34 / rows,
                           horizontal_spacing=0.11)  # fmt: skip
    for place, curves in enumerate(panels.values()):
        where, legend = {"row": place // 2 + 1, "col": place % 2 + 1}, f"legend{place + 1 if place else ''}"
        empty_below, last = True, max(int(_points(one.shares)[0][-1]) for one in curves)
        used: list[str] = []
        for name, role, shares in curves:
            steps, share, low, high = _points(shares)
            high = np.minimum.accumulate(high)  # what is not reached now is not reached later
            if share[-1] == 0:
                steps, (share, low, high) = (
                    np.append(steps, last),
                    (np.append(one, one[-1]) for one in (share, low, high)),
                )
            empty_below &= bool(np.interp(last / 4, steps, share) > 50)
            style, shape = plots.STYLES[role], "hv" if isinstance(shares, Survival) else "linear"
            if shape == "hv":
                red, green, blue = (int(style.colour[index : index + 2], 16) for index in (1, 3, 5))
                fill = {"fill": "tonexty", "fillcolor": f"rgba({red},{green},{blue},0.16)"}
                for edge, shade in ((high, {}), (low, fill)):
                    figure.add_scatter(x=steps, y=edge, mode="lines", line={"width": 0, "shape": shape}, **where,
                                       hoverinfo="skip", showlegend=False, **shade)  # fmt: skip
            dash, _ = _second_cue(role, used)
            line = {"color": style.colour, "dash": dash, "shape": shape, "width": 2 if role == PREDICTED else 3}
            figure.add_scatter(x=steps, y=share, name=name, mode="lines", line=line, legend=legend, **where)
        axis = figure.get_subplot(**where)
        (left, right), (bottom, top) = axis.xaxis.domain, axis.yaxis.domain
        box = {"x": left + 0.01, "y": bottom + 0.012, "xanchor": "left", "yanchor": "bottom"}
        if not empty_below:
            box = {"x": right, "y": (bottom + top) / 2, "xanchor": "right", "yanchor": "middle"}
        figure.update_layout({legend: {**box, "bgcolor": "rgba(255,255,255,0.8)", "font": {"size": 14}}})
    figure.update_xaxes(title_text="step of the chain", **plots.AXIS)
    figure.update_yaxes(title_text="right so far (%)", range=[-3, 103], **plots.AXIS)
    figure.update_layout(title_text=plots.titled(title), template="o1lab", showlegend=True, height=PANELS_HEIGHT,
                         margin={"r": 30}, hovermode="closest")  # fmt: skip
    return figure


class Rate(NamedTuple):
    """One line of a hazard figure: its name, role, and faults per step taken, for steps ``first`` to ``last``."""

    name: str
    role: str
    bins: Sequence[tuple[int, int, Estimate | None]]


def hazard(rates: Sequence[Rate], title: str, *, mark: int | None = None) -> go.Figure:
    """First faults for each step taken, by steps of the chain, on a logarithmic scale; bins without a fault are open.

    ``mark`` draws a vertical line at that step. A bin without a fault stands at its upper bound, with an arrow down.
    """
    if not any(estimate is not None for rate in rates for *_, estimate in rate.bins):
        raise EstimateError("no bin of any rate was reached: there is no hazard to draw")
    figure = go.Figure()
    used: list[str] = []
    for number, (name, role, bins) in enumerate(rates):
        style, (_, symbol) = plots.STYLES[role], _second_cue(role, used)
        seen = [((first + last) / 2, one) for first, last, one in bins if one is not None]
        shift = 0.9 * (number - (len(rates) - 1) / 2)
        found = [(middle + shift, one) for middle, one in seen if one.value]
        spread = {
            "array": [100 * (one.high - one.value) for _, one in found],
            "arrayminus": [100 * (one.value - max(one.low, 1e-9)) for _, one in found],
        }
        marker = {"size": 11, "color": style.colour}
        figure.add_scatter(
            x=[x for x, _ in found], y=[100 * one.value for _, one in found], name=name, mode="markers",
            error_y={"type": "data", "thickness": 1.5, **spread}, marker={"symbol": symbol, **marker},
        )  # fmt: skip
        empty = [(middle + shift, 100 * one.high) for middle, one in seen if not one.value]
        figure.add_scatter(
            x=[x for x, _ in empty], y=[y for _, y in empty], name=f"{name}, no fault", mode="markers",
            showlegend=False, marker={"symbol": "arrow-down", **marker},
        )  # fmt: skip
    if mark is not None:
        figure.add_vline(x=mark + 0.5, line={"color": "#444444", "width": 1, "dash": "dash"})
        figure.add_annotation(x=mark + 0.5, y=1, yref="paper", text=f"step {mark}", showarrow=False, xanchor="left",
                              xshift=4, yanchor="top")  # fmt: skip
    figure.update_layout(title_text=plots.titled(title), template="o1lab", showlegend=True, margin={"r": 30},
                         legend={"orientation": "h", "y": 1.02, "yanchor": "bottom"}, hovermode="closest")  # fmt: skip
    figure.update_xaxes(title_text="step of the chain")
    figure.update_yaxes(
        title_text="first faults per step taken (%)",
        type="log",
        tickvals=plots.TICKS,
        ticktext=[f"{tick:g}" for tick in plots.TICKS],
    )
    return figure


def dots(
    rows: Mapping[str, Estimate], title: str, x_title: str, *, margin: float | None = None,
    roles: Mapping[str, str] | None = None,
) -> go.Figure:  # fmt: skip
    """One row a thing measured: a dot and its 95 % interval; ±``margin`` as a shaded band around zero.

    Examples
    --------
    >>> figure = dots({"fp16": Estimate(0, -0.4, 0.4, 1024, "pp")}, "fp16 costs nothing", "points", margin=1)
    >>> figure.data[0].y
    ('fp16',)
    """
    figure = go.Figure()
    for name, one in rows.items():
        style = plots.STYLES[(roles or {}).get(name, "broken")]
        figure.add_scatter(
            x=[one.value], y=[name], name=name, mode="markers", showlegend=False,
            error_x={"type": "data", "array": [one.high - one.value], "arrayminus": [one.value - one.low],
                     "thickness": 2, "color": style.colour},
            marker={"symbol": style.symbol, "size": 11, "color": style.colour},
        )  # fmt: skip
    if margin is not None:
        figure.add_vrect(x0=-margin, x1=margin, fillcolor="#d9d9d9", line_width=0, layer="below")
        figure.add_vline(x=0, line={"color": "#444444", "width": 1})
    figure.update_layout(title_text=plots.titled(title), template="o1lab", margin={"r": 30}, hovermode="closest",
                         height=260 + 42 * len(rows))  # fmt: skip
    figure.update_xaxes(title_text=x_title)
    figure.update_yaxes(title_text="what is changed", title_standoff=24, autorange="reversed", type="category")
    return figure


def _second_cue(role: str, used: list[str]) -> tuple[str, str]:
    """Dash and symbol of a line, so that two of one role can be told apart; ``used`` is kept."""
    used.append(role)
    return AGAIN[min(used.count(role), len(AGAIN)) - 1] or (plots.STYLES[role].dash, plots.STYLES[role].symbol)
