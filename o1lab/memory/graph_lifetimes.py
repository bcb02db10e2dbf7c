"""Lifetimes of blocks derived from a captured CUDA graph alone, and how many of them agree with what the program did.

A graph knows a block only through its memory nodes. Those exist for captured ``cudaMallocAsync`` and ``cudaFreeAsync``;
torch's own capture takes blocks from a private pool and leaves no such node. Article §2.1.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Sequence
from dataclasses import dataclass

from o1lab.memory.graph_raw import GraphError, Raw, call, runtime
from o1lab.stats import Estimate, proportion


@dataclass(frozen=True, slots=True)
class Node:
    """A node of a graph: ``kind`` ``"alloc"``, ``"free"``, ``"memset"`` or another work's; address and bytes if known.

    What a kernel touches cannot be read from its node: its arguments are opaque.
    """

    kind: str
    address: int = 0
    bytes: int = 0


@dataclass(frozen=True, slots=True)
class Graph:
    """Nodes in the order in which they were captured, and edges as pairs of their indices (first, then)."""

    nodes: tuple[Node, ...]
    edges: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class GraphLifetime:
    """One block: node indices of its allocation and free (``None``: it leaves the graph alive).

    ``users``: nodes known to touch it. ``unordered``: work that no edge orders against the free, so that it may still
    run when the block is given to someone else; 0 for a block that leaves the graph.
    """

    address: int
    bytes: int
    alloc: int
    free: int | None
    users: tuple[int, ...]
    unordered: int

    @property
    def safe(self) -> bool:
        """Whether the graph itself proves that nothing of it runs on the block after the free."""
        return self.free is not None and self.unordered == 0


def read_graph(handle: int) -> Graph:
    """Nodes and edges of a ``cudaGraph_t`` (for torch: ``CUDAGraph(keep_graph=True)`` and ``raw_cuda_graph()``)."""
    rt = runtime()
    graph = rt.cudaGraph_t(init_value=int(handle))
    _, count = call(rt.cudaGraphGetNodes(graph, 0))
    handles, _ = call(rt.cudaGraphGetNodes(graph, count)) if count else ([], 0)
    index = {int(node): at for at, node in enumerate(handles)}
    kinds = rt.cudaGraphNodeType
    nodes = []
    for node in handles:
        kind = call(rt.cudaGraphNodeGetType(node))
        if kind == kinds.cudaGraphNodeTypeMemAlloc:
            params = call(rt.cudaGraphMemAllocNodeGetParams(node))
            nodes.append(Node("alloc", int(params.dptr), int(params.bytesize)))
        elif kind == kinds.cudaGraphNodeTypeMemFree:
            nodes.append(Node("free", int(call(rt.cudaGraphMemFreeNodeGetParams(node)))))
        elif kind == kinds.cudaGraphNodeTypeMemset:
            params = call(rt.cudaGraphMemsetNodeGetParams(node))
            size = int(params.width) * int(params.height) * int(params.elementSize)
            nodes.append(Node("memset", int(params.dst), size))
        else:
            nodes.append(Node(kind.name.removeprefix("cudaGraphNodeType").lower()))
    *_, edges = call(rt.cudaGraphGetEdges(graph, 0))
    first, then = call(rt.cudaGraphGetEdges(graph, edges))[:2] if edges else ([], [])
    pairs = tuple((index[int(a)], index[int(b)]) for a, b in zip(first, then, strict=True))
    return Graph(tuple(nodes), pairs)


def ancestors(graph: Graph) -> list[int]:
    """For each node the set of nodes that must have run before it, as a bit mask (bit i = node i)."""
    count = len(graph.nodes)
    after: list[list[int]] = [[] for _ in range(count)]
    waiting = [0] * count
    for a, b in graph.edges:
        after[a].append(b)
        waiting[b] += 1
    masks = [0] * count
    ready = [node for node in range(count) if waiting[node] == 0]
    heapq.heapify(ready)
    done = 0
    while ready:
        node = heapq.heappop(ready)
        done += 1
        for following in after[node]:
            masks[following] |= masks[node] | 1 << node
            waiting[following] -= 1
            if waiting[following] == 0:
                heapq.heappush(ready, following)
    if done < count:
        raise GraphError("the edges form a cycle: this is no captured graph")
    return masks


def derive_lifetimes(graph: Graph) -> tuple[GraphLifetime, ...]:
    """Lifetimes of the blocks that the graph allocates, from its nodes and edges alone.

    A free belongs to the allocation of the same address that is its nearest ancestor (one address can serve several
    blocks of one graph, one after the other).

    Examples
    --------
    >>> nodes = (Node("alloc", 64, 512), Node("memset", 64, 512), Node("free", 64))
    >>> derive_lifetimes(Graph(nodes, ((0, 1), (1, 2))))
    (GraphLifetime(address=64, bytes=512, alloc=0, free=2, users=(1,), unordered=0),)
    """
    before = ancestors(graph)
    allocs = [i for i, node in enumerate(graph.nodes) if node.kind == "alloc"]
    freed: dict[int, int] = {}
    for i, node in enumerate(graph.nodes):
        if node.kind == "free":
            owners = [a for a in allocs if graph.nodes[a].address == node.address and before[i] >> a & 1]
            if owners:
                freed[max(owners, key=lambda a: before[a].bit_count())] = i
    found = []
    for a in allocs:
        block, free = graph.nodes[a], freed.get(a)
        users, unordered = [], 0
        for i, node in enumerate(graph.nodes):
            if node.kind in ("alloc", "free", "empty", "eventrecord", "waitevent"):
                continue
            ends_before = free is None or bool(before[free] >> i & 1)
            if free is not None and not ends_before and not before[i] >> free & 1:
                unordered += 1
            inside = block.address <= node.address < block.address + block.bytes
            if inside and before[i] >> a & 1 and ends_before:
                users.append(i)
        found.append(GraphLifetime(block.address, block.bytes, a, free, tuple(users), unordered))
    return tuple(found)


@dataclass(frozen=True, slots=True)
class Truth:
    """What the program that was captured did with one block: fills on it, and whether it freed it in the capture."""

    address: int
    bytes: int
    fills: int
    freed_inside: bool


def agree(lifetimes: Sequence[GraphLifetime], truths: Sequence[Truth]) -> int:
    """How many of the program's blocks the derivation has right: address, bytes, number of uses, and where it ends.

    The end of a block that leaves the graph is not in the graph: it never counts as right.
    """
    left = list(lifetimes)
    right = 0
    for truth in truths:
        for life in left:
            same = (life.address, life.bytes, len(life.users)) == (truth.address, truth.bytes, truth.fills)
            if same and truth.freed_inside and life.free is not None:
                left.remove(life)
                right += 1
                break
    return right


@dataclass(frozen=True, slots=True)
class Derivable:
    """Blocks whose lifetime follows from the graph alone, of all: freed in the capture, leaving it, torch's own."""

    inside: tuple[int, int]
    escaping: tuple[int, int]
    torch: tuple[int, int]
    starts_known: int

    def share(self, *parts: str) -> Estimate:
        """The metric ``matched_share`` over the named parts (default: all three)."""
        chosen = [getattr(self, part) for part in parts or ("inside", "escaping", "torch")]
        return proportion(sum(k for k, _ in chosen), sum(n for _, n in chosen))

    def table(self) -> str:
        """One line a part."""
        names = {"inside": "freed in the capture", "escaping": "leaves the graph", "torch": "torch.cuda.graph"}
        lines = [f"{text:<22}{'{}/{}'.format(*getattr(self, part)):>10}" for part, text in names.items()]
        return "\n".join([*lines, f"{'  of those leaving, allocation known':<22} {self.starts_known}"])


def program(raw: Raw, blocks: int, *, escape: float, seed: int) -> tuple[int, list[Truth]]:
    """Capture a random program of allocations, fills and frees on two joined streams; graph handle and truth."""
    dice = random.Random(seed)
    s, t = raw.stream(), raw.stream()
    live: list[list[int]] = []
    truths = []
    with raw.capture(s) as made:
        for index in range(blocks):
            size = (1 + dice.randrange(8)) << 20
            address = raw.books.malloc(size, s, "g")
            where = dice.choice((s, t))
            if where is t:
                raw.join(s, t)
            fills = dice.randrange(1, 4)
            for _ in range(fills):
                raw.fill(address, size, where)
            if where is t:
                raw.join(t, s)
            live.append([address, size, fills])
            while live and (dice.random() < 0.4 or index == blocks - 1):
                address, size, fills = live.pop(dice.randrange(len(live)))
                leaves = dice.random() < escape
                if not leaves:
                    raw.books.free(address, s, "g")
                truths.append(Truth(address, size, fills, not leaves))
    return int(made[0]), truths


def torch_capture(blocks: int, *, seed: int) -> tuple[Graph, int]:
    """Capture torch code that makes and drops ``blocks`` tensors; its graph and the allocations torch's history saw."""
    import torch

    dice = random.Random(seed)
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    torch.cuda.memory._record_memory_history("all", context=None, max_entries=100_000, clear_history=True)
    try:
        with torch.cuda.graph(graph):
            for _ in range(blocks):
                x = torch.empty((1 + dice.randrange(8)) << 20, dtype=torch.uint8, device="cuda")
                x.fill_(1)
                del x
        history = torch.cuda.memory._snapshot()["device_traces"][torch.cuda.current_device()]
    finally:
        torch.cuda.memory._record_memory_history(None)
    return read_graph(graph.raw_cuda_graph()), sum(
        entry["action"] == "alloc" and entry["size"] >= 1 << 20 for entry in history
    )


def derivable(*, graphs: int = 26, blocks: int = 32, escape: float = 0.5, seed: int = 0) -> Derivable:
    """Derive lifetimes from ``graphs`` captured graphs of ``blocks`` blocks each and count those that are right.

    The truth is the program's own list of calls (raw) and torch's allocator history (torch).

    Raises
    ------
    GraphError
        No CUDA device, no ``cuda-bindings``, or the allocator history is already being recorded.
    """
    import torch

    runtime()
    if torch._C._cuda_isHistoryEnabled():
        raise GraphError("the allocator history is being recorded: stop it before deriving lifetimes")
    inside, escaping, ours, starts = [0, 0], [0, 0], [0, 0], 0
    for number in range(graphs):
        raw = Raw()
        handle, truths = program(raw, blocks, escape=escape, seed=seed + number)
        lifetimes = derive_lifetimes(read_graph(handle))
        kept = [truth for truth in truths if truth.freed_inside]
        left = [truth for truth in truths if not truth.freed_inside]
        inside[0] += agree(lifetimes, kept)
        inside[1] += len(kept)
        escaping[0] += agree([life for life in lifetimes if life.free is None], left)
        escaping[1] += len(left)
        starts += sum(life.free is None for life in lifetimes)
        for _ in raw.down():
            pass
        captured, allocations = torch_capture(blocks, seed=seed + number)
        ours[0] += len(derive_lifetimes(captured))
        ours[1] += allocations
    return Derivable(tuple(inside), tuple(escaping), tuple(ours), starts)
