"""The user's own traffic in a notebook: as much of it as there is time for, draws of it, and the interval over them.

:func:`bounded` takes coarser steps for long answers, then fewer requests, and says what it left out. Draws are
bootstrap resamples, so that an interval is one over what this server might have been asked.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from o1lab.kv.designs import KVShape
from o1lab.kv.pool import PAGE_BYTES
from o1lab.kv.traffic import Request, Traffic, TrafficError
from o1lab.stats import Estimate

FINEST, COARSEST = 32, 256
DRAWS = 8


@dataclass(frozen=True)
class Own:
    """Traffic that is cut to size.

    Attributes
    ----------
    traffic : Traffic
    stride : int
        Tokens that one step of a replay stands for.
    seed : int
        Of the draws.
    note : str
        Which file it is and what was left out.
    """

    traffic: Traffic
    stride: int
    seed: int
    note: str

    def draw(self, number: int) -> Traffic:
        """Bootstrap resample of that number."""
        return self.traffic.resampled(f"{self.seed} {number}")

    def head(self, requests: int, *, most_tokens: int, concurrent: int) -> Traffic:
        """A few of its requests, no answer followed beyond ``most_tokens``, for a replay of every single token.

        They are the first, or drawn at random where no time of arrival is known.
        """
        chosen = list(self.traffic.requests)
        if not chosen[-1].arrival_s:
            random.Random(f"head {self.seed}").shuffle(chosen)
        return replace(
            self.traffic,
            requests=tuple(_cut(one, most_tokens) for one in chosen[:requests]),
            concurrent=min(concurrent, self.traffic.concurrent),
            bad_rows=(),
        )


def bounded(traffic: Traffic, shape: KVShape, *, work: int, seed: int = 0, read_at: int = 1024) -> Own:
    """Cut ``traffic`` so that one replay with a growing cache makes at most ``work`` tensors.

    Steps become coarser first, from 32 tokens to 256; then requests are left out: the last ones, or where no time of
    arrival is known a random part of all, so that the order of the rows does not matter.

    Parameters
    ----------
    work : int
        Tensors.
    read_at : int
        Step of one token that the traffic and each draw of it must reach.

    Raises
    ------
    TrafficError
        Too little traffic to be judged.
    """
    most, stride = max(1, work // (2 * shape.layers)), FINEST
    while stride < COARSEST and _grows(traffic.requests, stride) > most:
        stride *= 2
    kept = list(traffic.requests)
    if _grows(kept, stride) > most:
        if not kept[-1].arrival_s:
            random.Random(f"part {seed}").shuffle(kept)
        total, count = 0, 0
        for one in kept:
            total += _grows([one], stride)
            count += total <= most
        kept = sorted(kept[: max(1, count)], key=lambda one: (one.arrival_s, one.number))
    while _grows(kept, stride) > most and stride < kept[0].decoded:  # one answer alone is too long
        stride *= 2
    part = replace(traffic, requests=tuple(kept))
    left, note = (
        len(traffic) - len(kept),
        f"replayed traffic: {traffic.name}, {len(kept):,} of {len(traffic):,} requests",
    )
    if left:
        how = "those that came last" if traffic.requests[-1].arrival_s else "a random part"
        note += f" ({left:,} left out to save time: {how})"
    note += f", one step for {stride} tokens" + (f" instead of {FINEST} to save time" if stride > FINEST else "")
    own = Own(part, stride, seed, note)
    shortest = min(_steps(one) for one in (part, *map(own.draw, range(DRAWS))))
    if shortest < read_at:
        tokens = sum(one.decoded for one in kept)
        raise TrafficError(
            f"{traffic.name}: too small to judge: {len(kept):,} requests with {tokens:,} output tokens, "
            f"{traffic.concurrent} at a time, and a draw of them may end after {shortest:,} steps; memory is read at "
            f"step {read_at:,}. Give more requests or longer answers, or serve fewer at a time (concurrent)"
        )
    return own


def fullest_bytes(traffic: Traffic, shape: KVShape) -> int:
    """Pages that hold the longest request as often as requests are served at a time: a pool that never runs out."""
    served = min(traffic.concurrent, len(traffic))
    return served * shape.pages(max(one.prompt_tokens + one.output_tokens for one in traffic)) * PAGE_BYTES


def over_draws(values: Sequence[float], unit: str) -> Estimate:
    """Mean of a figure over bootstrap draws, with the interval in which a further draw lies.

    Draws are no new observations: unlike a mean's, the interval does not shrink with their number.

    Examples
    --------
    >>> print(over_draws([1.0, 2.0, 3.0], "s"))
    2 [-2.968, 6.968] s (n=3)
    """
    from o1lab import stats

    mean = stats.mean(values, unit)
    half = (mean.high - mean.value) * math.sqrt(len(values) + 1)
    return Estimate(mean.value, mean.value - half, mean.value + half, mean.n, unit)


def _cut(request: Request, most_tokens: int) -> Request:
    return replace(request, aborted_after=most_tokens) if request.decoded > most_tokens else request


def _grows(requests: Sequence[Request], stride: int) -> int:
    return sum(1 + -(-one.decoded // stride) for one in requests)


def _steps(traffic: Traffic) -> int:
    """Fewest steps of one token in which it can be served."""
    decoded = [one.decoded for one in traffic]
    return max(max(decoded), -(-sum(decoded) // traffic.concurrent))
