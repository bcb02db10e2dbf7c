"""Record what torch's caching allocator did, or load it from anybody's snapshot file, as columns.

:func:`record` switches the allocator's history on for a while, bounded; :func:`load` reads the pickles that
``torch.cuda.memory._dump_snapshot`` writes, without running them (:mod:`o1lab.memory.snapshot_file`), and the compact
files that :meth:`Trace.save` writes. A history seldom begins with an empty allocator: what was live at its first entry
is worked out backwards from the blocks at its end, and what cannot be known is said in :attr:`Trace.notes`.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from o1lab.errors import ProbeError
from o1lab.memory.snapshot_file import HostileFile, TraceFileError, plain, read_bytes

__all__ = ["ACTIONS", "HostileFile", "Recording", "Trace", "TraceFileError", "from_snapshot", "load", "record"]

ACTIONS = (
    "alloc", "free_requested", "free_completed", "segment_alloc", "segment_free", "segment_map", "segment_unmap",
    "snapshot", "oom",
)  # fmt: skip
"""Names of the codes in :attr:`Trace.action`, in their order."""
(ALLOC, FREE_REQUESTED, FREE_COMPLETED, SEGMENT_ALLOC, SEGMENT_FREE, SEGMENT_MAP, SEGMENT_UNMAP, SNAPSHOT, OOM) = range(
    9
)
COLUMNS = {
    "action": "u1", "address": "i8", "size": "i8", "stream": "i8", "time_us": "i8", "pool": "i4", "site": "i4",
}  # fmt: skip
_WIDE = [(name, "i8") for name in ("address", "size", "stream")]
SEGMENT = np.dtype([*_WIDE, ("pool", "i4"), ("large", "?"), ("expandable", "?")])
BLOCK = np.dtype([*_WIDE, ("requested", "i8"), ("pool", "i4"), ("waiting", "?"), ("site", "i4")])
RESERVING = {SEGMENT_ALLOC: 1, SEGMENT_MAP: 1, SEGMENT_FREE: -1, SEGMENT_UNMAP: -1}


@dataclass(frozen=True)
class Trace:
    """What one device's allocator did, one entry per row, and the blocks before and after.

    Attributes
    ----------
    action, address, size, stream, time_us, pool, site : numpy.ndarray, shape (n,)
        ``action`` indexes :data:`ACTIONS`; ``size`` in bytes as requested (of a segment: as reserved);
        ``time_us`` since 1970; ``pool`` indexes ``pools``, ``site`` indexes ``sites`` (−1: no stack recorded).
    pools : tuple of (int, int)
        Memory pool ids; the first is the default pool ``(0, 0)``.
    sites : tuple of str
        ``file:line function`` of the first frame outside torch.
    start_segments, end_segments : structured numpy.ndarray of :data:`SEGMENT`
    start_blocks, end_blocks : structured numpy.ndarray of :data:`BLOCK`
        Blocks in use (``waiting``: freed, but another stream may still use them). At the end as torch says; at the
        start worked out backwards.
    settings : dict
        Allocator settings as recorded (``expandable_segments``, ``max_split_size``, …).
    capacity_bytes : int or None
        Most that the allocator was allowed to reserve, where a memory fraction below 1 was set.
    overflowed : bool or None
        Whether older entries were overwritten; ``None``: the file cannot tell.
    notes : tuple of str
        What is unknown or was assumed; that no history was recorded, where the snapshot holds none.
    device : int or None
        Number of the device; ``None``: a saved file of an earlier version, which does not say.
    """

    action: np.ndarray
    address: np.ndarray
    size: np.ndarray
    stream: np.ndarray
    time_us: np.ndarray
    pool: np.ndarray
    site: np.ndarray
    pools: tuple[tuple[int, int], ...] = ((0, 0),)
    sites: tuple[str, ...] = ()
    start_segments: np.ndarray = field(default_factory=lambda: np.empty(0, SEGMENT))
    end_segments: np.ndarray = field(default_factory=lambda: np.empty(0, SEGMENT))
    start_blocks: np.ndarray = field(default_factory=lambda: np.empty(0, BLOCK))
    end_blocks: np.ndarray = field(default_factory=lambda: np.empty(0, BLOCK))
    settings: dict[str, Any] = field(default_factory=dict)
    capacity_bytes: int | None = None
    overflowed: bool | None = None
    notes: tuple[str, ...] = ()
    device: int | None = None

    def __len__(self) -> int:
        return len(self.action)

    def reserved(self) -> np.ndarray:
        """Bytes reserved after each entry, as the real allocator reserved them; shape (n,)."""
        sign = np.array([RESERVING.get(code, 0) for code in range(len(ACTIONS))])
        return int(self.start_segments["size"].sum()) + np.cumsum(sign[self.action] * self.size)

    def save(self, path: str | Path) -> None:
        """Write the trace in a compact form that :func:`load` reads back: a zip (LZMA) of arrays and one JSON text."""
        known: dict[str, np.ndarray] = {}
        for name in COLUMNS:  # few addresses, sizes and streams are used again and again: store each once
            column = getattr(self, name)
            if name == "time_us":
                known[name] = np.diff(column, prepend=column[:1]).astype("i4" if _fits(column) else "i8")
            elif name in ("address", "size", "stream"):
                values, index = np.unique(column, return_inverse=True)
                known[f"{name}.values"], known[f"{name}.index"] = np.diff(values, prepend=0), index.astype("u4")
            else:
                known[name] = column
        for name in ("start_segments", "end_segments", "start_blocks", "end_blocks"):
            known[name] = getattr(self, name)
        names = ("pools", "sites", "settings", "capacity_bytes", "overflowed", "notes", "device")
        facts: dict[str, Any] = {name: getattr(self, name) for name in names}
        facts |= {"o1lab": "trace 1", "begun_us": int(self.time_us[0]) if len(self) else 0}
        with zipfile.ZipFile(path, "w", zipfile.ZIP_LZMA) as file:
            file.writestr("facts.json", json.dumps(facts))
            for name, array in known.items():
                buffer = io.BytesIO()
                np.lib.format.write_array(buffer, np.ascontiguousarray(array), allow_pickle=False)
                file.writestr(f"{name}.npy", buffer.getvalue())


def _fits(time_us: np.ndarray) -> bool:
    return len(time_us) == 0 or bool(np.abs(np.diff(time_us, prepend=time_us[:1])).max() < 2**31)


class Recording:
    """Handle that :func:`record` yields; its ``trace`` is there once the block has ended."""

    def __init__(self) -> None:
        self._trace: Trace | None = None

    @property
    def trace(self) -> Trace:
        """The finished trace.

        Raises
        ------
        ProbeError
            The block has not ended yet, or its end could not be read.
        """
        if self._trace is None:
            raise ProbeError("the recording has no trace yet: read .trace after the with block")
        return self._trace


@contextlib.contextmanager
def record(max_entries: int = 100_000, stacks: str | None = "python", device: int | None = None) -> Iterator[Recording]:
    """Record the allocator's history meanwhile; the history is off again afterwards, also after an exception.

    Parameters
    ----------
    max_entries : int
        Entries kept, the newest: an allocation with its free makes three. One entry takes some hundred bytes.
    stacks : {"python", None}
        Note the Python stack of each entry (about 2 µs each) or none.
    device : int, optional
        Default: the current device.

    Raises
    ------
    ProbeError
        No CUDA device, an unknown ``stacks``, or a history that somebody else has switched on (it is left alone).
    """
    import torch

    if stacks not in ("python", None) or max_entries < 1:
        raise ProbeError(f"stacks={stacks!r}, max_entries={max_entries}: stacks are 'python' or None, entries from 1")
    if not torch.cuda.is_available():
        raise ProbeError("no CUDA device here: load a trace that was recorded elsewhere with o1lab.memory.trace.load")
    torch.cuda.init()
    if torch._C._cuda_isHistoryEnabled():
        raise ProbeError(
            "the allocator's history is on already; take its snapshot with torch.cuda.memory._dump_snapshot and load "
            "that, or switch it off with torch.cuda.memory._record_memory_history(None)"
        )
    device = torch.cuda.current_device() if device is None else device
    recording, memory = Recording(), torch.cuda.memory
    context = "all" if stacks else None
    memory._record_memory_history("all", context=context, stacks="python", max_entries=max_entries, clear_history=True)
    try:
        yield recording
    finally:
        try:
            snapshot = memory._snapshot()
        finally:
            memory._record_memory_history(None)
        recording._trace = from_snapshot(
            snapshot, device=device, max_entries=max_entries, capacity_bytes=_allowed_bytes(device)
        )


def _allowed_bytes(device: int) -> int | None:
    import torch

    fraction = getattr(torch.cuda.memory, "get_per_process_memory_fraction", lambda device: 1.0)(device)
    return int(fraction * torch.cuda.get_device_properties(device).total_memory) if fraction < 1 else None


def load(path: str | Path, *, device: int | None = None, capacity_bytes: int | None = None) -> Trace:
    """Read a trace from a ``_dump_snapshot`` pickle (plain or gzip) or from a file that :meth:`Trace.save` wrote.

    Parameters
    ----------
    device : int, optional
        Needed where the pickle holds entries of several devices; a saved file holds one device's.
    capacity_bytes : int, optional
        What the recorded process was allowed to reserve, where a memory fraction was set; the pickle does not say.

    Raises
    ------
    TraceFileError
        Missing, truncated, too large, no snapshot, or without this device; the message names those that are there.
    HostileFile
        The pickle would run code or take memory out of proportion; nothing of it was run.
    """
    data = read_bytes(path)
    if data[:2] == b"PK":
        from o1lab.memory.trace_build import unpacked

        return unpacked(data, str(path), device)
    return from_snapshot(plain(data), device=device, capacity_bytes=capacity_bytes)


def from_snapshot(
    snapshot: Mapping[str, Any], *, device: int | None = None, max_entries: int | None = None,
    capacity_bytes: int | None = None,
) -> Trace:  # fmt: skip
    """The trace in a dictionary as ``torch.cuda.memory._snapshot`` returns it.

    Raises
    ------
    TraceFileError
        The dictionary has another form (the message names the entry), or no such device.

    Examples
    --------
    >>> entry = {"action": "alloc", "addr": 4096, "size": 100, "stream": 0, "time_us": 1}
    >>> trace = from_snapshot({"segments": [], "device_traces": [[entry]]})
    >>> len(trace), ACTIONS[trace.action[0]]
    (1, 'alloc')
    """
    from o1lab.memory.trace_build import built

    return built(snapshot, device, max_entries, capacity_bytes)


def relative(filename: str) -> str:
    """The file's name without its folders."""
    return os.path.basename(filename.replace("\\", "/"))
