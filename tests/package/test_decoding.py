"""Interventions on attention and positions: against explicit formulas, under padding and caches, and gone on exit."""

from __future__ import annotations

import contextlib
import math
import sys

import pytest
import torch
import transformers
from package.decoding_fixture import KINDS, SHAPE, build, cache_name, decode, generate, padded, prompt, state
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    BloomForCausalLM,
    DynamicCache,
    MambaConfig,
    MambaForCausalLM,
    StaticCache,
)

import o1lab.models
from o1lab import decoding
from o1lab.decoding import (
    ArticleStop,
    StopSet,
    after_steps,
    article_bias,
    broken,
    clip_distance,
    dropout_zero,
    entropy,
    first_stop,
    fp32_head,
    fp32_softmax,
    grad_scaler_step,
    group_positions,
    judge,
    log_n,
    missing_scale,
    quantise_kv,
    rates,
    recompute_kv,
    rope_in,
    round_kv,
)
from o1lab.decoding.positions import _Move, _moving
from o1lab.errors import DecodingError
from o1lab.models import coupled, coupled_layout

pytestmark = pytest.mark.usefixtures("one_thread")

# Each with a knob at which it acts on a prompt of 24 tokens and a text of 32.
ACTIVE = {
    "log_n": lambda model: log_n(model, 4),
    "article_bias": lambda model: article_bias(model, 1.0),
    "clip_distance": lambda model: clip_distance(model, 6),
    "group_positions": lambda model: group_positions(model, 3, 5),
    "rope_in": lambda model: rope_in(model, torch.bfloat16),
    "round_kv": lambda model: round_kv(model, torch.bfloat16),
    "quantise_kv": lambda model: quantise_kv(model, 3),
    "missing_scale": lambda model: missing_scale(model),
    "fp32_softmax": lambda model: fp32_softmax(model),
}
LOSSY = ("round_kv", "quantise_kv", "missing_scale")
# Each with a knob at which it is to change nothing at all.
IDLE = {
    "log_n": lambda model: log_n(model, 10_000),
    "article_bias": lambda model: article_bias(model, 0.0),
    "clip_distance": lambda model: clip_distance(model, 64),
    "group_positions by size": lambda model: group_positions(model, 1, 4),
    "group_positions by window": lambda model: group_positions(model, 4, 64),
    "rope_in": lambda model: rope_in(model, torch.float32),
    "round_kv": lambda model: round_kv(model, torch.float32),
    "fp32_head": lambda model: fp32_head(model),
    "dropout_zero": lambda model: dropout_zero(model),
    "grad_scaler_step": lambda model: grad_scaler_step(model, 2),
}
ALL = {**ACTIVE, **{f"idle {name}": make for name, make in IDLE.items()}, "recompute_kv": lambda m: recompute_kv(m, 3)}
by_name = pytest.mark.parametrize("name", ALL)


@pytest.fixture(scope="module")
def llama():
    return build("llama")


@pytest.fixture(scope="module")
def models():
    return {kind: build(kind) for kind in KINDS}


@by_name
@pytest.mark.parametrize("how", ["decoded", "untouched", "exception"])
def test_everything_is_put_back(llama, name, how):
    decode(llama, prompt(9), steps=2)  # transformers installs hooks of its own on the first call
    before = state(llama)
    with contextlib.suppress(KeyError), ALL[name](llama):
        if how != "untouched":
            decode(llama, prompt(9), steps=4)
        if how == "exception":
            raise KeyError
    assert state(llama) == before


def test_contexts_nest_and_close_in_any_order(llama):
    ids = prompt(24)
    plain, before = decode(llama, ids)[1], state(llama)
    alone = {}
    for name in ("log_n", "article_bias", "quantise_kv"):
        with ALL[name](llama):
            alone[name] = decode(llama, ids)[1]
    with contextlib.ExitStack() as stack:
        for make in ALL.values():
            with contextlib.suppress(DecodingError):  # only one may move positions
                stack.enter_context(make(llama))
        decode(llama, ids)
        assert state(llama) != before
    assert state(llama) == before
    first, second = log_n(llama, 4), article_bias(llama, 1.0)
    first.__enter__()
    second.__enter__()
    both = decode(llama, ids)[1]
    first.__exit__(None, None, None)
    assert torch.equal(decode(llama, ids)[1], alone["article_bias"])
    second.__exit__(None, None, None)
    assert state(llama) == before
    assert torch.equal(decode(llama, ids)[1], plain)
    with article_bias(llama, 1.0), log_n(llama, 4):
        assert torch.equal(decode(llama, ids)[1], both)
    assert not torch.equal(both, alone["article_bias"])


def test_one_model_inside_another_and_two_beside_each_other(llama):
    ids = prompt(24)
    with log_n(llama, 4), quantise_kv(llama, 3):
        both = decode(llama, ids)[1]
    before = state(llama)
    with log_n(llama.model, 4), quantise_kv(llama, 3):
        assert torch.equal(decode(llama, ids)[1], both)
    assert state(llama) == before
    other = build("qwen2")
    plain = decode(other, ids)[1]
    with log_n(llama, 4):
        assert torch.equal(decode(other, ids)[1], plain)


@pytest.mark.parametrize("name", IDLE)
@pytest.mark.parametrize("kind", KINDS)
def test_idle_knobs_keep_every_bit(models, kind, name):
    model = models[kind]
    if kind == "gpt2" and name.startswith(("clip", "group", "rope")):
        with pytest.raises(DecodingError, match="rotary"), IDLE[name](model):
            pass
        return
    ids, mask = padded([prompt(24), prompt(15, 1)])
    tokens, logits = decode(model, ids, mask)
    with IDLE[name](model):
        again = decode(model, ids, mask)
    assert torch.equal(again[1], logits)
    assert torch.equal(again[0], tokens)


def acting(kind):
    return [name for name in ACTIVE if not (kind == "gpt2" and name.startswith(("clip", "group", "rope")))]


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind in KINDS for name in acting(kind)])
def test_padding_batch_and_generate_change_nothing(models, kind, name):
    """Each row of a left-padded batch gives what it gives alone, and generate gives what the loop gives."""
    model, prompts = models[kind], [prompt(24), prompt(15, 1), prompt(19, 2)]
    plain = decode(model, prompts[0])[1]
    ids, mask = padded(prompts)
    with ACTIVE[name](model):
        alone = [decode(model, one) for one in prompts]
        tokens, logits = decode(model, ids, mask, forced=torch.cat([tokens for tokens, _ in alone]))
        made = generate(model, ids, mask)
    acts = (alone[0][1] - plain).abs().max().item()
    assert acts > 1e-3
    for row, (_, expected) in enumerate(alone):  # a bit in fp32 can move a 16-bit or fp8 code by one
        torch.testing.assert_close(logits[row], expected[0], atol=acts / 20 if name in LOSSY else 2e-4, rtol=1e-4)
    assert torch.equal(made, tokens)


@pytest.mark.parametrize("name", ["log_n", "article_bias", "clip_distance", "group_positions"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_one_pass_and_steps_with_a_cache_agree(name, attention):
    make = {**ALL, "article_bias": lambda model: article_bias(model, 1.0, chain_start=17)}[name]
    model, ids = build("llama", attention), prompt(32)
    with make(model):
        whole = model(ids).logits
        steps = decode(model, ids[:, :24], steps=8, forced=ids[:, 24:])[1]
        chunks = model(ids[:, :10], use_cache=True)
        cache = chunks.cache if hasattr(chunks, "cache") else chunks.past_key_values
        chunked = model(ids[:, 10:], **{cache_name(model): cache}).logits
    torch.testing.assert_close(steps, whole[:, 23:31], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(chunked, whole[:, 10:], atol=1e-4, rtol=1e-4)
    assert (whole - model(ids).logits).abs().max() > 1e-2


@pytest.mark.parametrize("name", ACTIVE)
def test_a_static_cache_and_dropped_rows(llama, name):
    ids, mask = padded([prompt(24), prompt(15, 1)])
    with ACTIVE[name](llama):
        expected = decode(llama, ids, mask)[1]
        got = decode(llama, ids, mask, cache=StaticCache(config=llama.config, max_cache_len=40))[1]
        torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)
        cache = DynamicCache()
        tokens, _ = decode(llama, ids, mask, steps=4, cache=cache)
        cache.batch_select_indices(torch.tensor([1]))
        rest = torch.cat([mask[1:], torch.ones(1, 4, dtype=torch.long)], 1)
        out = llama(tokens[1:, -1:], attention_mask=rest, position_ids=rest.sum(1, keepdim=True) - 1,
                    **{cache_name(llama): cache})  # fmt: skip
    torch.testing.assert_close(out.logits[:, -1], expected[1:, 4], atol=1e-4, rtol=1e-4)


def test_log_n_is_the_formula():
    model, ids = build("llama", "eager"), prompt(24)
    plain = model(ids, output_attentions=True).attentions[0]
    with log_n(model, 6):
        sharp = model(ids, output_attentions=True).attentions[0]
    seen = torch.arange(1, 25)
    factor = (seen.double().log() / math.log(6)).clamp_min(1)[:, None]
    expected = (plain.double().log() * factor).softmax(-1)  # softmax is invariant to the constant that log loses
    torch.testing.assert_close(sharp.double(), expected, atol=1e-5, rtol=1e-4)
    assert torch.equal(sharp[:, :, :6], plain[:, :, :6])


def test_the_articles_bias_is_the_formula():
    """bias[i, j] = -log(|i - j| + 1) * 0.3 * (0.8 if j < start else 1.2), token positions without padding."""
    model = build("llama", "eager")
    ids, mask = padded([prompt(20), prompt(14, 1)])
    plain = model(ids, attention_mask=mask, output_attentions=True).attentions[0].double()
    with article_bias(model, chain_start=9):
        biased = model(ids, attention_mask=mask, output_attentions=True).attentions[0].double()
    for row, pad in enumerate((0, 6)):
        bias = torch.zeros(20 - pad, 20 - pad, dtype=torch.double)
        for i in range(20 - pad):
            for j in range(20 - pad):
                bias[i, j] = -math.log(abs(i - j) + 1) * 0.3 * (0.8 if j < 9 else 1.2)
        expected = (plain[row, :, pad:, pad:].log() + bias).softmax(-1)
        torch.testing.assert_close(biased[row, :, pad:, pad:], expected, atol=1e-6, rtol=1e-4)


def test_the_chain_starts_where_the_prompt_ends(llama):
    """By default w is 0.8 on the prompt's keys and 1.2 on those after it, for every row of a padded batch."""
    ids, mask = padded([prompt(20), prompt(14, 1)])
    with article_bias(llama, 1.0):
        default = decode(llama, ids, mask)
    for row, one in enumerate((prompt(20), prompt(14, 1))):
        with article_bias(llama, 1.0, chain_start=one.shape[1]):
            explicit = decode(llama, one, forced=default[0][row : row + 1])[1]
        torch.testing.assert_close(default[1][row], explicit[0], atol=1e-4, rtol=1e-4)
        with article_bias(llama, 1.0, weights=(0.8, 0.8)):
            flat = decode(llama, one, forced=default[0][row : row + 1])[1]
        assert torch.allclose(flat[0, 0], explicit[0, 0], atol=1e-5)  # nothing of the chain is there yet
        assert (flat[0, -1] - explicit[0, -1]).abs().max() > 1e-3
    cache = llama(ids).cache
    with article_bias(llama), pytest.raises(DecodingError, match="chain_start"):
        llama(ids[:, :1], **{cache_name(llama): cache})


def test_two_biases_add_up(llama):
    ids = prompt(24)
    with article_bias(llama, 0.5):
        expected = decode(llama, ids)[1]
    with article_bias(llama, 0.2), article_bias(llama, 0.3):
        torch.testing.assert_close(decode(llama, ids)[1], expected, atol=1e-4, rtol=1e-4)
    with clip_distance(llama, 6), article_bias(llama, 0.2), article_bias(llama, 0.3):
        both = decode(llama, ids)[1]
    with article_bias(llama, 0.5), clip_distance(llama, 6):
        torch.testing.assert_close(decode(llama, ids)[1], both, atol=1e-4, rtol=1e-4)
    assert (both - expected).abs().max() > 1e-2


def test_a_bias_is_kept_where_positions_are_moved(llama):
    """A window of one less than the text moves nothing, but takes the other way through attention."""
    ids = prompt(24)
    plain = llama(ids).logits
    with article_bias(llama, 1.0, chain_start=9):
        expected = llama(ids).logits
        with clip_distance(llama, 23):
            torch.testing.assert_close(llama(ids).logits, expected, atol=1e-4, rtol=1e-4)
    assert (expected - plain).abs().max() > 1e-2
    with clip_distance(llama, 24):
        assert torch.equal(llama(ids).logits, plain)


def moved_slowly(recorded, value, far, heads):
    """Attention of one layer, pair by pair, in fp64: score = rotate(q, a)·rotate(k, b), (a, b) from ``far(i, j)``."""
    query, key, rotate = recorded
    tokens, shared = query.shape[2], heads // key.shape[1]
    out = torch.zeros(heads, tokens, value.shape[-1], dtype=torch.double)
    turned_q = {a: rotate(query, a) for a in range(-1, 2 * tokens)}
    turned_k = {b: rotate(key, b) for b in range(tokens)}
    for head in range(heads):
        for i in range(tokens):
            scores = torch.zeros(i + 1, dtype=torch.double)
            for j in range(i + 1):
                a, b = far(i, j)
                scores[j] = turned_q[a][0, head, i] @ turned_k[b][0, head // shared, j] / query.shape[-1] ** 0.5
            out[head, i] = scores.softmax(-1) @ value[0, head // shared, : i + 1].double()
    return out.transpose(0, 1).flatten(1)


CLIP, GROUP, WINDOW = 5, 3, 4
FAR = {
    "clip": (lambda model: clip_distance(model, CLIP), lambda i, j: (min(i - j, CLIP), 0)),
    "group": (
        lambda model: group_positions(model, GROUP, WINDOW),
        lambda i, j: (i, j) if i - j < WINDOW else (i // GROUP + WINDOW - WINDOW // GROUP, j // GROUP),
    ),
}


@pytest.mark.parametrize("which", FAR)
@pytest.mark.parametrize("kind", ["llama", "qwen2", "neox"])
def test_moved_positions_against_a_slow_reference(monkeypatch, kind, which):
    model, ids = build(kind), prompt(14)
    home = sys.modules[type(model).__module__]
    rotate, recorded, outputs = home.apply_rotary_pos_emb, [], []
    rotary = next(module for module in model.modules() if hasattr(module, "inv_freq"))

    def record(q, k, cos, sin, unsqueeze_dim=1):
        if q.shape[1] == 4 and k.shape[1] != 1:  # the model's own call, not the one that moves keys
            recorded.append((q.double(), k.double()))
        return rotate(q, k, cos, sin)

    def turn(x, place):
        angle = place * rotary.inv_freq.double()
        both = torch.cat([angle, angle])[None, None]
        return rotate(x, x, both.cos(), both.sin())[0]

    layers = [module for name, module in model.named_modules() if name.endswith(("self_attn", "attention"))]
    last = [layer.o_proj if kind != "neox" else layer.dense for layer in layers]
    hooks = [module.register_forward_pre_hook(lambda _, args: outputs.append(args[0][0])) for module in last]
    monkeypatch.setattr(home, "apply_rotary_pos_emb", record)
    make, far = FAR[which]
    with make(model):
        recorded.clear()  # opening it runs the model on four tokens
        outputs.clear()
        cache = model(ids, use_cache=True).cache
    values = [layer.values for layer in cache.layers]
    for hook in hooks:
        hook.remove()
    monkeypatch.undo()
    assert len(recorded) == len(outputs) == 2
    for (q, k), value, got in zip(recorded, values, outputs, strict=True):
        expected = moved_slowly((q, k, turn), value, far, 4)
        torch.testing.assert_close(got.double(), expected, atol=1e-5, rtol=1e-4)
        plain = moved_slowly((q, k, turn), value, lambda i, j: (i, j), 4)
        assert (plain - expected).abs().max() > 1e-2


class Twice(_Move):
    """Every pair at twice its distance: what a model gives by itself for position ids that count by two."""

    def moved(self, positions, queries):
        return 2 * positions


FAMILIES = {
    "CohereConfig": {},  # the halves of a phase interleaved
    "GlmConfig": {},  # so, and part of the head only
    "NemotronConfig": {},
    "Phi3Config": {},
    "Qwen3Config": {},  # keys normalised before rotation
    "GraniteConfig": {},
    "SmolLM3Config": {"num_hidden_layers": 4},  # its fourth layer has no rotation
    "Cohere2Config": {"num_hidden_layers": 4, "sliding_window": 64},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_moving_is_what_position_ids_do_in_every_family(family):
    given = {**SHAPE, "num_key_value_heads": 2, "head_dim": 8, **FAMILIES[family]}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = AutoModelForCausalLM.from_config(getattr(transformers, family)(**given)).eval()
    ids, ones = prompt(20), torch.ones(1, 20, dtype=torch.long)
    with torch.no_grad():
        plain = model(ids, attention_mask=ones).logits
        expected = model(ids, attention_mask=ones, position_ids=2 * torch.arange(20)[None]).logits
        before = state(model)
        with _moving(model, Twice(0)):
            got = model(ids, attention_mask=ones).logits
    assert state(model) == before
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)
    assert (expected - plain).abs().max() > 20 * (got - expected).abs().max()


def test_a_model_that_rotates_in_its_own_way_is_refused(monkeypatch):
    phi = AutoModelForCausalLM.from_config(transformers.PhiConfig(**SHAPE)).eval()
    before = state(phi)
    with pytest.raises(DecodingError, match="not known here"), clip_distance(phi, 4):
        pass
    assert state(phi) == before
    model = build("llama")
    home = sys.modules[type(model).__module__]
    rotate = home.apply_rotary_pos_emb

    def odd(q, k, cos, sin, unsqueeze_dim=1):  # keys know their position in a second way too
        q, k = rotate(q, k, cos, sin)
        return q, k + sin[:, None]

    monkeypatch.setattr(home, "apply_rotary_pos_emb", odd)
    with pytest.raises(DecodingError, match="not known here"), clip_distance(model, 4):
        pass
    training = build("llama").train()
    with pytest.raises(DecodingError, match="eval"), clip_distance(training, 4):
        pass


def test_moved_positions_survive_other_conventions(llama):
    """RoPE is relative: positions that count the padding too are as good, and a forward pass without any."""
    ids, mask = padded([prompt(24), prompt(15, 1)])
    for make in (ACTIVE["clip_distance"], ACTIVE["group_positions"]):
        with make(llama):
            right = llama(ids, attention_mask=mask, position_ids=(mask.cumsum(-1) - 1).clamp_min(0)).logits
            counted = llama(ids, attention_mask=mask).logits
            turned = llama(ids.flip(1), attention_mask=mask.flip(1)).logits  # padded on the right: runs, is other text
            with pytest.raises(DecodingError, match="position_ids"):
                llama(ids, attention_mask=mask, position_ids=torch.arange(24)[None] * 2)
        real = mask.bool()
        torch.testing.assert_close(counted[real], right[real], atol=1e-4, rtol=1e-4)
        assert torch.isfinite(turned).all()


def test_right_padding_in_one_pass(llama):
    ids = prompt(15, 1)
    wide = torch.cat([ids, torch.zeros(1, 9, dtype=torch.long)], 1)
    batch = torch.cat([prompt(24), wide])
    mask = torch.ones_like(batch)
    mask[1, 15:] = 0
    for name in ("log_n", "clip_distance", "group_positions"):
        with ACTIVE[name](llama):
            torch.testing.assert_close(
                llama(batch, attention_mask=mask).logits[1, :15], llama(ids).logits[0], atol=1e-4, rtol=1e-4
            )


def test_scores_in_chunks_are_the_same(llama, monkeypatch):
    with clip_distance(llama, 6):
        whole = llama(prompt(24)).logits
        monkeypatch.setattr("o1lab.decoding.positions.CHUNK_BYTES", 4000)
        assert torch.allclose(llama(prompt(24)).logits, whole, atol=1e-5)


def test_positions_that_are_scaled(llama):
    """YaRN's factor on cos and sin is not applied a second time when a key is moved."""
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 10000.0}
    model, ids = build("llama", rope_parameters=yarn), prompt(24)
    assert model.model.rotary_emb.attention_scaling > 1.1
    plain = model(ids).logits
    with group_positions(model, 2, 2):
        moved = model(ids).logits
    with clip_distance(model, 23):
        nearly = model(ids).logits  # one pair sits at the window, which does not move it
    assert (moved - plain).abs().max() > 1e-2
    torch.testing.assert_close(nearly, plain, atol=1e-4, rtol=1e-4)


def test_dropout_zero_takes_away_what_training_mode_drops():
    model, ids = build("llama", attention_dropout=0.5), prompt(24)
    expected = model(ids).logits
    model.train()
    assert not torch.allclose(model(ids).logits, expected, atol=1e-3)
    with dropout_zero(model):
        assert torch.equal(model(ids).logits, expected)
    eager = build("llama", "eager")
    with dropout_zero(eager):
        assert torch.allclose(eager(ids).logits, eager(ids).logits)
        assert not eager(ids, output_attentions=True).attentions  # it ran in SDPA, which gives none


def test_half_precision_runs_everywhere():
    model, ids = build("llama").to(torch.bfloat16), prompt(24)
    for make in ALL.values():
        with make(model):
            assert torch.isfinite(decode(model, ids, steps=3)[1]).all()


@pytest.mark.parametrize(
    "make",
    [
        lambda m: log_n(m, 1),
        lambda m: log_n(m, 2.5),
        lambda m: log_n(m, True),
        lambda m: article_bias(m, math.nan),
        lambda m: article_bias(m, -0.3),
        lambda m: article_bias(m, 0.3, weights=(1,)),
        lambda m: article_bias(m, 0.3, chain_start=-1),
        lambda m: clip_distance(m, 0),
        lambda m: group_positions(m, 0, 4),
        lambda m: group_positions(m, 2, 0),
        lambda m: rope_in(m, torch.float64),
        lambda m: round_kv(m, torch.int8),
        lambda m: quantise_kv(m, 1),
        lambda m: quantise_kv(m, 9),
        lambda m: missing_scale(m, "prefill"),
        lambda m: missing_scale(m, scale=0.0),
        lambda m: recompute_kv(m, 0),
        lambda m: grad_scaler_step(m, 0),
        lambda m: grad_scaler_step(m, how="twice"),
        lambda m: log_n("llama", 8),
        lambda m: log_n(torch.nn.Linear(2, 2), 8),
        lambda m: fp32_head(m.model),
    ],
)
def test_bad_knobs_are_refused_and_leave_nothing(llama, make):
    before = state(llama)
    with pytest.raises(DecodingError), make(llama):
        pass
    assert state(llama) == before


def test_models_with_attention_of_their_own_are_refused():
    bloom = BloomForCausalLM(BloomConfig(vocab_size=97, hidden_size=32, n_layer=1, n_head=4))
    mamba = MambaForCausalLM(MambaConfig(vocab_size=97, hidden_size=32, num_hidden_layers=1))
    for model in (bloom, mamba):
        before = state(model)
        with pytest.raises(DecodingError, match="AttentionInterface"), log_n(model, 8):
            pass
        assert state(model) == before
    flex = build("llama")
    flex.config._attn_implementation_internal = "flex_attention"
    with pytest.raises(DecodingError, match="set_attn_implementation"), log_n(flex, 8):
        pass
    compiled = torch.compile(build("llama"))
    with pytest.raises(DecodingError, match="compiled"), log_n(compiled, 8):
        pass


def test_what_would_be_silently_wrong_is_refused(llama):
    with clip_distance(llama, 8), pytest.raises(DecodingError, match="moved already"), group_positions(llama, 2, 4):
        pass
    changing = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    with pytest.raises(DecodingError, match="dynamic"), clip_distance(build("llama", rope_parameters=changing), 8):
        pass
    still = build("llama")
    still.model.rotary_emb.inv_freq.zero_()
    with pytest.raises(DecodingError, match="no rotary"), clip_distance(still, 8):
        pass
    sliding = build("qwen2", use_sliding_window=True, sliding_window=8, max_window_layers=0)
    with clip_distance(sliding, 4), pytest.raises(DecodingError, match="sliding"):
        sliding(prompt(24))
    with log_n(sliding, 4):
        assert torch.isfinite(decode(sliding, prompt(24))[1]).all()  # counts what the window shows
    hollow = build("llama")
    with log_n(hollow, 4):
        hollow.model.layers = torch.nn.ModuleList()
        with pytest.raises(DecodingError, match="nothing was changed"):
            hollow(prompt(4))


def test_takes_what_load_returns():
    model = o1lab.models.load("tiny", device="cpu")
    ids = prompt(24)
    plain = model.model(ids).logits
    for make in ALL.values():
        with make(model):
            decode(model.model, ids, steps=2)
    assert torch.equal(model.model(ids).logits, plain)


def test_a_model_without_positions():
    """The coupled sibling: log-n is its own sharpening, a lossy cache changes it, and it has no positions to move."""
    model = coupled.build("tiny", trained_steps=2)
    problems = coupled_layout.make(8, 12, torch.Generator().manual_seed(0), step_ids=model.config.step_ids)
    with coupled.sharpened(model, "log-n"):
        expected = model(problems.words, problems.ids, problems.slots).logits
    with log_n(model, coupled_layout.tokens(2)):
        got = model(problems.words, problems.ids, problems.slots).logits
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-4)
    assert not torch.allclose(model(problems.words, problems.ids, problems.slots).logits, expected, atol=1e-4)
    plain = coupled.decode(model, problems)
    with missing_scale(model):
        assert not torch.equal(coupled.decode(model, problems), plain)
    with pytest.raises(DecodingError, match="no rotary"), clip_distance(model, 8):
        pass
    with recompute_kv(model, 1), pytest.raises(DecodingError, match="again"):
        coupled.decode(model, problems)


def test_everything_public_is_named():
    assert sorted(decoding.__all__) == decoding.__all__
    assert all(getattr(decoding, name).__doc__ for name in decoding.__all__)


# --- stopping -------------------------------------------------------------------------------------------------------

END, PAD = 2, 13


def texts(n=40):
    """Answers of 4 to 9 tokens with the end mark, run on for 8 more; high entropy at the mark."""
    chance = torch.Generator().manual_seed(3)
    for number in range(n):
        size = 4 + number % 6
        body = torch.randint(3, 12, (size,), generator=chance).tolist()
        entropies = [0.05] * size + [0.9] + [0.1] * 8
        yield [*body, END, *body[:3], PAD, PAD, PAD, PAD, PAD], size, entropies


def kinds(rule):
    found = rates(judge(rule, ids, end, entropies) for ids, end, entropies in texts())
    return {kind: share.value for kind, share in found.items()}


def test_a_right_stop_set_is_exact_and_the_reported_faults_are_not():
    right = StopSet({END})
    assert kinds(right)["exact"] == 1
    assert kinds(broken(right, "end of turn missing", {END}))["overrun"] == 1
    assert kinds(broken(right, "pieces", {3, 4, 5}))["premature"] > 0.5
    assert kinds(broken(right, "prompt read", (7, END, 7)))["premature"] == 1
    assert first_stop(StopSet({5}, every=4), [5] * 8) == 3
    late = kinds(broken(right, "checked late", every=8))
    assert late["overrun"] > 0.5
    assert late["premature"] == 0
    with pytest.raises(DecodingError, match="how"):
        broken(right, "slow")
    with pytest.raises(DecodingError, match="tokens"):
        broken(right, "pieces")
    with pytest.raises(DecodingError, match="stop ids"):
        StopSet(frozenset())


def test_the_articles_stop_rule():
    sets = after_steps({END, PAD}, labels={10}, size=2)
    rule = ArticleStop(stop_id=99, context=sets, threshold=0.3)
    ids, calm = [10, 5, 6, END, 7], [0.0] * 5
    assert first_stop(rule, ids, calm) is None  # not triggered: only the one stop id counts
    assert first_stop(rule, ids, [0, 0, 0, 0.9, 0]) == 3  # mean of the last three is 0.3
    assert first_stop(rule, ids, [0, 0, 0, 0.8, 0]) is None
    assert first_stop(rule, ids, [0, 0, 0, 0.5, 0.5]) == 4  # one late: the mark is still in the window
    assert first_stop(rule, [10, END, 5], [0.9, 0.9, 0.9]) == 1
    assert first_stop(rule, [10, 5, 10, 10], [0.9] * 4) is None
    assert first_stop(ArticleStop(7, sets, 0.3), ids, calm) == 4
    with pytest.raises(DecodingError, match="entropy"):
        first_stop(rule, ids)
    with pytest.raises(DecodingError, match="window"):
        ArticleStop(7, sets, 0.3, window=0)


def test_outcomes_want_a_text_that_ran_on():
    assert judge(StopSet({5}), [5, 2], 1).stopped == 0
    with pytest.raises(DecodingError, match="past its end"):
        judge(StopSet({5}), [1, 2], 2)
    with pytest.raises(DecodingError, match="at least one"):
        rates([])


def test_entropy_in_nats():
    assert entropy(torch.zeros(2, 8)) == pytest.approx([math.log(8)] * 2)
    forbidden = torch.tensor([0.0, 0.0, -math.inf, -math.inf], dtype=torch.float16)
    assert entropy(forbidden).item() == pytest.approx(math.log(2))


def test_rules_stop_generate_where_they_stop_the_text(llama):
    """As a stopping criterion in a padded batch, a rule ends each row where it ends the finished text."""
    ids, mask = padded([prompt(24), prompt(15, 1)])
    tokens, logits = decode(llama, ids, mask, steps=20)
    mark = tokens[0, 6].item()
    spread = entropy(logits)
    rules = [
        StopSet({mark}),
        ArticleStop(-1, lambda ids, at: {mark, tokens[1, 3].item()}, threshold=float(spread.median())),
    ]
    for rule in rules:
        ends = [first_stop(rule, row.tolist(), h.tolist()) for row, h in zip(tokens, spread, strict=True)]
        expected = max(19 if end is None else end for end in ends) + 1
        made = stopped(llama, ids, mask, rule)
        assert made.shape[1] == expected < 20 or None in ends
        for row, end in enumerate(ends):
            stop = 20 if end is None else end + 1
            assert torch.equal(made[row, :stop], tokens[row, :stop])
    with pytest.raises(DecodingError, match="output_scores"):
        generate(llama, ids, mask, stopping_criteria=rules[1].criteria(ids.shape[1]))


def stopped(model, ids, mask, rule):
    out = model.generate(
        ids, attention_mask=mask, max_new_tokens=20, do_sample=False, output_scores=True, return_dict_in_generate=True,
        stopping_criteria=rule.criteria(ids.shape[1]),
    )  # fmt: skip
    return out.sequences[:, ids.shape[1] :]


@pytest.mark.slow
def test_on_a_trained_model():
    """SmolLM2: what is idle or 16 bit keeps the text; distances clipped to 2 and a lost scale do not."""
    model = o1lab.models.load("smollm2", device="cpu")
    ids, mask = padded([model.encode("Q: What is the capital of France?\nA:").cpu(), model.encode("1, 2, 3,").cpu()])
    keep = [lambda: log_n(model, 64), lambda: clip_distance(model, 64), lambda: round_kv(model, torch.float16)]
    lose = [lambda: clip_distance(model, 2), lambda: missing_scale(model)]
    plain = generate(model.model, ids, mask, 5)
    for make in keep:
        with make():
            assert torch.equal(generate(model.model, ids, mask, 5), plain)
    for make in lose:
        with make():
            assert not torch.equal(generate(model.model, ids, mask, 5), plain)
