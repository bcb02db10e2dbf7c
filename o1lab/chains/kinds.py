"""Shares of the kinds of first faults, for the article's two figures, and what the figures of faults show.

>>> from o1lab.chains.faults import Fault
>>> made = [Fault(2, "carry", "1", "2", "…"), Fault(3, "label", "s3", "s4", "…")]
>>> print(overflow_share(made))
50 [9.453, 90.55] % (n=2)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import plotly.graph_objects as go

from o1lab import plots
from o1lab.chains.cosine import BREAK
from o1lab.chains.faults import Fault, reuse_share, tally
from o1lab.errors import EstimateError
from o1lab.stats import Estimate, proportion

if TYPE_CHECKING:
    from o1lab.chains.detect import Detection

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
    grey, steps = plots.STYLES["control"], list(range(1, len(scores) + 1))
    figure.add_scatter(x=steps, y=list(scores), mode="lines+markers", name="cosine to gold", line={"color": grey.colour})
    figure.add_hline(y=BREAK, line={"dash": "dash", "color": "#000000"}, annotation_text="0.5",
                     annotation_position="top left")  # fmt: skip
    marks = [(exact, "fixed", "replay", 1.13), (rule, "broken", "cosine rule", 1.03)]
    for step, role, name, height in marks:
        if step is None:
            continue
        style = plots.STYLES[role]
        figure.add_vline(x=step, line={"color": style.colour, "width": 3, "dash": "dot" if role == "broken" else "solid"})
        figure.add_annotation(x=step, y=height, text=f"<b>{name}: step {step}</b>", showarrow=False, xanchor="left",
                              xshift=6, font={"color": style.colour, "size": plots.TEXT})  # fmt: skip
    figure.update_layout(title_text=title, template="o1lab", margin={"r": 170})
    figure.update_xaxes(title_text="step")
    figure.update_yaxes(title_text="cosine to the gold state (1)", range=[-0.05, 1.22])
    return figure


def confusion_figure(exact: Sequence[int], rule: Sequence[int | None], steps: int, title: str) -> go.Figure:
    """Step of the first fault by replay against the step that another rule names, one point a chain."""
    figure = go.Figure()
    chance = np.random.default_rng(0)
    figure.add_scatter(x=[0, steps + 1], y=[0, steps + 1], mode="lines", name="exact",
                       line={"color": "#000000", "dash": "dash"})  # fmt: skip
    groups = [("exact step", "fixed", True), ("another step, or none", "broken", False)]
    for name, role, right in groups:
        some = [(a, 0 if b is None else b) for a, b in zip(exact, rule, strict=True) if (a == b) is right]
        x, y = (np.array(side, dtype=float) + chance.uniform(-0.25, 0.25, len(some)) for side in zip(*some)) if some else ([], [])  # noqa: B905
        style = plots.STYLES[role]
        figure.add_scatter(x=x, y=y, mode="markers", name=f"{name} ({len(some)})",
                           marker={"color": style.colour, "symbol": style.symbol, "size": 8, "opacity": 0.7})  # fmt: skip
    figure.update_layout(title_text=title, template="o1lab", showlegend=True, margin={"r": 40, "t": 110})
    figure.update_layout(legend={"orientation": "h", "y": 1.02, "yanchor": "bottom"})
    figure.update_xaxes(title_text="first fault by exact replay (step)")
    figure.update_yaxes(title_text="step named by the rule (0: none)")
    return figure


def roc_figure(detections: dict[str, tuple[str, Detection]], title: str) -> go.Figure:
    """ROC curves of detectors: name -> (role in the lab's colours, detection)."""
    figure = go.Figure()
    figure.add_scatter(x=[0, 1], y=[0, 1], mode="lines", name="chance", line={"color": "#000000", "dash": "dash"})
    for name, (role, found) in detections.items():
        alarms, hits = plots.downsample(*found.roc())
        style = plots.STYLES[role]
        figure.add_scatter(x=alarms, y=hits, mode="lines", name=f"{name}: {found.auroc.value:.3f}",
                           line={"color": style.colour, "dash": style.dash, "width": 3})  # fmt: skip
    figure.update_layout(title_text=title, template="o1lab", showlegend=True, margin={"r": 40},
                         legend={"x": 0.98, "xanchor": "right", "y": 0.05, "yanchor": "bottom"})  # fmt: skip
    figure.update_xaxes(title_text="right steps called faulty (share)")
    figure.update_yaxes(title_text="faulty steps found (share)")
    return figure


def kinds_figure(groups: dict[str, Iterable[Fault | None]], claimed: dict[str, float], title: str) -> go.Figure:
    """Shares of the kinds of first faults by model, with intervals; ``claimed`` shares (in %) as dashed marks."""
    figure = go.Figure()
    roles = ("broken", "fixed", "control")
    shares: list[tuple[str, str, dict[str, Estimate]]] = [
        (name, roles[place % 3], tally(faults)) for place, (name, faults) in enumerate(groups.items())
    ]
    present = {kind for _, _, found in shares for kind in found} | set(claimed)
    order = sorted(present, key=lambda kind: -max((found[kind].value for *_, found in shares if kind in found), default=0.0))
    for name, role, found in shares:
        style = plots.STYLES[role]
        rows: list[Any] = [found.get(kind) or proportion(0, next(iter(found.values())).n) for kind in order]
        error = {"type": "data", "color": "#1a1a1a", "array": [100 * (row.high - row.value) for row in rows],
                 "arrayminus": [100 * (row.value - row.low) for row in rows]}  # fmt: skip
        figure.add_bar(x=order, y=[100 * row.value for row in rows], name=f"{name} (n={rows[0].n})", error_y=error,
                       marker={"color": style.colour, "line": {"color": "#1a1a1a", "width": style.outline}})  # fmt: skip
    figure.add_scatter(x=list(claimed), y=list(claimed.values()), mode="markers", name="the article",
                       marker={"symbol": "line-ew-open", "size": 44, "color": "#000000", "line": {"width": 4}})  # fmt: skip
    figure.update_layout(title_text=title, template="o1lab", showlegend=True, margin={"r": 40, "t": 110})
    figure.update_layout(legend={"orientation": "h", "y": 1.02, "yanchor": "bottom"})
    figure.update_xaxes(title_text="kind of the first fault")
    figure.update_yaxes(title_text="share of first faults (%)")
    return figure
