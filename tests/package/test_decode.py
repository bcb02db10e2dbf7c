"""Batched decoding gives what each prompt gives alone; rows end for a reason and do not disturb the others."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from o1lab import models
from o1lab.errors import ModelError
from o1lab.models import decode, decode_rows

pytestmark = pytest.mark.usefixtures("one_thread")

LENGTHS = (3, 17, 1, 40, 17, 8, 25, 2, 40, 11)


@pytest.fixture(scope="module")
def tiny():
    return models.load("tiny", "cpu", "float32")


def build(kind: str, **changes) -> models.Model:
    """A random model of another family: eight query heads on two key heads, or four on four; vocabulary of 97."""
    import transformers

    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 8}
    shape |= {"vocab_size": 97, "num_key_value_heads": 2, "max_position_embeddings": 128}
    shape |= {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
    config = getattr(transformers, f"{kind}Config")(**{**shape, **changes})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = transformers.AutoModelForCausalLM.from_config(config)
        for weight in model.parameters():
            if weight.ndim > 1:  # large enough that the argmax changes from token to token
                torch.nn.init.normal_(weight, std=0.3)
    model = model.eval().requires_grad_(False)
    return models.Model(model, None, kind, kind, torch.device("cpu"), torch.float32, 0, config.max_position_embeddings)


MODELS = {
    "grouped queries": lambda: build("Qwen2"),
    "eager attention": lambda: build("Llama", attn_implementation="eager"),
    "sliding window": lambda: build("Mistral", sliding_window=12),
    "learned positions": lambda: build("GPT2"),
}


def prompts(model, seed: int = 0) -> list[list[int]]:
    chance = torch.Generator().manual_seed(seed)
    most = model.model.config.vocab_size
    return [torch.randint(1, most, (length,), generator=chance).tolist() for length in LENGTHS]


def generated(model, prompt: list[int], new: int, **options) -> list[int]:
    ids = torch.tensor([prompt])
    out = model.model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False, pad_token_id=0, **options
    )
    return out[0, len(prompt) :].tolist()


@pytest.mark.parametrize("name", ["tiny", *MODELS])
def test_a_batch_gives_what_generate_gives_one_by_one(tiny, name):
    model = tiny if name == "tiny" else MODELS[name]()
    asked = prompts(model)
    expected = [generated(model, prompt, 24) for prompt in asked]
    assert len({tuple(tokens) for tokens in expected}) > 5  # the model says different things
    together = decode.greedy(model, asked, max_new_tokens=24)
    assert [list(made.ids) for made in together] == expected
    assert {made.ended for made in together} == {"cap"}
    alone = decode.greedy(model, asked, max_new_tokens=24, batch_size=1)
    assert [made.ids for made in alone] == [made.ids for made in together]


def test_rows_of_different_caps_and_stops_leave_the_batch(tiny, monkeypatch):
    asked = prompts(tiny) * 2
    caps = [5 + 3 * place for place in range(len(asked))]
    whole = [generated(tiny, prompt, cap) for prompt, cap in zip(asked, caps, strict=True)]
    stop = sorted({token for tokens in whole for token in tokens[6:9]})[:12]
    expected = [
        tokens[: next((at for at, token in enumerate(tokens) if token in stop), len(tokens)) + 1] for tokens in whole
    ]
    sizes = []
    plain = decode_rows.Batch._forward
    monkeypatch.setattr(
        decode_rows.Batch, "_forward", lambda self, ids, at: sizes.append(len(ids)) or plain(self, ids, at)
    )
    made = decode.greedy(tiny, asked, max_new_tokens=caps, stop_ids=stop)
    assert [list(one.ids) for one in made] == expected
    ended = ["stop" if tokens[-1] in stop else "cap" for tokens in expected]
    assert [one.ended for one in made] == ended
    assert {"stop", "cap"} == set(ended)
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] == len(asked)
    assert len(set(sizes)) > 3
    assert sizes[-1] <= 3
    for one, tokens in zip(made, expected, strict=True):  # the stop token is among the ids and not in the text
        assert one.text == tiny.tokenizer.decode(tokens[:-1] if one.ended == "stop" else tokens)


def test_finished_rows_free_their_part_of_the_cache(tiny, monkeypatch):
    kept = []
    plain = decode_rows.Batch.advance

    def advance(self):
        out = plain(self)
        if self.cache is not None:
            kept.append((int(self.open.sum()), self.cache.layers[0].keys.shape[0]))
        return out

    monkeypatch.setattr(decode_rows.Batch, "advance", advance)
    decode.greedy(tiny, prompts(tiny), max_new_tokens=[4 * (place + 1) for place in range(10)])
    assert kept == [(left, left) for left in range(9, 0, -1)]


def test_the_cache_is_not_copied_while_it_grows(tiny):
    room = decode_rows.new_cache(tiny.model, 20).layers[0]
    first, _ = room.update(torch.ones(2, 2, 5, 4), torch.ones(2, 2, 5, 4))
    later, _ = room.update(torch.zeros(2, 2, 1, 4), torch.zeros(2, 2, 1, 4))
    assert later.shape == (2, 2, 6, 4)
    assert later.data_ptr() == first.data_ptr()
    room.keys = room.keys * 3  # somebody else's hand
    again, _ = room.update(torch.zeros(2, 2, 1, 4), torch.zeros(2, 2, 1, 4))
    assert again[0, 0, :, 0].tolist() == [3, 3, 3, 3, 3, 0, 0]
    full, _ = room.update(torch.ones(2, 2, 30, 4), torch.ones(2, 2, 30, 4))
    assert full.shape[2] == 37 == room.get_seq_length()


@pytest.mark.parametrize(("options", "most"), [({"batch_tokens": 120}, 120), ({"batch_size": 3}, 3 * 64)])
def test_batches_stay_within_the_budget(tiny, monkeypatch, options, most):
    seen = []
    plain = decode_rows.Batch.__init__

    def begin(self, job, rows):
        plain(self, job, rows)
        seen.append((len(rows), len(rows) * (self.width + self.made.shape[1])))

    monkeypatch.setattr(decode_rows.Batch, "__init__", begin)
    asked = prompts(tiny)
    made = decode.greedy(tiny, asked, max_new_tokens=24, **options)
    assert [list(one.ids) for one in made] == [list(one.ids) for one in decode.greedy(tiny, asked, max_new_tokens=24)]
    split = seen[:-1]
    assert len(split) > 2
    assert all(size <= most or rows == 1 for rows, size in split)
    assert sum(rows for rows, _ in split) == len(asked)


def test_a_budget_smaller_than_one_row_still_decodes_it(tiny):
    assert [len(one.ids) for one in decode.greedy(tiny, prompts(tiny), max_new_tokens=4, batch_tokens=1)] == [4] * 10


def test_margins_and_entropies_are_those_of_each_produced_token(tiny):
    asked = prompts(tiny)
    made = decode.greedy(tiny, asked, max_new_tokens=[6 + place for place in range(10)], scores=True)
    for prompt, one in zip(asked, made, strict=True):
        ids = torch.tensor([[*prompt, *one.ids]])
        logits = tiny.model(ids).logits[0, len(prompt) - 1 : -1]
        top = logits.topk(2).values
        assert one.margins.shape == one.entropies.shape == (len(one.ids),)
        torch.testing.assert_close(one.margins, top[:, 0] - top[:, 1], atol=1e-4, rtol=1e-3)
        entropy = torch.distributions.Categorical(logits=logits).entropy()
        torch.testing.assert_close(one.entropies, entropy, atol=1e-4, rtol=1e-3)
    assert decode.greedy(tiny, asked[:1], max_new_tokens=2)[0].margins is None


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_logits_that_are_not_finite_end_that_row_only(tiny, bad):
    asked = [list(range(1, 20 + 9 * place)) for place in range(10)]  # so far apart that a position tells the row
    rows = {2: 0, 5: 3, 7: 4}  # number of the prompt: step at which its logits break
    plain = tiny.model.forward

    class Broken(torch.nn.Module):
        config, generation_config = tiny.model.config, tiny.model.generation_config

        def forward(self, input_ids, attention_mask=None, position_ids=None, past_key_values=None, **options):
            out = plain(input_ids, attention_mask=attention_mask, position_ids=position_ids, cache=past_key_values)
            for place, position in enumerate(position_ids[:, -1].tolist()):
                for row, step in rows.items():
                    if position + 1 == len(asked[row]) + step:
                        out.logits[place, -1, 7] = bad
            return out

    whole = decode.greedy(tiny, asked, max_new_tokens=8)
    model = dataclasses.replace(tiny, model=Broken())
    made = decode.greedy(model, asked, max_new_tokens=8, scores=True)
    for place, (one, right) in enumerate(zip(made, whole, strict=True)):
        step = rows.get(place)
        assert one.ended == ("cap" if step is None else "not finite")
        assert one.ids == (right.ids if step is None else right.ids[:step])
        assert len(one.margins) == len(one.ids)


def test_an_intervention_may_change_or_ban_tokens(tiny):
    asked, steps = prompts(tiny), []

    def odd(logits, rows, step):
        steps.append((step, sorted(rows.tolist())))
        assert logits.dtype == torch.float32
        logits[:, ::2] = float("-inf")
        logits[rows == 4] = float("-inf")  # nothing is left to choose from
        return logits

    made = decode.greedy(tiny, asked, max_new_tokens=12, on_logits=odd)
    assert all(token % 2 for one in made for token in one.ids)
    assert [one.ended for one in made] == ["cap"] * 4 + ["not finite"] + ["cap"] * 5
    assert made[4].ids == ()
    assert steps[0] == (0, list(range(10)))
    assert [step for step, _ in steps] == list(range(12))
    looking = decode.greedy(tiny, asked, max_new_tokens=12, on_logits=lambda *_: None)
    assert looking == decode.greedy(tiny, asked, max_new_tokens=12)


def test_a_prompt_longer_than_the_context_is_named_and_the_others_go_on():
    model = build("GPT2", max_position_embeddings=32)
    made = decode.greedy(model, [[1, 2], [1] * 40, [1] * 32, [1] * 28, [3]], max_new_tokens=[4, 4, 4, 9, 31])
    ends = ["cap", *["context too short"] * 3, "cap"]
    assert [one.ended for one in made] == ends
    assert [len(one.ids) for one in made] == [4, 0, 0, 4, 31]
    assert list(made[4].ids) == generated(model, [3], 31)


def test_a_row_at_the_end_of_the_context_does_not_trip_over_the_others():
    """Positions are a table here: a row that has ended and is still in the batch must not look past its end."""
    model = build("GPT2", max_position_embeddings=64)
    asked = [[5] * 58] + [[place + 1] for place in range(30)]
    made = decode.greedy(model, asked, max_new_tokens=[6] + [40] * 30)
    assert list(made[0].ids) == generated(model, asked[0], 6)
    assert list(made[3].ids) == generated(model, asked[3], 40)


def out_of_memory_above(monkeypatch, rows: int, at_step: int) -> list[int]:
    """Make a batch of more than ``rows`` rows fail at its forward pass number ``at_step``; lists the batches begun."""
    begun = []
    plain = decode_rows.Batch._forward

    def forward(self, ids, positions):
        if self.step == 0:
            begun.append(len(ids))
        if len(self.rows) > rows and self.step >= at_step:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.\nmore words")
        return plain(self, ids, positions)

    monkeypatch.setattr(decode_rows.Batch, "_forward", forward)
    return begun


@pytest.mark.parametrize("at_step", [0, 9])
def test_out_of_memory_halves_the_batch_and_goes_on(tiny, monkeypatch, at_step):
    asked = prompts(tiny)
    caps = [4, 24, 24, 24, 24, 24, 24, 24, 24, 4]
    expected = decode.greedy(tiny, asked, max_new_tokens=caps)
    begun = out_of_memory_above(monkeypatch, 3, at_step)
    order = [place for place, _ in decode.stream(tiny, asked, max_new_tokens=caps)]
    assert sorted(order) == list(range(10))  # each once, although some had ended before their batch failed
    assert begun[:3] == [10, 5, 2]
    assert max(begun[2:]) == 2
    assert decode.greedy(tiny, asked, max_new_tokens=caps) == expected


def test_one_row_that_does_not_fit_is_an_error_that_says_so(tiny, monkeypatch):
    out_of_memory_above(monkeypatch, 0, 0)
    with pytest.raises(
        ModelError, match=r"one row of 6 tokens does not fit on cpu: CUDA out of memory\. Tried .* MiB\.$"
    ):
        decode.greedy(tiny, [[1, 2, 3]], max_new_tokens=3)


def test_the_device_is_asked_only_now_and_then(tiny, monkeypatch):
    """One transfer per look, whatever the number of rows."""
    asked, transfers = prompts(tiny) * 3, []
    plain = torch.Tensor.cpu
    monkeypatch.setattr(torch.Tensor, "cpu", lambda self: transfers.append(self.shape) or plain(self))
    decode.greedy(tiny, asked, max_new_tokens=21)
    assert transfers == [(30, 4)] * 5 + [(30, 1)]


@pytest.mark.parametrize("name", ["quantise_kv", "recompute_kv"])
def test_what_changes_the_cache_does_it_in_a_batch_as_it_does_alone(tiny, name):
    from o1lab import decoding

    change, knob = getattr(decoding, name), {"quantise_kv": 3, "recompute_kv": 2}[name]
    asked, caps = prompts(tiny), [3 * (place + 1) for place in range(10)]
    with change(tiny, knob):
        together = decode.greedy(tiny, asked, max_new_tokens=caps)
    alone = []
    for prompt, cap in zip(asked, caps, strict=True):
        with change(tiny, knob):
            alone += decode.greedy(tiny, [prompt], max_new_tokens=cap)
    assert together == alone
    assert (together == decode.greedy(tiny, asked, max_new_tokens=caps)) == (name == "recompute_kv")


def test_a_model_may_decode_itself(tiny):
    class Own(torch.nn.Module):
        config, batches = tiny.model.config, []

        def decode_greedy(self, prompts, max_new_tokens, stop_ids):
            self.batches.append(prompts)
            if len(prompts) > 2:
                raise torch.OutOfMemoryError("full")
            made = {1: [5, 6, 7], 2: [5, 9], 3: [5, -1], 4: [5, 6]}
            return [made[prompt[0]][:cap] for prompt, cap in zip(prompts, max_new_tokens, strict=True)]

    model = dataclasses.replace(tiny, model=Own())
    made = decode.greedy(model, [[1], [2], [3], [4]], max_new_tokens=[2, 4, 4, 2], stop_ids=[9])
    assert [one.ids for one in made] == [(5, 6), (5, 9), (5,), (5, 6)]
    assert [one.ended for one in made] == ["cap", "stop", "not finite", "cap"]
    assert [len(batch) for batch in model.model.batches] == [4, 2, 2]
    with pytest.raises(ModelError, match="its own decoding"):
        decode.greedy(model, [[1]], max_new_tokens=2, scores=True)


# ---- draws -----------------------------------------------------------------------------------------------------------


def test_draws_depend_on_the_seed_and_not_on_the_batch(tiny):
    asked = prompts(tiny)
    options = {"max_new_tokens": 12, "temperature": 1.0}
    made = decode.greedy(tiny, asked, seed=list(range(10)), **options)
    alone = [decode.greedy(tiny, [asked[place]], seed=[place], **options)[0] for place in range(10)]
    assert [one.ids for one in made] == [one.ids for one in alone]
    again = decode.greedy(tiny, asked, seed=list(range(1, 11)), **options)
    assert sum(a.ids == b.ids for a, b in zip(made, again, strict=True)) == 0
    same = decode.greedy(tiny, [asked[0]] * 5, seed=3, **options)
    assert len({one.ids for one in same}) == 5  # one seed for all: every row has draws of its own
    with pytest.raises(ModelError, match="2 seeds for 10 prompts"):
        decode.greedy(tiny, asked, seed=[1, 2], **options)


def test_draws_have_the_frequencies_of_the_softmax():
    noise = torch.cat([decode_rows._gumbel(torch.arange(4000), step, 5) for step in range(5)])
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0, 0.5])
    share = torch.bincount((logits + noise).argmax(-1), minlength=5) / len(noise)
    assert noise.isfinite().all()
    torch.testing.assert_close(share, logits.softmax(-1), atol=0.015, rtol=0)


# ---- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "options", "message"),
    [
        ([[1], []], {}, "prompt 1 is empty"),
        ([[1], [256]], {}, "prompt 1: token ids of tiny go from 0 to 255"),
        ([[-1]], {}, "prompt 0: token ids"),
        ([[1]], {"max_new_tokens": 0}, "max_new_tokens=0: allow at least one"),
        ([[1], [2]], {"max_new_tokens": [3, -1]}, "max_new_tokens=-1"),
        ([[1], [2]], {"max_new_tokens": [3]}, "1 caps for 2 prompts"),
        ([[1]], {"temperature": -1.0}, "temperature=-1.0"),
        ([[1]], {"batch_size": 0}, "batch_size=0"),
        ([[1]], {"batch_tokens": -5}, "batch_tokens=-5"),
    ],
)
def test_bad_input(tiny, asked, options, message):
    with pytest.raises(ModelError, match=message):
        decode.greedy(tiny, asked, **{"max_new_tokens": 2, **options})


def test_text_needs_a_tokenizer_and_a_model_needs_a_cache(tiny):
    bare = dataclasses.replace(tiny, tokenizer=None)
    with pytest.raises(ModelError, match="no tokenizer"):
        decode.greedy(bare, ["a"], max_new_tokens=1)
    assert decode.greedy(bare, [[97]], max_new_tokens=3)[0].text == ""

    class Recurrent(torch.nn.Module):
        config = tiny.model.config

        def forward(self, input_ids):
            raise AssertionError("never called")

    with pytest.raises(ModelError, match="takes no key/value cache"):
        decode.greedy(dataclasses.replace(tiny, model=Recurrent()), [[1]], max_new_tokens=1)


def test_nothing_to_do(tiny):
    assert decode.greedy(tiny, [], max_new_tokens=3) == []


def test_text_is_encoded_as_the_model_encodes_it(tiny):
    asked = ["hello", "a", "a much longer prompt, with words"]
    by_text = decode.greedy(tiny, asked, max_new_tokens=5)
    assert by_text == decode.greedy(tiny, [tiny.encode(text)[0].tolist() for text in asked], max_new_tokens=5)


def test_the_end_of_sequence_ids_come_from_model_and_tokenizer(tiny):
    model = build("Qwen2")
    model.model.generation_config.eos_token_id = [3, 9]
    model.model.config.eos_token_id = 4
    assert decode._stops(model) == (3, 4, 9)
    assert decode._stops(tiny) == ()
    asked = prompts(model)
    first = decode.greedy(model, asked, max_new_tokens=6, stop_ids=[])
    model.model.generation_config.eos_token_id = first[0].ids[2]
    assert decode.greedy(model, asked[:1], max_new_tokens=6)[0].ended == "stop"


def test_progress_is_shown_on_request(tiny, capsys, monkeypatch):
    monkeypatch.setenv("O1LAB_HEADLESS", "1")
    decode.greedy(tiny, prompts(tiny), max_new_tokens=2, progress="decoding")
    assert "decoding: 10 done" in capsys.readouterr().out
