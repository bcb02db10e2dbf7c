"""Shares of the kinds of first faults, for the article's two figures, and what the figures of faults show.

>>> from o1lab.chains.faults import Fault
>>> made = [Fault(2, "carry", "1", "2", "…"), Fault(3, "label", "s3", "s4", "…")]
>>> print(overflow_share(made))
50 [9.453, 90.55] % (n=2)
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import plotly.graph_objects as go

from o1lab import plots
from o1lab.chains.cosine import BREAK
from o1lab.chains.faults import Fault, reuse_share, tally
from o1lab.errors import EstimateError
from o1lab.stats import Estimate, proportion

if TYPE_CHECKING:
    import pandas as pd

    from o1lab.chains.detect import Detection

NEUTRAL = (("#5C4B8A", "dashdot", ""), ("#00735C", "solid", "/"), ("#8A5A00", "dot", "x"))
"""Colour, dash and hatch of things that are neither broken nor fixed."""
RESULTS = ("carry", "premise reuse", "arithmetic")


def misused_share(faults: Iterable[Fault | None]) -> Estimate:
    """Share of all first faults, in %, that apply the right step to an earlier conclusion, without what is accident.

    It is the share of wrong results among the faults times :func:`o1lab.chains.faults.reuse_share` among those. The
    interval multiplies the ends of the two, which is wider than 95 %.

    Raises
    ------
    EstimateError
        No fault, or wrong results of which none could be told from an accident.
    """
    found = _some(faults)
    wrong = [fault for fault in found if fault.kind in RESULTS]
    results = proportion(len(wrong), len(found))
    if not wrong:
        return Estimate(0.0, 0.0, 100 * proportion(0, len(found)).high, len(found), "%")
    reuse = reuse_share(wrong)
    ends = (100 * getattr(results, end) * getattr(reuse, end) for end in ("value", "low", "high"))
    return Estimate(*ends, len(found), "%")


def overflow_share(faults: Iterable[Fault | None]) -> Estimate:
    """Share of all first faults, in %, that a carry, a borrow or a missing wrap explains, alone or among others."""
    found = _some(faults)
    hits = sum("carry" in (fault.kind, *fault.also) for fault in found)
    share = proportion(hits, len(found))
    return Estimate(100 * share.value, 100 * share.low, 100 * share.high, share.n, "%")


def _some(faults: Iterable[Fault | None]) -> list[Fault]:
    found = [fault for fault in faults if fault is not None]
    if not found:
        raise EstimateError("no fault: shares of kinds need at least one")
    return found


def rules_figure(scores: Sequence[float], exact: int, rule: int | None, title: str) -> go.Figure:
    """The cosine of every step of one chain, and where replay and the cosine rule say that it breaks."""
    figure = go.Figure()
    grey = {"color": plots.COLOURS["control"]}
    figure.add_scatter(x=list(range(1, len(scores) + 1)), y=list(scores), mode="lines+markers", line=grey)
    figure.add_hline(y=BREAK, line={"dash": "dash"}, annotation_text="0.5", annotation_position="top left")
    marks = [(exact, "fixed", "solid", "replay", 1.16), (rule, "broken", "dot", "cosine rule", 1.07)]
    for step, role, dash, name, height in marks:
        if step is None:
            continue
        colour, late = plots.COLOURS[role], step > len(scores) / 2
        figure.add_vline(x=step, line={"color": colour, "width": 3, "dash": dash})
        figure.add_annotation(
            x=step, y=height, text=f"<b>{name}: step {step}</b>", showarrow=False, xshift=-6 if late else 6,
            xanchor="right" if late else "left", font={"color": colour, "size": plots.TEXT},
        )  # fmt: skip
    return _titled(figure, title, "step", "cosine to the gold state (1)").update_yaxes(range=[-0.05, 1.22])


def confusion_figure(exact: Sequence[int], rule: Sequence[int | None], title: str) -> go.Figure:
    """Step of the first fault by replay against the step that another rule names, one point a chain, moved a little."""
    figure, chance, steps = go.Figure(), np.random.default_rng(0), max(exact) + 1
    figure.add_scatter(
        x=[0, steps], y=[0, steps], mode="lines", line={"color": "#000000", "dash": "dash"}, name="exact"
    )
    named = np.array([step or 0 for step in rule], dtype=float)
    right = named == np.array(exact)
    for name, role, some in (("exact step", "fixed", right), ("another step, or none", "broken", ~right)):
        shift = chance.uniform(-0.3, 0.3, (2, int(some.sum())))
        at = np.array([np.array(exact, dtype=float)[some], named[some]]) + shift
        marker = {"color": plots.COLOURS[role], "symbol": plots.STYLES[role].symbol, "size": 8, "opacity": 0.7}
        label = f"{name} ({int(some.sum())})"
        figure.add_scatter(x=at[0, : plots.MOST_POINTS], y=at[1, : plots.MOST_POINTS], mode="markers", marker=marker,
                           name=label)  # fmt: skip
    x_title, y_title = "first fault by exact replay (step)", "step named by the rule (0: none)"
    return _titled(figure, title, x_title, y_title, legend=True)


def roc_figure(detections: dict[str, Detection], control: Detection, title: str) -> go.Figure:
    """ROC curves of detectors by name, and of one that was fitted to shuffled faults."""
    figure = go.Figure()
    drawn = [(name, found, *style[:2]) for (name, found), style in zip(detections.items(), NEUTRAL, strict=False)]
    drawn.append(("shuffled faults", control, plots.COLOURS["control"], plots.STYLES["control"].dash))
    for name, found, colour, dash in drawn:
        alarms, hits = plots.downsample(*found.roc())
        line = {"color": colour, "dash": dash, "width": 3}
        figure.add_scatter(x=alarms, y=hits, mode="lines", name=f"{name}: {found.auroc.value:.3f}", line=line)
    line = {"color": "#000000", "dash": "dash"}
    figure.add_scatter(x=[0, 1], y=[0, 1], mode="lines", name="chance", line=line)
    x_title, y_title = "right steps called faulty (share)", "faulty steps found (share)"
    return _titled(figure, title, x_title, y_title, legend=True)


def kinds_figure(groups: dict[str, Sequence[Fault | None]], claimed: dict[str, float], title: str) -> go.Figure:
    """Shares of the kinds of first faults by model, with intervals; ``claimed`` shares (in %) as black marks."""
    figure = go.Figure()
    shares = {name: tally(faults) for name, faults in groups.items()}
    most = {kind: max((one[kind].value for one in shares.values() if kind in one), default=0.0)
            for kind in {*claimed, *(kind for one in shares.values() for kind in one)}}  # fmt: skip
    order = sorted(most, key=lambda kind: (-most[kind], kind))
    for (name, found), (colour, _, hatch) in zip(shares.items(), itertools.cycle(NEUTRAL), strict=False):
        n = next(iter(found.values())).n
        rows = [found.get(kind) or proportion(0, n) for kind in order]
        up, down = [100 * (row.high - row.value) for row in rows], [100 * (row.value - row.low) for row in rows]
        marker = {"color": colour, "pattern": {"shape": hatch, "fgcolor": "#ffffff", "fillmode": "overlay"}}
        error = {"type": "data", "color": "#1a1a1a", "array": up, "arrayminus": down}
        heights = [100 * row.value for row in rows]
        figure.add_bar(x=order, y=heights, name=f"{name} (n={n})", error_y=error, marker=marker)
    marker = {"symbol": "line-ew-open", "size": 44, "color": "#000000", "line": {"width": 4}}
    heights = list(claimed.values())
    figure.add_scatter(x=list(claimed), y=heights, mode="markers", name="the article", marker=marker)
    x_title, y_title = "kind of the first fault", "share of first faults (%)"
    return _titled(figure, title, x_title, y_title, legend=True)


def planted_figure(hits: pd.DataFrame) -> go.Figure:
    """Share of planted faults whose step the cosine rule and replay name, by kind."""
    names, series, bands = list(dict.fromkeys(hits.kind)), {}, {}
    for role, rule in (("broken", "cosine"), ("fixed", "replay")):
        flags = [hits.loc[hits.kind == name, rule] for name in names]
        rows = [proportion(int(each.sum()), len(each)) for each in flags]
        series[role] = [row.value for row in rows]
        bands[role] = ([row.low for row in rows], [row.high for row in rows])
    return plots.broken_vs_fixed(
        [name.replace(" ", "<br>") for name in names], **series, kind="bar", bands=bands,
        labels={"broken": "cosine", "fixed": "replay"}, x_title="planted kind", y_title="exact step named (share)",
        title=f"Replay names {hits.replay.mean():.0%} of planted faults, the cosine rule {hits.cosine.mean():.0%}",
    )  # fmt: skip


def _titled(figure: go.Figure, title: str, x_title: str, y_title: str, *, legend: bool = False) -> go.Figure:
    lines = plots.titled(title)
    figure.update_layout(title_text=lines, template="o1lab", showlegend=legend)
    figure.update_layout(margin={"r": 40, "t": 60 + 26 * (lines.count("<br>") + 1) + 30 * legend})
    figure.update_layout(legend={"orientation": "h", "y": 1.02, "yanchor": "bottom"})
    return figure.update_xaxes(title_text=x_title).update_yaxes(title_text=y_title)
