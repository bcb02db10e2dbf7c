"""The file that an evaluation appends to as results come: one header, then one line of JSON per sample."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from o1lab.errors import ResultsError
from o1lab.models.endpoint import PROBLEMS
from o1lab.storage import results_error

FORMAT = "o1lab chain results"


class ResultsFile:
    """What has been produced, by sample id, and the file that it is written to as it comes."""

    def __init__(self, path: str | Path | None, header: Mapping[str, Any], ids: Sequence[str]) -> None:
        self.path = Path(path) if path is not None else None
        self.header = json.loads(json.dumps({"format": FORMAT, **header}))
        self.ids, self.kept, self.file = set(ids), {}, None

    def __enter__(self) -> ResultsFile:
        if self.path is None:
            self.resumed = False
            return self
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.file = self.path.open("a+b")
        except OSError as error:
            raise results_error(self.path.parent, error) from error
        try:
            self._lock()
            self._read()
        except BaseException:
            self.file.close()
            raise
        self.resumed = bool(self.kept)
        return self

    def __exit__(self, *_: object) -> None:
        if self.file is not None:
            self.file.close()

    def add(self, name: str, content: dict[str, Any]) -> None:
        """Keep one result, and write it through to the operating system."""
        self.kept[name] = content
        self._write({"id": name, **content})

    def _write(self, content: Mapping[str, Any]) -> None:
        if self.file is None:
            return
        try:
            self.file.write(json.dumps(content, ensure_ascii=False).encode() + b"\n")
            self.file.flush()
        except OSError as error:
            raise results_error(self.path.parent, error) from error

    def _lock(self) -> None:
        try:
            import fcntl
        except ImportError:  # Windows: nothing here guards against two writers
            return
        try:
            fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ResultsError(
                f"another process is writing to {self.path}; wait for it, or name another file"
            ) from error

    def _read(self) -> None:
        """Take over what the file holds; cut off a torn last line; write the header of an empty one."""
        self.file.seek(0)
        content = self.file.read()
        whole = content[: content.rfind(b"\n") + 1]
        start = json.dumps({"format": FORMAT}).encode()[:-1]
        if not whole and content and not (content.startswith(start) or start.startswith(content)):
            raise ResultsError(f"{self.path} holds something else than chain results: name another file")
        lines = whole.splitlines()
        if lines:
            self._compare(self._line(lines[0], 1))
        for number, line in enumerate(lines[1:], 2):
            self._take(self._line(line, number), number)
        if len(whole) < len(content):
            os.ftruncate(self.file.fileno(), len(whole))
        if not lines:
            self._write(self.header)

    def _line(self, line: bytes, number: int) -> dict[str, Any]:
        try:
            content = json.loads(line)
        except ValueError:
            content = None
        if not isinstance(content, dict):
            raise ResultsError(f"line {number} of {self.path} is damaged: delete that line, it is done again")
        return content

    def _compare(self, found: dict[str, Any]) -> None:
        if found.get("format") != FORMAT:
            raise ResultsError(f"{self.path} holds something else than chain results: name another file")
        keys = [key for key in {**self.header, **found} if self.header.get(key) != found.get(key)]
        if keys:
            told = "; ".join(f"{key} was {found.get(key)!r} and is {self.header.get(key)!r}" for key in keys)
            raise ResultsError(f"{self.path} holds results of another run ({told}): name another file, or delete it")

    def _take(self, content: dict[str, Any], number: int) -> None:
        name = content.pop("id", None)
        if name not in self.ids or not isinstance(content.get("text"), str) or "ended" not in content:
            raise ResultsError(f"line {number} of {self.path} is damaged: delete that line, it is done again")
        if content.get("problem") in PROBLEMS:
            self.kept.pop(name, None)
        else:
            self.kept[name] = content
