"""The accuracy commands count right: they can fail, and a blind or a nervous probe is found out."""

from __future__ import annotations

import dataclasses
import json

import pytest

from o1lab.errors import ProbeError
from o1lab.memory import accuracy, counters
from o1lab.memory.catalogue import Case, load
from o1lab.memory.probe import probe

pytestmark = pytest.mark.skipif(not counters.has_exact_host(), reason="the exact host counter needs glibc")


def always(kind):
    """A probe of the right interface that gives the same kind whatever it sees."""

    def answer(step, **settings):
        report = probe(lambda number: None, rounds=6, requests_per_round=1, warm_up=1, owners=False)
        return dataclasses.replace(report, kind=kind)

    return answer


def test_the_bound_is_exact():
    assert accuracy.upper_bound(0, 300) == pytest.approx(1 - 0.05 ** (1 / 300))
    assert accuracy.upper_bound(1, 300) > accuracy.upper_bound(0, 300) > accuracy.upper_bound(0, 400)


def test_shares_leave_out_what_has_no_answer():
    rows = [{"right": True}, {"right": False}, {"right": None}]
    assert (accuracy.share(rows, "right").value, accuracy.share(rows, "right").n) == (0.5, 2)
    assert accuracy.share(rows[2:], "right") is None


def test_a_blind_probe_has_no_power_and_no_floor(monkeypatch):
    monkeypatch.setattr(accuracy, "probe", always("none"))
    assert accuracy.power(2).estimates["found"].value == 0
    assert accuracy.floor(1).estimates["found, cpu"].value == 0


def test_a_nervous_probe_is_all_false_alarms(monkeypatch):
    monkeypatch.setattr(Case, "probe", lambda self, **settings: always("per-call leak")(None))
    figures = accuracy.nulls(3)
    assert figures.estimates["false alarms"].value == 1
    assert figures.bounds["false alarms, upper 95 % bound (exact)"] == 1


def test_an_undecided_probe_raises_no_alarm_and_is_counted(monkeypatch):
    monkeypatch.setattr(Case, "probe", lambda self, **settings: always("inconclusive")(None))
    figures = accuracy.nulls(3)
    assert (figures.estimates["false alarms"].value, figures.estimates["inconclusive"].value) == (0, 1)


def test_the_probe_finds_what_is_planted_in_healthy_work():
    figures = accuracy.coverage(4)
    assert figures.estimates["rate within 5 percent or a chunk"].value == 1
    assert {row["case"] for row in figures.rows} != {"generate"}


def test_a_case_is_judged_in_both_forms():
    leaking = accuracy.judge(load("native_string"), owners=False)
    cured = accuracy.judge(load("native_string"), leak=False, owners=False)
    assert (leaking["kind_right"], leaking["rate_right"], leaking["owner_right"]) == (True, True, None)
    assert (cured["form"], cured["kind_right"], cured["expected"]) == ("cured", True, "none or warm-up")


def test_the_command_prints_its_figures_and_writes_them(tmp_path, capsys):
    target = tmp_path / "deep" / "overhead.json"
    assert accuracy.main(["overhead", "--runs", "6", "--json", str(target)]) == 0
    written = json.loads(target.read_text(encoding="utf-8"))
    sample = written["estimates"]["a sample without gc"]
    assert sample["unit"] == "ms"
    assert 0 < sample["low"] <= sample["value"] < 20
    assert len(written["rows"]) == 6
    assert "a sample without gc" in capsys.readouterr().out


def test_a_table_is_as_wide_as_its_cells():
    text = accuracy.table([{"case": "a", "bytes": 1234.5}, {"case": "longer", "bytes": None}])
    assert [line.split() for line in text.splitlines()] == [["case", "bytes"], ["a", "1,234"], ["longer"]]
    assert accuracy.table([]) == ""


def test_a_command_for_a_device_waits_until_it_is_asked(monkeypatch):
    started = []
    monkeypatch.setattr(accuracy.subprocess, "Popen", lambda *a, **k: started.append(a[0]) or 1 / 0)
    wait = accuracy.begin("catalogue", 2, "cuda")
    assert started == []
    with pytest.raises(ZeroDivisionError):
        wait()
    assert started[0][-4:] == ["--runs", "2", "--where", "cuda"]


def test_a_command_in_a_process_of_its_own_gets_its_limits():
    meanwhile = accuracy.begin("catalogue", 1, "cpu")
    figures = meanwhile()
    assert [(row["case"], row["form"]) for row in figures.rows] == [
        ("finished_list", "leaking"),
        ("finished_list", "cured"),
    ]
    assert figures.estimates["owner named first"].value == 1
    with pytest.raises(ProbeError, match="catalogue failed: .*invalid choice: 'moon'"):
        accuracy.begin("catalogue", 1, "moon")()
