"""The soak: pieces in their own processes, signals, damaged files, and the combined slope against planted truths."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from o1lab import plots
from o1lab.memory import counters, soak
from o1lab.memory.soak import Piece, SoakError
from o1lab.stats import Estimate

glibc = pytest.mark.skipif(not counters.has_exact_host(), reason="the exact host counter needs glibc")


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "o1lab.memory.soak", "--device", "cpu", *words]


def piece(arm: str = "cured", slope: float = 0.0, *, n: int = 40, seed: int = 0, noise: float = 2e3, phi: float = 0.6):
    random, requests = np.random.default_rng(seed), [100 * i for i in range(n)]
    error = random.normal(size=n) * noise
    for i in range(1, n):
        error[i] += phi * error[i - 1]
    host = [int(5e8 + 1e6 * seed + slope * r + e) for r, e in zip(requests, error, strict=True)]
    seconds = [float(i) for i in range(n)]
    return Piece(
        arm, "tiny", "CPU", "2.13", 1.0, end="finished", seconds=seconds, requests=requests, host=host,
        device=[None] * n, reserved=[None] * n, rss=host,
    )  # fmt: skip


def test_pieces_with_intercepts_of_their_own_cover_the_common_slope():
    covered, runs = 0, 60
    for run in range(runs):
        pieces = [piece(slope=3.0, seed=1000 * run + number) for number in range(2)]
        [both] = soak.combine(pieces)
        covered += both.slopes["total"].low <= 3.0 <= both.slopes["total"].high
        assert both.slopes["total"].high - both.slopes["total"].low < 100
    assert covered / runs >= 0.95 - 3 * math.sqrt(0.95 * 0.05 / runs)


def test_more_pieces_narrow_the_interval_and_disagreement_widens_it():
    one, same, other = (Estimate(value, value - 1, value + 1, 20, "B") for value in (1.0, 1.0, 9.0))
    agreeing, torn = (soak.pooled([one, second], [50, 50]) for second in (same, other))
    assert agreeing.high - agreeing.low == pytest.approx(2 / math.sqrt(2))
    assert torn.high - torn.low > 8
    assert soak.pooled([one, other], [50, 5000]).value == pytest.approx(9, abs=0.01), "the longer piece counts"
    exact = Estimate(5.0, 5.0, 5.0, 20, "B")
    assert soak.pooled([exact, exact], [100, 100], floor=50).low == pytest.approx(5 - 0.5 / math.sqrt(2))


@pytest.mark.parametrize(
    ("slope", "noise", "words"),
    [
        (0.0, 2e3, "cured: the interval contains 0"),
        (1500.0, 2e3, "grows"),
        (-500.0, 2e3, "shrinks"),
        (8.0, 50.0, "below the floor of 16"),
        (0.0, 3e7, "not decided"),
    ],
)
def test_verdicts(slope, noise, words):
    [seen] = soak.combine([piece(slope=slope, noise=noise, seed=seed) for seed in (1, 2)])
    assert words in seen.verdict
    assert words in str(seen)


def test_host_and_device_add_up_and_the_warm_up_is_left_out():
    both = piece(noise=0.0)
    both.device = [1024 * r for r in both.requests]
    both.host[:3] = [0, 0, 0]
    [seen] = soak.combine([both])
    assert seen.slopes["device"].value == pytest.approx(1024)
    assert seen.slopes["total"].value == pytest.approx(1024)
    assert (seen.left_out, seen.requests, round(seen.minutes, 2)) == (4, 3900, 0.65)
    assert set(soak.combine([piece()])[0].slopes) == {"host", "total"}


def test_the_figure_puts_both_arms_on_one_pair_of_axes():
    leaky = soak.combine([piece("leaky", 1500.0, seed=seed) for seed in (1, 2)])[0]
    cured = soak.combine([piece("cured", 0.0, seed=seed) for seed in (3, 4)])[0]
    figure = soak.figure(leaky, cured)
    plots.check(figure)
    broken, fixed = figure.data
    assert (broken.name, fixed.name) == ("leaky", "cured")
    assert broken.x[-1] == fixed.x[-1] == 2 * 3500
    assert broken.y[-1] == pytest.approx(1500 * 7000 / 2**20, rel=0.05)
    assert abs(fixed.y[-1]) < 0.1


def test_readings_take_no_memory_as_they_grow():
    readings = soak.Readings(300)
    readings.take(0, 0.0)
    with counters.frozen():
        for number in range(200):
            readings.take(number, float(number))
        host = readings.columns["host"]
        assert abs(host[200] - host[50]) < 2048
    filled = readings.into(piece())
    assert len(filled.host) == len(filled.seconds) == 201
    assert filled.values("device") is None or counters.cuda_ready()


def test_a_full_array_of_readings_takes_no_more():
    readings = soak.Readings(2)
    for number in range(5):
        readings.take(number, 1.0)
    assert list(readings.columns["requests"]) == [0, 1]


@glibc
def test_both_arms_soaked_here(tmp_path):
    files = [tmp_path / f"{arm}.json" for arm in soak.ARMS]
    for arm, file in zip(soak.ARMS, files, strict=True):
        soak.soak(arm, file, minutes=0.04, cadence_s=0.1, device="cpu")
    leaky, cured = soak.combine(soak.load(*files))
    assert leaky.slopes["host"].value == pytest.approx(1440, rel=0.4)  # 1024 B of logits, the rest the tensor's own
    assert abs(cured.slopes["host"].value) < 0.3 * leaky.slopes["host"].value
    assert "grows" in leaky.verdict
    assert leaky.pieces[0].end == "finished"


@glibc
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_a_soak_with_what_it_has(tmp_path, number):
    before, file = signal.getsignal(number), tmp_path / "a.json"

    def send():
        while not file.exists():
            time.sleep(0.05)
        time.sleep(0.5)
        os.kill(os.getpid(), number)

    threading.Thread(target=send, daemon=True).start()
    ended = soak.soak("cured", file, minutes=2, cadence_s=0.2, device="cpu")
    assert ended.end == signal.Signals(number).name
    assert ended.seconds[-1] < 60
    assert soak.load(file) == [ended]
    assert signal.getsignal(number) is before
    assert [name for name in os.listdir(tmp_path) if name.endswith(".tmp")] == []


@glibc
@pytest.mark.slow
def test_the_command_soaks_in_pieces_ends_on_a_signal_and_reports(tmp_path, capsys):
    files = {arm: str(tmp_path / f"{arm}.json") for arm in soak.ARMS}
    for arm in ("leaky", "cured", "cured"):
        words = ["--minutes", "0.12", "--every", "0.25", "--arm", arm, "--into", files[arm]]
        done = subprocess.run(command(*words), capture_output=True, text=True, timeout=200)
        assert done.returncode == 0, done.stderr
    whole = tmp_path / "whole.json"
    words = ["--minutes", "5", "--every", "0.25", "--arm", "cured", "--into", str(whole), "--resume", files["cured"]]
    with subprocess.Popen(command(*words), stdout=subprocess.PIPE, text=True) as running:
        deadline = time.monotonic() + 100
        while not whole.exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        time.sleep(2.0)
        running.send_signal(signal.SIGTERM)
        out, _ = running.communicate(timeout=60)
    assert (running.returncode, "SIGTERM" in out) == (0, True)
    assert [each.end for each in soak.load(whole)] == ["finished", "finished", "SIGTERM"]
    assert soak.main(["--report", files["leaky"], str(whole)]) == 0
    assert "3 pieces" in capsys.readouterr().out
    leaky, cured = soak.combine(soak.load(files["leaky"], whole))
    assert leaky.slopes["host"].value == pytest.approx(1440, rel=0.05)
    assert cured.slopes["host"].low <= 0 <= cured.slopes["host"].high
    assert "cured" in cured.verdict
    assert not any(each.thread_cache for each in leaky.pieces + cured.pieces)


def test_saving_again_replaces_the_piece_of_the_same_id(tmp_path):
    file, one = tmp_path / "a.json", piece()
    soak.save(file, one, [piece(seed=3)])
    one.requests.append(10**6)
    soak.save(file, one)
    assert [p.requests[-1] for p in soak.load(file)] == [3900, 10**6]


def test_what_cannot_be_soaked_or_read_is_said(tmp_path):
    with pytest.raises(SoakError, match="there is no"):
        soak.load(tmp_path / "none.json")
    for text in ("{", "[]", '{"pieces": [{"arm": 1}]}', '{"pieces": 3}'):
        (tmp_path / "bad.json").write_text(text)
        with pytest.raises(SoakError, match="is no soak file"):
            soak.load(tmp_path / "bad.json")
    with pytest.raises(SoakError, match="no piece has 16 readings"):
        soak.combine([piece(n=15)])
    for options in ({"arm": "both"}, {"minutes": 0}, {"cadence_s": -1.0}):
        with pytest.raises(SoakError, match="arms are leaky, cured"):
            soak.soak(**{"arm": "cured", "into": tmp_path / "x.json", **options})
    soak.save(tmp_path / "leaky.json", piece("leaky"))
    with pytest.raises(SoakError, match="name another file"):
        soak.soak("cured", tmp_path / "leaky.json", minutes=0.01, device="cpu")
    with pytest.raises(SystemExit):
        soak.main(["--arm", "cured"])


def test_signal_handlers_come_back():
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with soak.stop_signals() as came:
        os.kill(os.getpid(), signal.SIGTERM)
        for _ in range(100):
            if came:
                break
            time.sleep(0.01)
    assert came == ["SIGTERM"]
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def test_help_says_units_defaults_and_an_example(capsys):
    with pytest.raises(SystemExit) as ended:
        soak.main(["--help"])
    assert ended.value.code == 0
    told = capsys.readouterr().out
    options = told.split("options:")[1].split("example,")[0]
    for entry in options.split("\n  --")[1:]:
        assert len(entry.split()) >= 8, entry  # name, value and what it means
    told = " ".join(told.split())
    for words in ("in minutes (default 10)", "seconds between readings", "B/request", "--report leaky.json"):
        assert words in told
