"""The pieces of a soak, each measured by a process of its own, and what they say together."""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from o1lab.errors import ProbeError
from o1lab.stats import Estimate, readable, theil_sen

if TYPE_CHECKING:
    import plotly.graph_objects as go

COUNTERS = ("host", "device", "total")
UNIT = "B/request"
FEWEST = 16
"""Readings that a piece needs to count."""
GRAIN_BYTES, FLOOR_BYTES, PROMISE_BYTES = 4096, 16.0, 1024.0
"""What small bounded caches move a reading by; the probe's floor and the half-width asked for, in bytes per request."""


class SoakError(ProbeError):
    """A soak cannot be run or read; the message says what to change."""


@dataclass
class Piece:
    """One process's part of a soak: lists with one entry a reading, bytes in use, ``None`` for what is not there."""

    arm: str
    model: str
    place: str
    torch: str
    cadence_s: float
    thread_cache: bool = False
    id: str = field(default_factory=lambda: secrets.token_hex(4))
    end: str = "running"
    seconds: list[float] = field(default_factory=list)
    requests: list[int] = field(default_factory=list)
    host: list[int | None] = field(default_factory=list)
    device: list[int | None] = field(default_factory=list)
    reserved: list[int | None] = field(default_factory=list)
    rss: list[int] = field(default_factory=list)

    @property
    def key(self) -> tuple[str, str, str]:
        """What pieces must share to be combined: arm, model and place."""
        return self.arm, self.model, self.place

    def values(self, counter: str) -> list[int] | None:
        """Bytes in use at each reading; ``"total"`` is host and device together; ``None`` without that counter."""
        columns = [self.host, self.device] if counter == "total" else [getattr(self, counter)]
        columns = [column for column in columns if column and None not in column]
        return [sum(row) for row in zip(*columns, strict=True)] if columns else None  # type: ignore[arg-type]

    def slope(self, counter: str) -> Estimate | None:
        """Theil–Sen slope of all but the first tenth of the readings; ``None`` if there are too few."""
        values, start = self.values(counter), self.left_out
        if values is None or len(values) < FEWEST:
            return None
        return theil_sen(self.requests[start:], values[start:], UNIT)

    @property
    def left_out(self) -> int:
        """Readings at the start that count as warm-up: the first tenth.

        A change point would find every curvature that counters without noise can show, and cut most of a piece away.
        """
        return -(-len(self.requests) // 10)


@dataclass(frozen=True)
class Soak:
    """The pieces of one arm together; slopes in B/request by counter, where the counter is there."""

    arm: str
    model: str
    place: str
    pieces: tuple[Piece, ...]
    slopes: dict[str, Estimate]
    requests: int
    minutes: float
    left_out: int

    @property
    def verdict(self) -> str:
        """Whether the total is cured: its interval contains 0 and is no wider than ± 1 KiB/request."""
        total = self.slopes["total"]
        half = (total.high - total.low) / 2
        if total.low > 0 and total.high <= FLOOR_BYTES:
            return f"below the floor of {FLOOR_BYTES:g} B/request, though the interval does not contain 0"
        if total.low > 0:
            return "grows: the interval lies above 0"
        if total.high < 0:
            return "shrinks: a fault of the method or a warm-up given back; soak longer"
        if half > PROMISE_BYTES:
            return f"not decided: half-width {readable(half)} B/request is above 1 KiB; add pieces"
        return f"cured: the interval contains 0, half-width {readable(half)} B/request (at most 1 KiB asked)"

    def __str__(self) -> str:
        lines = [
            f"{self.arm} · {self.model} on {self.place} · {self.requests:,} requests in {self.minutes:.1f} min · "
            f"{len(self.pieces)} pieces, {self.left_out} readings left out as warm-up"
        ]
        for name, slope in self.slopes.items():
            lines.append(f"  {name:7} {slope} · half-width {readable((slope.high - slope.low) / 2)}")
        return "\n".join([*lines, f"  {self.verdict}"])


def pooled(estimates: Sequence[Estimate], spans: Sequence[float], floor: float = 0.0) -> Estimate:
    """One slope from several of the same thing: the mean weighted by n × span², widened if the slopes disagree.

    The weights are the design's, not the intervals': a piece whose noise is underestimated would take the whole weight,
    and the interval would cover too little. ``floor`` / span is the least half-width of a slope, because a reading has
    a grain even where it has no noise. If the slopes scatter more than their intervals allow, the interval grows by
    that ratio (Birge 1932).

    Parameters
    ----------
    estimates, spans : sequence, shape (pieces,)
        Slopes and what each was seen over, e.g. requests.

    Examples
    --------
    >>> print(pooled([Estimate(1.0, 0.0, 2.0, 20, "B"), Estimate(2.0, 1.0, 3.0, 20, "B")], [100, 100]))
    1.5 [0.52, 2.48] B (n=40)
    """
    halves = [max((e.high - e.low) / 2, floor / max(span, 1)) for e, span in zip(estimates, spans, strict=True)]
    shares = [e.n * max(span, 1) ** 2 for e, span in zip(estimates, spans, strict=True)]
    shares = [share / sum(shares) for share in shares]
    value = sum(share * e.value for share, e in zip(shares, estimates, strict=True))
    half = sum((share * half) ** 2 for share, half in zip(shares, halves, strict=True)) ** 0.5
    if len(estimates) > 1 and min(halves) > 0:
        off = [(e.value - value) / half * 1.96 for e, half in zip(estimates, halves, strict=True)]
        half *= max(1.0, (sum(z * z for z in off) / (len(off) - 1)) ** 0.5)
    return Estimate(value, value - half, value + half, sum(e.n for e in estimates), estimates[0].unit)


def combine(pieces: Sequence[Piece]) -> list[Soak]:
    """Soaks by arm, model and place.

    Raises
    ------
    SoakError
        A group without a piece of enough readings.
    """
    soaks = []
    for key in dict.fromkeys(piece.key for piece in pieces):
        group = [piece for piece in pieces if piece.key == key]
        slopes: dict[str, Estimate] = {}
        for counter in COUNTERS:
            found = [(slope, piece) for piece in group if (slope := piece.slope(counter))]
            if found:
                spans = [piece.requests[-1] - piece.requests[piece.left_out] for _, piece in found]
                slopes[counter] = pooled([slope for slope, _ in found], spans, GRAIN_BYTES)
        if not slopes:
            raise SoakError(f"{key[0]}: no piece has {FEWEST} readings; soak longer or read more often (--every)")
        used = [piece for piece in group if len(piece.requests) > 1]
        requests = sum(piece.requests[-1] - piece.requests[0] for piece in used)
        minutes = sum(piece.seconds[-1] - piece.seconds[0] for piece in used) / 60
        soaks.append(Soak(*key, tuple(group), slopes, requests, minutes, sum(p.left_out for p in group)))
    return soaks


def load(*files: str | Path) -> list[Piece]:
    """Pieces of soak files, each once.

    Raises
    ------
    SoakError
        A file that is missing or no soak file.
    """
    found: dict[str, Piece] = {}
    for file in files:
        try:
            content = json.loads(Path(file).read_text(encoding="utf-8"))
            pieces = [Piece(**piece) for piece in content["pieces"]]
        except FileNotFoundError as error:
            raise SoakError(f"there is no {file}: run a soak with --into first") from error
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise SoakError(f"{file} is no soak file ({type(error).__name__}); move it away") from error
        found.update({piece.id: piece for piece in pieces})
    return list(found.values())


def save(file: str | Path, piece: Piece, before: Sequence[Piece] = ()) -> None:
    """Put ``piece`` into the file, after the pieces there already (or ``before``), atomically."""
    from o1lab.storage import write_json

    others = load(file) if Path(file).exists() else list(before)
    whole = [other for other in others if other.id != piece.id] + [piece]
    write_json(Path(file), {"kind": "soak", "pieces": [asdict(each) for each in whole]})


def _chain(soaked: Soak, counter: str) -> tuple[list[float], list[float]]:
    """Requests and growth in MiB without the warm-ups; the pieces stand end to end."""
    xs, ys = [0.0], [0.0]
    for piece in soaked.pieces:
        values = piece.values(counter)
        if values is not None and len(values) >= FEWEST:
            start = piece.left_out
            xs += [xs[-1] + request - piece.requests[start] for request in piece.requests[start + 1 :]]
            ys += [ys[-1] + (value - values[start]) / 2**20 for value in values[start + 1 :]]
    return xs, ys


def figure(leaky: Soak, cured: Soak, counter: str = "total") -> go.Figure:
    """Growth of the leaky and the cured loop over the same number of requests; pieces are set end to end."""
    import numpy as np

    from o1lab import plots

    (leaky_x, leaky_y), (cured_x, cured_y) = _chain(leaky, counter), _chain(cured, counter)
    x = np.linspace(0, min(leaky_x[-1], cured_x[-1]), 200)
    rate, cure = leaky.slopes[counter], cured.slopes[counter]
    within = f"{readable(cure.value, 2)} ± {readable((cure.high - cure.low) / 2, 2)}"
    return plots.broken_vs_fixed(
        x, np.interp(x, leaky_x, leaky_y), np.interp(x, cured_x, cured_y),
        title=f"The leak takes {readable(rate.value, 3)} B a request, the cured loop {within} B",
        x_title="requests", y_title=f"growth in use, {'host and device' if counter == 'total' else counter} (MiB)",
        labels={"broken": "leaky", "fixed": "cured"},
    )  # fmt: skip
