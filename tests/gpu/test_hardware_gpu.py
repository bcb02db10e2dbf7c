"""On a real GPU: asking creates no context, the doctor's readings fit torch's, and the ceilings are sane."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

ASK = """
import json, os, sys
from o1lab import hardware
found = hardware.capabilities(); facts = hardware.environment(); peak = hardware.peak_memory()
import torch
primary = getattr(torch._C, "_cuda_hasPrimaryContext", lambda index: False)
held = torch.cuda.device_count() > 0 and primary(0)
listed = [p.pid for gpu in hardware.nvml().devices() for part in gpu.usable
          for p in (part.processes if isinstance(part.processes, tuple) else ())]
print(json.dumps({"started": torch.cuda.is_initialized(), "primary": held, "listed": os.getpid() in listed,
                  "capabilities": sorted(found), "devices": facts["devices"], "peak": peak}))
"""

FORK = """
import os
from o1lab import hardware
hardware.capabilities(); hardware.environment()
child = os.fork()
if child == 0:
    import torch
    os._exit(0 if torch.zeros(1, device="cuda").item() == 0 else 1)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


DOCTOR = "import sys; from o1lab.__main__ import main; sys.exit(main(['doctor', '--json', '--ceilings']))"


def python(code: str, **env: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **env}, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_asking_creates_no_context():
    said = json.loads(python(ASK))
    assert (said["started"], said["primary"], said["listed"]) == (False, False, False)
    assert said["peak"]["device_bytes"] is None
    assert {"cuda", "cuda-graphs"} <= set(said["capabilities"])
    assert ("cuda-2" in said["capabilities"]) == (torch.cuda.device_count() >= 2)
    assert len(said["devices"]) == torch.cuda.device_count()
    assert abs(said["devices"][0]["total_bytes"] - torch.cuda.get_device_properties(0).total_memory) < 2**31


def test_a_fork_can_still_use_cuda_after_asking():
    from o1lab import hardware

    if hardware.nvml().problem:
        pytest.skip("without NVML only the CUDA runtime can count devices, and that rules out a later fork")
    assert python(FORK).strip() == "0"


def test_hidden_devices():
    said = json.loads(python(ASK, CUDA_VISIBLE_DEVICES=""))
    assert not {"cuda", "cuda-graphs", "cuda-2", "nvml-process"} & set(said["capabilities"])
    assert said["devices"] == []


def test_every_torch_device_has_its_nvml_twin():
    from o1lab import hardware
    from o1lab.nvml import Unavailable

    found = hardware.devices(start=True)
    assert [device.torch_name for device in found] == [f"cuda:{i}" for i in range(torch.cuda.device_count())]
    for device in found:
        if hardware.nvml().problem is None:
            assert not isinstance(device.nvml, Unavailable), device.nvml
            assert device.uuid == device.nvml.uuid
            assert device.name == device.nvml.name


def test_process_memory_follows_an_allocation():
    from o1lab import doctor, hardware
    from o1lab.nvml import Unavailable, own_pids

    torch.cuda.empty_cache()
    first = torch.zeros(1, device="cuda")
    before = hardware.process_memory(hardware.nvml())
    if isinstance(before, Unavailable):
        pytest.skip(f"NVML gives no memory of this process: {before}")
    block = torch.empty(512 * 2**20, dtype=torch.uint8, device="cuda")
    after = hardware.process_memory(hardware.nvml())
    assert abs(after - before - 512 * 2**20) <= 32 * 2**20
    compared = doctor.compare(after, doctor.ask_smi(), own_pids(), True)
    assert compared["outcome"] in {"agree", "not compared"}, compared
    del block, first
    torch.cuda.empty_cache()


def test_doctor_with_ceilings():
    said = json.loads(python(DOCTOR))
    assert said["cuda"]["usable"] is True
    assert said["allocator"]["backend"] in {"native", "cudaMallocAsync"}
    rates = {entry["name"]: entry["rate"] for entry in said["ceilings"]}
    assert all(entry["device"] == "cuda:0" for entry in said["ceilings"])
    for rate in rates.values():
        assert rate["high"] - rate["low"] < 0.2 * rate["value"]
    if "H200" in said["devices"][0]["name"]:
        assert 3.9e12 < rates["copy"]["value"] < 4.9e12
        assert 3.9e12 < rates["read"]["value"] < 4.9e12
        assert 6e14 < rates["matmul"]["value"] < 9.9e14
