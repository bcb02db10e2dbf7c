"""The plays of :mod:`o1lab.memory.graph_cases`: one block allocated, used and freed in, around and across graphs."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

from o1lab.memory.graph_raw import Raw


def inside(r: Raw, size: int) -> None:
    """Allocated and freed in one graph on one stream."""
    s = r.stream()
    with r.capture(s) as g:
        a = r.books.malloc(size, s, "g")
        r.fill(a, size, s)
        r.books.free(a, s, "g")
    for _ in range(3):
        r.launch(g, s, "g")


def free_after(r: Raw, size: int) -> None:
    """Allocated in the graph, freed outside it after each replay."""
    s = r.stream()
    with r.capture(s) as g:
        a = r.books.malloc(size, s, "g")
        r.fill(a, size, s)
    for _ in range(3):
        r.launch(g, s, "g")
        r.books.free(a, s)


def free_inside(r: Raw, size: int) -> None:
    """Allocated before the graph, freed inside it."""
    s = r.stream()
    a = r.books.malloc(size, s)
    with r.capture(s) as g:
        r.fill(a, size, s)
        r.books.free(a, s, "g")
    r.launch(g, s, "g")


def other_stream(r: Raw, size: int) -> None:
    """Freed on another stream of the same capture, joined by events."""
    s, t = r.stream(), r.stream()
    with r.capture(s) as g:
        a = r.books.malloc(size, s, "g")
        r.join(s, t)
        r.fill(a, size, t)
        r.books.free(a, t, "g")
        r.join(t, s)
    for _ in range(3):
        r.launch(g, s, "g")


def other_stream_no_event(r: Raw, size: int) -> None:
    """Freed outside, on a stream that nothing orders."""
    s, t = r.stream(), r.stream()
    with r.capture(s) as g:
        a = r.books.malloc(size, s, "g")
        r.fill(a, size, s)
    r.launch(g, s, "g")
    r.books.free(a, t)  # nothing orders t behind s: the free may run first


def two_graphs(r: Raw, size: int) -> None:
    """Allocated in one graph, freed in another."""
    s = r.stream()
    with r.capture(s) as first:
        a = r.books.malloc(size, s, "first")
    with r.capture(s) as second:
        r.fill(a, size, s)
        r.books.free(a, s, "second")
    for _ in range(3):
        r.launch(first, s, "first")
        r.launch(second, s, "second")


def as_written(r: Raw, size: int) -> None:
    """Both calls outside; the graph only uses the pointer."""
    s = r.stream()
    a = r.books.malloc(size, s)
    with r.capture(s) as g:
        r.fill(a, size, s)
    r.launch(g, s, "g")
    r.books.free(a, s)


def forgotten(r: Raw, size: int) -> None:
    """Allocated in the graph, never freed: the control."""
    s = r.stream()
    with r.capture(s) as g:
        a = r.books.malloc(size, s, "g")
        r.fill(a, size, s)
    r.launch(g, s, "g")


class Torch:
    """One run of a torch case; the same stages of taking down as :class:`Raw`."""

    def __init__(self) -> None:
        self.graphs: list[Any] = []
        self.kept: list[Any] = []
        self.hazard: bool | None = None

    def graph(self, pool: Any = None) -> Any:
        """A context that captures into a new graph, whose replay is :meth:`replay`."""
        import torch

        self.graphs.append(torch.cuda.CUDAGraph())
        return torch.cuda.graph(self.graphs[-1], pool=pool)

    def replay(self, times: int = 3) -> None:
        """Replay every graph."""
        for _ in range(times):
            for graph in self.graphs:
                graph.replay()

    def empty(self, size: int) -> Any:
        """A tensor of ``size`` bytes."""
        import torch

        return torch.empty(size, dtype=torch.uint8, device="cuda")

    def held(self) -> tuple[int, int]:
        """Bytes that the allocator holds from the driver, and bytes in tensors."""
        import torch

        return torch.cuda.memory_reserved(), torch.cuda.memory_allocated()

    def down(self) -> Iterator[str]:
        """Take everything down stage by stage, naming each stage once it is done."""
        import torch

        torch.cuda.synchronize()
        yield "free and synchronise"
        for graph in self.graphs:
            graph.reset()
        self.graphs.clear()
        gc.collect(0)
        torch.cuda.synchronize()
        yield "graph gone"
        torch.cuda.empty_cache()
        yield "trim"


def torch_inside(r: Torch, size: int) -> None:
    """A temporary of the captured region."""
    with r.graph():
        x = r.empty(size)
        x.fill_(1)
        del x
    r.replay()


def torch_free_after(r: Torch, size: int) -> None:
    """An output dropped after the replays."""
    with r.graph():
        x = r.empty(size)
        x.fill_(1)
    r.replay()
    del x


def torch_free_inside(r: Torch, size: int) -> None:
    """A tensor from before, dropped during the capture."""
    import torch

    x = r.empty(size)
    with r.graph():
        x.fill_(1)
        del x
    y = r.empty(size).zero_()  # the allocator may give the same block to the next tensor
    r.replay()
    torch.cuda.synchronize()
    r.hazard = bool(y[0].item() == 1)  # and then the graph writes over it


def torch_other_stream(r: Torch, size: int) -> None:
    """``record_stream`` during the capture."""
    import torch

    side = torch.cuda.Stream()
    with r.graph():
        main = torch.cuda.current_stream()
        x = r.empty(size)
        side.wait_stream(main)
        with torch.cuda.stream(side):
            x.fill_(1)
            x.record_stream(side)
        del x
        main.wait_stream(side)
        y = r.empty(size)  # a second block: record_stream parks the first for as long as the capture lasts
        y.fill_(1)
        del y
    r.replay()


def torch_other_stream_after(r: Torch, size: int) -> None:
    """An output used and dropped on another stream."""
    import torch

    side = torch.cuda.Stream()
    with r.graph():
        x = r.empty(size)
        x.fill_(1)
    r.replay()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        x.add_(1)
    x.record_stream(side)
    del x


def torch_two_graphs(r: Torch, size: int) -> None:
    """Allocated in one graph, dropped during the capture of another."""
    with r.graph():
        x = r.empty(size)
        x.fill_(1)
    with r.graph(pool=r.graphs[0].pool()):
        x.add_(1)
        del x
    r.replay()


def torch_forgotten(r: Torch, size: int) -> None:
    """The output is kept for ever: the control."""
    with r.graph():
        r.kept.append(r.empty(size))
        r.kept[-1].fill_(1)
    r.replay()
