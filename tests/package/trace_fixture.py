"""A trace as the dictionary that torch's snapshot would be, from any entry on."""

from __future__ import annotations

from o1lab.memory import trace as t


def as_snapshot(trace: t.Trace, first: int = 0, pools: bool = True) -> dict:
    """``trace`` without its first entries, in the form of ``torch.cuda.memory._snapshot``."""
    entries = []
    for row in range(first, len(trace)):
        entry = {"action": t.ACTIONS[trace.action[row]], "addr": int(trace.address[row]), "size": int(trace.size[row])}
        entry |= {"stream": int(trace.stream[row]), "time_us": int(trace.time_us[row])}
        if pools:
            entry["pool_id"] = trace.pools[trace.pool[row]]
        entries.append(entry)
    segments = []
    for segment in trace.end_segments:
        begin, end = int(segment["address"]), int(segment["address"] + segment["size"])
        inside = trace.end_blocks[(trace.end_blocks["address"] >= begin) & (trace.end_blocks["address"] < end)]
        blocks, at = [], begin
        for block in sorted(inside.tolist()):
            address, size, _, requested, _, waiting, _ = block
            if address > at:
                blocks.append({"address": at, "size": address - at, "requested_size": 0, "state": "inactive"})
            state = "active_awaiting_free" if waiting else "active_allocated"
            blocks.append({"address": address, "size": size, "requested_size": requested, "state": state})
            at = address + size
        if at < end:
            blocks.append({"address": at, "size": end - at, "requested_size": 0, "state": "inactive"})
        segments.append(
            {
                "device": 0, "address": begin, "total_size": end - begin, "stream": int(segment["stream"]),
                "segment_type": "large" if segment["large"] else "small", "is_expandable": bool(segment["expandable"]),
                "segment_pool_id": trace.pools[segment["pool"]], "blocks": blocks,
            }
        )  # fmt: skip
    return {"segments": segments, "device_traces": [entries], "allocator_settings": dict(trace.settings)}
