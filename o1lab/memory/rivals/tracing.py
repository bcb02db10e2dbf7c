"""Tools that trace every allocation of a process: memray, its pytest plug-in, Scalene. The last two start their own."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from o1lab.errors import ProbeError
from o1lab.memory.rivals import Finding, Workload
from o1lab.memory.rivals.listing import grown_most

LIMIT = "1 MB"
"""The limit in pytest-memray's documentation."""

PYTEST = """
import pytest
from o1lab.memory.rivals import workload


@pytest.fixture
def work():
    with workload({case!r}, {leak!r}, {requests!r}) as one:
        one.warm()
        yield one


@pytest.mark.limit_leaks({limit!r})
def test_requests(work):
    work.serve()
"""
SCALENE = """
from scalene import scalene_profiler
from o1lab.memory.rivals import workload

with workload({case!r}, {leak!r}, {requests!r}) as work:
    work.warm()
    scalene_profiler.start()
    work.serve()
    scalene_profiler.stop()
"""


def memray(work: Workload) -> Finding:
    """What ``memray run --trace-python-allocators`` and a reporter with ``--leaks`` list: allocated and never freed."""
    from memray import FileFormat, FileReader, Tracker

    work.warm()
    with tempfile.TemporaryDirectory() as folder:
        capture = Path(folder) / "capture.bin"
        with Tracker(capture, trace_python_allocators=True, file_format=FileFormat.AGGREGATED_ALLOCATIONS):
            work.serve()
        with FileReader(capture) as reader:
            records = list(reader.get_leaked_allocation_records(merge_threads=True))
            sites = [(r.n_allocations, r.size, [(f, n) for _, f, n in r.stack_trace()]) for r in records]
    return grown_most(work, sites)


def pytest_memray(work: Workload) -> Finding:
    """A test of the requests in a loop, marked ``limit_leaks("1 MB")``; the warm-up is in a fixture."""
    with tempfile.TemporaryDirectory() as folder:
        test = Path(folder) / "test_requests.py"
        test.write_text(PYTEST.format(limit=LIMIT, **spec(work)), encoding="utf-8")
        command = [
            "-m",
            "pytest",
            "--memray",
            "-q",
            "-p",
            "no:cacheprovider",
            "--rootdir",
            folder,
            "--stacks=100",
            test,
        ]
        done = _python(command, folder)
    if done.returncode not in (0, 1):
        raise ProbeError(f"pytest ended with {done.returncode}: {_last_line(done.stdout + done.stderr)}")
    return read_pytest(work, done.stdout)


_LEAK = re.compile(r"^ *- (?P<size>[\d.]+ ?[KMGT]?i?B) allocated here:\n(?P<stack>(?: {8}.*\n?)+)", re.MULTILINE)
_UNITS = {"B": 0, "K": 10, "M": 20, "G": 30, "T": 40}


def read_pytest(work: Workload, output: str) -> Finding:
    """What pytest-memray printed: silent or the call stacks over the limit, of which the largest counts."""
    if "Test was allowed to leak" not in output:
        if " passed" not in output:
            raise ProbeError(f"the test under pytest-memray failed for another reason: {_last_line(output)}")
        return Finding(False, f"no call stack leaked {LIMIT}")
    leaks = []
    for found in _LEAK.finditer(output):
        number, unit = re.fullmatch(r"([\d.]+) ?([KMGT]?)i?B", found["size"]).groups()  # type: ignore[union-attr]
        frames = [re.fullmatch(r"(.*?):(.*):(\d+)", row.strip()) for row in found["stack"].splitlines()]
        stack = [(frame[2], int(frame[3])) for frame in frames if frame]
        leaks.append((float(number) * 2 ** _UNITS[unit or "B"], stack))
    size, stack = max(leaks, key=lambda leak: leak[0], default=(0.0, []))
    return Finding(True, f"{size:,.0f} B from one of {len(leaks)} call stacks", "", work.line(stack), "line")


def scalene(work: Workload) -> Finding:
    """``scalene run`` with memory and its leak detector on; off until the warm-up is over; CPU stacks off."""
    import inspect

    code = Path(inspect.getsourcefile(work.case.build) or "")
    with tempfile.TemporaryDirectory() as folder:
        script, profile = Path(folder) / "serve.py", Path(folder) / "profile.json"
        script.write_text(SCALENE.format(**spec(work)), encoding="utf-8")
        options = ["--off", "--memory", "--no-stacks", "--no-async", "--program-path", code.parent]
        options += ["--profile-system-libraries"] if "site-packages" in code.parts else []
        done = _python(["-m", "scalene", "run", *options, "-o", profile, script], folder)
        if done.returncode and "did not run for long enough" not in done.stdout + done.stderr:
            raise ProbeError(f"scalene ended with {done.returncode}: {_last_line(done.stdout + done.stderr)}")
        if not profile.exists():
            return Finding(False, "it says that the code did not run for long enough")
        return read_scalene(work, json.loads(profile.read_text(encoding="utf-8")))


def read_scalene(work: Workload, profile: Mapping[str, Any]) -> Finding:
    """The likeliest leak in a Scalene profile."""
    leaks = [
        (leak["likelihood"], leak["velocity_mb_s"], file, int(line))
        for file, found in profile.get("files", {}).items()
        for line, leak in found["leaks"].items()
    ]
    if not leaks:
        return Finding(False, f"no likely leak; largest footprint {profile.get('max_footprint_mb', 0):.0f} MB")
    likely, velocity, file, line = max(leaks)
    return Finding(True, f"{likely:.0%} likely, {velocity:.1f} MB/s", "", work.line([(file, line)]), "line")


def spec(work: Workload) -> dict[str, Any]:
    """What a child needs to open the same workload."""
    return {"case": work.name, "leak": work.leak, "requests": work.asked}


def _python(arguments: list[Any], folder: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *map(str, arguments)]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}  # the same o1lab, and the case's module
    return subprocess.run(command, capture_output=True, text=True, cwd=folder, env=env, check=False)


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:200] if lines else "no output"
