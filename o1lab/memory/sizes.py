"""Bytes that Python objects hold: each tensor storage once, autograd's saved tensors, and what can grow in place."""

from __future__ import annotations

import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from o1lab.memory.heap import Heap, buffer_bytes
from o1lab.memory.holding import LRU

GRAPH_NODES = 20_000  # autograd nodes walked at most per instance


class Sizes:
    """Bytes of objects; each storage is counted once per instance of this class."""

    def __init__(self) -> None:
        self.seen: set[int] = set()
        self.tensor = getattr(sys.modules.get("torch"), "Tensor", None)
        self.by_type: dict[type, bool] = {}
        self.fields: dict[type, list[str]] = {}
        self.walked = 0

    def is_tensor(self, kind: type) -> bool:
        """Whether objects of this class are tensors."""
        found = self.by_type.get(kind)
        if found is None:
            found = self.by_type[kind] = self.tensor in kind.__mro__ if self.tensor is not None else False
        return found

    def special(self, kind: type) -> bool:
        """Whether ``sys.getsizeof`` is not the answer for this type."""
        return self.is_tensor(kind) or kind.__name__ in ("UntypedStorage", "ndarray")

    def is_storage(self, obj: Any) -> bool:
        """Whether it is a torch storage, of any class."""
        return type(obj).__name__ == "UntypedStorage"

    def storage(self, tensor: Any) -> int:
        """Bytes of a tensor's storage (or of a storage) the first time it is seen, then 0."""
        try:
            storage = tensor if self.is_storage(tensor) else tensor.untyped_storage()
            place, size = storage.data_ptr(), storage.nbytes()
        except (RuntimeError, NotImplementedError):  # meta, fake, sparse or functional: nothing of its own
            return 0
        if not place or place in self.seen:
            return 0
        self.seen.add(place)
        return int(size)

    def own(self, obj: Any) -> int:
        """Bytes of one object without what it refers to, but with a tensor's storage."""
        if self.is_tensor(type(obj)) or self.is_storage(obj):
            return self.storage(obj)
        try:
            size = buffer_bytes(obj)
            return size if size >= 0 else sys.getsizeof(obj)
        except Exception:  # noqa: BLE001  (a user's __sizeof__ may raise anything)
            return 0

    def what(self, obj: Any) -> str:
        """An object in a few words: type, and for a tensor dtype, shape and device."""
        kind = type(obj)
        if self.is_tensor(kind):
            dtype = str(obj.dtype).removeprefix("torch.")
            return f"{kind.__name__} {dtype} {tuple(obj.shape)} on {obj.device}"
        if buffer_bytes(obj) >= 0:
            return f"{kind.__name__} ({len(obj):,})" if kind is not np.ndarray else f"ndarray {obj.dtype} {obj.shape}"
        return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"

    def label(self, obj: Any) -> str:
        """What objects of the same sort have in common: the type, for a tensor with dtype, shape and device."""
        return self.what(obj) if self.is_tensor(type(obj)) else name_of(type(obj))

    def history(self, tensor: Any) -> Iterator[Any]:
        """The autograd nodes behind a tensor, up to ``GRAPH_NODES`` over the life of this instance."""
        queue, seen = [grad_fn(tensor)], set()
        while queue and self.walked < GRAPH_NODES:
            node = queue.pop()
            if node is not None and node not in seen:
                seen.add(node)
                self.walked += 1
                yield node
                queue += [step for step, _ in node.next_functions]

    def saved(self, tensor: Any) -> int:
        """Bytes that a tensor's autograd history keeps for the backward pass, storages not yet seen."""
        return sum(self.storage(one) for node in self.history(tensor) for one in self.saved_by(node))

    def saved_by(self, node: Any) -> list[Any]:
        """Tensors that one autograd node saved."""
        kind = type(node)
        if kind not in self.fields:
            names = dir(kind)
            self.fields[kind] = [n for n in names if n.startswith("_saved_")] + ["saved_tensors"] * (
                "saved_tensors" in names
            )
        found: list[Any] = []
        for name in self.fields[kind]:
            try:
                value = getattr(node, name)
            except RuntimeError:  # already freed by backward()
                continue
            found += [one for one in (value if isinstance(value, tuple) else [value]) if self.is_tensor(type(one))]
        return found


def grad_fn(tensor: Any) -> Any:
    """The tensor\'s place in an autograd graph, or ``None``."""
    try:
        return tensor.grad_fn
    except (RuntimeError, NotImplementedError):
        return None


_LENGTHS: dict[type, Any] = {
    list: len, dict: len, set: len, deque: len, OrderedDict: len, defaultdict: len, Counter: len,
    bytearray: len, LRU: lambda wrapper: wrapper.cache_info().currsize,
}  # fmt: skip


def same_storage(one: Any, other: Any) -> bool:
    """Whether two tensors are views of the same memory."""
    first, second = Sizes(), Sizes()
    return first.storage(one) > 0 and second.storage(other) > 0 and first.seen == second.seen


class _PerType(dict[type, Any]):
    """What to do with objects of a type, decided once per type: a heap has half a million objects."""

    def __init__(self, decide: Callable[[type], Any]) -> None:
        super().__init__()
        self.decide = decide

    def __missing__(self, kind: type) -> Any:
        self[kind] = found = self.decide(kind)
        return found


SAVED = "saved for backward"


def lengths(heap: Heap, sizes: Sizes) -> tuple[np.ndarray, int]:
    """What can grow in place, per node (a container's length, a tensor's bytes saved for backward; -1 for the rest).

    And the bytes saved for backward in all.
    """
    total = 0

    def saved(tensor: Any) -> int:
        nonlocal total
        size = sizes.saved(tensor) if grad_fn(tensor) is not None else 0
        total += size
        return size

    table = _PerType(lambda kind: _LENGTHS.get(kind, saved if sizes.is_tensor(kind) else None))
    found = np.full(len(heap.objects), -1, np.int64)
    for index, obj in enumerate(heap.objects):
        measure = table[type(obj)]
        if measure is not None:
            found[index] = measure(obj)
    return found, total


def census(heap: Heap, sizes: Sizes) -> dict[str, int]:
    """Bytes of all nodes by the full name of their type (tensors: with dtype, shape and device).

    A storage counts for its tensor: looking at a tensor makes the storage an object too, which may come first here.
    """
    plain = type(object.__sizeof__)  # written in C: it cannot raise
    own, storages = sizes.own, []
    table = _PerType(lambda kind: sys.getsizeof if type(kind.__sizeof__) is plain and not sizes.special(kind) else own)
    for kind in set(map(type, heap.objects)):
        sizes.is_tensor(kind)
    by_type: dict[type, int] = dict.fromkeys(set(map(type, heap.objects)), 0)
    named: Counter[str] = Counter()
    for obj in heap.objects:
        kind = type(obj)
        if sizes.by_type.get(kind):
            named[sizes.label(obj)] += own(obj)
        elif kind.__name__ == "UntypedStorage":
            storages.append(obj)
        else:
            by_type[kind] += table[kind](obj)
    for storage in storages:
        by_type[type(storage)] += own(storage)
    for kind, size in by_type.items():
        named[name_of(kind)] += size
    return dict(named)


def name_of(kind: type) -> str:
    """A type's full name."""
    return f"{kind.__module__}.{kind.__qualname__}"
