"""Records, manifests, atomic writes and the lock, each with the fault it must catch."""

import errno
import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest

from o1lab import records, storage
from o1lab.errors import RecordError, ResultsError
from o1lab.stats import Estimate

RUN = "20260101-000000-abcd"


def make_record(**changes) -> records.Record:
    from o1lab.claims import Verdict

    estimate = Estimate(64.0, 63.5, 70.0, 12, "B/request")
    record = records.Record(
        run_id=RUN,
        notebook="01_memory_leak",
        title="Find a leak",
        preset="smoke",
        seed=0,
        device="cpu",
        started="2026-01-01T00:00:00.000+00:00",
        finished="2026-01-01T00:00:05.000+00:00",
        seconds=5.0,
        parameters={"requests": 100, "model": "tiny é"},
        estimates={"leak-rate/host": estimate},
        verdicts={
            "leak-rate/host": Verdict("leak-rate/host", "supported", "64 ≥ 64", (), estimate),
            "leak-rate": Verdict("leak-rate", "not evaluated", "needs a GPU", ("cuda",), None),
        },
    )
    return replace(record, **changes)


def rewrite(path: Path, *, sign: bool = True, **changes) -> None:
    content = {**json.loads(path.read_text()), **changes}
    if sign:
        content["sha256"] = records.digest(content)
    path.write_text(json.dumps(content))


@pytest.fixture
def whole(tmp_path) -> Path:
    return records.write_record(tmp_path, make_record())


def test_round_trip_keeps_every_field(whole):
    back = records.read_record(whole, RUN)
    assert back == make_record()
    assert back.verdicts["leak-rate/host"].estimate == Estimate(64.0, 63.5, 70.0, 12, "B/request")
    assert back.verdicts["leak-rate"].needs == ("cuda",)
    assert json.loads(whole.read_text())["complete"] is True


@pytest.mark.parametrize("keep", [0, 1, 40, -3])
def test_truncated(whole, keep):
    whole.write_bytes(whole.read_bytes()[:keep])
    with pytest.raises(RecordError, match="truncated.*run its notebook again"):
        records.read_record(whole)


def test_altered_value(whole):
    whole.write_text(whole.read_text().replace("63.5", "1.5"))
    with pytest.raises(RecordError, match="altered"):
        records.read_record(whole)


def test_missing(tmp_path):
    with pytest.raises(RecordError, match="is missing"):
        records.read_record(tmp_path / "none.json")


def test_other_run(whole):
    with pytest.raises(RecordError, match=f"is of run {RUN}, not of other"):
        records.read_record(whole, "other")


def test_newer_schema_says_upgrade(whole):
    rewrite(whole, schema=2)
    with pytest.raises(RecordError, match="schema 2.*upgrade o1lab"):
        records.read_record(whole)


@pytest.mark.parametrize("schema", [None, "1", True, 0])
def test_no_schema(whole, schema):
    rewrite(whole, schema=schema)
    with pytest.raises(RecordError, match="no o1lab record"):
        records.read_record(whole)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"complete": False}, "not complete"),
        ({"estimates": [{"claim": "x"}]}, "lacks or garbles"),
        ({"surprise": 1}, "lacks or garbles"),
        ({"verdicts": 3}, "lacks or garbles"),
    ],
)
def test_signed_but_wrong(whole, changes, match):
    rewrite(whole, **changes)
    with pytest.raises(RecordError, match=match):
        records.read_record(whole)


def test_json_that_is_no_object(whole):
    whole.write_text("[1, 2]")
    with pytest.raises(RecordError, match="no o1lab record"):
        records.read_record(whole)


def test_digest_ignores_order_and_itself():
    assert records.digest({"a": 1, "b": 2}) == records.digest({"b": 2, "a": 1, "sha256": "x"})
    assert records.digest({"a": 1}) != records.digest({"a": 2})


@pytest.mark.parametrize("call", ["write", "fsync", "replace"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EACCES, errno.EROFS])
def test_failed_write_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch, call, code):
    target = tmp_path / "out" / "record.json"
    storage.atomic_write(target, "old")

    def refuse(*_):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(storage.os, call, refuse)
    with pytest.raises(ResultsError) as caught:
        storage.atomic_write(target, "new")
    monkeypatch.undo()
    assert str(target.parent) in str(caught.value)
    assert "O1LAB_RESULTS" in str(caught.value)
    assert target.read_text() == "old"
    assert os.listdir(target.parent) == ["record.json"]


def test_full_disk_says_so(tmp_path, monkeypatch):
    def half(descriptor, view, real=os.write):
        if len(view) > 4:
            return real(descriptor, view[:4])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(storage.os, "write", half)
    with pytest.raises(ResultsError, match="disk is full"):
        storage.atomic_write(tmp_path / "x.json", b"12345678")
    monkeypatch.undo()
    assert os.listdir(tmp_path) == []


def test_real_full_disk(tmp_path):
    mount = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", tmp_path], capture_output=True, check=False
    )
    if mount.returncode:
        pytest.skip("mounting a 64 KiB tmpfs needs root")
    try:
        storage.atomic_write(tmp_path / "small.json", b"fits")
        with pytest.raises(ResultsError, match="disk is full"):
            storage.atomic_write(tmp_path / "big.json", b"x" * 2**20)
        assert os.listdir(tmp_path) == ["small.json"]
    finally:
        subprocess.run(["umount", tmp_path], check=True)


def test_short_writes_are_continued(tmp_path, monkeypatch):
    monkeypatch.setattr(storage.os, "write", lambda d, view, real=os.write: real(d, view[:3]))
    storage.atomic_write(tmp_path / "x", b"0123456789")
    assert (tmp_path / "x").read_bytes() == b"0123456789"


def test_read_only_folder(tmp_path):
    folder = tmp_path / "results"
    folder.mkdir()
    folder.chmod(0o555)
    if os.access(folder, os.W_OK):
        pytest.skip("root ignores the folder's mode")
    with pytest.raises(ResultsError, match="no permission"):
        storage.check_writable(folder)


def test_a_file_in_the_folders_place(tmp_path):
    (tmp_path / "results").write_text("a file")
    for folder in (tmp_path / "results", tmp_path / "results" / "run"):
        with pytest.raises(ResultsError, match="a file stands where the folder should be"):
            storage.check_writable(folder)
    with pytest.raises(ResultsError, match="a file stands"), storage.RunLock(tmp_path / "results"):
        pass


def test_check_writable_leaves_nothing(tmp_path):
    storage.check_writable(tmp_path / "new")
    assert os.listdir(tmp_path / "new") == []


def test_two_runs_at_once_are_refused_by_name(tmp_path):
    code = (
        "import time; from o1lab.records import RunLock\n"
        f"with RunLock({str(tmp_path)!r}): print('held', flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() == "held\n"
        with pytest.raises(ResultsError) as caught, records.RunLock(tmp_path):
            pytest.fail("two runs hold one folder")
        other.kill()
        other.wait()
    message = str(caught.value)
    assert f"pid {other.pid}" in message
    assert str(tmp_path) in message
    assert "run into another folder" in message
    with records.RunLock(tmp_path):  # the holder is dead: its lock is taken over
        assert (tmp_path / ".lock").read_text() == f"{os.getpid()}\n"


def test_the_same_process_is_refused_too(tmp_path):
    with records.RunLock(tmp_path), pytest.raises(ResultsError, match=f"pid {os.getpid()}"), records.RunLock(tmp_path):
        pytest.fail("locked twice")
    with records.RunLock(tmp_path):
        pass


def test_lock_file_left_by_a_dead_pid(tmp_path):
    (tmp_path / ".lock").write_text("999999999\n")
    with records.RunLock(tmp_path):
        assert (tmp_path / ".lock").read_text() == f"{os.getpid()}\n"


def test_read_run_reports_a_corrupt_record_and_reads_the_rest(tmp_path):
    records.write_json(tmp_path / "run.json", {"schema": 1, "run_id": RUN})
    records.write_record(tmp_path, make_record())
    broken = records.write_record(tmp_path, make_record(notebook="02_broken"))
    broken.write_text(broken.read_text()[:99])
    records.write_record(tmp_path, make_record(notebook="03_other", run_id="other"))
    run = records.read_run(tmp_path)
    assert list(run.records) == ["01_memory_leak"]
    assert [("02_broken" in line, "03_other" in line) for line in run.problems] == [(True, False), (False, True)]


def test_read_run_without_a_manifest(whole):
    run = records.read_run(whole.parent.parent)
    assert list(run.records) == ["01_memory_leak"]
    assert ["run.json" in line for line in run.problems] == [True]


def test_read_run_of_nothing(tmp_path):
    with pytest.raises(RecordError, match="holds no run"):
        records.read_run(tmp_path / "nothing")


def test_latest_run_is_the_newest_finished(tmp_path):
    for name, finished in [("a", "2026-01-02"), ("b", "2026-01-03"), ("c", None)]:
        records.write_json(tmp_path / name / "run.json", {"schema": 1, "run_id": name, "finished": finished})
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "run.json").write_text("{")
    assert records.latest_run(tmp_path) == tmp_path / "b"
    with pytest.raises(RecordError, match="no finished run"):
        records.latest_run(tmp_path / "a")


def test_samples_round_trip(tmp_path):
    frame = pd.DataFrame({"request": [1, 2, 3], "bytes": [0.5, 64.0, 128.0]})
    entry = records.write_samples(tmp_path, "01_memory_leak", "rounds", frame)
    assert entry == {
        "name": "rounds",
        "file": "samples/01_memory_leak/rounds.parquet",
        "rows": 3,
        "columns": ["request", "bytes"],
    }
    pd.testing.assert_frame_equal(pd.read_parquet(tmp_path / entry["file"]), frame)
    assert os.listdir(tmp_path / "samples" / "01_memory_leak") == ["rounds.parquet"]


def test_git_state(tmp_path):
    assert records.git_state(tmp_path) == {"commit": None, "dirty": None}
    git = ["git", "-C", str(tmp_path), "-c", "user.name=t", "-c", "user.email=t@example.org"]
    subprocess.run([*git, "init", "-q"], check=True)
    (tmp_path / "a").write_text("1")
    subprocess.run([*git, "add", "a"], check=True)
    subprocess.run([*git, "commit", "-q", "-m", "x"], check=True)
    clean = records.git_state(tmp_path)
    assert len(clean["commit"]) == 40
    assert clean["dirty"] is False
    (tmp_path / "a").write_text("2")
    assert records.git_state(tmp_path) == {"commit": clean["commit"], "dirty": True}


def test_run_ids_are_distinct_and_sort_by_time():
    first = records.new_run_id()
    time.sleep(1.1)
    assert first < records.new_run_id()
