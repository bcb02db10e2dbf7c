"""How far the leak probe can be trusted, measured: ``python -m o1lab.memory.accuracy catalogue|floor|nulls|…``.

Each figure is an :class:`~o1lab.stats.Estimate` from planted truth: leaks whose kind, owner and bytes per request are
known by arithmetic, and healthy workloads that look like leaks. False alarms also carry a one-sided 95 % upper bound
(Clopper and Pearson 1934), which is what a promise of "at most 1 %" has to stay under.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from o1lab import stats
from o1lab.errors import ProbeError
from o1lab.memory import counters
from o1lab.memory.catalogue import CHUNK_BYTES, QUIET, Case, cases
from o1lab.memory.plants import DevicePlant, HostPlant
from o1lab.memory.probe import probe
from o1lab.memory.serving_loop import ServingLoop, with_plant
from o1lab.progress import progress
from o1lab.stats import Estimate

HOST_FLOOR_BYTES, DEVICE_FLOOR_BYTES = 64, 512
HOST_FLOOR_REQUESTS, DEVICE_FLOOR_REQUESTS, FLOOR_SECONDS = 1000, 200, 60.0
Row = dict[str, Any]


@dataclass(frozen=True)
class Figures:
    """What one command measured: ``estimates`` and one-sided bounds by name, a row per run or case, seconds taken."""

    command: str
    estimates: dict[str, Estimate]
    rows: list[Row]
    seconds: float
    bounds: dict[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        lines = [f"{name:<44} {value}" for name, value in self.estimates.items()]
        lines += [f"{name:<44} {value:.4g}" for name, value in self.bounds.items()]
        return "\n".join([*lines, f"{self.command}: {len(self.rows)} rows in {self.seconds:.0f} s"])

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        found = {name: value.to_dict() for name, value in self.estimates.items()}
        return {"command": self.command, "estimates": found, "bounds": self.bounds, "rows": self.rows,
                "seconds": self.seconds}  # fmt: skip


def upper_bound(successes: int, n: int) -> float:
    """One-sided 95 % upper bound of a share, exact (Clopper and Pearson 1934).

    Examples
    --------
    >>> round(upper_bound(0, 300), 4)
    0.0099
    """
    from scipy.stats import binomtest

    return float(binomtest(successes, n).proportion_ci(0.90, method="exact").high)


def share(rows: Iterable[Row], key: str) -> Estimate | None:
    """Share of rows in which ``key`` is true, of those in which it is not ``None`` (Wilson interval)."""
    values = [bool(row[key]) for row in rows if row[key] is not None]
    return stats.proportion(sum(values), len(values)) if values else None


def _kept(**found: Estimate | None) -> dict[str, Estimate]:
    return {name.replace("_", " "): value for name, value in found.items() if value is not None}


def _workloads() -> list[Case]:
    return cases(where="cpu", group="null")


def catalogue(runs: int | None = None, where: str | None = None) -> Figures:
    """Every case through the probe, leaking and cured; ``runs`` limits the number of cases."""
    begun, rows = time.perf_counter(), []
    usable = [one for one in cases() if one.group != "null" and (one.where == "cpu" or _cuda())]
    chosen = [one for one in usable if where in (None, one.where)][:runs]
    for one in progress(chosen, total=len(chosen), label="catalogue"):
        rows += [judge(one, leak=leak) for leak in ((True, False) if one.group == "leak" else (True,))]
    leaks = [row for row in rows if row["form"] == "leaking"]
    estimates = _kept(
        kind_right=share(rows, "kind_right"), kind_right_of_leaking_forms=share(leaks, "kind_right"),
        cured_or_fixed_forms_quiet=share([row for row in rows if row["form"] != "leaking"], "kind_right"),
        rate_within_5_percent_or_a_chunk=share(leaks, "rate_right"), owner_named_first=share(leaks, "owner_right"),
    )  # fmt: skip
    return Figures("catalogue", estimates, rows, time.perf_counter() - begun)


def judge(one: Case, *, leak: bool = True, **settings: Any) -> Row:
    """Probe one form of one case and compare with the truth."""
    begun = time.perf_counter()
    report = one.probe(leak=leak, **settings)
    owners = list(getattr(report, "owners", ()))
    expected = one.kinds if leak else QUIET
    return {
        "case": one.name, "form": "fixed" if one.group == "fixed" else "leaking" if leak else "cured",
        "expected": " or ".join(expected), "got": report.kind, "kind_right": report.kind in expected,
        "expected_bytes": one.bytes_per_request if leak else 0.0, "got_bytes": one.rate(report),
        "rate_right": one.rate_right(report) if leak else None,
        "owner": f"{owners[0].path} ({owners[0].kind})" if owners and leak else "",
        "owner_right": one.owner_right(owners) if leak and one.group == "leak" else None,
        "seconds": time.perf_counter() - begun,
    }  # fmt: skip


def floor(runs: int | None = None) -> Figures:
    """Plant the smallest leak that must be found, in the tiny model's serving loop; requests and seconds it takes."""
    from o1lab import models

    begun, rows = time.perf_counter(), []
    for where in ("cpu", "cuda") if _cuda() else ("cpu",):
        model = models.load("tiny", where)
        loop, prompts = ServingLoop(model), [model.encode(prompt) for prompt in model.prompts(8)]
        for run in progress(range(runs or 5), total=runs or 5, label=f"floor, {where}"):
            host = where == "cpu"
            plant = HostPlant(HOST_FLOOR_BYTES) if host else DevicePlant(DEVICE_FLOOR_BYTES, "cuda")
            limit = HOST_FLOOR_REQUESTS if host else DEVICE_FLOOR_REQUESTS
            settings = {} if host else {"requests_per_round": 8, "warm_up": 4}
            with plant as leak:
                since = time.perf_counter()
                report = probe(with_plant(loop, leak), inputs=prompts, owners=False, **settings)
                taken, served, true = time.perf_counter() - since, leak.calls, leak.true_bytes
            rate = report.host if host else report.device
            found = report.kind == "per-call leak" and abs(rate.value - true) <= max(CHUNK_BYTES, 0.05 * true)
            rows.append({"where": where, "run": run, "got": report.kind, "got_bytes": rate.value, "true_bytes": true,
                         "requests": served, "seconds": taken,
                         "found": found and served <= limit and taken <= FLOOR_SECONDS})  # fmt: skip
    found = {
        f"found, {where}": share([row for row in rows if row["where"] == where], "found") for where in ("cpu", "cuda")
    }
    return Figures("floor", {name: one for name, one in found.items() if one}, rows, time.perf_counter() - begun)


def nulls(runs: int | None = None) -> Figures:
    """Probe healthy workloads and count what is called growth of any kind."""
    begun, rows, loads, total = time.perf_counter(), [], _workloads(), runs or 400
    for run in progress(range(total), total=total, label="null runs"):
        one = loads[run % len(loads)]
        report = one.probe(owners=False)
        rows.append({"case": one.name, "got": report.kind, "bytes": report.host.value,
                     "alarm": report.kind not in (*one.kinds, "inconclusive"),
                     "undecided": report.kind == "inconclusive"})  # fmt: skip
    alarms = sum(row["alarm"] for row in rows)
    estimates = _kept(false_alarms=share(rows, "alarm"), inconclusive=share(rows, "undecided"))
    bounds = {"false alarms, upper 95 % bound (exact)": upper_bound(alarms, total)}
    return Figures("nulls", estimates, rows, time.perf_counter() - begun, bounds)


def _planted(one: Case, size: int, every: int) -> Row:
    """Probe a healthy workload in which each ``every``-th request leaks ``size`` bytes."""
    with one.open() as step, HostPlant(size) as leak:

        def both(number: int) -> None:
            step(number)
            both.served += 1  # type: ignore[attr-defined]
            if both.served % every == 0:  # type: ignore[attr-defined]
                leak()

        both.served = 0  # type: ignore[attr-defined]
        per_round = max(every, one.requests_per_round // every * every)
        report = probe(both, inputs=one.inputs, requests_per_round=per_round, owners=False)
        true = leak.true_bytes / every
    host = report.host
    return {"case": one.name, "got": report.kind, "true_bytes": true, "got_bytes": host.value, "low": host.low,
            "high": host.high, "found": report.kind == "per-call leak", "covered": host.low <= true <= host.high,
            "rate_right": abs(host.value - true) <= max(0.05 * true, CHUNK_BYTES)}  # fmt: skip


def power(runs: int | None = None) -> Figures:
    """Plant four times the floor in healthy workloads; how often the probe finds it."""
    begun, loads, total = time.perf_counter(), _workloads(), runs or 300
    rows = [
        _planted(loads[run % len(loads)], 4 * HOST_FLOOR_BYTES, 1)
        for run in progress(range(total), total=total, label="power")
    ]
    missed = sum(not row["found"] for row in rows)
    bounds = {"missed, upper 95 % bound (exact)": upper_bound(missed, total)}
    return Figures("power", _kept(found=share(rows, "found")), rows, time.perf_counter() - begun, bounds)


def coverage(runs: int | None = None, seed: int = 0) -> Figures:
    """Plant 64 B to 64 KiB in every, each 2nd or each 4th request and compare rate and interval with the truth."""
    begun, loads, total, draw = time.perf_counter(), _workloads(), runs or 200, random.Random(seed)
    rows = []
    for run in progress(range(total), total=total, label="coverage"):
        rows.append(_planted(loads[run % len(loads)], round(2 ** draw.uniform(6, 16)), draw.choice((1, 2, 4))))
    estimates = _kept(
        rate_within_5_percent_or_a_chunk=share(rows, "rate_right"), interval_covers_the_truth=share(rows, "covered")
    )
    return Figures("coverage", estimates, rows, time.perf_counter() - begun)


def overhead(runs: int | None = None, requests: int = 32) -> Figures:
    """Serve rounds with and without the probe's readings at its default cadence, paired, in random order."""
    from o1lab import models

    begun, total, draw = time.perf_counter(), runs or 120, random.Random(0)
    model = models.load("tiny", "cuda" if _cuda() else "cpu")
    loop, prompts = ServingLoop(model), [model.encode(prompt) for prompt in model.prompts(8)]

    def sample() -> None:
        counters.read(collect=False, driver=False)

    def serve(*readings: Callable[[], Any]) -> list[float]:
        times = [time.perf_counter()]
        for number in range(requests):
            loop(prompts[number % len(prompts)])
        for reading in (lambda: None, *readings):
            times.append(time.perf_counter())
            reading()
        times.append(time.perf_counter())
        return times

    arms = {"plain": (), "sampled": (sample,), "probed": (sample, counters.read)}
    rows = []
    with counters.frozen():
        serve()
        for _ in progress(range(total), total=total, label="overhead"):
            row: Row = {}
            for name in draw.sample(sorted(arms), len(arms)):
                times = serve(*arms[name])
                row[f"{name}_s"] = times[-1] - times[0]
                if name == "probed":
                    served, read, again = times[1] - times[0], times[3] - times[2], times[4] - times[3]
                    row |= {"sample_ms": 1e3 * read, "sample_share": 100 * read / served,
                            "readings_share": 100 * (read + again) / served}  # fmt: skip
            rows.append(row)
    estimates = {
        "slower with a sample a round, paired": _slower(rows, "sampled_s"),
        "slower with the probe's readings, paired": _slower(rows, "probed_s"),
        "time in samples, share of serving": stats.median([row["sample_share"] for row in rows], "%"),
        "time in the probe's readings, with gc": stats.median([row["readings_share"] for row in rows], "%"),
        "a sample without gc": stats.median([row["sample_ms"] for row in rows], "ms"),
    }
    return Figures("overhead", estimates, rows, time.perf_counter() - begun)


def _slower(rows: list[Row], arm: str) -> Estimate:
    return stats.median([100 * (row[arm] / row["plain_s"] - 1) for row in rows], "%")


def table(rows: list[Row], limit: int = 200) -> str:
    """Rows as text, columns as wide as they need to be."""

    def text(value: Any) -> str:
        return f"{value:,.4g}" if isinstance(value, float) else "" if value is None else str(value)[:48]

    if not rows:
        return ""
    cells = [list(rows[0]), *([text(row[key]) for key in rows[0]] for row in rows[:limit])]
    widths = [max(len(line[index]) for line in cells) for index in range(len(cells[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in cells
    ).replace("  \n", "\n")


def _cuda() -> bool:
    import torch

    return torch.cuda.is_available()


COMMANDS = {one.__name__: one for one in (catalogue, floor, nulls, coverage, power, overhead)}


def begin(command: str, runs: int | None = None, where: str | None = None) -> Callable[[], Figures]:
    """Start one command in a process of its own, whose heap is not that of a notebook; call the result to wait for it.

    On a CPU it runs meanwhile, on another core. For ``where="cuda"`` it only starts when it is waited for: the device
    must be its own.

    Parameters
    ----------
    command, runs, where
        As on the command line: ``where`` is for the catalogue.

    Raises
    ------
    ProbeError
        When waited for: it failed; the message carries the last line it printed.
    """
    folder = tempfile.TemporaryDirectory()
    file = Path(folder.name) / "figures.json"
    asked = [sys.executable, "-m", "o1lab.memory.accuracy", command, "--json", str(file)]
    asked += ["--runs", str(runs)] if runs else []
    asked += ["--where", where] if where else []

    def start() -> subprocess.Popen[str]:
        return subprocess.Popen(asked, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)

    begun = start() if where != "cuda" else None

    def wait() -> Figures:
        process = begun or start()
        said = process.communicate()[1].strip().splitlines()
        if process.returncode or not file.is_file():
            raise ProbeError(f"{command} failed: {(said or ['no message'])[-1]}")
        found = json.loads(file.read_text(encoding="utf-8"))
        folder.cleanup()
        estimates = {name: Estimate(**value) for name, value in found["estimates"].items()}
        return Figures(command, estimates, found["rows"], found["seconds"], found["bounds"])

    return wait


def apart(command: str, runs: int | None = None) -> Figures:
    """Run one command in a process of its own and wait for it; see :func:`begin`."""
    return begin(command, runs)()


def _at_least_one(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text}: at least 1")
    return value


def main(arguments: list[str] | None = None) -> int:
    """Run one command; exit status 0."""
    parser = argparse.ArgumentParser(prog="python -m o1lab.memory.accuracy", description=__doc__.split("\n")[0])
    parser.add_argument("command", choices=COMMANDS)
    parser.add_argument(
        "--runs", type=_at_least_one, help="how many runs (catalogue: cases); default: enough for the figure"
    )
    parser.add_argument("--where", choices=("cpu", "cuda"), help="catalogue only: cases of this kind")
    parser.add_argument("--json", type=Path, help="also write estimates and rows here")
    options = parser.parse_args(arguments)
    extra = {"where": options.where} if options.where and options.command == "catalogue" else {}
    figures = COMMANDS[options.command](options.runs, **extra)
    wrong = [
        row for row in figures.rows if row.get("alarm") or row.get("found") is False or row.get("covered") is False
    ]
    print(table(figures.rows if options.command in ("catalogue", "floor") else wrong[:20]))
    print(figures)
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(figures.to_dict(), indent=1), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
