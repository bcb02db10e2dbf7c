"""Does fragmentation itself make appends uneven? The same growing cache with the same copies, and fragmentation gone.

Three arms serve the same traffic and copy the same bytes. ``"torch's default"`` takes every longer tensor from the
caching allocator; ``"expandable"`` does so with expandable segments, torch's own setting against fragmentation, which
maps memory instead; ``"no allocator"`` copies between two buffers that are ready before the first step. What
fragmentation costs lies between what the second and the third arm save: one still pays for mapping, the other does not
even pay for asking. Each setting has a process of its own, as it is read when CUDA starts; the arms take turns.
"""

from __future__ import annotations

import multiprocessing
import os
import random
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from o1lab import stats
from o1lab.kv.backing import OnDevice, limited
from o1lab.kv.designs import Growing, KVShape
from o1lab.kv.pool import PoolError
from o1lab.kv.replay import replay
from o1lab.kv.traffic import Traffic
from o1lab.stats import Estimate

DEFAULT, EXPANDABLE, READY = "torch's default", "expandable", "no allocator"
SETTINGS = {DEFAULT: "", EXPANDABLE: "expandable_segments:True", READY: ""}
VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
COUNTERS = {"retries": "num_alloc_retries", "device_allocs": "num_device_alloc"}


class _Slot(NamedTuple):
    number: int
    side: int
    size: int


class Ready(OnDevice):
    """Memory that is there before the first request: ``torch.cat`` goes to and fro between two buffers of a slot.

    Parameters
    ----------
    slots : int
        Tensors at a time.
    slot_bytes : int
        Longest tensor.
    """

    def __init__(self, device: Any, *, slots: int, slot_bytes: int) -> None:
        super().__init__(device, slot_bytes)
        self._buffers = self._torch.zeros(slots, 2, slot_bytes, dtype=self._torch.uint8, device=self.device)
        self._free = list(range(slots))

    def new(self, size: int) -> _Slot | None:  # type: ignore[override]
        """A free slot, or ``None``."""
        if not self._free or size > self._buffers.shape[2]:
            return None
        self._count(size)
        return _Slot(self._free.pop(), 0, size)

    def drop(self, handle: _Slot) -> None:  # type: ignore[override]
        """Give a slot back."""
        self._free.append(handle.number)
        self.allocated_bytes -= handle.size

    def extend(self, handle: _Slot, size: int) -> _Slot | None:  # type: ignore[override]
        """The same copy as ``torch.cat`` makes, into the slot's other buffer."""
        number, side, old = handle
        if size > self._buffers.shape[2]:
            return None
        buffers = self._buffers[number]
        self._torch.cat([buffers[side, :old], self._source[: size - old]], out=buffers[1 - side, :size])
        self._count(size - old)
        return _Slot(number, 1 - side, size)

    def write(self, target: _Slot, begin: int, size: int) -> None:  # type: ignore[override]
        """Into the buffer in use."""
        super().write(self._buffers[target.number, target.side], begin, size)


@dataclass(frozen=True)
class Played:
    """One replay of one arm: the steps' times, and what the allocator had to do for them (0 on a CPU)."""

    append_us: Sequence[float] = field(repr=False)
    lost: int
    peak_reserved_bytes: int
    retries: int
    device_allocs: int

    def quantile(self, q: float) -> float:
        """Of the steps' times, in µs."""
        return float(np.quantile(self.append_us, q))


def play(traffic: Traffic, shape: KVShape, arm: str, device: str, capacity_bytes: int | None = None) -> Played:
    """Serve ``traffic`` once with a growing cache, under the allocator settings that this process has.

    Parameters
    ----------
    capacity_bytes : int, optional
        On CUDA, for the arms that allocate: what the allocator may reserve for the caches.
    """
    import torch

    longest, cuda = max(one.tokens for one in traffic) * shape.half_bytes, device.startswith("cuda")
    if arm == READY:
        memory: OnDevice = Ready(device, slots=2 * shape.layers * traffic.concurrent, slot_bytes=longest)
    else:
        memory = OnDevice(device, longest)
    stats_of = torch.cuda.memory_stats if cuda else dict
    before: Mapping[str, int] = stats_of()
    with limited(memory, capacity_bytes if cuda and arm != READY else None):
        found = replay(traffic, Growing(shape, memory))
    after: Mapping[str, int] = stats_of()
    counts = {name: after.get(key, 0) - before.get(key, 0) for name, key in COUNTERS.items()}
    times = found.append_us[found.running > 0].tolist()
    return Played(times, found.failures, found.peak_reserved_bytes, **counts)


def _settings(text: str) -> None:
    """Set them before this process starts CUDA, under the older name too, which wins; the user's own do not count."""
    for name in VARIABLES:
        os.environ.pop(name, None)
        if text:
            os.environ[name] = text


@dataclass(frozen=True)
class Removed:
    """Replays by arm, paired by their round."""

    played: Mapping[str, Sequence[Played]]

    def saving(self, arm: str, q: float = 0.99) -> Estimate:
        """How much of quantile ``q`` an arm saves of the default's, in %: the median over the rounds."""
        pairs = zip(self.played[DEFAULT], self.played[arm], strict=True)
        return stats.median([100 * (1 - new.quantile(q) / old.quantile(q)) for old, new in pairs], "%")

    def noise(self, q: float = 0.99) -> Estimate:
        """The same between one round of the default and the next, where nothing was changed."""
        times = [one.quantile(q) for one in self.played[DEFAULT]]
        return stats.median([100 * (1 - new / old) for old, new in zip(times, times[1:] + times[:1], strict=True)], "%")

    def bounds(self, q: float = 0.99) -> Estimate:
        """What fragmentation costs: from the lower end of what one arm saves to the upper end of the other's."""
        both = [self.saving(arm, q) for arm in (EXPANDABLE, READY)]
        value = sum(one.value for one in both) / 2
        return Estimate(value, min(one.low for one in both), max(one.high for one in both), both[0].n, "%")

    def __str__(self) -> str:
        lines = [f"{'µs of one step':<18}{'P50':>9}{'P99':>9}{'P99.9':>9}{'reserved MiB':>14}{'retries':>9}"
                 f"{'from driver':>13}{'lost':>6}"]  # fmt: skip
        for arm, rounds in self.played.items():
            times = "".join(f"{np.median([one.quantile(q) for one in rounds]):>9,.0f}" for q in (0.5, 0.99, 0.999))
            peak = max(one.peak_reserved_bytes for one in rounds) / 2**20
            counts = [np.mean([vars(one)[name] for one in rounds]) for name in ("retries", "device_allocs", "lost")]
            lines.append(f"{arm:<18}{times}{peak:>14,.0f}{counts[0]:>9,.1f}{counts[1]:>13,.1f}{counts[2]:>6,.1f}")
        return "\n".join(lines)


def removed(
    traffic: Traffic, shape: KVShape, *, device: str = "cuda", capacity_bytes: int | None = None, rounds: int = 9,
    seed: int = 0,
) -> Removed:  # fmt: skip
    """Play all arms ``rounds`` times in turns, in random order within a round; the first round does not count.

    Parameters
    ----------
    capacity_bytes : int, optional
        See :func:`play`: the less, the more often the default has to flush its cache.
    rounds : int
        At least 6.

    Raises
    ------
    PoolError
        Too few rounds.
    """
    if rounds < 6:
        raise PoolError(f"rounds={rounds}: at least 6, or the median has no interval")
    played: dict[str, list[Played]] = {arm: [] for arm in SETTINGS}
    chance, spawn = random.Random(f"removed {seed}"), multiprocessing.get_context("spawn")
    with ExitStack() as stack:
        process = {
            text: stack.enter_context(ProcessPoolExecutor(1, spawn, initializer=_settings, initargs=(text,)))
            for text in dict.fromkeys(SETTINGS.values())
        }
        for number in range(rounds + 1):
            for arm in chance.sample(list(SETTINGS), len(SETTINGS)):
                one = process[SETTINGS[arm]].submit(play, traffic, shape, arm, device, capacity_bytes).result()
                if number:
                    played[arm].append(one)
    return Removed(played)
