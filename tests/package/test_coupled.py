"""The sibling without positions: its layout, its network, how it decodes, and that log-n attention cures dilution."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from o1lab import chains, decoding, models
from o1lab.errors import ModelError, UnknownName
from o1lab.models import coupled, decode, train, training, vocabulary
from o1lab.models import coupled_layout as layout

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def shipped() -> models.Model:
    return coupled.load(device="cpu", dtype="float32")


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# --- the layout -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shuffled", [0.0, 1.0])
def test_every_column_of_a_chain_carries_the_id_of_the_step_that_it_predicts(shuffled):
    steps = 6
    made = layout.make(40, steps, generator(), shuffled=shuffled)
    assert made.words.shape == made.ids.shape == made.slots.shape == (40, layout.tokens(steps))
    apply = chains.make("arithmetic", 1, 1, seed=0, variant="modular")[0].apply
    for words, ids, slots, targets in zip(made.words, made.ids, made.slots, made.targets, strict=True):
        text, target = vocabulary.decode(words).split(), vocabulary.decode(targets).split()
        assert (text[0], int(ids[0]), int(slots[0])) == ("<bos>", 0, layout.BEGIN)
        program = {}
        for k in range(steps):
            place = 1 + 2 * k
            assert ids[place] == ids[place + 1]
            assert slots[place : place + 2].tolist() == [layout.PROGRAM_OPERATOR, layout.PROGRAM_OPERAND]
            program[int(ids[place])] = (text[place], text[place + 1])
        order = sorted(program)
        assert (list(program) == order) is (shuffled == 0.0) or shuffled == 1.0
        assert len(program) == steps
        assert 0 < order[0] < order[-1] < 320
        state = text[1 + 2 * steps]
        for k, number in enumerate(order):
            place = 1 + 2 * steps + 3 * k
            assert ids[place : place + 3].tolist() == [number] * 3
            assert slots[place : place + 3].tolist() == [layout.STATE, layout.OPERATOR, layout.OPERAND]
            operator, operand = program[number]
            assert text[place : place + 3] == [state, operator, operand]
            state = apply(state, operator, operand)
            assert target[3 * k : 3 * k + 3] == [operator, operand, state]


def test_shuffled_programs_are_shuffled():
    made = layout.make(40, 6, generator(), shuffled=1.0)
    shown = made.ids[:, 1:13:2]
    assert (shown != shown.sort(1).values).any(1).float().mean() > 0.9


def test_ids_follow_from_the_labels_alone_and_keep_their_order():
    prompts = ["<bos> modular from s8 to s9 state 13 program s9 - 20 s8 * 3 chain",
               "<bos> modular from s8 to s9 state 1 program s8 + 2 s9 * 3 chain",
               "<bos> modular from s108 to s109 state 13 program s109 - 20 s108 * 3 chain"]  # fmt: skip
    read = [layout.read(vocabulary.encode(prompt)) for prompt in prompts]
    made = layout.stack(read, 320, torch.device("cpu"))
    assert made.ids[0, [1, 3]].tolist() == made.ids[1, [3, 1]].tolist()
    assert made.ids[0, 3] < made.ids[0, 1]
    assert made.ids[2].tolist() != made.ids[0].tolist()
    assert vocabulary.decode(made.words[0, :6]) == "<bos> - 20 * 3 13"
    with pytest.raises(ModelError, match="more steps than the model has ids"):
        layout.stack(read, 2, torch.device("cpu"))


@pytest.mark.parametrize("text", [
    "", "<bos>", "hello", "<bos> digits from s7 to s7 state 3 7 1 program s7 + 2 9 0 chain",
    "<bos> modular from s7 to s9 state 13 program s7 + 5 s8 * 3 chain",
    "<bos> modular from s8 to s7 state 13 program s7 + 5 s8 * 3 chain",
    "<bos> modular from s7 to s7 state + program s7 + 5 chain",
    "<bos> modular from s7 to s7 state 3 program s7 5 + chain",
    "<bos> modular from s7 to s7 state 3 program s7 + 5 s7 + 6 chain",
    "<bos> modular from s7 to s7 state 3 program s7 + 5 s8 + chain",
    "<bos> modular from s7 to s7 state 3 program s7 + A chain",
])  # fmt: skip
def test_other_prompts_are_refused(text):
    with pytest.raises(ModelError, match="'modular' chains"):
        layout.read(vocabulary.encode(text))


# --- the network ------------------------------------------------------------------------------------------------------


def test_nothing_in_it_knows_a_position():
    model = coupled.build("tiny").eval()
    made = layout.make(3, 5, generator())
    plain, moved = (
        model(made.words, made.ids, made.slots, position_ids=torch.arange(layout.tokens(5))[None] * factor).logits
        for factor in (1, 7)
    )
    assert torch.equal(plain, moved)
    order = torch.randperm(10, generator=generator()) + 1  # tokens of the program in any order
    shown = torch.cat([torch.tensor([0]), order, torch.arange(11, layout.tokens(5))])
    one_layer = coupled.build("tiny")
    del one_layer.model.layers[1:]
    one_layer.config.num_hidden_layers = 1
    first = one_layer(made.words, made.ids, made.slots, logits_to_keep=15).logits
    other = one_layer(made.words[:, shown], made.ids[:, shown], made.slots[:, shown], logits_to_keep=15).logits
    torch.testing.assert_close(first, other)
    cos, sin = model.model.rotary_emb(torch.zeros(2, 4, 32, dtype=torch.float16))
    assert cos.dtype == torch.float16
    assert bool((cos == 1).all() and (sin == 0).all())


def test_sizes_and_numbers_out_of_range_are_refused():
    with pytest.raises(UnknownName, match="tiny"):
        coupled.build("tinny")
    model = coupled.build("tiny")
    for options, words in [
        ({"steps": 320}, "1 to 319 steps"), ({"n": 0}, "at least one chain"), ({"scale": "log"}, "'log-n'"),
        ({"scale": 0.0}, "positive"), ({"scale": float("nan")}, "positive"),
    ]:  # fmt: skip
        with pytest.raises(ModelError, match=words):
            coupled.survival(model, **{"steps": 3, "n": 1, **options})
    with pytest.raises(ModelError, match="no step ids"):
        coupled.survival(models.load("tiny", device="cpu"), 3, 1)


def test_training_at_a_tiny_modulus_learns_whole_chains(tmp_path):
    config = training.preset("coupled", "tiny", steps=300, modulus=3, longest=3, step_ids=48, ease=0.0, rate=1e-2)
    made = train.train(config, tmp_path, device="cpu", say=lambda text: None)
    rows = train.history(tmp_path)
    assert rows[-1]["loss"] < 0.3 * rows[0]["loss"]
    model = coupled.load(tmp_path / "model", device="cpu", dtype="float32")
    assert model.model.config.trained_steps == 3
    learnt = coupled.survival(model, 3, 128, seed=1, modulus=3)
    assert learnt.estimate.low > 0.5
    assert coupled.survival(model, 40, 64, seed=1, modulus=3).right.mean() < learnt.right.mean() - 0.2
    untrained = coupled.survival(coupled.build("tiny", step_ids=48), 3, 128, seed=1, modulus=3)
    assert untrained.right.mean() < 0.2
    assert made.accuracy["coupled"]["3"] > 0.5


# --- the shipped model ------------------------------------------------------------------------------------------------


def test_the_shipped_model_is_small_safe_and_registered(shipped):
    files = sorted(path.name for path in coupled.WEIGHTS.iterdir())
    assert files == [
        "config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json",
        "training.json",
    ]  # fmt: skip
    assert sum(path.stat().st_size for path in coupled.WEIGHTS.iterdir()) < 1_000_000
    assert AutoConfig.from_pretrained(coupled.WEIGHTS).model_type == "o1lab-coupled"
    auto = AutoModelForCausalLM.from_pretrained(coupled.WEIGHTS, dtype=torch.float32)
    assert isinstance(auto, coupled.CoupledForCausalLM)
    assert all(torch.equal(w, shipped.model.state_dict()[name]) for name, w in auto.state_dict().items())
    assert isinstance(auto.model.rotary_emb, coupled.NoRotation)


def test_dilution_grows_with_n_and_log_n_takes_it_back(shipped):
    inside, beyond = (coupled.survival(shipped, n, 64, seed=3) for n in (12, 128))
    cured = coupled.survival(shipped, 128, 64, seed=3, scale="log-n")
    assert inside.right.mean() >= 0.95
    assert 0.1 < beyond.right.mean() < 0.8
    assert cured.right.mean() >= beyond.right.mean() + 0.2
    assert cured.right.mean() > 0.85


def test_the_first_fault_is_the_same_forced_free_and_through_chains(shipped):
    forced, free = (coupled.survival(shipped, 80, 12, seed=1, scale=0.8, free=free) for free in (False, True))
    assert forced.first_fault.tolist() == free.first_fault.tolist()
    assert forced.kind.tolist() == free.kind.tolist()
    assert 0 < free.right.sum() < 12  # both outcomes are among them


def test_sharpening_is_what_decoding_does_from_outside(shipped):
    problems = layout.make(8, 60, generator())
    with coupled.sharpened(shipped.model, "log-n"):
        own, own_free = coupled.forced(shipped.model, problems), coupled.decode(shipped.model, problems)
    with decoding.log_n(shipped, trained_length=layout.tokens(12)):
        outside, outside_free = coupled.forced(shipped.model, problems), coupled.decode(shipped.model, problems)
    assert torch.equal(own, outside)
    assert torch.equal(own_free, outside_free)
    with coupled.sharpened(shipped.model, "log-n"):
        logits = shipped.model(problems.words, problems.ids, problems.slots).logits
    plain = shipped.model(problems.words, problems.ids, problems.slots).logits
    assert torch.equal(logits[:, : layout.tokens(12)], plain[:, : layout.tokens(12)])
    assert not torch.equal(logits, plain)
    with coupled.sharpened(shipped.model, 1.0):
        assert torch.equal(plain, shipped.model(problems.words, problems.ids, problems.slots).logits)


def test_it_solves_what_chains_makes_in_the_reasoners_tokens(shipped):
    samples = chains.make("arithmetic", 10, 6, seed=2, variant="modular", order="shuffled")
    samples += chains.make("arithmetic", 12, 4, seed=2, variant="modular", first=3, asked=5)
    made = decode.greedy(shipped, [sample.prompt for sample in samples], max_new_tokens=100)
    assert [one.text for one in made] == [sample.gold for sample in samples]
    assert {one.ended for one in made} == {"stop"}
    report = chains.evaluate(shipped, samples, style="tokens")
    assert report.accuracy.value == 1.0
    cut = decode.greedy(shipped, [samples[0].prompt], max_new_tokens=7)[0]
    assert (cut.text, cut.ended) == (" ".join(samples[0].gold.split()[:7]), "cap")


def test_logits_that_are_not_finite_end_a_row(shipped):
    model = coupled.load(device="cpu", dtype="float32")
    with torch.no_grad():
        model.model.model.norm.weight[0] = float("nan")
    sample = chains.make("arithmetic", 3, 1, seed=2, variant="modular")[0]
    made = decode.greedy(model, [sample.prompt], max_new_tokens=50)[0]
    assert made.ended == "not finite"
    assert not coupled.survival(model, 3, 4).right.any()


def test_damaged_or_other_weights_are_refused(tmp_path):
    with pytest.raises(ModelError, match=r"no model\.safetensors"):
        coupled.load(tmp_path, device="cpu")
    from o1lab.models import reasoner

    reasoner.save(coupled.build("tiny"), tmp_path, {})
    assert coupled.load(tmp_path, device="cpu").name == "diluted"
    data = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(data[:-10])
    with pytest.raises(ModelError, match="truncated"):
        coupled.load(tmp_path, device="cpu")
    reasoner.save(reasoner.build("tiny"), tmp_path / "other", {})
    with pytest.raises(ModelError, match="does not fit|cannot load"):
        coupled.load(tmp_path / "other", device="cpu")


def test_the_same_seed_gives_the_same_problems_however_many(shipped):
    few, many = (coupled.survival(shipped, 48, n, seed=5) for n in (10, 80))
    assert few.first_fault.tolist() == many.first_fault[:10].tolist()
    assert many.right.dtype == np.bool_
    assert many.estimate.n == 80
