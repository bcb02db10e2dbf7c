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
import math
import os
import signal
import sys
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from o1lab.memory import counters
from o1lab.memory.soak_pieces import FEWEST, Piece, Soak, SoakError, combine, figure, load, pooled, save

__all__ = ["Piece", "Readings", "Soak", "SoakError", "combine", "figure", "load", "main", "pooled", "save", "soak"]

ARMS = {"leaky": "view", "cured": "mean"}
WARM_UP = 64
"""Requests before a piece's first reading."""
NOT_THERE = -1
TUNABLE = "glibc.malloc.tcache_count=0"
EXAMPLE = """example, 10 minutes for each arm, a reading every 10 seconds, then what they say together:
  python -m o1lab.memory.soak --arm leaky --minutes 10 --into leaky.json
  python -m o1lab.memory.soak --arm cured --minutes 10 --into cured.json
  python -m o1lab.memory.soak --report leaky.json cured.json"""
TUNED = TUNABLE in os.environ.get("GLIBC_TUNABLES", "")


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


def main(argv: Sequence[str] | None = None) -> int:
    """Soak one piece, or report on files."""
    parser = argparse.ArgumentParser(
        prog="python -m o1lab.memory.soak", description=__doc__.splitlines()[0], epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    add = parser.add_argument
    add("--minutes", type=float, default=10.0, metavar="MIN", help="how long to serve, in minutes (default 10)")
    add("--arm", choices=ARMS, help="leaky keeps a view of each request's logits, cured only a running mean")
    add("--into", metavar="FILE", help="JSON file that the piece is appended to, whole after every reading")
    add("--resume", metavar="FILE", help="file whose pieces a new --into begins with; without --into it is added to")
    add("--every", type=float, metavar="S", help="seconds between readings (default 10, or less: 60 readings at least)")
    add("--model", default="tiny", help="what serves: tiny (default), smollm2, a Hugging Face id or a local folder")
    add("--device", help="cpu, cuda or cuda:N (default: the GPU if there is one)")
    add("--report", nargs="+", metavar="FILE", help="serve nothing: print what these files say together, in B/request")
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
