"""The figure of fused attention: how near each body comes to the copy rate, and how near its bytes would let it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import plotly.graph_objects as go

from o1lab import plots
from o1lab.attention.bench import Row
from o1lab.attention.judge import share
from o1lab.attention.traffic import Workload
from o1lab.stats import Estimate

BAR, LOWEST = 0.2, 15


class Body(NamedTuple):
    """One colour of bars: its name, its role in ``plots.STYLES``, and a pattern as second cue ("" is none)."""

    name: str
    role: str
    pattern: str = ""


BODIES: dict[Body, tuple[str, Callable[[Workload], int]]] = {
    Body("gather + SDPA", "broken"): ("gather + SDPA", Workload.gathered),
    Body("three stages", "broken", "/"): ("three stages, contiguous", Workload.three_stage),
    Body("paged kernel", "fixed"): ("paged kernel", Workload.fused),
    Body("cuDNN", "control"): ("SDPA cuDNN, contiguous", lambda work: work.kv_bytes + work.io_bytes),
}
"""What the figure of shares compares: body → its row in the bench, and the bytes that it moves."""


def allowed(works: Mapping[str, Workload]) -> dict[str, dict[Body, float]]:
    """The most that each body's bytes allow, in % of the copy rate, by shape.

    Examples
    --------
    >>> [round(most) for most in allowed({"8x16384": Workload(8, 16384)})["8x16384"].values()]
    [33, 94, 100, 100]
    """
    return {
        text: {body: 100 * work.kv_bytes / moved(work) for body, (_, moved) in BODIES.items()}
        for text, work in works.items()
    }


def measured(tables: Mapping[str, Sequence[Row]]) -> dict[str, dict[Body, Estimate]]:
    """Shares of the copy rate of the bodies that ran, in %, by shape."""
    found: dict[str, dict[Body, Estimate]] = {}
    for text, rows in tables.items():
        shares = {row.name: share(row) for row in rows}
        ran = {body: shares.get(name) for body, (name, _) in BODIES.items()}
        found[text] = {body: one for body, one in ran.items() if one is not None}
    return found


def _estimate(value: Estimate | float) -> Estimate:
    return value if isinstance(value, Estimate) else Estimate(value, value, value, 1, "%")


def ceiling(
    bars: Mapping[str, Mapping[Body, Estimate | float]], title: str, y_title: str, *,
    allowed: Mapping[str, Mapping[Body, float]] | None = None,
) -> go.Figure:  # fmt: skip
    """Shares of the copy rate (%) by shape and body, the ceiling dashed; measured ones (estimates) have whiskers.

    ``allowed`` marks with an open diamond ("by bytes") the most that a body's bytes allow.

    Examples
    --------
    >>> bodies = {Body("gather", "broken"): 10.0, Body("pages", "fixed"): Estimate(99, 98, 100, 9, "%")}
    >>> figure = ceiling({"8x16k": bodies}, "Pages win", "share (%)")
    >>> [trace.name for trace in figure.data]
    ['gather', 'pages', 'copy rate']
    """
    figure, kinds = go.Figure(), list(dict.fromkeys(body for bodies in bars.values() for body in bodies))
    marks: list[tuple[float, float]] = []
    for place, body in enumerate(kinds):
        style, shift = plots.STYLES[body.role], (place - (len(kinds) - 1) / 2) * BAR
        found = [(at, _estimate(one[body])) for at, one in enumerate(bars.values()) if body in one]
        heights, array = [one.value for _, one in found], [one.high - one.value for _, one in found]
        whiskers = {"array": array, "arrayminus": [one.value - one.low for _, one in found]}
        marker = {"color": style.colour, "line": {"color": "#1a1a1a", "width": style.outline}}
        if body.pattern:
            marker["pattern"] = {"shape": body.pattern, "bgcolor": style.colour, "fgcolor": "#ffffff", "size": 8}
        figure.add_bar(
            x=[at + shift for at, _ in found], y=heights, name=body.name, width=BAR, marker=marker,
            error_y={"type": "data", "color": "#1a1a1a", **whiskers} if any(array) else None,
        )  # fmt: skip
        for (at, _), height in zip(found, heights, strict=True):  # inside a bar, or above one that is too short
            y, lift = (height / 2, 0) if height > LOWEST else (height, 14)
            figure.add_annotation(x=at + shift, y=y, text=f"{height:.0f}", showarrow=False, yshift=lift,
                                  font={"size": 14, "color": "#1a1a1a"}, bgcolor="#ffffff", borderpad=2)  # fmt: skip
        marks += [(at + shift, one[body]) for at, one in enumerate((allowed or {}).values()) if body in one]
    edge = [-0.5, len(bars) - 0.5]
    line = {"color": plots.COLOURS["ideal"], "dash": "dash", "width": 2}
    figure.add_scatter(x=edge, y=[100, 100], name="copy rate", mode="lines", line=line)
    if marks:
        marker = {"symbol": "diamond-open", "size": 11, "color": "#000000", "line": {"width": 2}}
        x, y = zip(*marks, strict=True)
        figure.add_scatter(x=x, y=y, mode="markers", name="by bytes", marker=marker)
    legend = {"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0, "xanchor": "left"}
    figure.update_layout(title_text=plots.titled(title), template="o1lab", showlegend=True, legend=legend,
                         barmode="overlay", margin={"r": 40}, hovermode="closest")  # fmt: skip
    figure.update_xaxes(title_text="sequences × tokens of each", tickvals=list(range(len(bars))), ticktext=list(bars),
                        range=edge)  # fmt: skip
    figure.update_yaxes(title_text=y_title, range=[0, 118])
    return figure
