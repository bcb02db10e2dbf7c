"""What a comparison found: one record per tool, case and form; the whole as JSON and as a table."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from o1lab.errors import ProbeError

if TYPE_CHECKING:
    import pandas as pd

RAN = "ran"


@dataclass(frozen=True)
class Cell:
    """What one tool said about one form of one case.

    Attributes
    ----------
    tool, version, case, group, form : str
        ``version`` is empty if the tool is not installed; ``form`` is ``"leaking"`` or ``"cured"``.
    status : str
        ``"ran" | "not run" | "not installed" | "not its job" | "needs CUDA" | "timed out" | "crashed"``; ``reason``
        says more.
    found, alarm : bool or None
        Growth reported; and whether that is a false alarm (``None`` where a leak is to be found).
    kind, kind_right, place, names, place_right
        Kind and place as the tool names them, where it does, and whether they are right; ``names`` says whether the
        place is an ``"owner"`` or the allocating ``"line"``.
    seconds, served : float, int
        Wall time of the tool on this form, warm-up included; requests served.
    """

    tool: str
    version: str
    case: str
    group: str
    form: str
    status: str
    reason: str = ""
    found: bool | None = None
    alarm: bool | None = None
    kind: str = ""
    kind_right: bool | None = None
    place: str = ""
    names: str = ""
    place_right: bool | None = None
    seconds: float = 0.0
    served: int = 0


@dataclass(frozen=True)
class Comparison:
    """All cells and where they were measured (``about``: versions, machine, date, requests)."""

    cells: tuple[Cell, ...]
    about: dict[str, Any]

    def save(self, path: str | Path) -> None:
        """Write it as JSON."""
        record = {"about": self.about, "cells": [asdict(cell) for cell in self.cells]}
        Path(path).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> Comparison:
        """Read what :meth:`save` wrote.

        Raises
        ------
        ProbeError
            The file holds something else.
        """
        try:
            record = json.loads(Path(path).read_text(encoding="utf-8"))
            return cls(tuple(Cell(**cell) for cell in record["cells"]), record["about"])
        except (ValueError, KeyError, TypeError) as error:
            raise ProbeError(f"{path} is no comparison ({error}); make one with --json") from error

    @classmethod
    def join(cls, parts: Iterable[Comparison]) -> Comparison:
        """Several records as one (of two devices, or of a long run in pieces); of a cell in two of them the later."""
        parts = list(parts)
        cells = {(cell.tool, cell.case, cell.form): cell for part in parts for cell in part.cells}
        return cls(tuple(cells.values()), {"parts": [part.about for part in parts]})

    def table(self) -> pd.DataFrame:
        """One row per tool and case: what ``text`` and ``figure`` of :mod:`o1lab.memory.head_to_head` take."""
        import pandas as pd

        pairs: dict[tuple[str, str], list[Cell]] = {}
        tools, cases = ({getattr(cell, key): cell for cell in self.cells} for key in ("tool", "case"))
        for name, case in cases.items():  # joined records may not have every pair
            for one in tools.values():
                blank = Cell(one.tool, one.version, name, case.group, "leaking", "not run")
                mine = [cell for cell in self.cells if (cell.tool, cell.case) == (one.tool, name)]
                pairs[one.tool, name] = mine or [blank]
        return pd.DataFrame([_row(cells) for cells in pairs.values()])


def _row(cells: list[Cell]) -> dict[str, Any]:
    """The forms of one case by one tool as a row."""
    leaking = cells[0]
    failed = [cell for cell in cells if cell.status != RAN]
    is_leak = leaking.group == "leak"
    alarms = [cell.alarm for cell in cells if cell.alarm is not None]
    return {
        "tool": leaking.tool,
        "version": leaking.version,
        "case": leaking.case,
        "group": leaking.group,
        "status": failed[0].status if failed else RAN,
        "reason": failed[0].reason if failed else "; ".join(f"{cell.form}: {cell.reason}" for cell in cells),
        "found": leaking.found if is_leak and not failed else None,
        "false_alarm": any(alarms) if alarms and not failed else None,
        "kind": leaking.kind,
        "kind_right": leaking.kind_right,
        "names": leaking.names,
        "place": leaking.place,
        "place_right": leaking.place_right,
        "seconds": sum(cell.seconds for cell in cells),
    }
