"""The graph of live Python objects, and the shortest way to each from a root that a person can edit.

Nodes are what the collector tracks, plus untracked dicts and large buffers that these hold. Edges are what the
collector itself follows (``gc.get_referents``), plus what it cannot see: the locals of running frames (fast locals
since Python 3.11) and Dynamo's cache entries, which hang on code objects.
"""

from __future__ import annotations

import functools
import gc
import inspect
import itertools
import os
import sys
import sysconfig
import threading
import time
import types
from array import array
from collections.abc import Container, Iterator
from typing import Any, NamedTuple

import numpy as np

_NAMES = ("heap", "holding", "sizes", "growth", "owners", "jupyter", "probe", "watch", "rounds", "judge", "counters")
OWN = frozenset(f"o1lab.memory.{name}" for name in _NAMES)
OWN_FILES = frozenset(os.path.join(os.path.dirname(__file__), f"{name}.py") for name in _NAMES)
MODULE_COST, FRAME_COST, INTERPRETER_COST = 3, 2, 4  # steps that a library's or the interpreter's root counts for
LARGE_LENGTHS = {dict: 0, bytearray: 0, bytes: 2048, str: 2048, array: 256, np.ndarray: 0}  # worth a node from here on
LEAVES = (types.GetSetDescriptorType, types.MethodDescriptorType, types.WrapperDescriptorType, types.GenericAlias)


class Root(NamedTuple):
    """Where paths start: a namespace (its key, after ``prefix``, is the first word) or an object called ``prefix``."""

    names: Any
    prefix: str
    kind: str
    where: str
    cost: int


# Read now: asking for them the first time imports a module, which would be growth of its own.
_FOLDERS = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}


@functools.cache
def _is_library(filename: str) -> bool:
    inside = any(filename.startswith(os.path.join(folder, "")) for folder in _FOLDERS if folder)
    return inside or filename.startswith("<frozen") or f"{os.sep}site-packages{os.sep}" in filename


def frame_locals(frame: types.FrameType, known: Container[int] = ()) -> dict[str, Any]:
    """A copy of a frame's locals that leaves nothing behind.

    Before Python 3.13 reading ``f_locals`` leaves a dict on the frame that keeps every local alive until it returns.
    The locals are taken out of it again, unless a debugger or the program itself (``locals()``) holds that dict.
    ``known`` are the ids of objects that a list of ours holds.
    """
    seen, code = frame.f_locals, frame.f_code
    copy = dict(seen)
    ours = type(seen) is dict and code.co_flags & inspect.CO_OPTIMIZED and sys.gettrace() is None
    if ours and sys.getrefcount(seen) <= 3 + (id(seen) in known):  # the frame, this variable, the argument, our list
        for name in (*code.co_varnames, *code.co_cellvars, *code.co_freevars):
            seen.pop(name, None)
    return copy


def _own(name: str, value: Any) -> str:
    """How a method's own object is called: a thread by its name and target, everything else ``self`` or ``cls``."""
    if not issubclass(type(value), threading.Thread):
        return name
    own, kind = vars(value), type(value).__qualname__
    runs = getattr(own.get("_target"), "__qualname__", f"{kind}.run")
    return f"thread {own.get('_name')!r} running {runs}()"


def _frame_roots(thread: int, frame: types.FrameType | None, here: int, known: Container[int]) -> Iterator[Root]:
    label = "" if thread == here else " in another thread"
    while frame is not None:
        module, code = str(frame.f_globals.get("__name__", "?")), frame.f_code
        cost = FRAME_COST if _is_library(code.co_filename) else int(module.startswith("o1lab.")) and 1
        if code.co_filename in OWN_FILES:
            step = frame_locals(frame, known).get("step") if code.co_name == "probe" else None
            if step is not None:
                yield Root({"step": step}, "", "local", "argument of probe()", 3)
        elif not code.co_flags & inspect.CO_OPTIMIZED:  # a module's or a class's body: the namespace itself
            yield Root(frame.f_locals, "", "global", f"module {module}", cost)
        else:
            names = frame_locals(frame, known)
            own = {_own(name, names[name]): names.pop(name) for name in ("self", "cls") if name in names}
            yield Root(names | own, "", "local", f"local of {code.co_qualname}(){label}", cost)
        frame = frame.f_back


def _module_roots() -> Iterator[Root]:
    for name, module in list(sys.modules.items()):
        names = getattr(module, "__dict__", None)
        if type(names) is not dict:
            continue
        file = names.get("__file__")
        cost = INTERPRETER_COST if not isinstance(file, str) else MODULE_COST if _is_library(file) else 0
        if name == "__main__":
            yield Root(names, "", "global", "module __main__", 0)
        else:
            kind = "interpreter" if cost == INTERPRETER_COST else "global"
            kind = "dynamo" if name.startswith(("torch._dynamo", "torch._inductor")) else kind
            yield Root(names, f"{name}.", kind, f"module {name}", max(cost, int(name.startswith("o1lab."))))


def _dynamo_roots() -> Iterator[Root]:
    """Dynamo's compiled code and guards hang on a function's code object, where the collector cannot see them."""
    frames = sys.modules.get("torch._dynamo.convert_frame")
    entries = getattr(sys.modules.get("torch._dynamo.eval_frame"), "_debug_get_cache_entry_list", None)
    if frames is None or entries is None:
        return
    for code in [ref() for ref in list(frames.input_codes.seen)]:
        held = [entry.guard_manager for entry in entries(code)] if code is not None else []
        if held:
            names = {f"{code.co_qualname}[{number}]": guards for number, guards in enumerate(held)}
            yield Root(names, "dynamo cache of ", "dynamo", os.path.basename(code.co_filename), 1)


def roots(known: Container[int] = ()) -> list[Root]:
    """Every place a path may start from, those that a user edits first."""
    found: list[Root] = []
    ident = threading.get_ident()
    frames = {**sys._current_frames(), ident: sys._getframe()}
    for thread in sorted(frames, key=lambda key: key != ident):
        found += _frame_roots(thread, frames[thread], ident, known)
    frames.clear()  # this frame is among them: a cycle otherwise, which would keep the whole heap
    last = {name: getattr(sys, name) for name in ("last_value", "last_exc", "last_traceback") if hasattr(sys, name)}
    found.append(Root(last, "sys.", "last exception", "the interpreter", 1))
    shell = getattr(sys.modules.get("IPython.core.interactiveshell"), "InteractiveShell", None)
    if shell is not None and shell.initialized():
        found.append(Root(shell.instance().user_ns, "", "global", "the notebook", 0))
        found.append(Root(shell.instance(), "get_ipython()", "interpreter", "IPython", 2))
    found += _dynamo_roots()
    found += _module_roots()
    seen: set[int] = set()
    return [root for root in found if not (id(root.names) in seen or seen.add(id(root.names)))]


def buffer_bytes(obj: Any) -> int:
    """Bytes of a plain buffer (bytes, str, bytearray, array) or of an ndarray; -1 for any other type."""
    kind = type(obj)
    if kind in (bytes, bytearray, str, array):
        return sys.getsizeof(obj)
    return int(obj.nbytes) if kind.__name__ == "ndarray" and kind.__module__ == "numpy" else -1


class Heap:
    """One look at all live objects. Build it, :meth:`search`, ask, and drop it: it keeps everything alive meanwhile.

    Attributes
    ----------
    objects : list
        The nodes; an edge runs from ``source[e]`` to ``target[e]`` (indices into it).
    level, parent, anchor : int32 array per node
        Steps from the nearest root (-1: no root reaches it), the node before it, its topmost new ancestor-or-self.
    whole : bool
        False if time ran out before all edges were read.

    Without ``edges`` the nodes are there and nothing can be searched, in half the time.
    """

    def __init__(
        self, objects: list[Any], deadline: float, targets: tuple[Any, ...] = (), *, edges: bool = True
    ) -> None:
        self.objects = objects
        known = set(map(id, objects))
        self.roots = roots(known)
        for extra in itertools.chain(targets, (root.names for root in self.roots)):
            if id(extra) not in known:
                known.add(id(extra))
                objects.append(extra)
        ids, counts, self.whole = array("q"), array("q"), True
        first, tracked = 0, len(objects)
        while first < len(objects):  # untracked containers join the end of the list as they are met
            chunk = objects[first : first + 2000]
            first += len(chunk)
            if time.monotonic() > deadline:
                self.whole = False
                break
            lists = [[] if type(obj) in LEAVES else gc.get_referents(obj) for obj in chunk]
            flat = list(itertools.chain.from_iterable(lists))
            if edges:
                counts.extend(map(len, lists))
                ids.extend(map(id, flat))
            for obj in itertools.compress(flat, map(LARGE_LENGTHS.__contains__, map(type, flat))):
                least = LARGE_LENGTHS[type(obj)]
                if (not least or len(obj) >= least) and id(obj) not in known:
                    known.add(id(obj))
                    objects.append(obj)
        self.tracked = tracked
        n = len(objects)
        self.ids = np.fromiter(map(id, objects), np.int64, n)
        self.order = np.argsort(self.ids)
        self.sorted_ids = self.ids[self.order]
        self.root_of: dict[int, Root] = {}
        if not edges:
            return
        sizes = np.zeros(n, np.int64)
        sizes[: len(counts)] = np.frombuffer(counts, np.int64) if counts else 0
        raw = np.frombuffer(ids, np.int64) if ids else np.zeros(0, np.int64)
        target, source = self.index_of(raw), np.repeat(np.arange(n, dtype=np.int32), sizes)
        types_ = np.fromiter((id(type(obj)) for obj in objects), np.int64, n)
        keep = target >= 0
        of_type = (raw == types_[source])[keep]
        self.source, self.target = source[keep], target[keep]
        stop = np.zeros(n, bool)  # namespaces of modules are roots: no path leads through them
        at = self.index_of(np.array([id(root.names) for root in self.roots], np.int64))
        self.root_of = {int(index): root for index, root in zip(at, self.roots, strict=True)}
        stop[at] = True
        modules = self.index_of(np.array([id(module) for module in list(sys.modules.values())], np.int64))
        stop[modules[modules >= 0]] = True
        self.passable = ~(stop[self.target] | of_type)
        self.by_class = of_type & ~stop[self.target]

    def index_of(self, ids: np.ndarray) -> np.ndarray:
        """Node index of each id, -1 for what is no node."""
        place = np.minimum(np.searchsorted(self.sorted_ids, ids), len(self.sorted_ids) - 1)
        return np.where(self.sorted_ids[place] == ids, self.order[place], -1).astype(np.int32)

    def search(self, new: np.ndarray | None = None) -> None:
        """Breadth first from the roots, cheap ones first; ``new`` (bool per node) is what :attr:`anchor` looks for."""
        n = len(self.objects)
        self.new = np.zeros(n, bool) if new is None else new
        self.level, self.parent, self.anchor = (np.full(n, -1, np.int32) for _ in range(3))
        starts: dict[int, list[int]] = {}
        for index, root in self.root_of.items():
            starts.setdefault(root.cost, []).append(index)
        self._spread(starts, self.passable)
        every = self.passable | self.by_class  # what only its class leads to
        self._spread({0: np.flatnonzero(self.level >= 0).tolist()}, every, again=True)
        self.hidden = np.zeros(n, bool)
        if self.whole:  # held by C or C++, or by the stack of a running frame: the rest is garbage
            degree = np.bincount(self.target, minlength=n)
            left = np.flatnonzero(self.level < 0)
            surplus = [i for i in left.tolist() if sys.getrefcount(self.objects[i]) - _LIST_REFERENCE > degree[i]]
            self.hidden[surplus] = True
            self._spread({0: surplus}, every)

    def _spread(self, starts: dict[int, list[int]], passable: np.ndarray, *, again: bool = False) -> None:
        source, target = self.source[passable], self.target[passable]
        begin = np.searchsorted(source, np.arange(len(self.objects) + 1))
        frontier, depth = np.zeros(0, np.int32), 0
        while len(frontier) or any(cost >= depth for cost in starts):
            fresh = np.array(starts.get(depth, []), np.int32)
            fresh = fresh if again and depth == 0 else fresh[self.level[fresh] < 0]
            if not again:
                self.level[fresh] = depth
                self.anchor[fresh] = np.where(self.new[fresh], fresh, -1)
            frontier = np.concatenate([fresh, frontier])
            length = begin[frontier + 1] - begin[frontier]
            offset = np.arange(length.sum()) - np.repeat(np.cumsum(length) - length, length)
            edges = np.repeat(begin[frontier], length) + offset
            there, here = target[edges], np.repeat(frontier, length)
            unseen = self.level[there] < 0
            there, here = there[unseen], here[unseen]
            there, where = np.unique(there, return_index=True)
            order = np.argsort(where)
            there, here = there[order], here[where[order]]
            self.level[there] = (self.level[here] if again else depth) + 1
            self.parent[there] = here
            above = self.anchor[here]
            self.anchor[there] = np.where(above >= 0, above, np.where(self.new[there], there, -1))
            frontier, depth = there, depth + 1

    def path(self, index: int) -> list[int]:
        """Nodes from the root to ``index``."""
        found = [index]
        while self.parent[found[-1]] >= 0:
            found.append(int(self.parent[found[-1]]))
        return found[::-1]

    def close(self) -> None:
        """Let go of every object."""
        self.objects.clear()
        self.roots.clear()
        self.root_of.clear()


_probe_list = [object()]
_LIST_REFERENCE = sys.getrefcount(_probe_list[0])
