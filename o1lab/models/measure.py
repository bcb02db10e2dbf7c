"""Whole-chain accuracy of the lab's own models without decoding: given the right chain, where is the first wrong token?

Up to its first fault a greedy decoder has produced the right chain, so one pass over the right chain finds the same
first fault as decoding, many times faster. The problems are not those of training, nor those of ``chains.make``.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from transformers import LlamaForCausalLM

from o1lab.errors import TrainingError
from o1lab.models import batches, reasoner
from o1lab.stats import Estimate, proportion

POSITIONS = {"cpu": 1 << 14}
"""Most tokens in a pass by device; elsewhere 2¹⁸."""
GROUP = 64
"""Problems that are drawn together, so that the first n are the same whatever n is."""


@dataclass(frozen=True)
class Survival:
    """How n chains of N steps ended.

    Attributes
    ----------
    steps : int
        N.
    right : ndarray of bool, shape (n,)
        Whether the whole chain is right.
    first_fault : ndarray of int, shape (n,)
        The first wrong step, from 1; N + 1 where only the end is wrong; 0 where nothing is.
    kind : ndarray of str, shape (n,)
        What is wrong first: ``label``, ``operator``, ``operand``, ``state``, ``end``, or "".
    """

    steps: int
    right: np.ndarray
    first_fault: np.ndarray
    kind: np.ndarray

    @property
    def estimate(self) -> Estimate:
        """Share of chains that are right, with its Wilson interval."""
        return proportion(int(self.right.sum()), self.right.size)

    @property
    def hazard(self) -> Estimate:
        """Faults for each step that was reached, with its Wilson interval."""
        made = self.hazard_between(1, self.steps)
        assert made is not None  # the first step is always reached
        return made

    def hazard_between(self, first: int, last: int) -> Estimate | None:
        """Faults in steps ``first`` to ``last`` for each of these steps that was reached; ``None`` if none was."""
        faulty = self.first_fault > 0
        reached = np.where(faulty, self.first_fault, self.steps)
        at_risk = np.clip(reached, first - 1, last) - (first - 1)
        faults = faulty & (self.first_fault >= first) & (self.first_fault <= last)
        return proportion(int(faults.sum()), int(at_risk.sum())) if at_risk.sum() else None


def ended(wrong: np.ndarray, steps: int, parts: Sequence[str]) -> Survival:
    """Outcomes from wrong tokens (n, tokens); ``parts`` names a step's tokens, what follows the last step is the end.

    >>> made = ended(np.array([[False, False, False, True], [False] * 4]), 2, ["operator", "state"])
    >>> made.first_fault.tolist(), made.kind.tolist()
    ([2, 0], ['state', ''])
    """
    right, place = ~wrong.any(1), wrong.argmax(1)
    step = place // len(parts)
    kinds = np.where(step >= steps, "end", np.array(parts)[place % len(parts)])
    return Survival(steps, right, np.where(right, 0, step + 1), np.where(right, "", kinds))


@torch.inference_mode()
def survival(model: LlamaForCausalLM, variant: str, steps: int, n: int, seed: int = 0) -> Survival:
    """Work ``n`` chains of ``steps`` steps of one variant, and say where each goes wrong first.

    Examples
    --------
    >>> survival(reasoner.build("tiny"), "modular", steps=3, n=5).right.tolist()
    [False, False, False, False, False]
    """
    if n < 1:
        raise TrainingError(f"n={n}: work at least one chain")
    most = sum(batches.tokens(variant, steps))
    if most > model.config.max_position_embeddings:
        raise TrainingError(f"{steps} steps of {variant} are {most} tokens: the model takes {reasoner.CONTEXT}")
    device, wrong = model.device, []
    rows = max(1, POSITIONS.get(device.type, 1 << 18) // most)
    for group in range(math.ceil(n / GROUP)):
        key = zlib.crc32(f"measure {variant} {steps} {seed} {group}".encode())
        batch = batches.make(variant, GROUP, steps, torch.Generator(device).manual_seed(key))
        for part in batch.ids[: n - group * GROUP].split(rows):
            some = batches.Batch(variant, part, batch.start, steps, steps)
            wrong.append(reasoner.logits(model, some).argmax(-1) != part[:, batch.start :])
    operand, state = batches.OPERAND_WIDTH[variant], batches.STATE_WIDTH[variant]
    parts = ["label", "operator", *["operand"] * operand, *["state"] * state]
    return ended(torch.cat(wrong).cpu().numpy(), steps, parts)
