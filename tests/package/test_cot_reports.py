"""Public reports of long answers that went wrong, each small: red with the fault, green with the right code.

A report is a function of ``fault`` that does the smallest thing in which the fault can be seen, and says whether the
outcome is healthy. Every one is run both ways, so none can pass by being blind. The faults are those of o1lab.decoding
where it has them, else they are made here.
"""

from __future__ import annotations

import pytest
import torch
from package.decoding_fixture import build, cache_name, decode, padded, prompt
from torch.nn import functional
from transformers import DynamicCache

from o1lab.decoding import (
    StopSet,
    broken,
    dropout_zero,
    entropy,
    fp32_head,
    judge,
    missing_scale,
    quantise,
    recompute_kv,
    rope_in,
)

pytestmark = pytest.mark.usefixtures("one_thread")

REPORTS = {}


def report(*sources):
    """Enter a function under the addresses of what it reproduces."""

    def enter(body):
        name = body.__name__
        assert name not in REPORTS
        REPORTS[name] = (body, sources)
        return body

    return enter


def drift(model, make, ids, steps=8):
    """Mean difference from exact decoding of the same forced tokens, per step."""
    forced = prompt(steps, 7).expand(len(ids), -1)
    exact = decode(model, ids, None, steps, forced)[1]
    with make(model):
        found = decode(model, ids, None, steps, forced)[1]
    return (found - exact).abs().mean((0, 2)) / exact.std()


# --- the cache ------------------------------------------------------------------------------------------------------


@report("https://github.com/NVIDIA/TensorRT-LLM/pull/16916", "https://github.com/sgl-project/sglang/pull/28144")
def scale_lost_in_the_decode_path(fault):
    """fp8 entries that decoding writes are read without their scale. The prompt is right: a short answer hides it."""
    found = drift(build(), lambda model: missing_scale(model, "decode" if fault else "nowhere"), prompt(40))
    assert found[0] == 0  # the report's control: capped answers score as bf16 does
    return bool(found[2:].max() < 0.2)


@report("https://github.com/vllm-project/vllm/pull/42580", "https://github.com/vllm-project/vllm/pull/51534")
def scale_dropped_when_queries_are_fp8(fault):
    """Every entry is read with scale 1 on one fast path. A round trip of keys shows it without any text."""
    model, ids = build(), prompt(40)
    caches = []
    for where in (None, "all" if fault else "nowhere"):
        caches.append(DynamicCache())
        if where is None:
            model(ids, **{cache_name(model): caches[-1]})
        else:
            with missing_scale(model, where):
                model(ids, **{cache_name(model): caches[-1]})
    exact, read = (cache.layers[0].keys for cache in caches)
    return bool(((read - exact).abs().amax(-1) / exact.abs().amax(-1)).max() < 1 / 16)


@report("https://github.com/osaurus-ai/osaurus/pull/998")
def entries_rounded_again_and_again(fault):
    """The one way in which cache error does accumulate: decoded entries are quantised anew on a grid that has moved."""
    keys = torch.randn(256, 16, generator=torch.Generator().manual_seed(0))
    cache = torch.empty(0, 16)
    worst = []
    for place in range(0, 256, 16):
        new = keys[place : place + 16]
        cache = quantise(torch.cat([cache, new]).T, 4).T if fault else torch.cat([cache, quantise(new.T, 4).T])
        worst.append((cache[:16] - keys[:16]).abs().mean().item())
    return worst[-1] < 1.5 * worst[0]


def stale_phases(fault, phases):
    """Decode over the point where RoPE's frequencies change; each step is to equal a pass over the whole text."""
    length = 24 if phases["rope_type"] == "dynamic" else 96
    model, ids = build(rope_parameters=phases, max_position_embeddings=length), prompt(48)
    if fault:
        steps = decode(model, ids[:, :12], None, 36, ids[:, 12:])[1]
    else:
        with recompute_kv(model, 1):
            steps = decode(model, ids[:, :12], None, 36, ids[:, 12:])[1]
    again = torch.stack([model(ids[:, :end], use_cache=False).logits[:, -1] for end in range(12, 48)], 1)
    error = (steps - again).abs().amax((0, 2))
    assert error[:8].max() < 1e-3  # before the change both are right
    return bool(error.max() < 1e-3)


@report("https://github.com/huggingface/transformers/pull/33129", "https://github.com/microsoft/onnxruntime-genai/pull/1161",
        "https://github.com/ggml-org/llama.cpp/pull/24875")  # fmt: skip
def keys_cached_under_other_factors(fault):
    """LongRoPE switches to its long factors in mid-answer; cached keys keep the short ones. Recomputing is the cure."""
    return stale_phases(fault, {
        "rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 24, "factor": 4.0,
        "short_factor": [1.0] * 4, "long_factor": [1.0, 2.0, 3.0, 4.0],
    })  # fmt: skip


@report(
    "https://github.com/huggingface/transformers/issues/25104", "https://github.com/huggingface/transformers/pull/24653"
)
def keys_cached_under_another_base(fault):
    """Dynamic NTK changes its base with every token beyond the trained length; cached keys keep the older ones."""
    return stale_phases(fault, {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0})


# --- positions and padding ------------------------------------------------------------------------------------------


@report("https://github.com/EleutherAI/gpt-neox/issues/1003", "https://github.com/huggingface/transformers/pull/29285",
        "https://github.com/huggingface/candle/pull/3520")  # fmt: skip
def phases_built_in_16_bit(fault):
    """Position times frequency in bf16: right for 256 tokens, then less and less."""
    model, ids = build(max_position_embeddings=1024), prompt(900)
    exact = model(ids).logits[0]
    with rope_in(model, torch.bfloat16 if fault else torch.float32):
        found = model(ids).logits[0]
    error = (found - exact).abs().mean(-1) / exact.std()
    assert error[:32].mean() < 0.1
    return bool(error[-64:].mean() < 0.1)


def greedy_in_a_padded_batch(model, decode_mask=True, decode_places="row", prompt_places="row"):
    """Whether a row that needed padding gives the logits that it gives alone."""
    rows, steps = [prompt(24), prompt(10, 1)], 6
    forced = prompt(steps, 7).expand(2, -1)
    alone = decode(model, rows[1], None, steps, forced[:1])[1]
    ids, mask = padded(rows)
    row_places = (mask.cumsum(-1) - 1).clamp_min(0)
    cache, found = DynamicCache(), []
    places = row_places if prompt_places == "row" else torch.arange(24).expand(2, -1)
    for step in range(steps):
        out = model(ids, attention_mask=mask if step == 0 or decode_mask else torch.ones_like(mask),
                    position_ids=places, **{cache_name(model): cache})  # fmt: skip
        found.append(out.logits[1, -1])
        ids, mask = forced[:, step : step + 1], torch.cat([mask, torch.ones(2, 1, dtype=torch.long)], 1)
        places = mask.sum(1, keepdim=True) - 1 if decode_places == "row" else torch.full((2, 1), 24 + step)
    return bool((torch.stack(found) - alone[0]).abs().max() < 1e-3)


@report("https://github.com/unslothai/unsloth/issues/3699", "https://github.com/thu-nics/C2C/pull/19")
def positions_shared_by_a_padded_batch(fault):
    """The prompt is numbered row by row, new tokens by the column: a padded row jumps ahead by its padding."""
    return greedy_in_a_padded_batch(build(), decode_places="column" if fault else "row")


@report("https://github.com/unslothai/unsloth/pull/3795")
def positions_by_the_column_in_a_model_that_learnt_them(fault):
    """Numbered by the column throughout: no harm to RoPE, which is relative (so it is no diagnosis), but to GPT-2."""
    assert greedy_in_a_padded_batch(build(), decode_places="column", prompt_places="column")
    place = "column" if fault else "row"
    return greedy_in_a_padded_batch(build("gpt2"), decode_places=place, prompt_places=place)


@report("https://github.com/unslothai/unsloth/pull/2216", "https://github.com/OpenNMT/OpenNMT-py/pull/2532")
def padding_masked_in_the_prompt_only(fault):
    """After the first token the mask is all ones, and a padded row attends to its padding."""
    return greedy_in_a_padded_batch(build(), decode_mask=not fault)


# --- low bits that are no bug, and those that are --------------------------------------------------------------------


@report(
    "https://github.com/huggingface/transformers/issues/25420",
    "https://github.com/huggingface/transformers/issues/29029",
)
def a_cache_judged_in_16_bit(fault):
    """Cached and uncached logits differ in the last bits. No fault of the cache: in fp32 the same code agrees."""
    model, ids = build().to(torch.bfloat16 if fault else torch.float32), prompt(32)
    whole = model(ids, use_cache=False).logits[:, 23:31]
    steps = decode(model, ids[:, :24], None, 8, ids[:, 24:])[1]
    error = ((steps - whole).abs().max() / whole.float().std()).item()
    assert error < 0.25  # and in bf16 it is rounding: some units in the last place
    return error < 1e-4


@report("https://github.com/vllm-project/vllm/issues/5898", "https://github.com/vllm-project/vllm/issues/6735",
        "https://github.com/unslothai/unsloth/issues/9708")  # fmt: skip
def sums_split_by_the_size_of_the_batch(fault):
    """A reduction in bf16 whose order depends on how many rows there are flips near ties; a fixed order does not."""
    chance = torch.Generator().manual_seed(0)
    hidden = torch.randn(400, 64, generator=chance).bfloat16()
    weight = torch.randn(300, 64, generator=chance).bfloat16()

    def head(rows):
        parts = (4 if len(rows) > 8 else 1) if fault else 4
        sums = [x.float() @ w.float().T for x, w in zip(rows.chunk(parts, 1), weight.chunk(parts, 1), strict=True)]
        total = sums[0].bfloat16()
        for one in sums[1:]:
            total = (total.float() + one).bfloat16()
        return total.float()

    alone, together = torch.cat([head(row) for row in hidden.split(1)]), head(hidden)
    flipped = alone.argmax(-1) != together.argmax(-1)
    margin = alone.topk(2).values.diff(dim=-1).abs()[:, 0]
    assert (margin[flipped] <= 2 * (alone - together).abs().amax(-1)[flipped]).all()  # the diagnosis: only near ties
    return not flipped.any()


@report("https://github.com/QwenLM/Qwen3/issues/910", "https://github.com/huggingface/transformers/pull/33317",
        "https://github.com/QwenLM/Qwen3/issues/761")  # fmt: skip
def scores_beyond_what_fp16_holds(fault):
    """q·k above 65,504 is infinite in eager fp16, softmax makes it NaN, and every token is "!". bf16 has the range."""
    model = build(attention="eager")
    for layer in model.model.layers:
        layer.self_attn.q_proj.weight *= 200
        layer.self_attn.k_proj.weight *= 200
    logits = model.to(torch.float16 if fault else torch.bfloat16)(prompt(24)).logits
    finite = bool(torch.isfinite(logits).all())
    assert finite or logits[0, -1].argmax() == 0  # NaN is the largest: the first token of the vocabulary wins
    return finite


@report("https://github.com/sgl-project/sglang/issues/33627", "https://github.com/vllm-project/vllm/pull/19592")
def logits_rounded_to_16_bit(fault):
    """A bf16 head ties or swaps near tokens. Casting its logits later is late; the product has to be in fp32."""
    model = build(vocab_size=8000, initializer_range=0.02).to(torch.bfloat16)
    ids = prompt(300)
    exact = (model.model(ids).last_hidden_state.double() @ model.lm_head.weight.double().T).argmax(-1)
    if fault:
        chosen = functional.softmax(model(ids).logits, dim=-1, dtype=torch.float32).argmax(-1)
    else:
        with fp32_head(model):
            chosen = model(ids).logits.argmax(-1)
    return torch.equal(chosen, exact)


@report("https://github.com/pytorch/pytorch/issues/124464", "https://github.com/suno-ai/bark/pull/662",
        "https://github.com/pytorch/pytorch/issues/99293")  # fmt: skip
def dropout_that_eval_does_not_reach(fault):
    """SDPA drops what it is told to, in eval mode too: the same prompt gives other logits on each call."""
    model, ids = build(attention_dropout=0.3), prompt(24)
    for layer in model.model.layers:
        layer.self_attn.training = True  # as code does that hands its constant to SDPA whatever the mode
    if fault:
        return torch.equal(model(ids).logits, model(ids).logits)
    with dropout_zero(model):
        return torch.equal(model(ids).logits, model(ids).logits)


# --- stopping -------------------------------------------------------------------------------------------------------

TURN, TEXT_END = 2, 3
PIECES, PROMPT = (10, 11, 12), (20, TURN, 21)
ANSWER = [*range(30, 37), 11, 40, TURN, 50, 51, 52, 53, 54, TEXT_END]
RIGHT = StopSet(frozenset({TURN, TEXT_END}))


def stops_at_the_end(rule):
    return judge(rule, ANSWER, ANSWER.index(TURN)).kind == "exact"


@report("https://github.com/vllm-project/vllm/issues/4180", "https://github.com/oobabooga/textgen/issues/5885",
        "https://github.com/ollama/ollama/issues/3759")  # fmt: skip
def end_of_turn_is_no_stop_id(fault):
    """Llama 3 ends its turn with <|eot_id|>; the config names <|end_of_text|> only. It talks on."""
    rule = broken(RIGHT, "end of turn missing", {TURN}) if fault else RIGHT
    assert judge(rule, ANSWER, ANSWER.index(TURN)).kind != "premature"
    return stops_at_the_end(rule)


@report("https://github.com/cactus-compute/cactus/pull/199")
def pieces_of_a_stop_string_stop_alone(fault):
    """ "<|im_end|>" is cut into tokens and each of them is made a stop id: any of them ends the answer."""
    return stops_at_the_end(broken(RIGHT, "pieces", PIECES) if fault else RIGHT)


@report("https://github.com/deepset-ai/haystack/pull/5316")
def the_prompt_is_searched_for_stop_words(fault):
    """The prompt holds an end of turn, as every chat prompt does; the first token is the last."""
    rule = broken(RIGHT, "prompt read", PROMPT) if fault else RIGHT
    assert judge(rule, ANSWER, ANSWER.index(TURN)).stopped == (0 if fault else ANSWER.index(TURN))
    return stops_at_the_end(rule)


@report("https://github.com/ml-explore/mlx-examples/issues/524")
def only_the_newest_of_several_tokens_is_checked(fault):
    """Tokens come in bursts, and the stop id is not the last of its burst."""
    return stops_at_the_end(broken(RIGHT, "checked late", every=4) if fault else RIGHT)


@report("https://github.com/unslothai/unsloth/issues/416", "https://github.com/huggingface/alignment-handbook/issues/127",
        "https://github.com/huggingface/trl/pull/6357")  # fmt: skip
def end_mark_masked_with_the_padding(fault):
    """Padding is the end mark, padding has no loss, so the end mark has none: the model never learns to stop."""
    end, pad, count = 2, 2 if fault else 0, 12
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = build(num_hidden_layers=1, vocab_size=16).requires_grad_(True).train()
        ids = torch.full((count, 10), pad)
        for row in range(count):  # 4, 5, … counted up to 9 from various starts, then the end mark
            start = 4 + row % 5
            ids[row, : 10 - start] = torch.arange(start, 10)
            ids[row, 10 - start] = end
        labels = ids.masked_fill(ids == pad, -100)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        for _ in range(60):
            optimizer.zero_grad()
            model(ids, labels=labels).loss.backward()
            optimizer.step()
    logits = model.requires_grad_(False).eval()(torch.tensor([[4, 5, 6, 7, 8, 9]])).logits[0]
    assert logits[:-1].argmax(-1).tolist() == [5, 6, 7, 8, 9]  # the rest was learnt either way
    assert entropy(logits[-2]) < 0.5
    return bool(logits[-1].softmax(-1)[end] > 0.9)


@pytest.mark.parametrize("fault", [True, False], ids=["fault", "cure"])
@pytest.mark.parametrize("name", REPORTS)
def test_report(name, fault):
    body, _ = REPORTS[name]
    assert body(fault) is not fault


def test_every_report_names_its_sources():
    assert len(REPORTS) >= 15
    for body, sources in REPORTS.values():
        assert body.__doc__
        assert sources
        assert all(source.startswith("https://github.com/") for source in sources)
