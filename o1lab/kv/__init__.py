"""Key-value caches: where their memory goes, a pool that wastes little of it, and traffic to try designs with.

``PagePool`` hands out pages, ``PagedCache`` keeps a transformers model's keys and values in them, ``DecodeLoop``
decodes with it, and ``EvictingPool`` moves idle pages to the host and back. ``fragmentation`` measures what any
allocator wastes, ``replay`` and ``compare`` serve the same traffic with several designs. ``python -m o1lab.kv.bench``,
``o1lab.kv.decode_bench``, ``o1lab.kv.writeback_bench`` and ``o1lab.kv.faults`` print figures of this machine.
"""

from __future__ import annotations

import importlib
from typing import Any

# Now, or importing the submodule later would replace the function of the same name by it.
from o1lab.kv.fragmentation import Fragmentation, fragmentation
from o1lab.kv.pool import PagePool, PoolError, PoolExhausted

_LATER = {
    "KVShape": "designs", "Growing": "designs", "Static": "designs", "Modelled": "backing", "OnDevice": "backing",
    "Paged": "designs", "Traffic": "traffic", "Request": "traffic", "TrafficError": "traffic",
    "long_cot": "traffic", "from_file": "traffic_files", "from_log": "traffic_files", "Outcome": "replay",
    "PagedCache": "paged_cache", "pool_for": "layout", "register": "paged_attention", "DecodeLoop": "decode_loop",
    "joined": "compiled",
    "as_trace": "replay", "needed_bytes": "compare", "inserts": "insertion",
    "EvictingPool": "eviction", "EvictionRefused": "eviction", "Policy": "ranking", "host_pool": "lane",
    "CopyFailed": "lane", "DamagedCopy": "tiers", "Offloading": "offload", "compare_policies": "offload",
}  # fmt: skip

__all__ = ["Fragmentation", "PagePool", "PoolError", "PoolExhausted", "fragmentation"]
__all__ += list(_LATER)


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_LATER[name]}"), name)
