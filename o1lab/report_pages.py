"""A notebook as offline HTML pages: nbconvert's cells inside the report's own page, figures as plotly data."""

from __future__ import annotations

import json
import re
from html import escape, unescape
from pathlib import Path
from typing import Any

import nbformat

from o1lab.errors import RecordError

PLOTLY = "application/vnd.plotly.v1+json"
PLOT_PX = 440
"""Height of a figure with its axes, without title, caption and legend."""


def safe_json(content: Any) -> str:
    """JSON that can stand inside a ``<script type="application/json">``: nothing in it can end the element.

    Examples
    --------
    >>> safe_json({"title": "</script>"})
    '{"title":"\\\\u003c/script>"}'
    """
    text = json.dumps(content, separators=(",", ":"), ensure_ascii=False)
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def undressed(figure: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """The figure without the title and caption drawn into it, and its title as plain text.

    On a page both are text beside the plot, which is readable at any width; a picture keeps its own.
    """
    layout = dict(figure.get("layout") or {})
    title = layout.pop("title", None) or {}
    words = str(title.get("text") or "") if isinstance(title, dict) else str(title)
    layout["annotations"] = [note for note in layout.get("annotations") or [] if note.get("name") != "caption"]
    template = (layout.get("template") or {}).get("layout") or {}
    top = 16 if layout.get("showlegend", template.get("showlegend")) is False else 40
    margin = {**(template.get("margin") or {}), **(layout.get("margin") or {}), "t": top, "b": 70}
    return {**figure, "layout": {**layout, "margin": margin, "height": PLOT_PX + top}}, _text(words)


def _text(words: str) -> str:
    """Plotly's pseudo-HTML as one line of plain text."""
    return " ".join(unescape(re.sub(r"<[^>]*>", " ", words)).split())


def figure_html(figure: dict[str, Any], caption: str, image: str | None, ident: str) -> str:
    """One ``<figure>``: a picture until plotly has drawn its data in the picture's place; title and caption as text.

    Parameters
    ----------
    figure : dict
        Plotly JSON.
    image : str or None
        Address of the PNG, ``None`` without one.
    """
    plain, title = undressed(figure)
    content = safe_json({"data": plain.get("data", []), "layout": plain["layout"]})
    picture = f'<div class="picture"><img src="{escape(image)}" alt="{escape(caption)}"></div>' if image else ""
    return (
        f'<figure class="plot" id="{escape(ident)}">{picture}<p class="figure-title">{escape(title)}</p>'
        f'<div class="drawing" role="img" aria-label="{escape(caption)}" hidden></div>'
        f'<script type="application/json">{content}</script><figcaption>{escape(caption)}</figcaption></figure>'
    )


def kept_figure(run_dir: Path, entry: dict[str, Any], ident: str) -> str:
    """A figure that the record names, from ``figures/``.

    Raises
    ------
    RecordError
        If its JSON is missing or unreadable.
    """
    try:
        figure = json.loads((run_dir / str(entry["json"])).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RecordError(f"figure {entry['json']} cannot be read ({error}); run its notebook again") from error
    image = str(entry["png"]) if entry.get("png") and (run_dir / str(entry["png"])).is_file() else None
    return figure_html(figure, str(entry["caption"]), image, ident)


def read_notebook(path: Path) -> nbformat.NotebookNode:
    """Read an executed notebook; :class:`RecordError` if it is no notebook."""
    try:
        return nbformat.read(path, as_version=4)
    except Exception as error:
        line = str(error).partition("\n")[0][:200]
        raise RecordError(f"{path.name} cannot be read ({type(error).__name__}: {line}); run it again") from error


def title_of(notebook: nbformat.NotebookNode, default: str) -> str:
    """The first level-one heading."""
    lines = (line for cell in notebook.cells if cell.cell_type == "markdown" for line in cell.source.splitlines())
    return next((line[2:].strip() for line in lines if line.startswith("# ")), default)


def body(notebook: nbformat.NotebookNode, name: str, run_dir: Path, *, code: bool) -> str:
    """The cells as HTML, with or without code; figures are drawn by the page's one plotly.js."""
    from nbconvert import HTMLExporter

    notebook = nbformat.from_dict(json.loads(json.dumps(notebook)))
    figures: list[str] = []
    for cell in notebook.cells:
        if "outputs" in cell:
            cell.outputs = _folded(cell.outputs)
        for place, output in enumerate(cell.get("outputs", [])):
            if PLOTLY in output.get("data", {}):
                figures.append(_shown(output, name, run_dir, len(figures) + 1))
                marked = {"text/html": f'<div class="placed">{_mark(len(figures) - 1)}</div>'}
                cell.outputs[place] = nbformat.v4.new_output("display_data", marked)
    exporter = HTMLExporter(template_name="basic", exclude_input=not code, exclude_anchor_links=True)
    exporter.exclude_input_prompt = exporter.exclude_output_prompt = True
    html, _ = exporter.from_notebook_node(notebook)
    for index, figure in enumerate(figures):
        html = html.replace(_mark(index), figure)
    return html


def _folded(outputs: list[Any]) -> list[Any]:
    """Outputs with each run of messages on stderr joined and folded: progress and warnings, not results."""
    from nbconvert.filters import ansi2html

    kept: list[Any] = []
    log: list[str] = []
    for output in [*outputs, None]:
        if output is not None and output.get("name") == "stderr":
            log.append("".join(output.text))
            continue
        if text := "".join(log).strip("\n"):
            lines = text.count("\n") + 1
            title = f"{lines} line{'s' * (lines > 1)} of messages"
            html = f'<details class="log"><summary>{title}</summary><pre>{ansi2html(text)}</pre></details>'
            kept.append(nbformat.v4.new_output("display_data", {"text/html": html}))
        log = []
        if output is not None:
            kept.append(output)
    return kept


def _mark(index: int) -> str:
    return f"o1lab-figure-{index:04d}-place"


def _shown(output: Any, name: str, run_dir: Path, count: int) -> str:
    """One displayed bundle as a figure; the PNG from ``figures/`` if it was kept, else the one in the bundle."""
    data, marks = output["data"], output.get("metadata", {}).get("o1lab") or {}
    caption = "".join(data.get("text/plain", "")) or "Figure without a caption"
    kept = f"figures/{name}--{marks.get('figure') or marks.get('name')}.png"
    image = kept if (run_dir / kept).is_file() else None
    if image is None and "image/png" in data:
        image = "data:image/png;base64," + "".join("".join(data["image/png"]).split())
    return figure_html(data[PLOTLY], caption, image, f"figure-{count}")


def code_style() -> str:
    """Stylesheet of the highlighted code; every token at 4.5:1 or better on the page's light grey."""
    from pygments.formatters import HtmlFormatter

    return HtmlFormatter(style="a11y-light" if _has("a11y-light") else "xcode").get_style_defs(".highlight")


def _has(style: str) -> bool:
    from pygments.styles import get_all_styles

    return style in set(get_all_styles())
