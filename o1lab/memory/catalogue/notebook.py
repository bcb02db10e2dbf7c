"""What a notebook keeps: each case runs cells in an IPython shell of its own, inside this process."""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Iterator
from typing import Any

from o1lab.memory.catalogue import Step, case
from o1lab.memory.catalogue.python_objects import KV_BYTES, activation


@contextlib.contextmanager
def shell(cache_size: int) -> Iterator[Any]:
    """A silent IPython shell that writes no history; what it changes in ``sys`` and ``builtins`` is put back."""
    import builtins

    from IPython.core.interactiveshell import InteractiveShell
    from traitlets.config import Config

    names = ("last_type", "last_value", "last_traceback", "last_exc", "ps1", "ps2", "ps3", "excepthook", "displayhook")
    before = {name: vars(sys)[name] for name in names if name in vars(sys)}
    built, main = set(vars(builtins)), sys.modules["__main__"]
    made = InteractiveShell(config=Config({"HistoryManager": {"enabled": False}}), cache_size=cache_size)
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            yield made
    finally:
        made.reset(new_session=False)
        made._atexit_once()
        sys.modules["__main__"] = main
        for name in names:
            vars(sys).pop(name, None)
        vars(sys).update(before)
        for name in set(vars(builtins)) - built:
            delattr(builtins, name)


@case(
    "https://github.com/ipython/ipython/issues/11204",
    "per-call leak",
    bytes_per_request=KV_BYTES,
    owner=r"Out\b|_oh|\b_\d*\b",
    requests_per_round=8,
    note="with `cache_size` 0 the texts shown stay, in `history_manager.outputs` and `output_hist_reprs` (IPython 9): "
    "`release_notebook()` clears these, too",
)
def cell_outputs(leak: bool) -> Iterator[Step]:
    """``Out`` keeps the value of every cell that ends in an expression. Cure: assign it, or end in ``;``."""
    with shell(cache_size=1000) as ipython:

        def step(number: int) -> None:
            ipython.execution_count += 1
            value = Answer()
            if leak:
                ipython.displayhook(value)  # what a cell that ends in `model(x)` does
            sys.stdout.seek(0)
            sys.stdout.truncate()

        yield step


class Answer:
    """A value with hidden states and a short text."""

    def __init__(self) -> None:
        self.hidden = activation()

    def __repr__(self) -> str:
        return "answer"


@case(
    "https://github.com/ipython/ipython/issues/11572",
    "per-call leak",
    owner="executing_cache",
    requests_per_round=4,
    warm_up=10,
    slow=True,
    note="the locals of the last failed cell stay as well, once, not per request: `release_notebook()` lets go of them",
)
def failing_cells(leak: bool) -> Iterator[Step]:
    """Each traceback shown leaves the failed cell's code in a cache of ``executing``. Cure: ``%xmode Minimal``."""
    with shell(cache_size=1000) as ipython:
        ipython.user_ns["activation"] = activation
        ipython.InteractiveTB.set_mode("Context" if leak else "Minimal")

        def step(number: int) -> None:
            ipython.run_cell("hidden = activation(); hidden.no_such_method()", store_history=False)
            sys.stdout.seek(0)
            sys.stdout.truncate()

        yield step
