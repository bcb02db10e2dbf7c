"""PagedCache against DynamicCache and plain tensors: the same tokens, no page lost, typed refusals."""

from __future__ import annotations

import copy
import gc
import json
import math
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from package.paged_fixture import (
    HEADS,
    KINDS,
    MODES,
    PAGED,
    WIDTH,
    append,
    config,
    generated,
    model_of,
    pool_of,
    prompts,
    some,
    stored,
)
from transformers import DynamicCache

from o1lab.errors import CacheError
from o1lab.kv import DecodeLoop, PagedCache, PagePool, PoolExhausted, decode_bench, pool_for
from o1lab.kv.compiled import joined
from o1lab.kv.layout import Layout

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:.*past_key_values.*:FutureWarning"),
]


def same_tokens(kind, attention, padded=False, batch=3, **how):
    model, given = model_of(kind), prompts(batch, padded=padded)
    expected = generated(model, given, attention="eager" if attention == "eager" else "sdpa", **how)
    pool = pool_of(model)
    with PagedCache(model.config, pool) as cache:
        found = generated(model, given, cache, attention=attention, **how)
        pool.check()
        assert pool.owners() == {cache.owner: pool.stats().references}
    assert torch.equal(found, expected)
    assert len(set(expected[0].tolist())) > 8  # a model that repeats one token would hide a broken cache
    assert not pool.stats().used
    return pool


@pytest.mark.parametrize("attention", ["sdpa", "eager", PAGED])
@pytest.mark.parametrize("kind", ["llama", "qwen2", "neox"])
def test_generate_gives_the_tokens_of_dynamic_cache(kind, attention):
    same_tokens(kind, attention, padded=True)
    same_tokens(kind, attention, num_beams=3)


@pytest.mark.parametrize("attention", ["sdpa", PAGED])
@pytest.mark.parametrize("mode", MODES)
def test_every_way_to_decode(mode, attention):
    same_tokens("llama", attention, padded=mode != "prompt lookup", batch=1 if "lookup" in mode else 3, **MODES[mode])


@pytest.mark.parametrize("attention", ["sdpa", PAGED])
def test_assisted_decoding_crops_what_was_refused(attention):
    helper = model_of("llama", seed=1)
    helper.set_attn_implementation("sdpa")
    same_tokens("llama", attention, batch=1, assistant_model=helper)


def test_beams_share_the_pages_that_are_full():
    pool = same_tokens("llama", "sdpa", num_beams=3)
    assert pool.stats().peak_used < 2 * 9 * math.ceil(26 / 8)  # fewer than nine beams of their own
    assert pool.stats().allocations > 8  # and copies were made


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype):
    model = copy.deepcopy(model_of("llama")).to(dtype)
    how = {"output_logits": True, "return_dict_in_generate": True}
    expected = generated(model, prompts(), **how)
    with PagedCache(model.config, pool_of(model, dtype=dtype)) as cache:
        assert torch.equal(generated(model, prompts(), cache), expected.sequences)
    with PagedCache(model.config, pool_of(model, dtype=dtype)) as cache, torch.no_grad():
        first = generated(
            model, prompts(), cache, attention=PAGED, new=2, output_logits=True, return_dict_in_generate=True
        )
    for ours, theirs in zip(first.logits, expected.logits, strict=False):
        assert (ours - theirs).abs().max() < 0.05 * theirs.abs().max()


def test_decode_reads_pages_without_gathering(monkeypatch):
    calls = []
    decode = PagedCache.update.__globals__["Layout"].gathered
    monkeypatch.setattr(Layout, "gathered", lambda *given: calls.append("gathered") or decode(*given))
    import o1lab.attention.dispatch as dispatch

    inner = dispatch.paged_decode
    monkeypatch.setattr(dispatch, "paged_decode", lambda *a, **k: calls.append("paged_decode") or inner(*a, **k))
    same_tokens("llama", PAGED)
    assert calls == ["paged_decode"] * 2 * 19
    same_tokens("llama", "sdpa")
    assert calls[-1] == "gathered"


def test_a_continued_conversation_and_inference_mode():
    model, given = model_of("llama"), prompts(1)
    longer = torch.cat([given["input_ids"], prompts(1, 5, seed=8)["input_ids"]], 1)
    whole = {"input_ids": longer, "attention_mask": torch.ones_like(longer)}
    expected = generated(model, whole)
    for attention in ("sdpa", PAGED):
        model.set_attn_implementation(attention)
        with PagedCache(model.config, pool_of(model)) as cache:
            with torch.inference_mode():
                model(given["input_ids"], **{DecodeLoop.cache_name(model): cache})
            cache.crop(-2)
            assert torch.equal(generated(model, whole, cache, attention=attention), expected)


# keys and values by themselves


def small_pool(pages=40, page_tokens=4, dtype=torch.float32):
    pool = pool_for(config(), pages // 2 * page_tokens, device="cpu", dtype=dtype, page_tokens=page_tokens)
    pool.arena.fill_(255)
    return pool


def test_forks_share_pages_and_copy_the_last_one_at_the_first_write():
    pool = small_pool()
    base = PagedCache(config(), pool)
    prompt = some(1, 10)
    append(base, prompt)
    assert pool.stats().used == 2 * 3
    fork = base.fork([0, 0, 0])
    part = base.fork(tokens=5)
    assert pool.stats().used == 2 * 3
    new = some(3, 1, seed=1)
    append(fork, new)
    assert pool.stats().used == 2 * (3 + 3)  # three tails, two full pages still shared
    append(base, some(1, 1, seed=2))
    append(part, some(1, 1, seed=3))
    pool.check()
    for layer in (0, 1):
        expected = torch.cat([prompt[layer, 0].expand(3, -1, -1, -1), new[layer, 0]], 2)
        assert torch.equal(stored(fork, layer, 0), expected)
        assert torch.equal(stored(base, layer, 1)[:, :, :10], prompt[layer, 1])
        expected = torch.cat([prompt[layer, 0][:, :, :5], some(1, 1, seed=3)[layer, 0]], 2)
        assert torch.equal(stored(part, layer, 0), expected)
    base.release()
    part.release()
    assert torch.equal(stored(fork, 0, 0)[2, :, :10], prompt[0, 0, 0])
    fork.release()
    assert not pool.stats().used


def test_the_last_holder_of_a_tail_keeps_it_uncopied():
    pool = small_pool()
    base = PagedCache(config(), pool)
    append(base, some(1, 6))
    fork = copy.deepcopy(base)
    append(fork, some(1, 1))
    before = pool.stats()
    append(base, some(1, 1))
    append(fork, some(1, 1))
    assert (pool.stats().used, pool.stats().allocations) == (before.used, before.allocations)
    other = base.fork()
    append(base, some(1, 1))  # behind what the fork reads: nothing to copy yet
    assert pool.stats().allocations == before.allocations
    append(other, some(1, 1))
    assert pool.stats().allocations == before.allocations + 1


def test_a_cropped_sequence_does_not_write_into_what_it_shared():
    pool, prompt = small_pool(), some(1, 8)
    base = PagedCache(config(), pool)
    append(base, prompt)
    fork = base.fork()
    append(base, some(1, 1, seed=1))
    base.crop(-3)
    append(base, some(1, 1, seed=2))
    assert torch.equal(stored(fork, 1, 0), prompt[1, 0])
    assert torch.equal(stored(base, 1, 0), torch.cat([prompt[1, 0][:, :, :6], some(1, 1, seed=2)[1, 0]], 2))


def test_int8_is_rounded_by_token_and_head_and_copied_with_its_scales():
    exact, pool = some(2, 9), small_pool(dtype=torch.int8)
    cache = PagedCache(config(), pool, dtype=torch.int8)
    answer = append(cache, exact)
    assert torch.equal(answer[1][0], exact[1, 0])  # the first tokens' own attention is not rounded
    fork = cache.fork([1, 0])
    keys, values = append(fork, some(2, 1, seed=5))[1]
    for side, found in enumerate((keys, values)):
        assert torch.equal(found, stored(fork, 1, side))
        wanted = torch.cat([exact[1, side].flip(0), some(2, 1, seed=5)[1, side]], 2)
        error = (found - wanted).abs()
        assert (error <= wanted.abs().amax(-1, keepdim=True) / 254 * 1.001).all()
        assert error.max() > 1e-3  # it was rounded


def test_int8_decodes_close_to_exact_with_pages_and_gathered():
    model = model_of("neox")
    pool = pool_of(model, dtype=torch.int8)
    found = {}
    for attention, dtype in (("sdpa", None), ("sdpa", torch.int8), (PAGED, torch.int8)):
        place = pool if dtype else pool_of(model)
        with PagedCache(model.config, place, dtype=dtype) as cache:
            how = {"output_logits": True, "return_dict_in_generate": True, "new": 2}
            found[attention, dtype] = generated(model, prompts(padded=True), cache, attention=attention, **how).logits[
                1
            ]
    exact, gathered, paged = found.values()
    assert torch.allclose(gathered, paged, atol=1e-3)
    assert 1e-6 < (gathered - exact).abs().max() < 0.1 * exact.abs().max()


class Books(RuleBasedStateMachine):
    """Caches over one pool against tensors; a small pool, so that requests fail too."""

    @initialize(dtype=st.sampled_from([torch.float32, torch.bfloat16]))
    def begin(self, dtype):
        self.pool, self.dtype = small_pool(pages=36, dtype=dtype), dtype
        self.caches: list[tuple[PagedCache, torch.Tensor | None]] = [(PagedCache(config(), self.pool), None)]
        self.seed = 0

    def pick(self, data):
        place = data.draw(st.integers(0, len(self.caches) - 1))
        return place, *self.caches[place]

    @rule(data=st.data(), batch=st.integers(1, 3), tokens=st.integers(1, 6))
    def write(self, data, batch, tokens):
        place, cache, held = self.pick(data)
        self.seed += 1
        new = some(batch if held is None else held.shape[2], tokens, self.seed, self.dtype)
        try:
            answer = append(cache, new)
        except PoolExhausted:
            return
        whole = new if held is None else torch.cat([held, new], 4)
        assert all(torch.equal(side, whole[layer, i]) for layer, two in enumerate(answer) for i, side in enumerate(two))
        self.caches[place] = cache, whole

    @rule(data=st.data(), ahead=st.integers(0, 9))
    def reserve(self, data, ahead):
        _, cache, held = self.pick(data)
        if held is not None:
            try:
                cache.reserve(ahead)
            except PoolExhausted:
                return
            before = self.pool.stats().allocations
            cache.reserve(ahead)
            assert self.pool.stats().allocations == before

    @precondition(lambda self: len(self.caches) < 4)
    @rule(data=st.data())
    def fork(self, data):
        _, cache, held = self.pick(data)
        if held is None:
            self.caches.append((cache.fork(), None))
            return
        rows = data.draw(st.lists(st.integers(0, held.shape[2] - 1), min_size=1, max_size=3))
        tokens = data.draw(st.integers(1, held.shape[4]))
        self.caches.append((cache.fork(rows, tokens), held[:, :, rows, :, :tokens]))

    @rule(data=st.data())
    def reorder(self, data):
        place, cache, held = self.pick(data)
        if held is not None:
            rows = data.draw(st.lists(st.integers(0, held.shape[2] - 1), min_size=1, max_size=4))
            cache.reorder_cache(torch.tensor(rows))
            self.caches[place] = cache, held[:, :, rows]

    @rule(data=st.data())
    def repeat(self, data):
        place, cache, held = self.pick(data)
        if held is None or held.shape[2] < 3:
            cache.batch_repeat_interleave(2)
            self.caches[place] = cache, None if held is None else held.repeat_interleave(2, 2)

    @rule(data=st.data())
    def crop(self, data):
        place, cache, held = self.pick(data)
        if held is not None:
            fewer = data.draw(st.integers(0, held.shape[4] - 1))
            cache.crop(-fewer)
            self.caches[place] = cache, held[..., : held.shape[4] - fewer, :]

    @rule(data=st.data(), how=st.sampled_from(["reset", "release", "drop"]))
    def leave(self, data, how):
        place, cache, _ = self.pick(data)
        if how == "reset":
            cache.reset()
            self.caches[place] = cache, None
        else:
            if how == "release":
                cache.release()
            self.caches[place] = PagedCache(config(), self.pool), None

    @invariant()
    def nothing_is_lost(self):
        self.pool.check()
        held = 0
        for cache, expected in self.caches:
            assert cache.get_seq_length() == (0 if expected is None else expected.shape[4])
            if expected is not None:
                held += self.pool.owners()[cache.owner]
                assert cache.batch_size == expected.shape[2]
                assert torch.equal(stored(cache, 1, 0), expected[1, 0].float())
                assert torch.equal(stored(cache, 0, 1), expected[0, 1].float())
        dropped = [owner for owner in self.pool.owners() if owner not in {cache.owner for cache, _ in self.caches}]
        assert self.pool.stats().references == held + sum(self.pool.owners()[owner] for owner in dropped) + sum(
            self.pool.owners()[cache.owner] for cache, expected in self.caches if expected is None
        )

    def teardown(self):
        for cache, _ in getattr(self, "caches", ()):
            cache.release()
        if hasattr(self, "caches"):
            with PagedCache(config(), self.pool) as last:
                self.caches, cache = [], None
                append(last, some(1, 1, dtype=self.dtype))  # takes back what dropped caches held
                assert self.pool.stats().used == 2
            assert not self.pool.stats().used


Books.TestCase.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
TestBooks = Books.TestCase


def test_a_dropped_cache_gives_its_pages_back_at_the_next_request_or_look():
    pool = small_pool()
    dropped = PagedCache(config(), pool)
    append(dropped, some(2, 9))
    rest = pool.allocate(pool.free_pages, owner="others")
    del dropped
    gc.collect()
    assert len(pool.allocate(12, owner="any other holder")) == 2 * 2 * 3  # refused, if they were still held
    again = PagedCache(config(), pool)
    pool.free(rest[:8], owner="others")
    append(again, some(1, 1))
    del again
    gc.collect()
    assert (pool.free_pages, pool.stats().free, len(pool.owners())) == (8, 8, 2)
    pool.check()


def test_pages_come_back_when_generate_breaks_off():
    model = model_of("llama")
    pool, calls = pool_of(model), []

    def fail(module, given):
        calls.append(1)
        if len(calls) == 5:
            raise ArithmeticError("planted")

    hook = model.model.layers[1].register_forward_pre_hook(fail)
    try:
        with pytest.raises(ArithmeticError), PagedCache(model.config, pool) as cache:
            generated(model, prompts(), cache)
        assert not pool.stats().used
        calls.clear()
        with PagedCache(model.config, pool) as cache:
            with pytest.raises(ArithmeticError):
                generated(model, prompts(), cache)
            assert [layer.seen for layer in cache.layers] == [11, 10]
            with pytest.raises(CacheError, match="crop it first"):
                cache.fork()
            with pytest.raises(CacheError, match="crop or reset"), torch.no_grad():
                model(torch.ones(3, 1, dtype=torch.long), **{DecodeLoop.cache_name(model): cache})
            cache.reset()
            assert not pool.stats().used
            found = generated(model, prompts(), cache)
        assert torch.equal(found, generated(model, prompts()))
    finally:
        hook.remove()


def test_too_small_a_pool_fails_typed_and_leaves_nothing_behind():
    model = model_of("llama")
    pool = pool_of(model, tokens=32)
    with pytest.raises(PoolExhausted, match="asked for"), PagedCache(model.config, pool) as cache:
        generated(model, prompts(), cache)
    pool.check()
    assert not pool.stats().used


# steps ahead, as a graph takes them


def test_steps_ahead_keep_tables_in_place_and_count_on_the_host():
    cache = PagedCache(config(), small_pool(), max_tokens=24)
    cache.config._attn_implementation = PAGED
    held = some(2, 5)
    append(cache, held)
    places = cache.block_tables.data_ptr(), cache.lengths.data_ptr()
    for number in range(12):
        new = some(2, 1, seed=number)
        cache.reserve(1)
        with cache.recording():
            append(cache, new)
        assert cache.get_seq_length() == held.shape[4]
        cache.advance()
        held = torch.cat([held, new], 4)
    assert torch.equal(stored(cache, 1, 0), held[1, 0])
    cache.crop(-1)
    with cache.recording(), pytest.raises(CacheError, match="before the capture"):
        append(cache, some(2, 6))
    for change in (lambda: cache.batch_repeat_interleave(2), lambda: cache.batch_select_indices([1])):
        with pytest.raises(CacheError, match="captured graph"):
            change()
    cache.reorder_cache(torch.tensor([1, 0]))
    cache.reset()
    with pytest.raises(CacheError, match="captured graph"):
        append(cache, some(3, 4))
    append(cache, some(2, 4))
    assert places == (cache.block_tables.data_ptr(), cache.lengths.data_ptr())
    with pytest.raises(CacheError, match="reserved"):
        cache.advance(5)


def test_recording_is_refused_where_no_graph_could_replay():
    cache = PagedCache(config(), small_pool())
    append(cache, some(1, 3))
    with pytest.raises(CacheError, match="max_tokens"), cache.recording():
        pass
    cache = PagedCache(config(attn_implementation="sdpa"), small_pool(), max_tokens=8)
    append(cache, some(1, 3))
    with pytest.raises(CacheError, match=PAGED), cache.recording():
        append(cache, some(1, 1))


def test_the_decode_loop_is_greedy_generate():
    model, given = model_of("llama"), prompts()
    expected = generated(model, given, new=25)[:, 7:]
    with PagedCache(model.config, pool_of(model), max_tokens=40) as cache:
        loop = DecodeLoop(model, cache)
        for _ in range(2):  # the second time after a reset
            found = [loop.prefill(given["input_ids"])] + [loop.step().clone() for _ in range(24)]
            assert torch.equal(torch.stack(found, 1), expected)
        fork = cache.fork(tokens=20)
        other = DecodeLoop(model, fork)
        other.resume(expected[:, 13])
        assert torch.equal(other.step(), expected[:, 14])
        chosen = torch.tensor([5, 6, 7])
        assert not torch.equal(other.step(chosen), expected[:, 15])
        loop.step()
        loop.cache.reserve(40 - loop.cache.get_seq_length())
        loop.cache.advance(40 - loop.cache.get_seq_length())
        with pytest.raises(CacheError, match="max_tokens=40"):
            loop.step()
    with pytest.raises(CacheError, match="max_tokens=None"):
        DecodeLoop(model, PagedCache(model.config, pool_of(model)))


@pytest.mark.parametrize("kind", KINDS)
def test_a_compiled_step_is_the_step(kind):
    model, ids = model_of(kind), prompts()["input_ids"]
    found = []
    for compiled in (False, {"backend": "aot_eager"}):
        with PagedCache(model.config, pool_of(model), max_tokens=32) as cache, joined(model) as saved:
            loop = DecodeLoop(model, cache, compiled=compiled)
            assert saved == (0 if kind == "neox" else 6)
            found.append([loop.prefill(ids)] + [loop.step().clone() for _ in range(20)])
            assert cache.get_seq_length() == 27
            loop.prefill(ids[:, :4])  # again, on the same tables
            found[-1] += [loop.step().clone() for _ in range(3)] + [loop.logits.argmax(-1)]
            last = loop.logits
    assert torch.equal(torch.stack(found[0]), torch.stack(found[1]))
    assert last.isfinite().all()
    with pytest.raises(CacheError, match="int8"):
        DecodeLoop(model, PagedCache(model.config, pool_of(model), max_tokens=32, dtype=torch.int8), compiled=True)


@torch._dynamo.config.patch(recompile_limit=1)
def test_every_compiled_loop_has_a_limit_of_recompilations_of_its_own():
    model = model_of("llama")
    for batch in (1, 2, 3):
        with PagedCache(model.config, pool_of(model), max_tokens=8) as cache:
            loop = DecodeLoop(model, cache, compiled={"backend": "eager"})
            loop.prefill(torch.ones(batch, 3, dtype=torch.long))
            loop.step()


def test_a_model_that_is_no_single_graph_is_refused_and_nothing_was_counted():
    class Talking(type(model_of("llama"))):
        def forward(self, *given, **named):
            out = super().forward(*given, **named)
            print(float(out.logits.sum()))
            return out

    model = Talking(model_of("llama").config).eval()
    with PagedCache(model.config, pool_of(model), max_tokens=8) as cache:
        loop = DecodeLoop(model, cache, compiled={"backend": "eager"})
        first = loop.prefill(torch.ones(1, 3, dtype=torch.long))
        with pytest.raises(CacheError, match="Talking does not compile as one graph"):
            loop.step()
        assert (cache.get_seq_length(), cache.lengths.tolist()) == (3, [3])
        assert DecodeLoop(model, cache).resume(first) is None


def ordinary(kind, seed=0):
    """A copy with ordinary attention, whatever other tests did to the model."""
    model = copy.deepcopy(model_of(kind, seed=seed))
    model.set_attn_implementation("sdpa")
    return model


@torch.no_grad()
def test_joined_projections_share_their_weights_and_come_apart_again():
    model, ids = ordinary("qwen2", seed=3), prompts()["input_ids"]  # with biases
    expected, layer = model(ids).logits, model.model.layers[0]
    names, halved = list(model.state_dict()), copy.deepcopy(model)
    removed = layer.mlp.gate_proj.register_forward_hook(lambda *_: None)
    with joined(model) as saved:
        assert saved == 2 + 2 + 1  # the layer with a hook keeps its gate and up
        with joined(model) as again:
            assert again == 0
        assert torch.allclose(model(ids).logits, expected, atol=1e-5)
        whole = layer.self_attn.q_proj.forward.whole.weight
        assert layer.self_attn.k_proj.weight.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()
        assert list(model.state_dict()) == names
        apart = copy.deepcopy(model)
        assert torch.allclose(apart(ids).logits, expected, atol=1e-5)
        for one in (halved, apart):
            for weight in one.parameters():
                weight.data /= 2
        assert torch.allclose(apart(ids).logits, halved(ids).logits, atol=1e-5)  # a copy is its own
        with joined(apart) as more:
            assert more == saved
        model.load_state_dict(halved.state_dict())
        inside = model(ids).logits
    removed.remove()
    assert "forward" not in layer.self_attn.q_proj.__dict__
    assert torch.allclose(model(ids).logits, inside, atol=1e-5)
    assert torch.allclose(halved(ids).logits, inside, atol=1e-5)
    assert not torch.allclose(inside, expected, atol=1e-3)


def test_joined_layers_have_their_gradients_and_come_apart_after_an_error():
    model, ids = ordinary("llama"), prompts()["input_ids"]
    plain = copy.deepcopy(model)
    plain(ids).logits.sum().backward()
    with joined(model):
        model(ids).logits.sum().backward()
    for (name, one), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert torch.allclose(one.grad, other.grad, rtol=1e-3, atol=1e-3), name
    with pytest.raises(ZeroDivisionError), joined(model):
        1 / 0  # noqa: B018
    assert "forward" not in model.model.layers[0].self_attn.q_proj.__dict__
    with pytest.raises(CacheError, match="NoneType has no layers"), joined(None):
        pass


@torch.no_grad()
def test_what_is_done_to_joined_weights_is_seen():
    model, ids = ordinary("llama"), prompts()["input_ids"]
    attention = model.model.layers[0].self_attn
    with joined(model):
        attention.k_proj.weight = torch.nn.Parameter(torch.zeros_like(attention.k_proj.weight))
        with pytest.raises(CacheError, match="moved or replaced"):
            model(ids)
    with joined(model):
        model.double()
        with pytest.raises(CacheError, match="moved or replaced"):
            model(ids)
    model.float()
    with joined(model), pytest.raises(CacheError, match="in the order"):
        attention.v_proj(torch.ones(1, 64))
    assert model(ids).logits.isfinite().all()


def test_threads_do_not_read_each_others_projections():
    model = ordinary("llama")
    batches = [prompts(batch=1 + number, seed=number)["input_ids"] for number in range(4)]
    with torch.no_grad():
        expected = [model(ids).logits for ids in batches]

    def work(number):
        with torch.no_grad():
            return all(torch.allclose(model(batches[number]).logits, expected[number], atol=1e-5) for _ in range(40))

    with joined(model), ThreadPoolExecutor(4) as threads:
        assert all(threads.map(work, range(4)))


@pytest.mark.parametrize("compiled", [False, {"backend": "eager"}])
def test_a_step_that_fails_is_not_counted(compiled, monkeypatch):
    model, ids = copy.deepcopy(model_of("llama")), prompts(batch=2)["input_ids"]
    with (
        PagedCache(model.config, pool_of(model), max_tokens=40) as cache,
        PagedCache(model.config, pool_of(model), max_tokens=40) as other,
    ):
        loop, undisturbed = DecodeLoop(model, cache, compiled=compiled), DecodeLoop(model, other)
        assert torch.equal(loop.prefill(ids), undisturbed.prefill(ids))
        with pytest.raises(IndexError):
            loop.step(torch.tensor([1000, 2]))
        assert (cache.get_seq_length(), cache.lengths.tolist()) == (7, [7, 7])
        first = undisturbed.ids[:, 0].clone()
        if not compiled:  # midway: the first layer has written its keys
            hook = model.model.layers[1].register_forward_pre_hook(lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                loop.step(first)
            hook.remove()
            assert (cache.get_seq_length(), cache.lengths.tolist()) == (7, [7, 7])
        found = [loop.step(first).clone()] + [loop.step().clone() for _ in range(10)]
        assert torch.equal(torch.stack(found), torch.stack([undisturbed.step().clone() for _ in range(11)]))
        cache.pool.check()


def test_max_tokens_is_the_most_whatever_a_page_holds():
    model, ids = model_of("llama"), prompts()["input_ids"]
    for compiled in (False, {"backend": "eager"}):
        with PagedCache(model.config, pool_of(model, page_tokens=16), max_tokens=10) as cache:
            loop = DecodeLoop(model, cache, compiled=compiled)
            loop.prefill(ids)
            for _ in range(3):
                loop.step()
            with pytest.raises(CacheError, match="11 tokens do not fit max_tokens=10"):
                loop.step()
            with pytest.raises(CacheError, match="0 were reserved"):
                cache.advance(1)


WRONG = {
    "no model": (lambda model, cache: DecodeLoop(None, cache), "NoneType"),
    "no cache": (lambda model, cache: DecodeLoop(model, None), "NoneType"),
    "a compiler's name": (lambda model, cache: DecodeLoop(model, cache, compiled="eager"), "compiled='eager'"),
    "no argument of the compiler": (lambda model, cache: DecodeLoop(model, cache, compiled={"speed": 9}), "speed"),
    "one that is taken": (lambda model, cache: DecodeLoop(model, cache, compiled={"fullgraph": False}), "fullgraph"),
    "no compiler": (lambda model, cache: DecodeLoop(model, cache, compiled={"backend": "gcc"}), "gcc"),
    "a step before the prompt": (lambda model, cache: DecodeLoop(model, cache).step(), "no prompt was read"),
    "a list": (lambda model, cache: DecodeLoop(model, cache).prefill([[1, 2]]), "prompts are a list"),
    "one row": (lambda model, cache: DecodeLoop(model, cache).prefill(torch.ones(4, dtype=torch.long)), r"\(B, S\)"),
    "no prompt": (lambda model, cache: DecodeLoop(model, cache).prefill(torch.ones(2, 0).long()), r"\(2, 0\)"),
    "fractions": (lambda model, cache: DecodeLoop(model, cache).prefill(torch.ones(2, 3)), "whole numbers"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_decode_loop_says_what_it_was_given(case):
    model = model_of("llama")
    call, words = WRONG[case]
    with PagedCache(model.config, pool_of(model), max_tokens=20) as cache, pytest.raises(CacheError, match=words):
        call(model, cache)


def test_ids_of_another_batch_are_not_spread_over_it():
    model = model_of("llama")
    with PagedCache(model.config, pool_of(model), max_tokens=20) as cache:
        loop = DecodeLoop(model, cache)
        loop.prefill(prompts(batch=2)["input_ids"])
        for ids in (torch.tensor([1]), torch.tensor([1, 2, 3]), torch.tensor([1.7, 2.0]), torch.tensor([[1], [2]])):
            with pytest.raises(CacheError, match=r"whole numbers of shape \(2,\)"):
                loop.step(ids)
        assert cache.get_seq_length() == 7


def test_the_bench_sets_its_arms_back(monkeypatch):
    monkeypatch.setattr(decode_bench, "SPAN", 3)
    model = decode_bench.load("tiny", "cpu", torch.float32)
    for arm in ("paged", "dynamic", "static"):
        lengths, inner = [], decode_bench.step_of(arm, model, 2, 9)
        monkeypatch.setattr(decode_bench, "step_of", lambda *_, inner=inner: inner)
        hook = model.model.rotary_emb.register_forward_pre_hook(
            lambda _, given, named, seen=lengths: seen.append(int(named["position_ids"][0, 0])), with_kwargs=True
        )
        row = decode_bench.measure("tiny", model, arm, 2, 9, 7, 60.0, 1e9)
        hook.remove()
        assert (row.steps, row.note) == (7, "")
        assert lengths == [9, 10, 11, 12, 13, *[14, 15, 16] * 2, 14, *[14, 15, 16] * 3]
        monkeypatch.undo()
        monkeypatch.setattr(decode_bench, "SPAN", 3)


def test_the_bench_runs_every_arm_of_a_cpu(tmp_path, capsys):
    file = tmp_path / "found.json"
    assert (
        decode_bench.main(["--steps", "2", "--context", "9", "--batch", "2", "--device", "cpu", "--json", str(file)])
        == 0
    )
    rows = json.loads(file.read_text("utf-8"))["rows"]
    assert [row["arm"] for row in rows] == ["paged", "dynamic", "static"]
    assert all(row["steps"] == 2 and row["rate"] > 0 and row["share"] > 0 and not row["note"] for row in rows)
    assert capsys.readouterr().out.count("tiny") == 3


# refusals


def test_sliding_windows_are_refused_unless_no_token_leaves_them():
    model = model_of("mistral")
    for most in (None, 33):
        with pytest.raises(CacheError, match=r"window of 32 tokens"):
            PagedCache(model.config, pool_of(model), max_tokens=most)
    expected = generated(model, prompts(padded=True))
    for attention in ("sdpa", PAGED):
        with PagedCache(model.config, pool_of(model), max_tokens=32) as cache:
            assert torch.equal(generated(model, prompts(padded=True), cache, attention=attention), expected)
            with pytest.raises(CacheError, match="max_tokens=32"):
                cache.reserve(7)


CONFIGS = {
    "head_dim=12": {"head_dim": 12},
    "head_dim=264": {"head_dim": 264},
    "'linear_attention'": {"layer_types": ["full_attention", "linear_attention"]},
    "keeps no plain keys": {"kv_lora_rank": 8},
    "use its own cache": {"is_encoder_decoder": True},
    "differs between layers": {"num_key_value_heads": [1, 2]},
    "holds no request": {"num_hidden_layers": 99},
}


@pytest.mark.parametrize("reason", CONFIGS)
def test_a_config_that_does_not_fit(reason):
    good = config()
    for name, value in CONFIGS[reason].items():
        object.__setattr__(good, name, value)
    with pytest.raises(CacheError, match=reason):
        PagedCache(good, small_pool())


def test_pools_and_types_that_do_not_fit():
    with pytest.raises(CacheError, match=r"page_bytes=64 does not hold one token of a layer, 128 bytes"):
        PagedCache(config(), PagePool(1 << 12, device="cpu", page_bytes=64), dtype=torch.float32)
    with pytest.raises(CacheError, match=r"page_bytes=129 is not a multiple of 4"):
        PagedCache(config(), PagePool(129 * 8, device="cpu", page_bytes=129, chunk_bytes=129), dtype=torch.float32)
    with pytest.raises(CacheError, match=r"dtype=torch.float64"):
        PagedCache(config(), small_pool(), dtype=torch.float64)
    with pytest.raises(CacheError, match=r"max_tokens=81 takes 42 pages of 40"):
        PagedCache(config(), small_pool(), max_tokens=81, dtype=torch.float32)
    for wrong in (0, True, 2.0):
        with pytest.raises(CacheError, match=f"max_tokens={wrong!r}"):
            PagedCache(config(), small_pool(), max_tokens=wrong)


def test_a_page_holds_whole_blocks_of_the_kernel():
    pool = PagePool(1 << 20, device="cpu", page_bytes=1 << 15)
    for dtype, fits, tokens in ((torch.float32, 256, 256), (torch.bfloat16, 512, 512), (torch.int8, 682, 512)):
        layout = PagedCache(config(), pool, dtype=dtype)._layout
        assert pool.page_bytes // PagedCache(config(), pool).heads.token_bytes(dtype) == fits
        assert tuple(layout.pages.shape) == (32, 2, tokens, HEADS, WIDTH)
        assert layout.pages.untyped_storage().data_ptr() == pool.arena.untyped_storage().data_ptr()
    assert tuple(layout.scales.shape) == (32, 2, 512, HEADS)
    layout.scales.fill_(1.5)
    assert not (layout.pages.float() == 1.5).any()
    layout.pages.zero_()
    assert (layout.scales == 1.5).all()  # behind the numbers, not among them


UPDATES = {
    "holds 2 sequences and is given 3": lambda: some(3, 1),
    r"are \(2, 1, 1, 8\)": lambda: some(2, 1)[:, :, :, :1],
    r"are \(2, 2, 1, 4\)": lambda: some(2, 1)[..., :4],
    "keys are torch.float16": lambda: some(2, 1).half(),
    "keys are on meta": lambda: some(2, 1).to("meta"),
    "layer_idx=2": lambda: torch.cat([some(2, 1)] * 2),
    "no gradients": lambda: some(2, 1).requires_grad_(),
}


@pytest.mark.parametrize("reason", UPDATES)
def test_an_update_that_does_not_fit(reason):
    pool = small_pool()
    cache = PagedCache(config(), pool)
    append(cache, some(2, 3))
    with pytest.raises(CacheError, match=reason):
        append(cache, UPDATES[reason]())
    pool.check()


def test_other_batches_after_a_reset_and_calls_that_name_nothing():
    pool = small_pool()
    cache = PagedCache(config(), pool, dtype=torch.float32)
    with pytest.raises(CacheError, match="batch=None"):
        cache.reserve(3)
    cache.reserve(5, batch=4)
    assert pool.stats().used == 2 * 4 * 2
    append(cache, some(2, 3))  # not the four that were announced
    assert pool.stats().used == 2 * 2
    for call, reason in (
        (lambda: cache.batch_select_indices([2]), "there are 0 to 1"),
        (lambda: cache.batch_select_indices(torch.tensor([], dtype=torch.long)), "were asked for"),
        (lambda: cache.batch_repeat_interleave(0), "repeats=0"),
        (lambda: cache.crop(2), r"crop\(2\)"),
        (lambda: cache.crop(-4), r"crop\(-4\)"),
        (lambda: cache.reserve(-1), "tokens=-1"),
        (lambda: cache.layers[0].crop(-1), "not on a layer"),
        (lambda: cache.adopt(cache.fork()), "holds 3 tokens already"),
    ):
        with pytest.raises(CacheError, match=reason):
            call()
    cache.batch_select_indices(torch.tensor([False, True]))
    assert torch.equal(stored(cache, 0, 0), some(2, 3)[0, 0][1:])
    cache.reset()
    append(cache, some(3, 1))
    assert cache.batch_size == 3


def test_adopting_what_does_not_fit():
    pool, other = small_pool(), small_pool()
    source = PagedCache(config(), pool)
    append(source, some(2, 6))
    for new, given, reason in (
        (PagedCache(config(), other), {}, "has its pages in"),
        (PagedCache(config(), pool), {"rows": [2]}, "there are 0 to 1"),
        (PagedCache(config(), pool), {"tokens": 7}, "tokens=7"),
        (PagedCache(config(), pool, max_tokens=5), {}, "max_tokens=5"),
        (PagedCache(config(), pool, dtype=torch.int8), {}, "keeps torch.float32"),
        (PagedCache(config(head_dim=16), pool), {}, "is for Heads"),
    ):
        with pytest.raises(CacheError, match=reason):
            new.adopt(source, **given)
        new.release()
    with pytest.raises(CacheError, match="holds nothing to adopt"):
        source.adopt(PagedCache(config(), pool))
    pool.check()
    assert pool.stats().used == 2 * 2 * 2


def test_nothing_works_after_release():
    pool = small_pool()
    cache = PagedCache(config(), pool)
    append(cache, some(2, 3))
    fork = cache.fork()
    cache.release()
    cache.release()
    for call in (
        lambda: append(cache, some(2, 1)), lambda: cache.crop(-1), cache.reset, lambda: cache.reserve(1), cache.fork,
        lambda: cache.paged(0), lambda: cache.reorder_cache(torch.tensor([0, 1])), lambda: fork.adopt(cache),
        lambda: cache.block_tables, cache.advance,
    ):  # fmt: skip
        with pytest.raises(CacheError, match="released"):
            call()
    assert "released" in repr(cache)
    assert torch.equal(stored(fork, 0, 0), some(2, 3)[0, 0])


def test_paged_attention_says_what_it_cannot_do():
    model = model_of("llama")
    model.set_attn_implementation(PAGED)
    name, ids = DecodeLoop.cache_name(model), torch.ones(1, 4, dtype=torch.long)
    with torch.no_grad():
        with pytest.raises(CacheError, match="reads pages"):
            model(ids, **{name: DynamicCache()})
        given = {name: PagedCache(model.config, pool_of(model)), "attention_mask": torch.zeros(1, 1, 4, 4)}
        with pytest.raises(CacheError, match="mask of shape"):
            model(ids, **given)
    from o1lab.kv.paged_attention import padding, paged_attention

    cache = PagedCache(config(attn_implementation=PAGED), small_pool())
    step, _ = append(cache, some(1, 3))[0]
    query = torch.zeros(1, 8, 3, 8)
    for asked, reason in (({"softcap": 3.0}, "softcap"), ({"dropout": 0.1}, "dropout"), ({"s_aux": query}, "s_aux")):
        with pytest.raises(CacheError, match=reason):
            paged_attention(None, query, step, step, None, **asked)
    with pytest.raises(CacheError, match="functions of positions"):
        padding(1, 3, 3, use_vmap=True)


def test_a_released_cache_in_generate_says_that_it_was_released():
    model, given = model_of("llama"), prompts(1)
    cache = PagedCache(model.config, pool_of(model))
    generated(model, given, cache, attention="sdpa")
    cache.release()
    with pytest.raises(CacheError, match="released"):
        generated(model, given, cache, attention="sdpa")


@pytest.mark.parametrize("own", [False, True])
def test_a_lossy_cache_that_pages_would_not_keep_is_an_error(own):
    """The gathered keys are a copy: what is changed there is not what the pages hold."""
    from o1lab.decoding import quantise_kv
    from o1lab.errors import DecodingError

    model, given = model_of("llama"), prompts(1)
    model.set_attn_implementation("sdpa")
    with (
        PagedCache(model.config, pool_of(model)) as cache,
        quantise_kv(model, bits=2, own=own),
        pytest.raises(DecodingError, match="keeps copies of its entries: use a DynamicCache"),
    ):
        model.generate(**given, past_key_values=cache, max_new_tokens=3, do_sample=False)


@pytest.mark.parametrize(("wrong", "words"), [
    ({"tokens": 1.5}, "tokens=1.5"), ({"tokens": -4}, "tokens=-4"), ({"page_tokens": 0}, "page_tokens=0"),
    ({"dtype": "float32"}, "dtype='float32'"), ({"config": None}, "no transformers config"),
])  # fmt: skip
def test_a_pool_for_nonsense_is_refused(wrong, words):
    given = {"config": config(), "tokens": 64, "device": "cpu", "dtype": torch.float32, **wrong}
    with pytest.raises(CacheError, match=words):
        pool_for(**given)
