"""What a cache design asks of memory: of the model of an allocator, or of a real device.

:class:`Modelled` passes requests to any allocator's model and notes them; :class:`OnDevice` makes tensors and writes to
them. Both are asked alike, so that the same sequence of requests can be simulated and run.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from o1lab.kv.pool import PoolError

if TYPE_CHECKING:
    import torch

BLOCK_BYTES = 512


class Event(NamedTuple):
    """One request to the allocator: ``"alloc"`` or ``"free"`` of a block, its bytes, and the decode step."""

    action: str
    block: int
    size: int
    step: int


class Allocator(Protocol):
    """What :class:`Modelled` needs of an allocator; ``o1lab.memory.allocator.CachingAllocator`` is one."""

    allocated_bytes: int
    reserved_bytes: int

    def allocate(self, requested: int, stream: int) -> Any:
        """A block, or ``None`` where memory is out."""

    def free(self, block: Any) -> None:
        """Take the block back."""


class Bytes:
    """The ideal allocator: sizes are rounded to 512 bytes and nothing else is lost.

    Examples
    --------
    >>> memory = Bytes(1024)
    >>> memory.allocate(600, 0), memory.allocate(1, 0)
    (1024, None)
    """

    def __init__(self, capacity_bytes: float = float("inf")) -> None:
        self.capacity_bytes, self.allocated_bytes = capacity_bytes, 0

    @property
    def reserved_bytes(self) -> int:
        """The same as allocated."""
        return self.allocated_bytes

    def allocate(self, requested: int, stream: int) -> int | None:
        """The rounded size, which is its own handle; ``None`` above the capacity."""
        size = -(-max(requested, 1) // BLOCK_BYTES) * BLOCK_BYTES
        if self.allocated_bytes + size > self.capacity_bytes:
            return None
        self.allocated_bytes += size
        return size

    def free(self, block: int) -> None:
        """Take a block back."""
        self.allocated_bytes -= block


class Modelled:
    """Memory that exists in an allocator's books only; notes every request in ``events``.

    Parameters
    ----------
    allocator : Allocator, optional
        Default: :class:`Bytes` without a limit.
    """

    device = "meta"

    def __init__(self, allocator: Allocator | None = None) -> None:
        self.allocator: Any = Bytes() if allocator is None else allocator
        self.events: list[Event] = []
        self.step = self._count = 0
        self.peak_reserved_bytes = 0

    @property
    def capacity_bytes(self) -> int | None:
        """Most that the allocator may take, if it has a limit."""
        capacity = getattr(self.allocator, "capacity_bytes", getattr(self.allocator, "capacity", None))
        return None if capacity in (None, float("inf")) else int(capacity)

    @property
    def reserved_bytes(self) -> int:
        """Taken from the device."""
        return self.allocator.reserved_bytes

    @property
    def allocated_bytes(self) -> int:
        """In blocks handed out."""
        return self.allocator.allocated_bytes

    def new(self, size: int) -> tuple[int, int, Any] | None:
        """A block of ``size`` bytes, or ``None``."""
        block = self.allocator.allocate(size, 0)
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.allocator.reserved_bytes)
        if block is None:
            return None
        self._count += 1
        self.events.append(Event("alloc", self._count, size, self.step))
        return self._count, size, block

    def drop(self, handle: tuple[int, int, Any]) -> None:
        """Give a block back."""
        number, size, block = handle
        self.events.append(Event("free", number, size, self.step))
        self.allocator.free(block)

    def extend(self, handle: tuple[int, int, Any], size: int) -> tuple[int, int, Any] | None:
        """What ``torch.cat`` asks for: the new block while the old one is still there."""
        new = self.new(size)
        if new is not None:
            self.drop(handle)
        return new

    def write(self, target: Any, begin: int, size: int) -> None:
        """Nothing to write."""

    def settle(self) -> None:
        """Nothing to wait for."""


class OnDevice:
    """Real memory: each request is a tensor of bytes, written to as a cache would be.

    On a CPU what is reserved cannot be read; what is allocated stands for it.

    Parameters
    ----------
    device : str or torch.device
    most_bytes : int
        Longest write at once: the source of all writes is one tensor of that size.

    Attributes
    ----------
    begin_bytes : int
        What was reserved before the first request.
    """

    def __init__(self, device: str | torch.device, most_bytes: int = 64 << 20) -> None:
        import torch

        self._torch, self.device = torch, torch.device(device)
        self.step = self.allocated_bytes = self._peak = self.begin_bytes = 0
        self._source = torch.ones(most_bytes, dtype=torch.uint8, device=self.device)
        self._cuda = self.device.type == "cuda"
        if self._cuda:
            self.settle()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.device)
            self.begin_bytes = torch.cuda.memory_reserved(self.device)

    @property
    def reserved_bytes(self) -> int:
        """Taken from the device since this object was made."""
        return self._torch.cuda.memory_reserved(self.device) - self.begin_bytes if self._cuda else self.allocated_bytes

    @property
    def peak_reserved_bytes(self) -> int:
        """Most that was taken."""
        return self._torch.cuda.max_memory_reserved(self.device) - self.begin_bytes if self._cuda else self._peak

    def new(self, size: int) -> torch.Tensor | None:
        """A tensor of ``size`` bytes, or ``None`` where memory is out."""
        try:
            tensor = self._torch.empty(size, dtype=self._torch.uint8, device=self.device)
        except self._torch.OutOfMemoryError:
            return None
        self._count(size)
        return tensor

    def drop(self, handle: torch.Tensor) -> None:
        """Forget a tensor; its memory comes back with the last reference."""
        self.allocated_bytes -= handle.numel()

    def extend(self, handle: torch.Tensor, size: int) -> torch.Tensor | None:
        """``torch.cat`` of the old tensor and new bytes."""
        try:
            tensor = self._torch.cat([handle, self._source[: size - handle.numel()]])
        except self._torch.OutOfMemoryError:
            return None
        self._count(size)
        self.drop(handle)
        return tensor

    def write(self, target: torch.Tensor, begin: int, size: int) -> None:
        """Write ``size`` bytes into ``target`` from ``begin`` on."""
        target[begin : begin + size].copy_(self._source[:size])

    def settle(self) -> None:
        """Wait until the device is done."""
        if self._cuda:
            self._torch.cuda.synchronize(self.device)

    def _count(self, size: int) -> None:
        self.allocated_bytes += size
        self._peak = max(self._peak, self.allocated_bytes)


@contextmanager
def limited(memory: OnDevice, limit_bytes: int | None) -> Iterator[None]:
    """Inside, the process may take no more than ``limit_bytes`` from a CUDA device in addition; None: no limit."""
    if limit_bytes is None:
        yield
        return
    import torch

    if memory.device.type != "cuda":
        raise PoolError(f"limit_bytes={limit_bytes} on {memory.device}: only CUDA memory can be limited")
    index = torch.cuda.current_device() if memory.device.index is None else memory.device.index
    most = torch.cuda.memory_reserved(index) + limit_bytes
    torch.cuda.set_per_process_memory_fraction(
        min(1.0, most / torch.cuda.get_device_properties(index).total_memory), index
    )
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, index)
