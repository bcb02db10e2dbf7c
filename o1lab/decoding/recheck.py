"""A detector of the first wrong step that asks the model again: each step alone, in another context and in disguise.

No gold state is looked at. What a step should be about (its label, operator, operand) stands in the program; what it
should come to is what the model says of that step when it is asked for nothing else, of the state written before it.
A slip that hangs on the long context does not come again in a short one, one that hangs on the state not in a disguise
(:mod:`o1lab.chains.symmetry`); an error that the model makes of every disguise cannot be seen this way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from o1lab import chains
from o1lab.chains import detect, render
from o1lab.chains.report import Result
from o1lab.chains.samples import Sample
from o1lab.decoding.voting import ask, context
from o1lab.errors import DecodingError
from o1lab.stats import Estimate, proportion


@dataclass(frozen=True)
class Rechecked:
    """What asking again says of chains.

    Attributes
    ----------
    said : tuple of int or None
        First step (1-based) of each chain that is not what the program asks for or not what most answers say.
    doubt : tuple of ndarray, shape (steps written,)
        Share of the answers that differ from each step, 0 to 1.
    calls, prompt_tokens, new_tokens : int
        Prompts given, and tokens read and produced for them.
    """

    said: tuple[int | None, ...]
    doubt: tuple[np.ndarray, ...] = field(repr=False)
    calls: int
    prompt_tokens: int
    new_tokens: int

    def against(self, first: Sequence[int | None]) -> dict[str, Estimate]:
        """How that compares with the true first faults: shares, and the AUROC of single steps up to them.

        ``exact``: faulty chains whose step is named; ``alarms``: right chains in which one is named; ``judged``: chains
        of both sorts judged exactly. What there are no chains for is left out.
        """
        if len(first) != len(self.said):
            raise DecodingError(f"{len(first)} first faults for {len(self.said)} chains: give one of each")
        hits = [named == fault for named, fault in zip(self.said, first, strict=True)]
        faulty = [fault is not None for fault in first]
        groups = {"exact": [hit for hit, bad in zip(hits, faulty, strict=True) if bad], "judged": hits}
        groups["alarms"] = [not hit for hit, bad in zip(hits, faulty, strict=True) if not bad]
        found = {name: proportion(sum(group), len(group)) for name, group in groups.items() if group}
        rows = [
            (score, place == fault, number)
            for number, (scores, fault) in enumerate(zip(self.doubt, first, strict=True))
            for place, score in enumerate(scores, 1)
            if fault is None or place <= fault
        ]
        score, wrong, chain = map(np.array, zip(*rows, strict=True))
        return found | ({"auroc": detect.auroc(score, wrong, chain)} if wrong.any() and not wrong.all() else {})


def recheck(
    model: Any, results: Sequence[Result], *, first: int | None = None, times: int = 5, seed: int = 0,
    order: str = "shuffled", disguised: bool = True, **options: Any,
) -> Rechecked:  # fmt: skip
    """Ask ``model`` again for each step that is written in ``results``, one at a time.

    Each step is asked ``first`` times; where an answer differs, ``times`` times in all, and most answers count. So the
    cost is that of about ``first`` more chains, in short prompts.

    Parameters
    ----------
    model : Model or Endpoint
    results : sequence of Result
        Of :func:`o1lab.chains.evaluate`, in the reasoner's tokens.
    first : int, optional
        Default: 2, or ``times`` if that is 1. Asking once misses a slip that comes again in that one context.
    times : int
        Odd, so that there is no tie.
    seed, order, disguised
        As of :func:`o1lab.decoding.vote`.
    **options
        Of :func:`o1lab.chains.evaluate`.

    Raises
    ------
    DecodingError
        ``times`` is even or below 1, ``first`` is not 1 to ``times``, or a result is of no chain.

    Examples
    --------
    >>> from o1lab import models
    >>> model = models.load("reasoner", device="cpu")
    >>> report = chains.evaluate(model, chains.make("symbols", 3, 2, 0), progress=False)
    >>> recheck(model, report.results, progress=False).said
    (None, None)
    """
    if isinstance(times, bool) or not isinstance(times, int) or times < 1 or times % 2 == 0:
        raise DecodingError(f"times={times!r} must be an odd number, at least 1")
    first = min(2, times) if first is None else first
    if isinstance(first, bool) or not isinstance(first, int) or not 1 <= first <= times:
        raise DecodingError(f"first={first!r} must be a number from 1 to times={times}")
    written, doubt, open_steps = [], [], []
    for number, result in enumerate(results):
        sample = result.sample
        if not isinstance(sample, Sample):
            raise DecodingError(f"a {type(sample).__name__} has no steps to ask for again")
        steps = render.parse(sample, result.text, "tokens").steps[: len(sample.steps)]
        written.append(steps)
        doubt.append(np.zeros(len(steps)))
        before = sample.start
        for place, (step, due) in enumerate(zip(steps, sample.steps, strict=False)):
            asked_for = (step.label, step.operator, step.operand) == (due.label, due.operator, due.operand)
            if not asked_for or step.state is None or not sample.valid(step.state):
                doubt[number][place] = 1.0
                break  # what follows is no work on this program
            open_steps.append((number, place, chains.problems.rest(sample, place, before, asked=1), step.state))
            before = step.state
    calls = read = made = 0
    answers: dict[tuple[int, int], list[bool]] = {}
    for turn in range(times):
        if not open_steps:
            break
        asked = []
        for number, _, step_alone, _ in open_steps:
            part, back = context(step_alone, seed + turn, order, disguised)
            asked.append((replace(part, id=f"chain {number}: {part.id}"), back))  # several may be of one problem
        states, report, tokens = ask(model, asked, seed, options)
        calls, read, made = calls + len(asked), read + tokens, made + report.tokens
        for (number, place, _, state), found in zip(open_steps, states, strict=True):
            answers.setdefault((number, place), []).append(found != state)
        if turn == first - 1:
            open_steps = [one for one in open_steps if any(answers[one[0], one[1]])]
    for (number, place), differ in answers.items():
        doubt[number][place] = sum(differ) / len(differ)
    said = []
    for result, steps, scores in zip(results, written, doubt, strict=True):
        suspects = np.flatnonzero(scores > 0.5)
        short = len(steps) + 1 if len(steps) < len(result.sample.steps) else None
        said.append(int(suspects[0]) + 1 if suspects.size else short)
    return Rechecked(tuple(said), tuple(doubt), calls, read, made)
