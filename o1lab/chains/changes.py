"""What stands between a model and its own code: hooks and replaced methods, in words that are the same everywhere.

An intervention that is open while chains are evaluated belongs to the results, or a later run without it would take
them for its own.
"""

from __future__ import annotations

from typing import Any

DEPTH = 4
"""How far a hook's owner and closure are followed."""


def changes(network: Any) -> list[str]:
    """Hooks and replaced ``forward`` methods of a torch module, each with the plain values that it holds.

    Examples
    --------
    >>> import torch
    >>> layer = torch.nn.Linear(2, 2)
    >>> changes(layer)
    []
    >>> hook = layer.register_forward_hook(lambda module, given, made: made + 1)
    >>> len(changes(layer))
    1
    """
    found = []
    for name, module in network.named_modules():
        called = [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]
        called += [module.__dict__["forward"]] if "forward" in module.__dict__ else []
        found += [f"{name or 'model'}: {_words(one, DEPTH) or type(one).__name__}" for one in called]
    return sorted(found)


def _words(thing: Any, depth: int) -> str:
    """A plain value, a sequence of them, or the name of what holds such values; empty for everything else."""
    if isinstance(thing, (bool, int, float, str)) or type(thing).__name__ in ("dtype", "device"):
        return repr(thing)
    if depth == 0:
        return ""
    if isinstance(thing, (list, tuple)):
        parts = [_words(one, depth - 1) for one in thing]
        return f"[{', '.join(parts)}]" if parts and all(parts) else ""
    if callable(thing) and hasattr(thing, "__self__"):
        return f"{_words(thing.__self__, depth)}.{thing.__name__}"
    if callable(thing) and hasattr(thing, "__code__"):
        cells = zip(thing.__code__.co_freevars, thing.__closure__ or (), strict=True)
        return f"{thing.__qualname__}({_held({name: cell.cell_contents for name, cell in cells}, depth)})"
    if type(thing).__module__.startswith("o1lab."):
        return f"{type(thing).__name__}({_held(vars(thing), depth)})"
    return ""


STATE = ("calls", "count", "exact")
"""What an intervention counts while it works; not what it is."""


def _held(values: dict[str, Any], depth: int) -> str:
    kept = {name: _words(value, depth - 1) for name, value in values.items() if name not in STATE and name[0] != "_"}
    return ", ".join(f"{name}={words}" for name, words in sorted(kept.items()) if words)
