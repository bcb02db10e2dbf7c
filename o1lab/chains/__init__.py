"""Long chains: problems with every gold step known, what a model makes of them, and where it first goes wrong.

``make`` draws problems, ``evaluate`` lets a model work them, ``localise`` names the first fault of a produced chain.

>>> from o1lab import chains
>>> [sample.answer for sample in chains.make("hops", 4, 2, seed=0)]
['e49', 'e45']
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any

from o1lab.chains.problems import make, redraw, rest
from o1lab.chains.samples import TASKS, Entry, Parsed, Produced, Sample, Step

LAZY = {"evaluate": "evaluate", "localise": "faults"}

__all__ = ["TASKS", "Entry", "Parsed", "Produced", "Sample", "Step", "evaluate", "localise", "make", "redraw", "rest"]


def __getattr__(name: str) -> Any:
    if name not in LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{LAZY[name]}"), name)
    setattr(sys.modules[__name__], name, value)
    return value


class _Package(ModuleType):
    """Keeps ``evaluate`` the function, although the import system would put the submodule of that name here."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name in LAZY and isinstance(value, ModuleType):
            value = getattr(value, name)
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
