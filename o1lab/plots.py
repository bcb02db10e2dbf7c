"""Figures of the lab: one template, fixed colours with a second cue each, and one function that shows them.

Functions return figures; only :func:`show` displays. Titles state the finding, axes carry units, captions the key
number. Colours keep their meaning in every notebook: broken vermilion, fixed blue, prediction black and dashed, control
grey; each has a dash and a marker of its own, so that a grey print and a colour-blind reader lose nothing.
"""

from __future__ import annotations

import os
import textwrap
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import plotly.graph_objects as go
import plotly.io as pio

from o1lab.browser import Painter, find_browser
from o1lab.errors import EstimateError, O1labError

MOST_POINTS = 2000
WIDTH, HEIGHT = 900, 520
TICKS = [digit * 10.0**power for power in range(-6, 9) for digit in (1, 2, 5)]
"""Where a logarithmic axis may have a tick; those outside its range are not drawn."""
PLOT_HEIGHT = 330
TEXT, TITLE = 16, 20
"""Pixels of the plotting area's height, of text (12 pt) and of titles."""
TEXT_COLUMNS, TITLE_COLUMNS = 58, 46
"""Characters a line, so that nothing is cut off in a figure 600 pixels wide."""


class Style(NamedTuple):
    """How one role is drawn: colour, line dash, marker symbol, width of a bar's outline."""

    colour: str
    dash: str
    symbol: str
    outline: int


STYLES = {
    "broken": Style("#D55E00", "solid", "circle", 0),
    "fixed": Style("#0072B2", "solid", "square", 2),
    "ideal": Style("#000000", "dash", "diamond-open", 0),
    "control": Style("#767676", "dot", "triangle-up", 0),
}
COLOURS = {role: style.colour for role, style in STYLES.items()}
PLAIN = {"broken": "broken", "fixed": "fixed", "ideal": "predicted", "control": "control"}

AXIS = {
    "showline": True,
    "linecolor": "#444444",
    "gridcolor": "#e6e6e6",
    "ticks": "outside",
    "zeroline": False,
    "automargin": True,
}
TEMPLATE = go.layout.Template(
    layout={
        "font": {
            "family": "system-ui, -apple-system, Segoe UI, DejaVu Sans, sans-serif",
            "size": TEXT,
            "color": "#1a1a1a",
        },
        "title": {
            "font": {"size": TITLE},
            "x": 0,
            "xref": "container",
            "xanchor": "left",
            "y": 1,
            "yref": "container",
            "yanchor": "top",
            "pad": {"l": 16, "t": 32},
        },
        "paper_bgcolor": "#ffffff",
        "plot_bgcolor": "#ffffff",
        "colorway": [style.colour for style in STYLES.values()],
        "margin": {"l": 80, "r": 130, "t": 70, "b": 70},
        "xaxis": AXIS,
        "yaxis": AXIS,
        "hovermode": "x unified",
        "showlegend": False,
    }
)


class FigureError(O1labError, ValueError):
    """A figure that a reader could not use: no title, an axis without a title, or series that do not fit."""


def register() -> None:
    """Register the template as ``"o1lab"`` and make it plotly's default."""
    pio.templates["o1lab"] = TEMPLATE
    pio.templates.default = "o1lab"


register()


def downsample(x: Sequence[float], y: Sequence[float], most: int = MOST_POINTS) -> tuple[np.ndarray, np.ndarray]:
    """Thin a series to at most ``most`` points, keeping first, last and each bucket's lowest and highest point.

    Parameters
    ----------
    x, y : sequence of float, shape (n,)

    Examples
    --------
    >>> x, y = downsample(range(100_000), [0.0] * 99_999 + [7.0])
    >>> len(x) <= 2000, float(y.max())
    (True, 7.0)
    """
    xs, ys = np.asarray(x), np.asarray(y, dtype=float)
    if xs.shape != ys.shape or xs.ndim != 1:
        raise FigureError(f"x has shape {xs.shape} and y {ys.shape}: give two flat series of equal length")
    if xs.size <= most:
        return xs, ys
    buckets = max(1, (most - 2) // 2)
    edges = np.linspace(0, xs.size, buckets + 1).astype(int)
    keep = {0, xs.size - 1}
    for start, end in zip(edges[:-1], edges[1:], strict=True):
        part = ys[start:end]
        if np.isfinite(part).any():
            keep |= {start + int(np.nanargmin(part)), start + int(np.nanargmax(part))}
    index = np.array(sorted(keep))
    return xs[index], ys[index]


def broken_vs_fixed(
    x: Sequence[Any], broken: Sequence[float], fixed: Sequence[float], *, title: str, x_title: str, y_title: str,
    ideal: Sequence[float] | None = None, control: Sequence[float] | None = None,
    labels: Mapping[str, str] | None = None, kind: str = "line",
    bands: Mapping[str, tuple[Sequence[float], Sequence[float]]] | None = None, log_y: bool = False,
) -> go.Figure:  # fmt: skip
    """The shape of every signature figure: broken and fixed on the same axes, with prediction and control.

    Parameters
    ----------
    x : sequence, shape (n,)
        Positions (numbers for ``kind="line"``, names for ``kind="bar"``).
    broken, fixed, ideal, control : sequence of float, shape (n,)
    labels : mapping, optional
        Direct labels by role; default ``broken, fixed, predicted, control``.
    kind : {"line", "bar"}
    bands : mapping of role to (low, high), optional
        95 % intervals: shaded beside lines, error bars on bars.
    log_y : bool
        Logarithmic y axis.

    Raises
    ------
    FigureError
        Series of unequal length, an unknown role or kind.

    Examples
    --------
    >>> figure = broken_vs_fixed([0, 1], [0, 5], [0, 0], title="it leaks", x_title="requests", y_title="growth (KiB)")
    >>> [trace.name for trace in figure.data]
    ['broken', 'fixed']
    """
    series = {"control": control, "broken": broken, "fixed": fixed, "ideal": ideal}  # the dashes go on top
    names = {**PLAIN, **(labels or {})}
    unknown = [role for role in [*(labels or {}), *(bands or {})] if role not in STYLES]
    if unknown or kind not in ("line", "bar"):
        raise FigureError(f"unknown role or kind {unknown or kind!r}; roles: {', '.join(STYLES)}; kinds: line, bar")
    figure = go.Figure()
    ends: list[tuple[float, float, str]] = []
    for role, values in series.items():
        if values is None:
            continue
        if len(values) != len(x):
            raise FigureError(f"{role} has {len(values)} points, x has {len(x)}")
        style, name = STYLES[role], names[role]
        low, high = (bands or {}).get(role, (None, None))
        if kind == "bar":
            error = None
            if low is not None:
                spread = {"array": np.subtract(high, values), "arrayminus": np.subtract(values, low)}
                error = {"type": "data", "color": "#1a1a1a", **spread}
            marker = {"color": style.colour, "line": {"color": "#1a1a1a", "width": style.outline}}
            figure.add_bar(
                x=list(x), y=list(values), name=name, error_y=error, marker=marker,
                text=[name] * len(x), textposition="auto", insidetextanchor="start",
            )  # fmt: skip
            continue
        if low is not None:
            _band(figure, x, low, high, style.colour)
        xs, ys = downsample(x, values)
        marks = role in ("broken", "fixed") and len(xs) <= 60
        figure.add_scatter(
            x=xs, y=ys, name=name, mode="lines+markers" if marks else "lines",
            line={"color": style.colour, "dash": style.dash, "width": 3 if role in ("broken", "fixed") else 2},
            marker={"symbol": style.symbol, "size": 7},
        )  # fmt: skip
        ends.append((float(xs[-1]), float(ys[-1]), role))
    if kind == "line":
        _label_ends(figure, ends, names, log_y)
        figure.update_xaxes(range=_span([float(value) for value in x]))
    else:
        figure.update_layout(showlegend=True, legend={"orientation": "h", "y": 1.02, "yanchor": "bottom"}, bargap=0.3)
        figure.update_layout(margin={"r": 40, "t": 100}, xaxis_type="category")
    figure.update_layout(title_text=titled(title), template="o1lab")
    figure.update_xaxes(title_text=x_title)
    figure.update_yaxes(title_text=y_title, type="log" if log_y else "linear")
    return figure


def _band(figure: go.Figure, x: Sequence[float], low: Sequence[float], high: Sequence[float], colour: str) -> None:
    red, green, blue = (int(colour[index : index + 2], 16) for index in (1, 3, 5))
    fill = {"fill": "tonexty", "fillcolor": f"rgba({red},{green},{blue},0.18)"}
    for edge, shade in ((high, {}), (low, fill)):
        xs, ys = downsample(x, edge)
        line = {"color": colour, "width": 0}
        figure.add_scatter(x=xs, y=ys, mode="lines", line=line, hoverinfo="skip", showlegend=False, **shade)


def _span(x: Sequence[float]) -> list[float]:
    """Range of the x axis: the data and 2 % to each side, so that the lines' names stand in the margin."""
    low, high = min(x), max(x)
    room = 0.02 * ((high - low) or 1.0)
    return [low - room, high + room]


def _label_ends(figure: go.Figure, ends: list[tuple[float, float, str]], names: Mapping[str, str], log_y: bool) -> None:
    """Write each line's name at its right end, moved apart so that labels never lie on one another."""

    def height(value: float) -> float:
        return float(np.log10(max(value, 1e-12))) if log_y else value

    values = [height(float(v)) for trace in figure.data for v in np.asarray(trace.y, dtype=float) if np.isfinite(v)]
    span = (max(values) - min(values)) or 1.0
    placed: list[float] = []
    for x, y, role in sorted(ends, key=lambda end: height(end[1])):
        at = height(y)
        spot = max(at, placed[-1] + 0.065 * span) if placed else at
        placed.append(spot)
        shift = (spot - at) / span * 0.85 * PLOT_HEIGHT
        figure.add_annotation(
            x=x, y=at, xanchor="left", xshift=8, yshift=shift, showarrow=False, text=f"<b>{names[role]}</b>",
            font={"color": STYLES[role].colour, "size": TEXT},
        )  # fmt: skip
    figure.update_layout(margin={"r": 28 + round(9.5 * max(len(names[role]) for _, _, role in ends))})


_painters: dict[str, Painter] = {}
_failed: set[str] = set()


def png(figure: go.Figure, *, width: int = WIDTH, height: int | None = None, seconds: float = 30.0) -> bytes | None:
    """The figure as PNG bytes at twice the given size in pixels, or ``None``.

    Without a browser it is ``None`` silently. A browser that fails or does not answer within ``seconds`` is warned
    about once and not tried again in this process, so that no picture ever costs a measurement.
    """
    browser = find_browser()
    if browser is None or browser in _failed:
        return None
    height = height or int(figure.layout.height or HEIGHT)
    try:
        if browser not in _painters or _painters[browser].pid != os.getpid():
            _painters[browser] = Painter(browser)
        return _painters[browser].paint(figure.to_dict(), width, height, scale=2, seconds=seconds)
    except Exception as error:  # noqa: BLE001 (each layer has its own errors; no PNG must cost a measurement; it is said)
        _failed.add(browser)
        _painters.pop(browser).close()
        reason = str(error.args[0] if error.args else error).partition("\n")[0]
        warnings.warn(
            f"no PNG of the figures from here on: {browser} failed with {type(error).__name__}: {reason}; "
            "name another browser in O1LAB_BROWSER, or 'none' to do without",
            stacklevel=2,
        )
        return None


def check(figure: go.Figure) -> None:
    """Refuse a figure that a reader could not use.

    Raises
    ------
    FigureError
        No title, an axis without a title, or a trace of more than 2 000 points (:func:`downsample` thins it).
    """
    layout = figure.layout
    if not layout.title.text:
        raise FigureError("the figure has no title: state the finding in it")
    for axis in (layout.xaxis, layout.yaxis):
        if not axis.title.text:
            raise FigureError(f"the {axis.plotly_name} has no title: name the quantity and its unit")
    for trace in figure.data:
        for part in ("x", "y"):
            values = getattr(trace, part, None)
            if values is not None and len(values) > MOST_POINTS:
                raise FigureError(
                    f"trace {trace.name!r} has {len(values)} points; plots.downsample keeps {MOST_POINTS}"
                )


def bundle(figure: go.Figure, caption: str) -> dict[str, Any]:
    """The figure as one display bundle: plotly JSON, the caption as text, and a PNG where a browser is found."""
    import json

    check(figure)
    if not caption.strip():
        raise EstimateError("a figure needs a caption that says its key number in words")
    data: dict[str, Any] = {
        "application/vnd.plotly.v1+json": {**json.loads(figure.to_json()), "config": {"responsive": True}},
        "text/plain": caption,
    }
    image = png(figure)
    if image is not None:
        import base64

        data["image/png"] = base64.b64encode(image).decode()
    return data


def show(figure: go.Figure, caption: str, name: str | None = None) -> dict[str, Any]:
    """Publish a figure with its caption and return the bundle; outside a notebook the caption is printed.

    The figure shown carries the caption below its plot, so that it can be read wherever the figure is drawn.
    """
    from o1lab.progress import in_kernel

    shown = captioned(figure, caption)
    data = bundle(shown, caption)
    if in_kernel():
        from IPython.display import display

        # The picture has twice the pixels; without its width it is shown at natural size, cut at the right.
        about = {"o1lab": {"figure": name or "", "caption": caption}, "image/png": {"width": WIDTH}}
        display(data, raw=True, metadata=about)
    else:
        print(f"figure {name or ''}: {caption}")
    return data


def titled(title: str, columns: int = TITLE_COLUMNS) -> str:
    """A figure's title, broken into lines; not at hyphens, as the report joins the lines again.

    >>> titled("votes and re-grounding", 12)
    'votes and<br>re-grounding'
    """
    return "<br>".join(textwrap.wrap(title, columns, break_on_hyphens=False))


def captioned(figure: go.Figure, caption: str) -> go.Figure:
    """A copy of ``figure`` with ``caption`` wrapped below its plot, under the axis title."""
    copy = go.Figure(figure)
    title = titled((figure.layout.title.text or "").replace("<br>", " "))
    lines = textwrap.wrap(caption, TEXT_COLUMNS)
    copy.add_annotation(
        text="<br>".join(lines), xref="paper", yref="paper", x=0, y=0, xanchor="left", yanchor="top", yshift=-76,
        showarrow=False, align="left", font={"size": TEXT, "color": "#444444"}, name="caption",
    )  # fmt: skip
    top = 22 + 27 * (title.count("<br>") + bool(title)) + (46 if figure.layout.showlegend else 16)
    bottom = 96 + 22 * len(lines)
    height = max(top + PLOT_HEIGHT + bottom, figure.layout.height or 0)  # a figure of several panels may ask for more
    copy.update_layout(title_text=title, margin={"t": top, "b": bottom}, height=height)
    return copy
