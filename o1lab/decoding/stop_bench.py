"""Stop rules on chains that were generated past their end: the right set, sets broken as users report, the article's.

Each text meets one of the four reported faults, in turn, so that every fault weighs the same and pairs are independent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from o1lab.chains.samples import Sample
from o1lab.decoding.stopping import (
    BROKEN,
    ArticleStop,
    Outcome,
    StopRule,
    StopSet,
    after_steps,
    broken,
    judge,
)
from o1lab.errors import DecodingError
from o1lab.models import Model, decode, vocabulary

QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99)
"""Of the mean entropy of three tokens: the thresholds among which the article's is chosen, on texts of their own."""
RIGHT = StopSet(frozenset({vocabulary.EOS}))
"""The reasoner's stop set: its one trained end."""


@dataclass(frozen=True)
class Text:
    """A chain that was generated past its end.

    Attributes
    ----------
    sample : Sample
    ids : tuple of int
        What was generated; nothing stopped it.
    entropies : tuple of float
        In nats, one for each token.
    end : int
        Index of the token that should end it.
    """

    sample: Sample
    ids: tuple[int, ...]
    entropies: tuple[float, ...]
    end: int


def past_the_end(model: Model, samples: Sequence[Sample], more: int = 8, **options: Any) -> list[Text]:
    """Let ``model`` write ``more`` tokens beyond the end of each chain."""
    ends = [len(sample.gold.split()) for sample in samples]
    prompts, caps = [sample.prompt for sample in samples], [end + 1 + more for end in ends]
    made = decode.greedy(model, prompts, max_new_tokens=caps, stop_ids=(), scores=True, **options)
    return [
        Text(sample, row.ids, tuple(row.entropies.tolist()), end)
        for sample, row, end in zip(samples, made, ends, strict=True)
    ]


def with_fault(how: str, sample: Sample) -> StopSet:
    """The right set with one reported fault, as it meets this problem.

    The stop string of ``"pieces"`` is the answer of a problem that ends in the first word of its states, such as ``0``;
    the prompt of ``"prompt read"`` holds a worked example, whose end is a stop id.
    """
    word = {"modular": "0", "digits": "0", "symbols": "A", "hops": "e0"}[sample.variant]
    prompt = [*vocabulary.encode(f"{sample.prompt} {sample.gold} <eos>"), *vocabulary.encode(sample.prompt)]
    tokens = {"end of turn missing": [vocabulary.EOS], "pieces": vocabulary.encode(word), "prompt read": prompt}
    return broken(RIGHT, how, tokens.get(how, ()))


def article(how: str, sample: Sample, threshold: float) -> ArticleStop:
    """The article's rule in a system with that fault.

    Without the end of turn its stop id is the wrong one, and only its context knows the right one; with pieces its
    context is made of the pieces too. The two other faults are of the loop around the rule, which it replaces.
    """
    given = with_fault(how, sample)
    wrong = how == "end of turn missing"
    allowed = RIGHT.ids | (given.ids if how == "pieces" else frozenset())
    labels = range(vocabulary.STEP, vocabulary.STEP + vocabulary.STEPS)
    return ArticleStop(-1 if wrong else vocabulary.EOS, after_steps(allowed, labels, sample.tokens_per_step), threshold)


def run(texts: Sequence[Text], rule: str, threshold: float = 0.0) -> list[Outcome]:
    """How every text ended under ``"broken"``, ``"article"`` or ``"right"``; the fault of a text is its place's."""
    found = []
    for place, text in enumerate(texts):
        how = BROKEN[place % len(BROKEN)]
        chosen: StopRule = RIGHT
        if rule == "broken":
            chosen = with_fault(how, text.sample)
        elif rule == "article":
            chosen = article(how, text.sample, threshold)
        elif rule != "right":
            raise DecodingError(f"rule={rule!r}: give 'broken', 'article' or 'right'")
        found.append(judge(chosen, text.ids, text.end, text.entropies))
    return found


def exact(outcomes: Sequence[Outcome]) -> list[bool]:
    """Whether each ended where it should."""
    return [outcome.kind == "exact" for outcome in outcomes]


def best_threshold(texts: Sequence[Text]) -> tuple[float, float]:
    """The threshold with which the article's rule does best on these texts, in nats, and which quantile it is."""
    means = np.concatenate([np.convolve(text.entropies[: text.end + 1], np.ones(3) / 3, "valid") for text in texts])
    tried = [(float(np.quantile(means, share)), share) for share in QUANTILES]
    return max(tried, key=lambda pair: sum(exact(run(texts, "article", pair[0]))))
