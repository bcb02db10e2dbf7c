"""PagedCache on a real GPU: DynamicCache's tokens, a captured step equal to the plain one, int8 within its bound."""

from __future__ import annotations

import copy

import pytest
import torch
from package.paged_fixture import (
    MODES,
    PAGED,
    append,
    config,
    forced,
    generated,
    model_of,
    prompts,
    some,
    stored,
)

from o1lab.kv import DecodeLoop, PagedCache, decode_bench, pool_for

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:.*past_key_values.*:FutureWarning")]


def on_gpu(kind, dtype=torch.float32):
    return copy.deepcopy(model_of(kind)).to("cuda", dtype)


def pool_of(model, dtype=torch.float32, page_tokens=16):
    pool = pool_for(model.config, 4000, device="cuda", dtype=dtype, page_tokens=page_tokens)
    pool.arena.fill_(255)
    return pool


def moved(**how):
    return {name: value.cuda() for name, value in prompts(**how).items()}


@pytest.mark.parametrize("attention", ["sdpa", PAGED])
@pytest.mark.parametrize("kind", ["llama", "qwen2", "neox"])
@pytest.mark.parametrize("mode", [None, *MODES])
def test_generate_gives_the_tokens_of_dynamic_cache(kind, attention, mode):
    model, how = on_gpu(kind), MODES.get(mode, {})
    alone = mode == "prompt lookup"
    given = moved(batch=1 if alone else 3, padded=not alone)
    expected = generated(model, given, new=40, **how)
    pool = pool_of(model)
    with PagedCache(model.config, pool) as cache:
        assert torch.equal(generated(model, given, cache, attention=attention, new=40, **how), expected)
        pool.check()
    assert not pool.stats().used


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kept", [None, torch.int8])
@pytest.mark.parametrize("kind", ["llama", "neox"])
def test_a_captured_step_equals_the_plain_one(kind, dtype, kept):
    model, ids = on_gpu(kind, dtype), moved()["input_ids"]
    found = {}
    for graph in (False, True):
        with PagedCache(model.config, pool_of(model, kept or dtype), max_tokens=120, dtype=kept) as cache:
            loop = DecodeLoop(model, cache, graph=graph)
            for _ in range(2):  # the second request replays the first one's graph
                tokens, logits = [loop.prefill(ids)], []
                for _ in range(60):
                    tokens.append(loop.step().clone())
                    logits.append(loop.logits.clone())
            assert (loop.graph is not None) == graph
            assert cache.lengths.tolist() == [67] * 3
            assert cache.get_seq_length() == 67
        found[graph] = torch.stack(tokens), torch.stack(logits)
    assert torch.equal(found[True][0], found[False][0])
    assert torch.allclose(found[True][1], found[False][1], atol=1e-4 if dtype == torch.float32 else 1e-2)
    if kept is None and dtype == torch.float32:
        expected = generated(model, {"input_ids": ids, "attention_mask": torch.ones_like(ids)}, new=61)
        assert torch.equal(found[True][0].T, expected[:, 7:])


@pytest.mark.parametrize("kind", ["llama", "qwen2", "neox"])
def test_a_compiled_and_captured_step_equals_the_plain_one(kind):
    model, ids = on_gpu(kind), moved()["input_ids"]
    fed, plain, logits = forced(model, ids, pool_of(model), graph=False)
    _, found, same = forced(model, ids, pool_of(model), fed, graph=True, compiled=True)
    assert torch.equal(found, plain)
    assert torch.allclose(same, logits, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["llama", "qwen2", "neox"])
def test_a_compiled_step_of_16_bits_is_as_near_to_the_exact_one_as_the_plain_one(kind, dtype):
    """Compiled code rounds in other places, so that near-ties fall otherwise: both are held against 32 bits."""
    model, ids = on_gpu(kind, dtype), moved()["input_ids"]
    exact = copy.deepcopy(model).float()
    fed, _, plain = forced(model, ids, pool_of(model, dtype), graph=False)
    _, _, compiled = forced(model, ids, pool_of(model, dtype), fed, graph=True, compiled=True)
    _, _, true = forced(exact, ids, pool_of(exact), fed, graph=False)
    distance, most = ((one - true).square().mean().sqrt() for one in (compiled, plain))
    assert 0 < most < 0.2 * true.std()  # or the bound would hold anything
    assert distance <= 1.5 * most


@pytest.mark.parametrize("how", [{}, {"compiled": True}, {"kernels": True}], ids=str)
def test_reserved_replays_allocate_nothing_and_wait_for_nothing(how):
    model = on_gpu("llama")
    with PagedCache(model.config, pool_of(model), max_tokens=120) as cache:
        loop = DecodeLoop(model, cache, **how)
        loop.prefill(moved()["input_ids"])
        for _ in range(3):
            loop.step()
        cache.reserve(80)
        torch.cuda.synchronize()
        before = torch.cuda.memory_stats()
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(80):
                loop.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        after = torch.cuda.memory_stats()
        assert after["allocation.all.allocated"] == before["allocation.all.allocated"]


def test_a_captured_step_follows_reordered_forks():
    model, ids = on_gpu("llama"), moved()["input_ids"]
    with PagedCache(model.config, pool_of(model), max_tokens=120) as cache:
        loop = DecodeLoop(model, cache)
        loop.prefill(ids)
        for _ in range(4):
            loop.step()
        order = torch.tensor([2, 2, 0], device="cuda")
        cache.reorder_cache(order)
        loop.ids.copy_(loop.ids[order])
        plain = DecodeLoop(model, cache.fork(), graph=False)
        plain.resume(loop.ids[:, 0])
        for _ in range(30):
            assert torch.equal(loop.step(), plain.step())
        plain.cache.release()


def test_int8_is_within_half_a_step_of_its_scale():
    pool = pool_for(config(), 400, device="cuda", dtype=torch.int8, page_tokens=16)
    cache, exact = PagedCache(config(), pool, dtype=torch.int8), some(2, 50).cuda()
    append(cache, exact)
    for side in (0, 1):
        error = (stored(cache, 1, side) - exact[1, side]).abs()
        assert (error <= exact[1, side].abs().amax(-1, keepdim=True) / 254 * 1.001).all()
        assert error.max() > 1e-3


def test_the_bench_runs_every_arm():
    model = decode_bench.load("tiny", "cuda", torch.bfloat16)
    for arm in decode_bench.ARMS:
        row = decode_bench.measure("tiny", model, arm, 2, 64, 8, 60.0, 1e12)
        assert (row.steps, row.note) == (8, "")
