"""What torch.compile holds in *this* process: cache entries, why it recompiled, generated code, CUDA-graph pools.

Sources: ``torch/_dynamo/utils.py`` (``get_compilation_metrics``, the last 64 compilations by default),
``torch/_dynamo/cache_size.py``, ``torch/_inductor/cudagraph_trees.py``, ``torch.cuda.memory_snapshot``.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from dataclasses import dataclass
from typing import Any

from o1lab.memory import counters

ADVICE = {  # what a recompile reason says: what would stop it
    r"size mismatch|stride mismatch|\.size\(\)": "bucket or pad the lengths, or mark_dynamic the dimension",
    r"___check_obj_id|ID_MATCH": "a new function or object at every call: create it once, outside the compiled code",
    r"dtype mismatch|device mismatch|requires_grad|dispatch key": "one dtype, device and grad mode for one function",
    r"grad_mode|GLOBAL_STATE|global_state": "one grad mode for all calls: wrap them in torch.inference_mode()",
    r" == -?[\d.]+|___check_type_id": "a Python number that varies: pass it as a tensor",
}


@dataclass(frozen=True)
class Compiled:
    """One function that Dynamo has compiled.

    ``function``: name and place. ``entries``: compiled versions kept now. ``compiled``: compilations on record.
    ``reasons``: why it was compiled again, with counts. ``advice``: what would stop that.
    """

    function: str
    entries: int
    compiled: int
    reasons: dict[str, int]
    advice: str


@dataclass(frozen=True)
class Accounting:
    """Everything :func:`accounting` found; bytes where it says so.

    ``limits``: torch's recompile limits in force. ``generated_modules``: Python modules with generated code that
    inductor keeps. ``triton_kernels``: compiled Triton kernels kept. ``graph_recordings``: recorded CUDA graphs.
    ``private_pool_bytes``: device memory held by graph pools, all of it outside the reach of ``empty_cache``.
    """

    functions: tuple[Compiled, ...]
    limits: dict[str, int]
    generated_modules: int
    triton_kernels: int
    graph_recordings: int
    private_pool_bytes: int

    def __str__(self) -> str:
        rows = [f"{'kept':>5} {'compiled':>8}  function"]
        for item in self.functions:
            rows.append(f"{item.entries:>5} {item.compiled:>8}  {item.function}")
            rows += [f"{'':16}{count} × {reason}" for reason, count in list(item.reasons.items())[:2]]
            if item.advice:
                rows.append(f"{'':16}→ {item.advice}")
        limits = ", ".join(f"{name} {value}" for name, value in self.limits.items())
        rows.append(
            f"{self.generated_modules} generated modules, {self.triton_kernels} Triton kernels, "
            f"{self.graph_recordings} CUDA-graph recordings, {self.private_pool_bytes:,} B in their pools; {limits}"
        )
        return "\n".join(rows)


def accounting() -> Accounting:
    """What Dynamo, inductor, Triton and CUDA-graph trees keep in this process; loads none of them by itself.

    Examples
    --------
    >>> import torch
    >>> double = torch.compile(lambda x: x * 2, backend="eager", dynamic=False)
    >>> for length in (2, 3, 4):
    ...     _ = double(torch.zeros(length))
    >>> found = accounting().functions[0]
    >>> found.entries, "bucket" in found.advice
    (3, True)
    """
    if "torch._dynamo" not in sys.modules:
        return Accounting((), {}, 0, 0, 0, private_pool_bytes())
    from o1lab.memory.compile_cache import default_limits

    return Accounting(
        _functions(), default_limits(), _generated_modules(), _triton_kernels(), _recordings(), private_pool_bytes()
    )


def _functions() -> tuple[Compiled, ...]:
    from torch._dynamo import convert_frame, utils
    from torch._dynamo.eval_frame import _debug_get_cache_entry_list

    metrics: dict[tuple[str, Any, Any], list[str]] = {}
    for metric in utils.get_compilation_metrics():
        if metric.co_name is not None:
            key = (metric.co_filename or "?", metric.co_firstlineno, metric.co_name)
            metrics.setdefault(key, []).append(metric.recompile_reason or "")
    found = []
    for reference in list(convert_frame.input_codes.seen):
        code = reference()
        entries = len(_debug_get_cache_entry_list(code)) if code is not None else 0
        if code is None or not entries:
            continue
        reasons = metrics.get((code.co_filename, code.co_firstlineno, code.co_name), [])
        counted = Counter(_plain(reason) for reason in reasons if reason)
        place = f"{code.co_name} ({code.co_filename.replace(chr(92), '/').rsplit('/', 1)[-1]}:{code.co_firstlineno})"
        found.append(
            Compiled(place, entries, max(len(reasons), entries), dict(counted.most_common(5)), _advice(counted))
        )
    return tuple(sorted(found, key=lambda item: -item.entries))


def _plain(reason: str) -> str:
    """A recompile reason without its numbers, so that the same reason counts as one."""
    first = reason.strip().splitlines()[0]
    first = re.sub(r"^\d+/\d+: ", "", first)
    return re.sub(r"(expected|actual) \d+", r"\1 …", first)[:160]


def _advice(reasons: Counter[str]) -> str:
    for reason, _ in reasons.most_common():
        for pattern, advice in ADVICE.items():
            if re.search(pattern, reason):
                return advice
    return ""


def _generated_modules() -> int:
    codecache = sys.modules.get("torch._inductor.codecache")
    return len(codecache.PyCodeCache.modules) if codecache is not None else 0


def _triton_kernels() -> int:
    """Compiled kernels that live Triton functions keep, one per specialisation and device."""
    jit = sys.modules.get("triton.runtime.jit")
    if jit is None:
        return 0
    import gc

    # by type: isinstance() would ask weak proxies, and a dead one raises
    functions = [item for item in gc.get_objects() if issubclass(type(item), jit.JITFunction)]
    return sum(len(cache[0]) for item in functions for cache in getattr(item, "device_caches", {}).values())


def _recordings() -> int:
    trees = sys.modules.get("torch._inductor.cudagraph_trees")
    if trees is None or not counters.cuda_ready():
        return 0
    import torch

    manager = trees.get_manager(torch.cuda.current_device(), create_if_none_exists=False)
    if manager is None:
        return 0
    waiting = [node for nodes in manager.roots.values() for node in nodes]
    count = 0
    while waiting:
        node = waiting.pop()
        count += 1
        waiting += [child for children in node.children.values() for child in children]
    return count


def private_pool_bytes() -> int:
    """Device bytes reserved by private pools (CUDA graphs, ``MemPool``); 0 without a CUDA context."""
    if not counters.cuda_ready():
        return 0
    import torch

    snapshot = torch.cuda.memory_snapshot()
    return sum(part["total_size"] for part in snapshot if tuple(part.get("segment_pool_id", (0, 0))) != (0, 0))
