"""Faults injected into copies: ``python -m o1lab.kv.faults --n 10000`` prints what is caught, by kind and place.

Each trial writes random pages, copies them to the host, evicts them under a failed request and restores them, with one
fault on the way out, in host memory or on the way back. It is *caught* when a typed error or a count says so and no
wrong byte is handed out, and *missed* when one is. The same faults meet three pools: ours, the policy as written (which
compares contents when they have been copied, and no more) and one that does not check at all.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from o1lab.kv.eviction import EvictingPool
from o1lab.kv.lane import CopyFailed, Lane, host_pool
from o1lab.kv.pool import PagePool, PoolError
from o1lab.kv.ranking import Policy
from o1lab.kv.tiers import DamagedCopy
from o1lab.options import ended, new_file, whole
from o1lab.stats import Estimate, proportion

KINDS = {
    "bit flip": ("out", "host", "back"), "swap": ("out", "host", "back"), "zeroed": ("out", "host", "back"),
    "stale generation": ("out", "host"), "wrong page": ("out", "host", "back"), "truncated": ("out", "back"),
    "killed thread": ("out", "back"),
}  # fmt: skip
POOLS = {"full": "ours", "copy": "as written", "none": "no check"}
GROUP, PAGE_BYTES = 2, 1024
_BOTH = ("a", "b")


@dataclass(frozen=True)
class Row:
    """Faults of one kind at one place and what became of them.

    Attributes
    ----------
    recomputed : int
        Of those caught: the host copy itself was damaged, so that its owner is told to compute again.
    unverified : int
        Pages that were evicted although nobody had compared their copy.
    """

    verify: str
    kind: str
    where: str
    injected: int
    caught: int
    missed: int
    recomputed: int
    unverified: int

    @property
    def most_missed(self) -> float:
        """Clopper–Pearson upper bound (95 %, two-sided) of the share missed."""
        from scipy.stats import binomtest

        return float(binomtest(self.missed, self.injected).proportion_ci(0.95, method="exact").high)


def detection(rows: Sequence[Row]) -> Estimate:
    """Share caught, over all rows, with its Wilson interval."""
    return proportion(sum(row.caught for row in rows), sum(row.injected for row in rows))


class Saboteur:
    """A copy that spoils one call when told to."""

    def __init__(self, chance: random.Random) -> None:
        self.chance, self.kind = chance, ""
        self.halfway, self.go_on = threading.Event(), threading.Event()

    def __call__(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy, and do the damage that is planned."""
        kind, self.kind = self.kind, ""
        if kind == "wrong page":  # the right bytes, one page off
            source = source.roll(1, 0)
        if kind in ("truncated", "killed thread"):
            n = self.chance.randrange(source.numel())
            target.view(-1)[:n].copy_(source.view(-1)[:n])
            if kind == "killed thread":
                raise SystemExit
            return
        target.copy_(source)
        if kind == "stale generation":
            self.halfway.set()
            self.go_on.wait()
        elif kind:
            damage(kind, target.view(-1), self.chance)


def by_place(rows: Sequence[Row]) -> dict[str, Estimate]:
    """Share caught of those on the way ``"out"``, in ``"host"`` memory and on the way ``"back"``."""
    return {
        where: detection([row for row in rows if row.where == where]) for where in dict.fromkeys(r.where for r in rows)
    }


def damage(kind: str, data: torch.Tensor, chance: random.Random) -> None:
    """Flip a bit of ``data`` (uint8), swap two of its words, or zero part of it."""
    words = data.view(torch.int32)
    first, second = sorted(chance.sample(range(len(words) + 1), 2))
    if kind == "bit flip":
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    elif kind == "zeroed":
        words[first:second] = 0
    else:
        pair = chance.sample(range(len(words)), 2)
        words[pair] = words[pair[::-1]]


class Bench:
    """A pool of four pages under fire: two owners of two pages each, who are evicted for a third."""

    def __init__(self, verify: str, seed: int) -> None:
        self.chance, self.random = random.Random(f"{seed} faults"), torch.Generator().manual_seed(seed)
        pool = PagePool(2 * GROUP * PAGE_BYTES, device="cpu", page_bytes=PAGE_BYTES, chunk_bytes=2 * GROUP * PAGE_BYTES)
        host, self.bad = host_pool(pool, 8 * GROUP * PAGE_BYTES), Saboteur(self.chance)
        lanes = [Lane(pool, host, verify=verify in checks, copy=self.bad) for checks in (("full", "copy"), ("full",))]
        policy = Policy(copy_at=float("inf"), verify=verify)
        self.tiers = EvictingPool(pool, host, policy, clock=lambda: 0.0, lane=lanes[0], back=lanes[1])

    def trial(self, kind: str, where: str) -> str:
        """One fault; ``"caught"``, ``"recomputed"`` or ``"missed"``."""
        tiers = self.tiers
        truth, before = {owner: self._write(owner) for owner in _BOTH}, self._rejections()
        if where == "out":
            self.bad.kind = kind
        if (kind, where) == ("stale generation", "out"):
            tiers.write_back()
            self.bad.halfway.wait()
            tiers.release("a")
            truth["a"] = self._write("a")  # the same pages, of a later generation
            self.bad.go_on.set()
            tiers.settle(wait=True)
            self.bad.halfway.clear(), self.bad.go_on.clear()
        for _ in range(2):
            try:
                tiers.write_back(wait=True)
            except CopyFailed:
                continue
        for page in tiers.allocate(2 * GROUP, "c"):  # fails, evicts both, and leaves nothing of them behind
            tiers.pool.page(page).random_(generator=self.random)
        tiers.release("c")
        if where == "host":
            self._spoil_host(kind)
        elif where == "back":
            self.bad.kind = kind
        told = False
        found = {}
        for owner in _BOTH:
            try:
                found[owner] = torch.stack([tiers.pool.page(page) for page in tiers.restore(owner)])
            except DamagedCopy:
                told = True
        wrong = any(not torch.equal(found[owner], truth[owner]) for owner in found)
        noticed = told or self._rejections() > before
        for owner in _BOTH:
            tiers.release(owner)
        tiers.settle(wait=True)
        if not wrong and not noticed:
            raise PoolError(f"the fault {kind!r} ({where}) had no effect: the harness is at fault")
        return "missed" if wrong else "recomputed" if told else "caught"

    def _write(self, owner: str) -> torch.Tensor:
        pages = self.tiers.allocate(GROUP, owner)
        content = torch.randint(0, 256, (GROUP, PAGE_BYTES), dtype=torch.uint8, generator=self.random)
        for page, one in zip(pages, content, strict=True):
            self.tiers.pool.page(page).copy_(one)
        self.tiers.seal(pages, owner)
        self.tiers.rest(owner)
        return content

    def _rejections(self) -> int:
        counts = self.tiers.counts
        return counts.rejected_copies + counts.rejected_restores + counts.stale_copies

    def _spoil_host(self, kind: str) -> None:
        """Damage a copy at rest, or let the table name another one: a neighbour's, or an older one of its owner."""
        tiers = self.tiers
        one, other = (tiers._owners[owner].entries[0] for owner in _BOTH)
        if kind == "wrong page":
            one.slots, other.slots = other.slots, one.slots
        elif kind == "stale generation":
            for slot, old in zip(one.slots, other.slots, strict=True):
                owner, index, place, generation, _ = tiers._seals[slot]
                tiers._seals[slot] = (owner, index, place, generation - 1, tiers._seals[old][-1])
                tiers.host.page(slot).copy_(tiers.host.page(old))
        else:
            damage(kind, tiers.host.page(self.chance.choice(one.slots)), self.chance)


def inject(n: int = 10_000, verify: str = "full", seed: int = 0) -> list[Row]:
    """Inject ``n`` faults, the kinds and places in turn, into a pool that verifies like ``verify`` (:class:`Policy`).

    The same seed draws the same faults for each ``verify``.

    Examples
    --------
    >>> detection(inject(34)).value
    1.0
    """
    plans = [(kind, where) for kind, places in KINDS.items() for where in places]
    if n < len(plans):
        raise PoolError(f"n={n}: at least {len(plans)}, one fault of each kind at each place")
    rows = []
    for number, (kind, where) in enumerate(plans):
        injected, bench = len(range(number, n, len(plans))), Bench(verify, seed + number)
        found = Counter(bench.trial(kind, where) for _ in range(injected))
        bench.tiers.check()
        rows.append(
            Row(verify, kind, where, injected, injected - found["missed"], found["missed"], found["recomputed"],
                bench.tiers.counts.unverified_pages)
        )  # fmt: skip
    return rows


def table(results: dict[str, list[Row]]) -> str:
    """The rows of each pool side by side; the bound is ours."""
    head = f"{'fault':<18}{'where':<6}{'injected':>9}" + "".join(f"{POOLS[name]:>12}" for name in results)
    lines = [f"{head}{'missed at most':>16}{'recompute':>11}"]
    first = next(iter(results.values()))
    for place, row in enumerate(first):
        caught = "".join(f"{rows[place].caught:>12,}" for rows in results.values())
        lines.append(
            f"{row.kind:<18}{row.where:<6}{row.injected:>9,}{caught}{row.most_missed:>16.3%}{row.recomputed:>11,}"
        )
    for name, rows in results.items():
        unverified = sum(row.unverified for row in rows)
        lines.append(f"{POOLS[name]}: {detection(rows)} caught; {unverified:,} pages evicted unverified")
    return "\n".join(lines)


@ended
def main(argv: Sequence[str] | None = None) -> int:
    """Inject faults and print the table."""
    parser = argparse.ArgumentParser(prog="python -m o1lab.kv.faults", description=__doc__)
    parser.add_argument("--n", type=whole(1), default=10_000, help="faults in all (%(default)s)")
    parser.add_argument("--seed", type=whole(0, 2**32), default=0)
    parser.add_argument("--json", type=new_file, help="write the rows there")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    results = {verify: inject(options.n, verify, options.seed) for verify in POOLS}
    print(table(results))
    if options.json:
        found: dict[str, Any] = {POOLS[name]: [asdict(row) for row in rows] for name, rows in results.items()}
        options.json.write_text(json.dumps(found, indent=1), encoding="utf-8")
    return 0 if not any(row.missed or row.unverified for row in results["full"]) else 1


if __name__ == "__main__":
    sys.exit(main())
