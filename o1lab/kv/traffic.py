"""Requests as a serving process sees them: made from a seed, or read from the user's own file or log.

:func:`long_cot` draws what reasoning looks like: short prompts, long answers of log-normal length, requests that come
and go, some aborted, some with a common prefix. :func:`from_file` and :func:`from_log` (:mod:`o1lab.kv.traffic_files`)
read real traffic into the same form.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from statistics import NormalDist, median

from o1lab.errors import O1labError


class TrafficError(O1labError, ValueError):
    """Traffic that cannot be made or read as asked; the message names the value, or the file and row."""


@dataclass(frozen=True)
class Request:
    """One request.

    Attributes
    ----------
    number : int
    arrival_s : float
        Seconds after the first one's arrival.
    prompt_tokens, output_tokens : int
        At least 1 each.
    aborted_after : int or None
        Output tokens after which the client hangs up.
    prefix : str or None
        Name of the prompt's beginning, which it has in common with others.
    prefix_tokens : int
        Length of that beginning.
    """

    number: int
    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    aborted_after: int | None = None
    prefix: str | None = None
    prefix_tokens: int = 0

    def __post_init__(self) -> None:
        for name, least in (("prompt_tokens", 1), ("output_tokens", 1), ("prefix_tokens", 0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise TrafficError(f"request {self.number}: {name}={value!r} is no whole number from {least}")
        if not (isinstance(self.arrival_s, (int, float)) and math.isfinite(self.arrival_s) and self.arrival_s >= 0):
            raise TrafficError(f"request {self.number}: arrival_s={self.arrival_s!r} is no time from 0")
        if self.prefix_tokens > self.prompt_tokens:
            raise TrafficError(
                f"request {self.number}: a prefix of {self.prefix_tokens} in {self.prompt_tokens} tokens"
            )
        if self.aborted_after is not None and not 0 <= self.aborted_after < self.output_tokens:
            raise TrafficError(
                f"request {self.number}: aborted_after={self.aborted_after!r} of {self.output_tokens} output tokens"
            )

    @property
    def decoded(self) -> int:
        """Output tokens up to its end, or to where its client hangs up."""
        return self.output_tokens if self.aborted_after is None else self.aborted_after

    @property
    def tokens(self) -> int:
        """Tokens in the cache when the request ends."""
        return self.prompt_tokens + self.decoded


@dataclass(frozen=True)
class Traffic:
    """Requests in order of arrival, and how many are served at a time.

    Attributes
    ----------
    requests : tuple of Request
    concurrent : int
        Limit on requests served at once; the others wait.
    name : str
    bad_rows : tuple of str
        Rows of the file that were left out, each with its reason.
    """

    requests: tuple[Request, ...]
    concurrent: int = 16
    name: str = "traffic"
    bad_rows: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.requests:
            raise TrafficError(f"{self.name}: there is no request in it")
        if isinstance(self.concurrent, bool) or not isinstance(self.concurrent, int) or self.concurrent < 1:
            raise TrafficError(f"concurrent={self.concurrent!r}: serve at least one request at a time")
        times = [request.arrival_s for request in self.requests]
        if times != sorted(times):
            raise TrafficError(f"{self.name}: requests must stand in the order of their arrival")
        lengths: dict[str | None, int] = {}
        for request in self.requests:
            if lengths.setdefault(request.prefix, request.prefix_tokens) != request.prefix_tokens:
                raise TrafficError(f"{self.name}: prefix {request.prefix!r} has two lengths, one in {request}")

    def resampled(self, seed: int | str) -> Traffic:
        """A bootstrap resample: as many requests, drawn with replacement, each arriving when the one in its place did.

        Examples
        --------
        >>> traffic = long_cot(50)
        >>> drawn = traffic.resampled(1)
        >>> len(drawn), {one.output_tokens for one in drawn} < {one.output_tokens for one in traffic}
        (50, True)
        """
        uniform = random.Random(f"resample {seed}").random
        requests = [
            replace(self.requests[int(uniform() * len(self))], number=number, arrival_s=one.arrival_s)
            for number, one in enumerate(self)
        ]
        return replace(self, requests=tuple(requests), name=f"{self.name}, draw {seed}", bad_rows=())

    def __len__(self) -> int:
        return len(self.requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self.requests)

    def __str__(self) -> str:
        outputs = [request.output_tokens for request in self]
        prompts = [request.prompt_tokens for request in self]
        aborted = sum(request.aborted_after is not None for request in self)
        prefixes, seconds = len({request.prefix for request in self} - {None}), self.requests[-1].arrival_s
        text = (
            f"{self.name}: {len(self):,} requests, {self.concurrent} at a time, over {seconds:.0f} s; "
            f"prompts of {median(prompts):,.0f} tokens (median), outputs of {median(outputs):,.0f}, at most "
            f"{max(outputs):,}; {aborted} aborted, {prefixes} shared prefixes"
        )
        return text + "".join(f"\n  left out: {row}" for row in self.bad_rows)


class _Chance:
    """Draws from the one sequence that Python promises for a seed on every platform and version."""

    def __init__(self, seed: int | str) -> None:
        self.uniform = random.Random(f"traffic {seed}").random

    def log_normal(self, middle: float, sigma: float, least: int, most: int) -> int:
        """A whole number; rounded, so that the last bit of a platform's ``exp`` does not matter."""
        normal = NormalDist().inv_cdf(min(max(self.uniform(), 1e-12), 1 - 1e-12))
        return min(max(round(middle * math.exp(sigma * normal)), least), most)

    def waiting_s(self, rate: float) -> float:
        """Time to the next arrival of a Poisson stream, in whole microseconds."""
        return round(-math.log(1 - self.uniform()) / rate, 6)


def long_cot(
    n: int = 60, seed: int | str = 0, *, concurrent: int = 16, median_tokens: int = 3000, sigma: float = 0.6,
    most_tokens: int = 8000, prompt_tokens: int = 200, per_second: float | None = None, short_share: float = 0.0,
    abort_share: float = 0.0, prefixes: int = 0, prefix_tokens: int = 512,
) -> Traffic:  # fmt: skip
    """Long chains of thought: outputs of log-normal length with median 3,000 and at most 8,000 tokens.

    The same seed gives the same requests on every platform. Each property has draws of its own, so that switching one
    on leaves the others as they were.

    Parameters
    ----------
    n : int
        Requests.
    concurrent : int
        Served at a time.
    median_tokens, sigma, most_tokens
        Of the output: median, standard deviation of its logarithm, cap.
    prompt_tokens : int
        Median of the prompt's own part (log-normal with sigma 0.8, 16 to 4,096 tokens).
    per_second : float, optional
        Poisson arrivals at this rate; default: all are there from the beginning, so that a served request is at once
        replaced by the next.
    short_share : float
        Share of requests with answers of at most 200 tokens, which churn between the long ones.
    abort_share : float
        Share of requests whose client hangs up at a random token.
    prefixes, prefix_tokens : int
        Number of common prompts, each request beginning with one of them, and their length.

    Raises
    ------
    TrafficError
        A number out of its range.

    Examples
    --------
    >>> print(long_cot(seed=1))
    long CoT, seed 1: 60 requests, 16 at a time, over 0 s; prompts of ... tokens (median), outputs of ...
    """
    for name, value, low, high in (
        ("n", n, 1, math.inf), ("median_tokens", median_tokens, 1, most_tokens), ("sigma", sigma, 0, 10),
        ("prompt_tokens", prompt_tokens, 1, 4096), ("short_share", short_share, 0, 1),
        ("abort_share", abort_share, 0, 1), ("prefixes", prefixes, 0, math.inf),
        ("prefix_tokens", prefix_tokens, 1, math.inf),
    ):  # fmt: skip
        if not low <= value <= high:
            raise TrafficError(f"{name}={value!r}: from {low} to {high}")
    if per_second is not None and not per_second > 0:
        raise TrafficError(f"per_second={per_second!r}: a rate above 0, or None for all at once")
    names = ("output", "prompt", "arrival", "short", "abort", "prefix")
    output, prompt, arrival, short, abort, prefix = (_Chance(f"{seed} {name}") for name in names)
    requests, now = [], 0.0
    for number in range(n):
        tokens = output.log_normal(median_tokens, sigma, 1, most_tokens)
        if short.uniform() < short_share:
            tokens = 1 + int(short.uniform() * min(200, most_tokens))
        own = prompt.log_normal(prompt_tokens, 0.8, 16, 4096)
        which = f"prefix {int(prefix.uniform() * prefixes)}" if prefixes else None
        aborted = int(abort.uniform() * tokens) if abort.uniform() < abort_share else None
        shared = prefix_tokens if which else 0
        requests.append(Request(number, round(now, 6), own + shared, tokens, aborted, which, shared))
        now += arrival.waiting_s(per_second) if per_second else 0.0
    return Traffic(tuple(requests), concurrent, f"long CoT, seed {seed}")


def ordered(requests: Iterable[Request], concurrent: int, name: str, bad_rows: Iterable[str] = ()) -> Traffic:
    """Traffic from requests in any order, its clock at 0 when the first arrives and numbers in order of arrival."""
    sorted_ = sorted(requests, key=lambda request: request.arrival_s)
    begin = sorted_[0].arrival_s if sorted_ else 0.0
    fields = [{**vars(one), "number": number, "arrival_s": round(one.arrival_s - begin, 6)}
              for number, one in enumerate(sorted_)]  # fmt: skip
    return Traffic(tuple(Request(**one) for one in fields), concurrent, name, tuple(bad_rows))
