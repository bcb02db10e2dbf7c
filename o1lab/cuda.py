"""Whether torch can use CUDA here, why or why not, and on which devices; asked without creating a CUDA context.

Only :func:`devices` with ``start=True`` and :func:`cuda_state` with ``ask_driver=True`` touch the driver.
"""

from __future__ import annotations

import importlib.util
import os
import runpy
import sys
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from o1lab.nvml import NvmlDevice, NvmlView, Unavailable, open_nvml, same_uuid


@dataclass(frozen=True, slots=True)
class Build:
    """The installed torch: its version and the CUDA (or ROCm) version it was built for, ``None`` if without."""

    version: str
    cuda: str | None
    hip: str | None = None


@dataclass(frozen=True, slots=True)
class CudaState:
    """Whether torch can use CUDA here, on how many devices, and in one sentence why (or why not)."""

    usable: bool
    count: int
    why: str


@dataclass(frozen=True, slots=True)
class Device:
    """One CUDA device. ``torch_name`` (``"cuda:0"``) is known only once CUDA has started; memory in bytes.

    ``nvml`` is the same device as NVML sees it, matched by UUID or PCI address, never by index.
    """

    torch_name: str | None
    name: str
    total_bytes: int | None
    uuid: str | None
    compute: str | None = None
    multiprocessors: int | None = None
    l2_bytes: int | None = None
    mig: bool = False
    nvml: NvmlDevice | Unavailable = field(default=Unavailable("not asked"), repr=False)


def torch_build() -> Build:
    """Read which torch is installed from its ``version.py``, without importing torch (which takes seconds)."""
    if "torch" in sys.modules:
        facts = vars(sys.modules["torch"].version)
    else:
        found = importlib.util.find_spec("torch")
        if found is None or not found.submodule_search_locations:
            return Build("not installed", None)
        facts = runpy.run_path(str(Path(found.submodule_search_locations[0]) / "version.py"))
    return Build(str(facts["__version__"]), facts.get("cuda"), facts.get("hip"))


def cuda_started() -> bool:
    """Whether CUDA has been started in this process by torch (asking does not start it)."""
    torch = sys.modules.get("torch")
    return torch is not None and torch.cuda.is_initialized()


def _driver_cuda(view: NvmlView) -> str:
    known = None if isinstance(view.cuda, Unavailable) else f"{view.cuda[0]}.{view.cuda[1]}"
    return f"driver {view.driver}" + (f" (CUDA {known})" if known else "")


def cuda_state(view: NvmlView | None = None, *, ask_driver: bool = False) -> CudaState:
    """Decide whether torch can use CUDA, and explain.

    Parameters
    ----------
    view : NvmlView, optional
        An open view; a new one by default.
    ask_driver : bool
        Also call ``torch.cuda.is_available()``, which initialises the driver (``cuInit``; a later fork can then not
        use CUDA). Without it the answer rests on NVML and on the versions.
    """
    view = view or open_nvml()
    build = torch_build()
    gpus = view.devices()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if build.cuda is None:
        if build.hip:
            return CudaState(False, 0, f"torch {build.version} is built for ROCm; the lab measures CUDA devices only")
        if not gpus:
            return CudaState(False, 0, str(view.problem or "the NVIDIA driver lists no GPU"))
        newest = "" if isinstance(view.cuda, Unavailable) else f" for CUDA {view.cuda[0]}.{view.cuda[1]} or older"
        return CudaState(
            False,
            0,
            f"torch {build.version} is built without CUDA, but {_driver_cuda(view)} and {_gpus(len(gpus))} are here:"
            f" install a torch build{newest} (https://pytorch.org/get-started/locally)",
        )
    if visible is not None and (not visible.strip() or visible.strip().startswith("-")):
        return CudaState(False, 0, f"CUDA_VISIBLE_DEVICES={visible!r} hides every GPU: unset it to use them")
    if not view.problem and not gpus:
        return CudaState(False, 0, "the NVIDIA driver lists no GPU")
    if gpus and all(gpu.mig and not gpu.instances for gpu in gpus):
        return CudaState(False, 0, "MIG is on but has no instance: create one (nvidia-smi mig -cgi … -C)")
    needed = int(build.cuda.partition(".")[0])
    if not ask_driver and not isinstance(view.cuda, Unavailable) and view.cuda[0] < needed and not cuda_started():
        return CudaState(False, 0, _too_old(view, build))
    return _asked(view, build, ask_driver, visible)


def _asked(view: NvmlView, build: Build, ask_driver: bool, visible: str | None) -> CudaState:
    """Ask torch itself: its device count comes from NVML where that works, else from the CUDA runtime."""
    import torch

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        count = torch.cuda.device_count()
        usable = count > 0 and (not ask_driver or torch.cuda.is_available())
    if usable:
        return CudaState(True, count, f"torch {build.version} (CUDA {build.cuda}) can use {_gpus(count)}")
    if not isinstance(view.cuda, Unavailable) and view.cuda[0] < int(build.cuda.partition(".")[0]):
        return CudaState(False, 0, _too_old(view, build))
    if visible is not None and not view.problem and count == 0:
        return CudaState(False, 0, f"CUDA_VISIBLE_DEVICES={visible!r} names no GPU that is here: correct or unset it")
    said = "; ".join(dict.fromkeys(str(item.message).split(" (Triggered")[0].strip() for item in caught))
    reason = view.problem or said or "torch.cuda.is_available() is False and gives no reason"
    return CudaState(False, 0, f"torch {build.version} (CUDA {build.cuda}) cannot use CUDA: {reason}")


def _gpus(count: int) -> str:
    return f"{count} GPU" + ("" if count == 1 else "s")


def _too_old(view: NvmlView, build: Build) -> str:
    have = view.cuda[0] if not isinstance(view.cuda, Unavailable) else "?"
    need = (build.cuda or "").partition(".")[0]
    return (
        f"{_driver_cuda(view)} is too old for torch {build.version}, built for CUDA {build.cuda}:"
        f" update the driver to one for CUDA {need}, or install a torch build for CUDA {have}"
    )


def devices(view: NvmlView | None = None, *, start: bool = False) -> list[Device]:
    """The CUDA devices that this process may use.

    Once CUDA has started (or with ``start=True``, which starts it) they come from torch, in torch's order, each with
    its NVML twin. Before that they come from NVML: those that CUDA_VISIBLE_DEVICES leaves, without a torch name,
    because CUDA's order is not NVML's.
    """
    view = view or open_nvml()
    if start or cuda_started():
        import torch

        found = range(torch.cuda.device_count()) if torch.cuda.is_available() else ()
        return [_from_torch(torch.cuda.get_device_properties(index), index, view) for index in found]
    return [
        Device(
            torch_name=None,
            name=part.name,
            total_bytes=None if isinstance(part.total_bytes, Unavailable) else part.total_bytes,
            uuid=None if isinstance(part.uuid, Unavailable) else part.uuid,
            mig=gpu.mig,
            nvml=part,
        )
        for gpu, part in _visible(view.devices(), os.environ)
    ]


def _from_torch(properties: Any, index: int, view: NvmlView) -> Device:
    uuid = getattr(properties, "uuid", None)
    address = [getattr(properties, f"pci_{part}_id", None) for part in ("domain", "bus", "device")]
    bus_id = None if None in address else "{:08x}:{:02x}:{:02x}.0".format(*address)
    twin = view.find(None if uuid is None else str(uuid), bus_id)
    own = None if isinstance(twin, Unavailable) or isinstance(twin.uuid, Unavailable) else twin.uuid
    return Device(
        torch_name=f"cuda:{index}",
        name=properties.name,
        total_bytes=properties.total_memory,
        uuid=own or (None if uuid is None else str(uuid)),
        compute=f"{properties.major}.{properties.minor}",
        multiprocessors=properties.multi_processor_count,
        l2_bytes=getattr(properties, "L2_cache_size", None),
        mig=(own or "").startswith("MIG-"),
        nvml=twin,
    )


def _visible(gpus: list[NvmlDevice], env: Mapping[str, str]) -> list[tuple[NvmlDevice, NvmlDevice]]:
    """Pairs (GPU, usable part) that CUDA_VISIBLE_DEVICES leaves; all of them where it can't be told which.

    Bare numbers count in CUDA's order, which is NVML's only under ``CUDA_DEVICE_ORDER=PCI_BUS_ID``.
    """
    parts = [(gpu, part) for gpu in gpus for part in gpu.usable]
    setting = env.get("CUDA_VISIBLE_DEVICES")
    if setting is None:
        return parts
    chosen: list[tuple[NvmlDevice, NvmlDevice]] = []
    for word in (word.strip() for word in setting.split(",")):
        if word.startswith(("GPU-", "MIG-")):
            match = [pair for pair in parts if isinstance(pair[1].uuid, str) and pair[1].uuid.startswith(word)]
            match = match or [pair for pair in parts if isinstance(pair[1].uuid, str) and same_uuid(pair[1].uuid, word)]
        elif word.isdigit() and int(word) < len(gpus):
            if len(gpus) > 1 and env.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID":
                return parts
            match = [pair for pair in parts if pair[0] is gpus[int(word)]]
        else:
            break  # CUDA ignores everything from the first invalid entry on
        chosen.extend(match)
    return chosen
