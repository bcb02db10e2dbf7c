"""Courses of allocations, frees and stream marks that are right, and hazards planted into them one at a time."""

from __future__ import annotations

from o1lab.memory import trace as t
from o1lab.memory.allocator import CachingAllocator
from o1lab.memory.allocator_settings import Settings
from o1lab.memory.hazards import Use, Wait

STREAMS = (0, 11, 22)


class Course:
    """Writes the trace that torch would, and the marks of the work; every step has a microsecond of its own."""

    def __init__(self) -> None:
        self.allocator = CachingAllocator(Settings(), ((0, 0), (0, 1)))
        self.entries, self.uses, self.waits, self.captures = [], [], [], []
        self.live, self.parked = [], []
        self.now = 0

    def entry(self, action, address, size, stream, pool=0):
        self.now += 10
        facts = {"size": size, "stream": stream, "time_us": self.now, "pool_id": (0, pool)}
        self.entries.append({"action": action, "addr": address, **facts})

    def alloc(self, size, stream=0, pool=0):
        before = self.allocator.reserved_bytes
        block = self.allocator.allocate(size, stream, pool)
        if self.allocator.reserved_bytes > before:
            self.entry("segment_alloc", block.address, self.allocator.reserved_bytes - before, stream, pool)
        self.entry("alloc", block.address, size, stream, pool)
        self.live.append(block)
        return block

    def request(self, block):
        self.live.remove(block)
        self.entry("free_requested", block.address, block.requested, block.stream, block.pool.number)

    def free(self, block, parked=False):
        self.request(block)
        address = block.address  # merging moves it
        self.allocator.free(block, wait=parked)
        if parked:
            self.parked.append((block, address, block.requested))
        else:
            self.entry("free_completed", address, block.requested, block.stream, block.pool.number)

    def complete(self):
        block, address, requested = self.parked.pop(0)
        self.entry("free_completed", address, requested, block.stream, block.pool.number)
        self.allocator.complete(block)

    def use(self, block, stream, **facts):
        self.now += 10
        self.uses.append(Use(stream, block.address, block.requested, self.now, **facts))

    def wait(self, stream, on):
        self.now += 10
        self.waits.append(Wait(stream, on, self.now))

    def steps(self, rng, count):
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

    def finish(self):
        """Free everything; return the trace."""
        while self.parked:
            self.complete()
        for block in list(self.live):
            self.free(block)
        return self.trace()

    def trace(self):
        return t.from_snapshot({"segments": [], "device_traces": [self.entries]})

    def marks(self):
        return {"uses": self.uses, "waits": self.waits, "captures": self.captures}


def plant(course, kind, rng):
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
