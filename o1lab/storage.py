"""Writing without half-written files: atomic writes, an early check of the folder, and the lock on a run's folder."""

from __future__ import annotations

import errno
import json
import os
import secrets
from pathlib import Path
from typing import Any, Self

from o1lab.errors import ResultsError

_WAY_OUT = {
    errno.ENOSPC: "the disk is full: free some room",
    getattr(errno, "EDQUOT", -1): "the disk quota is used up: free some room",
    errno.EROFS: "the file system is read-only",
    errno.EACCES: "no permission to write there",
    errno.EPERM: "no permission to write there",
    errno.ENOTDIR: "a file stands where the folder should be: move it away",
    errno.EEXIST: "a file stands where the folder should be: move it away",
}


def results_error(folder: Path, error: OSError) -> ResultsError:
    """Turn an operating system's refusal into a sentence that names the folder and the way out."""
    reason = _WAY_OUT.get(error.errno or 0, error.strerror or str(error))
    return ResultsError(f"cannot write to {folder}: {reason}, or set O1LAB_RESULTS to another folder")


def atomic_write(path: str | Path, data: bytes | str) -> Path:
    """Write a file whole or not at all: temporary name in the same folder, fsync, rename.

    Parameters
    ----------
    path : path
        Target; missing folders are made.
    data : bytes or str
        Content; text is written as UTF-8.

    Raises
    ------
    ResultsError
        Disk full, read-only, no permission, or a file in the folder's place. The old content, if any, is untouched
        and no temporary file is left.

    Examples
    --------
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     atomic_write(f"{folder}/a/b.txt", "whole").read_text()
    'whole'
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), 0o666)
        try:
            view = memoryview(data.encode() if isinstance(data, str) else data)
            while view:
                view = view[os.write(descriptor, view) :]
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.replace(temporary, path)
    except OSError as error:
        raise results_error(path.parent, error) from error
    finally:
        if os.path.lexists(temporary):
            temporary.unlink()
    return path


def check_writable(folder: Path) -> None:
    """Raise :class:`ResultsError` now rather than after the measurement if ``folder`` cannot be written to."""
    atomic_write(folder / f".probe-{secrets.token_hex(4)}", b"o1lab").unlink()


def write_json(path: Path, content: dict[str, Any]) -> Path:
    """Write a dictionary as readable JSON, atomically; not-a-number values are refused (ValueError)."""
    return atomic_write(path, json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False) + "\n")


class RunLock:
    """Hold a result folder while writing to it; the operating system frees the lock when its process dies.

    Raises
    ------
    ResultsError
        On entering, if another live process holds the folder.

    Examples
    --------
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder, RunLock(folder):
    ...     (Path(folder) / ".lock").exists()
    True
    """

    def __init__(self, run_dir: str | Path) -> None:
        self.folder = Path(run_dir)
        self._descriptor: int | None = None

    def __enter__(self) -> Self:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self.folder / ".lock", os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as error:
            raise results_error(self.folder, error) from error
        try:
            _lock(descriptor)
        except OSError as error:
            holder = os.pread(descriptor, 32, 0).decode().strip() if hasattr(os, "pread") else ""
            os.close(descriptor)
            who = f"the process with pid {holder}" if holder else "another process"
            raise ResultsError(
                f"{who} is writing to {self.folder}; wait for it, stop it, or run into another folder"
            ) from error
        os.ftruncate(descriptor, 0)
        os.write(descriptor, f"{os.getpid()}\n".encode())
        self._descriptor = descriptor
        return self

    def __exit__(self, *_: object) -> None:
        if self._descriptor is not None:
            os.ftruncate(self._descriptor, 0)
            os.close(self._descriptor)  # closing frees the lock; the empty file stays, removing it would race
            self._descriptor = None


def _lock(descriptor: int) -> None:
    """Take the exclusive lock without waiting; OSError if it is held."""
    if os.name == "nt":
        import msvcrt

        os.lseek(descriptor, 1024, os.SEEK_SET)  # beyond the pid, so that others may read it
        msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
        os.lseek(descriptor, 0, os.SEEK_SET)
    else:
        import fcntl

        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
