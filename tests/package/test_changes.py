"""An open intervention is part of a results file: a later run with another one, or none, is not told its results."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from o1lab import chains, decoding
from o1lab.chains.changes import changes
from o1lab.errors import ResultsError
from o1lab.models import Model, reasoner

ARMS = {
    "quantise_kv 2": lambda model: decoding.quantise_kv(model, bits=2),
    "quantise_kv 4": lambda model: decoding.quantise_kv(model, bits=4),
    "round_kv": lambda model: decoding.round_kv(model, torch.float16),
    "round_kv bf16": lambda model: decoding.round_kv(model, torch.bfloat16),
    "own": lambda model: decoding.round_kv(model, torch.float16, own=True),
    "rope_in": lambda model: decoding.rope_in(model, torch.float16),
    "log_n": lambda model: decoding.log_n(model, trained_length=8),
    "log_n 9": lambda model: decoding.log_n(model, trained_length=9),
    "bias": lambda model: decoding.article_bias(model, 0.3),
    "clip": lambda model: decoding.clip_distance(model, 12),
    "clip 13": lambda model: decoding.clip_distance(model, 13),
    "group": lambda model: decoding.group_positions(model, 2, 12),
    "head": decoding.fp32_head,
    "softmax": decoding.fp32_softmax,
    "recompute": lambda model: decoding.recompute_kv(model, 4),
    "recompute 5": lambda model: decoding.recompute_kv(model, 5),
    "scale": lambda model: decoding.missing_scale(model),
    "dropout": decoding.dropout_zero,
}


@pytest.fixture
def model():
    net = reasoner.build("tiny").eval()
    return Model(net, reasoner.tokenizer(), "reasoner", "random", torch.device("cpu"), torch.float32, 0, 4096)


def test_each_intervention_has_words_of_its_own_and_leaves_none_behind(model):
    said = {}
    for name, arm in ARMS.items():
        with arm(model):
            said[name] = changes(model.model)
            with torch.inference_mode():
                model.model(torch.arange(5)[None])
            assert changes(model.model) == said[name], f"{name}: other words once it has worked"
        assert changes(model.model) == [], name
    assert all(said.values())
    assert len({str(words) for words in said.values()}) == len(said)


def test_two_at_a_time_are_neither_of_them(model):
    with decoding.quantise_kv(model, bits=4):
        one = changes(model.model)
        with decoding.log_n(model, trained_length=8):
            assert changes(model.model) != one
        assert changes(model.model) == one


def test_a_results_file_of_another_intervention_is_not_taken_over(model, tmp_path):
    samples, path = chains.make("symbols", 3, 2, seed=0), tmp_path / "run.jsonl"
    with decoding.quantise_kv(model, bits=2):
        chains.evaluate(model, samples, out=path)
        chains.evaluate(model, samples, out=path)  # the same one goes on
    with pytest.raises(ResultsError, match="changes was"):
        chains.evaluate(model, samples, out=path)
    with decoding.quantise_kv(model, bits=3), pytest.raises(ResultsError, match="bits=2.*bits=3"):
        chains.evaluate(model, samples, out=path)
    plain = tmp_path / "plain.jsonl"
    chains.evaluate(model, samples, out=plain)
    with decoding.quantise_kv(model, bits=2), pytest.raises(ResultsError, match="changes was None"):
        chains.evaluate(model, samples, out=plain)


def test_the_words_are_the_same_in_another_process():
    code = (
        "from o1lab import decoding; from o1lab.chains.changes import changes; from o1lab.models import reasoner\n"
        "net = reasoner.build('tiny').eval()\n"
        "with decoding.quantise_kv(net, bits=2), decoding.clip_distance(net, 12): print(changes(net))"
    )
    one, other = (subprocess.run([sys.executable, "-c", code], capture_output=True, text=True) for _ in range(2))
    assert "quantise" in one.stdout, one.stderr
    assert one.stdout == other.stdout
