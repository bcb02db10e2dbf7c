"""Step voting: ask the same few steps in redrawn contexts until one state leads by k."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from o1lab import chains
from o1lab.chains.report import ChainReport, Result
from o1lab.chains.samples import Sample
from o1lab.chains.symmetry import disguise
from o1lab.decoding.segments import Chain, Segmented, check, final_state, prompt_tokens, together
from o1lab.errors import DecodingError

Context = tuple[Sample, Callable[[str], str]]
"""A segment as it is asked, and how the state that it ends with is taken back."""


@dataclass
class Poll:
    """The votes on one segment: the state each ended with (``None``: no vote), and what was judged of it."""

    part: Sample
    votes: list[str | None] = field(default_factory=list)
    results: list[Result] = field(default_factory=list)

    def leader(self, ahead: int, most: int) -> str | None:
        """The state that leads by ``ahead``, or the first of the most frequent ones once ``most`` votes are in."""
        counts = Counter(vote for vote in self.votes if vote is not None).most_common(2)
        if not counts:
            return None
        lead = counts[0][1] - (counts[1][1] if len(counts) > 1 else 0)
        return counts[0][0] if lead >= ahead or len(self.votes) >= most else None


def vote(
    model: Any, samples: Sequence[Any], ahead: int = 2, *, every: int = 4, most: int = 11, seed: int = 0,
    order: str = "shuffled", disguised: bool = False, **options: Any,
) -> Segmented:  # fmt: skip
    """Work each chain in segments of ``every`` steps, each decided by votes: first to lead by ``ahead`` wins.

    A greedy decoder repeats its errors, so each vote sees another context: other step ids, the program (and the facts)
    in another order. Errors that hang on the context are then independent; errors that hang on the step alone are not,
    and come again in every vote. ``disguised`` shows them as other steps: each vote is cast on the problem under
    another symmetry of its family (:mod:`o1lab.chains.symmetry`) and taken back.

    Parameters
    ----------
    model : Model or Endpoint
    samples : sequence of Sample
    ahead : int
        k: by how many votes a state must lead. 1 takes the first vote: no voting, and the control.
    every : int
        Steps of a segment.
    most : int
        Votes after which the most frequent state is taken.
    seed : int
        Of the contexts.
    order : str
        How the redrawn program is shown: ``"shuffled"``, or ``"sorted"`` for a model that knows programs in order only.
    disguised : bool
        Other letters, names or numbers in each vote, the first one included.
    **options
        Of :func:`o1lab.chains.evaluate`.

    Returns
    -------
    Segmented

    Raises
    ------
    DecodingError
        A number is out of range, or a sample has no steps.

    Notes
    -----
    First-to-ahead-by-k voting is MAKER's (arXiv 2511.09030): with independent errors p a step is wrong in
    1 / (1 + ((1 - p) / p)^k). Transformers' errors are correlated in time (2512.12895), hence the redrawn contexts.

    Examples
    --------
    >>> from o1lab import chains, models
    >>> model = models.load("tiny", device="cpu")
    >>> found = vote(model, chains.make("symbols", 2, 2, 0), every=2, most=3, cap=4, progress=False)
    >>> found.calls, print(found.report.accuracy)
    0 [0, 0.6576] (n=2)
    (6, None)
    """
    begun = time.perf_counter()
    for label, value in (("ahead", ahead), ("most", most)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise DecodingError(f"{label}={value!r} must be a whole number, at least 1")
    if most < ahead:
        raise DecodingError(f"most={most} votes can never lead by ahead={ahead}")
    work = [Chain(sample, sample.start) for sample in check(samples, every)]
    read = made = calls = 0
    name = style = ""
    while going := [chain for chain in work if not chain.over]:
        polls = [
            Poll(c.due(every))
            for c in going
        ]  # fmt: skip
        open_polls, wanted = polls, ahead
        while open_polls:
            asked = [poll for poll in open_polls for _ in range(wanted)]
            contexts = [
                context(poll.part, seed + len(poll.votes) + place, order, disguised)
                for poll in open_polls
                for place in range(wanted)
            ]
            states, report, tokens = ask(model, contexts, seed, options)
            name, style = report.model, report.style
            read, made, calls = read + tokens, made + report.tokens, calls + len(asked)
            for poll, state, result in zip(asked, states, report.results, strict=True):
                poll.votes.append(state)
                poll.results.append(result)
            open_polls = [p for p in open_polls if p.leader(ahead, most) is None and len(p.votes) < most]
            wanted = 1
        for chain, poll in zip(going, polls, strict=True):
            state = poll.leader(ahead, most)
            chain.take(poll.results[poll.votes.index(state)], state, len(poll.part.steps))
    return together(work, name, style, time.perf_counter() - begun, (read, made, calls))


def ask(
    model: Any, contexts: Sequence[Context], seed: int, options: dict[str, Any]
) -> tuple[list[str | None], ChainReport, int]:  # fmt: skip
    """The states that the contexts end with, taken back (``None``: none), the report, and the tokens read."""
    parts = [part for part, _ in contexts]
    report = chains.evaluate(model, parts, seed=seed, **options)
    ends = [final_state(part, result, report.style) for part, result in zip(parts, report.results, strict=True)]
    states = [end if end is None else back(end) for end, (_, back) in zip(ends, contexts, strict=True)]
    return states, report, prompt_tokens(model, parts, report.style)


def context(part: Sample, seed: int, order: str, disguised: bool) -> Context:
    """A segment as one vote sees it, and how the state that it ends with is taken back."""
    drawn = chains.redraw(part, seed, order)
    if not disguised:
        return drawn, str
    other = disguise(drawn, seed)
    return other.sample, other.back
