"""Every case of the leak catalogue through the probe, leaking and cured; the catalogue's own promises."""

from __future__ import annotations

import inspect
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest

from o1lab.errors import UnknownName
from o1lab.memory import catalogue, counters
from o1lab.memory.catalogue import QUIET, cases, load
from o1lab.stats import Estimate

pytestmark = [
    pytest.mark.skipif(not counters.has_exact_host(), reason="the exact host counter needs glibc"),
    pytest.mark.usefixtures("one_thread"),
]
LEAKS, FIXED, NULLS = (cases(where="cpu", group=group) for group in ("leak", "fixed", "null"))


def named(chosen):
    return [pytest.param(one, id=one.name, marks=[pytest.mark.slow] if one.slow else []) for one in chosen]


def probed(one, **settings):
    """The report on a case; one that cannot judge is asked again with more requests per round, as it advises."""
    for times in (1, 2, 4):
        report = one.probe(requests_per_round=times * one.requests_per_round, **settings)
        if report.kind != "inconclusive":
            break
    return report


@pytest.mark.parametrize("one", named(LEAKS))
def test_the_leaking_form_grows_as_said(one):
    report = probed(one, owners=False)
    assert report.kind in one.kinds, str(report)
    assert one.rate_right(report) in (True, None), (one.rate(report), one.bytes_per_request)


@pytest.mark.parametrize("one", named(LEAKS))
def test_the_cured_form_is_quiet(one):
    report = probed(one, leak=False, owners=False)
    assert report.kind in QUIET, str(report)


@pytest.mark.parametrize("one", named([*FIXED, *NULLS]))
def test_what_is_no_leak_is_none(one):
    report = probed(one, owners=False)
    assert report.kind in one.kinds, str(report)


@pytest.mark.parametrize("one", named(LEAKS))
def test_a_case_gives_back_what_it_took(one):
    if one.bytes_per_request is None or one.counter != "host_in_use":
        pytest.skip("bytes not known by arithmetic")
    with counters.frozen():
        with one.open() as step:
            step(0)
        before = counters.read().host_in_use
        with one.open() as step:
            for number in range(1, 41):
                step(number)
            took = counters.read().host_in_use - before
            del step  # its closure holds what the case keeps
        left = counters.read().host_in_use - before
    assert took > 30 * one.bytes_per_request
    assert left < 0.1 * took + 20_000


def test_there_are_as_many_as_promised():
    assert len(cases(group="leak")) >= 24
    assert len(LEAKS) >= 16
    assert len(cases(where="cuda", group="leak")) >= 6
    assert len(NULLS) >= 8


@pytest.mark.parametrize("one", named(cases()))
def test_a_case_is_small_sourced_and_says_what_it_is(one):
    assert one.source.startswith("https://")
    assert one.what.endswith(".")
    assert set(one.kinds) <= {"none", "warm-up", "per-call leak", "keyed growth", "lazy gc", "fragmentation", "driver"}
    body = inspect.getsource(one.build).split('"""', 2)[2]
    lines = [line for line in body.splitlines() if line.strip() and not line.strip().startswith(("import", "from"))]
    assert len(lines) <= 20, len(lines)
    if one.group == "leak":
        assert "Cure:" in one.what
        assert 1 <= sum("leak" in line for line in lines) <= 3
    else:
        assert "leak" not in body


def test_the_catalogue_imports_no_torch():
    script = (
        "import sys, o1lab.memory.catalogue as c; c.cases(); print('torch' in sys.modules, 'triton' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]


def test_cleaning_up_happens_after_an_exception_too():
    from concurrent.futures import ThreadPoolExecutor

    pools = []
    original, ThreadPoolExecutor.__init__ = (
        ThreadPoolExecutor.__init__,
        lambda self, *args: (
            original(self, *args),
            pools.append(self),
        )[0],
    )
    try:
        with pytest.raises(KeyError, match="midway"), load("thread_local").open():
            raise KeyError("midway")
    finally:
        ThreadPoolExecutor.__init__ = original
    assert [pool._shutdown for pool in pools] == [True]


def test_a_shell_puts_everything_back():
    import builtins

    before = (set(vars(builtins)), sys.modules["__main__"], sys.displayhook, sys.excepthook, hasattr(sys, "last_value"))
    with load("failing_cells").open() as step:
        step(0)
    assert before == (
        set(vars(builtins)), sys.modules["__main__"], sys.displayhook, sys.excepthook, hasattr(sys, "last_value"),
    )  # fmt: skip


def test_displayed_tensors_are_named_before_the_texts_that_ipython_keeps():
    one = load("cell_outputs")
    report = one.probe()
    assert one.owner_right(report.owners), report.owners[:3]
    assert report.owners[0].what.startswith("Tensor float32")
    assert report.unattributed.value < 0.2 * one.bytes_per_request


def test_an_unknown_case_names_its_neighbours():
    with pytest.raises(UnknownName, match="finished_list"):
        load("finished_lists")


def report_of(kind, rate, **more):
    return SimpleNamespace(kind=kind, host=Estimate(rate, rate, rate, 12, "B/request"), requests=10, **more)


def test_wrong_answers_are_called_wrong():
    one = replace(load("finished_list"), bytes_per_request=10_000.0, owner="finished")
    kinds = {kind: one.kind_right(report_of(kind, 0)) for kind in ("per-call leak", "keyed growth", "none")}
    assert kinds == {"per-call leak": True, "keyed growth": False, "none": False}
    kinds = {kind: one.kind_right(report_of(kind, 0), leak=False) for kind in ("none", "warm-up", "driver")}
    assert kinds == {"none": True, "warm-up": True, "driver": False}
    assert [one.rate_right(report_of("none", rate)) for rate in (9_499, 9_501, 10_499, 10_501)] == [0, 1, 1, 0]
    small = replace(one, bytes_per_request=64.0)
    assert [small.rate_right(report_of("none", rate)) for rate in (31, 33, 96, 97)] == [0, 1, 1, 0]
    right, wrong = SimpleNamespace(path="f.finished[…]", kind="local"), SimpleNamespace(path="f.other", kind="local")
    assert [one.owner_right(owners) for owners in ([right, wrong], [wrong, right], [])] == [True, False, False]
    assert replace(one, owner=None).owner_right([]) is None
    assert replace(one, bytes_per_request=None).rate_right(report_of("none", 1)) is None


def test_a_counter_without_an_estimate_is_read_from_the_balance():
    one = replace(load("finished_list"), counter="device_used", bytes_per_request=100.0)
    report = report_of("driver", 0, balance=counters.Reading(0, 0, 0, device_used=1000))
    assert one.rate(report) == 100.0
    assert catalogue.CHUNK_BYTES == 32
