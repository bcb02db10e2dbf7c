"""Traces: hostile files refused, form checked, recorded without traces of its own, lifetimes and hazards found."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import gzip
import io
import os
import pickle
import random
import struct
import sys
import time
import zipfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from package.trace_fixture import as_snapshot

from o1lab import plots
from o1lab.errors import ProbeError
from o1lab.memory import lifetimes as life
from o1lab.memory import snapshot_file, trace
from o1lab.memory.courses import KINDS, STREAMS, Course, plant
from o1lab.memory.hazards import Use, Wait, hazards
from o1lab.memory.ranges import Ranges
from o1lab.memory.simulate import simulate
from o1lab.memory.snapshot_file import HostileFile, TraceFileError, plain

FOLDER = Path(__file__).parents[1] / "data" / "traces"


def entry(action, address, time_us, size=100, stream=0, **more):
    return {"action": action, "addr": address, "size": size, "stream": stream, "time_us": time_us, **more}


def of(*entries, segments=(), **more):
    return trace.from_snapshot({"segments": list(segments), "device_traces": [list(entries)], **more})


@pytest.fixture(scope="module")
def recorded():
    return trace.load(FOLDER / "streams-default.npz")


# files


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("packed", [False, True])
def test_a_dumped_snapshot_is_read_whoever_made_it(tmp_path, recorded, protocol, packed):
    path = tmp_path / "snapshot.pickle"
    data = pickle.dumps(as_snapshot(recorded), protocol)
    path.write_bytes(gzip.compress(data, 1) if packed else data)
    found = trace.load(path)
    for name in trace.COLUMNS:
        if name != "site":
            assert np.array_equal(getattr(found, name), getattr(recorded, name))
    assert found.settings == recorded.settings
    assert np.array_equal(found.end_blocks, recorded.end_blocks)


def test_what_was_saved_is_read_back_and_small(tmp_path, recorded):
    path = tmp_path / "trace.npz"
    recorded.save(path)
    found = trace.load(path)
    for field in dataclasses.fields(trace.Trace):
        mine, theirs = getattr(found, field.name), getattr(recorded, field.name)
        assert np.array_equal(mine, theirs) if isinstance(mine, np.ndarray) else mine == theirs
    assert path.stat().st_size < 6 * len(recorded)


def test_a_stack_becomes_a_place_in_the_readers_own_code(tmp_path):
    torch_frame = {"filename": "/lib/site-packages/torch/nn/linear.py", "line": 3, "name": "forward"}
    own = {"filename": "/home/me/serve/loop.py", "line": 41, "name": "step"}
    emptied = [{"filename": "/lib/torch/cuda/memory.py", "line": 1, "name": "empty_cache"}, own]
    found = of(
        entry("alloc", 512, 1, frames=[torch_frame, own]),
        entry("segment_free", 1 << 21, 2, frames=emptied),
        entry("free_requested", 512, 3, frames=[]),
    )
    assert [found.sites[site] for site in found.site[:2]] == ["loop.py:41 step", "loop.py:41 step (empty_cache)"]
    assert found.site[2] == -1
    found.save(tmp_path / "sites.npz")
    assert trace.load(tmp_path / "sites.npz").sites == found.sites


class Runs:
    def __init__(self, function, *arguments):
        self.call = (function, arguments)

    def __reduce__(self):
        return self.call


def test_code_in_a_pickle_is_not_run_but_refused(tmp_path):
    path, witness = tmp_path / "evil.pickle", tmp_path / "witness"
    for protocol in (2, 3, 4, 5):
        evil = {"segments": [], "device_traces": [[Runs(os.system, f"touch {witness}")]]}
        path.write_bytes(pickle.dumps(evil, protocol))
        with pytest.raises(HostileFile, match=r"GLOBAL|REDUCE"):
            trace.load(path)
    assert not witness.exists()


PROTO = b"\x80\x04"
HOSTILE = {
    "global": PROTO + b"cos\nsystem\n.",
    "stack global": PROTO + b"\x8c\x02os\x8c\x06system\x93.",
    "reduce": PROTO + b")R.",
    "build": PROTO + b"}}b.",
    "instance": PROTO + b"(ios\nsystem\n.",
    "object": PROTO + b"(o.",
    "new object": PROTO + b")\x81.",
    "new object with keywords": PROTO + b"))}\x92.",
    "persistent id": PROTO + b"Pname\n.",
    "binary persistent id": PROTO + b"NQ.",
    "extension": PROTO + b"\x82\x01.",
    "huge byte array": b"\x80\x05\x96" + struct.pack("<Q", 1 << 40) + b".",
    "out of band buffer": b"\x80\x05\x97.",
    "huge integer": PROTO + b"\x8b" + struct.pack("<I", 1 << 20) + bytes(1 << 20) + b".",
    "keys that collide": pickle.dumps({(2**61 - 1) * number: 0 for number in range(50)}),
}
DAMAGED = {
    "nothing": b"",
    "text": b"not a pickle at all",
    "protocol 0": pickle.dumps({"segments": []}, 0),
    "protocol 9": b"\x80\x09N.",
    "unset memo": PROTO + b"h\x07.",
    "unset long memo": PROTO + b"j\xff\xff\xff\xff.",
    "huge text": PROTO + b"\x8d" + struct.pack("<Q", 1 << 50) + b"abc.",
    "huge bytes": PROTO + b"\x8e" + struct.pack("<Q", 1 << 62) + b"abc.",
    "huge frame": PROTO + b"\x95" + struct.pack("<Q", 1 << 60) + b"N.",
    "append to a number": PROTO + b"K\x01Na.",
    "items on a list": PROTO + b"](NNu.",
    "odd items": PROTO + b"}(\x8c\x01au.",
    "no mark": PROTO + b"]Ne.",
    "two values": PROTO + b"NN.",
    "open mark": PROTO + b"N(.",
    "bad text": PROTO + b"\x8c\x02\xff\xff.",
    "no stop": PROTO + b"N",
    "empty stack": PROTO + b".",
    "tuple of nothing": PROTO + b"\x86.",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_pickle_is_refused_at_once(name):
    begun = time.perf_counter()
    with pytest.raises(HostileFile):
        plain(HOSTILE[name])
    assert time.perf_counter() - begun < 1


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_pickle_is_refused(name):
    with pytest.raises(TraceFileError):
        plain(DAMAGED[name])


def test_a_memo_index_beyond_all_memory_costs_nothing():
    assert plain(PROTO + b"]r\xff\xff\xff\xffj\xff\xff\xff\xffa.")[0] is not None  # a list that holds itself


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_no_damage_to_a_real_pickle_leads_anywhere_but_to_a_typed_error(data):
    whole = bytearray(pickle.dumps({"segments": [], "device_traces": [[entry("alloc", 1 << 40, 2**50)]] * 2}))
    for _ in range(data.draw(st.integers(1, 6))):
        whole[data.draw(st.integers(2, len(whole) - 1))] = data.draw(st.integers(0, 255))
    whole = whole[: data.draw(st.integers(2, len(whole)))]
    with contextlib.suppress(TraceFileError):
        trace.from_snapshot(plain(bytes(whole)), device=0)


def laughs(depth=40):
    """A value of a few hundred bytes that is 2⁴⁰ values when printed, hashed or converted."""
    value, shared = (), []
    for _ in range(depth):
        value, shared = (value, value), [shared, shared]
    return value, shared


@pytest.mark.parametrize(
    "place", ["addr", "size", "action", "stream", "pool_id", "time_us", "frames", "filename", "line"]
)
def test_a_billion_laughs_are_not_laughed(place):
    begun = time.perf_counter()
    for bomb in laughs():
        bad = entry("alloc", 512, 1)
        if place in ("filename", "line"):
            bad["frames"] = [{"filename": "a.py", "line": 1, "name": "f"} | {place: bomb}]
        else:
            bad[place] = bomb
        snapshot = plain(pickle.dumps({"segments": [], "device_traces": [[bad]], "allocator_settings": {"a": bomb}}))
        if place in ("filename", "line", "frames"):
            assert len(trace.from_snapshot(snapshot)) == 1
        else:
            with pytest.raises(TraceFileError):
                trace.from_snapshot(snapshot)
    assert time.perf_counter() - begun < 2


def test_shared_segments_cannot_multiply():
    blocks = [{"size": 512, "state": "active_allocated", "address": 512 * n} for n in range(3000)]
    segment = {"address": 0, "total_size": 1, "stream": 0, "segment_type": "small", "blocks": blocks}
    snapshot = plain(pickle.dumps({"segments": [segment] * 3000, "device_traces": [[]]}))
    with pytest.raises(TraceFileError, match="blocks"):
        trace.from_snapshot(snapshot)


def test_limits_hold(tmp_path, monkeypatch):
    monkeypatch.setattr(snapshot_file, "MOST_CONTAINERS", 1000)
    with pytest.raises(HostileFile, match="1000 containers"):
        plain(PROTO + b"]" * 1001 + b".")
    monkeypatch.setattr(snapshot_file, "MOST_STEPS", 1000)
    with pytest.raises(HostileFile):
        plain(PROTO + b"(" + b"N" * 1001 + b"t.")
    path = tmp_path / "bomb.gz"
    path.write_bytes(gzip.compress(bytes(1 << 24)))
    with pytest.raises(TraceFileError, match="more than 1000000 bytes"):
        snapshot_file.read_bytes(path, most=1_000_000)


@pytest.mark.parametrize("damage", ["missing", "truncated", "gzip", "zip", "array", "facts", "pickled"])
def test_a_file_that_is_no_trace_is_refused(tmp_path, recorded, damage):
    path = tmp_path / "trace"
    recorded.save(path)
    data = path.read_bytes()
    if damage == "missing":
        path.unlink()
    elif damage == "truncated":
        path.write_bytes(pickle.dumps(as_snapshot(recorded))[:-1000])
    elif damage == "gzip":
        path.write_bytes(gzip.compress(data)[:-30])
    elif damage == "zip":
        path.write_bytes(data[: len(data) // 2])
    else:
        with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(path, "w") as new:
            for name in old.namelist():
                part = old.read(name)
                if damage == "array" and name == "action.npy":
                    part = part[:-100]
                if damage == "facts" and name == "facts.json":
                    part = part.replace(b'"pools": [', b'"pools": [7, ')
                if damage == "pickled" and name == "action.npy":
                    buffer = io.BytesIO()
                    np.save(buffer, np.array([Runs(os.system, "true")], object), allow_pickle=True)
                    part = buffer.getvalue()
                new.writestr(name, part)
    with pytest.raises(TraceFileError):
        trace.load(path)


@pytest.mark.parametrize(
    "snapshot",
    [
        [],
        {},
        {"device_traces": {}},
        {"device_traces": [[]], "segments": {}},
        {"device_traces": [1], "segments": []},
        {"device_traces": [[1]], "segments": []},
        {"device_traces": [[{"action": "dance"}]], "segments": []},
        {"device_traces": [[entry("alloc", "512", 1)]], "segments": []},
        {"device_traces": [[entry("alloc", 512, 1, size=-1)]], "segments": []},
        {"device_traces": [[entry("alloc", 1 << 70, 1)]], "segments": []},
        {"device_traces": [[entry("alloc", 512, 1.5)]], "segments": []},
        {"device_traces": [[entry("alloc", 512, 1, pool_id=(1, 2, 3))]], "segments": []},
        {"device_traces": [[]], "segments": [{}]},
        {"device_traces": [[]], "segments": [7]},
        {"device_traces": [[entry("alloc", 512, 1)], [entry("alloc", 512, 1)]], "segments": []},
    ],
)
def test_a_dictionary_of_another_form_is_refused(snapshot):
    with pytest.raises(TraceFileError):
        trace.from_snapshot(snapshot)


def test_one_of_several_devices_is_read():
    snapshot = {"device_traces": [[entry("alloc", 512, 1)], [entry("alloc", 512, 1)] * 2], "segments": []}
    assert len(trace.from_snapshot(snapshot, device=1)) == 2
    assert trace.from_snapshot(snapshot, device=1).device == 1


@pytest.mark.parametrize("device", [2, 5, -1])
def test_a_device_that_is_not_there_is_refused_and_those_there_are_named(device):
    snapshot = {"device_traces": [[], [entry("alloc", 512, 1)]], "segments": []}
    with pytest.raises(TraceFileError, match=f"no device {device} in this snapshot; devices there: 0, 1; .*: \\[1\\]"):
        trace.from_snapshot(snapshot, device=device)


def test_a_saved_trace_holds_one_device_and_refuses_another(tmp_path, recorded):
    path = tmp_path / "x.trace"
    of(entry("alloc", 512, 1)).save(path)
    assert trace.load(path).device == trace.load(path, device=0).device == 0
    with pytest.raises(TraceFileError, match=r"no device 5 in .*x\.trace; it holds one trace, device 0"):
        trace.load(path, device=5)
    dataclasses.replace(recorded, device=None).save(path)  # as written before the number was noted
    with pytest.raises(TraceFileError, match="device not noted in the file: leave device= out"):
        trace.load(path, device=0)


def test_a_snapshot_without_history_says_so_and_how_to_record_one(monkeypatch):
    block = {"size": 512, "state": "active_allocated", "address": 512}
    segment = {"address": 512, "total_size": 2 << 20, "stream": 0, "segment_type": "small", "blocks": [block]}
    snapshot = {"segments": [segment], "device_traces": [[], [entry("alloc", 512, 1)]]}
    found = trace.from_snapshot(snapshot, device=0)
    lives = life.lifetimes(found)
    for view in (str(simulate(found)), str(lives)):
        assert r"no history was recorded for device 0 (entries of devices [1])" in view
        assert "trace.record()" in view
        assert "_record_memory_history()" in view
    assert life.figure(lives).layout.title.text.startswith("No history was recorded for device 0")
    FakeCuda(monkeypatch).snapshot = None
    monkeypatch.setattr("torch.cuda.memory._snapshot", lambda: {"segments": [], "device_traces": [[]]})
    with trace.record() as recording:
        pass
    assert recording.trace.notes == ("nothing was allocated or freed on device 0 while the history was on",)


# recording


class FakeCuda:
    """Stands in for the parts of torch.cuda that :func:`record` touches."""

    def __init__(self, monkeypatch, on=False, fraction=1.0):
        import torch

        self.calls, self.on = [], on
        facts = collections.namedtuple("Facts", "total_memory")(1000)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "init", lambda: None)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: facts)
        monkeypatch.setattr(torch.cuda.memory, "get_per_process_memory_fraction", lambda device: fraction)
        monkeypatch.setattr(torch._C, "_cuda_isHistoryEnabled", lambda: self.on, raising=False)
        monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", self.switch)
        monkeypatch.setattr(torch.cuda.memory, "_snapshot", self.snapshot)

    def switch(self, enabled, **facts):
        self.calls.append((enabled, facts))
        self.on = enabled is not None

    def snapshot(self):
        assert self.on
        return {"segments": [], "device_traces": [[entry("alloc", 512, 1), entry("alloc", 1024, 2)]]}


def test_recording_is_bounded_and_off_again(monkeypatch):
    fake = FakeCuda(monkeypatch, fraction=0.25)
    with trace.record(max_entries=2) as recording:
        assert fake.on
        with pytest.raises(ProbeError, match="after the with block"):
            _ = recording.trace
    assert not fake.on
    assert fake.calls[0][1]["max_entries"] == 2
    assert (len(recording.trace), recording.trace.overflowed, recording.trace.capacity_bytes) == (2, True, 250)
    assert "the history is full" in " ".join(recording.trace.notes)


def test_recording_is_off_after_an_exception_and_keeps_what_was_seen(monkeypatch):
    fake = FakeCuda(monkeypatch)
    with pytest.raises(ZeroDivisionError), trace.record(stacks=None) as recording:
        1 / 0  # noqa: B018
    assert not fake.on
    assert fake.calls[0][1]["context"] is None
    assert len(recording.trace) == 2


def test_the_history_of_somebody_else_is_left_alone(monkeypatch):
    fake = FakeCuda(monkeypatch, on=True)
    with pytest.raises(ProbeError, match="on already"), trace.record():
        pass
    assert fake.on
    assert fake.calls == []


@pytest.mark.parametrize("facts", [{"stacks": "all"}, {"max_entries": 0}])
def test_recording_with_senseless_arguments_is_refused(facts):
    with pytest.raises(ProbeError, match="stacks"), trace.record(**facts):
        pass


def test_importing_the_package_does_not_import_torch():
    import subprocess

    code = (
        "import sys, o1lab.memory.trace, o1lab.memory.simulate, o1lab.memory.hazards; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# beginnings


@pytest.mark.parametrize("cut", [1, 500, 3000, 9000])
def test_what_was_live_at_the_start_is_worked_out_from_the_end(recorded, cut):
    live, segments = {}, 0
    for row in range(cut):
        action, address = trace.ACTIONS[recorded.action[row]], int(recorded.address[row])
        if action == "alloc":
            live[address] = (int(recorded.size[row]), False)
        elif action == "free_requested":
            live[address] = (live[address][0], True)
        elif action == "free_completed":
            del live[address]
        segments += action == "segment_alloc"
    part = trace.from_snapshot(as_snapshot(recorded, cut))
    blocks = part.start_blocks
    assert {int(b["address"]): (int(b["requested"]), bool(b["waiting"])) for b in blocks} == live
    assert len(part.start_segments) == segments
    assert not live or any(f"{len(live)} blocks" in note and "before the first entry" in note for note in part.notes)
    lives = life.lifetimes(part)
    assert lives.before == len(live)
    assert lives.frees_without_block == 0
    assert not [hazard for hazard in hazards(part) if hazard.severity == "error"]


def test_a_clean_beginning_has_no_such_note(recorded):
    whole = trace.from_snapshot(as_snapshot(recorded))
    assert (len(whole.start_blocks), len(whole.start_segments), whole.notes) == (0, 0, ())


# lifetimes


def test_lifetimes_pair_by_pool_stream_and_address():
    lives = life.lifetimes(
        of(
            entry("alloc", 512, 10),
            entry("alloc", 1024, 20, size=7, stream=3),
            entry("free_requested", 512, 50),
            entry("free_completed", 512, 50),
            entry("alloc", 512, 60, size=200),
            entry("free_requested", 1024, 70, size=7, stream=3),
            entry("alloc", 4096, 90),
            entry("free_completed", 1024, 170, size=7, stream=3),
            entry("free_requested", 9999, 200),
            entry("free_requested", 512, 210, size=200, stream=5),
        )
    )
    assert lives.lived_us.tolist() == [40, 50, 150, 120]
    assert lives.parked.tolist() == [False, True, False, False]
    assert lives.parked_us.tolist() == [0, 100, 0, 0]
    assert (lives.never_freed, lives.never_completed, lives.frees_without_block, lives.before) == (2, 0, 2, 0)
    assert dataclasses.astuple(lives.parking) == (1, 700, 100, 7)
    assert "4 blocks" in str(lives)


def test_every_recorded_allocation_is_paired(recorded):
    lives = life.lifetimes(recorded)
    counts = collections.Counter(trace.ACTIONS[code] for code in recorded.action.tolist())
    assert len(lives) == counts["alloc"]
    assert (lives.frees_without_block, lives.never_freed) == (0, 0)
    assert lives.never_completed == counts["free_requested"] - counts["free_completed"] == 30
    assert lives.parking.blocks == 65  # record_stream beside a slow kernel
    assert lives.parking.bytes_us > 0


# hazards


@pytest.mark.parametrize("kind", KINDS)
def test_ten_planted_hazards_of_each_kind_are_found_and_nothing_else(kind):
    for seed in range(10):
        rng, course = random.Random(seed), Course()
        course.steps(rng, rng.randrange(60))
        address = plant(course, kind, rng)
        if kind == "never freed":  # its block stays; all others end as they should
            course.steps(rng, rng.randrange(20))
        found = hazards(course.finish(), **course.marks())
        assert [(hazard.kind, hazard.address, hazard.severity) for hazard in found if hazard.kind == kind][:1] == [
            (kind, address, KINDS[kind])
        ], (kind, seed, found)
        assert {hazard.kind for hazard in found} == {kind}, (kind, seed, found)
        assert f"{kind} at {address:#x}" in str(found[0])


@settings(max_examples=80, deadline=None)
@given(st.integers(0, 2**32), st.integers(0, 150))
def test_a_right_course_raises_no_alarm(seed, count):
    course = Course()
    course.steps(random.Random(seed), count)
    assert hazards(course.finish(), **course.marks()) == []


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.npz")), ids=lambda path: path.stem)
def test_recorded_workloads_raise_no_alarm(path):
    found = hazards(trace.load(path))
    assert {hazard.severity for hazard in found} <= {"note"}


def reuse(*marks, recorded=False):
    """A block of stream 0 is used on stream 7, freed, and given out again to stream 0 (entry at 100 µs)."""
    entries = [entry("alloc", 512, 1), entry("free_requested", 512, 20), entry("free_completed", 512, 40)]
    uses = [Use(7, 512, 100, 10, recorded=recorded), *(mark for mark in marks if isinstance(mark, Use))]
    waits = [Wait(7, 0, 5), *(mark for mark in marks if isinstance(mark, Wait))]
    found = hazards(of(*entries, entry("alloc", 512, 100)), uses=uses, waits=waits)
    return [hazard.kind for hazard in found if hazard.severity == "error"]


def test_which_orders_make_a_reuse_safe():
    assert reuse() == ["reuse race"]
    assert reuse(Wait(0, 7, 15)) == []  # the allocating stream waited before the free
    assert reuse(Wait(0, 7, 60)) == []  # or before the reuse
    assert reuse(Wait(0, 7, 110), Use(0, 512, 100, 120)) == []  # or before its first work, which is what counts
    assert reuse(Wait(0, 7, 110)) == ["reuse race"]  # with no work marked, the allocation stands for it
    assert reuse(Wait(0, 7, 110), Use(0, 512, 100, 105)) == ["reuse race"]
    assert reuse(Wait(None, 7, 60)) == []  # the host waited for the stream
    assert reuse(Wait(None, None, 60)) == []
    assert reuse(Wait(None, 3, 60)) == ["reuse race"]  # for another one
    assert reuse(Wait(0, 7, 60, recorded_us=8)) == ["reuse race"]  # for an event before the work
    assert reuse(Wait(0, 7, 60, recorded_us=12)) == []
    assert reuse(Wait(3, 7, 60), Wait(0, 3, 70)) == []  # by way of a third stream
    assert reuse(Wait(0, 3, 60), Wait(3, 7, 70)) == ["reuse race"]  # in the wrong order
    assert reuse(recorded=True) == []  # record_stream: the allocator waits


def test_reads_of_one_block_need_no_order_between_them():
    base = of(entry("alloc", 512, 1))

    def errors(*uses):
        return [h.kind for h in hazards(base, uses=uses) if h.severity == "error"]

    assert errors(Use(0, 512, 10, 2, writes=False), Use(7, 512, 10, 3, writes=False)) == []
    assert errors(Use(0, 512, 10, 2, writes=False), Use(7, 512, 10, 3)) == ["unordered use"]


def test_captures_given_are_used_instead_of_the_inferred():
    entries = [
        entry("alloc", 512, 10, pool_id=(0, 1)),
        entry("free_requested", 512, 30, pool_id=(0, 1)),
        entry("free_completed", 512, 30, pool_id=(0, 1)),
    ]
    assert [h.kind for h in hazards(of(*entries))] == ["freed outside the capture"]
    assert hazards(of(*entries), captures=[((0, 1), 5, 40)]) == []


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 40), st.integers(1, 12)), max_size=40))
def test_ranges_are_a_set(steps):
    ranges, truth = Ranges(), set()
    for add, begin, size in steps:
        cells = set(range(begin, begin + size))
        (ranges.add if add else ranges.remove)(begin, begin + size)
        truth = truth | cells if add else truth - cells
        for left, right in ((0, 1), (3, 9), (10, 30), (begin, begin + size)):
            assert ranges.covers(left, right) == (set(range(left, right)) <= truth)
            assert ranges.overlaps(left, right) == bool(set(range(left, right)) & truth)


# contradictions


def nonsense(seed):
    """Entries and segments of the right form that no allocator would write."""
    rng = random.Random(seed)
    places = [512 * rng.randrange(1, 12) + (rng.randrange(3) << 21) for _ in range(8)]
    entries = []
    for _ in range(rng.randrange(30)):
        action = rng.choice(trace.ACTIONS)
        one = entry(
            action, rng.choice(places), rng.randrange(10), rng.choice([0, 512, 5 << 20, 2**40]), rng.choice([0, 5])
        )
        if rng.random() < 0.3:
            one["pool_id"] = (0, rng.randrange(2))
        if action.startswith("segment"):
            one |= {"addr": rng.randrange(3) << 21, "size": 2 << 20}
        entries.append(one)
    states = ["inactive", "active_allocated", "active_awaiting_free"]

    def block():
        return {"size": 512 * rng.randrange(1, 9), "state": rng.choice(states)}

    segments = [
        {
            "address": number << 21, "total_size": 2 << 20, "stream": 0, "is_expandable": rng.random() < 0.3,
            "segment_type": rng.choice(["small", "large"]), "blocks": [block() for _ in range(rng.randrange(4))],
        }
        for number in range(rng.randrange(3))
    ]  # fmt: skip
    return of(*entries, segments=segments, allocator_settings={"expandable_segments": rng.random() < 0.3})


def test_traces_that_contradict_themselves_end_in_a_result_or_a_typed_error():
    ends = collections.Counter()
    for seed in range(160):
        found = nonsense(seed)
        hazards(found)
        lives = life.lifetimes(found)
        if seed % 40 == 0:
            plots.check(life.figure(lives))
        for changes in ({}, {"expandable_segments": True}, {"max_split_size_mb": 64, "capacity_bytes": 64 << 20}):
            try:
                str(simulate(found, **changes))
                ends["replayed"] += 1
            except ProbeError as error:
                assert "contradicts itself" in str(error)  # noqa: PT017
                ends["refused"] += 1
    assert ends["replayed"] > ends["refused"] > 0


# the figure


def cut(whole, count):
    return dataclasses.replace(whole, **{name: getattr(whole, name)[:count] for name in trace.COLUMNS})


@pytest.mark.parametrize("count", [0, 2, 300, 18_000])
def test_the_figure_is_readable_at_any_size(count):
    lives = life.lifetimes(cut(trace.load(FOLDER / "mixed-default.npz"), count))
    figure = life.figure(lives)
    plots.check(figure)
    assert max(len(part.x) for part in figure.data) <= plots.MOST_POINTS if figure.data else True
    assert sum(part.type == "bar" for part in figure.data) <= 20
    texts = [note.text for note in figure.layout.annotations]
    assert len(texts) < 20


def test_the_figure_states_peak_and_what_is_never_freed():
    figure = life.figure(
        life.lifetimes(
            of(
                entry("alloc", 1 << 20, 0, size=3 << 20),
                entry("alloc", 1 << 30, 500_000, size=5 << 20),
                entry("free_requested", 1 << 30, 500_002, size=5 << 20),
                entry("free_completed", 1 << 30, 500_002, size=5 << 20),
                entry("snapshot", 0, 4_000_000),
            )
        )
    )
    assert figure.layout.title.text.replace("<br>", " ") == "2 blocks hold at most 8 MiB; 3 MiB are never freed"
    peak = next(part for part in figure.data if part.name == "peak")
    assert max(peak.y) == 8  # two microseconds out of four seconds are not lost
    kept = next(part for part in figure.data if part.name == "never freed" and part.type == "scatter")
    assert kept.fillcolor == plots.COLOURS["broken"]
    assert max(kept.y) == pytest.approx(3)


def test_parked_memory_is_drawn_apart(recorded):
    names = {part.name for part in life.figure(life.lifetimes(recorded)).data}
    assert "freed, awaited" in names


def test_planted_hazards_are_at_least_eighty():
    assert 10 * len(KINDS) >= 80
    assert len(STREAMS) == 3
