"""Watching a process from outside: what is found, what is not taken for a trend, and every way it can be refused."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import psutil
import pynvml as real
import pytest
from fake_nvml import GIB, MIB, FakeNvml, Gpu, refuse

from o1lab import plots
from o1lab.memory import attach, outside, trend
from o1lab.memory.attach import Watch
from o1lab.memory.outside import WatchError

progress = importlib.import_module("o1lab.progress")  # the package's attribute of this name is the function

ABSENT = 2**22 + 12345  # above the largest PID that Linux gives
linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="/proc is Linux's")
LEAK = "import time\nkept = []\nwhile True:\n    kept.append(bytearray(300_000)); time.sleep(0.01)"
QUIET = "import time\nwhile True:\n    bytearray(300_000); time.sleep(0.01)"


@pytest.fixture
def run():
    started = []

    def start(code: str, wait: float = 0.3) -> subprocess.Popen:
        process = subprocess.Popen([sys.executable, "-c", code])
        started.append(process)
        time.sleep(wait)
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(init=refuse(real.NVML_ERROR_LIBRARY_NOT_FOUND)))


def gpus(monkeypatch, *some: Gpu, opened: bool | None = True) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(*some))
    monkeypatch.setattr(outside.Process, "has_gpu_open", lambda self: opened)


def test_a_leaking_process_shows_a_trend_at_its_rate_and_what_to_do_next(run):
    process = run(LEAK)
    seen = attach.watch_process(process.pid, seconds=1.2, interval_s=0.03, requests_per_second=100.0)
    assert seen.host.verdict == "trend, unproven"
    assert 5e6 < seen.host.slope.value < 35e6  # 30 MB/s where nothing else runs
    text = str(seen)
    assert "trend, unproven" in text
    assert "B/request" in text
    assert "probe(step)" in text
    assert "no NVIDIA driver found" in text
    soon, late = seen.host.hours_to(2**30)
    assert soon <= 2**30 / seen.host.slope.value / 3600 <= late


def test_a_quiet_process_shows_none_and_the_way_on_is_still_said(run):
    seen = attach.watch_process(run(QUIET).pid, seconds=1.0, interval_s=0.03)
    assert seen.host.verdict == "no trend"
    assert seen.host.hours_to(2**30) is None
    assert "hours" not in str(seen)
    assert str(seen).endswith(trend.NEXT)


def test_a_process_that_ends_midway_leaves_what_was_seen(run):
    process = run("import time; time.sleep(0.7)", wait=0.1)
    seen = attach.watch_process(process.pid, seconds=30, interval_s=0.02)
    assert 5 < len(seen.samples) < 80
    assert seen.seconds < 3
    assert "ended" in seen.ended
    assert "ended" in str(seen)


@pytest.mark.parametrize(("pid", "words"), [(ABSENT, "no process"), (0, "no process id"), (-4, "no process id")])
def test_a_number_that_is_no_process_is_said(pid, words):
    with pytest.raises(WatchError, match=words):
        Watch(pid)


@linux
def test_a_zombie_and_a_kernel_thread_cannot_be_watched(run):
    process = run("pass", wait=0.0)
    deadline = time.monotonic() + 10
    while psutil.Process(process.pid).status() != psutil.STATUS_ZOMBIE and time.monotonic() < deadline:
        time.sleep(0.01)
    with pytest.raises(WatchError, match="zombie|ended already"):
        Watch(process.pid)
    if psutil.pid_exists(2) and psutil.Process(2).name() == "kthreadd":
        with pytest.raises(WatchError, match="kernel thread"):
            Watch(2)


def test_a_process_that_may_not_be_seen_says_whom_to_ask_as(monkeypatch):
    monkeypatch.setattr(outside.os, "open", lambda *_, **__: (_ for _ in ()).throw(PermissionError(13, "denied")))
    monkeypatch.setattr(outside.Path, "is_file", lambda self: True)
    with pytest.raises(WatchError, match="no permission .* root"):
        Watch()


@linux
def test_unique_memory_that_may_not_be_read_is_left_out_and_said(monkeypatch):
    inner = outside.Process._file

    def file(self, name):
        if name == "smaps_rollup":
            raise PermissionError(13, "denied")
        return inner(self, name)

    monkeypatch.setattr(outside.Process, "_file", file)
    watch = Watch()
    assert watch.sample().uss_bytes is None
    watch.sample()
    assert "USS not allowed" in str(watch.trend())


@linux
def test_readings_agree_with_psutil():
    watch = Watch()
    sample, known = watch.sample(), psutil.Process().memory_full_info()
    assert sample.rss_bytes == pytest.approx(known.rss, rel=0.05)
    assert sample.uss_bytes == pytest.approx(known.uss, rel=0.05)
    assert sample.own_bytes <= sample.rss_bytes
    assert sample.threads == psutil.Process().num_threads()


def test_children_count_only_when_asked_for(run):
    process = run(f"import subprocess, sys, time\nsubprocess.Popen([sys.executable, '-c', {QUIET!r}]).wait()", wait=0.6)
    alone, all_ = Watch(process.pid), Watch(process.pid, children=True)
    assert all_.sample().own_bytes > 1.5 * alone.sample().own_bytes
    assert len(all_.all) == 2
    for child in psutil.Process(process.pid).children():
        child.kill()


def test_a_child_that_goes_does_not_end_the_watch(run):
    process = run(
        "import subprocess, sys, time\nsubprocess.Popen([sys.executable, '-c', 'import time; time.sleep(0.4)'])\n"
        "time.sleep(20)",
        wait=0.2,
    )
    seen = attach.watch_process(process.pid, seconds=1.0, interval_s=0.05, children=True)
    assert not seen.ended
    assert len(seen.samples) >= 15


def test_a_sample_costs_less_than_a_millisecond():
    block = [bytearray(2**20) for _ in range(100)]
    watch = Watch(interval_s=0.5)
    for _ in range(200):
        watch.sample()
    assert watch.trend().sample_ms <= 1.0
    assert sum(watch.costs_ms[1:]) / 199 <= 2.0  # the mean too, slow readings included (this machine is shared)
    assert len(block) == 100


def test_a_slow_reading_is_taken_as_rarely_as_its_cost_asks(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(outside, "time", SimpleNamespace(perf_counter=lambda: clock[0]))

    def slow():
        clock[0] += 0.0105
        return 7

    sparse = outside.Sparse(slow, 0.001)
    taken = [sparse() for _ in range(110)]
    assert taken.count(7) == 10
    assert taken.count(None) == 100


def test_readings_are_bounded_and_still_span_the_whole_time(monkeypatch):
    monkeypatch.setattr(attach, "MOST_SAMPLES", 50)
    watch = Watch()
    first = watch.sample()
    for _ in range(999):
        last = watch.sample()
    assert 25 <= len(watch.samples) <= 50
    assert len(watch.costs_ms) == len(watch.samples)
    assert watch.samples[0] == first
    assert watch.samples[-1].seconds >= 0.9 * last.seconds


def test_device_memory_of_the_process_itself(monkeypatch):
    used = iter(range(100 * MIB, 10**12, 4 * MIB))
    gpus(monkeypatch, Gpu(processes=lambda: [(os.getpid(), next(used)), (1, 5 * GIB)]))
    watch = Watch(interval_s=1e3)
    for number in range(40):
        watch.sample()
        watch.samples[-1] = attach.Sample(*[float(number), *list(_fields(watch.samples[-1]))[1:]])
    seen = watch.trend(requests_per_second=4.0)
    assert (seen.device_whose, seen.device.verdict) == ("this process", "trend, unproven")
    assert seen.device.slope.value == pytest.approx(4 * MIB)
    assert seen.device_free_bytes == 139 * GIB
    assert "1,049,000 [1,049,000, 1,049,000] B/request" in str(seen)


def _fields(sample):
    return (getattr(sample, name) for name in sample.__dataclass_fields__)


@pytest.mark.parametrize(
    ("processes", "opened", "whose", "words"),
    [
        ([(ABSENT, GIB)], True, "all processes", "other PIDs: this looks like a container"),
        ([(ABSENT, GIB)], None, "all processes", "other PIDs: this looks like a container"),
        ([(ABSENT, GIB)], False, "", "holds no CUDA context"),
        ([], True, "all processes", "a container hides it"),
        ([], False, "", "holds no CUDA context"),
        ([(os.getpid(), None)], True, "all processes", "gives no per-process memory"),
        (refuse(real.NVML_ERROR_NOT_SUPPORTED), True, "all processes", "not supported"),
        (refuse(real.NVML_ERROR_NO_PERMISSION), True, "all processes", "no permission"),
    ],
)
def test_where_nvml_does_not_name_the_process_it_is_said_and_the_device_stands_in(
    monkeypatch, processes, opened, whose, words
):
    gpus(monkeypatch, Gpu(processes=processes, memory=(140 * GIB, 3 * GIB)), opened=opened)
    watch = Watch(interval_s=1e3)
    sample = watch.sample()
    seen = watch.trend()
    assert seen.device_whose == whose
    assert sample.device_bytes == (3 * GIB if whose else None)
    text = str(seen)
    assert words in text
    assert ("3,072 MiB of all processes" in text) == bool(whose)


def test_mig_instances_are_read_in_the_place_of_their_gpu(monkeypatch):
    parts = (Gpu(uuid="MIG-1", processes=[(os.getpid(), GIB)], memory=(20 * GIB, 2 * GIB)), Gpu(uuid="MIG-2"))
    gpus(monkeypatch, Gpu(mig=1, parts=parts, processes=refuse(real.NVML_ERROR_NOT_SUPPORTED)))
    watch = Watch(interval_s=1e3)
    assert watch.sample().device_bytes == GIB
    assert (watch.device.whose, watch.device.free_bytes) == ("this process", 18 * GIB)


def test_a_gpu_lost_midway_leaves_gaps_and_a_reason(monkeypatch):
    answers = [[(os.getpid(), GIB)]] * 3 + [refuse(real.NVML_ERROR_GPU_IS_LOST)] * 10
    answer = iter(answers)
    gpus(monkeypatch, Gpu(processes=lambda: next(answer)))
    watch = Watch(interval_s=1e3)
    seen = [watch.sample().device_bytes for _ in range(5)]
    assert seen == [GIB, GIB, None, None, None]  # one answer went to the listing at the start
    assert "lost" in watch.device.reason


def test_a_number_of_an_outer_namespace_is_known_too(monkeypatch):
    gpus(monkeypatch, Gpu(processes=[(ABSENT, GIB)]))
    monkeypatch.setattr(outside.Process, "pids", lambda self: {self.pid, ABSENT})
    assert Watch(interval_s=1e3).sample().device_bytes == GIB


def options(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    attach.configure(parser)
    return parser.parse_args(words)


def test_the_command_writes_readings_and_verdict(run, tmp_path, capsys):
    file = tmp_path / "seen.json"
    pid = str(run(QUIET).pid)
    assert attach.command(options(pid, "--samples", "25", "--interval", "0.02", "--json", str(file))) == 0
    out = capsys.readouterr().out
    assert out.count("\n") < 12
    content = json.loads(file.read_text())
    assert content["kind"] == content["host"]["verdict"] == "no trend"
    assert len(content["samples"]) == 25
    assert content["host"]["verdict"] == "no trend"
    assert "probe(step)" in content["next"]


@pytest.mark.parametrize(
    ("code", "words", "exit_code"),
    [(QUIET, ["--samples", "25"], 0), (LEAK, ["--samples", "40"], 1), (QUIET, ["--samples", "5"], 2)],
)
def test_the_exit_code_says_what_was_found(run, code, words, exit_code):
    assert attach.command(options(str(run(code).pid), "--interval", "0.03", *words)) == exit_code


def test_help_names_the_exit_codes():
    parser = argparse.ArgumentParser()
    attach.configure(parser)
    assert "exit code: 0 no trend, 1 a trend (unproven), 2 could not judge" in " ".join(parser.format_help().split())


def test_a_terminal_gets_one_line_that_is_written_over(monkeypatch, capsys):
    monkeypatch.setattr(progress, "kind", lambda stream: "bar")
    monkeypatch.setenv("COLUMNS", "60")
    assert attach.command(options(str(os.getpid()), "--seconds", "0.7", "--interval", "0.05")) == 2  # 15 readings
    live = capsys.readouterr().out.split("\n")[0]
    lines = live.split("\r")[1:]
    assert len(lines) >= 2
    assert {len(line) for line in lines} == {59}


@pytest.mark.parametrize("words", [["--seconds", "0"], ["--samples", "-1"], ["--requests-per-second", "0"]])
def test_numbers_that_make_no_sense_are_refused(words):
    with pytest.raises(WatchError, match="above zero"):
        attach.command(options(str(os.getpid()), *words))
    with pytest.raises(WatchError, match="interval_s"):
        Watch(interval_s=0)


@linux
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_watch_with_its_summary(run, number):
    target = run(QUIET)
    code = (
        "import argparse, sys\nfrom o1lab.memory import attach\np = argparse.ArgumentParser()\nattach.configure(p)\n"
        "print('ready', flush=True)\nsys.exit(attach.command(p.parse_args(sys.argv[1:])))"
    )
    command = [sys.executable, "-c", code, str(target.pid), "--interval", "0.05"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as watching:
        assert watching.stdout.readline() == "ready\n"
        time.sleep(2.0)  # 20 readings are the least that is judged
        watching.send_signal(number)
        out, err = watching.communicate(timeout=20)
    assert watching.returncode == 0, err
    assert "stopped by hand" in out
    assert "Traceback" not in err


def seen(shape: str, leak: float) -> trend.Trend:
    values = trend.simulated(shape, leak, n=120)
    samples = [trend.Sample(float(t), int(v), int(v), 3, device_bytes=int(v / 2)) for t, v in enumerate(values)]
    judged = trend.judge(range(120), values, draws=99)
    return trend.Trend(7, "python", 1, tuple(samples), judged, judged, "this process", "", "", 2**34, 2**36, 0.1)


def test_figures_state_what_was_found():
    leaky, clean = attach.figure(seen("warm-up", 2e5)), attach.figure(seen("cache fill", 0))
    for figure in (leaky, clean):
        plots.check(figure)
    assert "trend, unproven" in leaky.layout.title.text
    assert "no trend" in clean.layout.title.text
    names = [trace.name for trace in leaky.data]
    assert {"host", "host, left out", "host, fitted", "device"} <= set(names)
    assert "host, fitted" not in [trace.name for trace in clean.data]
    assert "probe(step)" in seen("flat", 0).caption()


def test_a_notebook_gets_one_output_that_is_updated_and_a_caption_at_the_end(monkeypatch):
    import IPython.display

    shown = []
    handle = SimpleNamespace(update=lambda data, raw: shown.append(data))
    monkeypatch.setattr(IPython.display, "display", lambda data, **kwargs: shown.append(data) or handle)
    monkeypatch.setattr(progress, "in_kernel", lambda: True)
    monkeypatch.setattr(progress, "headless", lambda: False)
    monkeypatch.setattr(plots, "png", lambda figure: None)
    attach.live(os.getpid(), seconds=2.3, interval_s=0.1)
    assert len(shown) == 3  # twice meanwhile, at most once a second, and the end
    assert "Next: o1lab.memory.probe" in shown[-1]["text/plain"]


def test_few_readings_are_too_short():
    assert trend.judge(range(19), range(19)).verdict == "too short"
    assert trend.judge([], []).grown_bytes == 0


def test_growth_below_the_grain_of_the_readings_is_no_trend():
    values = [4096.0 * (t // 20) for t in range(200)]
    assert trend.judge(range(200), values, draws=99).verdict == "no trend"
    assert trend.judge(range(200), values, draws=99, grain_bytes=1).verdict == "trend, unproven"


def test_normal_life_is_no_trend_and_a_planted_leak_is_one():
    table = trend.alarm_table(3, draws=59)
    assert table.false_alarms.sum() <= 1
    assert table.found.sum() >= 17
    assert (abs(table.slope_kib - 64) < 4).all()


@pytest.mark.slow
def test_false_alarms_and_power_of_forty_series_of_each_shape():
    table = trend.alarm_table(40)
    print(table.to_string(index=False))
    assert (table.false_alarms <= 2).all()
    assert (table.found >= 38).all()
