"""How one object holds another, in words of the source: ``loop.kept[…]``, ``f.__closure__.seen``, ``→ serve().x``."""

from __future__ import annotations

import collections
import functools
import re
import types
from dataclasses import dataclass
from typing import Any

from o1lab.memory.heap import Root, frame_locals

ANY = "[…]"
OUTSIDE = "held by C++ or a running call: {}"
SEQUENCES = (list, tuple, set, frozenset, collections.deque)
GENERATORS = {types.GeneratorType: "gi", types.CoroutineType: "cr", types.AsyncGeneratorType: "ag"}
BOUND = (types.MethodType, types.BuiltinMethodType)
FIRST = ("lru_cache", "hook", "dynamo", "traceback", "generator", "thread local", "closure", "default", "attribute")
TABLES = {"_modules": "module", "_parameters": "module", "_buffers": "module", "_trait_values": "attributes"}
SHELL = {  # what IPython keeps beside the user's names
    r"(user_ns_hidden\['|displayhook\.)_{1,3}\d*('\])?": "_",
    r"get_ipython\(\).*(InteractiveTB|SyntaxTB|error_(in|before)_exec)": "last exception",
    r"get_ipython\(\).*output_hist": "Out",
}
LRU = functools._lru_cache_wrapper
LINKS = {  # attributes of built-in types that the collector follows
    types.FunctionType: ("__defaults__", "__kwdefaults__", "__closure__", "__dict__", "__annotations__", "__globals__"),
    types.MethodType: ("__self__", "__func__"),
    types.BuiltinMethodType: ("__self__",),
    functools.partial: ("func", "args", "keywords"),
    types.FrameType: ("f_back",),
    property: ("fget", "fset", "fdel"),
    classmethod: ("__func__",),
    staticmethod: ("__func__",),
}
ERROR_LINKS = ("__traceback__", "__cause__", "__context__", "args")


@dataclass(frozen=True)
class OwnerPath:
    """One holder.

    Attributes
    ----------
    path : str
        From a root that a person can edit, e.g. ``loop.kept[…]``; ``[…]`` stands for any index or key.
    kind : str
        ``"local" | "global" | "attribute" | "closure" | "default" | "Out" | "_" | "last exception" | "lru_cache" |
        "hook" | "dynamo" | "traceback" | "thread local" | "generator" | "cycle" | "interpreter" | "unknown"``
    bytes : int
        Held behind this path, host and device together; each tensor storage counts once, and whole also under a view.
    count : int
        How many objects.
    what : str
        The kind of object that holds most of it, e.g. ``"Tensor float32 (1, 256) on cpu"``.
    where : str
        Where the path's first word lives, e.g. ``"local of serve()"``.
    """

    path: str
    kind: str
    bytes: int
    count: int
    what: str
    where: str = ""

    def __str__(self) -> str:
        place = f", {self.where}" if self.where else ""
        return f"{self.path} ({self.kind}{place}): {self.bytes:,} B in {self.count} × {self.what}"


@dataclass
class Words:
    """A path in words: ``exact`` with the keys of dicts, ``text`` with them collapsed so that like paths group."""

    exact: str
    text: str
    kind: str
    where: str

    def plus(self, tail: str) -> Words:
        """The same path, one step longer; ``[…][…]`` is said once."""
        exact, text = (say if tail == ANY and say.endswith(ANY) else say + tail for say in (self.exact, self.text))
        return Words(exact, text, self.kind, self.where)


@dataclass
class _Step:
    exact: str
    text: str | None = None
    kind: str = ""
    names: str = ""  # what the child's keys are: "" values, "attributes", "module", "skip"
    fresh: bool = False  # the words so far say less than this step alone


def _key_of(table: dict[Any, Any], child: Any) -> tuple[bool, Any]:
    for key, value in list(dict.items(table)):
        if value is child:
            return True, key
    return False, None


def _in_dict(table: dict[Any, Any], child: Any, names: str) -> _Step:
    found, key = _key_of(table, child)
    if names == "skip":
        return _Step("", names="attributes" if type(child) is dict else "" if found else "key")
    if names and found and isinstance(key, str):
        if names == "module" and key.isdigit():
            return _Step(f"[{key}]", ANY, "attribute")
        if key in TABLES and isinstance(child, dict):
            return _Step("", names=TABLES[key])
        kind = "hook" if key.endswith("hooks") else "dynamo" if key.startswith("__compiled_fn") else "attribute"
        return _Step(f".{key}", kind=kind)
    short = found and (isinstance(key, int) or (isinstance(key, str) and len(key) <= 24))
    return _Step(f"[{key!r}]" if short else ANY, ANY)


def _in_sequence(holder: Any, child: Any, before: Any, names: str) -> _Step:
    if isinstance(holder, tuple):
        places = [index for index, item in enumerate(holder) if item is child]
        place = places[0] if places else 0
        if type(before) is LRU or names == "key":
            return _Step(f", key[{place}]", "")
        if isinstance(before, types.FunctionType):
            code = before.__code__
            if holder is before.__closure__:
                return _Step(f".{code.co_freevars[place]}", kind="closure")
            if holder is before.__defaults__:
                names = code.co_varnames[: code.co_argcount][-len(holder) :]
                return _Step(f".{names[place]}", kind="default")
        fields = getattr(type(holder), "_fields", None)
        if fields and places and place < len(fields):
            return _Step(f".{fields[place]}")
    return _Step(ANY)


def _in_frame(frame: types.FrameType | None, child: Any, kind: str) -> _Step:
    if frame is None:
        return _Step("")
    if type(child) is types.FrameType or type(child) is types.TracebackType:
        return _Step("", kind=kind)
    if type(child) is dict and child is frame.f_locals:  # a copy of its locals, made by who looked at them
        return _Step(f" → {frame.f_code.co_name}()", kind=kind, names="attributes")
    content = _cell(child) if type(child) is types.CellType else child
    for name, value in frame_locals(frame).items():
        if value is content:
            return _Step(f" → {frame.f_code.co_name}().{name}", kind=kind)
    return _Step(f" → {frame.f_code.co_name}()", kind=kind)


def _cell(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # empty
        return None


def _namespace(obj: Any) -> dict[str, Any]:
    try:
        found = object.__getattribute__(obj, "__dict__")
    except (AttributeError, TypeError):
        return {}
    return found if isinstance(found, dict) else {}


def _in_object(holder: Any, child: Any) -> _Step:
    names = _namespace(holder)
    if child is names:
        return _Step("", names="attributes")
    found, key = _key_of(names, child)
    if found:
        return _in_dict(names, child, "attributes") if isinstance(key, str) else _Step(ANY)
    for cls in type(holder).__mro__:
        for name, member in list(vars(cls).items()):
            if type(member) is types.MemberDescriptorType:
                try:
                    value = member.__get__(holder)
                except AttributeError:  # a slot without a value
                    continue
                if value is child:
                    return _Step(f".{name}", kind="attribute")
    if child is type(holder):
        return _Step(".__class__")
    return _Step(f" → {type(child).__name__}")


def _link(holder: Any, child: Any, before: Any, names: str) -> _Step:
    kind = type(holder)
    if isinstance(holder, dict) and (kind is dict or _key_of(holder, child)[0]):
        return _in_dict(holder, child, names)
    if isinstance(holder, SEQUENCES):
        return _in_sequence(holder, child, before, names)
    if kind is types.CellType:
        return _Step("", kind="closure")
    if kind is LRU:
        if child is getattr(holder, "__wrapped__", None) or child is _namespace(holder):
            return _Step("", names="attributes")
        step = _Step(lru_words(holder), kind="lru_cache", fresh=True)
        step.names = "skip" if type(child) is dict else ""
        return step
    if kind is types.TracebackType:
        return _Step("", kind="traceback")
    if kind in GENERATORS:
        return _in_frame(getattr(holder, f"{GENERATORS[kind]}_frame"), child, "generator")
    if kind is types.FrameType and child is not holder.f_back:
        return _in_frame(holder, child, "traceback")
    links: tuple[str, ...] = LINKS.get(kind, ())
    if isinstance(holder, BaseException):
        links = ERROR_LINKS
    if isinstance(holder, type):
        return _Step("" if type(child) is dict else f" → {type(child).__name__}", names="attributes")
    for name in links:
        if getattr(holder, name, None) is child:
            space = "attributes" if name in ("__dict__", "__kwdefaults__") else ""
            what = {"__closure__": "closure", "__kwdefaults__": "default", "__defaults__": "default"}.get(name, "")
            return _Step("" if name == "__dict__" else f".{name}", kind=what, names=space)
    if kind.__name__ == "_local" and kind.__module__ in ("_thread", "threading") and type(child) is dict:
        return _Step("", kind="thread local", names="skip")
    step = _in_object(holder, child)
    if any(base.__name__ == "_local" and base.__module__ == "_thread" for base in kind.__mro__):
        step = _Step("", kind="thread local", names="skip") if type(child) is dict else step
    return step


def lru_words(cache: Any) -> str:
    """An ``lru_cache`` by its function, and how far it is filled where it has a limit."""
    most, filled = cache.cache_parameters()["maxsize"], cache.cache_info().currsize
    limit = "" if most is None else f" (bounded, maxsize {most:,}, filled {filled:,})"
    limit = limit if most is None or filled < most else f" (full, maxsize {most:,})"
    return f"functools.lru_cache of {getattr(cache, '__qualname__', 'a function')}{limit}"


def words(nodes: list[Any], root: Root | None) -> Words:
    """The path through ``nodes`` (the root's namespace first) in words; without ``root`` it starts at an object."""
    kinds: list[str] = []
    if root is None or not isinstance(root.names, dict):
        exact = text = root.prefix if root else OUTSIDE.format(type(nodes[0]).__name__)
        where, base = (root.where, root.kind) if root else ("", "unknown")
        begin, names = 0, ""
    else:
        found, key = _key_of(root.names, nodes[1]) if len(nodes) > 1 else (False, "")
        key = str(key) if found else ""
        exact = text = (root.prefix + key) or root.where
        where, base, begin, names = root.where, root.kind, 1, ""
        if key == "Out" and isinstance(nodes[1], dict):
            base = "Out"
        elif re.fullmatch(r"_{1,3}|_\d+", key):
            numbered = key.strip("_")  # _5 is Out[5]
            base, text = ("Out", f"Out{ANY}") if numbered else ("_", key)
        elif key == "_oh":
            base, exact, text = "Out", "Out", "Out"
        elif base == "dynamo" or re.match(r"__compiled_fn|__resume_at", key):
            base, text = "dynamo", root.prefix + re.sub(r"\[\d+\]$", ANY, re.sub(r"(__\w+?_)\d+.*", r"\1…", key))
        elif key.startswith("thread "):
            text = re.sub(r"^thread .* running ", f"threads {ANY} running ", key)
    for index in range(begin, len(nodes) - 1):
        before = nodes[index - 1] if index else None
        step = _link(nodes[index], nodes[index + 1], before, names)
        more, short = step.exact, step.exact if step.text is None else step.text
        if more == ANY and exact.endswith(ANY):
            more = ""
        if short == ANY and text.endswith(ANY):
            short = ""
        exact, text = (more, short) if step.fresh else (exact + more, text + short)
        if step.kind:
            kinds.append(step.kind)
        names = step.names
    if root is not None and base not in ("Out", "_", "last exception", "dynamo"):
        shell = next((kind for words, kind in SHELL.items() if re.search(words, exact)), "")
        base = shell or (min(kinds, key=FIRST.index) if kinds and base != "interpreter" else base)
    return Words(exact, text, base, where)
