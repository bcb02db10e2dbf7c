"""The reasoner's vocabulary, its endless problems, its training, its checkpoints and its operating points."""

from __future__ import annotations

import dataclasses
import json
import re
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from o1lab import chains, models, plots, stats
from o1lab.chains.samples import FAMILIES, Entry, Sample, worked
from o1lab.errors import ModelError, O1labError, TrainingError, UnknownName
from o1lab.models import batches, checkpoint, measure, operating, reasoner, train, training, vocabulary

pytestmark = pytest.mark.usefixtures("one_thread")


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# --- words ------------------------------------------------------------------------------------------------------------


def test_the_vocabulary_is_the_one_that_checkpoints_were_trained_with():
    assert len(vocabulary.TOKENS) == len(set(vocabulary.TOKENS)) == 662
    places = {"<pad>": 0, "<eos>": 2, "modular": 4, "from": 8, "s0": 14, "s511": 525, "0": 526, "30": 556, "+": 557}
    places |= {"A": 560, "swap01": 566, "left": 576, "AxB": 579, "ExF": 593, "r0": 594, "e0": 598, "e63": 661}
    assert {word: vocabulary.INDEX[word] for word in places} == places


def test_the_tokenizer_agrees_with_the_vocabulary_and_with_every_prompt_that_chains_makes(tmp_path):
    words = reasoner.tokenizer()
    words.save_pretrained(tmp_path)
    for tokenizer in (words, AutoTokenizer.from_pretrained(tmp_path)):
        for task in chains.TASKS:
            for sample in chains.make(task, 3, 2, seed=1):
                text = f"{sample.prompt} {sample.gold} <eos>"
                ids = tokenizer(text).input_ids
                assert ids == vocabulary.encode(text)
                assert vocabulary.UNK not in ids
                assert tokenizer.decode(ids) == vocabulary.decode(ids) == text
    assert vocabulary.encode("s7 zebra") == [vocabulary.INDEX["s7"], vocabulary.UNK]
    with pytest.raises(ModelError, match="662 is no token id"):
        vocabulary.decode([662])


# --- problems ---------------------------------------------------------------------------------------------------------


def as_sample(text: str) -> Sample:
    """A prompt read back by hand, with the gold steps that ``chains`` works out for it."""
    words = text.split()
    variant, (first, last) = words[1], (int(words[place][1:]) for place in (3, 5))
    family, program = FAMILIES[variant], words.index("program")
    facts = words[words.index("facts") + 1 : program] if "facts" in words else []
    state = words[7 : words.index("facts") if facts else program]
    width = 2 + family.operand_width
    body = words[program + 1 : -1]
    assert words[0] == "<bos>"
    assert words[-1] == "chain"
    assert len(state) == family.state_width
    assert len(body) % width == 0
    entries = tuple(
        Entry(int(body[at][1:]), body[at + 1], " ".join(body[at + 2 : at + width])) for at in range(0, len(body), width)
    )
    triples = tuple(tuple(facts[at : at + 3]) for at in range(0, len(facts), 3))
    blank = Sample("x", family.task, variant, 0, 0, len(entries), " ".join(state), (), entries, triples, {})
    return worked(blank, range(first, last + 1))


@pytest.mark.parametrize("variant", vocabulary.VARIANTS)
@pytest.mark.parametrize(("steps", "asked", "options"), [
    (1, 1, {}), (7, None, {"shuffled": 1.0}), (9, 4, {"shuffled": 0.5, "entities": 16}), (33, 5, {"difficulty": 0.3}),
])  # fmt: skip
def test_batches_are_problems_as_chains_writes_and_works_them(variant, steps, asked, options):
    batch = batches.make(variant, 6, steps, generator(steps), asked=asked, **options)
    size = options.get("entities", 12), options.get("difficulty", 1.0)
    assert (batch.start, batch.ids.shape[1] - batch.start) == batches.tokens(variant, steps, asked, *size)
    for row in batch.ids:
        prompt, completion = vocabulary.decode(row[: batch.start]), vocabulary.decode(row[batch.start :])
        sample = as_sample(prompt)
        assert sample.prompt == prompt
        assert f"{sample.gold} <eos>" == completion
        assert len(sample.steps) == (asked or steps)
        labels = [entry.label for entry in sample.program]
        assert max(labels) - min(labels) + 1 == len(set(labels)) == steps


@pytest.mark.parametrize(("difficulty", "relations", "entities"), [(0.15, 1, 4), (0.6, 2, 7), (1.0, 4, 12)])
def test_an_easy_hop_table_has_fewer_relations_and_any_of_the_four(difficulty, relations, entities):
    batch = batches.make("hops", 64, 6, generator(), difficulty=difficulty)
    seen = set()
    for row in batch.ids:
        sample = as_sample(vocabulary.decode(row[: batch.start]))
        used = {relation for relation, _, _ in sample.facts}
        assert len(used) == relations
        assert len(sample.facts) == relations * entities
        assert {entry.operator for entry in sample.program} <= used
        seen |= used
    assert len(seen) == 4


def test_a_wrong_step_in_a_batch_would_be_seen_by_the_test_above():
    batch = batches.make("modular", 1, 3, generator())
    row = batch.ids[0].clone()
    row[-2] = vocabulary.NUMBER + (row[-2] - vocabulary.NUMBER + 1) % 31
    sample = as_sample(vocabulary.decode(row[: batch.start]))
    assert f"{sample.gold} <eos>" != vocabulary.decode(row[batch.start :])


def test_what_is_drawn_covers_the_labels_the_parts_and_the_orders():
    batch = batches.make("modular", 3000, 4, generator(), asked=2, shuffled=0.5)
    samples = [as_sample(vocabulary.decode(row[: batch.start])) for row in batch.ids]
    firsts = [min(entry.label for entry in sample.program) for sample in samples]
    assert min(firsts) == 0
    assert max(firsts) == vocabulary.STEPS - 4
    skipped = [sample.steps[0].label - first for sample, first in zip(samples, firsts, strict=True)]
    assert set(skipped) == {0, 1, 2}
    straight = np.mean([[e.label for e in s.program] == sorted(e.label for e in s.program) for s in samples])
    assert 0.45 < straight < 0.6
    assert len({vocabulary.decode(row) for row in batch.ids}) == 3000
    assert not any(e.operator == "*" and e.operand == "0" for s in samples for e in s.program)


def test_distractors_are_not_reachable_and_every_relation_is_one_to_one():
    batch = batches.make("hops", 20, 3, generator(), entities=20)
    for row in batch.ids:
        sample = as_sample(vocabulary.decode(row[: batch.start]))
        reached = {sample.start}
        for _ in range(20):
            reached |= {other for (_, name), other in sample.table.items() if name in reached}
        assert len(reached) <= 12
        for relation in ("r0", "r1", "r2", "r3"):
            targets = [other for (r, _), other in sample.table.items() if r == relation]
            assert len(targets) == len(set(targets)) == 20


def test_difficulty_narrows_what_steps_there_are():
    drawn = batches.draw("modular", 200, 5, generator(), difficulty=0.1)
    assert set((drawn.operands - vocabulary.NUMBER).unique().tolist()) == {0, 1, 2}
    digits = batches.draw("digits", 200, 5, generator(), difficulty=0.3).operands - vocabulary.NUMBER
    assert digits.unique().tolist() == [0, 1, 2]
    rules = batches.draw("symbols", 200, 5, generator(), difficulty=0.0).operators - vocabulary.RULE
    assert rules.unique().tolist() == [0, 1, 2, 3]


def test_what_cannot_be_shown_is_refused():
    with pytest.raises(UnknownName, match="digits"):
        batches.make("digit", 1, 1, generator())
    for wrong in ({"steps": 513}, {"steps": 0}, {"rows": 0}, {"asked": 5}, {"entities": 65}, {"entities": 1}):
        with pytest.raises(TrainingError, match="no batch has"):
            batches.make("hops", **{"rows": 1, "steps": 4, "generator": generator(), **wrong})
    with pytest.raises(TrainingError, match="modulus"):
        batches.draw("modular", 1, 1, generator(), modulus=32)


# --- the network ------------------------------------------------------------------------------------------------------


def test_the_training_pass_is_the_model_and_gaps_hide_nothing():
    model = reasoner.build("tiny")
    batch = batches.make("hops", 3, 4, generator())
    own = model.model(batch.ids[:, :-1]).last_hidden_state
    torch.testing.assert_close(reasoner.hidden(model, batch.ids[:, :-1]), own)
    offset = torch.arange(batch.ids.shape[1] - 1)[None] + 1000  # rotary attention knows differences only
    torch.testing.assert_close(reasoner.hidden(model, batch.ids[:, :-1], offset), own, atol=1e-4, rtol=1e-3)
    positions = reasoner.gapped(batch, 1000, generator())
    jumps = positions.diff(dim=1)
    assert positions.shape == (3, batch.ids.shape[1] - 1)
    assert (positions[:, 0] == 0).all()
    assert (jumps >= 1).all()
    assert ((jumps > 1).sum(1) == 2).all()
    assert (positions[:, -1] < 1000).all()
    torch.testing.assert_close(reasoner.gapped(batch, 5, generator()), torch.arange(positions.shape[1]).expand(3, -1))
    changed = batch.ids.clone()
    changed[:, 3] = vocabulary.INDEX["s0"]  # before both gaps or one of them: its change must reach the end
    base, other = (reasoner.hidden(model, ids[:, :-1], positions)[:, -1] for ids in (batch.ids, changed))
    assert (base - other).abs().max() > 1e-4


def test_a_saved_reasoner_loads_like_any_checkpoint(tmp_path):
    model = reasoner.build("tiny", seed=3)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    reasoner.save(model, tmp_path, {"seed": 3})
    assert all(torch.equal(before[name], weight) for name, weight in model.state_dict().items())
    loaded = models.load(str(tmp_path), device="cpu")
    assert loaded.tokenizer("<bos> hops from s1").input_ids == vocabulary.encode("<bos> hops from s1")
    assert loaded.encode("<bos> hops").tolist() == [vocabulary.encode("<bos> hops")]
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(again).__name__ == "LlamaForCausalLM"
    assert again.lm_head.weight is again.model.embed_tokens.weight
    assert again.generation_config.eos_token_id == vocabulary.EOS
    assert reasoner.notes(tmp_path) == {"seed": 3}
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".json"] * 5 + [".safetensors"]
    with torch.no_grad():
        model.model.norm.weight[0] = 1e6
    with pytest.raises(TrainingError, match="float16"):
        reasoner.save(model, tmp_path / "broken", {})
    assert not (tmp_path / "broken" / "model.safetensors").exists()


def test_building_keeps_the_random_state_and_follows_the_seed():
    torch.manual_seed(5)
    first = reasoner.build("tiny", seed=1).lm_head.weight
    drawn = torch.rand(1)
    torch.manual_seed(5)
    assert torch.equal(drawn, torch.rand(1))
    assert torch.equal(first, reasoner.build("tiny", seed=1).lm_head.weight)
    assert not torch.equal(first, reasoner.build("tiny", seed=2).lm_head.weight)
    with pytest.raises(UnknownName, match="small"):
        reasoner.build("smal")


# --- training ---------------------------------------------------------------------------------------------------------


def config(**changes) -> training.Config:
    settings = {"steps": 6, "tokens": 256, "problems": 1, "marks": 2, "variants": ("modular", "hops")}
    return training.preset("reasoner", **{"size": "tiny", **settings, **changes})


def weights(made: train.Trained) -> dict[str, torch.Tensor]:
    return load_file(next(made.folder.glob("state-*.safetensors")))


def test_the_loss_falls_and_the_figure_shows_the_run(tmp_path):
    lines: list[str] = []
    made = train.train(
        config(steps=40, tokens=512, marks=4, rate=5e-3, warm_up=5), tmp_path, device="cpu", say=lines.append
    )
    rows = train.history(tmp_path)
    assert made.stopped == "done"
    assert [row["step"] for row in rows] == [10, 20, 30, 40]
    assert rows[0]["loss"] > 4
    assert rows[-1]["loss"] < rows[0]["loss"] - 1
    assert [row["longest"] for row in rows] == [dict.fromkeys(("modular", "hops"), n) for n in (3, 4, 4, 4)]
    assert re.search(r"100% · step 40 · .* tokens/s · whole chains: modular \(N ≤ 4\) 1: 0% 4: 0%, hops", lines[-1])
    assert reasoner.notes(tmp_path / "model")["step"] == 40
    figure = train.curve(tmp_path)
    plots.check(figure)
    assert [trace.name for trace in figure.data] == ["modular", "hops"]
    with pytest.raises(TrainingError, match="no log"):
        train.curve(tmp_path / "nothing")


@pytest.mark.parametrize("pace", [0.0, 1e-9])  # by the clock; and so that all climb at the first look
def test_an_interrupted_run_goes_on_to_the_bit(tmp_path, monkeypatch, pace):
    monkeypatch.setattr(training, "EVERY", 1)
    monkeypatch.setattr("o1lab.models.ladder.ROWS", 1)
    monkeypatch.setattr("o1lab.models.ladder.FIRST", 2)
    whole = train.train(config(pace=pace, grow=1.0), tmp_path / "whole", device="cpu", say=lambda text: None)
    stopped = train.train(
        config(pace=pace, grow=1.0), tmp_path / "cut", device="cpu", say=lambda text: None,
        watch=lambda run: run.step == 4 and signal.raise_signal(signal.SIGINT),
    )  # fmt: skip
    assert (stopped.stopped, stopped.step) == ("interrupted", 4)
    assert not (tmp_path / "cut" / "model").exists()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    with (tmp_path / "cut" / "log.jsonl").open("a") as stream:
        stream.write('{"step": 5}\n{"ste')  # written after the checkpoint, and torn
    resumed = train.train(
        config(pace=pace, grow=1.0), tmp_path / "cut", resume=True, device="cpu", say=lambda text: None
    )
    assert (resumed.stopped, resumed.step, resumed.tokens) == ("done", 6, whole.tokens)
    one, other = weights(whole), weights(resumed)
    assert one.keys() == other.keys()
    assert len(one) > 3 * 20  # weights and both moments
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert [row["step"] for row in train.history(tmp_path / "cut")] == [3, 4, 6]
    longer = train.train(
        config(steps=8, pace=pace, grow=1.0), tmp_path / "cut", resume=True, device="cpu", say=lambda text: None
    )
    assert longer.step == 8


def test_another_seed_is_another_run(tmp_path):
    one, other = (
        train.train(config(seed=seed, steps=1), tmp_path / str(seed), device="cpu", say=lambda text: None)
        for seed in (0, 1)
    )
    assert not torch.equal(weights(one)["weight/model.norm.weight"], weights(other)["weight/model.norm.weight"])


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    train.train(config(steps=2), folder, device="cpu", say=lambda text: None)
    return folder


def copied(source: Path, target: Path) -> Path:
    target.mkdir()
    for path in source.iterdir():
        if path.is_file() and path.name != ".lock":
            (target / path.name).write_bytes(path.read_bytes())
    return target


def resume(folder: Path, **changes) -> train.Trained:
    return train.train(config(**{"steps": 3, **changes}), folder, resume=True, device="cpu", say=lambda text: None)


def test_a_run_begins_from_the_weights_of_an_earlier_one(tmp_path):
    quiet = {"device": "cpu", "say": lambda text: None}
    train.train(config(), tmp_path / "first", **quiet)
    first = tmp_path / "first" / "model"
    train.train(config(seed=7, rate=1e-9, steps=1), tmp_path / "second", start=first.parent, **quiet)
    one, other = (load_file(folder / "model.safetensors") for folder in (first, tmp_path / "second" / "model"))
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert reasoner.notes(tmp_path / "second" / "model")["start"] == "model"
    assert reasoner.notes(first)["start"] == ""
    for wrong, words in (
        (config(size="small"), "size 'small': model.embed_tokens.weight does not fit"),
        (training.preset("coupled", "tiny", steps=2), "no coupled of size 'tiny'"),
    ):
        with pytest.raises(TrainingError, match=words):
            train.train(wrong, tmp_path / "third", start=first, **quiet)
    with pytest.raises(TrainingError, match="no model to begin from"):
        train.train(config(), tmp_path / "third", start=tmp_path, **quiet)
    with pytest.raises(TrainingError, match="leave start away"):
        train.train(config(), tmp_path / "third", resume=True, start=first, **quiet)
    with pytest.raises(TrainingError, match="no checkpoint to resume"):
        train.train(config(), tmp_path / "third", resume=True, **quiet)
    with pytest.raises(O1labError, match="device"):
        train.train(config(), tmp_path / "third", device="cuda:99", say=lambda text: None)
    assert not (tmp_path / "third").exists()  # what is refused leaves nothing behind


def test_what_does_not_fit_is_not_resumed(finished, tmp_path):
    folder = copied(finished, tmp_path / "run")
    with pytest.raises(TrainingError, match="holds a run already"):
        train.train(config(), folder, device="cpu")
    with pytest.raises(
        TrainingError, match=r"longest was 4 and is now 5, rate was 0.002 and is now 0.1; give the same"
    ):
        resume(folder, longest=5, rate=0.1)
    with pytest.raises(TrainingError, match="no checkpoint to resume"):
        resume(tmp_path / "empty")
    assert resume(folder).step == 3


def test_damaged_checkpoints_are_refused(finished, tmp_path):
    def state(folder: Path) -> Path:
        return next(folder.glob("state-*.safetensors"))

    flipped = copied(finished, tmp_path / "flipped")
    data = bytearray(state(flipped).read_bytes())
    data[len(data) // 2] ^= 1
    state(flipped).write_bytes(data)
    with pytest.raises(TrainingError, match="SHA-256 differs"):
        resume(flipped)
    cut = copied(finished, tmp_path / "cut")
    state(cut).write_bytes(state(cut).read_bytes()[:-9])
    with pytest.raises(TrainingError, match="SHA-256 differs"):
        resume(cut)
    lost = copied(finished, tmp_path / "lost")
    state(lost).unlink()
    with pytest.raises(TrainingError, match="cannot be read"):
        resume(lost)
    for number, text in enumerate(['{"format": 1', "[]", "{}", '{"format": 2, "config": {}}']):
        broken = copied(finished, tmp_path / f"broken{number}")
        (broken / checkpoint.FILE).write_text(text)
        with pytest.raises(TrainingError, match="is damaged"):
            resume(broken)
    climbing = copied(finished, tmp_path / "climbing")
    content = json.loads((climbing / checkpoint.FILE).read_text())
    (climbing / checkpoint.FILE).write_text(json.dumps({**content, "file": "../flipped/" + content["file"]}))
    with pytest.raises(TrainingError, match="is damaged"):
        resume(climbing)


def test_weights_of_another_model_are_refused(finished, tmp_path):
    folder = copied(finished, tmp_path / "run")
    other = training.Run(config(size="small"), torch.device("cpu"))
    other.save(folder)
    content = json.loads((folder / checkpoint.FILE).read_text())
    (folder / checkpoint.FILE).write_text(json.dumps({**content, "config": training.plain(config())}))
    with pytest.raises(TrainingError, match="another model's weights"):
        resume(folder)


def test_a_loss_that_is_not_finite_stops_the_run_and_leaves_the_last_good_checkpoint(tmp_path):
    def poison(run: training.Run) -> bool:
        if run.step == 4:
            with torch.no_grad():
                run.model.model.norm.weight[0] = float("nan")
        return False

    with pytest.raises(TrainingError, match="not finite between steps 3 and 6: take a lower rate"):
        train.train(config(), tmp_path, device="cpu", say=lambda text: None, watch=poison)
    assert json.loads((tmp_path / checkpoint.FILE).read_text())["step"] == 3
    assert not (tmp_path / "model").exists()
    assert resume(tmp_path, steps=6).stopped == "done"


def test_a_weight_that_broke_in_the_last_step_before_a_checkpoint_is_seen(tmp_path):
    def poison(run: training.Run) -> bool:
        if run.step == 4:
            with torch.no_grad():
                run.model.model.norm.weight[0] = float("inf")
        return False

    with pytest.raises(TrainingError, match="or a weight is not finite"):
        train.train(config(marks=3), tmp_path, device="cpu", say=lambda text: None, watch=poison)
    assert json.loads((tmp_path / checkpoint.FILE).read_text())["step"] == 2


def test_settings_out_of_range_are_refused():
    for wrong, words in [
        ({"steps": 0}, "budget"), ({"seconds": 5.0}, "budget"), ({"steps": -1}, "budget"), ({"tokens": 0}, "tokens"),
        ({"rate": float("nan")}, "rate"), ({"longest": 512}, "longest"), ({"variants": ()}, "variants"),
        ({"ease": 2.0}, "ease"), ({"modulus": 1}, "modulus"),
    ]:  # fmt: skip
        with pytest.raises(TrainingError, match=words):
            config(**wrong)
    for wrong in ({"variants": ("modulo",)}, {"rates": 1}):
        with pytest.raises(UnknownName):
            config(**wrong)
    with pytest.raises(UnknownName, match="coupled"):
        training.preset("couple", "tiny", steps=1)


def test_a_budget_of_seconds_is_kept(tmp_path):
    made = train.train(config(steps=0, seconds=1.0), tmp_path, device="cpu", say=lambda text: None)
    assert made.stopped == "done"
    assert made.seconds >= 1.0
    assert made.step >= 1
    assert train.history(tmp_path)[-1]["step"] == made.step


def test_the_command_line_trains_resumes_and_says_what_is_wrong(tmp_path, capsys):
    command = [
        "--size",
        "tiny",
        "--steps",
        "2",
        "--tokens",
        "128",
        "--variants",
        "hops",
        "--marks",
        "1",
        "--device",
        "cpu",
    ]
    command += ["--problems", "1", "--out", str(tmp_path / "run")]
    assert train.main(command) == 0
    assert "the model is in" in capsys.readouterr().out
    assert train.main(command) == 2
    assert "--resume" in capsys.readouterr().err
    assert train.main([*command, "--resume"]) == 0
    assert train.main([*command, "--resume", "--seed", "3"]) == 2
    assert "seed was 0 and is now 3" in capsys.readouterr().err


def test_ctrl_c_on_the_command_line_writes_a_checkpoint(tmp_path, capsys, monkeypatch):
    advance = training.Run.advance

    def interrupted(run: training.Run) -> torch.Tensor:
        if run.step == 2:
            signal.raise_signal(signal.SIGINT)
        return advance(run)

    monkeypatch.setattr(training.Run, "advance", interrupted)
    command = ["--size", "tiny", "--steps", "1000", "--tokens", "128", "--variants", "hops", "--problems", "1"]
    assert train.main([*command, "--device", "cpu", "--out", str(tmp_path)]) == 130
    assert "interrupted at step 3; the same command with --resume" in capsys.readouterr().out
    assert json.loads((tmp_path / checkpoint.FILE).read_text())["step"] == 3


# --- measuring and operating points -----------------------------------------------------------------------------------


def test_first_faults_and_hazards_are_counted_from_wrong_tokens():
    wrong = np.zeros((5, 9), dtype=bool)
    wrong[1, 6] = wrong[2, 0] = wrong[2, 8] = wrong[3, 8] = True
    made = measure.ended(wrong, 2, ["label", "operator", "operand", "state"])
    assert made.right.tolist() == [True, False, False, False, True]
    assert made.first_fault.tolist() == [0, 2, 1, 3, 0]
    assert made.kind.tolist() == ["", "operand", "label", "end", ""]
    assert made.estimate.value == 0.4
    assert (made.hazard.value, made.hazard.n) == (2 / 9, 9)
    assert (made.hazard_between(2, 2).value, made.hazard_between(2, 2).n) == (0.25, 4)
    assert measure.ended(np.ones((2, 4), dtype=bool), 2, ["a", "b"]).hazard_between(2, 2) is None


def test_the_first_n_problems_are_the_same_whatever_n_is(monkeypatch):
    model = reasoner.build("tiny")
    seen = []

    def logits(model, batch):
        seen.append(batch.ids)
        return torch.zeros(batch.ids.shape[0], batch.ids.shape[1] - batch.start, 662)

    monkeypatch.setattr(reasoner, "logits", logits)
    for n in (3, 70):
        assert measure.survival(model, "modular", 3, n).right.shape == (n,)
    assert torch.equal(seen[0], seen[1][:3])
    with pytest.raises(TrainingError, match="the model takes 4096"):
        measure.survival(model, "digits", 400, 1)
    with pytest.raises(TrainingError, match="n=0"):
        measure.survival(model, "digits", 4, 0)


def graded(monkeypatch, model, right):
    """Let the accuracy of ``model`` be ``right(how far the weights that take noise have moved)``, as measured."""
    start = operating._results(model, "modular").detach().clone()  # the weights now

    def survival(model, variant, steps, n, seed):
        moved = float((operating._results(model, "modular").detach() - start).norm())
        rows = torch.rand(n, generator=generator(seed)).numpy() < right(moved)
        return measure.Survival(steps, rows, np.where(rows, 0, 1), np.where(rows, "", "state"))

    monkeypatch.setattr(measure, "survival", survival)
    return start


def test_noise_is_turned_up_until_the_accuracy_is_the_one_asked_for(monkeypatch):
    model = reasoner.build("tiny")
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    graded(monkeypatch, model, lambda moved: float(np.exp(-moved / 3)))
    found = operating.calibrate(model, operating.Point(problems=4096), seed=1)
    assert abs(found.chosen - 0.826) <= 0.015
    assert abs(found.confirmed.value - 0.826) < 0.04
    assert found.confirmed.n == 4096
    assert found.knob > 0
    moved = {name: (weight != before[name]).nonzero()[:, 0].unique() for name, weight in model.named_parameters()}
    numbers = range(vocabulary.NUMBER, vocabulary.NUMBER + vocabulary.NUMBERS)
    assert {name: rows.tolist() for name, rows in moved.items() if len(rows)} == {"lm_head.weight": list(numbers)}
    weight = operating._results(model, "modular")
    assert torch.equal(weight, weight.half().float())  # what is saved is what was measured


@pytest.mark.parametrize(("right", "words"), [
    (lambda moved: 0.5, "train it further"), (lambda moved: 0.99, "still right in"),
    (lambda moved: float(moved < 1), "jumps over"),
])  # fmt: skip
def test_a_point_that_cannot_be_reached_is_an_error_and_leaves_the_weights(monkeypatch, right, words):
    model = reasoner.build("tiny")
    with torch.no_grad():
        weight = operating._results(model, "modular")
        weight.copy_(weight.half())
    start = graded(monkeypatch, model, right)
    with pytest.raises(TrainingError, match=words):
        operating.calibrate(model, operating.Point(problems=512))
    assert model.config.tie_word_embeddings is False  # it was untied before it came in
    assert torch.equal(start, operating._results(model, "modular"))


def test_a_tied_model_that_cannot_be_calibrated_stays_tied(monkeypatch):
    model = reasoner.build("tiny")
    monkeypatch.setattr(operating.Point, "measured", lambda point, model, seed: 0.5)
    with pytest.raises(TrainingError, match="train it further"):
        operating.calibrate(model, operating.Point(problems=8))
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.config.tie_word_embeddings is True


def test_a_run_stops_at_its_point_and_is_taken_back_if_it_jumped_over(monkeypatch, tmp_path):
    accuracies = iter([0.1, 0.5, 0.9, 0.9])
    asked = []

    def measured(point, model, seed):
        asked.append(point.problems)
        return next(accuracies)

    monkeypatch.setattr(operating.Point, "measured", measured)
    back = []
    monkeypatch.setattr(operating, "between", lambda *arguments: back.append(arguments))
    stop = operating.EarlyStop(operating.Point(), every=2)
    made = train.train(config(steps=50, marks=1), tmp_path, device="cpu", say=lambda text: None, watch=stop)
    assert (made.step, made.stopped) == (6, "done")
    assert asked == [256, 256, 256, 4096]
    ((model, good, bad, point),) = back
    assert not torch.equal(good["model.norm.weight"], bad["model.norm.weight"])


def test_between_two_checkpoints_the_weights_lie_on_a_line(monkeypatch):
    model, other = reasoner.build("tiny", seed=0), reasoner.build("tiny", seed=1)
    other.model.norm.weight.data += 1
    good = {name: weight.clone() for name, weight in model.state_dict().items()}
    one, far_end = (operating._results(net, "modular") for net in (model, other))
    far = float((one - far_end).detach().norm())
    graded(monkeypatch, model, lambda moved: 1 - 0.5 * moved / far)
    found = operating.between(model, good, other.state_dict(), operating.Point(problems=4096))
    assert abs(found.knob - 0.348) < 0.05
    name = "model.layers.0.self_attn.q_proj.weight"
    expected = torch.lerp(good[name], other.state_dict()[name], found.knob)
    torch.testing.assert_close(model.state_dict()[name], expected)


def test_noise_touches_one_family_s_rows_and_grows_with_its_strength():
    model = reasoner.build("tiny")
    clean = model.lm_head.weight.detach().clone()
    operating.disturb(model, "symbols", 0.5, seed=3)
    once = model.lm_head.weight.detach() - clean
    first, count = operating.RESULTS["symbols"]
    assert (once != 0).any(1).nonzero()[:, 0].tolist() == list(range(first, first + count))
    size = clean[first : first + count].square().mean().sqrt()
    assert abs(float(once[first : first + count].std() / size) - 0.5) < 0.05
    assert torch.equal(model.model.embed_tokens.weight, clean)
    operating.disturb(model, "symbols", 1.0, seed=3, clean=clean[first : first + count])
    torch.testing.assert_close(model.lm_head.weight.detach() - clean, 2 * once, atol=1e-3, rtol=0.02)


def test_a_calibrated_model_is_no_start_and_says_why():
    run = training.Run(training.preset("reasoner", "full", steps=1, tokens=64), torch.device("cpu"))
    with pytest.raises(TrainingError, match="head of its own"):
        run.begin_from(models.WEIGHTS / "calibrated")


def test_two_families_with_the_same_numbers_are_not_calibrated_together(tmp_path, capsys):
    reasoner.save(reasoner.build("tiny"), tmp_path / "model", {})
    asked = [str(tmp_path / "model"), "--out", str(tmp_path / "out"), "--variant", "modular", "digits"]
    assert operating.main(asked) == 2
    assert "same numbers" in capsys.readouterr().err


def test_a_line_between_untied_heads_moves_the_head(monkeypatch):
    model, other = reasoner.build("tiny", seed=0), reasoner.build("tiny", seed=0)
    good = {name: weight.clone() for name, weight in model.state_dict().items()}
    operating.disturb(other, "modular", 1.0)
    bad = {name: weight.clone() for name, weight in other.state_dict().items()}
    monkeypatch.setattr(operating, "_search", lambda model, turn, *rest: turn(0.5))
    operating.between(model, good, bad)
    assert torch.equal(model.model.embed_tokens.weight, good["model.embed_tokens.weight"])
    middle = torch.lerp(good["lm_head.weight"], bad["lm_head.weight"], 0.5)
    torch.testing.assert_close(model.lm_head.weight.detach(), middle)


def test_every_option_of_training_says_what_it_is(capsys):
    assert set(train.helps()) == {field.name for field in dataclasses.fields(training.Config)}
    with pytest.raises(SystemExit):
        train.main(["--help"])
    assert "longest trained program" in " ".join(capsys.readouterr().out.split())


def test_several_families_are_calibrated_one_after_the_other(monkeypatch, tmp_path):
    reasoner.save(reasoner.build("tiny"), tmp_path / "model", {"seed": 5})
    seen = []

    def calibrate(model, point, seed):
        seen.append((point.variant, point.steps, seed))
        operating._results(model, point.variant).data.mul_(2)
        return operating.Calibrated(1.0, 0.8, stats.proportion(8, 10), ())

    monkeypatch.setattr(operating, "calibrate", calibrate)
    monkeypatch.setattr(operating, "decay", lambda model, variant: [])
    folders = [str(tmp_path / "model"), "--out", str(tmp_path / "out")]
    assert operating.main([*folders, "--variant", "symbols", "hops", "--steps", "16", "--seed", "3"]) == 0
    assert seen == [("symbols", 16, 3), ("hops", 16, 3)]
    notes = reasoner.notes(tmp_path / "out")
    assert [(one["variant"], one["noise"]) for one in notes["points"]] == [("symbols", 1.0), ("hops", 1.0)]
    assert notes["from"] == {"seed": 5}
    saved = models.load(str(tmp_path / "out"), device="cpu").model
    head, words = saved.lm_head.weight, saved.model.embed_tokens.weight
    changed = {vocabulary.TOKENS[row][0] for row in (head != words).any(1).nonzero()[:, 0].tolist()}
    assert changed == {"A", "B", "C", "D", "E", "F", "e"}


def test_decay_shows_a_constant_error_as_constant(monkeypatch):
    model = reasoner.build("tiny")

    def survival(model, variant, steps, n, seed):
        fault = torch.distributions.Geometric(0.01).sample((n,)).numpy() + 1
        first = np.where(fault > steps, 0, fault).astype(int)
        return measure.Survival(steps, first == 0, first, np.where(first == 0, "", "state"))

    monkeypatch.setattr(measure, "survival", survival)
    torch.manual_seed(0)
    rows = operating.decay(model, n=4000)
    for row in rows:
        assert row.accuracy.low - 0.03 < row.predicted < row.accuracy.high + 0.03
        assert row.early.low < 0.0112
        assert row.late.high > 0.009


@pytest.mark.gpu
def test_on_a_gpu_the_loss_falls_and_a_run_can_be_resumed(tmp_path):
    made = train.train(config(steps=60, tokens=4096, rate=5e-3, warm_up=5), tmp_path, say=lambda text: None)
    rows = train.history(tmp_path)
    assert rows[-1]["loss"] < rows[0]["loss"] - 0.5
    assert "CPU" not in reasoner.notes(made.folder / "model")["device"]
    longer = config(steps=70, tokens=4096, rate=5e-3, warm_up=5)
    assert train.train(longer, tmp_path, resume=True, say=lambda text: None).step == 70
    for variant in vocabulary.VARIANTS:
        batch = batches.make(variant, 3, 9, torch.Generator("cuda").manual_seed(0), shuffled=0.5)
        sample = as_sample(vocabulary.decode(batch.ids[0, : batch.start]))
        assert f"{sample.gold} <eos>" == vocabulary.decode(batch.ids[0, batch.start :])
