"""A papermill engine with time budgets: it runs every cell in this interpreter's kernel and says truly what ran."""

from __future__ import annotations

import logging
import signal
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import nbformat
from jupyter_client.kernelspec import KernelSpec
from jupyter_client.manager import AsyncKernelManager
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError
from papermill.clientwrap import PapermillNotebookClient
from papermill.engines import Engine, papermill_engines

from o1lab import records

NAME = "o1lab"
MOST_TEXT = 1_000_000
"""Characters of printed text kept per cell; an endless loop of prints must not fill memory and disk."""
IOPUB_SECONDS = 60
"""How long outputs may lag behind the end of their cell; nbclient's 4 s are too few on a busy machine."""

logger = logging.getLogger("o1lab.kernel")
logger.addHandler(logging.NullHandler())
logger.propagate = False  # whatever nbclient logs it raises too, and the runner says it in one line


class Stopped(Exception):
    """A notebook ended before its end; ``status`` is the runner's word for it, the message says where and why."""

    def __init__(self, status: str, message: str) -> None:
        self.status = status
        super().__init__(message)


@dataclass
class Execution:
    """One notebook being executed: its budgets, and what has happened so far (for progress and for the record).

    Parameters
    ----------
    cell_seconds, notebook_seconds : float
        Budgets; the second runs from the kernel's start.
    environment : mapping
        Environment variables of the kernel.
    folder : path
        Working folder of the kernel.
    kernel_log : path
        Where the kernel process's own error stream goes.
    """

    cell_seconds: float
    notebook_seconds: float
    environment: Mapping[str, str]
    folder: Path
    kernel_log: Path
    nb: Any = None
    number: int = 0
    total: int = 0
    heading: str = ""
    last_started: str = ""
    done: set[str] = field(default_factory=set)
    current: str | None = None
    begun: float = field(default_factory=time.monotonic)

    def rest(self) -> float:
        """Seconds left of the notebook's budget."""
        return self.notebook_seconds - (time.monotonic() - self.begun)

    def where(self) -> str:
        """The running cell in words: ``cell 7/31 (Reproduce)``."""
        if not self.number:
            return "starting the kernel"
        return f"cell {self.number}/{self.total}" + (f" ({self.heading})" if self.heading else "")

    def timeout(self) -> Stopped:
        """The budget that ran out, in words."""
        if self.rest() <= 0.05:
            budget = f"the notebook's budget of {self.notebook_seconds:g} s ran out"
        else:
            budget = f"it passed the budget of {self.cell_seconds:g} s per cell"
        return Stopped("timeout", f"{self.where()}: {budget}")


def runs(cell: Any) -> bool:
    """Whether a cell is code that a kernel executes."""
    return cell.cell_type == "code" and bool(cell.source.strip())


class Manager(AsyncKernelManager):
    """Starts the kernel with this very interpreter, whatever a kernelspec called ``python3`` elsewhere may say."""

    @property
    def kernel_spec(self) -> KernelSpec:
        """The specification of this interpreter's IPython kernel."""
        command = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}", "--log-level=ERROR"]
        return KernelSpec(argv=command, display_name="Python 3", language="python")


class Client(PapermillNotebookClient):
    """Executes the cells one by one within the budgets and keeps ``execution`` up to date."""

    def __init__(self, nb_man: Any, execution: Execution, **options: Any) -> None:
        super().__init__(
            nb_man,
            kernel_manager_class=Manager,
            timeout_func=lambda cell: max(0.05, min(execution.cell_seconds, execution.rest())),
            iopub_timeout=IOPUB_SECONDS,
            force_raise_errors=True,  # an exception fails the notebook, also under the tag raises-exception
            log=logger,
            **options,
        )
        self.execution = execution
        self._printed = 0

    def papermill_execute_cells(self) -> None:
        """Run every code cell; :class:`Stopped` says which one ended it and why."""
        state = self.execution
        for index, cell in enumerate(self.nb.cells):
            if cell.cell_type == "markdown":
                state.heading = heading(cell.source) or state.heading
            if not runs(cell):
                continue
            if state.rest() <= 0:
                raise state.timeout()
            state.number += 1
            state.current, state.last_started, self._printed = cell.id, records.now(), 0
            self.nb_man.cell_start(cell, index)
            try:
                self.execute_cell(cell, index)
            except CellExecutionError as error:
                raise Stopped("failed", f"{state.where()}: {error.ename}: {first_line(error.evalue)}") from error
            except CellTimeoutError as error:
                if "IOPub" in str(error):  # the cell ended, its outputs did not arrive: not the cell's budget
                    raise Stopped(
                        "failed", f"{state.where()}: its outputs did not arrive in {IOPUB_SECONDS} s"
                    ) from error
                raise state.timeout() from error
            except DeadKernelError as error:
                raise Stopped("dead kernel", f"{state.where()}: {self._death()}") from error
            state.done.add(cell.id)
            state.current = None
            self.nb_man.cell_complete(cell, index)

    def execute(self, **options: Any) -> Any:
        """Run the notebook; a kernel that has to be stopped is killed at once instead of being asked."""
        self.reset_execution_trackers()
        with self.setup_kernel(**options):
            try:
                self.papermill_execute_cells()
                self.set_widgets_metadata()
                self.nb.metadata.setdefault("language_info", {"name": "python", "pygments_lexer": "ipython3"})
            except BaseException:
                self.shutdown_kernel = "immediate"
                raise
        return self.nb

    def process_message(self, msg: Any, cell: Any, cell_index: int) -> Any:
        """Keep an output; beyond ``MOST_TEXT`` characters a cell's printed text is cut, and says so."""
        if msg["msg_type"] == "stream":
            before, self._printed = self._printed, self._printed + len(msg["content"]["text"])
            if before > MOST_TEXT:
                return None
            if self._printed > MOST_TEXT:
                cut = f"\n[o1lab: text beyond {MOST_TEXT:,} characters of this cell is not kept]\n"
                msg["content"]["text"] = msg["content"]["text"][: MOST_TEXT - before] + cut
        return super().process_message(msg, cell, cell_index)

    def _death(self) -> str:
        process = getattr(getattr(self.km, "provisioner", None), "process", None)
        code = process.poll() if process is not None else None
        if code is None or code >= 0:
            return "the kernel ended" + ("" if code is None else f" by itself with exit code {code}")
        name = signal.Signals(-code).name
        return f"the kernel was ended by {name}" + (" (often: out of memory)" if name == "SIGKILL" else "")


class BudgetEngine(Engine):
    """The engine as papermill knows it; ``execution`` carries everything that a run asks for."""

    @classmethod
    def execute_managed_notebook(
        cls, nb_man: Any, kernel_name: str, *, execution: Execution, start_timeout: int = 60, **_: Any
    ) -> None:
        """Execute the notebook of ``nb_man``; raises :class:`Stopped` if it does not reach its end."""
        execution.nb = nb_man.nb
        execution.total = sum(runs(cell) for cell in nb_man.nb.cells)
        client = Client(nb_man, execution, kernel_name=kernel_name, startup_timeout=start_timeout)
        with execution.kernel_log.open("wb") as log:
            options = {"env": dict(execution.environment), "cwd": str(execution.folder), "stderr": log}
            try:
                client.execute(**options)
            except RuntimeError as error:  # jupyter_client's word for a kernel that never answered
                raise Stopped("dead kernel", f"{execution.where()}: {first_line(str(error))}") from error


papermill_engines.register(NAME, BudgetEngine)


def heading(source: str) -> str:
    """First heading in a markdown cell, without its signs; empty if there is none."""
    fenced = False
    for line in source.splitlines():
        fenced ^= line.startswith("```")
        if not fenced and line.startswith("#"):
            return line.lstrip("#").strip()
    return ""


def first_line(text: str) -> str:
    """First non-empty line of a message, at most 300 characters."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[0][:300] if lines else "(no message)"


def save(path: Path, execution: Execution, mark: Mapping[str, Any], write: Callable[..., Any]) -> None:
    """Write the executed notebook with its true state: papermill marks cells that never ran as completed."""
    if execution.nb is None:
        return
    for cell in execution.nb.cells:
        if cell.cell_type == "code" and "papermill" in cell.metadata:
            state = "completed" if cell.id in execution.done or not runs(cell) else "pending"
            cell.metadata.papermill["status"] = "failed" if cell.id == execution.current else state
    execution.nb.metadata["o1lab"] = dict(mark)
    write(path, nbformat.writes(execution.nb))


__all__ = ["NAME", "Execution", "Stopped", "save"]
