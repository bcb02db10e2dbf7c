"""Native tracing: what the driver allocates, what torch's allocator hands out and when kernels ran, on one time axis.

CUPTI (NVIDIA's ``cupti-python``) sees device allocations as the driver makes them: for torch's caching allocator these
are segments, not blocks. Blocks and their Python stacks come from torch's own allocator history. Both are joined here
with kernel times after the offset between the two clocks is measured. No hook is put into any allocator: a hook that
takes a Python stack must take the interpreter's lock while the allocator holds its own, which can deadlock.
Sources: CUPTI documentation (activity API), ``torch/cuda/memory.py`` (``_record_memory_history``); article §3.2.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from o1lab.memory.native_join import FRAMES, NativeError, Trace, build
from o1lab.memory.native_view import Matched, matched, timeline_figure

__all__ = ["Matched", "NativeError", "Recording", "Trace", "matched", "planted", "timeline_figure", "trace_native"]

KINDS = ("MEMORY2", "MEMORY_POOL", "CONCURRENT_KERNEL", "MEMCPY", "MEMSET", "RUNTIME", "DRIVER", "EXTERNAL_CORRELATION")
"""All API calls are recorded, fifty a kernel: with single calls switched on, four launches in five were missing."""
BUFFER_BYTES = 8 << 20


@dataclass
class Recording:
    """What :func:`trace_native` yields; :attr:`trace` is there once the block has been left without an error."""

    max_records: int
    store: dict[str, deque[Any]] = field(default_factory=dict, repr=False)
    seen: dict[str, int] = field(default_factory=dict)
    marks: dict[int, tuple[str, ...]] = field(default_factory=dict)
    trace: Trace | None = None
    _cupti: Any = field(default=None, repr=False)

    @contextlib.contextmanager
    def mark(self) -> Iterator[None]:
        """Tie the CUDA calls of this thread in the block to the present Python stack (for those outside torch)."""
        if self._cupti is None:
            raise NativeError("a mark was set outside its recording: set it inside the trace_native block")
        kind = self._cupti.ExternalCorrelationKind.CUSTOM1
        key = len(self.marks) + 1
        self.marks[key] = _here(sys._getframe(2))
        self._cupti.activity_push_external_correlation_id(kind, key)
        try:
            yield
        finally:
            self._cupti.activity_pop_external_correlation_id(kind)

    def keep(self, sort: str, record: tuple[Any, ...]) -> None:
        """Store one record, dropping the oldest of its sort beyond ``max_records``."""
        self.store.setdefault(sort, deque(maxlen=self.max_records)).append(record)
        self.seen[sort] = self.seen.get(sort, 0) + 1

    def take(self, activities: Iterable[Any]) -> None:
        """Turn CUPTI's records, which live only as long as their buffer, into plain tuples."""
        for a in activities:
            kind = int(a.kind)
            if kind == 49:  # MEMORY2
                pool = int(a.memory_pool_config.address) if a.is_async else 0
                self.keep("memory", (a.timestamp, a.address, a.bytes, a.memory_operation_type, a.memory_kind,
                                     a.stream_id, a.process_id, a.correlation_id, pool))  # fmt: skip
            elif kind == 50:  # MEMORY_POOL
                self.keep("pool", (a.timestamp, a.memory_pool_operation_type, a.address, a.size_, a.utilized_size,
                                   a.process_id))  # fmt: skip
            elif kind in (3, 10):  # kernels
                grid = a.grid_x * a.grid_y * a.grid_z
                self.keep("work", (a.name or "?", a.start, a.end, a.stream_id, a.correlation_id, grid,
                                   a.graph_node_id))  # fmt: skip
            elif kind in (1, 2):
                name = "memcpy" if kind == 1 else "memset"
                self.keep("work", (name, a.start, a.end, a.stream_id, a.correlation_id, 0, a.graph_node_id))
            elif kind in (4, 5):  # DRIVER, RUNTIME
                self.keep("call", (a.correlation_id, a.start))
            elif kind == 39:
                self.keep("external", (a.correlation_id, a.external_id))


_active: Recording | None = None
_lock = threading.Lock()


def _requested() -> tuple[int, int]:
    return BUFFER_BYTES, 0


def _completed(activities: list[Any]) -> None:
    recording = _active
    if recording is not None:  # buffers may still arrive after a recording has ended
        recording.take(activities)


def load_cupti() -> Any:
    """The module ``cupti.cupti``, or a :class:`NativeError` that says what is missing."""
    try:
        from cupti import cupti
    except ImportError as error:
        raise NativeError(
            "native tracing needs NVIDIA's cupti-python of the driver's CUDA version (for CUDA 13.0: "
            f"pip install 'cupti-python~=13.0.0'): {error}"
        ) from error
    return cupti


def _start(cupti: Any) -> list[Callable[[], Any]]:
    """Switch recording on; the list returned switches it off again, item by item."""
    undo: list[Callable[[], Any]] = []
    try:
        cupti.activity_register_callbacks(_requested, _completed)
        for name in KINDS:
            kind = getattr(cupti.ActivityKind, name)
            cupti.activity_enable(kind)
            undo.append(functools.partial(cupti.activity_disable, kind))
    except Exception as error:
        _stop(undo)
        if isinstance(error, (cupti.cuptiError, RuntimeError)):
            raise NativeError(
                f"CUPTI refused ({error}): stop any other profiler of this process (Nsight, torch.profiler, DCGM "
                "profiling), and check that cupti-python fits the driver"
            ) from error
        raise
    return undo


def _stop(undo: Sequence[Callable[[], Any]]) -> None:
    """Switch off all that was switched on; a failure is raised after all have been tried."""
    with contextlib.ExitStack() as stack:
        for step in undo:
            stack.callback(step)


@contextlib.contextmanager
def trace_native(*, max_records: int = 200_000, max_history: int = 100_000) -> Iterator[Recording]:
    """Record driver allocations, torch's blocks with Python stacks, and kernels of this process on one clock.

    Parameters
    ----------
    max_records : int
        CUPTI records kept of each sort; older ones are dropped and counted in ``trace.lost``.
    max_history : int
        Entries of torch's allocator history kept.

    Raises
    ------
    NativeError
        No GPU, no ``cupti-python``, CUPTI in use by another profiler, the allocator history already being recorded, or
        a recording inside a recording. All that was enabled is disabled again, also after an exception in the block.

    Notes
    -----
    CUPTI asks for buffers from inside CUDA calls and needs the interpreter's lock for it. Trace loops whose other
    threads do not free device tensors meanwhile. The first recording of a process takes some seconds at its end, in
    which torch resolves the frames. Where torch does not keep blocks itself (another allocator backend, or
    ``PYTORCH_NO_CUDA_MEMORY_CACHING=1``) CUPTI sees every allocation, and its stack is that of :meth:`Recording.mark`.

    Examples
    --------
    >>> with trace_native() as recording:  # doctest: +SKIP
    ...     serve()
    >>> print(matched(recording.trace).table())  # doctest: +SKIP
    """
    global _active
    import torch

    if max_records < 1 or max_history < 1:
        raise NativeError(f"max_records={max_records}, max_history={max_history}: both must be at least 1")
    if not torch.cuda.is_available():
        raise NativeError("native tracing needs a CUDA device; none can be used here")
    cupti = load_cupti()
    with _lock:
        if _active is not None:
            raise NativeError("a native recording is running already: leave it first")
        if torch._C._autograd._profiler_enabled():
            raise NativeError("torch.profiler is running and owns CUPTI: leave it before native tracing")
        native = (
            torch.cuda.memory.get_allocator_backend() == "native"
        )  # another backend keeps no history; CUPTI sees it
        if native and torch._C._cuda_isHistoryEnabled():
            raise NativeError(
                "the allocator history is being recorded by someone else: stop it first with "
                "torch.cuda.memory._record_memory_history(None)"
            )
        recording = _active = Recording(max_records, _cupti=cupti)
    undo: list[Callable[[], Any]] = []
    try:
        torch.cuda.init()
        torch.cuda.synchronize()
        undo = _start(cupti)
        if native:
            torch.cuda.memory._record_memory_history(
                "all", context="all", stacks="python", max_entries=max_history, clear_history=True
            )
        before = _brackets(cupti) if native else []
        first = _now(cupti)
        yield recording
        torch.cuda.synchronize()
        last = _now(cupti)
        after = _brackets(cupti) if native else []
        history = torch.cuda.memory._snapshot()["device_traces"][torch.cuda.current_device()] if native else []
        cupti.activity_flush_all(1)
        recording.trace = build(
            recording.store, recording.seen, recording.marks, history, before, after, first, last, max_history,
            _stream_ids(cupti, history),
        )  # fmt: skip
    finally:
        try:
            if native and torch._C._cuda_isHistoryEnabled():
                torch.cuda.memory._record_memory_history(None)
        finally:
            try:
                _stop(undo)
                cupti.activity_flush_all(1)  # what is left goes to this recording, not to the next
            finally:
                _active, recording._cupti = None, None


def _now(cupti: Any) -> tuple[int, int]:
    """CUPTI's time and the time of day in ns, read together: the tightest of a few readings."""
    readings = []
    for _ in range(9):
        before = time.time_ns()
        ticks = cupti.get_timestamp()
        after = time.time_ns()
        readings.append((after - before, ticks, (before + after) // 2))
    _, ticks, ns = min(readings)
    return ticks, ns


def _brackets(cupti: Any, samples: int = 48) -> list[tuple[int, int]]:
    """CUPTI times just before and just after small allocations, whose history entries give torch's clock."""
    import torch

    found = []
    for _ in range(samples):
        first = cupti.get_timestamp()
        block = torch.empty(512, dtype=torch.uint8, device="cuda")
        found.append((first, cupti.get_timestamp()))
        del block
    return found


def _stream_ids(cupti: Any, history: Sequence[dict[str, Any]]) -> dict[int, int]:
    """CUPTI's number of each stream handle that the history names."""
    from cuda.bindings import driver

    _, context = driver.cuCtxGetCurrent()
    return {
        handle: int(cupti.get_stream_id_ex(int(context), handle, 0))
        for handle in {int(e.get("stream", 0)) for e in history}
    }


def _here(frame: Any) -> tuple[str, ...]:
    stack = []
    while frame is not None and len(stack) < FRAMES:
        code = frame.f_code
        stack.append(f"{code.co_name} {os.path.basename(code.co_filename)}:{frame.f_lineno}")
        frame = frame.f_back
    return tuple(stack)


def planted(count: int = 512, *, first: int = 4096, step: int = 4096) -> None:
    """Allocate, fill with one kernel each and free ``count`` blocks of sizes that tell them apart (bytes)."""
    import torch

    for index in range(count):
        block = torch.empty(first + index * step, dtype=torch.uint8, device="cuda")
        block.fill_(1)
        del block
