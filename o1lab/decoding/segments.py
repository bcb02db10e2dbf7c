"""A long chain worked in short segments: what re-grounding and voting share, and how their results are put together."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from o1lab.chains import render
from o1lab.chains.problems import rest
from o1lab.chains.report import ChainReport, Result
from o1lab.chains.samples import Sample
from o1lab.errors import DecodingError
from o1lab.stats import Estimate, proportion


@dataclass(frozen=True)
class Segmented:
    """A report on chains that were worked in segments, and what that cost.

    Attributes
    ----------
    report : ChainReport
        As of :func:`o1lab.chains.evaluate`, on the whole chains.
    prompt_tokens, new_tokens : int
        Tokens read and produced, over all segments and votes. Text of an endpoint that counts none is left out.
    calls : int
        Prompts given.
    carried : Estimate or None
        Share of the states handed on that were right; ``None`` if none was. Known to the judge only: what is carried
        is never compared with the gold while the chain is worked.
    """

    report: ChainReport
    prompt_tokens: int
    new_tokens: int
    calls: int
    carried: Estimate | None

    @property
    def tokens(self) -> int:
        """Tokens read and produced."""
        return self.prompt_tokens + self.new_tokens

    def __str__(self) -> str:
        carried = f"; states carried right {self.carried}" if self.carried else ""
        return f"{self.report}\n{self.calls:,} prompts, {self.tokens:,} tokens read and produced{carried}"


@dataclass
class Chain:
    """One chain on its way: how far it has come, with which state, and what its segments were judged."""

    sample: Sample
    state: str
    done: int = 0
    over: bool = False
    judged: list[tuple[int, Result]] = field(default_factory=list)

    def due(self, every: int) -> Sample:
        """The next segment: at most ``every`` steps, from the state reached."""
        return rest(self.sample, self.done, self.state, asked=min(every, len(self.sample.steps) - self.done))

    def take(self, result: Result, state: str | None, steps: int) -> None:
        """Append a segment; without a ``state`` to carry the chain ends here."""
        self.judged.append((self.done, result))
        self.done += steps
        if state is None or self.done >= len(self.sample.steps):
            self.over = True
        else:
            self.state = state

    def carried(self) -> tuple[int, int]:
        """(right, all) of the states that were handed on."""
        ends = [done for done, _ in self.judged[1:]]
        wrong = next((done for done, result in self.judged if not result.right), math.inf)
        return sum(end <= wrong for end in ends), len(ends)

    def result(self) -> Result:
        """The whole chain: right if each segment is, faulty where the first faulty segment is.

        A segment is judged from the state that it was given, so all segments right means the chain is right.
        """
        tokens = [result.tokens for _, result in self.judged]
        total = None if None in tokens else sum(count for count in tokens if count is not None)
        text = "\n".join(result.text for _, result in self.judged)
        for done, result in self.judged:
            if not result.right:
                fault = result.fault and replace(result.fault, step=result.fault.step + done)
                last = self.judged[-1][1]
                return replace(
                    result, sample=self.sample, text=text, tokens=total, fault=fault, watched=done + result.watched,
                    answer_right=False, score=0.0, problem=result.problem or last.problem,
                )  # fmt: skip
        return replace(self.judged[-1][1], sample=self.sample, text=text, tokens=total, watched=len(self.sample.steps))


def check(samples: Sequence[Any], every: int) -> list[Sample]:
    """The samples as a list, if they can be cut into segments of ``every`` steps."""
    if isinstance(every, bool) or not isinstance(every, int) or every < 1:
        raise DecodingError(f"every={every!r} must be a whole number of steps, at least 1")
    for sample in samples:
        if not isinstance(sample, Sample):
            raise DecodingError(f"a {type(sample).__name__} has no steps to cut: give samples of o1lab.chains.make")
    return list(samples)


def final_state(part: Sample, result: Result, style: str) -> str | None:
    """The state that a segment ends with, if it ended by itself, with all its steps and a state that can go on."""
    if result.problem or result.capped:
        return None
    text = f"{result.text} <eos>" if style == "tokens" else result.text
    parsed = render.parse(part, text, style)
    if not parsed.ended or len(parsed.steps) != len(part.steps):
        return None
    state = parsed.steps[-1].state
    return state if part.valid(state) else None


def prompt_tokens(model: Any, parts: Sequence[Sample], style: str) -> int:
    """Tokens of the segments' prompts; 0 for a model whose tokenizer is not known."""
    if style == "tokens":
        return sum(len(part.prompt.split()) for part in parts)
    tokenizer = getattr(model, "tokenizer", None)
    if tokenizer is None:
        return 0
    return sum(len(tokenizer(render.prompt(part, style), verbose=False).input_ids) for part in parts)


def together(chains: Sequence[Chain], model: str, style: str, seconds: float, cost: tuple[int, int, int]) -> Segmented:
    """The report on all chains; ``cost`` is prompt tokens, new tokens and prompts."""
    right, handed = (sum(counts) for counts in zip(*(chain.carried() for chain in chains), strict=True))
    results = tuple(chain.result() for chain in chains)
    report = ChainReport(results, model, style, seconds)
    return Segmented(report, *cost, proportion(right, handed) if handed else None)
