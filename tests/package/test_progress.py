"""One function decides how progress is shown; each watcher gets what suits them."""

import importlib
import io
import sys
import types

import pytest

import o1lab

progress = importlib.import_module("o1lab.progress")  # the attribute o1lab.progress is the function


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def nobody(monkeypatch):
    for name in ("O1LAB_HEADLESS", "TQDM_DISABLE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(progress, "in_kernel", lambda: False)


class Clock:
    def __init__(self, monkeypatch, step: float) -> None:
        self.now, self.step = 0.0, step
        monkeypatch.setattr(progress.time, "monotonic", self)

    def __call__(self) -> float:
        self.now += self.step
        return self.now


@pytest.mark.parametrize(
    ("kernel", "headless", "disable", "stream", "kind"),
    [
        (False, None, None, Terminal(), "bar"),
        (False, None, None, io.StringIO(), "lines"),
        (True, None, None, io.StringIO(), "widget"),
        (True, "1", None, io.StringIO(), "lines"),
        (True, "0", None, io.StringIO(), "widget"),
        (False, "1", None, Terminal(), "lines"),
        (True, "1", "1", io.StringIO(), "none"),
        (False, None, "1", Terminal(), "none"),
    ],
)
def test_who_gets_what(monkeypatch, kernel, headless, disable, stream, kind):
    monkeypatch.setattr(progress, "in_kernel", lambda: kernel)
    for name, value in (("O1LAB_HEADLESS", headless), ("TQDM_DISABLE", disable)):
        if value is not None:
            monkeypatch.setenv(name, value)
    assert progress.kind(stream) == kind


def test_no_widget_without_ipywidgets(monkeypatch):
    monkeypatch.setattr(progress, "in_kernel", lambda: True)
    monkeypatch.setattr(progress, "find_spec", lambda name: None)
    assert progress.kind(io.StringIO()) == "lines"


def test_items_pass_unchanged_and_in_order_everywhere(monkeypatch):
    for stream in (io.StringIO(), Terminal()):
        assert list(progress.progress(iter("abc"), total=3, stream=stream)) == ["a", "b", "c"]
    monkeypatch.setenv("TQDM_DISABLE", "1")
    stream = io.StringIO()
    assert list(progress.progress("abc", stream=stream)) == ["a", "b", "c"]
    assert stream.getvalue() == ""


def test_quick_work_is_one_line():
    stream = io.StringIO()
    list(progress.progress(range(10_000), label="rounds", stream=stream))
    assert stream.getvalue().count("\n") == 1
    assert stream.getvalue().startswith("rounds: 10000 done in ")
    assert "\r" not in stream.getvalue()


def test_slow_work_has_a_line_per_tenth(monkeypatch):
    Clock(monkeypatch, 6.0)  # every item takes longer than LINE_SECONDS
    stream = io.StringIO()
    list(progress.progress(range(100), label="rounds", stream=stream))
    lines = stream.getvalue().splitlines()
    assert len(lines) == 10
    assert lines[0].startswith("rounds: 10/100 (10%)")


def test_unknown_total_has_a_line_per_five_seconds(monkeypatch):
    Clock(monkeypatch, 1.0)
    stream = io.StringIO()
    list(progress.progress(iter(range(20)), stream=stream))
    assert [line.split(",")[0] for line in stream.getvalue().splitlines()][:2] == ["progress: 5", "progress: 10"]


def test_widget_in_a_live_kernel(monkeypatch):
    seen = []
    fake = types.ModuleType("tqdm.notebook")
    fake.tqdm = lambda iterable, **options: seen.append(options) or iterable
    monkeypatch.setitem(sys.modules, "tqdm.notebook", fake)
    monkeypatch.setattr(progress, "in_kernel", lambda: True)
    assert list(progress.progress([1, 2], label="x")) == [1, 2]
    assert seen == [{"total": 2, "desc": "x", "leave": False}]


def test_the_package_offers_it_again_and_again(monkeypatch, capsys):
    monkeypatch.setenv("O1LAB_HEADLESS", "1")
    for _ in range(2):  # importing the submodule must not replace the function of the same name
        importlib.import_module("o1lab.progress")
        assert list(o1lab.progress([1], label="one")) == [1]
        assert capsys.readouterr().out.startswith("one: 1 done")
