"""Loops: a chain that says the same steps, or the same words, again and again until it is cut.

>>> cycle("the cat sat on a mat on a mat on a mat".split())
Cycle(start=3, period=3, times=3)
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple

from o1lab.chains.samples import Produced

TIMES = 3
"""Rounds from which on a repetition is a loop."""
LEAST_WORDS = 24
"""Words that a loop inside one unreadable step must fill: a few equal letters are a state, not a loop."""


class Cycle(NamedTuple):
    """From place ``start`` (0-based) to its end a sequence repeats its ``period`` items, ``times`` whole rounds."""

    start: int
    period: int
    times: int


def cycle(items: Sequence[Hashable], times: int = TIMES) -> Cycle | None:
    """The shortest period in which ``items`` repeat to their end, at least ``times`` rounds; ``None`` if they do not.

    Examples
    --------
    >>> cycle([1, 2, 3, 4, 3, 4, 3, 4, 3]), cycle([1, 2, 3, 2, 3])
    (Cycle(start=2, period=2, times=3), None)
    """
    for period in range(1, len(items) // times + 1):
        start = len(items) - period
        while start > 0 and items[start - 1] == items[start - 1 + period]:
            start -= 1
        if len(items) - start >= times * period:
            return Cycle(start, period, (len(items) - start) // period)
    return None


def of_steps(steps: Sequence[Produced], fault_step: int) -> Cycle | None:
    """The loop that sets in at step ``fault_step`` (1-based): its second round begins there, or words repeat in it.

    Steps are the same if their labels are, or, where one has none, their texts.
    """
    found = cycle([step.text if step.label is None else step.label for step in steps])
    if found is not None and found.start + found.period + 1 == fault_step:
        return found
    words = " ".join(step.text for step in steps[fault_step - 1 :]).split()
    found = cycle(words) if len(words) >= LEAST_WORDS else None
    return found if found is not None and len(words) - found.start >= LEAST_WORDS else None
