"""What a person sees of a run: one line that moves in a terminal, few lines in a log, and a table at the end."""

from __future__ import annotations

import shutil
import threading
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TextIO

from o1lab import records
from o1lab.claims import OUTCOMES
from o1lab.errors import RecordError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from o1lab.claims import Verdict
    from o1lab.engine import Execution

LOG_SECONDS = 10.0
"""In a log, a notebook that takes long says where it is this often."""


class Line:
    """Shows where an :class:`~o1lab.engine.Execution` is, while the block runs.

    In a terminal one line is rewritten twice a second; elsewhere a line is written every ``LOG_SECONDS``.
    """

    def __init__(self, name: str, execution: Execution, stream: TextIO) -> None:
        self.name, self.execution, self.stream = name, execution, stream
        self.moves = bool(getattr(stream, "isatty", lambda: False)())
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._tick, daemon=True)
        self._start = time.monotonic()

    def text(self) -> str:
        """The line: ``01_memory_leak  cell 7/31 (Reproduce)  00:12``."""
        seconds = int(time.monotonic() - self._start)
        return f"{self.name}  {self.execution.where()}  {seconds // 60:02d}:{seconds % 60:02d}"

    def _tick(self) -> None:
        while not self._stop.wait(0.5 if self.moves else LOG_SECONDS):
            self._write()

    def _write(self) -> None:
        if self.moves:
            width = shutil.get_terminal_size().columns - 1
            self.stream.write(f"\r\x1b[2K{self.text()[:width]}")
        else:
            self.stream.write(self.text() + "\n")
        self.stream.flush()

    def __enter__(self) -> Self:
        if self.moves:
            self._write()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        if self.moves:
            self.stream.write("\r\x1b[2K")
            self.stream.flush()


def short(path: Path) -> str:
    """A path as a person would type it: relative where it lies below the current folder."""
    here = Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)


def count_verdicts(verdicts: Iterable[Verdict]) -> str:
    """``2 supported · 1 refuted``, in the fixed order of outcomes; ``–`` for none."""
    counts = Counter(verdict.outcome for verdict in verdicts)
    return " · ".join(f"{counts[outcome]} {outcome}" for outcome in OUTCOMES if counts[outcome]) or "–"


def finish_line(folder: Path, entry: dict[str, Any]) -> str:
    """One notebook's outcome in one line: verdicts if it counts, else what happened and where."""
    what = entry["detail"]
    if entry["status"] == "ok":
        try:
            record = records.read_record(records.record_path(folder, entry["name"]))
            what = count_verdicts(record.verdicts.values())
        except RecordError as error:
            what = str(error)
    return f"{entry['name']}  {entry['status']}  {entry['seconds']:.0f} s  {what}"


def status_table(run: records.Run) -> str:
    """Notebook, status, seconds and verdicts as an aligned table."""
    rows = [("notebook", "status", "seconds", "verdicts")]
    for entry in run.manifest["notebooks"]:
        counts = entry["status"] == "ok" and entry["name"] in run.records
        verdicts = count_verdicts(run.records[entry["name"]].verdicts.values()) if counts else "–"
        rows.append((entry["name"], entry["status"], f"{entry['seconds']:.0f}", verdicts))
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    return "\n".join(
        f"{name:<{widths[0]}}  {status:<{widths[1]}}  {seconds:>{widths[2]}}  {verdicts}"
        for name, status, seconds, verdicts in rows
    )


def ledger_line(run: records.Run) -> str:
    """The ledger of the run in one line: only notebooks that count."""
    counted = {entry["name"] for entry in run.manifest["notebooks"] if entry["status"] == "ok"}
    judged = [v for name, record in run.records.items() if name in counted for v in record.verdicts.values()]
    return f"ledger: {count_verdicts(judged)}"
