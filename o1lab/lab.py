"""One notebook's session: it starts, measures, records, judges and finishes; the record is written at the end."""

from __future__ import annotations

import json
import operator
import os
import random
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from o1lab import claims as ledger
from o1lab import hardware, lab_view, paths, records
from o1lab.errors import EstimateError, RunError, UnknownName
from o1lab.progress import headless
from o1lab.stats import Estimate

if TYPE_CHECKING:
    import pandas as pd
    import plotly.graph_objects as go
    import torch

PRESETS = ("auto", "smoke", "full")
GPU_NEEDS = ("cuda", "nvml-process", "ncu", "cupti")
_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,59}")
Choice = TypeVar("Choice")


def resolve_preset(preset: str, capabilities: set[str] | None = None) -> str:
    """``"smoke"`` or ``"full"``; ``"auto"`` is what the runner set, else full with a GPU and smoke without.

    Raises
    ------
    UnknownName
        For any other word, also in the environment variable ``O1LAB_PRESET``.
    """
    if preset not in PRESETS:
        raise UnknownName("preset", str(preset), PRESETS)
    if preset != "auto":
        return preset
    chosen = os.environ.get("O1LAB_PRESET") or "auto"
    if chosen not in PRESETS:
        raise UnknownName("preset", chosen, PRESETS, "correct the environment variable O1LAB_PRESET")
    if chosen != "auto":
        return chosen
    return "full" if "cuda" in (hardware.capabilities() if capabilities is None else capabilities) else "smoke"


def known_notebooks() -> list[str]:
    """Names that a notebook may have: those in the folder and those that the ledger names."""
    files = {path.stem for path in paths.notebooks().glob("*.ipynb")}
    return sorted(files | {claim.notebook for claim in ledger.load().values()})


def notebook_title(notebook: str) -> str:
    """First heading of a notebook's file, or its name where there is no readable file."""
    path = paths.notebooks() / f"{notebook}.ipynb"
    try:
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    except (OSError, ValueError, KeyError, TypeError):
        return notebook  # a notebook started from elsewhere, e.g. a test or a script
    for cell in cells:
        for line in "".join(cell.get("source", "")).splitlines():
            if cell.get("cell_type") == "markdown" and line.startswith("# "):
                return line[2:].strip()
    return notebook


class Lab:
    """A notebook's session. Make one with :func:`o1lab.start`; see :meth:`start` for the parameters.

    Attributes
    ----------
    notebook, preset : str
        ``preset`` is what runs: ``"smoke"`` or ``"full"``.
    device : torch.device
    seed : int
    run_id : str
    run_dir : pathlib.Path
    claims : dict
        The claims that this notebook decides, by id.
    """

    def __init__(self, notebook: str, preset: str, device: torch.device, seed: int, parameters: dict[str, Any]) -> None:
        self.notebook, self.preset, self.device, self.seed, self.parameters = notebook, preset, device, seed, parameters
        given = os.environ.get("O1LAB_RUN_DIR")
        self._managed = bool(given)  # the runner owns the folder and its manifest
        self.run_id = os.environ.get("O1LAB_RUN_ID") or (Path(given).name if given else records.new_run_id())
        self.run_dir = Path(given) if given else paths.results() / self.run_id
        self._ledger = ledger.load()
        self.claims = {claim.id: claim for claim in ledger.for_notebook(notebook, self._ledger)}
        self.capabilities = hardware.capabilities()
        if device.type != "cuda":  # a GPU that this session does not use decides nothing
            self.capabilities = {name for name in self.capabilities if not name.startswith(GPU_NEEDS)}
        self.environment = records.plain(hardware.environment())
        self.started, self._clock = records.now(), time.perf_counter()
        self._estimates: dict[str, Estimate] = {}
        self._figures: dict[str, dict[str, Any]] = {}
        self._samples: dict[str, dict[str, Any]] = {}
        self._timings: list[dict[str, Any]] = []
        self._notes: list[str] = []
        self._finished = False

    @classmethod
    def start(
        cls,
        notebook: str,
        preset: str = "auto",
        *,
        seed: int = 0,
        parameters: Mapping[str, Any] | None = None,
        device: str | torch.device | None = None,
        allow_unknown: bool = False,
    ) -> Lab:
        """Start a session: check the names and the results folder, seed, show machine and decidable claims.

        Parameters
        ----------
        notebook : str
            Its file name without ``.ipynb``.
        preset : {"auto", "smoke", "full"}
            ``auto`` is full with a GPU, else smoke.
        seed : int
            Seeds Python, numpy and torch.
        parameters : mapping, optional
            Kept in the record. Under the runner the effective parameters of the notebook are kept as well.
        device : str or torch.device, optional
            Default: ``cuda`` if torch can use one, else ``cpu``.
        allow_unknown : bool
            Accept a notebook name that neither the folder nor the ledger knows.

        Raises
        ------
        UnknownName
            Notebook, preset or device does not exist.
        ResultsError
            The results folder cannot be written to.
        RunError
            The seed is out of range, or the device is not usable here.
        """
        if not allow_unknown and notebook not in known_notebooks():
            hint = "save the notebook under this name in the notebooks folder, or pass allow_unknown=True"
            raise UnknownName("notebook", notebook, known_notebooks(), hint)
        preset = resolve_preset(preset)
        records.check_writable(Path(os.environ.get("O1LAB_RUN_DIR") or paths.results()))
        _seed(seed)
        given = json.loads(os.environ.get("O1LAB_PARAMETERS") or "{}")
        place = _device(device)
        if preset == "smoke" and place.type == "cpu":
            _one_thread()
        lab = cls(notebook, preset, place, seed, records.plain({**given, **(parameters or {})}))
        lab._open()
        return lab

    def _open(self) -> None:
        environment = self.environment
        rows = [
            ("notebook", self.notebook),
            ("run", self.run_id),
            ("preset · seed", f"{self.preset} · {self.seed}"),
            ("device", self._device_words()),
            (
                "machine",
                f"{environment['cores']} cores{self._threads()}, {environment['ram_bytes'] / 2**30:.1f} GiB of memory",
            ),
            ("software", f"Python {environment['python']}, torch {environment['torch']}, {environment['platform']}"),
        ]
        decidable = []
        for claim in self.claims.values():
            absent = ledger.decide(claim, None, self.capabilities)
            answer = f"✗ no, {absent.reason}" if absent.needs else "✓ yes"
            decidable.append((claim.id, claim.title, answer))
        lab_view.show(lab_view.opening(rows, decidable))

    def _threads(self) -> str:
        import torch

        return f" (torch uses {torch.get_num_threads()})"

    def _device_words(self) -> str:
        return lab_view.device_words(str(self.device), self.environment)

    def pick(self, *, smoke: Choice, full: Choice) -> Choice:
        """Choose a size by preset: ``lab.pick(smoke=100, full=2_000)``."""
        return full if self.preset == "full" else smoke

    def can_decide(self, claim_id: str) -> bool:
        """Whether this machine (and the session's device) meets every need of a claim."""
        return not ledger.missing(self._claim(claim_id), self.capabilities)

    def _claim(self, claim_id: str) -> ledger.Claim:
        claim = self._ledger.get(claim_id)
        if claim is None:
            raise UnknownName("claim", claim_id, [*self.claims, *self._ledger], "`python -m o1lab claims` lists them")
        if self.claims and claim_id not in self.claims:
            raise UnknownName(
                f"claim of {self.notebook}", claim_id, list(self.claims), f"{claim.notebook} decides {claim_id!r}"
            )
        return claim

    def _require_open(self, what: str) -> None:
        if self._finished:
            raise RunError(f"cannot {what}: this session of {self.notebook} has finished; run its start cell again")

    def record(self, claim_id: str, value: float, *, low: float, high: float, n: int, unit: str) -> Estimate:
        """Record a measured value with its 95 % interval for a claim of this notebook.

        Raises
        ------
        UnknownName
            Unknown claim, or one that another notebook decides.
        EstimateError
            Not finite, out of order, or in another unit than the claim's.
        RunError
            After :meth:`finish`.
        """
        try:
            numbers = [float(number) for number in (value, low, high)]
            count = operator.index(n)
        except (TypeError, ValueError) as error:
            raise EstimateError(f"{claim_id}: {error}; value, low and high are numbers, n is a whole number") from error
        return self.estimate(claim_id, Estimate(*numbers, n=count, unit=unit))

    def estimate(self, claim_id: str, estimate: Estimate) -> Estimate:
        """Record an :class:`~o1lab.stats.Estimate` for a claim of this notebook; raises as :meth:`record` does."""
        self._require_open(f"record {claim_id}")
        claim = self._claim(claim_id)
        if estimate.unit != claim.unit:
            raise EstimateError(f"{claim_id} is decided in {claim.unit!r}, the estimate is in {estimate.unit!r}")
        before = self._estimates.get(claim_id)
        self._estimates[claim_id] = estimate
        again = f" (replaces {before})" if before is not None else ""
        print(f"recorded {claim_id}: {estimate}{again}")
        return estimate

    def verdict(self, claim_id: str) -> ledger.Verdict:
        """Judge a claim by its rule on what was recorded, display the verdict and return it."""
        claim = self._claim(claim_id)
        verdict = ledger.decide(claim, self._estimates.get(claim_id), self.capabilities)
        lab_view.show(lab_view.verdict_card(verdict, claim.title))
        return verdict

    def figure(self, name: str, fig: go.Figure, caption: str, *, signature: bool = False) -> None:
        """Show a figure with its caption (the key number in words) and keep it for the record and the report.

        The one with ``signature=True`` stands for the notebook in the report. A name used again replaces the figure.
        """
        self._require_open(f"keep figure {name}")
        _check_name("figure", name)
        from o1lab import plots

        stem = f"figures/{self.notebook}--{name}"
        title = fig.layout.title.text or name
        bundle = plots.show(fig, caption, name=name)
        records.atomic_write(self.run_dir / f"{stem}.json", fig.to_json())
        png = _png(bundle)
        if png is not None:
            records.atomic_write(self.run_dir / f"{stem}.png", png)
        self._figures[name] = {
            "name": name,
            "title": re.sub(r"<[^>]+>", " ", title),
            "caption": caption,
            "json": f"{stem}.json",
            "png": f"{stem}.png" if png is not None else None,
            "signature": signature,
        }

    def samples(self, name: str, frame: pd.DataFrame) -> None:
        """Keep a table of raw observations beside the record, as Parquet. A name used again replaces the table."""
        self._require_open(f"keep samples {name}")
        _check_name("samples", name)
        self._samples[name] = records.write_samples(self.run_dir, self.notebook, name, frame)

    @contextmanager
    def stage(self, label: str) -> Iterator[None]:
        """Time a part of the notebook for the record: ``with lab.stage("warm up"): …``."""
        self._require_open(f"time {label!r}")
        start = time.perf_counter()
        try:
            yield
        finally:
            self._timings.append({"stage": label, "seconds": round(time.perf_counter() - start, 4)})

    def note(self, text: str) -> None:
        """Keep a remark for the report, e.g. what was left out on this machine, and print it."""
        self._require_open("keep a note")
        self._notes.append(str(text))
        print(f"note: {text}")

    def finish(self) -> records.Record:
        """Write the record with a verdict for every claim of this notebook, and display them.

        Raises
        ------
        RunError
            If the session has finished already.
        ResultsError
            If the record cannot be written; the session then stays open, so that it can be tried again.
        """
        self._require_open("finish")
        judged = {**self.claims, **{name: self._ledger[name] for name in self._estimates}}
        verdicts = {
            name: ledger.decide(claim, self._estimates.get(name), self.capabilities) for name, claim in judged.items()
        }
        record = records.Record(
            run_id=self.run_id,
            notebook=self.notebook,
            title=notebook_title(self.notebook),
            preset=self.preset,
            seed=self.seed,
            device=self._device_words(),
            started=self.started,
            finished=records.now(),
            seconds=round(time.perf_counter() - self._clock, 3),
            parameters=self.parameters,
            environment=self.environment,
            lab=records.lab_state(),
            peak=hardware.peak_memory(),
            timings=self._timings,
            estimates=dict(self._estimates),
            verdicts=verdicts,
            figures=list(self._figures.values()),
            samples=list(self._samples.values()),
            notes=self._notes,
        )
        records.write_record(self.run_dir, record)
        if not self._managed:
            records.write_json(self.run_dir / "run.json", interactive_manifest(record))
        self._finished = True
        title = f"{record.title}: {record.seconds:.0f} s, preset {self.preset}, {record.device}"
        lab_view.show(lab_view.ledger(title, verdicts.values()))
        if not self._managed and not headless():
            print(f"record kept; `python -m o1lab report {self.run_id}` writes its report")
        return record


def interactive_manifest(record: records.Record) -> dict[str, Any]:
    """Manifest of a run that is one notebook in a person's hands."""
    shared = ("run_id", "started", "finished", "preset", "device", "lab", "environment")
    entry = {"name": record.notebook, "status": "ok", "seconds": record.seconds, "detail": "run by hand"}
    content = {"schema": records.SCHEMA, **{name: getattr(record, name) for name in shared}}
    return {**content, "notebooks": [{**entry, "parameters": record.parameters}]}


def _check_name(kind: str, name: str) -> None:
    if not _NAME.fullmatch(name):
        raise RunError(f"{kind} name {name!r} becomes a file name; use lower-case letters, digits, '-' and '_'")


def _seed(seed: int) -> None:
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**32:
        raise RunError(f"seed={seed!r} must be a whole number from 0 to {2**32 - 1}")
    import numpy as np
    import torch

    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002  (libraries still draw from the global generator)
    torch.manual_seed(seed)


def _one_thread() -> None:
    """Smoke's models are so small that threads only wait for each other, and badly on a shared machine."""
    import torch

    torch.set_num_threads(1)


def _device(device: str | torch.device | None) -> torch.device:
    import torch

    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        chosen = torch.device(device)
    except RuntimeError as error:
        raise UnknownName("device", str(device), ["cpu", "cuda", "cuda:0"]) from error
    if chosen.type == "cuda" and (chosen.index or 0) >= torch.cuda.device_count():
        raise RunError(f"device {device!s} is not usable here; leave device out, or see `python -m o1lab doctor`")
    return chosen


def _png(bundle: Mapping[str, Any]) -> bytes | None:
    """PNG bytes of what :func:`o1lab.plots.show` published, ``None`` where no browser could draw one."""
    import base64

    png = bundle.get("image/png")
    return base64.b64decode(png) if isinstance(png, str) else png
