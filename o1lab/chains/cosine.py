"""The article's rule for the first fault, as written, and how far it agrees with replay.

Each step is scored by the cosine of its state's embedding to that of the gold state; the chain is walked backwards to
the first critical step; a step below 0.5 is a break. The article's example breaks at step 3:

>>> cosine_rule([0.92, 0.87, 0.41, 0.33, 0.29])
3

A cosine sees only how *alike* two states are: not which step a label names, which operand was read, or that a state
with the right tokens in the wrong order is wrong. :func:`compare_rules` measures what that costs.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from o1lab.chains.faults import KINDS, Fault, localise
from o1lab.chains.samples import Parsed, Sample
from o1lab.errors import ChainError, EstimateError
from o1lab.stats import Estimate, proportion

if TYPE_CHECKING:
    from o1lab.models import Model

BREAK = 0.5
BATCH = 1024
"""States embedded at once."""
READINGS = ("run", "earliest")
Embedding = Mapping[Any, float] | Sequence[float] | np.ndarray


def cosine_rule(scores: Sequence[float], reading: str = "run", threshold: float = BREAK) -> int | None:
    """Step (1-based) at which the article's rule says that a chain breaks; ``None`` if it does not.

    "Walk backwards" can be read in two ways; on the article's example they agree.

    Parameters
    ----------
    scores : sequence of float, shape (steps,)
    reading : str
        ``"run"``: as long as steps are below the threshold; the last one walked over is where it broke. A chain whose
        last step is fine never breaks. ``"earliest"``: to the start; the earliest step below the threshold.

    Examples
    --------
    >>> scores = [0.9, 0.2, 0.9, 0.3]
    >>> cosine_rule(scores), cosine_rule(scores, "earliest"), cosine_rule([0.9, 0.5])
    (4, 2, None)
    """
    if reading not in READINGS:
        raise ChainError(f"reading={reading!r} is not one of {', '.join(READINGS)}")
    found = None
    for step in range(len(scores), 0, -1):
        if not math.isfinite(scores[step - 1]):
            raise ChainError(f"the score of step {step} is {scores[step - 1]!r}: give a finite cosine")
        if scores[step - 1] < threshold:
            found = step
        elif reading == "run":
            break
    return found


def one_hot_bag(state: str) -> dict[str, float]:
    """The simplest embedding: how often each token occurs, in any order.

    >>> one_hot_bag("A C A")
    {'A': 2, 'C': 1}
    """
    return dict(Counter(state.split()))


def hidden_state(model: Model, layer: int = -1, states: Iterable[str] = ()) -> Callable[[str], np.ndarray]:
    """An embedding by a model: its hidden states over the state's tokens in ``layer``, averaged; shape (width,).

    The state stands alone, without the problem. The model's own encoding of the text is used. ``states`` are embedded
    at once, many in a batch; others when they are asked for.
    """
    import torch

    kept: dict[str, np.ndarray] = {}

    @torch.no_grad()
    def embed(state: str, others: Sequence[str] = ()) -> np.ndarray:
        if state not in kept:
            ids = torch.cat([model.encode(each) for each in (state, *others)])
            layers = model.model(ids, output_hidden_states=True).hidden_states
            if not -len(layers) <= layer < len(layers):
                raise ChainError(f"layer={layer} is none of the {len(layers)} that {model.name} has")
            kept.update(zip((state, *others), layers[layer].float().mean(1).cpu().numpy(), strict=True))
        return kept[state]

    alike: dict[int, list[str]] = {}
    for state in dict.fromkeys(states):
        alike.setdefault(model.encode(state).shape[1], []).append(state)
    for group in alike.values():
        for begin in range(0, len(group), BATCH):
            embed(group[begin], group[begin + 1 : begin + BATCH])
    return embed


def cosine(a: Embedding, b: Embedding) -> float:
    """Cosine of two embeddings (both maps of weights, or both vectors of one length); 0 if one of them is zero."""
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        keys = sorted(a.keys() | b.keys(), key=str)
        a, b = ([float(each.get(key, 0.0)) for key in keys] for each in (a, b))
    x, y = np.asarray(a, dtype=float), np.asarray(b, dtype=float)
    if x.shape != y.shape or x.ndim != 1:
        raise ChainError(f"embeddings of shapes {x.shape} and {y.shape} have no cosine: give two vectors of one length")
    size = float(np.linalg.norm(x) * np.linalg.norm(y))
    return float(np.clip(x @ y / size, -1, 1)) if size else 0.0


def cosine_scores(sample: Sample, parsed: Parsed, embed: Callable[[str], Embedding] = one_hot_bag) -> list[float]:
    """Cosine of each produced state to the gold state of that place; 0.0 where there is none or it cannot be read.

    Returns
    -------
    list of float, one for each step asked for
    """
    states = [step.state for step in parsed.steps[: len(sample.steps)]]
    states += [None] * (len(sample.steps) - len(states))
    return [
        0.0 if state is None else cosine(embed(state), embed(gold.state))
        for state, gold in zip(states, sample.steps, strict=True)
    ]


@dataclass(frozen=True)
class RuleComparison:
    """The cosine rule beside exact replay.

    Attributes
    ----------
    exact, early, late, missed : Estimate
        Shares of faulty chains that it breaks at the first fault, before it, after it, nowhere.
    alarms : Estimate or None
        Share of right chains that it breaks; ``None`` without any.
    kinds : dict of str to Estimate
        For each kind of fault, the share that scores at least 0.5 at the faulty step: invisible to any such rule.
    reading : str
    """

    exact: Estimate
    early: Estimate
    late: Estimate
    missed: Estimate
    alarms: Estimate | None
    kinds: dict[str, Estimate]
    reading: str

    def __str__(self) -> str:
        rows = [f"cosine rule ({self.reading}): the exact step in {self.exact} of faulty chains"]
        rows += [f"  {name}: {getattr(self, name)}" for name in ("early", "late", "missed")]
        rows += [f"  breaks right chains: {self.alarms}"] if self.alarms else []
        return "\n".join(rows + [f"  {kind}, not seen: {share}" for kind, share in self.kinds.items()])


def compare_rules(
    samples: Sequence[Sample],
    parsed: Sequence[Parsed],
    embed: Callable[[str], Embedding] = one_hot_bag,
    *,
    style: str = "tokens",
    reading: str = "run",
    faults: Sequence[Fault | None] | None = None,
) -> RuleComparison:
    """Let the cosine rule and replay (:func:`o1lab.chains.faults.localise`) judge the same chains.

    Parameters
    ----------
    samples, parsed : sequence
        Problems, and the chains produced for them.
    embed, reading
        As :func:`cosine_scores`, :func:`cosine_rule`.
    faults
        What replay says, if it is known already.

    Raises
    ------
    EstimateError
        Unequal lengths, or no chain with a fault.
    """
    found = [localise(*pair, style) for pair in zip(samples, parsed, strict=False)] if faults is None else list(faults)
    if not len(samples) == len(parsed) == len(found):
        raise EstimateError(f"{len(samples)} samples, {len(parsed)} chains, {len(found)} faults: give one of each")
    said, seen, alarms = [], {}, []
    for sample, chain, fault in zip(samples, parsed, found, strict=True):
        scores = cosine_scores(sample, chain, embed)
        step = cosine_rule(scores, reading)
        if fault is None:
            alarms.append(step is not None)
            continue
        said.append("missed" if step is None else ("early", "exact", "late")[1 + int(np.sign(step - fault.step))])
        visible = fault.step <= len(scores) and scores[fault.step - 1] < BREAK
        seen.setdefault(fault.kind, []).append(visible)
    if not said:
        raise EstimateError("no chain has a fault: there is nothing to compare the rule on")
    return RuleComparison(
        *(proportion(said.count(name), len(said)) for name in ("exact", "early", "late", "missed")),
        proportion(sum(alarms), len(alarms)) if alarms else None,
        {kind: proportion(seen[kind].count(False), len(seen[kind])) for kind in KINDS if kind in seen},
        reading,
    )
