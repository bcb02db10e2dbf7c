"""One cell of the table: one tool on one form of one case, in a process of its own. Writes what it found as JSON."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from pathlib import Path

from o1lab.memory.rivals import Finding, Workload, tool, workload

MISSING = 3
KINDS_OF_QUIET = ("none", "warm-up", "inconclusive")


def judge(found: Finding, work: Workload) -> dict[str, bool | None]:
    """Whether the finding is a leak found or a false alarm, and whether its kind and place are right.

    ``None``: the question does not arise. A kind that is right for a case that is no leak is no false alarm.
    """
    case = work.case
    growing = case.group == "leak" and work.leak
    right_kind = found.kind in case.kinds if growing or work.leak else found.kind in KINDS_OF_QUIET
    place: bool | None = None
    if growing and found.found and found.names == "line":
        file, _, number = found.place.rpartition(":")
        place = work.owns(file, int(number or 0))
    elif growing and found.found and found.names == "owner" and case.owner is not None:
        place = re.search(case.owner, found.place) is not None
    return {
        "alarm": None if growing else found.found and not (work.leak and right_kind and bool(found.kind)),
        "kind_right": right_kind if found.kind and growing else None,
        "place_right": place,
    }


def run(tool_name: str, case: str, form: str, requests: int | None, out: str, log: str) -> None:
    """Run one cell; what it prints goes to ``log``, what it found to ``out`` as JSON.

    Ends the process with 3 if a module is missing, as any process with 1 after an exception.
    """
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for descriptor in (1, 2):  # also for what native code prints
        os.dup2(file, descriptor)
    sys.stdout = sys.stderr = os.fdopen(file, "w", buffering=1)
    one = tool(tool_name)
    with workload(case, form == "leaking", requests, only_name=one.starts) as work:
        begun = time.perf_counter()
        try:
            found = one.watch(work)
        except ModuleNotFoundError as error:
            print(f"module {error.name} is not installed")
            sys.exit(MISSING)
        seconds = time.perf_counter() - begun
        served = work.served or work.warm_up + work.requests
        said = {**vars(found), **judge(found, work), "seconds": seconds, "served": served}
        if found.names == "line":  # no folder of this machine in a record
            said["place"] = "/".join(Path(found.place).parts[-2:])
    Path(out).write_text(json.dumps(said), encoding="utf-8")
