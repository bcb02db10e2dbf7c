"""One progress display for everything: a widget for a person, a bar in a terminal, sparse lines in a log."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from typing import Any, TextIO, TypeVar

Item = TypeVar("Item")
LINE_SECONDS = 5.0
"""A log gets a line when this time has passed or a tenth of the work is done, whichever is later."""


def headless() -> bool:
    """Whether nobody watches this kernel: ``O1LAB_HEADLESS`` is set (the runner sets it) to anything but 0 or empty."""
    return os.environ.get("O1LAB_HEADLESS", "").strip().lower() not in ("", "0", "false", "no")


def disabled() -> bool:
    """Whether tqdm's own switch ``TQDM_DISABLE`` asks for silence."""
    return os.environ.get("TQDM_DISABLE", "").strip().lower() not in ("", "0", "false", "no")


def in_kernel() -> bool:
    """Whether this code runs in a Jupyter kernel, where a front end can draw a widget."""
    if "ipykernel" not in sys.modules:  # a kernel has always imported it
        return False
    from IPython import get_ipython

    shell = get_ipython()
    return shell is not None and hasattr(shell, "kernel")


def kind(stream: TextIO) -> str:
    """Decide the display: ``"none"``, ``"lines"``, ``"widget"`` or ``"bar"``. The only place that decides."""
    if disabled():
        return "none"
    if headless():
        return "lines"
    if in_kernel():
        return "widget" if find_spec("ipywidgets") else "lines"
    return "bar" if getattr(stream, "isatty", lambda: False)() else "lines"


def progress(
    iterable: Iterable[Item], *, total: int | None = None, label: str = "", stream: TextIO | None = None
) -> Iterator[Item]:
    """Iterate with a progress display that suits who is watching.

    Parameters
    ----------
    iterable : iterable
        What to iterate over; its items are passed on unchanged.
    total : int, optional
        Number of items, where ``len(iterable)`` does not tell.
    label : str
        What is being done.
    stream : text stream, optional
        Where a bar or lines go; default standard output.

    Examples
    --------
    >>> sum(progress(range(4), label="rounds", stream=__import__("io").StringIO()))
    6
    """
    if total is None and hasattr(iterable, "__len__"):
        total = len(iterable)
    stream = stream or sys.stdout
    how = kind(stream)
    if how == "none":
        return iter(iterable)
    if how == "lines":
        return _lines(iterable, total, label, stream)
    if how == "widget":
        from tqdm.notebook import tqdm as wrap
    else:
        from tqdm import tqdm as wrap
    options: dict[str, Any] = {} if how == "widget" else {"file": stream, "dynamic_ncols": True}
    return iter(wrap(iterable, total=total, desc=label or None, leave=how == "bar", **options))


def _lines(iterable: Iterable[Item], total: int | None, label: str, stream: TextIO) -> Iterator[Item]:
    """Yield the items; write a line at most every few seconds and every tenth, and one at the end if any was due."""
    start = last = time.monotonic()
    told = done = 0
    name = label or "progress"
    for item in iterable:
        yield item
        done += 1
        now = time.monotonic()
        if now - last >= LINE_SECONDS and (total is None or done - told >= total / 10) and done != total:
            share = f"/{total} ({done / total:.0%})" if total else ""
            print(f"{name}: {done}{share}, {now - start:.0f} s", file=stream, flush=True)
            last, told = now, done
    print(f"{name}: {done} done in {time.monotonic() - start:.1f} s", file=stream, flush=True)
