"""Result folders: records with a digest, Parquet samples, a run's manifest and its lock. Every write is atomic."""

from __future__ import annotations

import hashlib
import json
import secrets
import subprocess
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from o1lab import __version__, paths
from o1lab.errors import RecordError
from o1lab.stats import Estimate
from o1lab.storage import RunLock, atomic_write, check_writable, results_error, write_json

if TYPE_CHECKING:
    import pandas as pd

    from o1lab.claims import Verdict

__all__ = [
    "Record",
    "Run",
    "RunLock",
    "atomic_write",
    "check_writable",
    "git_state",
    "lab_state",
    "latest_run",
    "new_run_id",
    "now",
    "plain",
    "read_manifest",
    "read_record",
    "read_run",
    "record_path",
    "results_error",
    "write_json",
    "write_record",
    "write_samples",
]

SCHEMA = 1
"""Version of the record and of ``run.json``; a reader refuses a newer one."""


def now() -> str:
    """UTC time as ISO 8601 with milliseconds; such strings sort by time."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def new_run_id() -> str:
    """Name for a run: UTC time and four hexadecimal digits, e.g. ``20261130-043412-3f9a``."""
    return f"{datetime.now(UTC):%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"


def plain(value: Any) -> Any:
    """Reduce a value to what JSON holds: numpy scalars to numbers, containers recursively, the rest to ``repr``.

    Examples
    --------
    >>> plain({"steps": (1, 2), "limit": float("inf"), 3: None})
    {'steps': [1, 2], 'limit': 'inf', '3': None}
    """
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if abs(value) < float("inf") else repr(value)
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(item) for item in value]
    return plain(value.item()) if hasattr(value, "item") and getattr(value, "ndim", None) == 0 else repr(value)


def digest(content: dict[str, Any]) -> str:
    """SHA-256 of the canonical JSON (sorted keys, no spaces) of ``content`` without its key ``sha256``."""
    body = {key: value for key, value in content.items() if key != "sha256"}
    text = json.dumps(body, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True)
class Record:
    """What one notebook measured and judged in one run.

    Parameters
    ----------
    run_id, notebook, title, preset, device : str
        ``preset`` is the one that ran (``smoke`` or ``full``), ``device`` e.g. ``cuda:0`` or ``cpu``.
    started, finished : str
        UTC, ISO 8601; ``seconds`` lies between them.
    environment, lab : dict
        From :func:`o1lab.hardware.environment`; version, commit and dirty state of the lab.
    peak : dict
        ``host_bytes`` and ``device_bytes``, ``None`` where unknown.
    estimates, verdicts : dict
        By claim id.
    """

    run_id: str
    notebook: str
    title: str
    preset: str
    seed: int
    device: str
    started: str
    finished: str
    seconds: float
    parameters: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)
    lab: dict[str, Any] = field(default_factory=dict)
    peak: dict[str, int | None] = field(default_factory=dict)
    timings: list[dict[str, Any]] = field(default_factory=list)
    estimates: dict[str, Estimate] = field(default_factory=dict)
    verdicts: dict[str, Verdict] = field(default_factory=dict)
    figures: list[dict[str, Any]] = field(default_factory=list)
    samples: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def _ipython_display_(self) -> None:
        """Nothing: :meth:`o1lab.lab.Lab.finish` has shown the ledger, and a record's repr fills pages."""

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form, with schema, ``complete`` and the digest."""
        content: dict[str, Any] = {"schema": SCHEMA, **self.__dict__, "complete": True}
        content["estimates"] = [{"claim": claim, **item.to_dict()} for claim, item in self.estimates.items()]
        content["verdicts"] = [
            {"claim": claim, "outcome": item.outcome, "reason": item.reason, "needs": list(item.needs)}
            for claim, item in self.verdicts.items()
        ]
        content["sha256"] = digest(content)
        return content

    @classmethod
    def from_dict(cls, content: dict[str, Any]) -> Record:
        """Build a record from its JSON form; the caller has checked the digest."""
        from o1lab.claims import Verdict

        fields = {key: value for key, value in content.items() if key not in ("schema", "complete", "sha256")}
        estimates = {
            item["claim"]: Estimate(**{k: v for k, v in item.items() if k != "claim"}) for item in fields["estimates"]
        }
        fields["estimates"] = estimates
        fields["verdicts"] = {
            item["claim"]: Verdict(
                item["claim"], item["outcome"], item["reason"], tuple(item["needs"]), estimates.get(item["claim"])
            )
            for item in fields["verdicts"]
        }
        return cls(**fields)


def record_path(run_dir: str | Path, notebook: str) -> Path:
    """Where the record of ``notebook`` lies in a result folder."""
    return Path(run_dir) / "records" / f"{notebook}.json"


def write_record(run_dir: str | Path, record: Record) -> Path:
    """Write a record atomically to ``records/<notebook>.json``; see :func:`atomic_write` for what it raises."""
    return write_json(record_path(run_dir, record.notebook), record.to_dict())


def _load(path: Path) -> dict[str, Any]:
    """Read a JSON object and check its schema."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise RecordError(f"{path} is missing; run its notebook to the last cell") from error
    except OSError as error:
        raise RecordError(f"{path} cannot be read ({error.strerror}); run its notebook again") from error
    except ValueError as error:
        raise RecordError(f"{path} is truncated or no JSON ({error}); run its notebook again") from error
    schema = content.get("schema") if isinstance(content, dict) else None
    if isinstance(schema, bool) or not isinstance(schema, int) or schema < 1:
        raise RecordError(f"{path} is no o1lab record (schema {schema!r}); run its notebook again")
    if schema > SCHEMA:
        raise RecordError(f"{path} has schema {schema}, this o1lab reads up to {SCHEMA}; upgrade o1lab to read it")
    return content


def read_record(path: str | Path, run_id: str | None = None) -> Record:
    """Read a record and prove it whole.

    Parameters
    ----------
    path : path
        The JSON file.
    run_id : str, optional
        The run it must belong to.

    Raises
    ------
    RecordError
        Missing, truncated, altered (digest), unfinished, of another run, or of a newer schema.
    """
    path = Path(path)
    content = _load(path)
    if content.get("sha256") != digest(content):
        raise RecordError(f"{path} was altered after it was written (digest differs); run its notebook again")
    try:
        record = Record.from_dict(content)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise RecordError(f"{path} lacks or garbles a field ({error}); run its notebook again") from error
    if content.get("complete") is not True:
        raise RecordError(f"{path} is not complete; run its notebook to the last cell")
    if run_id is not None and record.run_id != run_id:
        raise RecordError(f"{path} is of run {record.run_id}, not of {run_id}; run its notebook again")
    return record


@dataclass(frozen=True)
class Run:
    """A result folder as read: its manifest (``run.json``), the whole records, and what could not be read."""

    manifest: dict[str, Any]
    records: dict[str, Record]
    problems: list[str]
    folder: Path = Path()


def read_manifest(run_dir: str | Path) -> dict[str, Any]:
    """Read a run's ``run.json``; raises :class:`RecordError` if it is missing, truncated or of a newer schema."""
    return _load(Path(run_dir) / "run.json")


def read_run(run_dir: str | Path) -> Run:
    """Read a result folder; a corrupt record or manifest becomes a line in ``problems``, the rest stays readable.

    Raises
    ------
    RecordError
        If ``run_dir`` is no folder, or holds neither a manifest nor a record.
    """
    folder = Path(run_dir)
    manifest: dict[str, Any] = {}
    records: dict[str, Record] = {}
    problems: list[str] = []
    files = sorted((folder / "records").glob("*.json"))
    if not folder.is_dir() or not ((folder / "run.json").exists() or files):
        raise RecordError(f"{folder} holds no run; name a folder that `python -m o1lab run` made")
    try:
        manifest = read_manifest(folder)
    except RecordError as error:
        problems.append(str(error))
    for path in files:
        try:
            record = read_record(path, manifest.get("run_id"))
        except RecordError as error:
            problems.append(str(error))
        else:
            records[record.notebook] = record
    return Run(manifest, records, problems, folder)


def latest_run(results: str | Path | None = None) -> Path:
    """Folder of the newest finished run below ``results`` (default: the lab's results folder).

    Raises
    ------
    RecordError
        If there is none.
    """
    root = Path(results) if results is not None else paths.results()
    finished: list[tuple[str, Path]] = []
    for path in root.glob("*/run.json"):
        try:
            content = read_manifest(path.parent)
        except RecordError:
            continue  # an unreadable manifest is no finished run; read_run names the problem when it is asked for
        if isinstance(content.get("finished"), str):
            finished.append((content["finished"], path.parent))
    if not finished:
        raise RecordError(f"no finished run in {root}; make one with `python -m o1lab run`")
    return max(finished)[1]


def write_samples(run_dir: str | Path, notebook: str, name: str, frame: pd.DataFrame) -> dict[str, Any]:
    """Write a table as ``samples/<notebook>/<name>.parquet`` atomically; return its entry for the record."""
    import io

    buffer = io.BytesIO()
    frame.to_parquet(buffer, engine="pyarrow", index=False)
    file = f"samples/{notebook}/{name}.parquet"
    atomic_write(Path(run_dir) / file, buffer.getvalue())
    return {"name": name, "file": file, "rows": len(frame), "columns": [str(column) for column in frame.columns]}


def git_state(root: str | Path | None = None) -> dict[str, Any]:
    """Commit and dirty state of the checkout at ``root``; both ``None`` without git or outside a checkout."""
    folder = Path(root) if root is not None else paths.PACKAGE.parent
    nothing = {"commit": None, "dirty": None}
    if not (folder / ".git").exists():
        return nothing
    try:
        commit, changes = (
            subprocess.run(
                ["git", "-C", str(folder), *words], capture_output=True, text=True, timeout=20, check=True
            ).stdout
            for words in (("rev-parse", "HEAD"), ("status", "--porcelain"))
        )
    except (OSError, subprocess.SubprocessError):
        return nothing
    return {"commit": commit.strip(), "dirty": bool(changes.strip())}


def lab_state() -> dict[str, Any]:
    """Version and git state of the lab, as every record carries it."""
    return {"version": __version__, **git_state()}
