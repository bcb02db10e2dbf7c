"""Faults of the cache, the phases and the head: what each changes, by how much, and that its cure is one."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from package.decoding_fixture import build, cache_name, decode, generate, padded, prompt, state
from torch.nn.functional import softmax
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from o1lab.decoding import (
    article_bias,
    clip_distance,
    fp32_head,
    fp32_softmax,
    grad_scaler_step,
    group_positions,
    log_n,
    missing_scale,
    quantise,
    quantise_kv,
    recompute_kv,
    rope_in,
    round_kv,
)
from o1lab.errors import DecodingError
from o1lab.models import load
from o1lab.models.decode import greedy

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def model():
    return build("llama")


def entries(model, ids, steps=4, mask=None):
    """Keys and values of both layers after decoding ``steps`` fixed tokens: list of (B, H, T, D)."""
    cache = DynamicCache()
    logits = decode(model, ids, mask, steps, forced=prompt(steps, 9).expand(len(ids), -1), cache=cache)[1]
    return [part for layer in cache.layers[:2] for part in (layer.keys, layer.values)], logits


# --- the cache ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_entries_are_rounded_once_and_read_as_they_are(model, dtype):
    exact, plain = entries(model, prompt(20))
    with round_kv(model, dtype):
        rounded, logits = entries(model, prompt(20))
    for one in rounded:
        assert torch.equal(one, one.to(dtype).float())
    for layer in (0, 1):  # the first layer's entries depend on nothing that was rounded
        assert torch.equal(rounded[layer], exact[layer].to(dtype).float())
    assert torch.equal(logits[:, 0], plain[:, 0])  # a prompt is attended to exactly
    assert not torch.equal(logits[:, 1], plain[:, 1])


def test_rounding_does_not_accumulate_in_the_cache(model):
    """An entry that was written 60 tokens ago is the entry that was written: its error is that of one rounding."""
    with round_kv(model, torch.float16):
        early = entries(model, prompt(20), steps=2)[0][0]
        late = entries(model, prompt(20), steps=60)[0][0]
    exact = entries(model, prompt(20), steps=60)[0][0]
    assert torch.equal(late[:, :, :21], early)
    error = ((late - exact).abs() / exact.abs().clamp_min(1e-3)).amax((0, 1, 3))
    assert error.max() <= 2**-11


def test_quantised_entries_have_few_values_and_a_bounded_error(model):
    exact = entries(model, prompt(20))[0][0]
    for bits in (8, 4, 3, 2):
        with quantise_kv(model, bits):
            lossy = entries(model, prompt(20))[0][0]
        steps = (exact.amax(-1) - exact.amin(-1)) / (2**bits - 1)
        assert ((lossy - exact).abs() <= steps[..., None] / 2 * 1.001 + 1e-6).all()
        assert all(len(vector.unique()) <= 2**bits for vector in lossy.reshape(-1, lossy.shape[-1]))
    assert torch.equal(quantise(torch.full((3, 8), 0.7), 4), torch.full((3, 8), 0.7))
    assert torch.equal(quantise(quantise(exact, 4), 4), quantise(quantise(quantise(exact, 4), 4), 4))


def test_fewer_bits_cost_more(model):
    drift = {}
    exact = entries(model, prompt(40), 8)[1]
    for bits in (8, 4, 3, 2):
        with quantise_kv(model, bits):
            drift[bits] = (entries(model, prompt(40), 8)[1] - exact).abs().mean().item()
    for dtype in (torch.float16, torch.bfloat16):
        with round_kv(model, dtype):
            drift[dtype] = (entries(model, prompt(40), 8)[1] - exact).abs().mean().item()
    order = [torch.float16, torch.bfloat16, 8, 4, 3, 2]
    assert [drift[key] for key in order] == sorted(drift.values())
    assert drift[3] > 20 * drift[torch.float16]


def test_a_token_is_quantised_the_same_in_any_batch(model):
    ids, mask = padded([prompt(20), prompt(12, 1)])
    with quantise_kv(model, 4):
        together = entries(model, ids, mask=mask)[0][0]
        alone = entries(model, prompt(12, 1))[0][0]
    assert (together[1, :, 8:] - alone[0]).abs().max() < 1e-5


class Copying(DynamicLayer):
    """A layer that hands out copies, as offloaded and quantised ones do."""

    def update(self, key_states, value_states, *args, **kwargs):
        return tuple(one.clone() for one in super().update(key_states, value_states))


def test_a_cache_that_keeps_copies_is_refused(model):
    cache = DynamicCache()
    cache.layers = [Copying(), Copying()]
    decode(model, prompt(4), steps=2, cache=cache)
    with round_kv(model, torch.float16), pytest.raises(DecodingError, match="keeps copies"):
        model(prompt(4), **{cache_name(model): cache})
    with round_kv(model, torch.float16):
        assert torch.isfinite(model(prompt(4), use_cache=False).logits).all()
        assert torch.isfinite(model(prompt(4), return_dict=False)[0]).all()
    trained = build("llama").requires_grad_(True)
    with round_kv(trained, torch.float16), pytest.raises(DecodingError, match="no_grad"):
        trained(prompt(4))


@pytest.mark.parametrize("make", [lambda m: quantise_kv(m, 3), lambda m: missing_scale(m), lambda m: log_n(m, 4)])
def test_the_labs_own_loop_decodes_the_same(make):
    """models.decode: caches that grow in place, rows that are dropped as they end, inference mode."""
    model = replace(load("tiny", device="cpu"), model=build("llama"))
    prompts, caps = [prompt(size, size)[0].tolist() for size in (21, 9, 14, 30)], [4, 30, 12, 17]
    plain = [made.ids for made in greedy(model, prompts, max_new_tokens=caps)]
    with make(model):
        alone = [tuple(decode(model.model, torch.tensor([ids]), None, cap)[0][0].tolist())
                 for ids, cap in zip(prompts, caps, strict=True)]  # fmt: skip
        batch = [made.ids for made in greedy(model, prompts, max_new_tokens=caps)]
        with recompute_kv(model, 1):
            cured = [made.ids for made in greedy(model, prompts, max_new_tokens=caps)]
    assert batch == alone != plain
    assert (cured == plain) is ("log_n" not in make.__code__.co_names)


# --- a scale that does not arrive -----------------------------------------------------------------------------------


def test_a_lost_scale_hits_what_decoding_wrote_and_spares_the_prompt(model):
    exact = entries(model, prompt(20))[0][0]
    with missing_scale(model, "nowhere"):
        right = entries(model, prompt(20))[0][0]
    with missing_scale(model, "decode"):
        decode_lost = entries(model, prompt(20))[0][0]
    with missing_scale(model, "all"):
        all_lost = entries(model, prompt(20))[0][0]
    assert ((right - exact).abs() <= exact.abs() / 16 + exact.abs().amax(-1, keepdim=True) * 2e-5).all()
    assert torch.equal(decode_lost[:, :, :20], right[:, :, :20])
    assert torch.equal(decode_lost[:, :, 20:], all_lost[:, :, 20:])
    assert (all_lost.abs().amax(-1) == 448).all()
    with missing_scale(model, "all", scale=4.0):
        quartered = entries(model, prompt(20))[0][0]
    assert ((quartered * 4 - exact).abs() <= exact.abs() / 16 + 4 * 2**-10).all()


def test_a_lost_scale_exonerates_the_first_token_and_gets_worse(model):
    """As in the report: an answer of one token is right, and the drift sets in with what decoding writes."""
    exact = entries(model, prompt(40), 12)[1]
    drift = {}
    for where in ("nowhere", "decode"):
        with missing_scale(model, where):
            drift[where] = (entries(model, prompt(40), 12)[1] - exact).abs().mean(-1)[0]
    assert drift["decode"][0] == 0
    assert drift["decode"][2:].min() > 3 * drift["nowhere"].max()


# --- refilling ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("every", [1, 3])
def test_recomputing_an_exact_cache_is_idle(model, every):
    ids, mask = padded([prompt(20), prompt(12, 1)])
    tokens, logits = decode(model, ids, mask, 10)
    with recompute_kv(model, every) as work:
        again = decode(model, ids, mask, 10)
        assert torch.equal(generate(model, ids, mask, 10), tokens)
    assert work.count == 2 * (9 if every == 1 else 3)
    torch.testing.assert_close(again[1], logits, atol=2e-5, rtol=1e-5)
    assert torch.equal(again[0], tokens)


LOSSY = {
    "int2": lambda model: quantise_kv(model, 2),
    "bf16": lambda model: round_kv(model, torch.bfloat16),
    "lost scale": lambda model: missing_scale(model),
}


@pytest.mark.parametrize("name", LOSSY)
@pytest.mark.parametrize("inside", [True, False])
def test_recomputing_cures_a_lossy_cache(model, name, inside):
    ids, mask = padded([prompt(20), prompt(12, 1)])
    forced = prompt(10, 5).expand(2, -1)
    exact = decode(model, ids, mask, 10, forced)[1]
    with LOSSY[name](model):
        faulty = (decode(model, ids, mask, 10, forced)[1] - exact).abs().max()
    orders = (LOSSY[name], lambda model: recompute_kv(model, 1))
    with orders[inside](model), orders[not inside](model):
        cured = (decode(model, ids, mask, 10, forced)[1] - exact).abs().max()
    assert faulty > 1e-3
    assert cured < 2e-5


def test_recomputing_seldom_cures_in_part(model):
    forced = prompt(24, 5)
    exact = decode(model, prompt(20), None, 24, forced)[1]
    drift = {}
    with missing_scale(model):
        for every in (1, 4, 1000):
            with recompute_kv(model, every):
                drift[every] = (decode(model, prompt(20), None, 24, forced)[1] - exact).abs().mean().item()
    assert drift[1] < 1e-5 < drift[4] < drift[1000]


def test_recomputing_keeps_up_with_dropped_and_reordered_rows(model):
    ids, mask = padded([prompt(20), prompt(12, 1), prompt(16, 2)])
    tokens, logits = decode(model, ids, mask, 6)
    cache = DynamicCache()
    with quantise_kv(model, 2), recompute_kv(model, 1):
        decode(model, ids, mask, 4, tokens, cache)
        cache.reorder_cache(torch.tensor([2, 1, 0]))
        cache.batch_select_indices(torch.tensor([0, 1]))
        rest = torch.cat([mask[[2, 1]], torch.ones(2, 4, dtype=torch.long)], 1)
        out = model(tokens[[2, 1], 3:4], attention_mask=rest, position_ids=rest.sum(1, keepdim=True) - 1,
                    **{cache_name(model): cache})  # fmt: skip
    torch.testing.assert_close(out.logits[:, -1], logits[[2, 1], 4], atol=1e-4, rtol=1e-4)
    assert len(cache.layers) == 2  # the token layer is gone


def test_recomputing_under_beams_and_other_interventions(model):
    ids, mask = padded([prompt(20), prompt(12, 1)])
    makes = [
        lambda: log_n(model, 4),
        lambda: clip_distance(model, 6),
        lambda: group_positions(model, 3, 4),
        lambda: article_bias(model, 1.0),  # where the prompt ended is not asked anew
    ]
    for make in makes:
        with make():
            plain = decode(model, ids, mask, 8)
            beams = generate(model, ids, mask, 8, num_beams=3)
            with recompute_kv(model, 2):
                torch.testing.assert_close(decode(model, ids, mask, 8)[1], plain[1], atol=1e-4, rtol=1e-4)
                assert torch.equal(generate(model, ids, mask, 8, num_beams=3), beams)


def test_recomputing_refuses_what_it_cannot_run_again(model):
    cache = DynamicCache()
    model(prompt(4), **{cache_name(model): cache})
    before = state(model)
    with recompute_kv(model, 1):
        with pytest.raises(DecodingError, match="start with none"):
            model(prompt(1), **{cache_name(model): cache})
        with pytest.raises(DecodingError, match="input_ids"):
            model(inputs_embeds=torch.zeros(1, 2, 32))
        with pytest.raises(DecodingError, match="one number per token"):
            model(prompt(2), attention_mask=torch.ones(1, 1, 2, 2, dtype=torch.bool))
        with pytest.raises(DecodingError, match="positional"):
            model(prompt(4), torch.ones(1, 4))
        with pytest.raises(DecodingError, match="step_ids"):
            model(prompt(4), step_ids=torch.ones(1, 4))
        assert model(prompt(4), use_cache=False).logits.shape == (1, 4, 97)
    assert state(model) == before


# --- phases ---------------------------------------------------------------------------------------------------------


def test_phases_in_16_bit_err_by_a_turn():
    """Largest error of cos: bf16 0.5 by 256 and 2 by 2,048 positions, fp16 0.78; cast last, it stays right."""
    model = build("llama", max_position_embeddings=4096, head_dim=64)
    rotary = model.model.rotary_emb
    place, wide = torch.arange(2048)[None], torch.zeros(1)
    exact = rotary(wide, place)[0]
    cast = rotary(wide.bfloat16(), place)[0].float()
    error = {"cast last": (cast - exact).abs().max().item()}
    for dtype in (torch.bfloat16, torch.float16):
        with rope_in(model, dtype):
            found = (rotary(wide, place)[0] - exact).abs()
        error[dtype] = (found[:, :257].max().item(), found.max().item())
    assert 0.4 < error[torch.bfloat16][0] < 0.7
    assert error[torch.bfloat16][1] > 1.9
    assert 0.7 < error[torch.float16][1] < 0.9
    assert error["cast last"] < 0.005


def test_a_16_bit_phase_hurts_with_length_and_fp32_does_not():
    model = build("llama", max_position_embeddings=2048)
    ids = prompt(1500)
    exact = model(ids).logits[0]
    drift = {}
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        with rope_in(model, dtype):
            found = (model(ids).logits[0] - exact).abs().mean(-1)
        drift[dtype] = (found[:64].mean().item(), found[-64:].mean().item())
    assert drift[torch.float32] == (0, 0)
    for dtype in (torch.float16, torch.bfloat16):
        assert drift[dtype][1] > 5 * drift[dtype][0]
    assert drift[torch.bfloat16][1] > drift[torch.float16][1]


def test_phases_of_other_families():
    for kind in ("qwen2", "neox"):
        model, ids = build(kind), prompt(40)
        plain = model(ids).logits
        with rope_in(model, torch.float32):
            assert torch.equal(model(ids).logits, plain)
        with rope_in(model, torch.bfloat16):
            once = model(ids).logits
            with rope_in(model, torch.float32):
                assert torch.equal(model(ids).logits, plain)
            assert torch.equal(model(ids).logits, once)
        assert not torch.equal(once, plain)


# --- the head and the article's three remedies ----------------------------------------------------------------------


def test_an_fp32_head_unties_what_an_fp32_softmax_leaves_tied():
    """bf16 logits tie or swap for some tokens; the same hidden states through an fp32 head choose as exact ones do."""
    model = build("llama", vocab_size=8000, initializer_range=0.02).to(torch.bfloat16)
    ids = prompt(400)
    hidden = model.model(ids).last_hidden_state.double()
    exact = (hidden @ model.lm_head.weight.double().T).argmax(-1)
    plain = model(ids).logits
    with fp32_head(model):
        wide = model(ids).logits
    with fp32_softmax(model):
        cast = model(ids).logits
    assert wide.dtype == cast.dtype == torch.float32
    assert plain.dtype == torch.bfloat16
    flips = {name: (x.argmax(-1) != exact).sum().item() for name, x in
             {"bf16": plain, "softmax": cast, "head": wide}.items()}  # fmt: skip
    assert flips["bf16"] == flips["softmax"] > 5
    assert flips["head"] == 0


def test_the_articles_softmax_is_the_call_and_moves_no_greedy_token(model):
    plain = model(prompt(200)).logits
    with fp32_softmax(model):
        found = model(prompt(200)).logits
        assert torch.equal(generate(model, prompt(20), steps=20), generate(model, prompt(20), steps=20))
        tokens = generate(model, prompt(20), steps=20)
    assert torch.equal(found, softmax(plain, dim=-1, dtype=torch.float32))
    assert torch.equal(found.argmax(-1), plain.argmax(-1))
    assert torch.equal(tokens, generate(model, prompt(20), steps=20))
    with fp32_softmax(model), pytest.raises(DecodingError, match="tuple"):
        model(prompt(4), return_dict=False)


@pytest.mark.parametrize(
    ("how", "raised"), [("as written", "TypeError"), ("optimizer", "AssertionError"), ("disabled", None)]
)
def test_the_articles_scaler_step_raises_or_does_nothing(model, how, raised):
    plain = generate(model, prompt(20), steps=20)
    with grad_scaler_step(model, every=8, how=how) as report:
        tokens = generate(model, prompt(20), steps=20)
    assert report.calls == 2
    assert [text.split(":")[0] for text in report.raised] == ([raised] if raised else [])
    if how == "as written":
        assert "optimizer" in report.raised[0]
    assert report.changed == []
    assert torch.equal(tokens, plain)


def test_a_changed_weight_would_be_reported():
    model = build("llama")
    with grad_scaler_step(model) as report:
        model.lm_head.weight[3, 2] += 1e-6
    assert report.changed == ["lm_head.weight"]


def test_a_head_that_is_tied_keeps_its_embedding():
    model = build("llama", tie_word_embeddings=True).to(torch.bfloat16)
    pointer = model.lm_head.weight.data_ptr()
    with fp32_head(model):
        assert model.get_input_embeddings().weight.dtype == torch.bfloat16
        assert model(prompt(4)).logits.dtype == torch.float32
        with fp32_head(model):
            assert model(prompt(4)).logits.dtype == torch.float32
        assert model(prompt(4)).logits.dtype == torch.float32
    assert model.lm_head.weight.data_ptr() == pointer
    assert model(prompt(4)).logits.dtype == torch.bfloat16


def test_entries_changed_before_they_are_read_make_one_pass_what_decoding_is():
    model, ids = build(), prompt(24)
    for arm in (lambda: round_kv(model, torch.bfloat16, own=True), lambda: quantise_kv(model, 3, own=True)):
        with arm(), torch.no_grad():
            whole = model(ids, use_cache=False).logits[:, 7:-1]
            _, stepwise = decode(model, ids[:, :8], steps=16, forced=ids[:, 8:])
        torch.testing.assert_close(whole, stepwise, atol=2e-4, rtol=1e-4)
        with torch.no_grad():
            assert not torch.allclose(model(ids).logits[:, 7:-1], whole, atol=1e-3)
