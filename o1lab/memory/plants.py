"""Leaks of a known size, to find out what an instrument can see. Each is a context manager with one knob, ``on``."""

from __future__ import annotations

import ctypes
import sys
from typing import Any, Self

from o1lab.errors import ProbeError


class HostPlant:
    """Keep ``size_bytes`` of native host memory per call, as a C++ extension that forgets to free would.

    No Python object owns the memory, so ``tracemalloc`` and ``gc`` cannot see it; it models the 48-byte leak per
    operator call of pytorch#191340. Leaving the context frees everything. With ``on=False`` a call keeps nothing.

    ``malloc`` rounds up to its chunk: :attr:`true_bytes` is what one call really takes (from ``malloc_usable_size``
    plus the 8-byte header).

    Examples
    --------
    >>> with HostPlant(64) as leak:
    ...     leak()
    ...     leak.calls
    1
    """

    def __init__(self, size_bytes: int, *, on: bool = True) -> None:
        if size_bytes < 1:
            raise ProbeError(f"size_bytes={size_bytes} plants nothing; give at least 1")
        self.size_bytes, self.on, self.calls, self.true_bytes = int(size_bytes), on, 0, 0
        self._last = 0
        libc = ctypes.CDLL(None) if sys.platform != "win32" else ctypes.cdll.msvcrt
        self._malloc, self._free = libc.malloc, libc.free
        self._malloc.restype, self._malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
        self._free.restype, self._free.argtypes = None, [ctypes.c_void_p]
        self._usable = getattr(libc, "malloc_usable_size", None)
        if self._usable is not None:
            self._usable.restype, self._usable.argtypes = ctypes.c_size_t, [ctypes.c_void_p]

    def __call__(self) -> None:
        """Leak once: the block's first word links to the block before, so that the end can free them all."""
        if not self.on:
            return
        address = self._malloc(max(self.size_bytes, 8))
        if not address:
            raise MemoryError(f"malloc({self.size_bytes}) failed")
        ctypes.memset(address, 1, max(self.size_bytes, 8))  # touch it: untouched pages are not resident
        ctypes.c_size_t.from_address(address).value = self._last
        self._last, self.calls = address, self.calls + 1
        if not self.true_bytes and self._usable is not None:
            self.true_bytes = self._usable(address) + 8

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        while self._last:
            address, self._last = self._last, ctypes.c_size_t.from_address(self._last).value
            self._free(address)
        self.calls = 0


class DevicePlant:
    """Keep one tensor of ``size_bytes`` on ``device`` per call (rounded up to the allocator's 512-byte block on CUDA).

    Examples
    --------
    >>> with DevicePlant(512, "cpu") as leak:
    ...     leak()
    ...     leak.calls
    1
    """

    def __init__(self, size_bytes: int, device: Any, *, on: bool = True) -> None:
        if size_bytes < 1:
            raise ProbeError(f"size_bytes={size_bytes} plants nothing; give at least 1")
        self.size_bytes, self.device, self.on = int(size_bytes), device, on
        self.true_bytes = -(-self.size_bytes // 512) * 512
        self._kept: list[Any] = []

    @property
    def calls(self) -> int:
        """How many tensors are kept now."""
        return len(self._kept)

    def __call__(self) -> None:
        """Leak one tensor."""
        if self.on:
            import torch

            self._kept.append(torch.ones(self.size_bytes, dtype=torch.uint8, device=self.device))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._kept.clear()
