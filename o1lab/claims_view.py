"""How the ledger looks in a terminal: a table where it fits, wrapped text where it does not, one row in full, JSON."""

from __future__ import annotations

import argparse
import itertools
import json
import shutil
import textwrap
from collections.abc import Iterable
from typing import TextIO

from o1lab import paths
from o1lab.claims import GROUPS, Claim, Claims, for_notebook, missing, rule_words
from o1lab.errors import UnknownName
from o1lab.registry import METRICS, NEEDS
from o1lab.rules import Side

TABLE_FROM = 160  # columns; below that each claim is a short block of text
_SIGNS = {
    "low_above": ">",
    "low_at_least": "≥",
    "high_below": "<",
    "high_at_most": "≤",
    "within": "in",
    "outside": "off",
}


def show(claims: Claims, options: argparse.Namespace, stream: TextIO) -> int:
    """Print what ``options`` ask for to ``stream``; raise :class:`UnknownName` for an unknown id or notebook."""
    if hasattr(stream, "reconfigure"):  # a terminal that cannot show '≥' gets '?', not a traceback
        stream.reconfigure(errors="replace")
    if options.id is not None:
        chosen = [claims[options.id]]
    elif options.notebook is not None:
        chosen = _of_notebook(claims, options.notebook)
    else:
        chosen = [claim for claim in claims.values() if claim.group != "Z"]
    have = _capabilities() if options.capabilities else None
    width = shutil.get_terminal_size(fallback=(TABLE_FROM, 24)).columns
    if options.json:
        rows = [claim.to_dict() | ({} if have is None else {"missing": list(missing(claim, have))}) for claim in chosen]
        print(json.dumps(rows, ensure_ascii=False, indent=1), file=stream)
    elif options.id is not None:
        print(in_full(chosen[0], width, have), file=stream)
    else:
        print(table(chosen, width, have), file=stream)
    return 0


def signs(side: Side) -> str:
    """One side of a rule in a few characters, e.g. ``≥ 64``; a sign compares the whole 95 % interval."""
    parts = []
    for key, bound in side.to_dict().items():
        if isinstance(bound, list) and bound[0] == bound[1]:
            parts.append(("= " if key == "within" else "≠ ") + f"{bound[0]:.12g}")
        else:
            shown = f"[{bound[0]:.12g}, {bound[1]:.12g}]" if isinstance(bound, list) else f"{bound:.12g}"
            parts.append(f"{_SIGNS[key]} {shown}")
    return " and ".join(parts)


def table(chosen: Iterable[Claim], width: int, have: set[str] | None = None) -> str:
    """The claims grouped by section as text of at most ``width`` columns (at least 40)."""
    chosen, width = list(chosen), max(width, 40)
    lines: list[str] = []
    for group in dict.fromkeys(claim.group for claim in chosen):
        rows = [claim for claim in chosen if claim.group == group]
        lines += ["", f"{group} · {GROUPS[group]}", ""]
        lines += _columns(rows, width, have) if width >= TABLE_FROM else _blocks(rows, width, have)
    return "\n".join([*lines[1:], "", *_legend(chosen, width, have)])


def in_full(claim: Claim, width: int, have: set[str] | None = None) -> str:
    """Every field of one claim as wrapped text, with its metric and needs explained."""
    width = min(max(width, 40), 100)
    fields = [
        ("role", claim.role + (f", of {claim.parent}" if claim.parent else f", § {claim.section}")),
        ("article", claim.article or "says nothing of this"),
        ("figures", "; ".join(claim.figures) or "–"),
        ("measure", f"{METRICS[claim.metric].meaning} ({claim.metric}, {_in(claim.unit)})"),
        ("rule", rule_words(claim)),
        ("why", claim.why),
        ("needs", "; ".join(f"{need}: {NEEDS[need]}" for need in claim.needs)),
        ("notebook", f"{claim.notebook} ({_exists(claim)})"),
    ]
    if have is not None:
        fields.append(("here", _here(claim, have)))
    lines = [claim.id, *_wrap(claim.title, width), ""]
    for label, text in fields:
        lines += _wrap(text, width, f"  {label:<9} ", " " * 12)
    return "\n".join(lines)


def _columns(rows: list[Claim], width: int, have: set[str] | None) -> list[str]:
    """An aligned table whose cells wrap; spare width goes to the figures."""
    limits = {
        "claim": 20,
        "article's figures": 0,
        "metric": 24,
        "unit": 9,
        "needs": 12,
        "supported": 15,
        "refuted": 16,
        "notebook": 31 if width >= 190 else 20,
        "exists": 6,
    } | ({} if have is None else {"here": 4})
    limits["article's figures"] = room = width - sum(limits.values()) - 2 * (len(limits) - 1)
    lines = [dict(zip(limits, limits, strict=True)), {head: "─" * limit for head, limit in limits.items()}]
    for claim in rows:
        lines.append(
            {
                "claim": claim.id.replace(f"{claim.parent}/", "· /") if claim.parent else claim.id,
                "article's figures": _figures(claim, 3 * room),
                "metric": claim.metric,
                "unit": claim.unit,
                "needs": " ".join(claim.needs),
                "supported": signs(claim.rule.supported),
                "refuted": signs(claim.rule.refuted),
                "notebook": claim.notebook,
                "exists": "yes" if claim.notebook_exists() else "no",
                "here": "" if have is None else "no" if missing(claim, have) else "yes",
            }
        )
    text = []
    for line in lines:
        wrapped = [_cell(line[head], limit) or [""] for head, limit in limits.items()]
        for cells in itertools.zip_longest(*wrapped, fillvalue=""):
            text.append(
                "  ".join(f"{cell:<{limit}}" for cell, limit in zip(cells, limits.values(), strict=True)).rstrip()
            )
    return text


def _blocks(rows: list[Claim], width: int, have: set[str] | None) -> list[str]:
    """Each claim as a heading and a few labelled lines, an empty line between families."""
    lines: list[str] = []
    for claim in rows:
        if lines and claim.parent is None:
            lines.append("")
        measure = claim.metric + ("" if claim.unit == "1" else f" in {claim.unit}")
        rule = f"supported {signs(claim.rule.supported)}, refuted {signs(claim.rule.refuted)}"
        fields = [
            ("article", _figures(claim, 2 * (width - 13)) if claim.figures else ""),
            ("rule", f"{measure}: {rule}"),
            ("notebook", f"{claim.notebook} ({_exists(claim)}); needs {', '.join(claim.needs)}"),
            ("here", "" if have is None else _here(claim, have)),
        ]
        lines += _wrap(f"{claim.id}: {claim.title}", width, "", "    ")
        for label, value in fields:
            lines += _wrap(value, width, f"    {label:<8} ", " " * 13) if value else []
    return lines


def _legend(chosen: list[Claim], width: int, have: set[str] | None) -> list[str]:
    made = sum(claim.notebook_exists() for claim in chosen)
    text = f"{_count(len(chosen), 'row')}, {made} with a notebook."
    if have is not None:
        able = sum(not missing(claim, have) for claim in chosen)
        text += f" This machine can decide {able}."
    text += " A bound is met by the whole 95 % interval; where neither side is met, the verdict is inconclusive."
    return _wrap(text + " `python -m o1lab claims --id ID` shows one row in full.", width)


def _of_notebook(claims: Claims, name: str) -> list[Claim]:
    name = name.removesuffix(".ipynb")
    chosen = list(for_notebook(name, claims))
    known = {claim.notebook for claim in claims.values()} | {path.stem for path in paths.notebooks().glob("*.ipynb")}
    if name not in known:
        raise UnknownName("notebook", name, sorted(known))
    return chosen


def _capabilities() -> set[str]:
    from o1lab import hardware  # looks at the machine, so only when asked

    return hardware.capabilities()


def _figures(claim: Claim, most: int) -> str:
    text = "; ".join(claim.figures).replace("`", "") or "–"
    return text if len(text) <= most else text[: most - 2].rstrip(" ;,") + " …"


def _here(claim: Claim, have: set[str]) -> str:
    absent = missing(claim, have)
    return "can be decided" if not absent else "cannot be decided: needs " + "; ".join(NEEDS[need] for need in absent)


def _exists(claim: Claim) -> str:
    return "exists" if claim.notebook_exists() else "not yet there"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")


def _in(unit: str) -> str:
    return "a pure number" if unit == "1" else f"in {unit}"


def _cell(text: str, width: int) -> list[str]:
    """Wrap at spaces and, in a name too long for the cell, after an underscore."""
    loose = " ".join(word if len(word) <= width else word.replace("_", "_ ") for word in text.split())
    return [line.replace("_ ", "_") for line in _wrap(loose, width)]


def _wrap(text: str, width: int, first: str = "", rest: str = "") -> list[str]:
    return textwrap.wrap(text, width, initial_indent=first, subsequent_indent=rest, break_on_hyphens=False)
