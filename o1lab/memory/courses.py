"""Made-up courses of allocations, frees and stream marks, all right, and hazards planted into them one at a time."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from o1lab.memory import trace as t
from o1lab.memory.allocator import CachingAllocator
from o1lab.memory.allocator_settings import Settings
from o1lab.memory.hazards import Use, Wait, hazards

STREAMS = (0, 11, 22)
KINDS = {
    "double free": "error", "free without allocation": "error", "free on another stream": "error",
    "completed without request": "error", "overlap": "error", "outside any segment": "error",
    "segment freed in use": "error", "use after free": "error", "reuse race": "error", "unordered use": "error",
    "never freed": "note", "never completed": "note", "freed outside the capture": "note",
    "freed inside a capture": "note",
}  # fmt: skip
"""Every kind of hazard and its severity."""


class Course:
    """Writes the trace that torch would, and the marks of the work; every step has a microsecond of its own."""

    def __init__(self) -> None:
        self.allocator = CachingAllocator(Settings(), ((0, 0), (0, 1)))
        self.entries: list[dict[str, Any]] = []
        self.uses, self.waits, self.captures = list[Use](), list[Wait](), list[Any]()
        self.live, self.parked = list[Any](), list[Any]()
        self.now = 0

    def entry(self, action: str, address: int, size: int, stream: int, pool: int = 0) -> None:
        """Write one entry."""
        self.now += 10
        facts = {"size": size, "stream": stream, "time_us": self.now, "pool_id": (0, pool)}
        self.entries.append({"action": action, "addr": address, **facts})

    def alloc(self, size: int, stream: int = 0, pool: int = 0) -> Any:
        """Hand out a block where the real allocator would."""
        before = self.allocator.reserved_bytes
        block = self.allocator.allocate(size, stream, pool)
        if self.allocator.reserved_bytes > before:
            self.entry("segment_alloc", block.address, self.allocator.reserved_bytes - before, stream, pool)
        self.entry("alloc", block.address, size, stream, pool)
        self.live.append(block)
        return block

    def request(self, block: Any) -> None:
        """Ask for its free."""
        self.live.remove(block)
        self.entry("free_requested", block.address, block.requested, block.stream, block.pool.number)

    def free(self, block: Any, parked: bool = False) -> None:
        """Free it; ``parked``: another stream is still waited for."""
        self.request(block)
        address = block.address  # merging moves it
        self.allocator.free(block, wait=parked)
        if parked:
            self.parked.append((block, address, block.requested))
        else:
            self.entry("free_completed", address, block.requested, block.stream, block.pool.number)

    def complete(self) -> None:
        """End the longest wait."""
        block, address, requested = self.parked.pop(0)
        self.entry("free_completed", address, requested, block.stream, block.pool.number)
        self.allocator.complete(block)

    def use(self, block: Any, stream: int, **facts: Any) -> None:
        """Mark work of ``stream`` on the block."""
        self.now += 10
        self.uses.append(Use(stream, block.address, block.requested, self.now, **facts))

    def wait(self, stream: int | None, on: int | None) -> None:
        """Mark that ``stream`` waits for ``on``."""
        self.now += 10
        self.waits.append(Wait(stream, on, self.now))

    def steps(self, rng: random.Random, count: int) -> None:
        """Random right steps: own-stream use, ordered use elsewhere, ``record_stream``, waits of streams and host."""
        for _ in range(count):
            kind = rng.random()
            if kind < 0.4 or not self.live:
                block = self.alloc(int(rng.lognormvariate(12, 3)) % (40 << 20) + 1, rng.choice(STREAMS), 0)
                self.use(block, block.stream)
            elif kind < 0.55:  # elsewhere and back: two waits order it
                block = rng.choice(self.live)
                other = rng.choice(STREAMS)
                self.wait(other, block.stream)
                self.use(block, other, writes=rng.random() < 0.5)
                self.wait(block.stream, other)
            elif kind < 0.65:  # elsewhere, and the allocator is told
                block = rng.choice(self.live)
                other = rng.choice([stream for stream in STREAMS if stream != block.stream])
                self.wait(other, block.stream)
                self.use(block, other, recorded=True)
                self.free(block, parked=True)
            elif kind < 0.7:
                self.wait(rng.choice([None, *STREAMS]), None)
            elif kind < 0.8 and self.parked:
                self.complete()
            else:
                self.free(rng.choice(self.live))

    def finish(self) -> t.Trace:
        """Free everything; return the trace."""
        while self.parked:
            self.complete()
        for block in list(self.live):
            self.free(block)
        return self.trace()

    def trace(self) -> t.Trace:
        """The trace so far."""
        return t.from_snapshot({"segments": [], "device_traces": [self.entries]})

    def marks(self) -> dict[str, Any]:
        """Keyword arguments for :func:`~o1lab.memory.hazards.hazards`."""
        return {"uses": self.uses, "waits": self.waits, "captures": self.captures}


def plant(course: Course, kind: str, rng: random.Random) -> int:
    """Do one wrong thing; return the address at which it must be found."""
    stream = rng.choice(STREAMS)
    other = rng.choice([number for number in STREAMS if number != stream])
    size = rng.randrange(600, 5 << 20)
    if kind == "outside any segment":
        course.entry("alloc", 1 << 40, size, stream)
        course.entry("free_requested", 1 << 40, size, stream)
        course.entry("free_completed", 1 << 40, size, stream)
        return 1 << 40
    if kind == "free without allocation":
        course.entry("free_requested", 1 << 41, size, stream)
        course.entry("free_completed", 1 << 41, size, stream)
        return 1 << 41
    course.wait(None, None)
    pool = 1 if kind == "freed outside the capture" else 0
    block = course.alloc(size, stream, pool)
    address = block.address
    if kind == "double free":
        course.free(block)
        course.entry("free_requested", address, size, stream)
        course.entry("free_completed", address, size, stream)
    elif kind == "free on another stream":
        course.live.remove(block)
        course.allocator.free(block)
        course.entry("free_requested", address, size, other)
        course.entry("free_completed", address, size, other)
    elif kind == "completed without request":
        course.entry("free_completed", address, size, stream)
    elif kind == "overlap":
        address += 512
        course.entry("alloc", address, 40, stream)
        course.entry("free_requested", address, 40, stream)
        course.entry("free_completed", address, 40, stream)
    elif kind == "segment freed in use":
        made = [made for made in course.entries if made["action"] == "segment_alloc"]
        segment = next(made for made in made[::-1] if 0 <= address - made["addr"] < made["size"])
        address = segment["addr"]
        course.entry("segment_free", address, segment["size"], stream)
        course.entry("segment_alloc", address, segment["size"], stream)
    elif kind == "use after free":
        course.use(block, stream)
        course.free(block)
        course.now += 10
        course.uses.append(Use(stream, address, size, course.now))
    elif kind == "reuse race":
        course.wait(other, stream)
        course.use(block, other)
        course.free(block)
        again = course.alloc(size, stream)
        assert again.address == address
        course.use(again, stream)
    elif kind == "unordered use":
        course.use(block, stream)
        course.use(block, other)
        course.wait(stream, other)
    elif kind == "never freed":
        course.live.remove(block)
    elif kind == "never completed":
        course.free(block, parked=True)
        course.parked.pop()
    elif kind == "freed outside the capture":
        course.free(block)
    elif kind == "freed inside a capture":
        course.captures.append(((0, 1), course.now + 1, course.now + 15))
        course.free(block)
    return address


@dataclass(frozen=True)
class Planted:
    """``found`` of ``planted`` hazards were named right, and alone; ``alarms`` of ``clean`` courses were accused."""

    planted: int
    found: int
    clean: int
    alarms: int
    missed: tuple[str, ...]


def detect(each: int = 10, *, clean: int = 40, seed: int = 0) -> Planted:
    """Plant ``each`` hazards of every kind into random courses, make ``clean`` right ones beside, and judge all.

    Examples
    --------
    >>> found = detect(1, clean=2)
    >>> found.found, found.planted, found.alarms
    (14, 14, 0)
    """
    missed: list[str] = []
    for kind, severity in KINDS.items():
        for number in range(each):
            rng, course = random.Random(f"{seed} {kind} {number}"), Course()
            course.steps(rng, rng.randrange(60))
            address = plant(course, kind, rng)
            if kind == "never freed":  # its block stays; all others end as they should
                course.steps(rng, rng.randrange(20))
            said = hazards(course.finish(), **course.marks())
            right = any((one.kind, one.address, one.severity) == (kind, address, severity) for one in said)
            if not right or {one.kind for one in said} != {kind}:
                missed.append(kind)
    alarms = 0
    for number in range(clean):
        rng, course = random.Random(f"{seed} clean {number}"), Course()
        course.steps(rng, rng.randrange(20, 150))
        alarms += bool(hazards(course.finish(), **course.marks()))
    total = each * len(KINDS)
    return Planted(total, total - len(missed), clean, alarms, tuple(missed))
