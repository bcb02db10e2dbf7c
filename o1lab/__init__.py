"""o1lab: find out, on your own GPU and model, which reasoning-inference bottleneck bites, why, and what cures it.

Importing the package is cheap: it loads neither torch nor a GPU context. The one entry point of a notebook is
:func:`start`; everything else lives in a submodule (``o1lab.memory``, ``o1lab.models``, ``o1lab.plots`` …).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from o1lab.progress import progress  # now, or importing the submodule later would replace the function by it
from o1lab.stats import Estimate

if TYPE_CHECKING:
    from o1lab.lab import Lab

__version__ = "0.1.0"
__all__ = ["Estimate", "progress", "start"]


def start(notebook: str, preset: str = "auto", **options: Any) -> Lab:
    """Open a notebook's session; see :class:`o1lab.lab.Lab` for what it does and the errors it raises."""
    from o1lab.lab import Lab

    return Lab.start(notebook, preset=preset, **options)
