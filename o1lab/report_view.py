"""What the report shows of a run, as plain data: quantities for people, ledger rows, notebook entries."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from o1lab import records
from o1lab.claims import OUTCOMES, Claims, Verdict
from o1lab.lab_view import BADGES
from o1lab.registry import METRICS, NEEDS
from o1lab.stats import Estimate

BYTE_STEPS = ("B", "KiB", "MiB", "GiB", "TiB")
STATUS_SIGNS = {
    "ok": "✓",
    "failed": "✗",
    "timeout": "⧖",
    "dead kernel": "✗",
    "interrupted": "⏸",
    "no record": "✗",
    "running": "…",
    "pending": "…",
}


def number(value: float) -> str:
    """A number with thousands separators and four significant digits, never in powers of ten below 10¹⁵.

    Examples
    --------
    >>> number(1234567.0), number(-0.012345), number(64.0), number(0.0)
    ('1,234,567', '−0.01235', '64', '0')
    """
    size = abs(value)
    if value == 0 or not math.isfinite(value):
        text = f"{value:g}"
    elif size >= 1e15 or size < 1e-6:
        text = f"{value:.3e}"
    else:
        decimals = max(0, 3 - math.floor(math.log10(size)))
        text = f"{value:,.{decimals}f}"
        text = text.rstrip("0").rstrip(".") if "." in text else text
    return text.replace("-", "−")


def scale(estimate: Estimate) -> tuple[float, str]:
    """Divisor and unit that make an estimate readable: bytes become KiB, MiB, …; ``1`` becomes nothing.

    Examples
    --------
    >>> scale(Estimate(3 * 2**20, 2**20, 2**22, 5, "B/graph"))
    (1048576.0, 'MiB/graph')
    """
    base, slash, per = estimate.unit.partition("/")
    if base != "B":
        return 1.0, "" if estimate.unit == "1" else estimate.unit
    size = max(abs(estimate.value), abs(estimate.low), abs(estimate.high))
    step = 0
    while step + 1 < len(BYTE_STEPS) and size >= (1 if step else 10) * 1024 ** (step + 1):
        step += 1
    return float(1024**step), BYTE_STEPS[step] + slash + per


@dataclass(frozen=True)
class Measured:
    """An estimate in words: value with unit; its interval and how many observations it rests on."""

    value: str
    interval: str


def measured(estimate: Estimate | None) -> Measured | None:
    r"""Put an estimate into words.

    Examples
    --------
    >>> measured(Estimate(20480.0, 20000.0, 21000.0, 12, "B/request"))
    Measured(value='20 KiB/request', interval='95 % interval 19.53 to 20.51, n\xa0=\xa012')
    """
    if estimate is None:
        return None
    divisor, unit = scale(estimate)
    value, low, high = (number(end / divisor) for end in (estimate.value, estimate.low, estimate.high))
    space = "" if unit == "×" else " "
    alike = "one observation" if estimate.n == 1 else f"alike in all {estimate.n:,} observations"
    interval = (
        alike if estimate.low == estimate.high else f"95 % interval {low} to {high}, n\u00a0=\u00a0{estimate.n:,}"
    )
    return Measured(f"{value}{space}{unit}".strip(), interval)


def sign(outcome: str) -> str:
    """The symbol that stands beside an outcome's word."""
    return BADGES[outcome][0]


@dataclass(frozen=True)
class Row:
    """One claim as shown: what it is, what the article says, what was measured and decided."""

    id: str
    title: str
    role: str
    notebook: str
    article: str
    figures: tuple[str, ...]
    outcome: str
    reason: str
    measured: Measured | None
    estimate: Estimate | None
    meaning: str = ""
    needs: tuple[str, ...] = ()


def row(claim_id: str, verdict: Verdict, notebook: str, claims: Claims) -> Row:
    """A ledger row for a verdict; a claim that this version of the ledger lacks is shown under its id."""
    claim = claims.get(claim_id)
    return Row(
        id=claim_id,
        title=claim.title if claim else claim_id,
        role=claim.role if claim else "not in this version's ledger",
        notebook=notebook,
        article=claim.article if claim else "",
        figures=claim.figures if claim else (),
        outcome=verdict.outcome,
        reason=_reason(verdict),
        meaning=METRICS[claim.metric].meaning if claim else "",
        measured=measured(verdict.estimate),
        estimate=verdict.estimate,
        needs=tuple(NEEDS.get(need, need) for need in verdict.needs),
    )


def _reason(verdict: Verdict) -> str:
    """The verdict's reason without the leading estimate, which the row shows, and with the unit of its bounds."""
    head, colon, rest = verdict.reason.partition(": ")
    if not (verdict.estimate and colon and "[" in head):
        return verdict.reason
    unit = "" if verdict.estimate.unit == "1" else f" {verdict.estimate.unit}"
    return re.sub(r"(?<![\d.])\d{4,}(?![\d.])", lambda bound: f"{int(bound[0]):,}", rest) + unit


@dataclass(frozen=True)
class Notebook:
    """One notebook of the run: its status line, its rows that were decided here, and its figures."""

    name: str
    title: str
    status: str
    seconds: float
    detail: str
    parameters: dict[str, Any]
    record: records.Record | None
    executed: bool
    rows: list[Row] = field(default_factory=list)

    @property
    def sign(self) -> str:
        """Symbol of the status."""
        return STATUS_SIGNS.get(self.status, "?")

    @property
    def number(self) -> str:
        """Leading number of the name, ``01``."""
        return self.name.partition("_")[0]

    @property
    def decided(self) -> list[Row]:
        """Rows with a decision, and rows that should have one on this machine."""
        return [item for item in self.rows if not item.needs]

    @property
    def undecided(self) -> list[Row]:
        """Rows that this machine lacks something for."""
        return [item for item in self.rows if item.needs]


def visible(claim_id: str, claims: Mapping[str, Any]) -> bool:
    """False for the template's own row, which no report shows."""
    claim = claims.get(claim_id)
    return claim_id.partition("/")[0] != "template" and (claim is None or claim.group != "Z")


def counted(run: records.Run) -> dict[str, records.Record]:
    """The records that count: of notebooks that ended well; all of them if there is no readable manifest."""
    entries = {entry.get("name"): entry.get("status") for entry in run.manifest.get("notebooks", [])}
    if not entries:
        return dict(run.records)
    return {name: record for name, record in run.records.items() if entries.get(name) == "ok"}


def notebooks(run: records.Run, claims: Claims) -> list[Notebook]:
    """Every notebook of the run in order of its name, with its rows in ledger order."""
    entries = {str(entry.get("name")): entry for entry in run.manifest.get("notebooks", [])}
    good, order = counted(run), {claim: place for place, claim in enumerate(claims)}
    shown = []
    for name in sorted({*entries, *good}):
        entry, record = entries.get(name, {}), good.get(name)
        verdicts = record.verdicts if record else {}
        kept = sorted((c for c in verdicts if visible(c, claims)), key=lambda c: order.get(c, len(order)))
        shown.append(
            Notebook(
                name=name,
                title=record.title if record else name,
                status=str(entry.get("status", "ok")),
                seconds=float(entry.get("seconds") or (record.seconds if record else 0.0)),
                detail=str(entry.get("detail") or ""),
                parameters=dict(entry.get("parameters") or (record.parameters if record else {})),
                record=record,
                executed=(run.folder / "notebooks" / f"{name}.ipynb").is_file(),
                rows=[row(claim, verdicts[claim], name, claims) for claim in kept],
            )
        )
    return shown


def tally(rows: list[Row]) -> list[tuple[str, str, int]]:
    """Sign, outcome and count for each outcome that occurs, in fixed order."""
    counts = Counter(item.outcome for item in rows)
    return [(sign(outcome), outcome, counts[outcome]) for outcome in OUTCOMES if counts[outcome]]


def flat(environment: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Nested facts as one level of dotted names, for listing and comparing.

    Examples
    --------
    >>> flat({"torch": "2.13", "allocator": {"backend": None}, "devices": []})
    {'torch': '2.13', 'allocator.backend': 'none', 'devices': 'none'}
    """
    facts: dict[str, str] = {}
    for key, value in environment.items():
        if isinstance(value, Mapping) and value:
            facts |= flat(value, f"{prefix}{key}.")
        elif isinstance(value, list) and value and all(isinstance(item, Mapping) for item in value):
            for index, item in enumerate(value):
                facts |= flat(item, f"{prefix}{key}.{index}.")
        elif isinstance(value, list) and value:
            facts[prefix + key] = ", ".join(str(item) for item in value)
        elif isinstance(value, int) and not isinstance(value, bool) and key.endswith("_bytes"):
            facts[prefix + key] = f"{value / 2**30:,.1f} GiB"
        else:
            facts[prefix + key] = "none" if value is None or value in ({}, [], "") else str(value)
    return facts


@dataclass(frozen=True)
class Pair:
    """One claim in two runs; ``None`` where a run does not have it."""

    a: Row | None
    b: Row | None

    @property
    def any(self) -> Row:
        """Whichever side there is."""
        row = self.b or self.a
        assert row is not None
        return row

    @property
    def changed(self) -> bool:
        """Whether both runs have a verdict and the two differ."""
        return self.a is not None and self.b is not None and self.a.outcome != self.b.outcome

    @property
    def difference(self) -> str:
        """B minus A in the unit of both, and whether the intervals overlap; empty where either has no estimate."""
        a, b = (side.estimate if side else None for side in (self.a, self.b))
        if a is None or b is None or a.unit != b.unit:
            return ""
        delta = b.value - a.value
        size = abs(delta)
        divisor, unit = scale(Estimate(size, size, size, 1, "pp" if a.unit == "%" else a.unit))
        apart = "intervals apart" if a.high < b.low or b.high < a.low else "intervals overlap"
        plus = "+" if delta > 0 else ""
        return f"{plus}{number(delta / divisor)} {unit}".strip() + f" ({apart})"


def differing(manifests: list[dict[str, Any]]) -> list[tuple[str, str, str]]:
    """What differs between two runs besides their results: name, A, B."""
    sides = []
    for manifest in manifests:
        parts = {key: manifest.get(key) for key in ("device", "preset", "lab", "environment")}
        given = {str(e.get("name")): e.get("parameters") or {} for e in manifest.get("notebooks", [])}
        sides.append(flat({**parts, "parameters": given}))
    names = [*sides[0], *(name for name in sides[1] if name not in sides[0])]
    rows = [(name, sides[0].get(name, "–"), sides[1].get(name, "–")) for name in names]
    return [(name.removeprefix("environment."), a, b) for name, a, b in rows if a != b]
