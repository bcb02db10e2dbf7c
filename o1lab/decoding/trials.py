"""Remedies tried on the same problems, kind of decay by kind of decay: what each changed, and what it cost.

>>> from o1lab import chains, models
>>> model, samples = models.load("tiny", device="cpu"), chains.make("arithmetic", 2, 3, 0, variant="modular")
>>> plain = forced(model, samples)
Traceback (most recent call last):
...
o1lab.errors.DecodingError: tiny does not know the reasoner's words: give the reasoner or its sibling
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from o1lab import chains, paired
from o1lab.chains.samples import Sample
from o1lab.decoding.segments import Segmented
from o1lab.errors import DecodingError
from o1lab.models import Model, coupled, coupled_layout, decode, vocabulary
from o1lab.stats import Estimate, mean, proportion

if TYPE_CHECKING:
    import pandas as pd

POSITIONS = {"cpu": 1 << 14}
"""Most tokens in a pass by device; elsewhere 2¹⁸."""


@dataclass(frozen=True)
class Trial:
    """One arm: how each problem ended.

    Attributes
    ----------
    right : ndarray of bool, shape (n,)
        Whether the whole chain is right.
    steps : ndarray of bool, shape (n, N)
        Whether a step is right, given the right chain before it; of shape (n, 0) where the chain was decoded, because
        there only the steps up to the first fault can be judged so.
    tokens : float
        Read and produced for a chain.
    """

    right: np.ndarray
    steps: np.ndarray
    tokens: float

    def first(self, n: int) -> Trial:
        """The first ``n`` problems."""
        return replace(self, right=self.right[:n], steps=self.steps[:n])

    @property
    def accuracy(self) -> Estimate:
        """Share of whole chains right, in per cent, with its Wilson interval."""
        return proportion(int(self.right.sum()), self.right.size).scaled(100, "%")

    @property
    def step_accuracy(self) -> Estimate:
        """Share of steps right in per cent; the interval is over chains."""
        return mean(100 * self.steps.mean(1), "%")


@torch.inference_mode()
def forced(model: Model, samples: Sequence[Sample]) -> Trial:
    """Let ``model`` predict every token of the right chain and its end in one pass, under whatever context is open.

    Up to its first fault a greedy decoder has produced the right chain, so the same chains are right as in decoding,
    many times faster. What acts on a cache that decoding fills, or on every step, needs :func:`decoded`.

    Parameters
    ----------
    samples : sequence of Sample
        Of one variant and length.
    """
    network, ends = model.model, []
    own = isinstance(network, coupled.CoupledForCausalLM)
    if not own and network.config.vocab_size != len(vocabulary.TOKENS):
        raise DecodingError(f"{model.name} does not know the reasoner's words: give the reasoner or its sibling")
    size = len(samples[0].prompt.split()) + len(samples[0].gold.split()) + 1
    rows = max(1, POSITIONS.get(model.device.type, 1 << 18) // size)
    for start in range(0, len(samples), rows):
        part = samples[start : start + rows]
        ends.append(_coupled_wrong(network, part) if own else _wrong(network, part))
    wrong, width = np.concatenate(ends), 3 if own else samples[0].tokens_per_step
    count = len(samples[0].steps)
    steps = ~wrong[:, : count * width].reshape(len(wrong), count, width).any(2)
    return Trial(~wrong.any(1), steps, float(size))


def _wrong(network: Any, samples: Sequence[Sample]) -> np.ndarray:
    chosen = [vocabulary.encode(f"{sample.prompt} {sample.gold} <eos>") for sample in samples]
    ids = torch.tensor(chosen, device=network.device)
    produced = len(samples[0].gold.split()) + 1
    logits = network(ids[:, :-1], use_cache=False, logits_to_keep=produced).logits
    return (logits.argmax(-1) != ids[:, -produced:]).cpu().numpy()


def _coupled_wrong(network: Any, samples: Sequence[Sample]) -> np.ndarray:
    read = [coupled_layout.read(vocabulary.encode(sample.prompt)) for sample in samples]
    blank = coupled_layout.stack(read, network.config.step_ids, network.device)
    words = [[word for k in s.steps for word in (k.operator, k.operand, k.state)] for s in samples]
    targets = torch.tensor([vocabulary.encode(" ".join(row)) for row in words], device=network.device)
    full = blank.words.clone()
    full[:, 1 - targets.shape[1] :] = targets[:, :-1]
    problems = coupled_layout.Problems(full, blank.ids, blank.slots, targets)
    return (coupled.forced(network, problems) != targets).cpu().numpy()


def decoded(model: Model, samples: Sequence[Sample], **options: Any) -> tuple[Trial, list[Any]]:
    """The same by decoding step by step, and the outputs; ``options`` of :func:`o1lab.chains.evaluate`."""
    report = chains.evaluate(model, samples, progress=False, **options)
    right = np.array([result.right for result in report.results])
    read = sum(len(sample.prompt.split()) for sample in samples)
    trial = Trial(right, np.empty((len(right), 0), dtype=bool), (read + report.tokens) / len(right))
    return trial, [(result.text, result.tokens) for result in report.results]


def segmented(found: Segmented) -> Trial:
    """What re-grounding or voting gave, as an arm."""
    right = np.array([result.right for result in found.report.results])
    return Trial(right, np.empty((len(right), 0), dtype=bool), found.tokens / len(right))


def difference(first: Trial, second: Trial) -> Estimate:
    """Whole-chain accuracy of the second arm minus that of the first, in points, with Tango's interval."""
    return paired.paired_difference(first.right, second.right).scaled(100, "pp")


def step_difference(first: Trial, second: Trial) -> Estimate:
    """Per-step accuracy of the second arm minus that of the first, in points; the interval is over chains.

    It is never narrower than Wilson's for none of that many steps, so that arms which happen to agree on a few chains
    do not look the same for certain.
    """
    gap = mean(100 * (second.steps.mean(1) - first.steps.mean(1)), "pp")
    least = 100 * proportion(0, first.steps.size).high
    return replace(gap, low=min(gap.low, gap.value - least), high=max(gap.high, gap.value + least))


def again(first: Trial, second: Trial) -> Estimate | None:
    """Share of the first arm's wrong steps that are wrong in the second too, in per cent; ``None`` if none is wrong.

    With the same problems in redrawn contexts it says whether errors hang on the step or on the context.
    """
    wrong = ~first.steps
    return proportion(int((wrong & ~second.steps).sum()), int(wrong.sum())).scaled(100, "%") if wrong.any() else None


def changed(first: Sequence[Any], second: Sequence[Any]) -> list[bool]:
    """Whether each output differs from its partner."""
    return [a != b for a, b in zip(first, second, strict=True)]


def token_ratio(found: Segmented, plain: float, segments: int) -> Estimate:
    """Tokens read and produced for a chain worked to its right end in ``segments``, over the ``plain`` ones of one go.

    Chains that broke off are left out, because they would make it cheap.
    """
    prompt = found.prompt_tokens / found.calls
    made = [result.tokens + prompt * segments for result in found.report.results if result.right]
    return mean([tokens / plain for tokens in made], "×")


def table(trials: Mapping[tuple[str, str], Trial], *, base: str = "nothing", margin: float = 0.05) -> pd.DataFrame:
    """One row for each arm against the arm ``base`` of the same decay; an arm of fewer problems had the first ones.

    Parameters
    ----------
    trials : mapping of (decay, remedy) to Trial
    margin : float
        Of the equivalence test, as a share.

    Returns
    -------
    DataFrame
        Accuracies, difference and its ends in points; exact McNemar's p, Holm's over all rows; p of the equivalence
        test; tokens for a chain relative to ``base``.
    """
    import pandas as pd

    rows = []
    order = list(dict.fromkeys(decay for decay, _ in trials))
    for (decay, remedy), trial in sorted(trials.items(), key=lambda item: order.index(item[0][0])):
        if remedy == base:
            continue
        first = trials[decay, base].first(trial.right.size)
        gap, test = difference(first, trial), paired.mcnemar(first.right, trial.right)
        rows.append({
            "decay": decay, "remedy": remedy, "n": gap.n, "before": 100 * first.right.mean(),
            "after": 100 * trial.right.mean(), "difference": gap.value, "low": gap.low, "high": gap.high,
            "p": test.p_value, "equal p": paired.tost_paired(first.right, trial.right, margin).p_value,
            "tokens": trial.tokens / first.tokens,
        })  # fmt: skip
    frame = pd.DataFrame(rows)
    frame.insert(frame.columns.get_loc("p") + 1, "Holm p", paired.holm(frame["p"].tolist()))
    return frame


def milliseconds(
    model: Model, samples: Sequence[Sample], remedies: Mapping[str, Callable[[], AbstractContextManager[Any]]],
    *, rounds: int = 3,
) -> dict[str, float]:  # fmt: skip
    """Milliseconds for a produced token of each chain in a batch, the best of ``rounds`` in turn, by remedy."""
    prompts = [sample.prompt for sample in samples]
    best = dict.fromkeys(remedies, math.inf)
    for _ in range(rounds):
        for name, context in remedies.items():
            with ExitStack() as stack:
                stack.enter_context(context())
                start = time.perf_counter()
                made = decode.greedy(model, prompts, max_new_tokens=len(samples[0].gold.split()), stop_ids=())
                took = time.perf_counter() - start
            best[name] = min(best[name], 1000 * took / sum(len(row.ids) for row in made))
    return best
