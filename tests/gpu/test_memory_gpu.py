"""The leak lab on a real GPU: device counters, planted device leaks, what NVML and torch's profiler see."""

from __future__ import annotations

import pytest
import torch

from o1lab import models
from o1lab.memory import DevicePlant, ServingLoop, compile_cache, counters, probe, sampling, with_plant

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def loop():
    model = models.load("tiny", "cuda")
    serve = ServingLoop(model, new_tokens=2)
    prompts = [model.encode(prompt) for prompt in model.prompts(8)]
    for prompt in prompts:
        serve(prompt)
    return serve, prompts


def test_a_512_byte_device_leak_is_found_within_200_requests(loop):
    serve, prompts = loop
    with DevicePlant(512, "cuda") as leak:
        options = {"owners": False, "interventions": False}
        report = probe(with_plant(serve, leak), inputs=prompts, rounds=12, requests_per_round=8, warm_up=4, **options)
        served = leak.calls
    assert report.kind == "per-call leak"
    assert report.device.low <= 512 <= report.device.high
    assert report.device.value == pytest.approx(512, rel=0.05)
    assert served <= 200


def test_the_clean_loop_keeps_no_device_memory(loop):
    serve, prompts = loop
    kinds = {probe(serve, inputs=prompts, rounds=12, requests_per_round=8, warm_up=4).kind for _ in range(10)}
    assert kinds == {"none"}


def test_a_view_keeps_the_whole_row_of_logits(loop):
    serve, prompts = loop
    view = ServingLoop(serve.model, log="view", new_tokens=2)
    report = probe(view, inputs=prompts, rounds=12, requests_per_round=8, warm_up=4)
    assert report.device.value == pytest.approx(serve.model.model.config.vocab_size * 4, rel=0.05)
    assert report.kind == "per-call leak"


def test_memory_cached_by_the_allocator_is_no_leak():
    def allocate_and_free(number):
        blocks = [torch.empty(3 << 20, dtype=torch.uint8, device="cuda") for _ in range(4)]
        blocks.clear()

    report = probe(allocate_and_free, rounds=8, requests_per_round=4)
    assert report.kind == "none"
    assert report.balance.device_allocated == 0


def test_torchs_profiler_names_the_planting_line(loop):
    serve, prompts = loop
    with DevicePlant(4096, "cuda") as leak:
        sites = sampling.live_sites(with_plant(serve, leak), inputs=prompts, requests=100)
    (site, size), *_ = sites.most_common(1)
    assert site.startswith("plants.py:")
    assert size == 100 * 4096 or size == 101 * 4096


def test_nvml_sees_a_large_leak_and_not_a_small_one(loop):
    serve, prompts = loop
    with DevicePlant(1 << 20, "cuda") as leak:
        large = sampling.sample(with_plant(serve, leak), inputs=prompts, requests=100, samples=50)
    if large.nvml is None:
        pytest.skip(f"NVML gives no per-process memory: {large.nvml_reason}")
    with DevicePlant(512, "cuda") as leak:
        small = sampling.sample(with_plant(serve, leak), inputs=prompts, requests=100, samples=50)
    assert sampling.finds(large.nvml_slope, 1 << 20)
    assert not sampling.finds(small.nvml_slope, 512)


def test_recompiles_leave_no_device_memory_behind():
    (growth,) = compile_cache.run_arms(
        [{"arm": "limit 256", "limit": 256, "shapes": 12, "device": "cuda", "backend": "aot_eager"}]
    )
    assert growth.graphs[-1] == 12
    assert growth.per_graph("device").value == 0


def test_reading_counters_starts_no_context_of_its_own():
    import subprocess
    import sys

    code = "from o1lab.memory import counters; counters.read(); import torch; print(torch.cuda.is_initialized())"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"
    assert counters.cuda_ready()
