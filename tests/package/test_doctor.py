"""The doctor tells the truth in every situation that NVML, the driver, torch and containers can bring about."""

from __future__ import annotations

import json
import os
import stat
import sys
from types import SimpleNamespace

import pynvml as real
import pytest
from fake_nvml import GIB, MIB, FakeNvml, Gpu, fake_cuda, properties, refuse

from o1lab import doctor, hardware
from o1lab.__main__ import main
from o1lab.doctor_text import render, short
from o1lab.nvml import Unavailable

UUID = "11111111-2222-3333-4444-555555555555"
OTHER = "99999999-8888-7777-6666-555555555555"
ABSENT = 2**22 + 12345  # above the largest PID that Linux gives: a process of another namespace


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    for name in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delenv("PYTORCH_NO_CUDA_MEMORY_CACHING", raising=False)
    monkeypatch.setattr(doctor, "ask_smi", lambda: Unavailable("nvidia-smi is not installed"))
    monkeypatch.setattr(doctor, "hold_context", object)
    monkeypatch.setattr(hardware, "browser", lambda: None)
    monkeypatch.setattr(
        hardware,
        "allocator",
        lambda: {
            "variables": {},
            "effective": "",
            "backend": "native",
            "expandable_segments": None,
            "conflict": False,
            "caching_off": False,
        },
    )


def gpu_lines(monkeypatch, fake) -> list[str]:
    """The lines under "GPU" of the doctor's text, without those about the allocator."""
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    lines = render(doctor.examine())
    assert max(map(len, lines)) <= 80
    section = lines[lines.index("GPU") + 1 :]
    section = section[: section.index("")]
    return section[: next(i for i, line in enumerate(section) if line.startswith("  allocator"))]


def driver(version="580.159.04", cuda="13.0") -> str:
    return f"  driver       {version}, supports CUDA up to {cuda}"


YES = "  CUDA         yes: torch 2.11.0+cu130 (CUDA 13.0) can use {}"
FACTS = "  {}       NVIDIA H200, 140.0 GiB, compute 9.0, 132 SMs, L2 60 MiB"


def test_healthy_gpu_whose_memory_agrees_with_nvidia_smi(monkeypatch):
    mine = (os.getpid(), 600 * MIB)
    fake_cuda(monkeypatch, properties(UUID))
    monkeypatch.setattr(doctor, "ask_smi", lambda: [(os.getpid(), 600 * MIB)])
    assert gpu_lines(monkeypatch, FakeNvml(Gpu(processes=[mine]))) == [
        YES.format("1 GPU"),
        driver(),
        FACTS.format("cuda:0"),
        f"               GPU-{UUID}, PCI 00000000:1B:00.0",
        "               NVML memory: 1.0 GiB of 140.0 GiB used",
        "               NVML process: 600 MiB by this process",
        "  nvidia-smi   agree: this process: 600 MiB in nvidia-smi, 600 MiB in NVML",
    ]
    assert {"cuda", "cuda-graphs", "nvml-process"} <= hardware.capabilities()


def test_no_driver(monkeypatch):
    assert gpu_lines(monkeypatch, FakeNvml(init=refuse(real.NVML_ERROR_LIBRARY_NOT_FOUND))) == [
        "  CUDA         no: no NVIDIA driver found (its NVML library is missing)"
    ]
    assert not hardware.capabilities() & {"cuda", "cuda-graphs", "cuda-2", "cuda-8", "nvml-process", "ncu", "cupti"}


def test_driver_there_but_no_gpu(monkeypatch):
    assert gpu_lines(monkeypatch, FakeNvml()) == ["  CUDA         no: the NVIDIA driver lists no GPU", driver()]


def test_binding_not_installed(monkeypatch):
    assert gpu_lines(monkeypatch, None) == ["  CUDA         no: the NVML binding is missing: pip install nvidia-ml-py"]


def test_nvml_denied_while_cuda_works(monkeypatch):
    fake_cuda(monkeypatch, properties(UUID))
    assert gpu_lines(monkeypatch, FakeNvml(Gpu(), init=refuse(real.NVML_ERROR_NO_PERMISSION))) == [
        YES.format("1 GPU"),
        "  NVML         no permission: this user or container may not ask NVML",
        FACTS.format("cuda:0"),
        "               not matched to a device of NVML",
    ]
    assert "cuda" in hardware.capabilities()
    assert "nvml-process" not in hardware.capabilities()


def test_not_supported_values(monkeypatch):
    nothing = refuse(real.NVML_ERROR_NOT_SUPPORTED)
    fake_cuda(monkeypatch, properties(UUID))
    monkeypatch.setattr(doctor, "ask_smi", lambda: [(os.getpid(), None)])
    assert gpu_lines(monkeypatch, FakeNvml(Gpu(memory=nothing, processes=[(os.getpid(), None)]))) == [
        YES.format("1 GPU"),
        driver(),
        FACTS.format("cuda:0"),
        f"               GPU-{UUID}, PCI 00000000:1B:00.0",
        "               NVML memory: not supported on this device",
        "               NVML process: not supported: the driver gives no per-process",
        "               memory",
        "  nvidia-smi   not supported: nvidia-smi lists this process without its memory;",
        "               not supported: the driver gives no per-process memory",
    ]
    assert "nvml-process" not in hardware.capabilities()


def test_raw_not_available_number_is_no_memory(monkeypatch):
    fake = FakeNvml(Gpu(processes=[(os.getpid(), 2**64 - 1)]))
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    view = hardware.nvml()
    assert view.process_bytes(view.devices()[0]) == Unavailable("not supported: the driver gives no per-process memory")


def test_process_list_refused(monkeypatch):
    fake_cuda(monkeypatch, properties(UUID))
    lines = gpu_lines(monkeypatch, FakeNvml(Gpu(processes=refuse(real.NVML_ERROR_NO_PERMISSION))))
    assert lines[-3:] == [
        "               NVML process: no permission: this user or container may not ask",
        "               NVML",
        "  nvidia-smi   not compared: nvidia-smi is not installed",
    ]
    assert "nvml-process" not in hardware.capabilities()


def test_container_with_host_pids(monkeypatch):
    fake_cuda(monkeypatch, properties(UUID))
    monkeypatch.setattr(doctor, "ask_smi", lambda: [(ABSENT, 600 * MIB)])
    assert gpu_lines(monkeypatch, FakeNvml(Gpu(processes=[(ABSENT, 600 * MIB)]))) == [
        YES.format("1 GPU"),
        driver(),
        FACTS.format("cuda:0"),
        f"               GPU-{UUID}, PCI 00000000:1B:00.0",
        "               NVML memory: 1.0 GiB of 140.0 GiB used",
        "               NVML process: process list has other PIDs: this looks like a",
        "               container; per-process memory can't be matched",
        "  nvidia-smi   only other PIDs: nvidia-smi lists 1 other PID(s), not this",
        "               process's: process list has other PIDs: this looks like a",
        "               container; per-process memory can't be matched",
    ]
    assert "nvml-process" not in hardware.capabilities()


def test_container_is_noticed_before_cuda_starts(monkeypatch):
    fake_cuda(monkeypatch, properties(UUID), started=False)
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(Gpu(processes=[(ABSENT, 600 * MIB)])))
    assert "nvml-process" not in hardware.capabilities()
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(Gpu(processes=[(os.getppid(), 600 * MIB)])))
    assert "nvml-process" in hardware.capabilities()  # someone else of this namespace: nothing speaks against it


def test_several_gpus_are_matched_by_uuid_and_not_by_index(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    fake_cuda(monkeypatch, properties(OTHER, bus=0x3D))
    mine = [(os.getpid(), 600 * MIB)]
    second = Gpu(uuid=f"GPU-{OTHER}", bus="00000000:3D:00.0", memory=(140 * GIB, 2 * GIB), processes=mine)
    assert gpu_lines(monkeypatch, FakeNvml(Gpu(), second)) == [
        YES.format("1 GPU"),
        driver(),
        "  not used     NVIDIA H200",
        f"               GPU-{UUID}, PCI 00000000:1B:00.0",
        "               NVML memory: 1.0 GiB of 140.0 GiB used",
        "               NVML process: this process holds no CUDA context on this device",
        FACTS.format("cuda:0"),
        f"               GPU-{OTHER}, PCI 00000000:3D:00.0",
        "               NVML memory: 2.0 GiB of 140.0 GiB used",
        "               NVML process: 600 MiB by this process",
        "  nvidia-smi   not compared: nvidia-smi is not installed",
    ]


def test_swapped_order_and_pci_address_where_torch_gives_no_uuid(monkeypatch):
    fake_cuda(monkeypatch, properties(None, bus=0x3D), properties(None, bus=0x1B))
    monkeypatch.setitem(
        sys.modules, "pynvml", FakeNvml(Gpu(), Gpu(uuid=f"GPU-{OTHER}", bus="00000000:3D:00.0"), Gpu(uuid="GPU-x"))
    )
    assert [device.uuid for device in hardware.devices()] == [f"GPU-{OTHER}", f"GPU-{UUID}"]
    assert {"cuda-2"} == hardware.capabilities() & {"cuda-2", "cuda-8"}


def test_mig_instance(monkeypatch):
    part = Gpu(
        uuid=f"MIG-{OTHER}",
        name="NVIDIA H200 MIG 1g.18gb",
        bus=refuse(real.NVML_ERROR_NOT_SUPPORTED),
        memory=(17 * GIB, 1 * GIB),
        processes=[(os.getpid(), 300 * MIB)],
    )
    fake_cuda(monkeypatch, properties(OTHER, name="NVIDIA H200 MIG 1g.18gb", total=17 * GIB))
    denied = refuse(real.NVML_ERROR_NO_PERMISSION)
    fake = FakeNvml(Gpu(mig=1, parts=[part], memory=denied, processes=denied))
    assert gpu_lines(monkeypatch, fake) == [
        YES.format("1 GPU"),
        driver(),
        "  MIG GPU      NVIDIA H200",
        f"               GPU-{UUID}, PCI 00000000:1B:00.0",
        "               MIG is on: 1 instance",
        "  cuda:0       NVIDIA H200 MIG 1g.18gb, 17.0 GiB, compute 9.0, 132 SMs, L2 60",
        "               MiB",
        f"               MIG-{OTHER}, PCI 00000000:1B:00.0",
        "               NVML memory: 1.0 GiB of 17.0 GiB used",
        "               NVML process: 300 MiB by this process",
        "  nvidia-smi   not compared: nvidia-smi is not installed",
    ]
    assert hardware.devices()[0].mig


def test_mig_with_only_a_pci_address_is_never_guessed(monkeypatch):
    parts = [Gpu(uuid=f"MIG-{OTHER}"), Gpu(uuid="MIG-GPU-abc/1/0")]
    fake_cuda(monkeypatch, properties(None))
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(Gpu(mig=1, parts=parts)))
    assert hardware.devices()[0].nvml == Unavailable("MIG: cannot tell which of 2 instances this process uses")


def test_mig_without_instance(monkeypatch):
    fake_cuda(monkeypatch)
    assert gpu_lines(monkeypatch, FakeNvml(Gpu(mig=1)))[:2] == [
        "  CUDA         no: MIG is on but has no instance: create one (nvidia-smi mig",
        "               -cgi … -C)",
    ]


def test_torch_without_cuda_beside_a_driver(monkeypatch):
    import torch

    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.version, "__version__", "2.13.0+cpu")
    assert gpu_lines(monkeypatch, FakeNvml(Gpu())) == [
        "  CUDA         no: torch 2.13.0+cpu is built without CUDA, but driver 580.159.04",
        "               (CUDA 13.0) and 1 GPU are here: install a torch build for CUDA",
        "               13.0 or older (https://pytorch.org/get-started/locally)",
        driver(),
        "  not used     NVIDIA H200",
        f"               GPU-{UUID}, PCI 00000000:1B:00.0",
        "               NVML memory: 1.0 GiB of 140.0 GiB used",
        "               NVML process: this process holds no CUDA context on this device",
        "  nvidia-smi   not compared: nvidia-smi is not installed",
    ]


def test_driver_too_old_for_torch(monkeypatch):
    fake_cuda(monkeypatch, properties(UUID), usable=False)
    fake = FakeNvml(Gpu(), driver=b"535.104.05", cuda=12020)
    assert gpu_lines(monkeypatch, fake)[:4] == [
        "  CUDA         no: driver 535.104.05 (CUDA 12.2) is too old for torch",
        "               2.11.0+cu130, built for CUDA 13.0: update the driver to one for",
        "               CUDA 13, or install a torch build for CUDA 12",
        driver("535.104.05", "12.2"),
    ]
    assert "cuda" not in hardware.capabilities()  # without asking the driver


def test_older_minor_version_of_the_driver_is_no_obstacle(monkeypatch):
    fake_cuda(monkeypatch, properties(UUID), build="12.8", started=False)
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(Gpu(), cuda=12020))
    assert hardware.cuda_state().usable


@pytest.mark.parametrize("setting", ["", "-1"])
def test_visible_devices_hides_all(monkeypatch, setting):
    fake_cuda(monkeypatch)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", setting)
    line = f"no: CUDA_VISIBLE_DEVICES={setting!r} hides every GPU: unset it to use them"
    assert " ".join(" ".join(gpu_lines(monkeypatch, FakeNvml(Gpu()))).split()).startswith(f"CUDA {line} driver")
    assert "cuda" not in hardware.capabilities()


def test_visible_devices_names_a_gpu_that_is_not_here(monkeypatch):
    fake_cuda(monkeypatch)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5")
    assert gpu_lines(monkeypatch, FakeNvml(Gpu()))[:2] == [
        "  CUDA         no: CUDA_VISIBLE_DEVICES='5' names no GPU that is here: correct",
        "               or unset it",
    ]


def test_cuda_that_does_not_start_is_said(monkeypatch):
    def broken():
        raise RuntimeError("CUDA error: out of memory\nCompile with TORCH_USE_CUDA_DSA")

    fake_cuda(monkeypatch, properties(UUID), started=False)
    monkeypatch.setattr(doctor, "hold_context", broken)
    lines = gpu_lines(monkeypatch, FakeNvml(Gpu()))
    assert lines[1] == "               but it does not start: CUDA error: out of memory"


@pytest.mark.parametrize(
    ("nvml", "smi", "context", "outcome"),
    [
        (600 * MIB, [(1, 600 * MIB)], True, "agree"),
        (601 * MIB + 7, [(1, 600 * MIB)], True, "agree"),
        (610 * MIB, [(1, 600 * MIB)], True, "disagree"),
        (1200 * MIB, [(1, 600 * MIB), (1, 600 * MIB)], True, "agree"),
        (600 * MIB, [], True, "disagree"),
        (600 * MIB, [(1, None)], True, "not supported"),
        (Unavailable("x"), [(1, 600 * MIB)], True, "disagree"),
        (Unavailable("x"), [(2, 600 * MIB)], True, "only other PIDs"),
        (Unavailable("x"), [(2, 600 * MIB)], False, "no process"),
        (Unavailable("x"), Unavailable("nvidia-smi is not installed"), False, "not compared"),
    ],
)
def test_comparison_with_nvidia_smi(nvml, smi, context, outcome):
    assert doctor.compare(nvml, smi, {1}, context)["outcome"] == outcome


ASK = doctor.ask_smi


@pytest.mark.skipif(os.name != "posix", reason="the stand-in is a shell script")
@pytest.mark.parametrize(
    ("script", "answer"),
    [
        ("printf '7, 512\\n8, [N/A]\\n'", [(7, 512 * MIB), (8, None)]),
        ("exit 0", []),
        ("echo 'NVIDIA-SMI has failed'; exit 9", Unavailable("nvidia-smi says: NVIDIA-SMI has failed")),
        ("echo 'Insufficient Permissions'", Unavailable("nvidia-smi says: Insufficient Permissions")),
        ("exit 3", Unavailable("nvidia-smi says: exit code 3")),
    ],
)
def test_reading_nvidia_smi(tmp_path, monkeypatch, script, answer):
    fake = tmp_path / "nvidia-smi"
    fake.write_text(f"#!/bin/sh\n{script}\n")
    fake.chmod(fake.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert ASK() == answer


def test_no_nvidia_smi(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert ASK() == Unavailable("nvidia-smi is not installed")


def test_claims_are_sorted_by_what_they_need(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(init=refuse(real.NVML_ERROR_LIBRARY_NOT_FOUND)))
    claims = doctor.examine()["claims"]
    here = {entry["claim"] for entry in claims["decidable"]}
    needs = {entry["claim"]: entry["needs"] for entry in claims["not_here"]}
    assert "leak-cause/default-limit" in here
    assert needs["leak-rate"] == ["cuda"]
    assert needs["leak-sampling"] == ["cuda", "nvml-process"]
    assert len(here) + len(needs) == claims["total"]


def test_broken_claims_file_still_prints_the_rest(monkeypatch, capsys):
    import o1lab.claims
    from o1lab.errors import ClaimsError

    def broken(path=None):
        raise ClaimsError("claims.toml: unknown metric 'speed'")

    monkeypatch.setattr(o1lab.claims, "load", broken)
    assert main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert "\nMachine\n" in out
    assert "  problem      claims.toml: unknown metric 'speed'" in out


def test_json_is_one_document_with_ceilings(capsys, monkeypatch):
    rate = {"value": 4.28e12, "low": 4.27e12, "high": 4.29e12, "n": 31, "unit": "B/s"}
    entry = {"name": "copy", "device": "cpu", "rate": rate, "size": "2 buffers of 8 MiB", "note": ""}
    monkeypatch.setattr(hardware, "ceilings", lambda device=None: [SimpleNamespace(to_dict=lambda: entry)])
    assert main(["doctor", "--json", "--ceilings"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["ceilings"] == [entry]
    assert "  copy         4.28 TB/s [4.27, 4.29] (n=31)" in render(document)
    missing = {**entry, "rate": None, "note": "could not be measured: out of memory"}
    assert "  copy         could not be measured: out of memory" in render({**document, "ceilings": [missing]})


def test_unknown_device_is_one_line(capsys):
    assert main(["doctor", "--ceilings", "--device", "cuda:7"]) == 2
    assert capsys.readouterr().err == "o1lab: unknown device 'cuda:7'; did you mean cpu\n"


def test_allocator_lines(monkeypatch):
    settings = {
        "variables": {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", "PYTORCH_ALLOC_CONF": "backend:native"},
        "effective": "expandable_segments:True",
        "backend": "native",
        "expandable_segments": "True",
        "conflict": True,
        "caching_off": True,
    }
    monkeypatch.setattr(hardware, "allocator", lambda: settings)
    lines = render(doctor.examine())
    start = lines.index("  allocator    PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True")
    assert lines[start + 1 : start + 7] == [
        "  allocator    PYTORCH_ALLOC_CONF=backend:native",
        "               backend native, expandable segments True",
        "               the two variables differ; torch uses 'expandable_segments:True':",
        "               unset one",
        "               PYTORCH_NO_CUDA_MEMORY_CACHING is set: no caching, memory",
        "               statistics stay empty",
    ]


def test_short_names():
    assert short(["a", "a/x", "b/y", "b/z", "c"]) == "a, /x, b/y, /z, c"
