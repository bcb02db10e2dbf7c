"""The head-to-head table: real cells in real processes, what other tools print, and cells that go wrong."""

from __future__ import annotations

import inspect
from types import SimpleNamespace

import pytest
import torch

import o1lab
from o1lab import plots
from o1lab.errors import ProbeError, UnknownName
from o1lab.memory import catalogue, counters, head_to_head, rivals
from o1lab.memory.head_to_head import Cell, Comparison, compare, figure, summary, text
from o1lab.memory.rivals import Finding, Tool, cell, device, listing, tracing, view, workload

glibc = pytest.mark.skipif(not counters.has_exact_host(), reason="the probe needs glibc")
TOY = """
import dataclasses, os, time
from o1lab.memory.catalogue import load

def build(step):
    def scene(leak):
        yield step
    return scene

def toy(name, step):
    return dataclasses.replace(load("finished_list"), name=name, build=build(step))

def fail(number):
    raise RuntimeError("the kernel is not there")

raises = toy("raises", fail)
dies = toy("dies", lambda number: os._exit(11))
sleeps = toy("sleeps", lambda number: time.sleep(60))
"""


def cells(record: Comparison, **wanted: str) -> list[Cell]:
    return [one for one in record.cells if all(getattr(one, key) == value for key, value in wanted.items())]


@pytest.fixture
def toys(tmp_path, monkeypatch):
    (tmp_path / "toy_cases.py").write_text(TOY)
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.fixture
def finished():
    with workload("finished_list", True, 40, only_name=True) as work:
        yield work


@pytest.fixture(scope="module")
def record():
    return compare(["finished_list", "list_capacity"], ["probe", "rss-ols", "tracemalloc", "stormlog"], requests=152)


@glibc
def test_two_cases_through_the_tools_that_are_always_there(record):
    table = record.table().set_index(["tool", "case"])
    for name in ("probe", "rss-ols", "tracemalloc"):
        assert table.loc[(name, "finished_list"), "status"] == "ran", table.loc[(name, "finished_list"), "reason"]
    for name in ("probe", "tracemalloc"):
        leak, null = table.loc[(name, "finished_list")], table.loc[(name, "list_capacity")]
        assert leak.found
        assert not leak.false_alarm
        assert not null.false_alarm
        assert null.found is None  # nothing to find there
    assert table.loc[("rss-ols", "finished_list"), "found"]
    assert table.loc[("probe", "finished_list"), "kind_right"]
    assert table.loc[("tracemalloc", "finished_list"), "place_right"]
    assert "python_objects.py:" in table.loc[("tracemalloc", "finished_list"), "place"]
    assert table.loc[("stormlog", "finished_list"), "status"] == "not its job"
    assert len(cells(record, case="list_capacity", tool="probe")) == 1  # both of its forms are the same


@glibc
def test_every_tool_gets_the_same_requests_and_the_probe_not_more(record):
    served = {(one.tool, one.form): one.served for one in cells(record, case="finished_list", status="ran")}
    assert served["rss-ols", "leaking"] == served["tracemalloc", "cured"] == 28 * 8
    assert 0 < served["probe", "leaking"] <= 28 * 8


@glibc
def test_a_record_survives_its_file(record, tmp_path):
    record.save(tmp_path / "found.json")
    assert Comparison.load(tmp_path / "found.json") == record
    (tmp_path / "other.json").write_text('{"cells": [{"tool": "x"}]}')
    with pytest.raises(ProbeError, match="no comparison"):
        Comparison.load(tmp_path / "other.json")


@glibc
def test_the_text_and_the_figure_say_the_same_as_the_table(record):
    table = record.table()
    shown = text(table)
    assert "1/1 leaks found" in shown
    assert "not its job" in shown
    chart = figure(table)
    plots.check(chart)
    *notes, legend = [note.text.removeprefix("<b>").removesuffix("</b>") for note in chart.layout.annotations]
    answered = set(table.tool[table.status == "ran"])
    shown_rows = [row for row in table.itertuples() if row.tool in answered]  # the rest gets no column
    assert len(shown_rows) < len(table)
    assert sorted(notes) == sorted(view.SHORT.get(row.status, view.word(row)) for row in shown_rows)
    assert legend == view.LEGEND


@glibc
def test_a_large_table_is_drawn_at_once(record, monkeypatch):
    import plotly.graph_objects as go

    monkeypatch.setattr(go.Figure, "add_annotation", None)  # each call looks at all that are there: seconds for 200
    assert len(figure(record.table()).layout.annotations) > 3


def test_records_of_two_devices_join_and_the_later_answer_counts():
    here = Comparison((Cell("probe", "0.1", "a", "leak", "leaking", "needs CUDA"),), {"device": "x86_64"})
    there = Comparison((Cell("probe", "0.1", "a", "leak", "leaking", "ran", found=True),), {"device": "H200"})
    joined = Comparison.join([here, there])
    assert joined.cells == there.cells
    other = Comparison((Cell("memray", "1", "b", "null", "leaking", "ran", found=False, alarm=False),), {})
    table = Comparison.join([there, other]).table()
    assert list(table.status) == ["ran", "not run", "not run", "ran"]
    assert len(figure(table).layout.annotations) == 5
    assert "1/1 leaks found" in text(table)
    assert [part["device"] for part in joined.about["parts"]] == ["x86_64", "H200"]


def test_a_step_that_raises_and_a_process_that_dies_are_shown_as_crashed(toys):
    found = compare(["toy_cases:raises", "toy_cases:dies"], ["tracemalloc"], requests=40)
    raised, died = (cells(found, case=name)[0] for name in ("raises", "dies"))
    assert (raised.status, raised.reason) == ("crashed", "RuntimeError: the kernel is not there")
    assert (died.status, died.reason) == ("crashed", "exit code 11")
    assert "tracemalloc on dies: crashed" in text(found.table())


def test_a_cell_that_takes_too_long_is_ended(toys):
    found = compare(["toy_cases:sleeps"], ["tracemalloc"], requests=40, seconds=1)
    assert {one.status for one in found.cells} == {"timed out"}
    assert all(one.seconds < 20 for one in found.cells)
    assert summary(found.table()).clean.iloc[0] == 0


def test_a_tool_that_is_not_installed_is_shown_with_the_way_out(monkeypatch):
    absent = Tool("absent", "no-such-package-of-o1lab", "listing", "", "", "")
    monkeypatch.setattr(rivals, "TOOLS", (*rivals.TOOLS, absent))
    found = compare(["finished_list"], ["absent"])
    assert {(one.status, one.reason) for one in found.cells} == {
        ("not installed", "pip install no-such-package-of-o1lab")
    }
    assert "not installed" in text(found.table())


def test_unknown_names_are_refused():
    with pytest.raises(UnknownName, match="tracemalloc"):
        compare(["finished_list"], ["tracemaloc"])
    with pytest.raises(UnknownName):
        compare(["finished_lists"], ["tracemalloc"])
    with pytest.raises(UnknownName):
        compare(["o1lab.memory.plants:HostPlant"], ["tracemalloc"])


def test_the_comparison_adds_no_case_to_the_catalogue():
    with workload("o1lab.memory.rivals.fair:native_new", True, 4000) as work:
        assert work.case.name == "native_new"
        work.warm()
        before = counters.read().host_in_use
        work.serve()
        grown = None if before is None else counters.read().host_in_use - before
    assert "native_new" not in {case.name for case in catalogue.cases()}
    assert set(rivals.INSTEAD) <= {case.name for case in catalogue.cases()}
    assert grown is None or grown == pytest.approx(64 * work.requests, rel=0.1)


@pytest.mark.parametrize(
    ("group", "leak", "finding", "alarm", "kind_right"),
    [
        ("leak", True, Finding(True, "", "per-call leak"), None, True),
        ("leak", True, Finding(True, "", "keyed growth"), None, False),
        ("leak", True, Finding(True, ""), None, None),
        ("leak", False, Finding(True, ""), True, None),
        ("leak", False, Finding(False, "", "none"), False, None),
        ("null", True, Finding(True, "", "keyed growth"), True, None),
        ("null", True, Finding(True, "", "per-call leak"), False, None),  # here the case's own kind, so right
    ],
)
def test_what_counts_as_a_false_alarm_and_as_a_right_kind(group, leak, finding, alarm, kind_right):
    case = SimpleNamespace(group=group, kinds=("per-call leak",), owner=None)
    said = cell.judge(finding, SimpleNamespace(case=case, leak=leak))
    assert (said["alarm"], said["kind_right"]) == (alarm, kind_right)


def test_a_place_is_right_if_it_is_the_owner_or_a_line_of_the_case(finished):
    file = inspect.getsourcefile(finished.case.build)
    first = inspect.getsourcelines(finished.case.build)[1]
    other = inspect.getsourcelines(catalogue.load("session_dict").build)[1]
    for finding, right in (
        (Finding(True, "", place=f"{file}:{first + 5}", names="line"), True),
        (Finding(True, "", place=f"{file}:{other + 5}", names="line"), False),
        (Finding(True, "", place="torch/functional.py:7", names="line"), False),
        (Finding(True, "", place="step.__closure__.finished[…] · closure", names="owner"), True),
        (Finding(True, "", place="logging.root.handlers[…] · global", names="owner"), False),
        (Finding(True, ""), None),
    ):
        assert cell.judge(finding, finished)["place_right"] is right, finding.place


def test_sites_are_found_by_allocations_per_request_not_by_one_big_block(finished):
    file = inspect.getsourcefile(finished.case.build)
    mine = inspect.getsourcelines(finished.case.build)[1] + 5
    stack = [("torch/functional.py", 7), (file, mine), ("serve.py", 3)]
    found = listing.grown_most(finished, [(1, 1 << 30, [("a.py", 1)]), (finished.requests, 4096, stack)])
    assert (found.found, found.place) == (True, f"{file}:{mine}")
    assert not listing.grown_most(finished, [(1, 1 << 30, [("a.py", 1)]), (finished.requests // 3, 99, stack)]).found


def test_what_pytest_memray_prints(finished):
    file = inspect.getsourcefile(finished.case.build)
    printed = f"""M    [100%]
=== FAILURES ===
Test was allowed to leak 1.0MiB per location but at least one location leaked more
--- memray-leaked-memory ---
List of leaked allocations:
    - 1.2MiB allocated here:
        empty:<unknown>:0
        load:/usr/lib/cache.py:4
    - 19.0MiB allocated here:
        c10::alloc_cpu(unsigned long):<unknown>:0
        at::_ops::ones::call(c10::ArrayRef<long>, std::optional<c10::Layout>):<unknown>:0
        activation:{file}:27
        step:{file}:36
        ...

=== MEMRAY REPORT ===
\t- activation:{file}:27 -> 19.0MiB
1 failed in 4.25s
"""
    found = tracing.read_pytest(finished, printed)
    assert (found.found, found.place, found.names) == (True, f"{file}:27", "line")
    assert found.evidence == "19,922,944 B from one of 2 call stacks"
    assert not tracing.read_pytest(finished, ".   [100%]\n1 passed in 2.1s\n").found
    with pytest.raises(ProbeError, match="another reason"):
        tracing.read_pytest(finished, "E   ImportError: no torch\n1 failed in 0.3s\n")


def test_a_tool_that_starts_a_process_finds_the_same_package_and_the_case(toys, tmp_path):
    said = tracing._python(["-c", "import toy_cases, o1lab; print(o1lab.__file__)"], str(tmp_path.parent))
    assert said.stdout.strip() == o1lab.__file__, said.stderr


def test_what_scalene_writes(finished):
    file = inspect.getsourcefile(finished.case.build)
    leaks = {"27": {"likelihood": 0.994, "velocity_mb_s": 2.43}, "36": {"likelihood": 0.96, "velocity_mb_s": 0.1}}
    profile = {"growth_rate": 100.0, "max_footprint_mb": 801.3, "files": {file: {"leaks": leaks}}}
    found = tracing.read_scalene(finished, profile)
    assert (found.found, found.place, found.evidence) == (True, f"{file}:27", "99% likely, 2.4 MB/s")
    quiet = tracing.read_scalene(finished, {"max_footprint_mb": 19.1, "files": {file: {"leaks": {}}}})
    assert (quiet.found, quiet.evidence) == (False, "no likely leak; largest footprint 19 MB")


@pytest.mark.parametrize("leak", [True, False])
def test_torchs_cycle_finder_is_heard(leak, monkeypatch):
    """Its own code, on tensors of the CPU, with the four CUDA calls that it makes replaced."""
    from torch.utils.viz import _cycles

    monkeypatch.setattr(_cycles, "is_cuda_tensor", lambda found: isinstance(found, torch.Tensor))
    monkeypatch.setattr(_cycles, "cuda_allocation_context", lambda: lambda found: None)
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", lambda **_: None)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 0)

    def serve():
        for _ in range(20):
            module = torch.nn.Linear(4, 4)
            module.kept = [module] if leak else []

    found = device.torch_cycles(SimpleNamespace(warm=lambda: None, serve=serve))
    assert (found.found, found.kind) == (leak, "lazy gc" if leak else "")


@pytest.mark.gpu
def test_the_device_tools_on_a_leak_and_on_a_cycle_on_the_device():
    cycle = rivals.ADDED[0]
    found = compare(
        ["view_of_device_logits", cycle], ["torch-leak-check", "torch-cycles", "pytorch-memlab", "stormlog"]
    )
    ran = [one for one in found.cells if one.status != "not installed"]
    assert not [one for one in ran if one.status in ("crashed", "timed out")]
    assert {one.status for one in cells(found, tool="torch-cycles", case="view_of_device_logits")} == {"not its job"}
    said = {(one.tool, one.case, one.form): one.found for one in ran}
    assert said["torch-cycles", "device_cycle", "leaking"]
    assert not said["torch-cycles", "device_cycle", "cured"]
    for name in ("torch-leak-check", "pytorch-memlab"):
        assert said.get((name, "view_of_device_logits", "leaking"), True)
        assert not said.get((name, "view_of_device_logits", "cured"), False)


def test_what_stormlog_and_objgraph_say():
    assert device.read_stormlog({"memory_leak", "repeated_allocations"}, set()).found
    assert device.read_stormlog({"fragmentation"}, set()).kind == "fragmentation"
    assert not device.read_stormlog({"repeated_allocations", "memory_spikes"}, {"Time-Memory Correlation"}).found
    kept = [1.5]
    holder = SimpleNamespace(kept=kept)
    assert listing.chain_text([head_to_head, vars(head_to_head), holder, vars(holder), kept]).endswith("kept → list")
