"""``python -m o1lab doctor``: what this machine has, what it measures, and which claims it can decide.

Unlike importing the lab, the doctor starts CUDA where it can: memory per process can only be compared between NVML and
``nvidia-smi`` while this process holds a context.
"""

from __future__ import annotations

import argparse
import json
import platform
import shutil
import subprocess
from pathlib import Path
from typing import Any

from o1lab import __version__, hardware, host
from o1lab.doctor_text import MIB, mib, render
from o1lab.errors import ClaimsError, UnknownName
from o1lab.nvml import NvmlDevice, NvmlView, Unavailable, own_pids

OPTIONAL = {"gguf": "gguf", "vllm": "vllm", "triton": "triton", "transformers": "transformers", "cupti": "cupti"}


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the doctor's options to ``parser``."""
    parser.add_argument("--ceilings", action="store_true", help="measure copy and read bandwidth and matmul rate")
    parser.add_argument("--device", help="device to measure with --ceilings, e.g. cuda:1 or cpu (default: the GPU)")
    parser.add_argument("--json", action="store_true", help="one JSON document instead of text")


def command(options: argparse.Namespace) -> int:
    """Print the examination; 1 if the claims file is unusable, else 0."""
    document = examine(measure=options.ceilings, device=options.device)
    if options.json:
        print(json.dumps(document, indent=2, ensure_ascii=False))
    else:
        print("\n".join(render(document)))
    return 1 if "problem" in document["claims"] else 0


def examine(*, measure: bool = False, device: str | None = None) -> dict[str, Any]:
    """Everything that the doctor tells, as one JSON-able dictionary; bytes throughout.

    A reading that the machine refuses is ``{"unavailable": reason}``.

    Raises
    ------
    UnknownName
        If ``device`` is not a device of this machine.
    """
    view = hardware.nvml()
    state = hardware.cuda_state(view, ask_driver=True)
    cuda: dict[str, Any] = {"usable": state.usable, "count": state.count, "why": state.why}
    held = None  # a tensor that keeps this process's context alive while NVML is read
    if state.usable:
        try:
            held = hold_context()
        except RuntimeError as error:
            cuda["start_problem"] = str(error).partition("\n")[0]
    known = hardware.devices(view) if state.usable else []
    names = [entry.torch_name for entry in known if entry.torch_name] + ["cpu"]
    if device is not None and device not in names:
        raise UnknownName("device", device, names)
    machine = host.host()
    smollm2 = host.smollm2_file()
    cxx, compiler_problem = host.compiler()
    browser = hardware.browser()
    document = {
        "lab": __version__,
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.release()} {platform.machine()}",
        "host": {
            "cpu": machine.cpu,
            "cores": machine.cores,
            "quota_cores": machine.quota,
            "ram_bytes": machine.ram_bytes,
            "available_bytes": machine.available_bytes,
            "limit_bytes": machine.limit_bytes,
            "libc": " ".join(platform.libc_ver()).strip() or None,
            "mallinfo2": host.mallinfo2(),
        },
        "torch": {"version": hardware.torch_build().version, "cuda_runtime": hardware.torch_build().cuda},
        "cuda": cuda,
        "nvml": _nvml(view, known),
        "nvidia_smi": compare(hardware.process_memory(view), ask_smi(), own_pids(), held is not None),
        "devices": [
            {
                "torch_name": entry.torch_name,
                "name": entry.name,
                "total_bytes": entry.total_bytes,
                "uuid": entry.uuid,
                "compute": entry.compute,
                "multiprocessors": entry.multiprocessors,
                "l2_bytes": entry.l2_bytes,
                "mig": entry.mig,
            }
            for entry in known
        ],
        "allocator": hardware.allocator(),
        "tools": {
            "cxx": cxx,
            "cc": host.c_compiler(),
            "compiler_problem": compiler_problem or None,
            "browser": Path(browser).name if browser else None,
            "ncu": host.tool("ncu") is not None,
            "smollm2": smollm2.name if smollm2 else None,
        },
        "packages": {name: host.installed(module) for name, module in OPTIONAL.items()},
        "capabilities": sorted(hardware.capabilities(view)),
    }
    del held
    document["ceilings"] = [entry.to_dict() for entry in hardware.ceilings(device)] if measure else None
    document["claims"] = _claims(set(document["capabilities"]))
    return document


def hold_context() -> Any:
    """Start CUDA on the current device; the returned tensor keeps memory there while it lives."""
    import torch

    return torch.zeros(1, device="cuda")


def _plain(value: Any) -> Any:
    return {"unavailable": value.reason} if isinstance(value, Unavailable) else value


def _nvml(view: NvmlView, known: list[hardware.Device]) -> dict[str, Any]:
    torch_names = {entry.uuid: entry.torch_name for entry in known if entry.uuid}

    def entry(device: NvmlDevice) -> dict[str, Any]:
        name = None if isinstance(device.uuid, Unavailable) else torch_names.get(device.uuid)
        started = name is not None and hardware.holds_memory(name)
        return {
            "torch_name": name,
            "name": device.name,
            "uuid": _plain(device.uuid),
            "bus_id": _plain(device.bus_id),
            "total_bytes": _plain(device.total_bytes),
            "used_bytes": _plain(device.used_bytes),
            "process_bytes": _plain(view.process_bytes(device, has_context=started)),
            "mig": device.mig,
            "instances": [entry(part) for part in device.instances],
        }

    return {
        "problem": view.problem.reason if view.problem else None,
        "driver": _plain(view.driver),
        "cuda": _plain(view.cuda if isinstance(view.cuda, Unavailable) else ".".join(map(str, view.cuda))),
        "devices": [entry(device) for device in view.devices()],
    }


def ask_smi() -> list[tuple[int, int | None]] | Unavailable:
    """Rows (pid, bytes or ``None``) of ``nvidia-smi --query-compute-apps=pid,used_memory``, or why there are none."""
    path = shutil.which("nvidia-smi")
    if path is None:
        return Unavailable("nvidia-smi is not installed")
    query = [path, "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return Unavailable(f"nvidia-smi did not answer ({type(error).__name__})")
    lines = [line.strip() for line in done.stdout.splitlines() if line.strip()]
    rows = [line.partition(",")[::2] for line in lines]
    if done.returncode or not all(pid.strip().isdigit() for pid, _ in rows):
        said = (lines or done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[0]
        return Unavailable(f"nvidia-smi says: {said}")
    return [(int(pid), int(used) * MIB if used.strip().isdigit() else None) for pid, used in rows]


def compare(
    nvml: int | Unavailable, smi: list[tuple[int, int | None]] | Unavailable, pids: set[int], has_context: bool
) -> dict[str, str]:
    """Compare this process's memory in NVML (bytes) with ``nvidia-smi``'s rows; they agree within 2 MiB a row.

    Returns ``{"outcome", "detail"}``; outcome is one of ``agree``, ``disagree``, ``not supported``, ``only other
    PIDs``, ``no process``, ``not compared``.
    """

    def answer(outcome: str, detail: str) -> dict[str, str]:
        return {"outcome": outcome, "detail": detail}

    if isinstance(smi, Unavailable):
        return answer("not compared", smi.reason)
    mine = [used for pid, used in smi if pid in pids]
    ours = nvml.reason if isinstance(nvml, Unavailable) else f"{mib(nvml)} in NVML"
    if not mine:
        if smi and has_context:
            return answer("only other PIDs", f"nvidia-smi lists {len(smi)} other PID(s), not this process's: {ours}")
        if has_context or isinstance(nvml, int):
            return answer("disagree", f"nvidia-smi lists no process; {ours}")
        return answer("no process", "this process holds no CUDA context, so neither lists it")
    if None in mine:
        return answer("not supported", f"nvidia-smi lists this process without its memory; {ours}")
    theirs = sum(used for used in mine if used is not None)
    if isinstance(nvml, Unavailable):
        return answer("disagree", f"{mib(theirs)} in nvidia-smi; NVML: {ours}")
    same = abs(theirs - nvml) <= 2 * MIB * len(mine)
    return answer("agree" if same else "disagree", f"this process: {mib(theirs)} in nvidia-smi, {ours}")


def _claims(capabilities: set[str]) -> dict[str, Any]:
    from o1lab.claims import load, missing

    try:
        claims = list(load().values())
    except ClaimsError as error:
        return {"problem": str(error)}
    return {
        "total": len(claims),
        "decidable": [
            {"claim": claim.id, "notebook": claim.notebook, "notebook_exists": bool(claim.notebook_exists())}
            for claim in claims
            if not missing(claim, capabilities)
        ],
        "not_here": [
            {"claim": claim.id, "needs": list(needs)} for claim in claims if (needs := missing(claim, capabilities))
        ],
    }
