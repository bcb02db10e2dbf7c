"""What NVML says about GPUs and processes, with every refusal as a value and not as a crash.

NVML answers *Not Supported* on some machines, refuses in others, and lists host process ids inside containers. Each
reading is therefore the value itself or an :class:`Unavailable` with the reason. Nothing here creates a CUDA context.

Source: NVML API reference; package ``nvidia-ml-py`` (module ``pynvml``), which is imported only in :func:`open_nvml`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, TypeVar

T = TypeVar("T")

OTHER_PIDS = "process list has other PIDs: this looks like a container; per-process memory can't be matched"
NO_CONTEXT = "this process holds no CUDA context on this device"
NO_VALUE = "not supported: the driver gives no per-process memory"
NOT_SUPPORTED, NO_PERMISSION, NOT_FOUND = 3, 4, 6
REASONS = {  # NVML return codes, which are part of its ABI
    1: "NVML is not initialised",
    NOT_SUPPORTED: "not supported on this device",
    NO_PERMISSION: "no permission: this user or container may not ask NVML",
    NOT_FOUND: "not found",
    9: "the NVIDIA driver is not loaded",
    12: "no NVIDIA driver found (its NVML library is missing)",
    13: "the driver is too old for this question",
    15: "the GPU is lost: it needs a reset or a reboot",
    17: "the operating system or container blocks NVML",
    18: "the driver's library and kernel module differ: reboot, or reload the driver",
}


@dataclass(frozen=True, slots=True)
class Unavailable:
    """A reading that this machine does not give, and why (one clause, for a person)."""

    reason: str

    def __str__(self) -> str:
        return self.reason


@dataclass(frozen=True, slots=True)
class GpuProcess:
    """One compute process as NVML lists it; ``pid`` may belong to another PID namespace. ``used_bytes`` in bytes."""

    pid: int
    used_bytes: int | Unavailable


@dataclass(frozen=True, slots=True)
class NvmlDevice:
    """One GPU, or one MIG instance of a GPU. Memory in bytes; ``uuid`` starts with ``GPU-`` or ``MIG-``.

    ``mig`` says whether MIG mode is on; then ``instances`` are what CUDA can use, and this device itself is not.
    """

    name: str
    uuid: str | Unavailable
    bus_id: str | Unavailable
    total_bytes: int | Unavailable
    used_bytes: int | Unavailable
    processes: tuple[GpuProcess, ...] | Unavailable
    mig: bool = False
    instances: tuple[NvmlDevice, ...] = ()
    handle: Any = field(default=None, repr=False, compare=False)

    @property
    def usable(self) -> tuple[NvmlDevice, ...]:
        """What a process can run on: the MIG instances where MIG is on, else the GPU itself."""
        return self.instances if self.mig else (self,)


def _text(value: str | bytes) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value


def same_uuid(one: str, other: str) -> bool:
    """Whether two spellings (``GPU-…``, ``MIG-…`` or bare, as torch prints it) name the same device."""
    return re.sub(r"^(GPU|MIG)-", "", one).lower() == re.sub(r"^(GPU|MIG)-", "", other).lower()


def bus_key(bus_id: str) -> tuple[int, ...] | None:
    """PCI address as numbers (domain, bus, device): ``00000000:1B:00.0`` and ``0000:1b:00.0`` are the same.

    Examples
    --------
    >>> bus_key("00000000:1B:00.0") == bus_key("0000:1b:00.0")
    True
    """
    found = re.fullmatch(r"([0-9a-f]+):([0-9a-f]+):([0-9a-f]+)(?:\.[0-9a-f]+)?", bus_id.strip(), re.IGNORECASE)
    return tuple(int(part, 16) for part in found.groups()) if found else None


def own_pids(status: str = "/proc/self/status") -> set[int]:
    """This process's id in every PID namespace that ``/proc`` shows (``NSpid``), at least ``os.getpid()``."""
    pids = {os.getpid()}
    try:
        with open(status, encoding="utf-8", errors="replace") as lines:
            for line in lines:
                if line.startswith("NSpid:"):
                    pids.update(int(word) for word in line.split()[1:])
    except OSError:  # no /proc on this system: the plain id is all there is
        pass
    return pids


def own_bytes(
    listed: Iterable[GpuProcess] | Unavailable, pids: set[int], has_context: bool, exists: Callable[[int], bool]
) -> int | Unavailable:
    """Memory that NVML attributes to this process, in bytes, or why it can't be told. Never a guess.

    Parameters
    ----------
    listed : processes of one device, as NVML lists them
    pids : ids that mean this process, see :func:`own_pids`
    has_context : whether this process is known to hold a CUDA context on that device
    exists : whether a process id exists in this PID namespace
    """
    if isinstance(listed, Unavailable):
        return listed
    processes = tuple(listed)
    mine = [process.used_bytes for process in processes if process.pid in pids]
    if mine:
        known = [used for used in mine if not isinstance(used, Unavailable)]
        return sum(known) if len(known) == len(mine) else Unavailable(NO_VALUE)
    if any(not exists(process.pid) for process in processes) or (has_context and processes):
        return Unavailable(OTHER_PIDS)
    if has_context:
        return Unavailable("process list is empty although this process uses the device: a container hides it")
    return Unavailable(NO_CONTEXT)


class NvmlView:
    """NVML as this process sees it. Get one from :func:`open_nvml`; every call reads anew.

    Attributes
    ----------
    problem : Unavailable or None
        Why NVML cannot be used at all; then :meth:`devices` is empty.
    driver : str or Unavailable
        Driver version, e.g. ``"580.159.04"``.
    cuda : tuple of (int, int) or Unavailable
        Newest CUDA version that the driver supports, e.g. ``(13, 0)``.
    """

    def __init__(self, module: Any, problem: Unavailable | None = None) -> None:
        self._nvml = module
        self.problem = problem
        self.driver: str | Unavailable = problem or self._ask(lambda: _text(module.nvmlSystemGetDriverVersion()))
        version = problem or self._ask(lambda: int(module.nvmlSystemGetCudaDriverVersion()))
        self.cuda = version if isinstance(version, Unavailable) else (version // 1000, version % 1000 // 10)

    def _ask(self, question: Callable[[], T]) -> T | Unavailable:
        try:
            return question()
        except self._nvml.NVMLError as error:
            return Unavailable(REASONS.get(error.value) or str(error))

    def devices(self) -> list[NvmlDevice]:
        """Every GPU that NVML lists, in PCI order, whatever CUDA_VISIBLE_DEVICES says; MIG instances inside."""
        if self.problem:
            return []
        count = self._ask(self._nvml.nvmlDeviceGetCount)
        found = []
        for index in range(0 if isinstance(count, Unavailable) else count):
            handle = self._ask(lambda index=index: self._nvml.nvmlDeviceGetHandleByIndex(index))
            if isinstance(handle, Unavailable):
                blank = (handle,) * 5
                found.append(NvmlDevice("unreadable GPU", *blank))
            else:
                found.append(self._device(handle))
        return found

    def _device(self, handle: Any, parent_bus: str | Unavailable | None = None) -> NvmlDevice:
        nvml = self._nvml
        name = self._ask(lambda: _text(nvml.nvmlDeviceGetName(handle)))
        bus = parent_bus or self._ask(lambda: _text(nvml.nvmlDeviceGetPciInfo(handle).busId))
        memory = self._ask(lambda: nvml.nvmlDeviceGetMemoryInfo(handle))
        gone = isinstance(memory, Unavailable)
        mode = Unavailable("an instance itself") if parent_bus else self._ask(lambda: nvml.nvmlDeviceGetMigMode(handle))
        mig = not isinstance(mode, Unavailable) and mode[0] == 1
        return NvmlDevice(
            name="unnamed GPU" if isinstance(name, Unavailable) else name,
            uuid=self._ask(lambda: _text(nvml.nvmlDeviceGetUUID(handle))),
            bus_id=bus,
            total_bytes=memory if gone else int(memory.total),
            used_bytes=memory if gone else int(memory.used),
            processes=self._processes(handle),
            mig=mig,
            instances=tuple(self._instances(handle, bus)) if mig else (),
            handle=handle,
        )

    def _instances(self, handle: Any, bus: str | Unavailable) -> Iterable[NvmlDevice]:
        most = self._ask(lambda: self._nvml.nvmlDeviceGetMaxMigDeviceCount(handle))
        for index in range(0 if isinstance(most, Unavailable) else most):
            part = self._ask(lambda index=index: self._nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, index))
            if not isinstance(part, Unavailable):  # an empty slot answers "not found"
                yield self._device(part, bus)

    def _processes(self, handle: Any) -> tuple[GpuProcess, ...] | Unavailable:
        listed = self._ask(lambda: self._nvml.nvmlDeviceGetComputeRunningProcesses(handle))
        if isinstance(listed, Unavailable):
            return listed
        # nvidia-ml-py turns NVML_VALUE_NOT_AVAILABLE into None; older bindings leave the number
        nothing = (None, 2**64 - 1)
        return tuple(
            GpuProcess(int(p.pid), Unavailable(NO_VALUE) if p.usedGpuMemory in nothing else int(p.usedGpuMemory))
            for p in listed
        )

    def process_bytes(self, device: NvmlDevice, *, has_context: bool = False) -> int | Unavailable:
        """Bytes that NVML attributes to this process on ``device``, read now; see :func:`own_bytes`."""
        import psutil

        if device.handle is None:
            return device.processes if isinstance(device.processes, Unavailable) else Unavailable("no handle")
        return own_bytes(self._processes(device.handle), own_pids(), has_context, psutil.pid_exists)

    def find(self, uuid: str | None, bus_id: str | None) -> NvmlDevice | Unavailable:
        """The NVML device (or MIG instance) behind a torch device, by UUID, else PCI address; never by index."""
        devices = self.devices()
        for device in devices:
            for part in (*device.instances, device):
                if uuid and isinstance(part.uuid, str) and same_uuid(part.uuid, uuid):
                    return part if part is not device or not device.mig else self._only_instance(device)
        if bus_id and (wanted := bus_key(bus_id)):
            for device in devices:
                if isinstance(device.bus_id, str) and bus_key(device.bus_id) == wanted:
                    return self._only_instance(device) if device.mig else device
        return self.problem or Unavailable("NVML lists no device with this UUID or PCI address")

    @staticmethod
    def _only_instance(device: NvmlDevice) -> NvmlDevice | Unavailable:
        if len(device.instances) == 1:
            return device.instances[0]
        return Unavailable(f"MIG: cannot tell which of {len(device.instances)} instances this process uses")


def open_nvml() -> NvmlView:
    """Start NVML (no CUDA context) and return the view; a failure becomes :attr:`NvmlView.problem`.

    Examples
    --------
    >>> view = open_nvml()
    >>> view.problem is None or isinstance(view.problem.reason, str)
    True
    """
    try:
        import pynvml
    except ImportError:
        return NvmlView(None, Unavailable("the NVML binding is missing: pip install nvidia-ml-py"))
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return NvmlView(pynvml, Unavailable(REASONS.get(error.value) or str(error)))
    return NvmlView(pynvml)
