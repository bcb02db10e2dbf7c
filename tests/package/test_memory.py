"""The leak probe and its instruments against leaks of known size, clean loops and look-alikes."""

from __future__ import annotations

import gc
import sys
import threading
import time

import pytest
import torch

from o1lab import claims, models
from o1lab.errors import ProbeError, UnknownName
from o1lab.memory import HostPlant, ServingLoop, compile_cache, counters, detection, probe, sampling, with_plant
from o1lab.stats import Estimate

glibc = pytest.mark.skipif(not counters.has_exact_host(), reason="the exact host counter needs glibc")
pytestmark = glibc


@pytest.fixture(scope="module")
def tiny():
    torch.set_num_threads(1)
    model = models.load("tiny", "cpu")
    return model, [model.encode(prompt) for prompt in model.prompts(8)]


def test_a_planted_64_byte_leak_is_found_in_a_thousand_requests_and_a_minute(tiny):
    model, prompts = tiny
    begun = time.perf_counter()
    with HostPlant(64) as leak:
        report = probe(with_plant(ServingLoop(model), leak), inputs=prompts, owners=False, interventions=False)
        served, true = leak.calls, leak.true_bytes
    assert report.kind == "per-call leak"
    assert served <= 1000
    assert time.perf_counter() - begun < 60
    assert true == 80  # malloc's chunk for 64 bytes
    assert report.host.low - 16 <= true <= report.host.high + 16
    assert report.host.value == pytest.approx(true, abs=16)  # one malloc chunk's granularity


def test_no_leak_is_reported_in_20_of_20_clean_repeats(tiny):
    model, prompts = tiny
    assert detection.false_alarms(ServingLoop(model), inputs=prompts, repeats=20) == 0


def test_the_false_alarm_counter_can_count(tiny):
    model, prompts = tiny
    with HostPlant(512) as leak:
        step = with_plant(ServingLoop(model, new_tokens=0), leak)
        assert detection.false_alarms(step, inputs=prompts, repeats=2) == 2


@pytest.mark.parametrize("size", [256, 4096, 100_000])
def test_the_rate_is_right_within_five_per_cent_or_a_chunk(size):
    with HostPlant(size) as leak:
        report = probe(lambda number: leak())
        true = leak.true_bytes
    assert report.host.value == pytest.approx(true, rel=0.05, abs=16)
    assert report.replay_host.value == pytest.approx(true, rel=0.05, abs=32)


def test_a_plant_switched_off_leaks_nothing():
    with HostPlant(4096, on=False) as leak:
        assert probe(lambda number: leak()).kind == "none"
        assert leak.calls == 0


def test_leaving_a_plant_frees_what_it_took():
    before = counters.read().host_in_use
    with HostPlant(4096) as leak:
        for _ in range(100):
            leak()
        assert counters.read().host_in_use - before >= 100 * 4096
    assert abs(counters.read().host_in_use - before) < 10_000


def test_small_python_objects_are_seen_which_malloc_cannot_see():
    kept = []
    report = probe(lambda number: kept.append(bytes(64)))
    assert report.kind == "per-call leak"
    assert report.host.value == pytest.approx(112, abs=16)  # 97 bytes rounded to pymalloc's 16, the list's place beside


def test_the_smallest_object_kept_per_request_is_no_none():
    kept = []
    assert probe(lambda number: kept.append(object())).kind == "per-call leak"


def test_threads_that_outlive_the_step_make_it_inconclusive():
    report = probe(lambda number: threading.Thread(target=time.sleep, args=(1.0,)).start(), requests_per_round=2)
    assert report.kind == "inconclusive"
    assert "Threads" in report.advice
    time.sleep(1.2)


def test_memory_that_shrinks_is_no_verdict():
    filled = [bytes(1000) for _ in range(2000)]
    report = probe(lambda number: filled.pop())
    assert (report.kind, report.advice[:20]) == ("inconclusive", "In-use memory falls ")


def test_growth_that_stops_on_replay_is_keyed():
    sessions = {}
    report = probe(lambda session: sessions.setdefault(session, bytearray(1000)))
    assert report.kind == "keyed growth"
    assert report.replay_host.value < 16 < 1000 < report.host.value


def test_a_full_cache_is_no_leak():
    sessions = {}
    keys = list(range(16))
    assert probe(lambda key: sessions.setdefault(key, bytearray(1000)), inputs=keys).kind == "none"


def test_garbage_in_cycles_is_lazy_gc():
    class Holder:
        pass

    def cycle(number):
        holder = Holder()
        holder.itself, holder.data = holder, bytearray(100_000)

    report = probe(cycle)
    assert report.kind == "lazy gc"
    assert report.pending_bytes > 1_000_000


def test_a_view_keeps_its_storage_and_the_mean_does_not(tiny):
    model, prompts = tiny
    view = probe(ServingLoop(model, log="view"), inputs=prompts)
    mean = probe(ServingLoop(model, log="mean"), inputs=prompts)
    rule = claims.load()["leak-rate/cure"]
    assert view.host.value > model.model.config.vocab_size * 4
    assert claims.decide(rule, mean.total, {"glibc"}).outcome == "supported"
    assert claims.decide(rule, view.total, {"glibc"}).outcome == "refuted"  # the fix switched off


def test_a_report_reads_like_an_answer():
    with HostPlant(200) as leak:
        report = probe(lambda number: leak(), rounds=6)
    text = str(report)
    assert text.startswith("per-call leak · 192 requests")
    assert "B/request (n=6)" in text
    steps, grown = report.series("host_in_use")
    assert steps == [0, 32, 64, 96, 128, 160, 192]
    assert grown[-1] == pytest.approx(192 * 208, rel=0.05)
    with pytest.raises(ProbeError, match="no counter 'device_allocated'"):
        report.series("device_allocated")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"rounds": 5}, "rounds=5 cannot be judged"),
        ({"requests_per_round": 0}, "at least 1"),
        ({"warm_up": 0}, "at least 1"),
        ({"inputs": []}, "inputs is empty"),
    ],
)
def test_a_probe_that_cannot_judge_says_why(options, words):
    with pytest.raises(ProbeError, match=words):
        probe(lambda request: None, **options)


def test_a_step_that_raises_is_named_and_leaves_nothing_changed():
    frozen, enabled = gc.get_freeze_count(), gc.isenabled()

    def fail(number):
        if number == 40:
            raise ValueError("out of tokens")

    with pytest.raises(ProbeError, match=r"ValueError at request 40: out of tokens") as caught:
        probe(fail)
    assert isinstance(caught.value.__cause__, ValueError)
    assert (gc.get_freeze_count(), gc.isenabled()) == (frozen, enabled)
    assert probe(lambda number: None).kind == "none"  # and the next probe works


def test_a_probe_inside_a_probe_is_refused():
    with pytest.raises(ProbeError, match="a probe inside a probe"):
        probe(lambda number: probe(lambda inner: None))


def test_generators_of_requests_are_taken():
    seen = []
    probe(lambda request: seen.append(request) if len(seen) < 3 else None, inputs=(name for name in "ab"))
    assert seen == ["a", "b", "a"]


def test_reading_counters_leaves_standard_error_alone(capfd):
    counters.read()
    print("still here", file=sys.stderr)
    assert capfd.readouterr().err == "still here\n"


def test_frozen_nests_and_thaws():
    before = gc.get_freeze_count()
    with counters.frozen(), counters.frozen():
        assert gc.get_freeze_count() > before
    assert gc.get_freeze_count() == before


@pytest.mark.parametrize(
    ("slope", "true", "found"),
    [
        ((80, 70, 90), 80, True),
        ((2048, 1900, 2100), 80, False),  # growth, but not this leak's
        ((80, 0, 90), 80, False),
        ((40, 30, 50), 80, True),
        ((39, 30, 50), 80, False),
        ((5, 1, 9), 0, True),  # a false alarm
    ],
)
def test_finding_a_leak_needs_the_right_rate(slope, true, found):
    assert sampling.finds(Estimate(*slope, 50, "B/request"), true) is found


def test_sampling_sees_a_large_host_leak_and_says_why_there_is_no_nvml(tiny):
    size = 33 << 20  # above glibc's largest mmap threshold: never served from heap that earlier tests left free
    with HostPlant(size) as leak:
        seen = sampling.sample(lambda number: leak(), requests=12, samples=8, warm_up=1)
    assert seen.rss_slope.value == pytest.approx(size, rel=0.1)
    if not torch.cuda.is_available():
        assert seen.nvml is None
        assert "CUDA" in seen.nvml_reason


def test_sampling_refuses_more_samples_than_requests():
    with pytest.raises(ProbeError, match="samples=50 of requests=10"):
        sampling.sample(lambda number: None, requests=10)


def test_comparing_instruments_names_a_wrong_place(tiny):
    with pytest.raises(ProbeError, match="'host' or 'cuda'"):
        detection.compare(lambda number: None, inputs=[1], where="moon")


def test_torch_keeps_its_default_number_of_graphs():
    default = compile_cache.default_limits()["recompile_limit"]
    assert compile_cache.graphs_kept(default + 4)[-1] == default
    assert compile_cache.graphs_kept(default + 4, limit=default + 2)[-1] == default + 2
    assert compile_cache.graphs_kept(4, dynamic=True)[-1] == 1


def test_counting_graphs_changes_no_setting():
    import torch._dynamo.config as config

    before = config.recompile_limit
    compile_cache.graphs_kept(3, limit=2)
    assert config.recompile_limit == before


def test_the_patch_as_written_raises_the_limit_and_keeps_more():
    arms = [{"arm": arm, "patch": arm == "patch", "shapes": 11, "backend": "aot_eager"} for arm in ("default", "patch")]
    default, patched = compile_cache.run_arms(arms)
    assert (default.limit, patched.limit) == (8, 32)
    assert (default.graphs[-1], patched.graphs[-1]) == (8, 11)
    assert patched.kept() > default.kept() > 0
    assert patched.per_graph("host").low > 4096


def test_the_eager_control_compiles_nothing_and_keeps_little():
    (eager,) = compile_cache.run_arms([{"arm": "eager", "shapes": 16, "backend": "none"}])
    assert eager.graphs == [0] * 16
    assert eager.per_shape("host").value < 16_384  # a compiled graph keeps over half a million


def test_an_arm_that_fails_says_which_and_why():
    with pytest.raises(ProbeError, match=r"arm 'odd' failed: .*shapes=0"):
        compile_cache.run_arms([{"arm": "odd", "shapes": 0}])


def test_arms_share_an_import_and_keep_their_order_and_the_failing_one_is_named(monkeypatch):
    arms = [
        {"arm": name, "shapes": shapes, "backend": "none"} for name, shapes in zip("abcd", (1, 2, 3, 0), strict=True)
    ]
    started, real = [], compile_cache.subprocess.run
    monkeypatch.setattr(compile_cache.subprocess, "run", lambda *a, **k: started.append(a) or real(*a, **k))
    found = compile_cache.run_arms(arms[:3], workers=2)
    assert [(one.arm, len(one.graphs)) for one in found] == [("a", 1), ("b", 2), ("c", 3)]
    assert len(started) == (2 if sys.platform == "linux" else 3)
    with pytest.raises(ProbeError, match=r"arm 'd' failed: .*shapes=0"):
        compile_cache.run_arms([arms[0], arms[3]], workers=1)


def test_a_serving_loop_refuses_what_it_does_not_know(tiny):
    with pytest.raises(UnknownName, match="mean"):
        ServingLoop(tiny[0], log="meen")
    with pytest.raises(ProbeError, match="at least one new token"):
        ServingLoop(tiny[0], log="view", new_tokens=0)
