"""What a model writes, and what can be seen in it while it writes: how sure it was of each step, and its hidden states.

Given the right chain so far, a greedy decoder writes what it would have written alone, up to its first wrong token. So
one pass over the right chains finds every first fault, and only the chains that have one are decoded, from there on.

>>> from o1lab import chains, models
>>> from o1lab.models import Model, reasoner
>>> network = reasoner.build("tiny").eval()
>>> tiny = Model(network, reasoner.tokenizer(), "tiny", "untrained", network.device, network.dtype, 124_608, 4096)
>>> written = write(tiny, chains.make("symbols", 2, 4, seed=0))
>>> len(written.results), written.report.accuracy.value
(4, 0.0)
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from o1lab.chains import problems
from o1lab.chains.evaluate import judge
from o1lab.chains.features import step_ends, step_features
from o1lab.chains.render import parse
from o1lab.chains.report import ChainReport, Result
from o1lab.chains.samples import VARIANTS, Sample
from o1lab.errors import ChainError
from o1lab.models import decode

if TYPE_CHECKING:
    from o1lab.models import Model

POSITIONS = {"cpu": 1 << 13}
"""Most tokens in a pass by device; elsewhere 2¹⁷."""


@dataclass(frozen=True)
class Written:
    """Chains that a model wrote greedily, with what a detector may see.

    Attributes
    ----------
    report : ChainReport
        As of :func:`o1lab.chains.evaluate`.
    sure : list of ndarray, shape (steps, 3) each
        :func:`o1lab.chains.features.step_features` of each chain that a detector can be asked about.
    hidden : list of ndarray, shape (steps, width) each
        Hidden state before the head at the least sure token of each step.
    first, problems
        Step of the first fault (or ``None``) and id of each of these chains. Left out are chains whose first fault is
        at no step that was written, and those that cannot be read.
    """

    report: ChainReport
    sure: list[np.ndarray] = field(repr=False)
    hidden: list[np.ndarray] = field(repr=False)
    first: list[int | None] = field(repr=False)
    problems: list[str] = field(repr=False)

    @property
    def results(self) -> tuple[Result, ...]:
        """The chains, in the order of the samples."""
        return self.report.results

    @property
    def both(self) -> list[np.ndarray]:
        """Surety and hidden states side by side."""
        return [np.column_stack(pair) for pair in zip(self.sure, self.hidden, strict=True)]


@dataclass(frozen=True)
class _Tokens:
    """What one pass shows of the tokens of one chain: likeliest token, margin, entropy, top-1, hidden state."""

    best: np.ndarray
    margins: np.ndarray
    entropies: np.ndarray
    top1: np.ndarray
    hidden: np.ndarray


def write(model: Model, samples: Sequence[Sample], *, past: int = 1) -> Written:
    """Let ``model`` work ``samples`` in the reasoner's tokens, and keep what it showed of each step.

    Parameters
    ----------
    model : Model
        With the reasoner's tokenizer.
    samples : sequence of Sample
    past : int
        Steps past the last one asked for that a chain may go on for before it is cut; loops need some.

    Raises
    ------
    ChainError
        No samples, or a model with another vocabulary.
    """
    begun, samples = time.perf_counter(), list(samples)
    if not samples:
        raise ChainError("no samples: give at least one")
    if "chain" not in (model.tokenizer.get_vocab() if model.tokenizer else {}):
        raise ChainError(f"{model.name} does not speak the reasoner's tokens: use chains.evaluate")
    prompts, gold = _rows(model, samples)
    seen = _passes(model, prompts, gold)
    made: list[list[int]] = [list(row) for row in gold]
    ended = ["stop"] * len(samples)
    rows, heads, caps = [], [], []
    for row, (right, tokens) in enumerate(zip(gold, seen, strict=True)):
        wrong = np.flatnonzero(tokens.best != np.array(right))
        if wrong.size:
            at = int(wrong[0])
            rows.append(row)
            made[row] = [*right[:at], int(tokens.best[at])]
            heads.append(prompts[row] + made[row])
            caps.append(max(1, len(right) - at + samples[row].tokens_per_step * past))
    stop = model.tokenizer.eos_token_id
    going = [place for place, row in enumerate(rows) if made[row][-1] != stop]
    tails = decode.greedy(model, [heads[k] for k in going], max_new_tokens=[caps[k] for k in going]) if going else []
    for place, tail in zip(going, tails, strict=True):
        made[rows[place]] += tail.ids
        ended[rows[place]] = tail.ended
    for row, tokens in zip(rows, _passes(model, [prompts[r] for r in rows], [made[r] for r in rows]), strict=True):
        seen[row] = tokens
    results = tuple(_result(model, *each) for each in zip(samples, made, ended, seen, strict=True))
    report = ChainReport(results, model.name, "tokens", time.perf_counter() - begun)
    return Written(report, *_observed(results, seen))


def learnt(model: Model, steps: int = 8, n: int = 16, seed: int = 0, *, least: float = 0.5) -> list[tuple[str, str]]:
    """Families, as (task, variant), of which a model works at least the share ``least`` of short chains rightly.

    Where a model goes wrong in a family that it has not learnt says nothing of where a chain breaks.
    """
    pairs = [(task, variant) for task, names in VARIANTS.items() for variant in names]
    asked = [each for task, name in pairs for each in problems.make(task, steps, n, seed, variant=name)]
    prompts, gold = _rows(model, asked)
    seen = _passes(model, prompts, gold)
    right = np.array([(one.best == np.array(row)).all() for one, row in zip(seen, gold, strict=True)]).reshape(-1, n)
    return [pair for pair, share in zip(pairs, right.mean(1), strict=True) if share >= least]


def _rows(model: Model, samples: Sequence[Sample]) -> tuple[list[list[int]], list[list[int]]]:
    """Token ids of the prompts and of the right chains with their end mark."""
    prompts = [model.encode(sample.prompt)[0].tolist() for sample in samples]
    return prompts, [model.encode(f"{sample.gold} <eos>")[0].tolist() for sample in samples]


def _result(model: Model, sample: Sample, ids: list[int], ended: str, tokens: _Tokens) -> Result:
    said = ids[:-1] if ended == "stop" else ids
    content: dict[str, Any] = {"text": model.tokenizer.decode(said, clean_up_tokenization_spaces=False), "ended": ended}
    content |= {"tokens": len(ids), "margins": tokens.margins.tolist(), "entropies": tokens.entropies.tolist()}
    if ended not in ("stop", "cap"):
        content |= {"ended": "", "problem": ended}
    return judge(sample, content, "tokens")


def _observed(results: Sequence[Result], seen: Sequence[_Tokens]) -> tuple[list[Any], list[Any], list[Any], list[Any]]:
    sure, hidden, first, problems = [], [], [], []
    for result, tokens in zip(results, seen, strict=True):
        fault = result.fault
        ends = None if result.problem else step_ends(result.text, parse(result.sample, result.text))
        if ends is None or (fault is not None and (fault.step > len(ends) or fault.past_end)):
            continue
        sure.append(step_features(tokens.margins, tokens.entropies, ends, tokens.top1))
        bounds = zip([0, *ends[:-1]], ends, strict=True)
        hidden.append(tokens.hidden[[begin + int(tokens.margins[begin:end].argmin()) for begin, end in bounds]])
        first.append(fault.step if fault else None)
        problems.append(result.sample.id)
    return sure, hidden, first, problems


@torch.inference_mode()
def _passes(model: Model, prompts: Sequence[list[int]], chains: Sequence[list[int]]) -> list[_Tokens]:
    """What the model shows of each token of each chain, given the tokens before it."""
    order = sorted(range(len(prompts)), key=lambda row: len(prompts[row]) + len(chains[row]))
    found: list[Any] = [None] * len(prompts)
    while order:
        width = len(prompts[order[-1]]) + len(chains[order[-1]])
        count = max(1, POSITIONS.get(model.device.type, 1 << 17) // width)
        rows, order = order[-count:], order[:-count]
        ids = torch.zeros((len(rows), width - 1), dtype=torch.long)
        for place, row in enumerate(rows):  # what is padded on the right is seen by no token before it
            whole = torch.tensor((prompts[row] + chains[row])[:-1])
            ids[place, : whole.numel()] = whole
        states = model.model.model(input_ids=ids.to(model.device), use_cache=False).last_hidden_state
        for place, row in enumerate(rows):
            begin = len(prompts[row]) - 1
            hidden = states[place, begin : begin + len(chains[row])]
            logits = model.model.lm_head(hidden).float()
            top = logits.topk(2).values
            chance = logits.softmax(-1)
            numbers = (logits.argmax(-1), top[:, 0] - top[:, 1], torch.special.entr(chance).sum(-1), chance.amax(-1))
            found[row] = _Tokens(*(each.cpu().numpy() for each in (*numbers, hidden.float())))
    return found
