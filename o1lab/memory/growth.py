"""What grew between a mark and now, gathered by who holds it."""

from __future__ import annotations

import gc
import itertools
import sys
import weakref
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np

from o1lab.memory.heap import OWN, Heap
from o1lab.memory.holding import ANY, LRU, OwnerPath, Words, lru_words, words
from o1lab.memory.sizes import SAVED, Sizes, census, lengths, name_of

NAMED_GROUPS = 300
NOISE_BYTES = 512
SHARED = (type(None), bool, type(Ellipsis), type)


@dataclass(frozen=True, eq=False)
class Mark:
    """Which objects existed at one moment: addresses, types and lengths, no references (tensors: weak ones)."""

    ids: np.ndarray = field(repr=False)
    types: np.ndarray = field(repr=False)
    sizes: np.ndarray = field(repr=False)
    tensors: dict[int, Any] = field(repr=False)
    census: dict[str, int] = field(repr=False)

    @classmethod
    def of(cls, heap: Heap) -> Self:
        """The mark of one look at the heap."""
        sizes, order = Sizes(), heap.order
        kinds = np.fromiter((id(type(obj)) for obj in heap.objects), np.int64, len(heap.objects))
        tensors = {id(obj): weakref.ref(obj) for obj in heap.objects if sizes.is_tensor(type(obj))}
        long, saved = lengths(heap, Sizes())
        return cls(heap.ids[order], kinds[order], long[order], tensors, census(heap, sizes) | {SAVED: saved})


@dataclass
class _Group:
    anchor: int
    certain: bool
    count: int = 0
    by_type: Counter[str] = field(default_factory=Counter)
    extra: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    sample: Any = None
    most: int = -1
    deep: int = -1  # the sample's node, if it is one

    @property
    def total(self) -> int:
        return sum(self.by_type.values()) + self.extra


class Growth:
    """Finds new objects and grown containers, and puts each in its holder's group; :meth:`paths` names these."""

    def __init__(self, mark: Mark, heap: Heap) -> None:
        self.mark, self.heap, self.sizes = mark, heap, Sizes()
        self.groups: dict[tuple[int, int], _Group] = {}
        self.leaves: dict[int, list[Any]] = {}
        self.nodes = set(map(id, heap.objects[heap.tracked :]))  # the untracked ones
        objects = heap.objects
        place = np.minimum(np.searchsorted(mark.ids, heap.ids), len(mark.ids) - 1)
        kinds = np.fromiter((id(type(obj)) for obj in objects), np.int64, len(objects))
        old = (mark.ids[place] == heap.ids) & (mark.types[place] == kinds)
        for index in np.flatnonzero(old).tolist():
            if self.sizes.is_tensor(type(objects[index])):
                ref = mark.tensors.get(id(objects[index]))
                old[index] = ref is not None and ref() is objects[index]
        for index in np.flatnonzero(old).tolist():  # what old tensors hold is old
            if self.sizes.is_tensor(type(objects[index])):
                self.sizes.storage(objects[index])
                self.sizes.saved(objects[index])
        long, saved = lengths(heap, Sizes())
        before = np.where(old, mark.sizes[place], -1)
        self.more = np.where(old & (before >= 0), long - before, 0)
        new = ~old
        spaces = list(heap.root_of)  # names come and go in a namespace: each is looked at by itself
        new[spaces], self.more[spaces] = False, 0
        for index in np.flatnonzero(self.more > 0).tolist():
            inside = [id(one) for one in self.tail(index) if sys.getrefcount(one) <= 6]  # nobody else's
            at = heap.index_of(np.array(inside, np.int64))
            new[at[(at >= 0) & (self.more[at] == 0)]] = True
        heap.search(new)
        now = census(heap, Sizes()) | {SAVED: saved}
        self.net = {kind: size - mark.census.get(kind, 0) for kind, size in now.items()}

    def tail(self, index: int) -> list[Any]:
        """The entries by which a container grew (for a set any; for a dict keys and values)."""
        obj, more = self.heap.objects[index], int(self.more[index])
        if isinstance(obj, dict):
            pairs = itertools.islice(reversed(dict.items(obj)), more)
            return [one for pair in pairs for one in pair]
        if isinstance(obj, (list, deque)):
            return list(itertools.islice(reversed(obj), more))
        return list(itertools.islice(obj, more)) if isinstance(obj, set) else []

    def home(self, index: int) -> int:
        """The container that a person knows: an ``lru_cache`` for the dict inside it."""
        above = self.heap.parent[index] if index >= 0 else -1
        return int(above) if above >= 0 and type(self.heap.objects[above]) is LRU else index

    def group_of(self, index: int) -> _Group:
        """The group of a new node: by its topmost new ancestor's holder, and by attribute where that has names."""
        anchor = int(self.heap.anchor[index])
        if anchor < 0:
            return self.groups.setdefault((-1, -1), _Group(-1, True))
        holder = self.home(int(self.heap.parent[anchor]))
        certain = holder >= 0 and self.more[holder] > 0
        key = (holder, -1 if certain else anchor)
        return self.groups.setdefault(key, _Group(anchor, certain))

    def collect(self) -> None:
        """Put every new object, and every entry by which an old container grew, into its holder's group."""
        heap, objects = self.heap, self.heap.objects
        for index in np.flatnonzero((self.more > 0) & (heap.level >= 0)).tolist():
            obj, more = objects[index], int(self.more[index])
            home = self.home(index)
            group = self.groups.setdefault((home, -1), _Group(home, True))
            whole = type(obj) is bytearray or self.sizes.is_tensor(type(obj))
            group.count = 1 if whole else max(group.count, more)
            group.extra += more if whole else 0 if type(obj) is LRU else self.sizes.own(obj) * more // len(obj)
            entries = self.tail(index)
            group.sample = group.sample if group.sample is not None else (entries or [obj])[0]
            for one in entries:
                self.leaf(one, group)
            del entries  # a reference that would count
        named_first = sorted(np.flatnonzero(heap.new).tolist(), key=self.rank)
        for index in named_first:
            obj, kind = objects[index], type(objects[index])
            if kind.__module__ in OWN or hasattr(kind, "next_functions"):  # autograd's nodes: made by looking at them
                continue
            group = self.group_of(index)
            size = self.sizes.own(obj)
            if self.sizes.is_tensor(kind):
                group.by_type[SAVED] += self.sizes.saved(obj)
            group.by_type[self.sizes.label(obj)] += size
            group.kinds[name_of(kind)] += 1
            if size > group.most:
                group.most, group.sample, group.deep = size, obj, index
            for one in gc.get_referents(obj):
                self.leaf(one, group)
        for leaf_id in list(self.leaves):
            one, holders, group = self.leaves.pop(leaf_id)
            if sys.getrefcount(one) - 2 <= holders:  # 2: this variable and the argument
                size = self.sizes.own(one)
                group.extra += size
                if size > group.most:
                    group.most, group.sample = size, one
            del one

    def rank(self, index: int) -> tuple[bool, bool]:
        """What Python reaches counts first: a storage that C++ holds too, or alone, is no second one."""
        above = int(self.heap.anchor[index])
        hidden = above < 0 or self.heap.hidden[self.heap.path(above)[0]]
        return bool(hidden), self.sizes.is_storage(self.heap.objects[index])

    def leaf(self, obj: Any, group: _Group) -> None:
        """Note a plain object (bytes, str, number): it is no node, and counts if nobody but new objects holds it."""
        if not gc.is_tracked(obj) and not isinstance(obj, SHARED) and id(obj) not in self.nodes:
            self.leaves.setdefault(id(obj), [obj, 0, group])[1] += 1
            for inner in obj if type(obj) is tuple else ():
                self.leaf(inner, group)

    def settle(self) -> list[_Group]:
        """Groups with what really grew: a new object in an old place counts only if its type grew in all."""
        found = sorted(self.groups.values(), key=lambda group: (not group.certain, -group.total))
        for group in found:
            if not group.certain:
                real = {kind: min(size, max(self.net.get(kind, 0), 0)) for kind, size in group.by_type.items()}
                main = max(group.by_type, key=group.by_type.__getitem__, default="")
                if not real.get(main) and main:
                    real, group.extra = {}, 0
                group.by_type = Counter(real)
            for kind, size in group.by_type.items():
                self.net[kind] = self.net.get(kind, 0) - size
        return sorted((group for group in found if group.total > 0), key=lambda group: -group.total)

    def paths(self, top: int) -> list[OwnerPath]:
        """The largest ``top`` owners, as paths."""
        self.collect()
        merged: dict[tuple[str, str], list[tuple[_Group, Words]]] = {}
        for group in self.settle()[:NAMED_GROUPS]:
            said = self.words(group)
            if said is not None:
                merged.setdefault((said.text, said.where), []).append((group, said))
        found = []
        for (text, where), parts in merged.items():
            group, said = max(parts, key=lambda part: part[0].total)
            path = said.exact if len({part[1].exact for part in parts}) == 1 else text
            count = sum(part.count or max(part.kinds.values(), default=1) for part, _ in parts)
            sample = "object" if group.sample is None else self.sizes.what(group.sample)
            found.append(OwnerPath(path, said.kind, sum(part.total for part, _ in parts), count, sample, where))
        return sorted(found, key=lambda path: -path.bytes)[:top]

    def words(self, group: _Group) -> Words | None:
        """The path to a group in words; ``None`` for what this module keeps itself."""
        if group.anchor < 0:
            kinds = [name for name, _ in group.kinds.most_common() if not name.startswith("builtins.")]
            through = " and ".join(kinds[:2]) or "plain containers"
            if not self.heap.whole:
                return Words(f"not reached in time: {through}", through, "unknown", "")
            return Words(f"garbage waiting for the collector: {through}", through, "cycle", "reference cycles")
        at = self.heap.path(group.anchor)
        nodes = [self.heap.objects[index] for index in at]
        if any(type(node).__module__ in OWN for node in nodes):
            return None
        if self.heap.hidden[at[0]] and group.total < NOISE_BYTES:  # an argument tuple of a call that is running
            return None
        root = self.heap.root_of.get(at[0])
        said = words(nodes, root)
        if group.deep >= 0:  # the way to the bytes inside, where it says why they stay
            inside = words([self.heap.objects[index] for index in self.heap.path(group.deep)], root)
            if inside.kind in ("traceback", "generator", "hook", "last exception"):
                return Words(inside.text, inside.text, inside.kind, inside.where)
        obj = nodes[-1]
        if self.more[group.anchor] > 0:
            if type(obj) is LRU:
                name = lru_words(obj)
                return Words(name, name, "lru_cache", said.where)
            tail = ".grad_fn" if self.sizes.is_tensor(type(obj)) else "" if type(obj) is bytearray else ANY
            said = said if said.kind == "lru_cache" else said.plus(tail)
        return said
