"""A figure of latencies from the middle far into the tail: 50, 90, 99 and 99.9 % stand at like distances."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import plotly.graph_objects as go

from o1lab import plots
from o1lab.errors import EstimateError

SHARES = (50, 90, 99, 99.9, 99.99)


def tails(
    arms: Mapping[str, tuple[str, Sequence[float]]], *, title: str, what: str = "steps", unit: str = "ms"
) -> go.Figure:
    """Quantiles of each arm's latencies, on the same axes, as far into the tail as the shortest series goes.

    Parameters
    ----------
    arms : mapping
        Of a role (``"broken"``, ``"fixed"``, ``"control"``, ``"ideal"``) to a name and latencies.

    Examples
    --------
    >>> figure = tails({"broken": ("cat", range(1, 1000)), "fixed": ("pages", [1.0] * 1000)}, title="It falls")
    >>> list(figure.layout.xaxis.ticktext)
    ['50 %', '90 %', '99 %']
    """
    least = min((len(values) for _, values in arms.values()), default=0)
    if least < 20 or not {"broken", "fixed"} <= set(arms):
        raise EstimateError(f"{least} latencies of {', '.join(arms) or 'nothing'}: give 20 and more, broken and fixed")
    depth = np.linspace(-np.log10(0.5), np.log10(least), 240)  # of the tail: 2 is the slowest hundredth
    series = {role: np.quantile(values, 1 - 10.0**-depth) for role, (_, values) in arms.items()}
    figure = plots.broken_vs_fixed(
        depth, **series, labels={role: name for role, (name, _) in arms.items()}, title=title,
         x_title=f"share of {what} that are at least as fast", y_title=f"time ({unit})", log_y=True,
    )  # fmt: skip
    places = {f"{share:g} %": -np.log10(1 - share / 100) for share in SHARES}
    shown = {text: place for text, place in places.items() if place <= depth[-1] + 1e-9}
    figure.update_xaxes(tickvals=list(shown.values()), ticktext=list(shown))
    ends = np.concatenate(list(series.values()))
    near = [tick for tick in plots.TICKS if ends.min() / 1.5 < tick < ends.max() * 1.5]
    figure.update_yaxes(tickvals=near, ticktext=[f"{tick:,g}" for tick in near])
    return figure
