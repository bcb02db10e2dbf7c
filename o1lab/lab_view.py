"""What a notebook's session shows: small HTML cards with the same content as plain text beside them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from o1lab.claims import Verdict

# word, sign and border tell the outcome apart, colour comes last; dark ink on white is > 12:1 in every theme
BADGES = {
    "supported": ("✓", "#0072B2", "solid"),
    "refuted": ("✗", "#D55E00", "double"),
    "inconclusive": ("?", "#767676", "dashed"),
    "not evaluated": ("–", "#767676", "dotted"),
}
_BADGE = "display:inline-block;border-radius:4px;padding:0 6px;background:#fff;color:#1a1a1a;white-space:nowrap"
_TABLE = "border-collapse:collapse;background:#fff;color:#1a1a1a;font-size:14px;max-width:100%"
_FIT = "<style>.jp-RenderedPlotly img{max-width:100%;height:auto}</style>"
"""JupyterLab's plotly renderer shows the picture first, at natural size: twice as wide as the page."""
_CELL = "text-align:left;vertical-align:top;padding:3px 12px 3px 0;border-bottom:1px solid #ddd;white-space:normal"


@dataclass(frozen=True, slots=True)
class Card:
    """One display: HTML for a notebook, the same as text for a terminal or a reader of the raw file."""

    html: str
    text: str

    def _repr_html_(self) -> str:
        return self.html

    def __repr__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class Html:
    """A table cell that is HTML already, with its plain text."""

    html: str
    text: str


def show(card: Card) -> None:
    """Display a card; outside a notebook its text is printed."""
    from IPython.display import display

    display(card)


def badge(outcome: str) -> Html:
    """An outcome as sign and word, e.g. ``✓ supported``."""
    sign, colour, border = BADGES[outcome]
    text = f"{sign} {outcome}"
    style = f"{_BADGE};border:3px {border} {colour}"
    return Html(f'<b style="{style}">{text}</b>', text)


def table(title: str, header: Sequence[str], rows: Iterable[Sequence[Any]]) -> Card:
    """Build a table; text cells are escaped, :class:`Html` cells are kept."""
    lines = [[cell if isinstance(cell, Html) else Html(escape(str(cell)), str(cell)) for cell in row] for row in rows]
    head = "".join(f'<th scope="col" style="{_CELL}">{escape(name)}</th>' for name in header)
    body = "".join("<tr>" + "".join(f'<td style="{_CELL}">{cell.html}</td>' for cell in row) + "</tr>" for row in lines)
    caption = f'<caption style="text-align:left;font-weight:bold;padding:4px 0">{escape(title)}</caption>'
    thead = f"<thead><tr>{head}</tr></thead>" if any(header) else ""
    html = f'<table style="{_TABLE}">{caption}{thead}<tbody>{body}</tbody></table>'
    grid = [list(header)] * any(header) + [[cell.text for cell in row] for row in lines]
    widths = [max(len(row[column]) for row in grid) for column in range(len(header))] if grid else []
    text = [" · ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in grid]
    return Card(html, "\n".join([title, *text]))


def both(*cards: Card) -> Card:
    """Put cards below one another."""
    return Card("".join(card.html for card in cards), "\n\n".join(card.text for card in cards))


def verdict_card(verdict: Verdict, title: str) -> Card:
    """One verdict: outcome, claim, and the reason with the estimate in it."""
    outcome = badge(verdict.outcome)
    html = (
        f'<div style="{_TABLE};padding:6px 8px">{outcome.html} <b>{escape(verdict.claim)}</b> {escape(title)}'
        f"<br>{escape(verdict.reason)}</div>"
    )
    return Card(html, f"{outcome.text} · {verdict.claim} {title}\n{verdict.reason}")


def ledger(title: str, verdicts: Iterable[Verdict]) -> Card:
    """The verdicts of a notebook as a table."""
    return table(title, ("claim", "verdict", "why"), [(v.claim, badge(v.outcome), v.reason) for v in verdicts])


def device_words(device: str, environment: dict[str, Any]) -> str:
    """``cuda:0 · NVIDIA H200`` or ``cpu · <processor>``: the device's torch name first, then what it is."""
    kind, _, index = device.partition(":")
    gpus = environment.get("devices") or []
    number = int(index or 0)
    if kind == "cuda":
        return f"cuda:{number}" + (f" · {gpus[number]['name']}" if number < len(gpus) else "")
    return device + (f" · {environment['cpu']}" if kind == "cpu" and environment.get("cpu") else "")


def opening(rows: Sequence[tuple[str, Any]], decidable: Sequence[tuple[str, str, str]]) -> Card:
    """What :meth:`Lab.start` shows: the session, and claim by claim whether this machine can decide it."""
    session = table("This session", ("", ""), rows)
    session = Card(_FIT + session.html, session.text)
    if not decidable:
        return both(session, Card("<p>This notebook decides no claim of its own.</p>", "No claim of its own."))
    return both(
        session, table("What this machine can decide", ("claim", "what it says", "can it be decided here?"), decidable)
    )
