"""What a detector of faults is given: how sure a model was of the tokens of each step that it wrote or read."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from o1lab.chains.render import parse
from o1lab.chains.samples import Parsed
from o1lab.errors import EstimateError

FEATURES = ("min margin", "max entropy", "min top-1", "max surprise")
TINY = 1e-12


def step_features(
    margins: Any, entropies: Any, ends: Sequence[int], top1: Any = None, surprise: Any = None
) -> np.ndarray:
    """Features of each step from how sure the model was of its tokens: shape (steps, 2), (steps, 3) or (steps, 4).

    The smallest margin as it is, the greatest entropy as its logarithm, the smallest top-1 probability as its log-odds
    (these two spread out where a model is nearly sure), the greatest surprise as it is: :data:`FEATURES`. The last two
    stand there only if they are given.

    Parameters
    ----------
    margins, entropies : array, shape (tokens,)
        Of each token: top-1 minus top-2 logit, entropy of the softmax in nats.
    ends : sequence of int
        For each step the number of tokens up to and with its last one, ascending.
    top1 : array, shape (tokens,), optional
        Probability of the likeliest token.
    surprise : array, shape (tokens,), optional
        ``-log p`` of the token that stands there, in nats.

    Raises
    ------
    EstimateError
        Arrays of unequal length, ends out of order or past the tokens, a number that cannot be one of these.

    Examples
    --------
    >>> step_features([9.0, 2.0, 8.0, 7.0], [0.01, 0.5, 0.02, 0.1], [2, 4]).round(2).tolist()
    [[2.0, -0.69], [7.0, -2.3]]
    """
    given = {"margin": margins, "entropy": entropies, "top1": top1, "surprise": surprise}
    values = {name: np.asarray(each, dtype=float) for name, each in given.items() if each is not None}
    shapes = [each.shape for each in values.values()]
    if len(set(shapes)) != 1 or len(shapes[0]) != 1:
        raise EstimateError(f"{', '.join(values)} have shapes {shapes}: give one number of each per token")
    stops = [int(end) for end in ends]
    if not stops or stops != sorted(set(stops)) or stops[0] < 1 or stops[-1] > shapes[0][0]:
        raise EstimateError(f"ends={list(ends)} are not ascending token counts from 1 to {shapes[0][0]}")
    for name, each in values.items():
        high = 1.0 if name == "top1" else np.inf
        wrong = each[~((each >= 0) & (each <= high))]
        if wrong.size:
            raise EstimateError(f"{name}={wrong[0]} is out of range: it lies from 0 to {high:g}")
    starts, seen = [0, *stops[:-1]], {name: each[: stops[-1]] for name, each in values.items()}
    peak = np.maximum.reduceat(seen["entropy"], starts)
    columns = [np.minimum.reduceat(seen["margin"], starts), np.log(np.maximum(peak, TINY))]
    if top1 is not None:
        lowest = np.clip(np.minimum.reduceat(seen["top1"], starts), TINY, 1 - TINY)
        columns.append(np.log(lowest / (1 - lowest)))
    if surprise is not None:
        columns.append(np.maximum.reduceat(seen["surprise"], starts))
    return np.column_stack(columns)


def step_ends(text: str, parsed: Parsed) -> list[int] | None:
    """Tokens up to the end of each step of a chain in the reasoner's tokens; ``None`` if other tokens stand between.

    Examples
    --------
    >>> from o1lab import chains
    >>> sample = chains.make("hops", 2, 1, seed=0)[0]
    >>> step_ends(sample.gold, chains.render.parse(sample, sample.gold))
    [3, 6]
    """
    words, ends = text.split(), list(accumulate(len(step.text.split()) for step in parsed.steps))
    joined = [word for step in parsed.steps for word in step.text.split()]
    return ends if ends and words[: len(joined)] == joined else None


def line_ends(text: str, parsed: Parsed, tokenizer: Any, tokens: int) -> list[int] | None:
    """Tokens up to the end of each step of a chain in language, where each step is a line that begins with "Step".

    The line break belongs to the step before it: it says that the step is over. ``None`` where the lines are not the
    steps that were read, or the text does not give the ``tokens`` again that it was made of (an end mark more or less
    is no matter).
    """
    coded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    starts = [start for start, _ in coded.offset_mapping]
    lines = [match.end() for match in re.finditer(r"(?im)^\W*step\b.*\n?", text)]
    if not lines or len(lines) != len(parsed.steps) or abs(len(starts) - tokens) > 1:
        return None
    ends = [min(tokens, sum(start < end for start in starts)) for end in lines]
    return ends if ends == sorted(set(ends)) else None


def observations(results: Iterable[Any], tokenizer: Any = None) -> tuple[list[np.ndarray], list[int | None], list[str]]:
    """Features, first faults and problems for :func:`o1lab.chains.detect.evaluate` from results.

    Parameters
    ----------
    results : iterable of o1lab.chains.report.Result
        With margins and entropies. Left out: chains without them, with nothing produced, with a number that is not
        finite, with steps that do not stand on lines of their own (in language), and those whose first fault is at
        no step that was written (stopped early, ran over).
    tokenizer : optional
        Of the model that wrote them; says that they are in language. Default: in the reasoner's tokens.

    Raises
    ------
    EstimateError
        None is left.
    """
    features, first, problems = [], [], []
    for result in results:
        fault = result.fault
        if result.margins is None or result.entropies is None or result.problem:
            continue
        style = "tokens" if tokenizer is None else "language"
        chain, length = parse(result.sample, result.text, style), len(result.margins)
        ends = line_ends(result.text, chain, tokenizer, length) if tokenizer else step_ends(result.text, chain)
        numbers = np.array([result.margins, result.entropies], dtype=float)
        if ends is None or not np.isfinite(numbers).all() or ends[-1] > numbers.shape[1]:
            continue
        if fault is None or (fault.step <= len(ends) and not fault.past_end):
            features.append(step_features(*numbers, ends))
            first.append(fault.step if fault else None)
            problems.append(result.sample.id)
    if not features:
        raise EstimateError("no result has margins and entropies of steps that can be read: let evaluate keep scores")
    return features, first, problems
