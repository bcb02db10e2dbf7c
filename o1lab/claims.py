"""Load ``claims.toml`` strictly and apply its decision rules to estimates.

A rule is data: conditions on the ends of a 95 % interval, one set that supports the hypothesis, one that refutes it.
The loader proves that no interval can meet both and that each can be met, so a verdict never depends on their order.
"""

from __future__ import annotations

import argparse
import re
import sys
import tomllib
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from o1lab import paths
from o1lab.errors import ClaimsError, EstimateError, UnknownName
from o1lab.registry import METRICS, NEEDS
from o1lab.rules import Rule, finite, parse_side
from o1lab.stats import Estimate, readable

FILE = Path(__file__).with_name("claims.toml")
OUTCOMES = ("supported", "refuted", "inconclusive", "not evaluated")
ROLES = ("claim", "remedy as written", "our remedy", "our measure")
GROUPS = {
    "A": "Headline bottlenecks",
    "B": "Mechanisms",
    "C": "Methods",
    "D": "Remedies",
    "Z": "The template's own row",
}
NOTEBOOK = re.compile(r"(\d\d_[a-z0-9]+(_[a-z0-9]+)*|_template)")
ID = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*(/[a-z0-9]+(-[a-z0-9]+)*)?")
_TEXT = ("id", "role", "title", "metric", "unit", "notebook", "why")
_KEYS = {*_TEXT, "group", "section", "article", "figures", "article_value", "needs", "supported", "refuted"}


@dataclass(frozen=True, slots=True)
class Claim:
    """One row of the ledger; ``claims.toml`` explains the fields. ``parent`` is ``None`` for a row of the article."""

    id: str
    group: str
    section: str
    title: str
    article: str
    figures: tuple[str, ...]
    metric: str
    unit: str
    needs: tuple[str, ...]
    rule: Rule
    notebook: str
    parent: str | None
    role: str
    why: str
    article_value: float | None = None

    def notebook_exists(self) -> bool:
        """Whether the deciding notebook is there now (looked up each time, never stored)."""
        return (paths.notebooks() / f"{self.notebook}.ipynb").is_file()

    def to_dict(self) -> dict[str, Any]:
        """Return the row as plain JSON-able data, with the rule in words and whether the notebook exists."""
        plain = {name: getattr(self, name) for name in self.__slots__ if name != "rule"}
        plain |= {"figures": list(self.figures), "needs": list(self.needs)}
        plain |= {"supported": self.rule.supported.to_dict(), "refuted": self.rule.refuted.to_dict()}
        return plain | {"rule_words": rule_words(self), "notebook_exists": self.notebook_exists()}


class Claims(dict[str, Claim]):
    """Claims by id, in the order of the file; ``claims[id]`` of an unknown id raises :class:`UnknownName`."""

    def __missing__(self, name: str) -> Claim:
        raise UnknownName("claim", name, list(self), "`python -m o1lab claims` lists them")


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a rule says of an estimate; ``needs`` holds the capabilities that were missing."""

    claim: str
    outcome: str
    reason: str
    needs: tuple[str, ...] = ()
    estimate: Estimate | None = None

    def __post_init__(self) -> None:
        if self.outcome not in OUTCOMES:
            raise ClaimsError(f"{self.claim}: outcome {self.outcome!r} is none of {', '.join(OUTCOMES)}")

    def __str__(self) -> str:
        return f"{self.claim}: {self.outcome} ({self.reason})"


def load(path: str | Path | None = None) -> Claims:
    """Read and check a claims file (default: the one in the package).

    Raises
    ------
    ClaimsError
        If the file is missing, is no TOML, or any row is unusable; the message names row, key and way out.

    Examples
    --------
    >>> load()["leak-rate"].unit
    'B/request'
    """
    file = Path(path or FILE)
    try:
        text = file.read_bytes().decode("utf-8")
        data = tomllib.loads(text)
    except OSError as error:
        raise ClaimsError(f"{file.name} cannot be read ({error.strerror}); restore it or give another path") from error
    except UnicodeDecodeError as error:
        raise ClaimsError(f"{file.name} is not UTF-8 at byte {error.start}; save it as UTF-8") from error
    except tomllib.TOMLDecodeError as error:
        line = "" if "line" in str(error) else f", line {text.count(chr(10)) + 1}"
        raise ClaimsError(f"{file.name} is no valid TOML: {error}{line}; correct that line") from error
    if set(data) != {"claim"} or not isinstance(data["claim"], list):
        stray = ", ".join(sorted(set(data) - {"claim"})) or "no [[claim]] table"
        raise ClaimsError(f"{file.name} may hold [[claim]] tables only; found {stray}")
    claims = Claims()
    for number, row in enumerate(data["claim"], start=1):
        claim = _claim(row, number, claims)
        claims[claim.id] = claim
    return claims


def for_notebook(name: str, claims: Claims | None = None) -> tuple[Claim, ...]:
    """The claims that one notebook decides, in ledger order; empty for a notebook that decides none."""
    return tuple(claim for claim in (load() if claims is None else claims).values() if claim.notebook == name)


def missing(claim: Claim, capabilities: Collection[str]) -> tuple[str, ...]:
    """The claim's needs that ``capabilities`` does not meet, in the claim's order."""
    return tuple(need for need in claim.needs if need not in capabilities)


def rule_words(claim: Claim) -> str:
    """The decision rule as one sentence."""
    supported, refuted = claim.rule.supported.words(claim.unit), claim.rule.refuted.words(claim.unit)
    return f"supported if the whole 95 % interval is {supported}; refuted if it is {refuted}; else inconclusive"


def decide(claim: Claim, estimate: Estimate | None, capabilities: Collection[str]) -> Verdict:
    """Apply a claim's rule.

    Parameters
    ----------
    claim : Claim
    estimate : Estimate or None
        The measured number in the claim's unit; ``None`` if it was not measured.
    capabilities : collection of str
        What the machine has, as :func:`o1lab.hardware.capabilities` tells it.

    Returns
    -------
    Verdict
        ``not evaluated`` if a need is missing (whatever was measured) or nothing was measured.

    Raises
    ------
    EstimateError
        If the estimate's unit is not the claim's.

    Examples
    --------
    >>> rate = load()["leak-rate/host"]
    >>> print(decide(rate, Estimate(96, 64, 120, n=12, unit="B/request"), {"glibc"}).reason)
    96 [64, 120] B/request: the whole interval is at or above 64
    >>> print(decide(rate, None, {"cpu"}).reason)
    needs Linux with glibc, for its exact heap counters
    """
    absent = missing(claim, capabilities)
    if absent:
        phrases = [NEEDS[need] for need in absent]
        reason = "needs " + (", ".join(phrases[:-1]) + " and " if len(phrases) > 1 else "") + phrases[-1]
        return Verdict(claim.id, "not evaluated", reason, absent)
    if estimate is None:
        return Verdict(claim.id, "not evaluated", "not measured in this run")
    if estimate.unit != claim.unit:
        raise EstimateError(
            f"{claim.id} is decided in {claim.unit!r}, the estimate is in {estimate.unit!r}; convert it with .scaled()"
        )
    outcome = claim.rule.outcome(estimate.low, estimate.high)
    shown = _shown(estimate, claim.rule.numbers())
    if outcome == "inconclusive":
        sides = f"{claim.rule.supported.words()} nor wholly {claim.rule.refuted.words()}"
        reason = f"{shown}: the interval is neither wholly {sides}"
    else:
        reason = f"{shown}: the whole interval is {getattr(claim.rule, outcome).words()}"
    return Verdict(claim.id, outcome, reason, (), estimate)


def _shown(estimate: Estimate, bounds: tuple[float, ...]) -> str:
    """``value [low, high] unit`` with as few digits as keep each end on its side of every bound."""
    ends = (estimate.low, estimate.high)

    def side(number: float) -> list[int]:
        return [(number > bound) - (number < bound) for bound in bounds]

    for digits in (4, 6, 9, 12, 17):
        if all(side(float(f"{end:.{digits}g}")) == side(end) for end in ends):
            break
    value, low, high = (readable(number, digits) for number in (estimate.value, *ends))
    return f"{value} [{low}, {high}]" + ("" if estimate.unit == "1" else f" {estimate.unit}")


def _claim(row: Any, number: int, earlier: Claims) -> Claim:
    """Check one ``[[claim]]`` table and build its claim; sub-rows take group and section from ``earlier``."""
    where = f"claim {row['id']!r}" if isinstance(row, dict) and row.get("id") else f"claim number {number}"

    def bad(key: str, problem: str, way: str) -> ClaimsError:
        return ClaimsError(f"{where}, key {key!r}: {problem}; {way}")

    if not isinstance(row, dict):
        raise bad("claim", "is no table", "write it as [[claim]]")
    for key in row:
        if key not in _KEYS:
            raise bad(key, "unknown key", "remove it, or use one of " + ", ".join(sorted(_KEYS)))
    name, parent = row.get("id"), None
    if not isinstance(name, str) or not ID.fullmatch(name):
        raise bad("id", f"{name!r} is no id", "write lower-case words joined by '-', and parent/name for a sub-row")
    if name in earlier:
        raise bad("id", "is given twice", "rename or remove one of the two rows")
    if "/" in name:
        parent = name.split("/")[0]
        if parent not in earlier:
            raise bad("id", f"its parent {parent!r} is not above it", "add the parent first, or correct the name")
        for key in ("group", "section"):
            if key in row:
                raise bad(key, "a sub-row takes it from its parent", "remove it")
    by_article = row.get("role") in ROLES[:2] or parent is None
    for key in (*_TEXT, *(() if parent else ("group", "section")), *(("article",) if by_article else ())):
        if not isinstance(row.get(key), str) or not row[key].strip():
            raise bad(key, f"{row.get(key)!r} is no text" if key in row else "is missing", "write it as a text")
    closed = {"role": ROLES, "metric": METRICS, "group": GROUPS}
    for key, known in closed.items():
        if key in row and row[key] not in known:
            raise bad(key, f"unknown {key} {row[key]!r}", "use one of " + _near(row[key], known))
    if row["unit"] not in METRICS[row["metric"]].units:
        allowed = ", ".join(METRICS[row["metric"]].units)
        raise bad("unit", f"{row['unit']!r} is no unit of {row['metric']}", f"use {allowed}")
    if not NOTEBOOK.fullmatch(row["notebook"]):
        raise bad("notebook", f"{row['notebook']!r} is malformed", "write it as 01_memory_leak, without .ipynb")
    for key in ("needs", "figures"):
        texts = row.get(key, [])
        if not isinstance(texts, list) or not all(isinstance(text, str) and text for text in texts):
            raise bad(key, f"{texts!r} is no list of texts", 'write it as ["…", "…"]')
    for need in row.get("needs", []):
        if need not in NEEDS:
            raise bad("needs", f"unknown need {need!r}", "use some of " + _near(need, NEEDS))
    if not row.get("needs"):
        raise bad("needs", "is missing or empty", 'write ["cpu"] if any machine will do')
    if not isinstance(row.get("article", ""), str):
        raise bad("article", f"{row['article']!r} is no text", "write it as a text")
    if "article_value" in row and not finite(row["article_value"]):
        raise bad("article_value", f"{row['article_value']!r} is no finite number", "write a number or leave it out")
    rule = Rule(
        parse_side(row.get("supported"), lambda problem, way: bad("supported", problem, way)),
        parse_side(row.get("refuted"), lambda problem, way: bad("refuted", problem, way)),
    )
    if rule.overlaps():
        raise bad("refuted", "some interval is both supported and refuted", "make the two sides exclude each other")
    return Claim(
        **{key: row[key] for key in _TEXT},
        group=earlier[parent].group if parent else row["group"],
        section=earlier[parent].section if parent else row["section"],
        article=row.get("article", ""),
        figures=tuple(row.get("figures", ())),
        article_value=float(row["article_value"]) if "article_value" in row else None,
        needs=tuple(row["needs"]),
        rule=rule,
        parent=parent,
    )


def _near(name: str, known: Collection[str]) -> str:
    import difflib

    return ", ".join(difflib.get_close_matches(name, known, n=3, cutoff=0.5) or sorted(known))


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``python -m o1lab claims``."""
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--id", metavar="ID", help="show one claim in full")
    which.add_argument("--notebook", metavar="NAME", help="only the claims that this notebook decides")
    parser.add_argument("--capabilities", action="store_true", help="mark what this machine can decide")
    parser.add_argument("--json", action="store_true", help="print JSON, for machines")


def command(options: argparse.Namespace) -> int:
    """Print the ledger as a table, one row in full, or JSON."""
    from o1lab import claims_view

    return claims_view.show(load(), options, sys.stdout)
