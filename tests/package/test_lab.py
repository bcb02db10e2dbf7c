"""A notebook's session: what it refuses, what it keeps, what it shows."""

import json
import random
import sys
import types

import numpy as np
import pandas as pd
import pytest
import torch

from o1lab import claims, lab, lab_view, records, start
from o1lab.errors import EstimateError, ResultsError, RunError, UnknownName
from o1lab.stats import Estimate

NOTEBOOK = "01_memory_leak"
HOST = "leak-rate/host"


@pytest.fixture(autouse=True)
def folders(tmp_path, monkeypatch):
    for name in ("O1LAB_RUN_DIR", "O1LAB_RUN_ID", "O1LAB_PRESET", "O1LAB_PARAMETERS", "O1LAB_HEADLESS"):
        monkeypatch.delenv(name, raising=False)
    notebooks = tmp_path / "notebooks"
    notebooks.mkdir()
    monkeypatch.setenv("O1LAB_NOTEBOOKS", str(notebooks))
    monkeypatch.setenv("O1LAB_RESULTS", str(tmp_path / "results"))
    monkeypatch.setattr(lab.hardware, "capabilities", lambda: {"cpu", "glibc", "linux"})
    return tmp_path


def write_notebook(folder, name: str, heading: str) -> None:
    cell = {"cell_type": "markdown", "source": ["intro\n", f"# {heading}\n"], "metadata": {}}
    (folder / "notebooks" / f"{name}.ipynb").write_text(json.dumps({"cells": [cell]}))


def test_whole_session(folders, capsys):
    write_notebook(folders, NOTEBOOK, "01 · Find a leak")
    session = start(NOTEBOOK, "smoke", seed=7, parameters={"requests": 100, "limits": (8, np.int64(32))})
    opening = capsys.readouterr().out
    assert "✓ yes" in opening
    assert "✗ no, needs an NVIDIA GPU that torch can use" in opening
    with session.stage("loop"):
        session.record(HOST, np.float64(0.5), low=0, high=1.25, n=np.int64(12), unit="B/request")
    verdict = session.verdict(HOST)
    assert verdict.outcome == "refuted"
    assert "✗ refuted · leak-rate/host" in capsys.readouterr().out
    session.samples("rounds", pd.DataFrame({"bytes": [1, 2, 3]}))
    session.note("left out on this machine: two arms")
    session.finish()

    record = records.read_record(session.run_dir / "records" / f"{NOTEBOOK}.json", session.run_id)
    assert record.title == "01 · Find a leak"
    assert record.estimates == {HOST: Estimate(0.5, 0.0, 1.25, 12, "B/request")}
    assert set(record.verdicts) == {claim.id for claim in claims.for_notebook(NOTEBOOK)}
    assert record.verdicts[HOST].outcome == "refuted"
    assert record.verdicts["leak-rate"].needs == ("cuda",)
    assert record.verdicts["leak-rate/cure"].reason == "not measured in this run"
    assert record.parameters == {"requests": 100, "limits": [8, 32]}
    assert (record.seed, record.preset) == (7, "smoke")
    assert record.device.startswith("cpu")
    assert [timing["stage"] for timing in record.timings] == ["loop"]
    assert record.notes == ["left out on this machine: two arms"]
    assert record.samples[0]["rows"] == 3
    assert record.peak["host_bytes"] > 0
    assert record.environment["torch"] == torch.__version__
    run = records.read_run(session.run_dir)
    assert run.problems == []
    assert run.manifest["notebooks"][0]["status"] == "ok"
    assert records.latest_run() == session.run_dir
    assert "– not evaluated" in capsys.readouterr().out


def test_under_the_runner_the_manifest_stays_the_runners(folders, monkeypatch):
    folder = folders / "results" / "20260101-000000-abcd"
    monkeypatch.setenv("O1LAB_RUN_DIR", str(folder))
    monkeypatch.setenv("O1LAB_RUN_ID", "the-id")
    monkeypatch.setenv("O1LAB_PRESET", "full")
    monkeypatch.setenv("O1LAB_PARAMETERS", '{"requests": 5}')
    session = start(NOTEBOOK)
    assert (session.preset, session.run_id) == ("full", "the-id")
    assert session.finish().parameters == {"requests": 5}
    assert (folder / "records" / f"{NOTEBOOK}.json").is_file()
    assert not (folder / "run.json").exists()


def test_recording_again_replaces_and_says_so(capsys):
    session = start(NOTEBOOK)
    session.record(HOST, 1, low=0, high=2, n=3, unit="B/request")
    session.record(HOST, 100, low=90, high=110, n=3, unit="B/request")
    assert "replaces 1 [0, 2] B/request (n=3)" in capsys.readouterr().out
    assert session.verdict(HOST).outcome == "supported"


def test_starting_again_starts_afresh():
    first = start(NOTEBOOK)
    first.record(HOST, 1, low=0, high=2, n=3, unit="B/request")
    first.finish()
    second = start(NOTEBOOK)
    assert second.finish().estimates == {}


@pytest.mark.parametrize(
    "call",
    [
        lambda s: s.record(HOST, 1, low=0, high=2, n=3, unit="B/request"),
        lambda s: s.finish(),
        lambda s: s.note("late"),
        lambda s: s.samples("late", pd.DataFrame()),
        lambda s: s.figure("late", None, "late"),
        lambda s: s.stage("late").__enter__(),
    ],
)
def test_nothing_after_finish(call):
    session = start(NOTEBOOK)
    session.finish()
    with pytest.raises(RunError, match="has finished; run its start cell again"):
        call(session)


def test_unknown_claim_names_the_near_one():
    with pytest.raises(UnknownName, match="leak-rate/host"):
        start(NOTEBOOK).record("leak-rate/hots", 1, low=0, high=2, n=3, unit="B/request")


def test_claim_of_another_notebook():
    with pytest.raises(UnknownName, match=f"{NOTEBOOK} decides 'leak-rate/host'"):
        start("00_start_here").record(HOST, 1, low=0, high=2, n=3, unit="B/request")


def test_wrong_unit():
    with pytest.raises(EstimateError, match="'B/request'.*'%/h'"):
        start(NOTEBOOK).record(HOST, 1, low=0, high=2, n=3, unit="%/h")


@pytest.mark.parametrize(
    "numbers",
    [
        {"value": float("nan"), "low": 0, "high": 1, "n": 3},
        {"value": 1, "low": float("-inf"), "high": 2, "n": 3},
        {"value": 1, "low": 2, "high": 3, "n": 3},
        {"value": 1, "low": 0, "high": 2, "n": 0},
        {"value": 1, "low": 0, "high": 2, "n": 2.5},
        {"value": None, "low": 0, "high": 2, "n": 2},
    ],
)
def test_no_number(numbers):
    session = start(NOTEBOOK)
    with pytest.raises(EstimateError):
        session.record(HOST, unit="B/request", **numbers)
    assert session.finish().estimates == {}


def test_unknown_notebook(folders):
    with pytest.raises(UnknownName, match="did you mean 01_memory_leak"):
        start("01_memory_leek")
    write_notebook(folders, "mine", "My own")
    assert start("mine").notebook == "mine"
    assert start("anything", allow_unknown=True).notebook == "anything"


def test_a_readers_notebook_may_measure_any_claim(folders):
    write_notebook(folders, "mine", "My own")
    session = start("mine")
    session.record(HOST, 100, low=90, high=110, n=3, unit="B/request")
    assert list(session.finish().verdicts) == [HOST]


def test_presets(monkeypatch):
    with pytest.raises(UnknownName, match=r"unknown preset 'smok'.*smoke"):
        start(NOTEBOOK, "smok")
    assert lab.resolve_preset("auto", {"cpu"}) == "smoke"
    assert lab.resolve_preset("auto", {"cpu", "cuda"}) == "full"
    assert lab.resolve_preset("smoke", {"cuda"}) == "smoke"
    monkeypatch.setenv("O1LAB_PRESET", "smoke")
    assert lab.resolve_preset("auto", {"cuda"}) == "smoke"
    monkeypatch.setenv("O1LAB_PRESET", "fast")
    with pytest.raises(UnknownName, match="O1LAB_PRESET"):
        start(NOTEBOOK)


def test_pick():
    assert start(NOTEBOOK, "smoke").pick(smoke=1, full=2) == 1
    assert start(NOTEBOOK, "full").pick(smoke=1, full=2) == 2


def test_seeds_every_generator():
    draws = []
    for _ in range(2):
        start(NOTEBOOK, seed=3)
        draws.append((random.random(), np.random.rand(), float(torch.rand(()))))  # noqa: NPY002
    assert draws[0] == draws[1]


@pytest.mark.parametrize("seed", [-1, 2**32, 1.5, True, "0"])
def test_bad_seed(seed):
    with pytest.raises(RunError, match="seed="):
        start(NOTEBOOK, seed=seed)


def test_device():
    with pytest.raises(UnknownName, match="unknown device 'gpu'"):
        start(NOTEBOOK, device="gpu")
    if not torch.cuda.is_available():
        with pytest.raises(RunError, match="not usable here"):
            start(NOTEBOOK, device="cuda")


def test_a_gpu_not_used_decides_nothing(monkeypatch):
    monkeypatch.setattr(lab.hardware, "capabilities", lambda: {"cpu", "cuda", "cuda-2", "nvml-process", "glibc"})
    session = start(NOTEBOOK, device="cpu")
    assert session.capabilities == {"cpu", "glibc"}
    assert not session.can_decide("leak-rate")
    assert session.can_decide(HOST)


def test_unwritable_results_are_refused_before_measuring(folders, monkeypatch):
    (folders / "file").write_text("")
    monkeypatch.setenv("O1LAB_RESULTS", str(folders / "file"))
    with pytest.raises(ResultsError, match="a file stands where the folder should be"):
        start(NOTEBOOK)


def test_a_full_disk_at_the_end_leaves_the_session_open(monkeypatch):
    session = start(NOTEBOOK)
    with monkeypatch.context() as patch:
        patch.setattr(lab.records, "write_record", lambda *_: (_ for _ in ()).throw(ResultsError("disk is full")))
        with pytest.raises(ResultsError, match="disk is full"):
            session.finish()
    session.finish()
    assert records.latest_run() == session.run_dir


class Figure:
    layout = types.SimpleNamespace(title=types.SimpleNamespace(text="Leaks <b>64</b> B"))

    def to_json(self) -> str:
        return '{"data": []}'


@pytest.mark.parametrize("png", [None, "iVBORw0="])
def test_figure_is_shown_and_kept(monkeypatch, png):
    shown = []
    plots = types.ModuleType("o1lab.plots")
    plots.show = lambda fig, caption, name=None: (
        shown.append((caption, name)) or {"text/plain": caption} | ({"image/png": png} if png else {})
    )
    monkeypatch.setitem(sys.modules, "o1lab.plots", plots)
    monkeypatch.setattr("o1lab.plots", plots, raising=False)
    session = start(NOTEBOOK)
    session.figure("growth", Figure(), "64 bytes a request", signature=True)
    record = session.finish()
    assert shown == [("64 bytes a request", "growth")]
    entry = record.figures[0]
    assert entry["json"] == f"figures/{NOTEBOOK}--growth.json"
    assert (session.run_dir / entry["json"]).read_text() == '{"data": []}'
    assert entry["signature"] is True
    assert "<" not in entry["title"]
    if png:
        assert (session.run_dir / entry["png"]).read_bytes().startswith(b"\x89PNG")
    else:
        assert entry["png"] is None


@pytest.mark.parametrize("name", ["../x", "a b", "", "A", "x/y"])
def test_names_that_are_no_file_names(name):
    with pytest.raises(RunError, match="becomes a file name"):
        start(NOTEBOOK).samples(name, pd.DataFrame({"a": [1]}))


def test_stage_times_a_failing_part():
    session = start(NOTEBOOK)
    with pytest.raises(ZeroDivisionError), session.stage("breaks"):
        _ = 1 / 0
    assert session.finish().timings[0]["stage"] == "breaks"


@pytest.mark.parametrize("outcome", claims.OUTCOMES)
def test_badges_say_the_outcome_in_words_and_by_sign(outcome):
    card = lab_view.ledger("t", [claims.Verdict("leak-rate", outcome, "a < b & c")])
    assert outcome in card.text
    assert lab_view.BADGES[outcome][0] in card.text
    assert outcome in card.html
    assert "a &lt; b &amp; c" in card.html
    assert len({sign for sign, _, _ in lab_view.BADGES.values()}) == 4


def test_the_opening_keeps_pictures_inside_the_page():
    card = lab_view.opening([("device", "cpu")], [])
    assert "img{max-width:100%" in card.html  # JupyterLab draws the picture first, at natural size
    assert "max-width" not in card.text
