"""Figures of the pool: memory over time, and how long failed requests wait."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go

from o1lab import plots
from o1lab.errors import EstimateError

GIB, MOST = 2**30, 600


def memory(
    live: Any, taken: Mapping[str, Any], names: Mapping[str, str], *, title: str, x_title: str = "steps of the run (%)"
) -> go.Figure:  # fmt: skip
    """Bytes taken while the same traffic is served, by role (``"broken"``, ``"fixed"``, ``"control"``), and live ones.

    Each series has its own number of steps and is laid over the same length; what is drawn is the largest value of each
    piece, so that no peak is lost.

    Examples
    --------
    >>> figure = memory([1, 2], {"broken": [3, 4, 5], "fixed": [2, 2]}, {"broken": "cat"}, title="It takes more")
    >>> [trace.name for trace in figure.data]
    ['cat', 'fixed', 'tokens']
    """
    series = {"ideal": live, **taken}
    count = min(MOST, *(len(values) for values in series.values()))
    drawn = {}
    for role, values in series.items():
        edges = np.linspace(0, len(values), count + 1).astype(int)[:-1]
        drawn[role] = np.maximum.reduceat(np.asarray(values, dtype=float), edges) / GIB
    figure = plots.broken_vs_fixed(
        np.linspace(0, 100, count), drawn["broken"], drawn["fixed"], ideal=drawn["ideal"], control=drawn.get("control"),
        labels={"ideal": "tokens", **names}, title=title, x_title=x_title, y_title="memory (GiB)",
    )  # fmt: skip
    figure.update_yaxes(rangemode="tozero")
    return figure


def pauses(times: Mapping[str, Sequence[float]], names: Mapping[str, str], limit_us: float, *, title: str) -> go.Figure:
    """Share of failed requests that waited longer than so many µs, by role, both axes logarithmic, and the limit.

    Examples
    --------
    >>> figure = pauses({"broken": [500, 900], "fixed": [20, 30]}, {}, 100, title="It waits")
    >>> [trace.name for trace in figure.data]
    ['broken', 'fixed']
    """
    figure = go.Figure()
    for role, values in times.items():
        if role not in plots.STYLES or not len(values):
            raise EstimateError(f"{role!r} with {len(values)} pauses: one of {', '.join(plots.STYLES)}, with some")
        style, name, ordered = plots.STYLES[role], names.get(role, role), np.sort(np.asarray(values, dtype=float))
        longer = 100 * (1 - np.arange(len(ordered)) / len(ordered))
        keep = np.unique(np.linspace(0, len(ordered) - 1, MOST).astype(int))
        figure.add_scatter(
            x=ordered[keep], y=longer[keep], name=name, mode="lines",
            line={"color": style.colour, "dash": style.dash, "width": 3, "shape": "hv"},
        )  # fmt: skip
        middle = float(np.median(ordered))
        figure.add_annotation(
            x=np.log10(middle), y=np.log10(50), text=name, font={"color": style.colour}, showarrow=False,
            xanchor="left", yanchor="bottom", xshift=6,
        )  # fmt: skip
    figure.add_vline(x=limit_us, line={"color": plots.COLOURS["ideal"], "dash": "dash", "width": 2})
    figure.add_annotation(
        x=np.log10(limit_us), y=1, yref="paper", text=f"{limit_us:g} µs", showarrow=False, yanchor="bottom",
    )  # fmt: skip
    figure.update_layout(title_text=plots.titled(title), template="o1lab", hovermode="closest")
    ticks = {"type": "log", "tickvals": plots.TICKS, "ticktext": [f"{tick:,g}" for tick in plots.TICKS]}
    figure.update_xaxes(title_text="pause of a failed request (µs)", **ticks)
    figure.update_yaxes(title_text="longer than that (%)", **ticks)
    return figure
