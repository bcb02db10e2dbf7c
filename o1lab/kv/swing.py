"""How steady memory stays while traffic is served: real memory, read after each step.

What is read is what the whole process has taken: on CUDA what torch has from the driver, on a CPU the resident set
without files, of which the system takes back pages (of libraries, say) whenever it likes. So the pool's own reservation
is measured like everything else, and nothing is flat by definition.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from o1lab.host import rss_bytes, trim
from o1lab.kv.backing import OnDevice, limited
from o1lab.kv.designs import Design
from o1lab.kv.pool import PoolError
from o1lab.kv.replay import Outcome, replay
from o1lab.kv.traffic import Traffic

if TYPE_CHECKING:
    import numpy as np
    import torch

WARM_UP = 0.2
"""Part of the time under full load that is left out."""


@dataclass(frozen=True)
class Watched:
    """Traffic served with real memory.

    Attributes
    ----------
    outcome : Outcome
    taken_bytes : numpy.ndarray, shape (steps,)
        What the process had taken beyond what it had before, after each step.
    """

    outcome: Outcome
    taken_bytes: np.ndarray

    @property
    def swing(self) -> float:
        """See :func:`swing`."""
        return swing(self.taken_bytes, self.outcome.running)


def swing(taken_bytes: Any, running: Any, warm_up: float = WARM_UP) -> float:
    """Half the range of ``taken_bytes`` as a share of its mean, in %: the x of "± x %".

    Only steps under full load count (as many sequences as ever ran at once), without the first ``warm_up`` of them.

    Examples
    --------
    >>> swing([0, 90, 110, 100, 5], [1, 2, 2, 2, 1], warm_up=0)
    10.0
    """
    import numpy as np

    taken, running = np.asarray(taken_bytes, dtype=float), np.asarray(running)
    loaded = np.flatnonzero(running == running.max(initial=0))
    loaded = loaded[int(warm_up * len(loaded)) :]
    if not len(loaded) or not taken[loaded].mean() > 0:
        raise PoolError("no swing: nothing ran, or the process did not take more than it gave back")
    return float(100 * np.ptp(taken[loaded]) / 2 / taken[loaded].mean())


def watch(
    traffic: Traffic, make: Callable[[OnDevice], Design], device: str | torch.device, *,
    limit_bytes: int | None = None, **settings: Any,
) -> Watched:  # fmt: skip
    """Serve ``traffic`` with real memory and read what the process takes.

    Parameters
    ----------
    make : callable
        The design for the memory it is given, e.g. ``lambda memory: Growing(shape, memory)``.
    limit_bytes : int, optional
        On CUDA: the process may take no more than that in addition; what then fails is in the outcome.
    **settings
        Of :func:`o1lab.kv.replay.replay`.

    Examples
    --------
    >>> from o1lab.kv import KVShape, Paged, long_cot
    >>> traffic = long_cot(4, concurrent=2, median_tokens=40, most_tokens=60, prompt_tokens=16)
    >>> found = watch(traffic, lambda memory: Paged(KVShape(), memory, capacity_bytes=16 << 20), "cpu", stride=8)
    >>> found.outcome.finished, found.outcome.clean
    (4, True)
    """
    import numpy as np

    gc.collect()  # a pool that is only garbage would give its memory back in the middle
    trim()  # what the heap holds free would be taken without being seen
    memory = _Read(device)
    with limited(memory, limit_bytes):
        design = make(memory)
        pool = getattr(design, "pool", None)
        if pool is not None:
            pool.arena.zero_()  # on a CPU memory is only there once it is touched
        memory.read.clear()
        outcome = replay(traffic, design, **settings)
    return Watched(outcome, np.array(memory.read[1::2]))  # settled twice a step: after admissions and at its end


class _Read(OnDevice):
    """Real memory that notes at each settling what the process has taken since this object was made."""

    def __init__(self, device: str | torch.device) -> None:
        self.read: list[int] = []
        self._before = 0
        super().__init__(device)
        self._before = self._taken()

    def settle(self) -> None:
        """Wait until the device is done, and read."""
        super().settle()
        self.read.append(self._taken() - self._before)

    def _taken(self) -> int:
        if self._cuda:
            return self._torch.cuda.memory_reserved(self.device)
        return rss_bytes()
