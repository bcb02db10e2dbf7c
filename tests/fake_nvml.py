"""A stand-in for the module ``pynvml`` that answers what a test tells it to, raising the real error classes."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pynvml as real

GIB, MIB = 2**30, 2**20


def refuse(code: int) -> real.NVMLError:
    return real.NVMLError(code)


@dataclass
class Gpu:
    uuid: Any = "GPU-11111111-2222-3333-4444-555555555555"
    name: Any = "NVIDIA H200"
    bus: Any = "00000000:1B:00.0"
    memory: Any = (140 * GIB, 1 * GIB)  # total, used
    processes: Any = ()  # (pid, bytes | None)
    mig: Any = field(default_factory=lambda: refuse(real.NVML_ERROR_NOT_SUPPORTED))  # 0 or 1, or an error
    parts: Any = ()


def say(value: Any) -> Any:
    """The answer: an error is raised, and a function is asked anew each time (for what changes over time)."""
    if callable(value):
        value = value()
    if isinstance(value, Exception):
        raise value
    return value


class FakeNvml:
    """Give it GPUs; ``init`` may be an error; ``cuda`` is NVML's number, e.g. 13000 for CUDA 13.0."""

    NVMLError = real.NVMLError

    def __init__(self, *gpus: Gpu, init: Exception | None = None, driver: Any = "580.159.04", cuda: Any = 13000):
        self.gpus, self.init, self.driver, self.cuda = gpus, init, driver, cuda

    def nvmlInit(self):
        say(self.init)

    def nvmlSystemGetDriverVersion(self):
        return say(self.driver)

    def nvmlSystemGetCudaDriverVersion(self):
        return say(self.cuda)

    def nvmlDeviceGetCount(self):
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index):
        return say(self.gpus[index])

    def nvmlDeviceGetName(self, gpu):
        return say(gpu.name)

    def nvmlDeviceGetUUID(self, gpu):
        return say(gpu.uuid)

    def nvmlDeviceGetPciInfo(self, gpu):
        return SimpleNamespace(busId=say(gpu.bus))

    def nvmlDeviceGetMemoryInfo(self, gpu):
        total, used = say(gpu.memory)
        return SimpleNamespace(total=total, used=used, free=total - used)

    def nvmlDeviceGetMigMode(self, gpu):
        return [say(gpu.mig), say(gpu.mig)]

    def nvmlDeviceGetMaxMigDeviceCount(self, gpu):
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, gpu, index):
        return gpu.parts[index] if index < len(gpu.parts) else say(refuse(real.NVML_ERROR_NOT_FOUND))

    def nvmlDeviceGetComputeRunningProcesses(self, gpu):
        listed = say(gpu.processes)
        return [SimpleNamespace(pid=pid, usedGpuMemory=used) for pid, used in listed]


def properties(uuid: str | None, *, name: str = "NVIDIA H200", bus: int = 0x1B, total: int = 140 * GIB):
    """What ``torch.cuda.get_device_properties`` returns for such a device (UUID without its prefix)."""
    return SimpleNamespace(
        name=name,
        uuid=uuid,
        total_memory=total,
        major=9,
        minor=0,
        multi_processor_count=132,
        L2_cache_size=60 * MIB,
        pci_domain_id=0,
        pci_bus_id=bus,
        pci_device_id=0,
    )


def fake_cuda(monkeypatch, *devices, build="13.0", usable=True, started=True):
    """Make the CPU build of torch look like a CUDA build with ``devices``; the first one holds memory."""
    import torch

    monkeypatch.setattr(torch.version, "cuda", build)
    monkeypatch.setattr(torch.version, "__version__", "2.11.0+cu130")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(devices))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: usable and bool(devices))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: started and usable and bool(devices))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: devices[index])
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda name: 2 * MIB if str(name) in ("cuda:0", "0") else 0)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda index: 1000 + index)
