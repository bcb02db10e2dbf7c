"""The probe beyond a callable: loops it does not own, models, interventions, balances, horizons, bad input."""

from __future__ import annotations

import dataclasses
import gc
import itertools
import math
import os
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from o1lab import models
from o1lab.errors import ProbeError
from o1lab.memory import HostPlant, counters, probe, watch
from o1lab.memory.judge import Judge
from o1lab.memory.rounds import COUNTERS, Rounds
from o1lab.stats import Estimate

pytestmark = pytest.mark.skipif(not counters.has_exact_host(), reason="the exact host counter needs glibc")


def serve(w, rounds, step, *, replay=False, per_round=10):
    for _ in range(rounds):
        for _ in range(per_round):
            step()
        w.round(replay=replay)


def test_a_loop_it_does_not_own_is_judged_with_its_replays():
    with HostPlant(300) as leak, watch(requests_per_round=10) as w:
        serve(w, 12, leak)
        serve(w, 6, leak, replay=True)
    assert w.report.kind == "per-call leak"
    assert w.report.host.value == pytest.approx(leak.true_bytes or 312, abs=16)


def test_without_a_replay_growth_is_certain_and_its_cause_is_not():
    with HostPlant(300) as leak, watch(requests_per_round=10) as w:
        serve(w, 12, leak)
    assert (w.report.kind, w.report.grows) == ("inconclusive", True)
    assert "replay=True" in w.report.advice


def test_keys_that_stop_growing_on_replay_are_keyed_in_a_watched_loop():
    cache, numbers = {}, itertools.count()
    with watch(requests_per_round=10) as w:
        serve(w, 12, lambda: cache.setdefault(next(numbers), bytearray(2000)))
        serve(w, 7, lambda: cache.setdefault(1, bytearray(2000)), replay=True)
    assert w.report.kind == "keyed growth"
    assert any("cache" in owner.path for owner in w.report.owners)


def test_a_clean_loop_is_none():
    with watch(requests_per_round=10) as w:
        serve(w, 10, lambda: bytearray(5000))
    assert (w.report.kind, w.report.grows) == ("none", False)


def test_too_few_rounds_say_how_many_are_needed():
    with watch() as w:
        w.round()
    with pytest.raises(ProbeError, match=r"1 rounds were ended; a judgement needs 8"):
        _ = w.report


def test_a_watched_loop_that_raises_leaves_nothing_changed():
    frozen, enabled = gc.get_freeze_count(), gc.isenabled()

    def fail():
        with watch() as w:
            w.round()
            raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        fail()
    assert (gc.get_freeze_count(), gc.isenabled()) == (frozen, enabled)
    with watch(), pytest.raises(ProbeError, match="a probe inside a probe"):
        probe(lambda number: None)
    assert probe(lambda number: None, rounds=6).kind == "none"


def test_a_full_watch_stops_measuring_and_does_not_grow():
    with watch(capacity=9) as w:
        serve(w, 30, lambda: None, per_round=1)
    assert w.rounds.count == 9


def test_an_endless_generator_of_requests_is_drawn_only_as_far_as_needed():
    drawn = itertools.count()
    last = [0]

    def requests():
        for number in drawn:
            last[0] = number
            yield number

    assert probe(lambda request: None, inputs=requests(), rounds=6, requests_per_round=4).kind == "none"
    assert last[0] < 200


def test_a_model_with_prompts_is_probed_as_it_is():
    model = models.load("tiny", "cpu")
    prompts = model.prompts(4)
    assert probe(model, inputs=prompts, rounds=6, requests_per_round=8).kind == "none"
    bare = probe(model.model, inputs=[model.encode(prompt) for prompt in prompts], rounds=6, requests_per_round=8)
    assert bare.kind == "none"
    with pytest.raises(ProbeError, match="tokenize first"):
        probe(model.model, inputs=["hello"])
    with pytest.raises(ProbeError, match="needs inputs"):
        probe(model)
    with pytest.raises(ProbeError, match="give a callable"):
        probe(3)


def test_a_pool_of_threads_made_in_the_warm_up_is_no_unrest():
    with ThreadPoolExecutor(2) as pool:
        report = probe(lambda number: pool.submit(int).result(), rounds=6, requests_per_round=4)
    assert report.kind == "none"


def test_a_step_that_forks_and_comes_back_ends_the_child(tmp_path):
    marker = tmp_path / "child"
    parent = os.getpid()

    def fork(number):
        if number == 20 and os.fork() == 0:
            return
        if number == 20:
            time.sleep(0.5)

    try:
        probe(fork, rounds=6, requests_per_round=8)
    except ProbeError as error:
        if os.getpid() != parent:
            marker.write_text(str(error))
            os._exit(0)
        raise
    finally:
        if os.getpid() != parent:
            os._exit(1)
    os.wait()
    assert "forked and its child came back" in marker.read_text()


def test_compiled_growth_is_told_from_eager_and_reset_gives_it_back():
    torch._dynamo.reset()
    with torch._dynamo.config.patch(recompile_limit=1000):
        double = torch.compile(lambda x: x * 2 + 1, backend="eager", dynamic=False)
        report = probe(lambda n: double(torch.zeros(n + 2)), rounds=6, requests_per_round=4, owners=False)
    torch._dynamo.reset()
    assert report.kind == "keyed growth"
    assert report.eager.value < 0.1 * report.total.value
    assert "torch.compile keeps it" in report.advice
    assert report.returned["dynamo.reset"] > 50_000
    assert torch.compiler.is_compiling() is False


def test_each_line_of_the_balance_closes():
    with HostPlant(5000) as leak:
        report = probe(lambda number: leak(), rounds=6, owners=False)
    table = report.balances()
    assert len(table) == len(report.readings)
    rest = table.rss - table.host_in_use - table.host_free - table.host_rest
    assert (rest == 0).all()
    assert table.host_in_use.iloc[-1] == pytest.approx(6 * 32 * leak.true_bytes if leak.true_bytes else 9.6e5, rel=0.02)


def test_the_horizon_follows_from_the_interval():
    with HostPlant(1000) as leak:
        leaky = probe(lambda number: leak(), rounds=6, owners=False)
    horizon = leaky.hours_to_oom(10, free_bytes=36e9)
    assert horizon.expected == pytest.approx(1e6 / leaky.host.value, rel=0.01)
    assert horizon.soonest <= horizon.expected <= horizon.latest
    clean_report = probe(lambda number: None, rounds=6)
    clean = clean_report.hours_to_oom(10, free_bytes=1e9)
    assert math.isinf(clean.expected)
    assert leaky.hours_to_oom(1).soonest > 0  # with what this machine has free
    with pytest.raises(ProbeError, match="must be positive"):
        leaky.hours_to_oom(0)
    with pytest.raises(ProbeError, match="must be positive"):
        leaky.hours_to_oom(1, free_bytes=-5)
    with pytest.raises(ProbeError, match="for 'host' or 'device'"):
        leaky.hours_to_oom(1, where="moon")
    both = dataclasses.replace(clean_report, device=leaky.host)
    assert both.hours_to_oom(10, free_bytes=1e9) == both.hours_to_oom(10, free_bytes=1e9, where="device")


def ledger(series, per_round=10):
    """Rounds with made-up readings: the judge is a pure function of them."""
    count = len(next(iter(series.values())))
    rounds = Rounds(count, per_round)
    for number in range(count):
        for index, name in enumerate(COUNTERS):
            values = series.get(name)
            rounds.ledger[number * len(COUNTERS) + index] = values[number] if values else -(1 << 62)
    rounds.count = count
    return rounds


STEADY = {"host_in_use": [10**8] * 20, "host_free": [10**6] * 20, "rss": [2 * 10**8] * 20}


@pytest.mark.parametrize(
    ("changed", "kind"),
    [
        ({}, "none"),
        ({"device_used": [n * 10**6 for n in range(20)]}, "driver"),
        (
            {"device_used": [n * 10**8 for n in range(20)], "host_in_use": [10**8 + n * 30_000 for n in range(20)]},
            "driver",
        ),
        ({"rss": [10**8 + n * 10**5 for n in range(20)]}, "inconclusive"),  # neither in use nor free heap: mapped
        ({"rss": [10**8 + n * 3000 for n in range(20)]}, "none"),  # pages of a trimmed heap, touched again
        ({"host_in_use": [10**8 - n * 10**5 for n in range(20)]}, "inconclusive"),
        ({"host_in_use": [10**8 + (n % 2) * 10**5 for n in range(20)]}, "none"),  # a saw-tooth
    ],
)
def test_the_judge_on_made_up_readings(changed, kind):
    judge = Judge(ledger({**STEADY, **changed}), 1, range(2, 20), 16.0)
    judge.decide()
    assert judge.kind == kind


def test_growth_that_begins_late_is_waited_for():
    kept, served = [], itertools.count()

    def late(number):
        if next(served) > 110:  # about the eighth of twelve judged rounds
            kept.append(bytes(500))

    report = probe(late, requests_per_round=10, owners=False)
    assert report.kind == "per-call leak"
    assert report.host.value == pytest.approx(544, abs=24)


@pytest.mark.parametrize("every", [70, 100])
def test_a_leak_in_a_few_requests_only_is_not_called_none(every):
    kept = []
    report = probe(lambda number: kept.append(bytearray(100_000)) if number % every == 0 else None, owners=False)
    assert report.kind == "inconclusive"
    assert "jumps" in report.advice
    with watch(requests_per_round=32) as w:
        numbers = itertools.count()
        serve(w, 12, lambda: kept.append(bytearray(100_000)) if next(numbers) % every == 0 else None, per_round=32)
    assert (w.report.kind, "jumps" in w.report.advice) == ("inconclusive", True)


def test_a_leak_in_one_request_of_thirty_is_never_called_a_cache():
    import random

    for seed in range(4):
        chance, kept = random.Random(seed), []
        report = probe(
            lambda n, c=chance, k=kept: k.append(bytearray(30_000)) if c.random() < 0.03 else None, owners=False
        )
        assert report.kind in ("inconclusive", "per-call leak"), seed


def test_one_jump_in_all_the_rounds_is_no_leak():
    numbers, kept = itertools.count(), []

    def once(request):
        if next(numbers) == 200:
            kept.append(bytearray(1_000_000))

    assert probe(once, owners=False).kind == "none"


@pytest.mark.parametrize("make", ["coroutine", "generator"])
def test_a_step_that_runs_nothing_is_refused(make):
    async def coroutine(number):
        pass

    def generator(number):
        yield number

    with pytest.raises(ProbeError, match=f"returned a {make} that nothing has run"):
        probe({"coroutine": coroutine, "generator": generator}[make])


def test_many_inputs_add_nothing_of_the_probes_own():
    report = probe(lambda number: None, inputs=list(range(10_000)), floor=4.0)
    assert report.kind == "none"
    assert report.host.high <= 4


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"rounds": 6.5}, "rounds=6.5 must be a whole number"),
        ({"requests_per_round": "8"}, "must be a whole number"),
        ({"inputs": 5}, "inputs is a int"),
        ({"inputs": "hello"}, "inputs is a str"),
        ({"floor": 0}, "floor=0 must be a number of bytes"),
        ({"floor": "x"}, "floor='x' must be a number"),
    ],
)
def test_what_cannot_be_meant_is_refused(options, words):
    with pytest.raises(ProbeError, match=words):
        probe(lambda number: None, **options)


def test_a_floor_is_kept_to_and_said():
    kept = []
    report = probe(lambda number: kept.append(bytearray(1000)), floor=4000.0, rounds=6, owners=False)
    assert (report.kind, report.grows) == ("none", False)
    assert "4000 B/request" in report.advice
    assert repr(report) == str(report)


def test_a_round_outside_the_block_is_refused():
    with pytest.raises(ProbeError, match="outside the with block"):
        watch().round()


@pytest.mark.parametrize(
    ("stuck", "again", "kind"),
    [
        (0.0, 10**6, "fragmentation"),  # the cache could be given back
        (9e4, 10**6, "per-call leak"),  # pools that nothing reclaims, also on replay
        (9e4, 0, "keyed growth"),
    ],
)
def test_reserved_memory_that_cannot_be_given_back_is_a_leak(stuck, again, kind):
    reserved = [10**8 + n * 10**6 for n in range(13)]
    reserved += [reserved[-1] + again * n for n in range(1, 8)]
    device = {"device_allocated": [10**7] * 20, "device_reserved": reserved, "device_used": [10**9] * 20}
    judge = Judge(ledger({**STEADY, **device}), 1, range(2, 13), 16.0)
    judge.replay, judge.stuck = range(14, 20), stuck
    assert judge.needs_replay()
    judge.decide()
    assert judge.kind == kind
    assert judge.advice


def test_a_lost_device_is_named(monkeypatch):
    calls = itertools.count()

    def lose(**_):
        if next(calls) > 10:
            raise RuntimeError("CUDA error: unspecified launch failure\nmore")
        return counters.Reading(10**8, 10**6, 2 * 10**8)

    monkeypatch.setattr("o1lab.memory.rounds.counters.read", lose)
    with pytest.raises(ProbeError, match=r"device failed after 5 rounds \(CUDA error: unspecified launch failure\)"):
        probe(lambda number: None, requests_per_round=1)


def test_what_no_python_object_owns_is_shown_as_unattributed():
    kept = []
    with HostPlant(2000) as leak:

        def both(number):
            leak()
            kept.append(torch.zeros(1000))

        report = probe(both, rounds=6, requests_per_round=8)
    assert isinstance(report.unattributed, Estimate)
    assert report.unattributed.value == pytest.approx(2016, abs=700)  # the tensor's own C++ shell is unattributed too
    assert report.owners[0].path.startswith("kept")
    assert "unattributed" in str(report)
