"""Traffic from files: a table of the user's (CSV or JSON lines), or a log of OpenAI-style answers with their usage.

A table is CSV with commas and a header, or JSON lines: one object a line. A row that cannot be read raises with its
number. With ``skip_bad=True`` it is left out instead, counted, and shown by ``print(traffic)``: nothing is dropped in
silence.
"""

from __future__ import annotations

import csv
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from o1lab.kv.traffic import Request, Traffic, TrafficError, ordered

NAMES = {
    "prompt_tokens": ("prompt_tokens", "input_tokens", "prompt_len", "num_prompt_tokens"),
    "output_tokens": ("output_tokens", "completion_tokens", "generated_tokens", "output_len", "num_generation_tokens"),
    "arrival_s": ("arrival_s", "arrival", "arrival_time", "timestamp", "created", "created_at", "time"),
    "aborted_after": ("aborted_after",),
    "prefix": ("prefix",),
    "prefix_tokens": ("prefix_tokens",),
}
"""Names under which each property of a request is looked for, in this order."""
MOST_LISTED = 20
"""Bad rows that are shown one by one; the others are counted."""
MOST_TOKENS = 10_000_000
"""More tokens than this in one row are taken for an error of the file."""
LATEST_S = 1e11
"""A time of arrival beyond it (the year 5138) is not in seconds: it is in milliseconds, or finer still."""
Row = Mapping[str, Any]


def from_file(
    path: str | Path, *, concurrent: int = 16, skip_bad: bool = False, columns: Mapping[str, str] | None = None
) -> Traffic:
    """Read a table with one request a row: ``.csv`` with a header, anything else as JSON lines.

    Parameters
    ----------
    path : str or Path
    concurrent : int
        Served at a time.
    skip_bad : bool
        Leave rows out that cannot be read.
    columns : mapping, optional
        Own column names, e.g. ``{"output_tokens": "n_out"}``; see :data:`NAMES` for those known already. Without an
        arrival column all requests are there from the beginning.

    Raises
    ------
    TrafficError
        No such file, or one of another kind; a column that does not exist; a row that cannot be read, or with more
        than :data:`MOST_TOKENS` tokens; no request left.
    """
    path = _path(path)
    if columns is not None and not isinstance(columns, Mapping):
        raise TrafficError(f'columns={columns!r}: names by property, e.g. {{"output_tokens": "n_out"}}')
    names = dict(NAMES)
    for name, column in (columns or {}).items():
        if name not in NAMES:
            raise TrafficError(f"columns names {name!r}; a request has {', '.join(NAMES)}")
        if not isinstance(column, str):
            raise TrafficError(f"columns gives {name} the name {column!r}; a name is text")
        names[name] = tuple(dict.fromkeys((column, column.strip())))
    rows = _csv(path) if path.suffix.lower() == ".csv" else _json_lines(path)
    table = _Table(names)
    requests, bad = _gather(path, rows, table.request, skip_bad)
    return _traffic(path, table, requests, bad, concurrent)


def from_log(path: str | Path, *, concurrent: int = 16, skip_bad: bool = False) -> Traffic:
    """Read JSON lines of OpenAI-style answers, as vLLM and batch jobs write them: what counts is ``usage``.

    ``usage`` may stand at the top, in ``response`` or in ``response.body``; its numbers may be called ``prompt_tokens``
    and ``completion_tokens`` or ``input_tokens`` and ``output_tokens``; the time of arrival is ``created``,
    ``created_at`` or ``timestamp``. Pieces of a streamed answer belong together by ``id``, the last usage counts, and a
    piece without one is no bad row.

    Raises
    ------
    TrafficError
        As :func:`from_file`.
    """
    path = _path(path)
    pieces: dict[str, Request] = {}
    table = _Table(NAMES)

    def read(number: int, row: Row) -> Request | None:
        body: Any = row
        for name in ("response", "body"):
            body = body[name] if isinstance(body.get(name), Mapping) else body
        usage = body.get("usage")
        streamed = str(body.get("object", "")).endswith(".chunk")
        if usage is None and streamed:
            return None
        if not isinstance(usage, Mapping):
            raise TrafficError(f"no usage in it; it has {', '.join(map(str, body)) or 'nothing'}")
        request = table.request(number, {**row, **body, **usage})
        if streamed and body.get("id"):
            pieces[str(body["id"])] = request
            return None
        return request

    requests, bad = _gather(path, _json_lines(path), read, skip_bad)
    return _traffic(path, table, [*requests, *pieces.values()], bad, concurrent)


def _path(path: Any) -> Path:
    if not isinstance(path, (str, Path)) or not str(path):
        raise TrafficError(f"path={path!r}: the path of a file, as text")
    return Path(path)


def _traffic(path: Path, table: _Table, requests: list[Request], bad: list[str], concurrent: int) -> Traffic:
    if bad and not requests:
        raise TrafficError(f"{path}: there is no request in it, {len(bad):,} of its rows are bad; the first: {bad[0]}")
    table.check(path)
    if len(bad) > MOST_LISTED:
        bad[MOST_LISTED:] = [f"{len(bad) - MOST_LISTED} more rows"]
    return ordered(requests, concurrent, path.name, bad)


def _gather(
    path: Path, rows: Iterator[tuple[int, Any]], read: Callable[[int, Row], Request | None], skip_bad: bool
) -> tuple[list[Request], list[str]]:
    requests, bad = [], []
    for number, row in rows:
        try:
            if isinstance(row, Exception):
                raise TrafficError(str(row))
            if not isinstance(row, Mapping):
                raise TrafficError(f"a row is an object with names, not {type(row).__name__}")
            request = read(number, row)
        except TrafficError as error:
            reason = str(error).removeprefix(f"request {number}: ")
            if not skip_bad:
                raise TrafficError(f"{path}, row {number}: {reason}; skip_bad=True leaves such rows out") from error
            bad.append(f"row {number}: {reason}")
        else:
            requests += [request] if request is not None else []
    return requests, bad


class _Table:
    """Reads rows under the names that are given, and remembers which had a time of arrival."""

    def __init__(self, names: Mapping[str, tuple[str, ...]]) -> None:
        self.names = names
        self.timed: list[int] = []
        self.timeless: list[int] = []

    def request(self, number: int, row: Row) -> Request:
        found: dict[str, Any] = {}
        for name, columns in self.names.items():
            value = next((row[column] for column in columns if row.get(column) not in (None, "")), None)
            if value is not None:
                found[name] = _READ.get(name, _whole)(name, value)
            elif name in ("prompt_tokens", "output_tokens"):
                raise TrafficError(f"no {' or '.join(columns)} in it; it has {', '.join(map(str, row)) or 'nothing'}")
        (self.timed if "arrival_s" in found else self.timeless).append(number)
        return Request(number, found.pop("arrival_s", 0.0), **found)

    def check(self, path: Path) -> None:
        if self.timed and self.timeless:
            raise TrafficError(
                f"{path}: row {self.timeless[0]} has no time of arrival ({len(self.timeless)} such rows), others have: "
                "give it for all rows or for none"
            )


def _whole(name: str, value: Any) -> int:
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    except OverflowError:
        number = math.inf
    if number > MOST_TOKENS:
        raise TrafficError(f"{name}={_short(value)} is more than {MOST_TOKENS:,} tokens")
    if not number.is_integer() or isinstance(value, bool):
        raise TrafficError(f"{name}={_short(value)} is no whole number")
    return int(number)


def _time(_: str, value: Any) -> float:
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        try:
            number = datetime.fromisoformat(str(value)).timestamp()
        except (ValueError, OverflowError):
            number = math.nan
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise TrafficError(f"{_short(value)} is no time of arrival: seconds, or text such as 2026-01-31T12:00:00")
    while abs(number) > LATEST_S:
        number /= 1000
    return number


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:30]}… ({len(text)} characters)"


_READ: dict[str, Callable[[str, Any], Any]] = {"arrival_s": _time, "prefix": lambda _, value: str(value)}


def _text(path: Path) -> Iterator[str]:
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            yield from file
    except (OSError, ValueError) as error:
        raise TrafficError(f"{path} cannot be read: {error}") from error


def _csv(path: Path) -> Iterator[tuple[int, Any]]:
    reader = csv.DictReader(_text(path), skipinitialspace=True)
    try:
        reader.fieldnames = [name.strip() for name in reader.fieldnames or ()]
        if len(reader.fieldnames) == 1 and re.search(r"[;\t|]", reader.fieldnames[0]):
            raise _wanted(path, f"its header has one column, {reader.fieldnames[0]!r}")
        for row in reader:
            wide = row.pop(None, None)  # type: ignore[call-overload]
            fault = TrafficError(f"more fields than the header has: {wide}") if wide else None
            yield reader.line_num, fault or row
    except csv.Error as error:
        raise TrafficError(f"{path} is no CSV: {error}") from error


def _json_lines(path: Path) -> Iterator[tuple[int, Any]]:
    first = True
    for number, line in enumerate(_text(path), 1):
        if line.strip():
            if first and line.lstrip().startswith("["):
                raise _wanted(path, "it is one JSON array")
            if first and not line.lstrip().startswith("{") and re.search(r"[,;\t]", line):
                raise _wanted(path, f"it begins with {_short(line.strip())}")
            first = False
            try:
                yield number, json.loads(line)
            except (ValueError, RecursionError) as error:
                yield number, TrafficError(f"no JSON: {error}; one object a line is wanted")


def _wanted(path: Path, found: str) -> TrafficError:
    return TrafficError(
        f"{path}: {found}; wanted is a table with commas and a header in a file named .csv, or JSON lines with one "
        "object a line"
    )
