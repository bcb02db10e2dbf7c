"""What an evicting pool counts, and whether its books are right."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from o1lab.kv.ranking import State

if TYPE_CHECKING:
    from o1lab.kv.tiers import Tiers


@dataclass
class Counts:
    """Counts since the start, in pages where the name says so.

    Attributes
    ----------
    failed_requests, refusals : int
        Requests for which too little was free, and those of them that eviction did not help either.
    copied_pages, late_pages, restored_pages : int
        Sent to the host, those of them that a failed request had to wait for, and brought back.
    evicted_pages, unverified_pages : int
        Evicted, and those of them whose copy nobody had compared.
    rejected_copies, rejected_restores, stale_copies : int
        Groups whose copy failed or differed on the way out or back, or whose pages had changed hands meanwhile.
    host_full : int
        Times a copy was put off because the host pool had no room.
    stalls_us : deque of float
        Time in which room was made for each failed request that could be served, the last 100,000.
    """

    failed_requests: int = 0
    refusals: int = 0
    copied_pages: int = 0
    late_pages: int = 0
    restored_pages: int = 0
    evicted_pages: int = 0
    unverified_pages: int = 0
    rejected_copies: int = 0
    rejected_restores: int = 0
    stale_copies: int = 0
    host_full: int = 0
    stalls_us: deque[float] = field(default_factory=lambda: deque(maxlen=100_000), repr=False)


def faults(tiers: Tiers) -> list[str]:
    """What is wrong in the books, the lock being held; empty for sound ones."""
    found: list[str] = []
    pool, resident = tiers.pool, [page for entry in tiers._at.values() for page in entry.pages]
    held = resident + [page for record in tiers._owners.values() for page in record.open]
    if len(set(held)) != len(held):
        found.append(f"pages {[page for page, n in Counter(held).items() if n > 1][:8]} are in two groups")
    if len(held) != pool.pages - pool.free_pages:
        found.append(f"{len(held)} pages are in groups or open, {pool.pages - pool.free_pages} are in use")
    for owner, record in tiers._owners.items():
        if record.resident != sum(len(entry.pages) for entry in record.entries):
            found.append(f"{owner!r} is counted with {record.resident} pages in groups on the device")
    entries = [entry for record in tiers._owners.values() for entry in record.entries]
    for entry in entries:
        wrong = {
            f"has pages {entry.pages}": (entry.state is State.HOST) == bool(entry.pages),
            f"has host pages {entry.slots}": (entry.state not in (State.SEALED, State.COPYING)) != bool(entry.slots),
            "is not known by its first page": bool(entry.pages) and tiers._at.get(entry.pages[0]) is not entry,
            "has pages that somebody else holds": any(pool._holder[page] != entry.owner for page in entry.pages),
            "has a copy without a seal": not tiers._seals.keys() >= set(entry.slots),
        }
        who = f"group {entry.index} of {entry.owner!r}, {entry.state.name},"
        found += [f"{who} {what}" for what, bad in wrong.items() if bad]
    entries += [entry for entry in tiers._at.values() if entry.released]
    slots = [slot for entry in entries for slot in entry.slots]
    if sorted(slots) != sorted(tiers._seals):
        found.append(f"{len(slots)} host pages hold copies, {len(tiers._seals)} are sealed")
    slots += [slot for job in tiers._jobs if job.to_host for slot in job.slots]
    if len(set(slots)) != len(slots) or len(slots) != tiers.host.pages - tiers.host.free_pages:
        found.append(f"{len(slots)} host pages are known, {tiers.host.pages - tiers.host.free_pages} are in use")
    return found
