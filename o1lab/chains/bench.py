"""LTC-Bench: 12,288 chain problems, the same bytes from the same seed on every machine.

Three families × eight lengths × 512 problems are the main grid. Beside it stands the split ``factors``, where the
length of the program and of the chain, the place in the program, distractors and the order shown are separate:

========== ============================================================ =======================
cell       what it separates                                            (N; steps asked)
========== ============================================================ =======================
short      a long program with a short chain, from its first entry      32; 8 · 128; 8, 32 · 256; 32
late       the same number of steps from the last entries on            64; 8 · 128; 8, 32 · 256; 32
shuffled   the program in mixed order                                   32; 32 · 128; 128
distract   hops: 12 or 36 entities more, which the chain cannot reach   32; 32
========== ============================================================ =======================

Where N is also one of the main grid's lengths, the problems are the first ones of that cell, so cells can be compared
in pairs. Make a folder of it (JSON lines, and Parquet that ``datasets.load_dataset(folder)`` reads)::

    python -m o1lab.chains.bench --out ltc-bench
"""

from __future__ import annotations

import argparse
import hashlib
import json
import secrets
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from o1lab.chains.problems import make, whole
from o1lab.chains.render import gold, prompt
from o1lab.chains.samples import FAMILIES, LABELS, TASKS, Sample
from o1lab.errors import ChainError, O1labError
from o1lab.stats import Estimate, proportion

LENGTHS = (8, 16, 32, 64, 96, 128, 192, 256)
PER_CELL = 512
SEED = 0
VERSION = 1
SHA256 = "c0e278330fb390444300a1f420d8ea6cd2383d0a355187fd94c70b2c83d3217a"
"""Of the main grid with the default seed, lengths and size: its JSON lines, family after family."""
CELLS = {
    "arithmetic": "ba7931ad 063ba9df 943ea0ee 59318a6b 99fa9205 ab181460 d3695b03 1edb8c67",
    "symbols": "360ca0d8 a9043aed d6537cc6 04639605 53131b79 607bfc3f 0131e470 3d1aa411",
    "hops": "c2c9496f 806fd9a3 1ea70978 c28f292c 8a5e89d3 5a73e7d8 7890a961 1994902c",
}
"""First eight digits of each cell's own SHA-256, by family, in the order of ``LENGTHS``."""

_LATE = ((64, 8), (128, 8), (128, 32), (256, 32))
FACTORS: dict[str, tuple[dict[str, Any], ...]] = {
    "short": tuple({"steps": n, "asked": k} for n, k in ((32, 8), *_LATE[1:])),
    "late": tuple({"steps": n, "first": n - k + 1} for n, k in _LATE),
    "shuffled": ({"steps": 32, "order": "shuffled"}, {"steps": 128, "order": "shuffled"}),
    "distract": ({"steps": 32, "facts": 24}, {"steps": 32, "facts": 48}),
}
"""The cells of the split ``factors``: arguments of :func:`o1lab.chains.make`."""


def problems(
    task: str | None = None, *, seed: int = SEED, lengths: Sequence[int] = LENGTHS, n: int = PER_CELL
) -> Iterator[Sample]:
    """The main grid, of one family or of all, cell by cell.

    Examples
    --------
    >>> [sample.id for sample in problems("hops", lengths=(8, 16), n=2)]
    ['hops-8-0-0', 'hops-8-0-1', 'hops-16-0-0', 'hops-16-0-1']
    """
    for family in (task,) if task else TASKS:
        for steps in lengths:
            yield from make(family, steps, n, seed)


def factors(task: str | None = None, *, seed: int = SEED, n: int = PER_CELL // 4) -> Iterator[tuple[str, Sample]]:
    """The cells where one factor differs from the main grid: (name of the cell, problem), ``n`` each.

    Examples
    --------
    >>> [(cell, sample.id) for cell, sample in factors("symbols", n=1)][3:6]
    [('short', 'symbols-256-0-0-asked32'), ('late', 'symbols-64-0-0-from57'), ('late', 'symbols-128-0-0-from121')]
    """
    for family in (task,) if task else TASKS:
        for cell, variations in FACTORS.items():
            for options in variations if cell != "distract" or family == "hops" else ():
                for sample in make(family, n=n, seed=seed, **options):
                    yield cell, sample


def row(sample: Sample, cell: str = "main") -> dict[str, Any]:
    """One line of the benchmark: the sample's JSON form, and its prompt, chain and answer in both styles."""
    texts = {
        "prompt_tokens": sample.prompt,
        "prompt_language": prompt(sample, "language"),
        "gold_tokens": sample.gold,
        "gold_language": gold(sample, "language"),
        "answer_tokens": sample.answer,
        "answer_language": FAMILIES[sample.variant].say_state(sample.answer),
    }
    return {"cell": cell, **sample.to_dict(), **texts}


def line(sample: Sample, cell: str = "main") -> bytes:
    """The row as bytes of JSON with its line end: ASCII, no spaces, keys in a fixed order."""
    return json.dumps(row(sample, cell), separators=(",", ":")).encode("ascii") + b"\n"


def sha256(samples: Iterable[Sample]) -> str:
    """SHA-256 of the samples' JSON lines, which is what proves that two machines have the same problems.

    Examples
    --------
    >>> sha256(problems(lengths=(8,), n=2))[:12]
    '423606ee8059'
    """
    digest = hashlib.sha256()
    for sample in samples:
        digest.update(line(sample))
    return digest.hexdigest()


@dataclass(frozen=True)
class Checked:
    """What :func:`check` found: how many problems, the ids of those that are not valid, and the digest of all lines."""

    problems: int
    wrong: tuple[str, ...]
    sha256: str

    @property
    def share(self) -> Estimate:
        """Share of valid problems (Wilson)."""
        return proportion(self.problems - len(self.wrong), self.problems)


def check(lengths: Sequence[int] = LENGTHS, *, workers: int = 1) -> Checked:
    """Make the main grid's cells of these lengths again, and replay each problem.

    A problem is valid if its cell has the bytes that :data:`CELLS` says, if its line read back is the same problem,
    worked again from its program, and if a replay of its chain, step by step, finds no fault.

    Parameters
    ----------
    workers : int
        Processes; they import the package, so the caller's main module must be importable (a notebook is).
    """
    from concurrent.futures import ProcessPoolExecutor
    from multiprocessing import get_context

    cells = [(task, whole("lengths", steps, 1, LABELS)) for task in TASKS for steps in lengths]
    digest, count, wrong = hashlib.sha256(), 0, []
    with ProcessPoolExecutor(workers, get_context("spawn")) if workers > 1 else nullcontext() as pool:
        for text, ids, bad in (pool.map if pool else map)(_cell, *zip(*cells, strict=True)):
            digest.update(text)
            count, wrong = count + len(ids), wrong + bad
    return Checked(count, tuple(wrong), digest.hexdigest())


def _cell(task: str, steps: int) -> tuple[bytes, list[str], list[str]]:
    """Lines of a cell, ids of its problems, ids of those that are not valid."""
    samples = make(task, steps, PER_CELL, SEED)
    lines = [line(sample) for sample in samples]
    text, ids = b"".join(lines), [sample.id for sample in samples]
    if hashlib.sha256(text).hexdigest()[:8] != CELLS[task].split()[LENGTHS.index(steps)]:
        return text, ids, ids
    return text, ids, [sample.id for sample, one in zip(samples, lines, strict=True) if not _replays(sample, one)]


def _replays(sample: Sample, text: bytes) -> bool:
    """Whether a line is this problem, works again from its program, and shows no fault step by step."""
    from o1lab.chains.faults import localise

    try:
        return Sample.from_dict(json.loads(text)) == sample and localise(sample, sample.gold) is None
    except ChainError:
        return False


def read(path: str | Path) -> Iterator[Sample]:
    """The problems of a file of JSON lines, each checked against its own program.

    Raises
    ------
    ChainError
        The file cannot be read, or a line is no problem; the message gives its number.
    """
    try:
        with open(path, "rb") as file:
            for number, text in enumerate(file, 1):
                if text.strip():
                    try:
                        yield Sample.from_dict(json.loads(text))
                    except ValueError as error:  # ChainError, JSON, UTF-8
                        raise ChainError(f"{path}, line {number}: {error}") from error
    except OSError as error:
        raise ChainError(f"{path} cannot be read: {error.strerror}") from error


@dataclass(frozen=True)
class Export:
    """What was written: the folder, rows by split, bytes, and the digests of the JSON lines by split."""

    folder: Path
    rows: dict[str, int]
    bytes: int
    sha256: dict[str, str]


def export(
    out: str | Path,
    *,
    seed: int = SEED,
    lengths: Sequence[int] = LENGTHS,
    n: int = PER_CELL,
    force: bool = False,
    progress: Callable[..., Iterable[Any]] | None = None,
) -> Export:
    """Write the benchmark as JSON lines and as a Hugging Face ``datasets`` folder.

    The folder appears under its name when all of it is there, and not before.

    Parameters
    ----------
    out : path
        The folder; it must not exist, be empty, or hold an older export and ``force`` be given.
    seed, lengths, n
        Of the main grid; each cell of ``factors`` gets a quarter of ``n`` problems, at least one.
    force : bool
        Replace an export that is there. A folder with anything else in it is never replaced.
    progress : callable, optional
        Wraps the list of cells, e.g. :func:`o1lab.progress.progress`.

    Raises
    ------
    ChainError
        The folder is in use, cannot be written, or an argument is out of range.
    """
    out = Path(out)
    lengths = tuple(whole("lengths", steps, 1, LABELS) for steps in lengths)
    if not lengths or len(set(lengths)) < len(lengths):
        raise ChainError(f"lengths={list(lengths)} must name each length once, and at least one")
    n, seed = whole("n", n, 1), whole("seed", seed)
    _check_free(out, force)
    part = out.with_name(f".{out.name}.{secrets.token_hex(4)}.part")
    try:
        (part / "jsonl").mkdir(parents=True)
        written = _write(part, seed, lengths, n, progress or (lambda cells, **_: cells))
        _swap(part, out)
    except OSError as error:
        raise ChainError(f"cannot write {out}: {error.strerror or error}; choose another --out or free room") from error
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return Export(out, *written)


MANIFEST = "ltc-bench.json"


def _check_free(out: Path, force: bool) -> None:
    if out.exists() and not out.is_dir():
        raise ChainError(f"{out} is a file; choose another folder")
    if not out.is_dir() or not any(out.iterdir()):
        return
    if not (out / MANIFEST).is_file():
        raise ChainError(f"{out} is not empty and holds no earlier export; choose another folder")
    if not force:
        raise ChainError(f"{out} holds an export already; choose another folder, or replace it with --force")


def _swap(part: Path, out: Path) -> None:
    """Give the finished folder its name; what had it before goes only then, and comes back if that fails."""
    old = part.with_suffix(".old")
    if out.exists():
        out.rename(old)
    try:
        part.rename(out)
    except OSError:
        if old.exists():
            old.rename(out)
        raise
    shutil.rmtree(old, ignore_errors=True)


def _write(
    part: Path, seed: int, lengths: tuple[int, ...], n: int, progress: Callable[..., Iterable[Any]]
) -> tuple[dict[str, int], int, dict[str, str]]:
    cells: list[tuple[str, str, Any]] = [("main", task, steps) for task in TASKS for steps in lengths]
    cells += [("factors", task, None) for task in TASKS]
    digests, rows, size = {"main": hashlib.sha256(), "factors": hashlib.sha256()}, {"main": 0, "factors": 0}, 0
    for split, task, steps in progress(cells, label="LTC-Bench, cells"):
        if split == "main":
            found: Iterable[tuple[str, Sample]] = (("main", sample) for sample in make(task, steps, n, seed))
        else:
            found = factors(task, seed=seed, n=max(1, n // 4))
        with open(part / "jsonl" / f"{split}-{task}.jsonl", "ab") as file:
            for cell, sample in found:
                text = line(sample, cell)
                file.write(text)
                digests[split].update(text)
                rows[split] += 1
                size += len(text)
    hashes = {split: digest.hexdigest() for split, digest in digests.items()}
    from o1lab.chains.dataset import write_folder

    about = {"name": "LTC-Bench", "version": VERSION, "seed": seed, "lengths": list(lengths), "n": n, "rows": rows}
    write_folder(part, {**about, "sha256": hashes}, MANIFEST)
    return rows, size, hashes


def _lengths(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(word) for word in text.replace(",", " ").split())
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: whole numbers with commas between, e.g. 8,16,32") from error


def main(arguments: list[str] | None = None) -> int:
    """Write the benchmark; exit status 0, or 2 with one line that says what is wrong."""
    from o1lab.progress import progress

    parser = argparse.ArgumentParser(prog="python -m o1lab.chains.bench", description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--lengths", type=_lengths, default=LENGTHS, metavar="8,16,…", help="default: the eight")
    parser.add_argument("--n", type=int, default=PER_CELL, help="problems a cell (default: %(default)s)")
    parser.add_argument("--force", action="store_true", help="replace an export that is there")
    options = parser.parse_args(arguments)
    try:
        done = export(
            options.out, seed=options.seed, lengths=options.lengths, n=options.n, force=options.force, progress=progress
        )
    except O1labError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(
        f"{done.rows['main']:,} problems and {done.rows['factors']:,} in the split factors, {done.bytes / 1e6:,.0f} MB"
    )
    for split, digest in done.sha256.items():
        print(f"sha256 {split:<8} {digest}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
