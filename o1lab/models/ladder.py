"""The curriculum of the reasoner: each kind of chain gets harder and longer as it is mastered, not by the clock.

What has to form first is the look-up by step id. Chains that are too short hardly need it, and in chains that are too
long the right key is one of too many. Results come after it: a few operands, rules or relations are learnt at once
and each new one soon after, all of them from the start are a long plateau. So a kind stays where it is until most of
its longest chains come out right; first its operands become more, then its chains longer.

>>> rungs(64)
((16, 0.15), (16, 0.3), (16, 0.6), (16, 1.0), (25, 1.0), (40, 1.0), (64, 1.0))
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

FIRST, FACTOR = 16, 1.6
"""The shortest longest chain, and the step from rung to rung."""
FEW = (0.15, 0.3, 0.6)
"""Shares of the operands, digits, rules, relations, entities in use on the lowest rungs (``batches.make``)."""
ROWS = 128
"""Chains that are looked at before a kind may climb."""
MORE = 3
"""How much more of each step's tokens a kind gets that is not mastered."""
EVERY = 8
"""Steps between two looks: a look waits for the device."""


def rungs(longest: int) -> tuple[tuple[int, float], ...]:
    """Longest N and difficulty, rung by rung."""
    made, n = [min(FIRST, longest)], float(FIRST)
    while made[-1] < longest:
        n *= FACTOR
        made.append(longest if n * math.sqrt(FACTOR) > longest else int(n))
    return (*((made[0], few) for few in FEW), *((n, 1.0) for n in made))


class Ladder:
    """Where each kind of chain stands.

    Parameters
    ----------
    pace : float
        Share of the longest chains that must be right before a kind climbs.
    """

    def __init__(self, kinds: Sequence[str], longest: int, pace: float, device: torch.device) -> None:
        self.kinds, self.pace, self.rungs = tuple(kinds), pace, rungs(longest)
        self.height = [0] * len(self.kinds)
        self._seen = torch.zeros(len(self.kinds), 2, dtype=torch.float64, device=device)

    def at(self, kind: str, late: bool = False) -> tuple[int, float]:
        """Longest N and difficulty of ``kind`` now; those of the last rung when it is ``late``."""
        return self.rungs[-1 if late else self.height[self.kinds.index(kind)]]

    def share(self, kind: str) -> float:
        """Share of a step's tokens for ``kind``: those below the top get :data:`MORE` times what the others get.

        >>> ladder = Ladder(("sums", "facts"), 8, 0.6, torch.device("cpu"))
        >>> ladder.height[0] = len(ladder.rungs) - 1
        >>> ladder.share("sums"), ladder.share("facts")
        (0.25, 0.75)
        """
        parts = [1 if height == len(self.rungs) - 1 else MORE for height in self.height]
        return parts[self.kinds.index(kind)] / sum(parts)

    def saw(self, kind: str, steps: int, right: torch.Tensor) -> None:
        """Count chains of N = ``steps``: ``right`` says for each whether all of it is; short ones do not count."""
        if steps >= 0.7 * self.at(kind)[0]:
            seen = self._seen[self.kinds.index(kind)]
            seen[0] += right.sum()
            seen[1] += right.numel()

    def climb(self) -> None:
        """Let each kind that is ready climb one rung."""
        for place, (right, rows) in enumerate(self._seen.tolist()):
            if rows >= ROWS:
                self._seen[place] = 0
                if right >= self.pace * rows:
                    self.height[place] = min(self.height[place] + 1, len(self.rungs) - 1)

    def state(self) -> dict[str, Any]:
        """As JSON."""
        return {"height": list(self.height), "seen": self._seen.tolist()}

    def restore(self, state: dict[str, Any]) -> None:
        """Go back to :meth:`state`."""
        self.height = list(state["height"])
        self._seen.copy_(torch.tensor(state["seen"], dtype=torch.float64))
