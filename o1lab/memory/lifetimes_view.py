"""A figure of block lifetimes that stays readable from ten blocks to a million.

Above: bytes in use over time, stacked by how long their blocks live, so that what is kept lies at the bottom and what
comes and goes on top. Below: the blocks that hold most for longest, one bar each.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from o1lab import plots
from o1lab.memory.lifetimes import Lifetimes

MIB = 1 << 20
MOST_BARS = 10
MOST_STEPS = 600


class _Class(NamedTuple):
    name: str
    colour: str
    pattern: str


KEPT = _Class("never freed", plots.COLOURS["broken"], "")
PARKED = _Class("freed, awaited", "#1a1a1a", "/")
SHADES = ("#4d4d4d", "#8c8c8c", "#c9c9c9")


def drawn(lives: Lifetimes) -> go.Figure:
    """See :func:`o1lab.memory.lifetimes.figure`."""
    figure = make_subplots(
        rows=2, cols=1, shared_xaxes=True, row_heights=[0.56, 0.44], vertical_spacing=0.09,
    )  # fmt: skip
    # counted from the first entry: microseconds since 1970 leave too few digits
    begin = np.nan_to_num(lives.allocated_us - lives.begin_us, nan=0.0)
    last = lives.end_us - lives.begin_us
    end = np.nan_to_num(lives.requested_us - lives.begin_us, nan=last)
    gone = np.nan_to_num(lives.completed_us - lives.begin_us, nan=last)
    unit, scale = _unit(lives.end_us - lives.begin_us)
    classes, member = _classes(lives)
    edges = _edges(lives)
    moments, running = _running(begin, np.where(lives.parked, gone, end), lives.size)
    peak = int(running.max()) if len(running) else 0
    for index, kind in enumerate(classes):
        chosen = member == index
        held = _held(begin[chosen], end[chosen], lives.size[chosen], edges)
        _area(figure, kind, edges, held, scale)
    if lives.parked.any():
        chosen = lives.parked
        held = _held(end[chosen], gone[chosen], lives.size[chosen], edges)
        _area(figure, PARKED, edges, held, scale)
    _peak_line(figure, lives, moments, running, edges, scale)
    _bars(figure, lives, begin, end, gone, scale, member, classes)
    _labels(figure)
    kept = int(lives.size[np.isnan(lives.requested_us)].sum())
    rest = f"{_bytes(kept)} are never freed" if kept else "all are freed"
    title = f"{len(lives):,} blocks hold at most {_bytes(peak)}; {rest}".replace(",", " ")
    title = next((note.split(",")[0].capitalize() for note in lives.notes if note.startswith("no history")), title)
    span = (lives.end_us - lives.begin_us) / scale
    figure.update_layout(
        template="o1lab", title_text=plots.titled(title), height=680,
        barmode="overlay", hovermode="closest", margin={"l": 96, "r": 190, "t": 84, "b": 70},
    )  # fmt: skip
    figure.update_xaxes(range=[-0.01 * span, 1.01 * span], title_text=f"time since the first entry ({unit})")
    figure.update_xaxes(title_text=f"time since the first entry ({unit})", row=2, col=1)
    figure.layout.xaxis.title.text = f"time since the first entry ({unit})"
    figure.layout.xaxis.title.font = {"size": 1, "color": "rgba(0,0,0,0)"}  # said once, below; named for the reader
    figure.update_yaxes(title_text="in use (MiB)", rangemode="tozero", row=1, col=1)
    return figure


def _unit(span_us: float) -> tuple[str, float]:
    for name, size in (("min", 6e7), ("s", 1e6), ("ms", 1e3)):
        if span_us >= 3 * size:
            return name, size
    return "µs", 1.0


def _bytes(value: float) -> str:
    for name, size in (("GiB", 1 << 30), ("MiB", MIB), ("KiB", 1 << 10)):
        if value >= size:
            return f"{value / size:.3g} {name}" if value < 1000 * size else f"{value / size:.0f} {name}"
    return f"{value:.0f} B"


def _time(value_us: float) -> str:
    for name, size in (("min", 6e7), ("s", 1e6), ("ms", 1e3)):
        if value_us >= size:
            return f"{value_us / size:.3g} {name}"
    return f"{value_us:.0f} µs"


def _classes(lives: Lifetimes) -> tuple[list[_Class], np.ndarray]:
    """Never freed, then freed blocks in three thirds of the byte-time they take, longest lives first."""
    freed = ~np.isnan(lives.requested_us)
    member = np.zeros(len(lives), int)
    if not freed.any():
        return [KEPT], member
    lived = np.maximum(lives.lived_us, 0)
    order = np.argsort(lived[freed])
    weight = np.cumsum((lives.size * lived)[freed][order] + 1e-9)
    thirds = np.minimum(np.searchsorted(weight, weight[-1] * np.array([1, 2]) / 3), len(weight) - 1)
    low, high = lived[freed][order][thirds].tolist()
    grid = np.sort(np.concatenate([10.0 ** np.arange(0, 16), 3 * 10.0 ** np.arange(0, 16)]))
    below, above = max(np.searchsorted(grid, low, side="right") - 1, 0), np.searchsorted(grid, high)
    cuts = sorted({float(grid[below]), float(grid[above])})
    longest = float(lived[freed].max())
    if cuts[-1] >= longest and len(cuts) > 1:
        cuts.pop()
    member[freed] = len(cuts) + 1 - np.searchsorted(cuts, lived[freed], side="left")
    names = [f"over {_time(cuts[-1])}"]
    names += [f"{_time(low)} to {_time(high)}" for low, high in zip(cuts[-2::-1], cuts[:0:-1], strict=False)]
    names.append(f"up to {_time(cuts[0])}")
    found = [KEPT, *(_Class(name, shade, "") for name, shade in zip(names, SHADES, strict=False))]
    return found, member


def _edges(lives: Lifetimes) -> np.ndarray:
    span = max(lives.end_us - lives.begin_us, 1.0)
    return np.linspace(0, span, MOST_STEPS)


def _held(begin: np.ndarray, end: np.ndarray, size: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """Mean bytes held between each edge and the next (the last: at the end); no short block is lost between points."""
    width = np.diff(edges)
    index = np.arange(len(edges) - 1)
    total = np.zeros(len(edges) + 1)
    for moment, sign in ((begin, 1.0), (end, -1.0)):
        spot = np.clip(np.searchsorted(edges, moment, side="right") - 1, 0, len(edges) - 2)
        inside = (edges[spot + 1] - moment) / width[spot]
        np.add.at(total, spot, sign * size * inside)
        np.add.at(total, spot + 1, sign * size * (1 - inside))
    held = np.maximum(np.cumsum(total)[: len(edges) - 1][index], 0)
    return np.append(held, held[-1] if len(held) else 0)


def _running(begin: np.ndarray, end: np.ndarray, size: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Moments at which the bytes in use change, and the bytes after each."""
    moments, change = np.concatenate([begin, end]), np.concatenate([size, -size])
    order = np.lexsort((change, moments))
    return moments[order], np.cumsum(change[order])


def _peak_line(
    figure: go.Figure, lives: Lifetimes, moments: np.ndarray, running: np.ndarray, edges: np.ndarray, scale: float
) -> None:
    """Most bytes in use between each edge and the next: the areas show means, which hide short peaks."""
    if not len(running):
        return
    spot = np.clip(np.searchsorted(edges, moments, side="right") - 1, 0, len(edges) - 1)
    most = np.zeros(len(edges))
    before = np.searchsorted(moments, edges, side="left") - 1
    most[before >= 0] = running[before[before >= 0]]
    np.maximum.at(most, spot, running)
    x = edges / scale
    figure.add_scatter(
        x=x, y=most / MIB, name="peak", mode="lines", line={"width": 1, "color": "#1a1a1a", "shape": "hv"},
        hovertemplate="peak %{y:.4g} MiB", row=1, col=1,
    )  # fmt: skip
    top = int(np.argmax(most))
    figure.add_annotation(
        x=x[top], y=most[top] / MIB, text=f"peak {_bytes(running.max())}", yshift=11, showarrow=False,
        xanchor="left" if top < 0.2 * len(x) else "right" if top > 0.8 * len(x) else "center",
        font={"size": 14, "color": "#1a1a1a"}, row=1, col=1,
    )  # fmt: skip


def _area(figure: go.Figure, kind: _Class, edges: np.ndarray, held: np.ndarray, scale: float) -> None:
    look = {"shape": kind.pattern, "fgcolor": kind.colour, "bgcolor": "#ffffff", "size": 6}
    pattern = look if kind.pattern else None
    figure.add_scatter(
        x=edges / scale, y=held / MIB, name=kind.name, stackgroup="held", mode="lines",
        line={"width": 0.5, "color": kind.colour, "shape": "hv"}, fillcolor=kind.colour, fillpattern=pattern,
        hovertemplate="%{y:.3g} MiB", row=1, col=1,
    )  # fmt: skip


def _labels(figure: go.Figure) -> None:
    """Each area's name beside it, at the height of its widest place near the right end, never on one another."""
    areas = [trace for trace in figure.data if trace.type == "scatter" and trace.stackgroup]
    heights = np.array([trace.y for trace in areas])
    top = float(heights.sum(axis=0).max()) or 1.0
    tail = heights[:, -max(1, heights.shape[1] // 12) :].mean(axis=1)
    centre = np.cumsum(tail) - tail / 2
    placed = -1.0
    for trace, at, most in zip(areas, centre, heights.max(axis=1), strict=True):
        if most <= 0:
            continue
        spot = max(float(at), placed + 0.085 * top) if placed >= 0 else float(at)
        placed = spot
        dark = trace.line.color if trace.line.color not in SHADES[1:] else "#555555"
        figure.add_annotation(
            x=1.0, xref="paper", y=min(spot, top), yref="y", xanchor="left", xshift=8, showarrow=False,
            text=f"<b>{trace.name}</b>", font={"color": dark, "size": 14},
        )  # fmt: skip


def _bars(
    figure: go.Figure, lives: Lifetimes, begin: np.ndarray, end: np.ndarray, gone: np.ndarray, scale: float,
    member: np.ndarray, classes: list[_Class],
) -> None:  # fmt: skip
    held = lives.size * (end - begin + np.where(lives.parked, gone - end, 0))
    chosen = np.argsort(-held, kind="stable")[:MOST_BARS]
    chosen = chosen[np.argsort(begin[chosen], kind="stable")][::-1]
    streams = {stream: number for number, stream in enumerate(np.unique(lives.stream))}  # they are pointers: 0, 1, …
    for row, block in enumerate(chosen):
        kind = classes[member[block]]
        where = lives.sites[lives.site[block]] if lives.site[block] >= 0 else f"stream {streams[lives.stream[block]]}"
        spans = [(begin[block], end[block], kind)]
        if lives.parked[block]:
            spans.append((end[block], gone[block], PARKED))
        hover = f"{where}: {_bytes(lives.size[block])}, lived {_time(end[block] - begin[block])}<extra></extra>"
        for left, right, look in spans:
            pattern = {"shape": look.pattern, "fgcolor": look.colour, "bgcolor": "#ffffff"} if look.pattern else None
            marker = {"color": look.colour, "line": {"width": 0}, "pattern": pattern}
            figure.add_bar(
                x=[(right - left) / scale], base=[left / scale], y=[row], orientation="h",
                width=0.72, marker=marker, name=look.name, hovertemplate=hover, row=2, col=1,
            )  # fmt: skip
        _say(figure, row, spans, f"{_time(end[block] - begin[block])} · {where}", lives, scale)
    ticks = [_bytes(lives.size[block]) for block in chosen]
    figure.update_yaxes(
        tickvals=list(range(len(chosen))), ticktext=ticks, tickfont={"size": 12}, title_text="most bytes × time",
        title_standoff=6, range=[-0.6, max(len(chosen), 3) - 0.4], showgrid=False, row=2, col=1,
    )  # fmt: skip


def _say(
    figure: go.Figure, row: int, spans: list[tuple[float, float, _Class]], text: str, lives: Lifetimes, scale: float
) -> None:
    """Lifetime and place of a block beside its bar where there is room, else inside it."""
    left, right = spans[0][0], spans[-1][1]
    span = max(lives.end_us - lives.begin_us, 1.0)
    text = text if len(text) <= 44 else text[:43] + "…"
    if right - left > 0.33 * span:
        light = spans[0][2].colour != SHADES[0]
        at, anchor, shift, colour = left, "left", 6, "#1a1a1a" if light else "#ffffff"
    elif right < span - left:
        at, anchor, shift, colour = right, "left", 5, "#1a1a1a"
    else:
        at, anchor, shift, colour = left, "right", -5, "#1a1a1a"
    figure.add_annotation(
        x=at / scale, y=row, text=text, xanchor=anchor, xshift=shift, showarrow=False,
        font={"size": 12, "color": colour}, row=2, col=1,
    )  # fmt: skip
