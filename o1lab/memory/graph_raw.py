"""Calls that the article's §2.1 names, from Python: captured ``cudaMallocAsync`` and ``cudaFreeAsync``, a ledger.

Thin over ``cuda.bindings.runtime``, which torch's CUDA wheels bring. :class:`Pairing` is the article's remedy as
written; :class:`Raw` is one run of a case of :mod:`o1lab.memory.graph_cases`, whose graphs can be taken down.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from o1lab.errors import ProbeError


class GraphError(ProbeError):
    """The graph cases cannot run here, or a CUDA call that must work did not."""


def runtime() -> Any:
    """The module ``cuda.bindings.runtime`` on a machine with a CUDA device, else :class:`GraphError`."""
    import torch

    if not torch.cuda.is_available():
        raise GraphError("the graph cases need a CUDA device; none can be used here")
    try:
        from cuda.bindings import runtime as cudart
    except ImportError as error:
        raise GraphError(f"the raw graph cases need cuda-bindings (torch's CUDA wheels bring it): {error}") from error
    torch.cuda.init()
    return cudart


def call(result: tuple[Any, ...]) -> Any:
    """Unpack what a CUDA call returned; a :class:`GraphError` with the CUDA error's name if it failed."""
    error, *values = result
    if int(error) != 0:
        raise GraphError(f"CUDA answered {error.name}")
    return values[0] if len(values) == 1 else values


@dataclass
class Pairing:
    """The article's remedy: a ledger that pairs every ``cudaMallocAsync`` with its ``cudaFreeAsync`` across graphs.

    Calls go through :meth:`malloc`, :meth:`free` and :meth:`launched`; :meth:`close` frees what no free has reached.
    A free that was captured counts once its graph has been launched, one that CUDA refused does not count.

    Attributes
    ----------
    on : bool
        With ``False`` it only passes the calls on: the same program without the remedy.
    """

    cudart: Any
    on: bool = True
    live: dict[int, int] = field(default_factory=dict)
    captured: dict[Any, list[tuple[str, int, int]]] = field(default_factory=dict)
    refused: list[str] = field(default_factory=list)

    def malloc(self, size: int, stream: Any, graph: Any = None) -> int:
        """Allocate ``size`` bytes on ``stream``; ``graph`` names the capture that runs on it, if any."""
        address = int(call(self.cudart.cudaMallocAsync(size, stream)))
        self._note("malloc", address, size, graph)
        return address

    def free(self, address: int, stream: Any, graph: Any = None) -> bool:
        """Free on ``stream``; ``False`` if CUDA refused, which is remembered in :attr:`refused`."""
        (error,) = self.cudart.cudaFreeAsync(address, stream)
        if int(error) != 0:
            self.refused.append(error.name)
            self.cudart.cudaGetLastError()  # else torch's next check would report it
            return False
        self._note("free", address, 0, graph)
        return True

    def _note(self, action: str, address: int, size: int, graph: Any) -> None:
        if graph is not None:
            self.captured.setdefault(graph, []).append((action, address, size))
        elif action == "malloc":
            self.live[address] = size
        else:
            self.live.pop(address, None)

    def launched(self, graph: Any) -> None:
        """Tell that ``graph`` was launched: its allocations are live now, its frees done, in captured order."""
        for action, address, size in self.captured.get(graph, ()):
            self._note(action, address, size, None)

    def close(self, stream: Any) -> list[int]:
        """Free every block that is still unpaired and return their addresses (none freed with ``on=False``)."""
        left = list(self.live)
        if self.on:
            for address in left:
                call(self.cudart.cudaFreeAsync(address, stream))
            self.live.clear()
        return left


class Raw:
    """One run of a raw case: streams, captures and graphs that are all destroyed by :meth:`down`."""

    def __init__(self, pairing: bool | None = None) -> None:
        self.cudart = runtime()
        self.books = Pairing(self.cudart, on=bool(pairing))
        self.streams: list[Any] = []
        self.graphs: list[tuple[Any, Any]] = []
        self.events: list[Any] = []

    def stream(self) -> Any:
        """A new non-blocking stream."""
        self.streams.append(call(self.cudart.cudaStreamCreateWithFlags(self.cudart.cudaStreamNonBlocking)))
        return self.streams[-1]

    def join(self, first: Any, then: Any) -> None:
        """Work put on ``then`` from now on waits for what is on ``first`` (during capture: joins it)."""
        self.events.append(call(self.cudart.cudaEventCreateWithFlags(self.cudart.cudaEventDisableTiming)))
        call(self.cudart.cudaEventRecord(self.events[-1], first))
        call(self.cudart.cudaStreamWaitEvent(then, self.events[-1], 0))

    @contextmanager
    def capture(self, stream: Any) -> Iterator[list[Any]]:
        """Capture ``stream`` (relaxed); the yielded list holds graph and executable after the block, or nothing."""
        mode = self.cudart.cudaStreamCaptureMode.cudaStreamCaptureModeRelaxed
        call(self.cudart.cudaStreamBeginCapture(stream, mode))
        made: list[Any] = []
        try:
            yield made
        finally:
            error, graph = self.cudart.cudaStreamEndCapture(stream)
            for event in self.events:  # before the graph and the streams that they were recorded in are gone
                call(self.cudart.cudaEventDestroy(event))
            self.events.clear()
            if int(error) != 0:
                self.books.refused.append(error.name)
                self.cudart.cudaGetLastError()
        if int(error) == 0:
            executable = call(self.cudart.cudaGraphInstantiate(graph, 0))
            self.graphs.append((graph, executable))
            made += [graph, executable]

    def launch(self, made: Sequence[Any], stream: Any, key: Any) -> None:
        """Launch an instantiated graph and note what it allocates and frees."""
        if made:
            call(self.cudart.cudaGraphLaunch(made[1], stream))
            self.books.launched(key)

    def fill(self, address: int, size: int, stream: Any) -> None:
        """Write to the block on ``stream``."""
        call(self.cudart.cudaMemsetAsync(address, 1, size, stream))

    def held(self) -> tuple[int, int]:
        """Bytes reserved and in use in the graphs' pool and in the default pool of the current device."""
        rt, names = self.cudart, self.cudart.cudaGraphMemAttributeType
        device = call(rt.cudaGetDevice())
        pool = call(rt.cudaDeviceGetDefaultMemPool(device))
        kinds = self.cudart.cudaMemPoolAttr
        reserved = int(call(rt.cudaDeviceGetGraphMemAttribute(device, names.cudaGraphMemAttrReservedMemCurrent)))
        used = int(call(rt.cudaDeviceGetGraphMemAttribute(device, names.cudaGraphMemAttrUsedMemCurrent)))
        reserved += int(call(rt.cudaMemPoolGetAttribute(pool, kinds.cudaMemPoolAttrReservedMemCurrent)))
        used += int(call(rt.cudaMemPoolGetAttribute(pool, kinds.cudaMemPoolAttrUsedMemCurrent)))
        return reserved, used

    def down(self) -> Iterator[str]:
        """Take everything down stage by stage, naming each stage once it is done."""
        rt = self.cudart
        if self.books.on and self.streams:
            call(rt.cudaDeviceSynchronize())
            self.books.close(self.streams[0])
            yield "pairing"
        call(rt.cudaDeviceSynchronize())
        yield "free and synchronise"
        for graph, executable in self.graphs:
            call(rt.cudaGraphExecDestroy(executable))
            call(rt.cudaGraphDestroy(graph))
        self.graphs.clear()
        yield "graph gone"
        for stream in self.streams:
            call(rt.cudaStreamDestroy(stream))
        self.streams.clear()
        yield "streams gone"
        device = call(rt.cudaGetDevice())
        call(rt.cudaDeviceGraphMemTrim(device))
        call(rt.cudaMemPoolTrimTo(call(rt.cudaDeviceGetDefaultMemPool(device)), 0))
        call(rt.cudaDeviceSynchronize())
        yield "trim"
