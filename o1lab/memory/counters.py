"""Exact in-use counters for host and device, read when the process is quiet.

Resident memory (RSS) and ``nvidia-smi`` show what the process *holds*; these counters show what is *in use*:

- host: glibc's ``mallinfo2`` (``uordblks + hblkhd``: bytes handed out by ``malloc`` and by its own ``mmap``) plus the
  bytes in live blocks of CPython's small-object allocator, which takes its arenas by ``mmap`` and which ``mallinfo2``
  therefore cannot see (read from ``sys._debugmallocstats``), plus torch's pinned blocks, which CUDA maps itself;
- device: ``allocated_bytes.all.current`` of torch's caching allocator.

Source: glibc manual, "Statistics of malloc"; CPython ``Objects/obmalloc.c``; torch ``cuda.memory_stats``.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields

from o1lab.host import rss_bytes


class _Mallinfo2(ctypes.Structure):
    _fields_ = [  # all in bytes, but for ordblks, smblks and hblks, which count
        (name, ctypes.c_size_t)
        for name in (
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keep",
        )
    ]


@functools.cache
def _mallinfo2() -> Callable[[], _Mallinfo2] | None:
    try:
        function = ctypes.CDLL(None).mallinfo2
    except (AttributeError, OSError, TypeError):  # not glibc >= 2.33
        return None
    function.restype, function.argtypes = _Mallinfo2, []
    return function


def has_exact_host() -> bool:
    """Whether this machine has an exact host counter (glibc 2.33 or newer)."""
    return _mallinfo2() is not None


@dataclass(frozen=True, slots=True)
class Reading:
    """One quiet reading, all in bytes; ``None`` where this machine has no such counter.

    ``host_in_use``: bytes in live ``malloc`` blocks, Python objects and torch's pinned blocks. ``host_free``: bytes
    free inside the heap. ``rss``: anonymous resident memory. ``device_allocated`` ≤ ``device_reserved``: torch's
    caching allocator. ``device_used``: the whole device as the driver sees it (all processes). ``pinned``: page-locked
    host memory that torch's host allocator owns, in use or cached (it rounds every block up to a power of two).
    """

    host_in_use: int | None
    host_free: int | None
    rss: int
    device_allocated: int | None = None
    device_reserved: int | None = None
    device_used: int | None = None
    pinned: int | None = None

    def __sub__(self, other: Reading) -> Reading:
        """Difference per counter; ``None`` stays ``None``."""

        def gap(name: str) -> int | None:
            mine, theirs = getattr(self, name), getattr(other, name)
            return None if mine is None or theirs is None else mine - theirs

        return Reading(**{field.name: gap(field.name) for field in fields(self)})  # type: ignore[arg-type]


_BLOCKS = re.compile(rb"# bytes in allocated blocks\s*=\s*([\d,]+)")


def python_blocks_bytes() -> int:
    """Bytes in live blocks of CPython's small-object allocator (0 where it is switched off).

    ``sys._debugmallocstats`` writes to file descriptor 2, so that descriptor is pointed at a scratch file meanwhile.
    """
    if sys.implementation.name != "cpython":
        return 0
    with _scratch() as scratch:
        sys.stderr.flush()
        saved = os.dup(2)
        try:
            os.dup2(scratch, 2)
            sys._debugmallocstats()
        finally:
            os.dup2(saved, 2)
            os.close(saved)
        size = os.lseek(scratch, 0, os.SEEK_END)
        os.lseek(scratch, 0, os.SEEK_SET)
        found = _BLOCKS.search(os.read(scratch, size))
    return int(found.group(1).replace(b",", b"")) if found else 0


@contextlib.contextmanager
def _scratch() -> Iterator[int]:
    if hasattr(os, "memfd_create"):
        handle = os.memfd_create("o1lab")
        try:
            yield handle
        finally:
            os.close(handle)
    else:
        with tempfile.TemporaryFile() as file:
            yield file.fileno()


def _clear_type_cache() -> None:
    """Empty CPython's attribute look-up cache.

    It holds a reference to each of up to 4096 attribute names. Code that builds names as it runs (``f"output_{key}"``
    in transformers, names that torch makes in C++) fills it with fresh strings over some thousand requests: a bounded
    warm-up of 270 kB that would read as 10 to 20 bytes per request.
    """
    clear = getattr(sys, "_clear_internal_caches", None) or getattr(sys, "_clear_type_cache", None)
    if clear is not None:
        clear()


def cuda_ready() -> bool:
    """Whether a CUDA context exists already in this process (asking creates none)."""
    torch = sys.modules.get("torch")
    return torch is not None and torch.cuda.is_initialized()  # is_available() would start the driver


def read(*, collect: bool = True, driver: bool = True) -> Reading:
    """Quieten the process (garbage collection, device synchronised), then read every counter.

    Parameters
    ----------
    collect : bool
        Run a full garbage collection and empty CPython's look-up cache first. Without it, garbage in cycles counts as
        in use.
    driver : bool
        Ask the driver for the device's used memory as well, which takes longer than all other counters together.
    """
    device: dict[str, int] = {}
    if collect:
        gc.collect()
        _clear_type_cache()
    if cuda_ready():
        import torch

        torch.cuda.synchronize()
        stats = torch.cuda.memory_stats()
        free, total = torch.cuda.mem_get_info() if driver else (0, 0)
        device = {
            "device_allocated": stats.get("allocated_bytes.all.current", 0),
            "device_reserved": stats.get("reserved_bytes.all.current", 0),
        }
        if driver:
            device["device_used"] = total - free
        # Owned, not "active": on torch 2.11 every .item() adds its 4 bytes to active_bytes and never takes them off.
        device["pinned"] = torch.cuda.host_memory_stats().get("allocated_bytes.current", 0)
    function = _mallinfo2()
    if function is None:
        return Reading(None, None, rss_bytes(), **device)
    python = python_blocks_bytes()
    heap = function()
    return Reading(heap.uordblks + heap.hblkhd + python + device.get("pinned", 0), heap.fordblks, rss_bytes(), **device)


_freezes = 0


@contextlib.contextmanager
def frozen() -> Iterator[None]:
    """Keep the objects alive now out of every collection meanwhile: a full one takes 0.2 s with transformers loaded.

    Nested uses freeze what has come since, too; only the outermost thaws, and thaws everything, also what the program
    itself had frozen before (``gc.get_freeze_count()`` cannot tell: since Python 3.12 it is not zero at the start).
    """
    global _freezes
    gc.collect()
    gc.freeze()
    _freezes += 1
    try:
        yield
    finally:
        _freezes -= 1
        if _freezes == 0:
            gc.unfreeze()
