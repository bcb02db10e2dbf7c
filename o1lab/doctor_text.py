"""The doctor's text: an examination (see :func:`o1lab.doctor.examine`) as lines of at most 80 columns."""

from __future__ import annotations

import textwrap
from typing import Any

WIDTH, LABEL = 80, 15
MIB, GIB = 2**20, 2**30


def mib(size: int) -> str:
    """Bytes as whole MiB."""
    return f"{size / MIB:.0f} MiB"


def _gib(size: Any) -> str:
    return size["unavailable"] if isinstance(size, dict) else f"{size / GIB:.1f} GiB"


def _rate(rate: dict[str, Any]) -> str:
    unit = rate["unit"]
    power, prefix = next(
        ((power, prefix) for power, prefix in ((1e12, "T"), (1e9, "G")) if rate["value"] >= power), (1e6, "M")
    )
    value, low, high = (rate[key] / power for key in ("value", "low", "high"))
    return f"{value:.4g} {prefix}{unit} [{low:.4g}, {high:.4g}] (n={rate['n']})"


def _row(label: str, text: str) -> list[str]:
    start = f"  {label:<{LABEL - 3}} "
    return textwrap.wrap(
        text, WIDTH, initial_indent=start, subsequent_indent=" " * LABEL, break_on_hyphens=False, break_long_words=False
    )


def render(document: dict[str, Any]) -> list[str]:
    """Text lines of an examination, at most 80 columns wide."""
    lines = [f"o1lab {document['lab']}, Python {document['python']}, {document['platform']}"]
    for title, rows in (
        ("Machine", _machine(document)),
        ("GPU", _gpu(document)),
        ("Optional", _optional(document)),
        *([("Ceilings", _measured(document["ceilings"]))] if document["ceilings"] is not None else []),
        ("Claims", _decidable(document["claims"])),
    ):
        lines += ["", title]
        for label, text in rows:
            lines += _row(label, text)
    return lines


def _machine(document: dict[str, Any]) -> list[tuple[str, str]]:
    machine, tools = document["host"], document["tools"]
    quota = f" (container quota {machine['quota_cores']:g})" if machine["quota_cores"] else ""
    limit = " (the container's limit)" if machine["limit_bytes"] else ""
    counters = "exact heap counters (mallinfo2)" if machine["mallinfo2"] else "no exact heap counters (mallinfo2)"
    compilers = f"C++ {tools['cxx'] or 'none'}, C {tools['cc'] or 'none'}"
    plural = "" if machine["cores"] == 1 else "s"
    return [
        ("CPU", f"{machine['cpu']}, {machine['cores']} core{plural}{quota}"),
        ("memory", f"{_gib(machine['ram_bytes'])}{limit}, {_gib(machine['available_bytes'])} free"),
        ("C library", f"{machine['libc'] or 'not glibc'}, {counters}"),
        ("compiler", compilers + (f"; {tools['compiler_problem']}" if tools["compiler_problem"] else "")),
        ("torch", document["torch"]["version"] + f", CUDA runtime {document['torch']['cuda_runtime'] or 'none'}"),
    ]


def _gpu(document: dict[str, Any]) -> list[tuple[str, str]]:
    cuda, nvml, memory = document["cuda"], document["nvml"], document["nvidia_smi"]
    rows = [("CUDA", ("yes: " if cuda["usable"] else "no: ") + cuda["why"])]
    if "start_problem" in cuda:
        rows.append(("", f"but it does not start: {cuda['start_problem']}"))
    if nvml["problem"] and nvml["problem"] in cuda["why"]:
        pass  # said already
    elif nvml["problem"]:
        rows.append(("NVML", nvml["problem"]))
    else:
        driver, newest = (
            value["unavailable"] if isinstance(value, dict) else value for value in (nvml["driver"], nvml["cuda"])
        )
        rows.append(("driver", f"{driver}, supports CUDA up to {newest}"))
    hardware_facts = {entry["torch_name"]: entry for entry in document["devices"]}
    for device in nvml["devices"]:
        rows += _nvml_rows(device, hardware_facts)
    seen = {part["torch_name"] for device in nvml["devices"] for part in (device, *device["instances"])}
    for name, entry in hardware_facts.items():
        if name not in seen:
            rows += [(name or "-", _facts(entry)), ("", "not matched to a device of NVML")]
    if nvml["devices"] or memory["outcome"] != "not compared":
        rows.append(("nvidia-smi", f"{memory['outcome']}: {memory['detail']}"))
    return rows + _allocator(document["allocator"])


def _facts(entry: dict[str, Any]) -> str:
    cache = f", L2 {mib(entry['l2_bytes'])}" if entry["l2_bytes"] else ""
    return (
        f"{entry['name']}, {_gib(entry['total_bytes'])}, compute {entry['compute']},"
        f" {entry['multiprocessors']} SMs{cache}"
    )


def _nvml_rows(device: dict[str, Any], facts: dict[str | None, dict[str, Any]]) -> list[tuple[str, str]]:
    name = device["torch_name"]
    parts = device["instances"]
    label = name or ("MIG GPU" if device["mig"] else "not used")
    rows = [(label, _facts(facts[name]) if name else device["name"])]
    where = [value if isinstance(value, str) else value["unavailable"] for value in (device["uuid"], device["bus_id"])]
    rows.append(("", f"{where[0]}, PCI {where[1]}"))
    if device["mig"] and not parts:
        rows.append(("", "MIG is on, with no instance that NVML shows to this process"))
    elif device["mig"]:
        rows.append(("", f"MIG is on: {len(parts)} instance{'' if len(parts) == 1 else 's'}"))
    else:
        used, total = device["used_bytes"], device["total_bytes"]
        memory = used["unavailable"] if isinstance(used, dict) else f"{_gib(used)} of {_gib(total)} used"
        own = device["process_bytes"]
        mine = own["unavailable"] if isinstance(own, dict) else f"{mib(own)} by this process"
        rows += [("", f"NVML memory: {memory}"), ("", f"NVML process: {mine}")]
    for part in parts:
        rows += _nvml_rows(part, facts)
    return rows


def _allocator(settings: dict[str, Any]) -> list[tuple[str, str]]:
    rows = []
    for name, value in settings["variables"].items():
        rows.append(("allocator", f"{name}={value}"))
    segments = settings["expandable_segments"]
    text = f"backend {settings['backend'] or 'none (torch without CUDA)'}"
    text += f", expandable segments {segments or 'not set (torch default)'}"
    if not settings["variables"]:
        text += ", no variable set"
    rows.append(("" if rows else "allocator", text))
    if settings["conflict"]:
        rows.append(("", f"the two variables differ; torch uses {settings['effective']!r}: unset one"))
    if settings["caching_off"]:
        rows.append(("", "PYTORCH_NO_CUDA_MEMORY_CACHING is set: no caching, memory statistics stay empty"))
    return rows


def _optional(document: dict[str, Any]) -> list[tuple[str, str]]:
    tools, packages = document["tools"], document["packages"]
    there = [name for name, present in packages.items() if present]
    absent = [name for name, present in packages.items() if not present]
    return [
        ("smollm2", f"found: {tools['smollm2']}" if tools["smollm2"] else "not here: pip install 'o1lab[smollm2]'"),
        ("browser", tools["browser"] or "none found: figures keep no PNG (install chromium, or set O1LAB_BROWSER)"),
        ("ncu", "found" if tools["ncu"] else "not found (Nsight Compute, only some claims need it)"),
        ("packages", (", ".join(there) or "none") + (f"; not installed: {', '.join(absent)}" if absent else "")),
    ]


def _measured(ceilings: list[dict[str, Any]]) -> list[tuple[str, str]]:
    rows = []
    for entry in ceilings:
        rows.append((entry["name"], f"{_rate(entry['rate']) if entry['rate'] else entry['note']}"))
        detail = f"{entry['size']}, {entry['device']}"
        rows.append(("", detail + (f"; {entry['note']}" if entry["note"] and entry["rate"] else "")))
    remark = (
        "Median and its 95 % interval within this run; copy counts bytes read and written. On a shared machine"
        " two runs can differ by far more than the interval: repeat when in doubt."
    )
    return [*rows, ("", remark)]


def _decidable(claims: dict[str, Any]) -> list[tuple[str, str]]:
    if "problem" in claims:
        return [("problem", claims["problem"])]
    from o1lab.registry import NEEDS

    ready = [entry["claim"] for entry in claims["decidable"] if entry["notebook_exists"]]
    later = [entry["claim"] for entry in claims["decidable"] if not entry["notebook_exists"]]
    rows = [("can decide", f"{len(claims['decidable'])} of {claims['total']} claims on this machine")]
    rows.append(("now", short(ready) or "none"))
    if later:
        rows.append(("later", f"{len(later)} once their notebooks are written: {short(later)}"))
    groups: dict[tuple[str, ...], list[str]] = {}
    for entry in claims["not_here"]:
        groups.setdefault(tuple(entry["needs"]), []).append(entry["claim"])
    for index, (needs, names) in enumerate(groups.items()):
        rows.append(("not here" if index == 0 else "", f"for want of {' + '.join(needs)}: {short(names)}"))
    return rows + [(name, NEEDS.get(name, name)) for name in sorted({name for needs in groups for name in needs})]


def short(names: list[str]) -> str:
    """Claim ids in one line; a part after another of the same parent keeps only its own name.

    Examples
    --------
    >>> short(["leak-rate", "leak-rate/host", "leak-cause/host", "leak-cause/cure"])
    'leak-rate, /host, leak-cause/host, /cure'
    """
    out, before = [], None
    for name in names:
        parent, slash, part = name.partition("/")
        out.append(f"/{part}" if slash and parent == before else name)
        before = parent
    return ", ".join(out)
