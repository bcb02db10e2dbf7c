"""Re-grounding: start afresh every few steps from the last state and the part of the program that is due."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from o1lab import chains
from o1lab.decoding.segments import Chain, Segmented, check, final_state, prompt_tokens, together


def reground(model: Any, samples: Sequence[Any], every: int = 32, **options: Any) -> Segmented:
    """Work each chain in segments of ``every`` steps, each from a prompt of its own.

    The prompt of a segment holds the state reached so far and the entries of the program that the segment needs: no
    earlier step is in the context, so neither its length nor its errors weigh on what follows, and positions stay
    below those of one segment. A state is carried on only if the segment ended by itself, has all its steps, and ends
    in something that is a state; whether it is the *right* state nobody checks while the chain is worked
    (:attr:`Segmented.carried` says it afterwards).

    Parameters
    ----------
    model : Model or Endpoint
    samples : sequence of Sample
    every : int
        Steps of a segment.
    **options
        Of :func:`o1lab.chains.evaluate`: ``style``, ``batch_size``, ``temperature``, ….

    Returns
    -------
    Segmented

    Raises
    ------
    DecodingError
        ``every`` is no whole number of at least 1, or a sample has no steps.

    Notes
    -----
    The idea is that of InftyThink (arXiv 2503.06692), Delethink (2510.06557) and PENCIL (2503.14337), with the state
    written out by the task instead of a summary written by the model.

    Examples
    --------
    >>> from o1lab import chains, models
    >>> model = models.load("tiny", device="cpu")
    >>> print(reground(model, chains.make("symbols", 6, 2, 0), every=2, cap=4, progress=False).report.accuracy)
    0 [0, 0.6576] (n=2)
    """
    begun = time.perf_counter()
    work = [Chain(sample, sample.start) for sample in check(samples, every)]
    read = made = calls = 0
    name = style = ""
    while going := [chain for chain in work if not chain.over]:
        parts = [c.due(every) for c in going]
        report = chains.evaluate(model, parts, **options)
        name, style = report.model, report.style
        read, made, calls = read + prompt_tokens(model, parts, style), made + report.tokens, calls + len(parts)
        for chain, part, result in zip(going, parts, report.results, strict=True):
            chain.take(result, final_state(part, result, style), len(part.steps))
    return together(work, name, style, time.perf_counter() - begun, (read, made, calls))
