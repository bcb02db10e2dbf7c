"""What this machine is and can do: the lab's capabilities, and the environment that every record keeps.

:func:`capabilities` and :func:`environment` create no CUDA context: they read NVML, torch's build and the
surroundings. Only ``devices(start=True)`` and :func:`ceilings` start CUDA.
"""

from __future__ import annotations

import os
import platform
import sys
from typing import TYPE_CHECKING, Any

from o1lab import host
from o1lab.cuda import CudaState, Device, cuda_started, cuda_state, devices, torch_build
from o1lab.nvml import NO_CONTEXT, NvmlView, Unavailable, open_nvml

if TYPE_CHECKING:
    from o1lab.ceilings import Ceiling

__all__ = [
    "CudaState",
    "Device",
    "NvmlView",
    "allocator",
    "capabilities",
    "ceilings",
    "cuda_state",
    "devices",
    "environment",
    "holds_memory",
    "nvml",
    "peak_memory",
    "process_memory",
    "torch_build",
]


def nvml() -> NvmlView:
    """Open NVML; see :class:`o1lab.nvml.NvmlView`. Never raises for a missing driver or a refusal."""
    return open_nvml()


def allocator() -> dict[str, Any]:
    """Settings of torch's CUDA caching allocator: the two variables, which one counts, backend, expandable segments."""
    import torch

    names = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
    given = {name: os.environ[name] for name in names if name in os.environ}
    # torch versions differ in which variable wins, so take torch's own word where it gives one
    read_back = getattr(torch._C, "_accelerator_getAllocatorSettings", None)
    effective = read_back() if read_back else next(iter(given.values()), "")
    options = dict(part.partition(":")[::2] for part in effective.split(",") if ":" in part)
    has_backend = hasattr(torch._C, "_cuda_getAllocatorBackend")
    return {
        "variables": given,
        "effective": effective,
        "backend": torch.cuda.get_allocator_backend() if has_backend else None,
        "expandable_segments": options.get("expandable_segments"),
        "conflict": len(set(given.values())) > 1,
        "caching_off": "PYTORCH_NO_CUDA_MEMORY_CACHING" in os.environ,
    }


def holds_memory(torch_name: str) -> bool:
    """Whether torch in this process holds memory, and so a context, on a device such as ``"cuda:0"``."""
    return cuda_started() and sys.modules["torch"].cuda.memory_reserved(torch_name) > 0


def process_memory(view: NvmlView, known: list[Device] | None = None) -> int | Unavailable:
    """Device bytes that NVML attributes to this process over all its devices, or why it can't be told.

    ``known`` saves the look-up of the devices (:func:`devices`) where many readings follow each other.
    """
    if view.problem:
        return view.problem
    found = devices(view) if known is None else known
    if not found:
        return Unavailable("NVML lists no device that this process may use")
    total, refusal = 0, None
    for device in found:
        if isinstance(device.nvml, Unavailable):
            return device.nvml
        started = device.torch_name is not None and holds_memory(device.torch_name)
        used = view.process_bytes(device.nvml, has_context=started)
        if isinstance(used, int):
            total += used
        elif refusal is None or started:
            refusal = used
    return total or refusal or Unavailable("NVML attributes nothing to this process")


def _reports_processes(view: NvmlView) -> bool:
    """Whether NVML can match memory to this process: seen to, or (before CUDA starts) nothing speaks against it."""
    used = process_memory(view)
    if isinstance(used, int):
        return True
    listed = [part.processes for gpu in view.devices() for part in gpu.usable]
    refused = any(isinstance(entry, Unavailable) for entry in listed)
    silent = any(isinstance(p.used_bytes, Unavailable) for e in listed if not isinstance(e, Unavailable) for p in e)
    return used.reason == NO_CONTEXT and not refused and not silent


def capabilities(view: NvmlView | None = None) -> set[str]:
    """Names of what this machine can do, as used in ``needs`` of a claim. Creates no CUDA context.

    Examples
    --------
    >>> "cpu" in capabilities()
    True
    """
    from o1lab.registry import NEEDS

    view = view or nvml()
    state = cuda_state(view)
    missing_compiler = host.compiler()[1] or (state.usable and host.c_compiler() is None)
    present = {
        "cpu": True,
        "linux": sys.platform.startswith("linux"),
        "glibc": host.mallinfo2(),
        "compiler": not missing_compiler,
        "browser": browser() is not None,
        "smollm2": host.smollm2_file() is not None and host.installed("gguf") and host.installed("transformers"),
        "cuda": state.usable,
        "cuda-graphs": state.usable,
        "cuda-2": state.usable and state.count >= 2,
        "cuda-8": state.usable and state.count >= 8,
        "nvml-process": state.usable and _reports_processes(view),
        "cupti": state.usable and host.installed("cupti"),
        "ncu": state.usable and host.tool("ncu") is not None,
        "vllm": host.installed("vllm"),
        "prometheus": host.tool("prometheus") is not None,
    }
    return {name for name in NEEDS if present.get(name, False)}


def browser() -> str | None:
    """Path of the browser that figures and tests use, as :func:`o1lab.plots.find_browser` finds it."""
    try:
        from o1lab.plots import find_browser
    except ImportError:  # plotly is not installed: then no figure can use a browser either
        return None
    return find_browser()


def environment() -> dict[str, Any]:
    """What a record keeps about the machine, JSON-able. No host name, user name, path or hardware serial.

    Memory in bytes, ``cores`` those this process may use. Creates no CUDA context.
    """
    view = nvml()
    build, state, machine = torch_build(), cuda_state(view), host.host()
    seen = devices(view)
    return {
        "python": platform.python_version(),
        "platform": " ".join((platform.system(), platform.release(), platform.machine())),
        "libc": " ".join(platform.libc_ver()).strip() or None,
        "cpu": machine.cpu,
        "cores": machine.cores,
        "quota_cores": machine.quota,
        "ram_bytes": machine.ram_bytes,
        "torch": build.version,
        "cuda_runtime": build.cuda,
        "driver": None if isinstance(view.driver, Unavailable) else view.driver,
        "cuda_usable": state.usable,
        "devices": [
            {
                "name": device.name,
                "total_bytes": device.total_bytes,
                "compute": device.compute,
                "multiprocessors": device.multiprocessors,
                "l2_bytes": device.l2_bytes,
                "mig": device.mig,
            }
            for device in (seen if state.usable else [])
        ],
        "allocator": allocator(),
        "compiler": host.compiler()[0],
        "libraries": host.library_versions(),
    }


def peak_memory() -> dict[str, int | None]:
    """Highest memory of this process so far, in bytes: resident host memory, and torch's tensors on all devices.

    ``device_bytes`` is ``None`` where CUDA has not started in this process.
    """
    device = None
    if cuda_started():
        cuda = sys.modules["torch"].cuda
        device = sum(cuda.max_memory_allocated(index) for index in range(cuda.device_count()))
    return {"host_bytes": host.peak_rss_bytes(), "device_bytes": device}


def ceilings(device: Any = None, **options: Any) -> list[Ceiling]:
    """Measure this device's copy bandwidth, read bandwidth and matmul rate; see :func:`o1lab.ceilings.measure`."""
    from o1lab.ceilings import measure

    return measure(device, **options)
