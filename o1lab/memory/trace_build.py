"""Columns out of a snapshot's dictionaries: checks every field, and works out the blocks at the start backwards."""

from __future__ import annotations

import io
import json
import lzma
import os
import zipfile
from collections.abc import Mapping
from typing import Any

import numpy as np

from o1lab.memory import trace as t
from o1lab.memory.allocator_settings import Settings, SettingsError
from o1lab.memory.snapshot_file import MOST_BYTES, MOST_CONTAINERS, TraceFileError
from o1lab.memory.trace_start import Backwards

_CODES = {name: code for code, name in enumerate(t.ACTIONS)}
_TORCH = ("/torch/", "\\torch\\")
HOW_TO_RECORD = (
    "record one with o1lab.memory.trace.record(), or with torch.cuda.memory._record_memory_history() before the work "
    "and _dump_snapshot(path) after it"
)


class _Names:
    """Texts or pool ids by number, in the order in which they come."""

    def __init__(self, *first: Any) -> None:
        self.number = {value: index for index, value in enumerate(first)}

    def __call__(self, value: Any) -> int:
        return self.number.setdefault(value, len(self.number))


def built(snapshot: Mapping[str, Any], device: int | None, max_entries: int | None, capacity: int | None) -> t.Trace:
    """See :func:`o1lab.memory.trace.from_snapshot`."""
    if not isinstance(snapshot, dict) or not isinstance(snapshot.get("device_traces"), list):
        raise TraceFileError("this is no memory snapshot: it has no list 'device_traces'")
    traces, segments = snapshot["device_traces"], snapshot.get("segments")
    if not isinstance(segments, list) or not all(isinstance(entries, list) for entries in traces):
        raise TraceFileError("this is no memory snapshot: 'segments' and each of 'device_traces' must be lists")
    used = [number for number, entries in enumerate(traces) if entries]
    if device is None:
        if len(used) > 1:
            raise TraceFileError(f"entries of devices {used}: name one with device=")
        device = used[0] if used else 0
    elif not 0 <= device < len(traces):
        there = ", ".join(map(str, range(len(traces)))) or "none"
        raise TraceFileError(f"no device {device} in this snapshot; devices there: {there}; with entries: {used}")
    entries = traces[device] if device < len(traces) else []
    pools, sites = _Names((0, 0)), _Sites()
    columns = _columns(entries, pools, sites)
    own = [_checked(segment, dict, "segments") for segment in segments]
    own = [segment for segment in own if _get(segment, "device", int, device) == device]
    end_segments, end_blocks = _end(own, pools, sites)
    notes: list[str] = []
    if not entries and max_entries is not None:
        notes.append(f"nothing was allocated or freed on device {device} while the history was on")
    elif not entries:
        others = f" (entries of devices {used})" if used else ""
        notes.append(f"no history was recorded for device {device}{others}, so every figure is 0: {HOW_TO_RECORD}")
    settings = _plain_settings(snapshot.get("allocator_settings"))
    state = Backwards(end_segments, end_blocks, _recorded(settings))
    state.run(columns, pools)
    if (columns["pool"] < 0).any():
        notes.append(
            "this torch records no pool per entry: pools are those of the segments left at the end; blocks in segments "
            "given back before count to the default pool, unless a free segment of that was spared"
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
        settings=settings, capacity_bytes=capacity,
        overflowed=overflowed, notes=tuple(notes), device=device,
    )  # fmt: skip


def _get(mapping: Any, name: str, kind: type, default: Any) -> Any:
    """The value, if it is of that very kind: nothing else of the file is ever hashed, printed or converted."""
    value = mapping.get(name, default) if isinstance(mapping, dict) else default
    return value if type(value) is kind else default


def _int(mapping: dict[str, Any], name: str, least: int = -(2**62), most: int = 2**62) -> int:
    value = mapping.get(name)
    if type(value) is not int or not least <= value <= most:
        raise TraceFileError(f"{name!r} is no whole number from {least} to {most} in an entry ({type(value).__name__})")
    return value


def _size(mapping: dict[str, Any], name: str) -> int:
    """Bytes, at most 1 TiB: sums of any number of them stay in 64 bits."""
    return _int(mapping, name, 0, 2**40)


def _checked(value: Any, kind: type, where: str) -> Any:
    if type(value) is not kind:
        raise TraceFileError(f"{where} holds a {type(value).__name__} where a snapshot has a {kind.__name__}")
    return value


def _plain_settings(settings: Any) -> dict[str, Any]:
    """Numbers and short texts, and one level of dictionaries of them (``roundup_power2_divisions``)."""
    kept = {}
    for name, value in list(settings.items())[:100] if isinstance(settings, dict) else []:
        inner = value.items() if type(value) is dict else ()
        if _scalar(value) or (inner and len(inner) <= 64 and all(_scalar(number) for _, number in inner)):
            kept[name] = value
    return kept


def _recorded(settings: dict[str, Any]) -> Settings:
    try:
        return Settings.recorded(settings)
    except (
        SettingsError,
        AttributeError,
        TypeError,
        ValueError,
    ):  # of a form that no torch writes: sizes as by default
        return Settings()


def _scalar(value: Any) -> bool:
    return type(value) in (int, float, bool) or (type(value) is str and len(value) < 10_000)


def _pool(value: Any) -> tuple[int, int]:
    if type(value) not in (tuple, list) or len(value) != 2 or not all(type(part) is int for part in value):
        raise TraceFileError("a pool id is not two whole numbers")
    return (value[0], value[1])


class _Sites:
    """Number of the first frame outside torch; stacks are shared between entries, so each is looked at once."""

    def __init__(self) -> None:
        self.names, self._seen = _Names(), {}

    def __call__(self, frames: Any) -> int:
        if type(frames) not in (list, tuple) or not frames:
            return -1
        key = id(frames[0]), len(frames), id(frames[-1])
        if key not in self._seen:
            self._seen[key] = self.names(self._name(frames)), frames  # kept, so that the ids stay taken
        return self._seen[key][0]

    @staticmethod
    def _name(frames: Any) -> str:
        chosen, emptied = None, ""
        for frame in frames[:200]:
            file, called = _get(frame, "filename", str, "")[-400:], _get(frame, "name", str, "")[:100]
            if called == "empty_cache":
                emptied = " (empty_cache)"  # the one release that the program asked for itself
            if chosen is None or any(part in chosen[0] for part in _TORCH) or chosen[0] == "??":
                chosen = (file, f"{t.relative(file)[:90]}:{_get(frame, 'line', int, 0)} {called}")
        return chosen[1] + emptied if chosen else "?"


def _columns(entries: list[Any], pools: _Names, sites: _Sites) -> dict[str, np.ndarray]:
    columns = {name: np.zeros(len(entries), code) for name, code in t.COLUMNS.items()}
    action, address, size, stream, time_us, pool, site = columns.values()
    for row, entry in enumerate(entries):
        code = _CODES.get(_get(_checked(entry, dict, "a trace"), "action", str, ""))
        if code is None:
            raise TraceFileError(f"entry {row} of the trace has no action that torch knows")
        action[row] = code
        address[row] = _int(entry, "device_free" if code == t.OOM and "addr" not in entry else "addr")
        size[row], stream[row] = _size(entry, "size"), _int(entry, "stream")
        time_us[row] = _int(entry, "time_us") if "time_us" in entry else 0
        pool_id = entry.get("pool_id", entry.get("segment_pool_id"))
        pool[row] = -1 if pool_id is None else pools(_pool(pool_id))
        site[row] = sites(entry.get("frames"))
    return columns


def _end(segments: list[dict[str, Any]], pools: _Names, sites: _Sites) -> tuple[np.ndarray, np.ndarray]:
    rows, blocks = [], []
    insides = [_checked(segment.get("blocks"), list, "a segment's 'blocks'") for segment in segments]
    if sum(map(len, insides)) > MOST_CONTAINERS:  # they may be one list, shared
        raise TraceFileError(f"the segments hold more than {MOST_CONTAINERS} blocks")
    for segment, inside in zip(segments, insides, strict=True):
        pool = pools(_pool(segment.get("segment_pool_id", (0, 0))))
        address, stream = _int(segment, "address"), _int(segment, "stream")
        large, expandable = _get(segment, "segment_type", str, "") == "large", segment.get("is_expandable") is True
        rows.append((address, _size(segment, "total_size"), stream, pool, large, expandable))
        for block in inside:
            size = _size(_checked(block, dict, "a segment"), "size")
            state = _get(block, "state", str, "")
            if state != "inactive":
                place = _int(block, "address") if "address" in block else address
                asked = _size(block, "requested_size") if "requested_size" in block else size
                waiting, site = state != "active_allocated", sites(block.get("frames"))
                blocks.append((place, size, stream, asked, pool, waiting, site))
            address += size
    return np.array(rows, t.SEGMENT), np.array(blocks, t.BLOCK)


def unpacked(data: bytes, path: str, device: int | None = None) -> t.Trace:
    """Read what :meth:`o1lab.memory.trace.Trace.save` wrote; refuse it if it is another device's than ``device``."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as file:
            if sum(part.file_size for part in file.infolist()) > MOST_BYTES:
                raise TraceFileError(f"{path} would unpack to more than {MOST_BYTES} bytes")
            facts = json.loads(file.read("facts.json"))
            here = facts.get("device")  # files of earlier versions do not say
            if device not in (None, here):
                there = "device not noted in the file" if here is None else f"device {here}"
                raise TraceFileError(f"no device {device} in {path}; it holds one trace, {there}: leave device= out")
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
        names = ("start_segments", "start_blocks", "end_segments", "end_blocks")
        states = {name: arrays[name] for name in names}
        if len({len(column) for column in columns.values()}) != 1 or columns["action"].max(initial=0) >= len(t.ACTIONS):
            raise ValueError("columns of unequal length or unknown actions")
        for name, count in (("pool", len(facts["pools"])), ("site", len(facts["sites"]))):
            if columns[name].max(initial=-1) >= count or columns[name].min(initial=0) < (0 if name == "pool" else -1):
                raise ValueError(f"a {name} that is not listed")
        if (
            columns["size"].min(initial=0) < 0
            or columns["size"].max(initial=0) > 2**40
            or not all(type(site) is str for site in facts["sites"])
        ):
            raise ValueError("sizes out of bounds, or sites that are no text")
        for name, array in states.items():
            if array.dtype != (t.SEGMENT if "segments" in name else t.BLOCK):
                raise ValueError(f"{name} has another form")
        return t.Trace(
            **columns, **states, pools=tuple(_pool(pool) for pool in facts["pools"]), sites=tuple(facts["sites"]),
            settings=dict(facts["settings"]), capacity_bytes=facts["capacity_bytes"],
            overflowed=facts["overflowed"], notes=tuple(facts["notes"]), device=here,
        )  # fmt: skip
    except TraceFileError:
        raise
    except (
        AttributeError, EOFError, IndexError, KeyError, NotImplementedError, OSError, OverflowError, RuntimeError,
        TypeError, ValueError, lzma.LZMAError, zipfile.BadZipFile,
    ) as error:  # fmt: skip
        raise TraceFileError(f"{path} is no trace that Trace.save wrote: {type(error).__name__} {error}") from error
