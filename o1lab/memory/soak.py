"""A soak in pieces: serve for minutes with and without the leak, read exact counters at a fixed cadence, combine.

``python -m o1lab.memory.soak --minutes 10 --arm leaky --into leaky.json`` serves :class:`ServingLoop` with
``log="view"`` (``cured``: ``log="mean"``) and appends one piece to the file, which is whole after every reading; each
run is a process of its own, with its own warm-up. ``--report leaky.json cured.json`` combines what the files hold.

The command starts itself anew without glibc's per-thread cache (``GLIBC_TUNABLES=glibc.malloc.tcache_count=0``): blocks
that wait there count as in use, and while they come together, in thousands of requests, a cured loop reads as 2 B per
request (measured with the tiny model on a CPU; without the cache: 0 in 3000 requests).
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import secrets
import signal
import sys
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from o1lab.errors import ProbeError
from o1lab.memory import counters
from o1lab.stats import Estimate, readable, theil_sen

if TYPE_CHECKING:
    import plotly.graph_objects as go

ARMS = {"leaky": "view", "cured": "mean"}
COUNTERS = ("host", "device", "total")
UNIT = "B/request"
WARM_UP, FEWEST = 64, 16
"""Requests before a piece's first reading; readings that a piece needs to count."""
GRAIN_BYTES, FLOOR_BYTES, PROMISE_BYTES = 64, 16.0, 1024.0
"""What a reading can be off by; the probe's floor and the widest half-width asked for, in bytes per request."""
NOT_THERE = -1
TUNABLE = "glibc.malloc.tcache_count=0"
TUNED = TUNABLE in os.environ.get("GLIBC_TUNABLES", "")


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


class Readings:
    """Readings of one piece in arrays made beforehand: a list that grows would be the leak that the soak finds."""

    NAMES = ("milliseconds", "requests", "host", "device", "reserved", "rss")

    def __init__(self, most: int) -> None:
        self.columns = {name: array("q", bytes(8 * most)) for name in self.NAMES}
        self.count = 0

    def take(self, requests: int, seconds: float) -> None:
        """Read quietly after ``requests`` requests; a full array takes no more."""
        if self.count == len(self.columns["requests"]):
            return
        now = counters.read(driver=False)
        row = (round(seconds * 1000), requests, now.host_in_use, now.device_allocated, now.device_reserved, now.rss)
        for name, value in zip(self.NAMES, row, strict=True):
            self.columns[name][self.count] = NOT_THERE if value is None else value
        self.count += 1

    def into(self, piece: Piece) -> Piece:
        """The piece with these readings in it."""
        lists = {
            name: [None if value == NOT_THERE else value for value in column[: self.count]]
            for name, column in self.columns.items()
        }
        return replace(piece, seconds=[ms / 1000 for ms in lists.pop("milliseconds")], **lists)


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
    1.5 [0.7929, 2.207] B (n=40)
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


def soak(
    arm: str, into: str | Path, *, minutes: float = 10.0, cadence_s: float | None = None, model: str = "tiny",
    device: str | None = None, resume: Sequence[Piece] = (), say: Callable[[str], None] = print,
) -> Piece:  # fmt: skip
    """Serve for ``minutes`` and append one piece to ``into``; SIGINT and SIGTERM end it early and lose nothing.

    Parameters
    ----------
    cadence_s : float, optional
        Seconds between readings; default 10, or less where that would give fewer than 60.
    resume : sequence of Piece
        Pieces that a new file begins with.

    Raises
    ------
    SoakError
        Unknown arm, no time, or a file that holds another arm, model or place.
    """
    import torch

    from o1lab import models
    from o1lab.memory.serving_loop import ServingLoop

    if arm not in ARMS or not minutes > 0 or (cadence_s is not None and not cadence_s > 0):
        raise SoakError(f"arm={arm!r}, minutes={minutes}, cadence_s={cadence_s}: arms are {', '.join(ARMS)}, times > 0")
    loaded = models.load(model, device) if device else models.load(model)
    place = torch.cuda.get_device_name(loaded.device) if loaded.device.type == "cuda" else "CPU"
    piece = Piece(arm, model, place, torch.__version__, cadence_s or min(10.0, minutes), not TUNED)
    for other in load(into) if Path(into).exists() else resume:
        if other.key != piece.key:
            raise SoakError(f"{into} holds {', '.join(other.key)}; this is {', '.join(piece.key)}: name another file")
    loop = ServingLoop(loaded, log=ARMS[arm])
    prompts = itertools.cycle([loaded.encode(prompt) for prompt in loaded.prompts(8)])
    for _ in range(WARM_UP):
        loop(next(prompts))
    loop.kept.clear()
    readings = Readings(math.ceil(60 * minutes / piece.cadence_s) + 2)
    with stop_signals() as stopped, counters.frozen():
        begun = time.monotonic()
        end, due, served, told = begun + 60 * minutes, begun, 0, begun
        while not stopped and (now := time.monotonic()) < end:
            if now >= due:
                readings.take(served, now - begun)
                save(into, readings.into(piece), resume)
                due = now + piece.cadence_s
                if now - told >= 30:
                    say(f"soak {arm}: {(now - begun) / 60:.1f} of {minutes:g} min, {served:,} requests")
                    told = now
            loop(next(prompts))
            served += 1
        readings.take(served, time.monotonic() - begun)
    piece = readings.into(replace(piece, end=stopped[0] if stopped else "finished"))
    save(into, piece, resume)
    return piece


@contextmanager
def stop_signals() -> Iterator[list[str]]:
    """Collect SIGINT and SIGTERM in the list instead of ending the process; the old handlers come back."""
    came: list[str] = []
    before = {
        number: signal.signal(number, lambda caught, frame: came.append(signal.Signals(caught).name))
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield came
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _chain(soaked: Soak, counter: str) -> tuple[list[float], list[float]]:
    """Requests and growth in MiB with the pieces end to end, each from where the one before it stopped."""
    xs, ys = [0.0], [0.0]
    for piece in soaked.pieces:
        values = piece.values(counter)
        if values is not None:
            xs += [xs[-1] + request - piece.requests[0] for request in piece.requests[1:]]
            ys += [ys[-1] + (value - values[0]) / 2**20 for value in values[1:]]
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
        title=f"The leak takes {readable(rate.value, 3)} B a request, the cured loop {within}",
        x_title="requests", y_title=f"growth in use, {'host and device' if counter == 'total' else counter} (MiB)",
        labels={"broken": "leaky", "fixed": "cured"},
    )  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Soak one piece, or report on files."""
    parser = argparse.ArgumentParser(prog="o1lab.memory.soak", description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--arm", choices=ARMS)
    parser.add_argument("--into", metavar="FILE", help="file that the piece is appended to")
    parser.add_argument("--resume", metavar="FILE", help="file whose pieces a new --into begins with")
    parser.add_argument("--every", type=float, metavar="S", help="seconds between readings")
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--device", help="default: the GPU if there is one")
    parser.add_argument("--report", nargs="+", metavar="FILE", help="combine these files and print slopes and verdicts")
    options = parser.parse_args(argv)
    if options.report:
        for soaked in combine(load(*options.report)):
            print(soaked)
        return 0
    if not options.arm or not (options.into or options.resume):
        parser.error("give --arm and --into FILE, or --report FILE…")
    if argv is None and not TUNED and sys.platform.startswith("linux"):
        tunables = ":".join(filter(None, (os.environ.get("GLIBC_TUNABLES"), TUNABLE)))
        os.execve(sys.executable, sys.orig_argv, {**os.environ, "GLIBC_TUNABLES": tunables})
    resume = load(options.resume) if options.resume else []
    piece = soak(
        options.arm, options.into or options.resume, minutes=options.minutes, cadence_s=options.every,
        model=options.model, device=options.device, resume=resume,
    )  # fmt: skip
    print(f"{piece.end}: {piece.requests[-1]:,} requests, {len(piece.requests)} readings")
    if len(piece.requests) >= FEWEST:
        print(*combine([piece]), sep="\n")
    return 0


if __name__ == "__main__":
    from o1lab.errors import O1labError

    try:
        sys.exit(main())
    except O1labError as error:
        sys.exit(f"o1lab.memory.soak: {error}")
