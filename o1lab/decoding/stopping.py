"""When to stop: the article's calibrated stop token, a plain set of stop ids, and sets broken as in public reports.

A rule is asked after every generated token. Run it over a text that was generated past its end, and compare with where
the end was; or hand it to ``model.generate`` as a stopping criterion.

>>> end, text = 3, [11, 12, 13, 2, 11, 12, 13, 13]
>>> judge(StopSet({2}), text, end)
Outcome(kind='exact', stopped=3, expected=3)
>>> judge(StopSet({13}), text, end).kind, judge(StopSet({99}), text, end).kind
('premature', 'overrun')
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from o1lab.errors import DecodingError
from o1lab.stats import Estimate, proportion

KINDS = ("exact", "premature", "overrun")
BROKEN = ("end of turn missing", "pieces", "prompt read", "checked late")


class StopRule(ABC):
    """Decides after each generated token whether to go on."""

    needs_entropies = False

    @abstractmethod
    def stops(self, ids: Sequence[int], at: int, entropies: Sequence[float] | None = None) -> bool:
        """Whether to stop after token ``at`` (0-based) of the generated ``ids``; entropies in nats, one per token."""

    def criteria(self, prompt_length: int) -> Any:
        """This rule for ``model.generate(stopping_criteria=…)``; ``prompt_length`` columns are the (padded) prompt.

        ``generate`` also stops at its own ``eos_token_id``: set ``model.generation_config.eos_token_id = None`` to let
        the rule alone decide. A rule that needs entropies needs ``output_scores=True, return_dict_in_generate=True``.
        """
        from transformers import StoppingCriteriaList

        return StoppingCriteriaList([_criterion(self, prompt_length)])


@dataclass(frozen=True)
class StopSet(StopRule):
    """Stop at the first token that is one of ``ids``: all that a model needs whose ends are known.

    Parameters
    ----------
    ids
        The stop ids: every token that ends an answer of this model.
    prompt
        Fault: token ids that are looked through as well.
    every
        Fault: the newest token is looked at only after each so many tokens.
    """

    ids: frozenset[int]
    prompt: tuple[int, ...] = ()
    every: int = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "ids", _ids(self.ids))
        if self.every < 1:
            raise DecodingError(f"every={self.every!r}: give 1 or more")

    def stops(self, ids: Sequence[int], at: int, entropies: Sequence[float] | None = None) -> bool:
        """Whether token ``at`` is in the set and looked at."""
        if not self.ids.isdisjoint(self.prompt):
            return True
        return (at + 1) % self.every == 0 and ids[at] in self.ids


@dataclass(frozen=True)
class ArticleStop(StopRule):
    """The article's dynamic stop token, as written: high entropy swaps the stop id for a set that knows the context.

    After each token the mean entropy of the last ``window`` tokens is compared with ``threshold``. Below it, only
    ``stop_id`` stops. At or above it the calibration is triggered: ``context`` names the set of stop ids that hold
    here, and any of them among the last ``window`` tokens stops.

    Parameters
    ----------
    stop_id
        The model's one stop id.
    context
        Gives the stop ids that hold after token ``at`` of ``ids``; see :func:`after_steps`.
    threshold
        In nats. The article gives none, so it has to be chosen on other data than it is judged on.
    window
        Tokens; the article's 3.

    Notes
    -----
    Source: the article, § 4.2. It says that entropy triggers the calibration and that a window slides over the last
    three tokens with a threshold, not which side of it triggers: the unsure side is taken here.
    """

    stop_id: int
    context: Callable[[Sequence[int], int], Collection[int]]
    threshold: float
    window: int = 3
    needs_entropies = True

    def __post_init__(self) -> None:
        if self.window < 1 or not self.threshold >= 0:
            raise DecodingError(f"window={self.window!r}, threshold={self.threshold!r}: give 1 or more, 0 or more")

    def stops(self, ids: Sequence[int], at: int, entropies: Sequence[float] | None = None) -> bool:
        """Whether the article's rule stops after token ``at``; DecodingError without its entropy."""
        if entropies is None or len(entropies) <= at:
            raise DecodingError("the article's rule needs the entropy of every token")
        first = max(0, at + 1 - self.window)
        recent = range(first, at + 1)
        if sum(entropies[i] for i in recent) / len(recent) < self.threshold:
            return ids[at] == self.stop_id
        allowed = frozenset(self.context(ids, at))
        return any(ids[i] in allowed for i in recent)


def after_steps(stop_ids: Collection[int], labels: Collection[int], size: int) -> Callable[[Sequence[int], int], Any]:
    """A context for :class:`ArticleStop`: ``stop_ids`` hold after a finished step, nothing stops inside one.

    ``labels`` are the ids that begin a step, ``size`` is its length in tokens with the label.

    >>> context = after_steps({2}, labels={10, 11}, size=3)
    >>> [sorted(context([10, 5, 6, 2], at)) for at in range(4)]
    [[], [], [2], [2]]
    """
    stop, begins = _ids(stop_ids), _ids(labels)

    def context(ids: Sequence[int], at: int) -> frozenset[int]:
        start = next((i for i in range(at, -1, -1) if ids[i] in begins), None)
        return stop if start is not None and at - start + 1 >= size else frozenset()

    return context


def broken(rule: StopSet, how: str, tokens: Collection[int] = (), every: int = 8) -> StopSet:
    """``rule`` with one of the faults that users report.

    Parameters
    ----------
    rule
        A right stop set.
    how
        ``"end of turn missing"``: ``tokens`` are no stop ids, so it runs over
        (https://github.com/vllm-project/vllm/issues/4180). ``"pieces"``: ``tokens``, the pieces of a stop string, stop
        one by one, so it ends early (https://github.com/cactus-compute/cactus/pull/199). ``"prompt read"``: ``tokens``,
        the prompt, are looked through too, so it ends at once (https://github.com/deepset-ai/haystack/pull/5316).
        ``"checked late"``: only the newest token of each ``every`` is looked at
        (https://github.com/ml-explore/mlx-examples/issues/524).
    tokens
        Token ids, as each fault needs them.
    """
    if how not in BROKEN:
        raise DecodingError(f"how={how!r}: give one of {', '.join(map(repr, BROKEN))}")
    if how == "checked late":
        return replace(rule, every=every)
    if not tokens:
        raise DecodingError(f"{how!r} needs tokens")
    if how == "end of turn missing":
        return replace(rule, ids=rule.ids - frozenset(tokens) or frozenset({-1}))
    return replace(rule, ids=rule.ids | frozenset(tokens)) if how == "pieces" else replace(rule, prompt=tuple(tokens))


@dataclass(frozen=True)
class Outcome:
    """Where a rule stopped and where it should have.

    Attributes
    ----------
    kind
        ``"exact"``, ``"premature"`` or ``"overrun"``.
    stopped
        Index of the last token that was generated, or ``None`` if nothing stopped it.
    expected
        Index of the token that ends the answer.
    """

    kind: str
    stopped: int | None
    expected: int


def first_stop(rule: StopRule, ids: Sequence[int], entropies: Sequence[float] | None = None) -> int | None:
    """Index of the token after which ``rule`` stops, or ``None``; ``ids`` are generated tokens, without the prompt."""
    return next((at for at in range(len(ids)) if rule.stops(ids, at, entropies)), None)


def judge(rule: StopRule, ids: Sequence[int], end: int, entropies: Sequence[float] | None = None) -> Outcome:
    """How ``rule`` does on ``ids``, a text generated beyond its ``end`` (the index of the token that ends it)."""
    if not 0 <= end < len(ids):
        raise DecodingError(f"end={end} is no token of the {len(ids)} generated: let the text run past its end")
    stopped = first_stop(rule, ids, entropies)
    kind = "overrun" if stopped is None or stopped > end else "premature" if stopped < end else "exact"
    return Outcome(kind, stopped, end)


def rates(outcomes: Iterable[Outcome]) -> dict[str, Estimate]:
    """The share of each kind of outcome, with its interval."""
    kinds = [outcome.kind for outcome in outcomes]
    if not kinds:
        raise DecodingError("no outcomes: judge at least one text")
    return {kind: proportion(kinds.count(kind), len(kinds)) for kind in KINDS}


def entropy(logits: Tensor) -> Tensor:
    """Entropy in nats of the softmax over the last axis, in fp32; -inf logits (forbidden tokens) count as 0."""
    return torch.distributions.Categorical(logits=logits.float(), validate_args=False).entropy()


def _ids(ids: Collection[int]) -> frozenset[int]:
    if not ids or not all(isinstance(number, int) for number in ids):
        raise DecodingError(f"stop ids {ids!r}: give at least one token id")
    return frozenset(ids)


def _criterion(rule: StopRule, prompt_length: int) -> Any:
    from transformers import StoppingCriteria

    class Criterion(StoppingCriteria):
        def __init__(self) -> None:
            self.entropies: list[list[float]] = []

        def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
            if rule.needs_entropies:
                if not scores:
                    raise DecodingError("call generate with output_scores=True, return_dict_in_generate=True")
                self.entropies.append(entropy(scores[-1]).tolist())
            rows = input_ids[:, prompt_length:].tolist()
            past = list(zip(*self.entropies, strict=True)) or [None] * len(rows)
            done = [rule.stops(row, len(row) - 1, past[number]) for number, row in enumerate(rows)]
            return torch.tensor(done, dtype=torch.bool, device=input_ids.device)

    return Criterion()
