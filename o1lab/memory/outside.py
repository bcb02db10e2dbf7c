"""A process seen from outside: its resident, unique and device memory, threads and open files. It is not touched.

Linux: ``/proc/PID/status`` (0.02 ms) and ``smaps_rollup`` (milliseconds, and it holds the process's memory map locked
meanwhile). The folder ``/proc/PID`` is kept open, so a number that the system gives to another process later is never
taken for this one. Elsewhere: psutil. Source: proc(5); NVML API reference.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from o1lab.errors import ProbeError
from o1lab.host import cgroup_limits
from o1lab.nvml import NO_CONTEXT, NvmlView, Unavailable, own_bytes

PROC = Path("/proc")


class WatchError(ProbeError):
    """A process cannot be watched; the message says why and what to do."""


class Ended(Exception):
    """The process is gone; the message says how."""


class Process:
    """One process to watch.

    Raises
    ------
    WatchError
        No such process, a zombie, a kernel thread, or no permission.
    """

    def __init__(self, pid: int) -> None:
        import psutil

        self.pid = pid
        self._folder: int | None = None
        hint = "list them with `ps -e`; inside a container only its own are seen, and hidepid hides other users'"
        try:
            if pid <= 0:
                raise WatchError(f"{pid} is no process id: give the number that `ps -e` shows")
            self._psutil = psutil.Process(pid)
            self.name = self._psutil.name()
            if (PROC / str(pid) / "status").is_file():
                self._folder = os.open(PROC / str(pid), os.O_RDONLY | os.O_DIRECTORY)
            self.read()
        except psutil.ZombieProcess as error:
            raise WatchError(f"process {pid} has ended already: only its entry is left, for its parent") from error
        except (psutil.NoSuchProcess, FileNotFoundError, ProcessLookupError, OverflowError) as error:
            raise WatchError(f"there is no process {pid} here: {hint}") from error
        except (psutil.AccessDenied, PermissionError) as error:
            raise WatchError(f"no permission to watch process {pid}: ask as its owner or as root") from error
        except Ended as error:
            self.close()
            raise WatchError(f"process {pid} cannot be watched: {error}") from error

    def close(self) -> None:
        """Let go of the process's folder."""
        if self._folder is not None:
            os.close(self._folder)
            self._folder = None

    def _file(self, name: str) -> bytes:
        handle = os.open(name, os.O_RDONLY, dir_fd=self._folder)
        with os.fdopen(handle, "rb", buffering=0) as file:
            return file.read()

    def _numbers(self, name: str) -> dict[bytes, int]:
        """Lines ``Key: 12 kB`` of a file of this process in bytes (plain numbers as they stand)."""
        found = {}
        for line in self._file(name).splitlines():
            key, _, rest = line.partition(b":")
            words = rest.split()
            if words and words[0].isdigit():
                found[key] = int(words[0]) * (1024 if words[1:] == [b"kB"] else 1)
            elif key == b"State" and words[:1] in ([b"Z"], [b"X"]):
                raise Ended("it ended, and is a zombie until its parent collects it")
        return found

    def read(self) -> tuple[int, int, int]:
        """Resident bytes, of these without mapped files (anonymous and shared memory), threads.

        Raises
        ------
        Ended
            The process is gone.
        """
        import psutil

        try:
            if self._folder is None:
                resident = self._psutil.memory_info().rss
                return resident, resident, self._psutil.num_threads()
            status = self._numbers("status")
        except (FileNotFoundError, ProcessLookupError, psutil.NoSuchProcess) as error:
            raise Ended("it ended") from error
        if b"VmRSS" not in status:
            raise Ended("it has no memory of its own (a kernel thread, or it is just ending)")
        own = status.get(b"RssAnon", status[b"VmRSS"]) + status.get(b"RssShmem", 0)
        return status[b"VmRSS"], own, status.get(b"Threads", 1)

    def unique(self) -> tuple[int, int] | None:
        """Unique (USS) and proportional (PSS) set size in bytes; ``None`` where that is not allowed or not known."""
        import psutil

        try:
            if self._folder is not None:
                rollup = self._numbers("smaps_rollup")
                return rollup[b"Private_Clean"] + rollup[b"Private_Dirty"], rollup[b"Pss"]
            full = self._psutil.memory_full_info()
            return full.uss, getattr(full, "pss", full.uss)
        except (OSError, KeyError, AttributeError, psutil.Error):  # another user's process, or it is ending
            return None

    def files(self) -> int | None:
        """Open file descriptors, ``None`` where that is not allowed."""
        import psutil

        try:
            return self._psutil.num_fds() if hasattr(self._psutil, "num_fds") else self._psutil.num_handles()
        except psutil.Error:
            return None

    def children(self) -> list[Process]:
        """Its children and theirs, as many as can be watched now."""
        import psutil

        found = []
        try:
            below = self._psutil.children(recursive=True)
        except psutil.Error:
            return []
        for child in below:
            try:
                found.append(Process(child.pid))
            except WatchError:  # it ended meanwhile
                continue
        return found

    def pids(self) -> set[int]:
        """Its number in every PID namespace that ``/proc`` shows from here (``NSpid``)."""
        pids = {self.pid}
        try:
            for line in self._file("status").splitlines() if self._folder is not None else ():
                if line.startswith(b"NSpid:"):
                    pids.update(int(word) for word in line.split()[1:])
        except OSError:  # it is ending
            pass
        return pids

    def has_gpu_open(self) -> bool | None:
        """Whether it holds an NVIDIA device file open; ``None`` where its files may not be listed."""
        if self._folder is None:
            return None
        try:
            with os.scandir(PROC / str(self.pid) / "fd") as entries:
                paths = [entry.path for entry in entries]
        except OSError:  # another user's process, or it is ending
            return None
        for path in paths:
            with contextlib.suppress(OSError):  # closed meanwhile
                if os.readlink(path).startswith(("/dev/nvidia", "/dev/dxg")):
                    return True
        return False

    def free_bytes(self) -> int:
        """Host memory left to it: the machine's available memory, or its container's limit less its own memory."""
        import psutil

        available = int(psutil.virtual_memory().available)
        limit, _ = cgroup_limits(PROC / str(self.pid) / "cgroup")
        if limit is None:
            return available
        try:
            return max(0, min(available, limit - self.read()[1]))
        except Ended:
            return min(available, limit)


class DeviceMemory:
    """Device memory of some processes as NVML attributes it, or of the whole device where it does not.

    Attributes
    ----------
    whose : str
        ``"this process"``, ``"all processes"``, or empty while nothing was read. The first reading decides: the two
        are never mixed in one series.
    reason : str
        Why NVML gives nothing, or nothing of this process.
    free_bytes : int or None
        Free memory of the fullest device that was read.
    """

    def __init__(self, view: NvmlView) -> None:
        self.view = view
        self.parts = [part for gpu in view.devices() for part in gpu.usable if part.handle is not None]
        self.whose = ""
        self.reason = str(view.problem or "") or ("" if self.parts else "NVML lists no device that can be read")
        self.free_bytes: int | None = None

    def read(self, processes: Iterable[Process]) -> int | None:
        """Bytes on all devices now, or ``None`` (then :attr:`reason` says why)."""
        import psutil

        if not self.parts:
            return None
        processes = list(processes)
        pids = set().union(*(process.pids() for process in processes))
        opened = {process.has_gpu_open() for process in processes}
        listed = [self.view._processes(part.handle) for part in self.parts]
        answers = [own_bytes(some, pids, True in opened, psutil.pid_exists) for some in listed]
        mine = [place for place, answer in enumerate(answers) if isinstance(answer, int)]
        unsure = {place: str(answer) for place, answer in enumerate(answers) if place not in mine}
        if opened == {False} and not mine:  # it uses no GPU, whatever other processes NVML lists
            unsure = dict.fromkeys(unsure, NO_CONTEXT)
        unsure = {place: reason for place, reason in unsure.items() if reason != NO_CONTEXT}
        if not self.whose and (mine or unsure):
            self.whose = "this process" if mine else "all processes"
            self.parts = [self.parts[place] for place in unsure] if not mine else self.parts
        if unsure:
            self.reason = next(iter(unsure.values()))
        elif not mine:
            self.reason = self.reason or "it holds no CUDA context"
        if not self.whose or (self.whose == "this process" and unsure and not mine):
            return None
        question = self.view._nvml.nvmlDeviceGetMemoryInfo
        asked = [self.view._ask(lambda part=part: question(part.handle)) for part in self.parts]
        known = [memory for memory in asked if not isinstance(memory, Unavailable)]
        used_by_it = [place for place in range(len(self.parts)) if self.whose == "all processes" or place in mine]
        self.free_bytes = min(
            (int(asked[p].total - asked[p].used) for p in used_by_it if not isinstance(asked[p], Unavailable)),
            default=self.free_bytes,
        )
        if self.whose == "this process":
            return sum(answers[place] for place in mine)
        return sum(int(memory.used) for memory in known) if len(known) == len(asked) else None


class Sparse:
    """Take a slow reading only so often that it costs no more than ``budget_s`` per call on average."""

    def __init__(self, call: Callable[[], Any], budget_s: float) -> None:
        self.call, self.budget_s, self.skip = call, budget_s, 0

    def __call__(self) -> Any:
        """The reading, or ``None`` when it is not its turn."""
        if self.skip > 0:
            self.skip -= 1
            return None
        begun = time.perf_counter()
        value = self.call()
        self.skip = int((time.perf_counter() - begun) / self.budget_s)
        return value
