"""Columns out of a snapshot's dictionaries: checks every field, and works out the blocks at the start backwards."""

from __future__ import annotations

import bisect
import io
import json
import lzma
import os
import zipfile
from collections.abc import Mapping
from typing import Any

import numpy as np

from o1lab.memory import trace as t
from o1lab.memory.snapshot_file import MOST_BYTES, TraceFileError

_CODES = {name: code for code, name in enumerate(t.ACTIONS)}
_TORCH = ("/torch/", "\\torch\\")


class _Names:
    """Texts or pool ids by number, in the order in which they come."""

    def __init__(self, *first: Any) -> None:
        self.number = {value: index for index, value in enumerate(first)}

    def __call__(self, value: Any) -> int:
        return self.number.setdefault(value, len(self.number))


def built(snapshot: Mapping[str, Any], device: int | None, max_entries: int | None, capacity: int | None) -> t.Trace:
    """See :func:`o1lab.memory.trace.from_snapshot`."""
    if not isinstance(snapshot, Mapping) or not isinstance(snapshot.get("device_traces"), list):
        raise TraceFileError("this is no memory snapshot: it has no list 'device_traces'")
    traces, segments = snapshot["device_traces"], snapshot.get("segments")
    if not isinstance(segments, list) or not all(isinstance(entries, list) for entries in traces):
        raise TraceFileError("this is no memory snapshot: 'segments' and each of 'device_traces' must be lists")
    used = [number for number, entries in enumerate(traces) if entries]
    if device is None:
        if len(used) > 1:
            raise TraceFileError(f"entries of devices {used}: name one with device=")
        device = used[0] if used else 0
    entries = traces[device] if 0 <= device < len(traces) else []
    pools, sites = _Names((0, 0)), _Sites()
    columns = _columns(entries, pools, sites)
    own = [_checked(segment, dict, "segments") for segment in segments]
    own = [segment for segment in own if segment.get("device", device) == device]
    end_segments, end_blocks = _end(own, pools, sites)
    settings = snapshot.get("allocator_settings", {})
    notes: list[str] = []
    state = _Backwards(end_segments, end_blocks)
    state.run(columns)
    if (columns["pool"] < 0).any():
        notes.append(
            "this torch records no pool per entry: pools are those of the segments that are left at the end; blocks in "
            "segments given back before are counted to the default pool"
        )
        columns["pool"][:] = np.maximum(np.where(columns["pool"] < 0, state.pools, columns["pool"]), 0)
    start_segments, start_blocks = state.segments(), state.blocks()
    overflowed = None if max_entries is None else len(entries) >= max_entries
    if overflowed:
        notes.append(f"the history is full ({len(entries)} entries): what was done before its first entry is unknown")
    if len(start_blocks):
        total = int(start_blocks["size"].sum())
        notes.append(
            f"{len(start_blocks)} blocks ({total} bytes) were live before the first entry: when and where they were "
            "allocated is unknown, and the rounded size of those freed since is worked out"
            + ("; whether entries were overwritten, this file cannot tell" if overflowed is None else "")
        )
    if state.odd:
        notes.append(f"{state.odd} entries do not fit the blocks at the end (taken while other threads allocated?)")
    return t.Trace(
        **columns, pools=tuple(pools.number), sites=tuple(sites.names.number), start_segments=start_segments,
        end_segments=end_segments, start_blocks=start_blocks, end_blocks=end_blocks,
        settings=dict(settings) if isinstance(settings, Mapping) else {}, capacity_bytes=capacity,
        overflowed=overflowed, notes=tuple(notes),
    )  # fmt: skip


def _get(mapping: Any, name: str, default: Any) -> Any:
    return mapping.get(name, default) if isinstance(mapping, Mapping) else default


def _checked(value: Any, kind: type, where: str) -> Any:
    if not isinstance(value, kind) or (kind is int and not -(2**63) <= value < 2**63):
        raise TraceFileError(f"{where} holds {str(value)[:40]!r} where a snapshot has {kind.__name__}")
    return value


def _pool(value: Any) -> tuple[int, int]:
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        raise TraceFileError(f"a pool id is {str(value)[:40]!r}; a snapshot has two numbers")
    return (_checked(value[0], int, "pool id"), _checked(value[1], int, "pool id"))


class _Sites:
    """Number of the first frame outside torch; stacks are shared between entries, so each is looked at once."""

    def __init__(self) -> None:
        self.names, self._seen = _Names(), {}

    def __call__(self, frames: Any) -> int:
        if not isinstance(frames, (list, tuple)) or not frames:
            return -1
        key = id(frames[0]), len(frames), id(frames[-1])
        if key not in self._seen:
            self._seen[key] = self.names(self._name(frames)), frames  # kept, so that the ids stay taken
        return self._seen[key][0]

    @staticmethod
    def _name(frames: Any) -> str:
        chosen, emptied = None, ""
        for frame in frames[:200]:
            file, line = str(_get(frame, "filename", "")), _get(frame, "line", 0)
            name = f"{t.relative(file)}:{line} {_get(frame, 'name', '')}"[:200]
            if _get(frame, "name", "") == "empty_cache":
                emptied = " (empty_cache)"  # the one release that the program asked for itself
            if chosen is None or any(part in chosen[0] for part in _TORCH) or chosen[0] == "??":
                chosen = (file, name)
        return chosen[1] + emptied if chosen else "?"


def _columns(entries: list[Any], pools: _Names, sites: _Sites) -> dict[str, np.ndarray]:
    columns = {name: np.zeros(len(entries), code) for name, code in t.COLUMNS.items()}
    action, address, size, stream, time_us, pool, site = columns.values()
    for row, entry in enumerate(entries):
        try:
            code = _CODES[entry["action"]]
            action[row] = code
            address[row] = entry["device_free"] if code == t.OOM and "addr" not in entry else entry["addr"]
            size[row], stream[row] = entry["size"], entry["stream"]
            time_us[row] = entry.get("time_us", 0)
            pool_id = entry.get("pool_id", entry.get("segment_pool_id"))
            pool[row] = -1 if pool_id is None else pools(_pool(pool_id))
            site[row] = sites(entry.get("frames"))
        except (AttributeError, KeyError, TypeError, ValueError, OverflowError) as error:
            raise TraceFileError(
                f"entry {row} of the trace has another form: {type(error).__name__} {error}"
            ) from error
    return columns


def _end(segments: list[dict[str, Any]], pools: _Names, sites: _Sites) -> tuple[np.ndarray, np.ndarray]:
    rows, blocks = [], []
    for segment in segments:
        try:
            pool = pools(_pool(segment.get("segment_pool_id", (0, 0))))
            address, stream = segment["address"], segment["stream"]
            large, expandable = segment["segment_type"] == "large", bool(segment.get("is_expandable", False))
            rows.append((address, segment["total_size"], stream, pool, large, expandable))
            for block in segment["blocks"]:
                if block["state"] != "inactive":
                    waiting = block["state"] != "active_allocated"
                    place, size = block.get("address", address), block["size"]
                    asked = block.get("requested_size", size)
                    blocks.append((place, size, asked, stream, pool, waiting, sites(block.get("frames"))))
                address += block["size"]
        except (AttributeError, KeyError, TypeError, ValueError, OverflowError) as error:
            raise TraceFileError(f"a segment has another form: {type(error).__name__} {error}") from error
    try:
        return np.array(rows, t.SEGMENT), np.array(blocks, t.BLOCK)
    except (TypeError, ValueError, OverflowError) as error:
        raise TraceFileError(f"segments hold values of another kind: {error}") from error


class _Backwards:
    """Undo the entries from the last to the first: from the blocks at the end to the blocks at the start."""

    def __init__(self, segments: np.ndarray, blocks: np.ndarray) -> None:
        self._rows = {int(row["address"]): list(row.tolist()) for row in segments}
        self._order = sorted(self._rows)
        self._live = {int(row["address"]): list(row.tolist()) for row in blocks}
        self._sure = set(self._live)
        self.odd = 0
        self.pools = np.zeros(0, "i4")

    def _at(self, address: int) -> list[Any] | None:
        spot = bisect.bisect_right(self._order, address) - 1
        row = self._rows[self._order[spot]] if spot >= 0 else None
        return row if row is not None and address < row[0] + row[1] else None

    def _add(self, address: int, size: int, stream: int, pool: int, expandable: bool) -> None:
        if address in self._rows:
            self.odd += 1
            return
        row = [address, size, stream, pool, size > 2 << 20, expandable]
        if expandable:  # what is mapped side by side is one range: a mapping may have covered several unmappings
            for beside in (self._at(address - 1), self._at(address + size)):
                if beside is not None and beside[5] and beside[2] == stream:
                    row = [min(row[0], beside[0]), row[1] + beside[1], *beside[2:]]
                    del self._rows[beside[0]], self._order[bisect.bisect_left(self._order, beside[0])]
        self._rows[row[0]] = row
        bisect.insort(self._order, row[0])

    def _remove(self, address: int, size: int) -> None:
        row = self._at(address)
        if row is None or address + size > row[0] + row[1]:
            self.odd += 1
            return
        begin, end = row[0], row[0] + row[1]
        del self._rows[begin], self._order[bisect.bisect_left(self._order, begin)]
        for left, right in ((begin, address), (address + size, end)):  # of an expandable segment a part is mapped
            if right > left:
                self._rows[left] = [left, right - left, *row[2:]]
                bisect.insort(self._order, left)

    def run(self, columns: dict[str, np.ndarray]) -> None:
        live, self.pools = self._live, np.zeros(len(columns["action"]), "i4")
        rows = list(zip(*(columns[name].tolist() for name in t.COLUMNS), strict=True))
        for index in range(len(rows) - 1, -1, -1):
            action, address, size, stream, _, pool, site = rows[index]
            segment = self._at(address)
            self.pools[index] = pool = (segment[3] if segment else 0) if pool < 0 else pool
            if action == t.ALLOC:
                self.odd += live.pop(address, None) is None
                self._sure.discard(address)
            elif action == t.FREE_COMPLETED:
                live[address] = [address, 0, size, stream, pool, True, site]
                self._sure.discard(address)
            elif action == t.FREE_REQUESTED:
                if address in live:
                    live[address][5] = False
                else:
                    self.odd += 1
            elif action in (t.SEGMENT_ALLOC, t.SEGMENT_MAP):
                self._remove(address, size)
            elif action in (t.SEGMENT_FREE, t.SEGMENT_UNMAP):
                self._add(address, size, stream, pool, action == t.SEGMENT_UNMAP)

    def segments(self) -> np.ndarray:
        return np.array([tuple(self._rows[address]) for address in self._order], t.SEGMENT)

    def blocks(self) -> np.ndarray:
        rows = sorted(self._live.values())
        for row, after in zip(rows, [*rows[1:], None], strict=False):
            if row[0] in self._sure:
                continue
            segment = self._at(row[0])
            row[1] = max(512, -(-row[2] // 512) * 512)
            if segment is not None:
                end = segment[0] + segment[1]
                gap = (min(end, after[0]) if after else end) - row[0] - row[1]
                if 0 < gap <= (1 << 20) and segment[4] and not segment[5]:
                    row[1] += gap  # a rest this small would not have been split off
                row[4] = segment[3]
        return np.array([tuple(row) for row in rows], t.BLOCK)


def unpacked(data: bytes, path: str) -> t.Trace:
    """Read what :meth:`o1lab.memory.trace.Trace.save` wrote."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as file:
            if sum(part.file_size for part in file.infolist()) > MOST_BYTES:
                raise TraceFileError(f"{path} would unpack to more than {MOST_BYTES} bytes")
            facts = json.loads(file.read("facts.json"))
            arrays = {
                os.path.splitext(name)[0]: np.lib.format.read_array(io.BytesIO(file.read(name)), allow_pickle=False)
                for name in file.namelist()
                if name.endswith(".npy")
            }
        columns: dict[str, np.ndarray] = {}
        for name, code in t.COLUMNS.items():
            if name == "time_us":
                column = np.cumsum(arrays[name].astype("i8")) + facts["begun_us"]
            elif f"{name}.index" in arrays:
                column = np.cumsum(arrays[f"{name}.values"])[arrays[f"{name}.index"]]
            else:
                column = arrays[name]
            columns[name] = column.astype(code)
        states = {f"{when}_{what}": arrays[f"{when}_{what}"] for when in ("start", "end") for what in ("segments", "blocks")}  # fmt: skip
        if len({len(column) for column in columns.values()}) != 1 or columns["action"].max(initial=0) >= len(t.ACTIONS):
            raise ValueError("columns of unequal length or unknown actions")
        for name, array in states.items():
            if array.dtype != (t.SEGMENT if "segments" in name else t.BLOCK):
                raise ValueError(f"{name} has another form")
        return t.Trace(
            **columns, **states, pools=tuple(_pool(pool) for pool in facts["pools"]), sites=tuple(facts["sites"]),
            settings=dict(facts["settings"]), capacity_bytes=facts["capacity_bytes"],
            overflowed=facts["overflowed"], notes=tuple(facts["notes"]),
        )  # fmt: skip
    except TraceFileError:
        raise
    except (
        AttributeError, EOFError, IndexError, KeyError, NotImplementedError, OSError, OverflowError, RuntimeError,
        TypeError, ValueError, lzma.LZMAError, zipfile.BadZipFile,
    ) as error:  # fmt: skip
        raise TraceFileError(f"{path} is no trace that Trace.save wrote: {type(error).__name__} {error}") from error
