"""What IPython and Jupyter keep of a notebook's objects behind its back, and how to get the memory back.

A tensor that a cell displayed, or that was a local where a cell failed, stays in memory after ``del``: the output
cache, the last exception and their copies hold it. Sources: IPython ``core/displayhook.py``,
``core/interactiveshell.py``, ``core/ultratb.py``; reports ipython#11204, #11572, #12879 and #14129.
"""

from __future__ import annotations

import gc
import re
import sys
import types
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from o1lab.memory import counters
from o1lab.memory.owners import OwnerPath, owners_of
from o1lab.memory.sizes import Sizes, same_storage

UNDERSCORES = ("_", "__", "___")
REACHED_OBJECTS, SHOWN = 100_000, 16
LAST = ("last_value", "last_exc", "last_traceback")
PROGRAM = (type, types.ModuleType)
KEPT_FRAMES = ("curframe", "botframe", "stack", "curframe_locals", "tb_lineno", "_chained_exceptions")


@dataclass(frozen=True)
class Released:
    """What :func:`release_notebook` did.

    Attributes
    ----------
    holders : list of OwnerPath
        The holders that were cleared; ``bytes`` is what each reached, so that shared objects count in each.
    freed_bytes : int
        Bytes in use before minus after, host and device together (0 where the machine has no exact counter).
    left : list of OwnerPath
        What holds ``obj`` still: variables of yours, which are never deleted.
    """

    holders: list[OwnerPath]
    freed_bytes: int
    left: list[OwnerPath] = field(default_factory=list)

    def __str__(self) -> str:
        lines = [f"{self.freed_bytes:,} B given back by clearing {len(self.holders)} holders"]
        largest = sorted(self.holders, key=lambda path: -path.bytes)
        lines += [f"  cleared {path}" for path in largest[:SHOWN]]
        lines += [f"  and {len(largest) - SHOWN} smaller ones"] if len(largest) > SHOWN else []
        lines += [f"  yours, still held: {path}" for path in self.left]
        return "\n".join(lines)


class _Slot(NamedTuple):
    path: str
    kind: str
    value: Any
    clear: Callable[[], Any]


def _shell() -> Any:
    """The running IPython shell, or ``None``."""
    shell = getattr(sys.modules.get("IPython.core.interactiveshell"), "InteractiveShell", None)
    return shell.instance() if shell is not None and shell.initialized() else None


def _attribute(path: str, kind: str, owner: Any, name: str, empty: Any = None) -> Iterator[_Slot]:
    value = getattr(owner, name, None)
    if value is not None and not isinstance(value, str):
        yield _Slot(f"{path}.{name}", kind, value, lambda: setattr(owner, name, empty))


def _entry(path: str, kind: str, table: dict[Any, Any], key: Any, empty: str | None = None) -> Iterator[_Slot]:
    def clear() -> None:
        table.pop(key, None)
        if empty is not None:
            table[key] = empty

    value = table.get(key)
    if value is not None and not isinstance(value, str):
        yield _Slot(path, kind, value, clear)


def _interpreter_slots() -> Iterator[_Slot]:
    for name in LAST:
        if getattr(sys, name, None) is not None:
            yield _Slot(f"sys.{name}", "last exception", getattr(sys, name), lambda name=name: delattr(sys, name))


def _output_slots(shell: Any) -> Iterator[_Slot]:
    """The output cache: ``Out``, ``_``, ``_n``, and the two copies that ``del`` and ``%reset out`` miss."""
    names, hidden, hook = shell.user_ns, shell.user_ns_hidden, shell.displayhook
    history = shell.history_manager
    for number in list(getattr(history, "output_hist", {})):
        yield from _entry(f"Out[{number}]", "Out", history.output_hist, number)
    theirs = [getattr(hook, name, None) for name in UNDERSCORES]
    for name in [name for name in names if re.fullmatch(r"_{1,3}|_\d+", name)]:
        value = names[name]
        if name not in UNDERSCORES or value is hidden.get(name) or any(value is one for one in theirs):
            empty = "" if name in UNDERSCORES else None  # IPython expects these to exist; else the user assigned it
            yield from _entry(name, "_", names, name, empty)
    stale = [name for name in hidden if re.fullmatch(r"_{1,3}|_\d+", name) or name not in names]
    for name in stale:
        yield from _entry(f"get_ipython().user_ns_hidden[{name!r}]", "_", hidden, name)
    for name in UNDERSCORES:
        yield from _attribute("get_ipython().displayhook", "_", hook, name, "")


def _shell_slots(shell: Any) -> Iterator[_Slot]:
    """The last result, the last exceptions, the debugger, and the namespaces that ``%run`` left."""
    here = "get_ipython()"
    for path, result in (
        (f"{here}.last_execution_result", getattr(shell, "last_execution_result", None)),
        (f"{here}.displayhook.exec_result", getattr(shell.displayhook, "exec_result", None)),
    ):
        yield from _attribute(path, "interpreter", result, "result")
        yield from _attribute(path, "last exception", result, "error_in_exec")
        yield from _attribute(path, "last exception", result, "error_before_exec")
    for name in ("InteractiveTB", "SyntaxTB"):
        handler = getattr(shell, name, None)
        for attribute in ("tb", "etb", "last_syntax_error"):
            yield from _attribute(f"{here}.{name}", "last exception", handler, attribute)
        debugger = getattr(handler, "pdb", None)
        for attribute in KEPT_FRAMES:
            yield from _attribute(f"{here}.{name}.pdb", "last exception", debugger, attribute)
    for name in ("outputs", "output_hist_reprs", "exceptions"):  # texts and images of all outputs, texts of tracebacks
        table = getattr(shell.history_manager, name, None)
        if table:
            yield _Slot(f"{here}.history_manager.{name}", "interpreter", table, table.clear)
    cache = getattr(shell, "_main_mod_cache", {})
    for file in list(cache):
        space = vars(cache[file])
        yield _Slot(f"{here}._main_mod_cache[{file!r}]", "interpreter", space, lambda file=file: cache.pop(file, None))


def slots() -> list[_Slot]:
    """Everything that the interpreter and the notebook keep now, with the way to clear each."""
    found, shell = list(_interpreter_slots()), _shell()
    if shell is not None:
        found += [*_output_slots(shell), *_shell_slots(shell)]
    return found


def _reach(value: Any, shell: Any) -> Iterator[Any]:
    """Objects behind ``value``, without the program itself: modules, classes, the shell, the user's namespace."""
    stop = {id(shell), id(getattr(shell, "user_ns", None)), id(sys.modules)}
    stop |= {id(vars(module)) for module in list(sys.modules.values()) if isinstance(module, types.ModuleType)}
    queue, seen = [value], {id(value)}
    while queue and len(seen) < REACHED_OBJECTS:
        obj = queue.pop()
        yield obj
        for one in gc.get_referents(obj):
            if id(one) not in seen and id(one) not in stop and not issubclass(type(one), PROGRAM):
                seen.add(id(one))
                queue.append(one)


def _size(value: Any, shell: Any, obj: Any) -> tuple[bool, int, str]:
    """Whether ``value`` holds ``obj`` (or a view of its storage), the bytes it reaches, and what is largest in it."""
    sizes, total, most, what = Sizes(), 0, -1, "object"
    tensor, held = sizes.is_tensor(type(obj)), False
    for one in _reach(value, shell):
        held = held or one is obj or (tensor and sizes.is_tensor(type(one)) and same_storage(one, obj))
        size = sizes.own(one)
        total += size
        if size > most:
            most, what = size, sizes.what(one)
    return held, total, what


def _figures() -> list[OwnerPath]:
    """Open pyplot figures: they are yours, so they are named and not closed."""
    manager = getattr(sys.modules.get("matplotlib._pylab_helpers"), "Gcf", None)
    return [
        OwnerPath(f"matplotlib.pyplot.figure({number})", "interpreter", _size(figure, None, None)[1], 1, "Figure")
        for number, figure in list(getattr(manager, "figs", {}).items())
    ]


def release_notebook(obj: Any = None) -> Released:
    """Clear what IPython and Jupyter keep of past cells, and name each holder; your own variables are never touched.

    Outside IPython only ``sys.last_*`` is cleared.

    Parameters
    ----------
    obj : object or weakref.ref, optional
        Clear only what holds this object (or, for a tensor, a view of it); then ``left`` names your variables that
        hold it still, and the memory comes back once these are gone too. A weak reference holds nothing itself.

    Examples
    --------
    >>> import sys
    >>> sys.last_value = ValueError(bytearray(1000))
    >>> [path.path for path in release_notebook().holders]
    ['sys.last_value']
    """
    ref = obj if isinstance(obj, weakref.ref) else lambda: obj
    wanted, before = obj is not None, counters.read(driver=False)
    holders = _clear(ref, wanted)
    gc.collect()
    after = counters.read(driver=False)
    freed = (before.host_in_use or 0) - (after.host_in_use or 0)
    freed += (before.device_allocated or 0) - (after.device_allocated or 0)
    if not wanted:
        return Released(holders, freed, _figures())
    paths = [] if ref() is None else owners_of(ref(), top=8)
    left = [path for path in paths if path.kind not in ("unknown", "cycle")]
    return Released(holders, freed, left)


def _clear(ref: Callable[[], Any], wanted: bool) -> list[OwnerPath]:
    """Clear the slots (those that hold ``ref()``, if one is wanted); every reference taken is gone on return."""
    shell, obj = _shell(), ref()
    holders = []
    for slot in slots() if obj is not None or not wanted else []:
        held, size, what = _size(slot.value, shell, obj)
        if held or not wanted:
            slot.clear()
            holders.append(OwnerPath(slot.path, slot.kind, size, 1, what))
    return holders
