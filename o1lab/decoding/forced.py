"""Interventions beside each other on the same right chains, in one pass each: what would every one have decoded?

Given the right chain, the first wrong choice of a greedy decoder stands where one pass over the right chain has it, and
every later step can still be compared: how far the logits moved, and which choices changed. That holds for whatever
acts on a token alone (phases of RoPE, ``round_kv`` and ``quantise_kv`` with ``own=True``), not for what tells a prompt
from decoding (``missing_scale``).
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from o1lab.chains import Sample, render
from o1lab.decoding.tap import plain
from o1lab.errors import DecodingError
from o1lab.models import Model, batches, measure, reasoner
from o1lab.stats import Estimate, mean, proportion

Arms = Mapping[str, Callable[[], AbstractContextManager[Any]]]
EXACT = "exact"
"""Name of the arm without an intervention."""


@dataclass(frozen=True)
class Arm:
    """What one intervention does to n chains of N steps.

    Attributes
    ----------
    outcome : Survival
        Where each chain first goes wrong.
    changed : ndarray of int, shape (n, N)
        Tokens of the step that are chosen otherwise than by the exact arm, all steps before being right.
    shift : ndarray of float, shape (n, N)
        Root mean square of the logits' difference from the exact arm, over the step's tokens and the vocabulary.
    """

    outcome: measure.Survival
    changed: np.ndarray = field(repr=False)
    shift: np.ndarray = field(repr=False)

    def onset(self, step: int) -> Estimate:
        """Factor by which the shift is greater after ``step`` than up to it: mean of the chains' logarithms."""
        late, early = self.shift[:, step:].mean(1), self.shift[:, :step].mean(1)
        if not (step and late.size and (early > 0).all() and (late > 0).all()):
            raise DecodingError(f"no shift before or after step {step}: nothing to compare")
        logs = mean(np.log(late / early).tolist(), "1")
        return Estimate(math.exp(logs.value), math.exp(logs.low), math.exp(logs.high), logs.n, "×")


def first_faults(made: measure.Survival) -> list[int | None]:
    """Step of each chain's first fault as :mod:`o1lab.chains.survival` wants it; a wrong end alone is no fault.

    >>> first_faults(measure.Survival(2, np.array([True, False, False]), np.array([0, 2, 3]), np.array(["", "", ""])))
    [None, 2, None]
    """
    return [int(step) if 0 < step <= made.steps else None for step in made.first_fault]


@torch.inference_mode()
def compare(
    model: Any, variant: str, steps: int, n: int, arms: Arms | None = None, *, asked: int | None = None, seed: int = 0
) -> dict[str, Arm]:
    """Let the lab's own model work ``n`` chains exactly and under each of ``arms``.

    Parameters
    ----------
    model
        A reasoner, as :func:`o1lab.models.load` gives it or its network; fp32 makes the exact arm a reference.
    variant, steps, n, seed
        As in :func:`o1lab.models.measure.survival`; ``asked`` steps (default all) from a random entry on.
    arms : mapping of str to callable
        Each returns a context manager: ``{"fp16": lambda: round_kv(model, torch.float16, own=True)}``.

    Returns
    -------
    dict of str to Arm
        ``"exact"`` first.

    Examples
    --------
    >>> compare(reasoner.build("tiny"), "modular", 3, n=5)["exact"].shift.shape
    (5, 3)
    """
    network = plain(model)
    wide = 2 + batches.OPERAND_WIDTH[variant] + batches.STATE_WIDTH[variant]
    asked = steps if asked is None else asked
    most, device = sum(batches.tokens(variant, steps, asked)), network.device
    rows = max(1, measure.POSITIONS.get(device.type, 1 << 18) // most)
    found: dict[str, list[tuple[torch.Tensor, ...]]] = {}
    for group in range(math.ceil(n / measure.GROUP)):
        key = zlib.crc32(f"compare {variant} {steps} {asked} {seed} {group}".encode())
        batch = batches.make(variant, measure.GROUP, steps, torch.Generator(device).manual_seed(key), asked=asked)
        for ids in batch.ids[: n - group * measure.GROUP].split(rows):
            some, right = batches.Batch(variant, ids, batch.start, steps, asked), ids[:, batch.start :]
            exact = None
            for name, opened in {EXACT: nullcontext, **(arms or {})}.items():
                with opened():
                    logits = reasoner.logits(network, some)
                exact, chosen = logits if exact is None else exact, logits.argmax(-1)
                moved = (logits - exact).square().mean(-1)[:, :-1].unflatten(1, (asked, wide)).mean(-1).sqrt()
                other = (chosen != exact.argmax(-1))[:, :-1].unflatten(1, (asked, wide)).sum(-1)
                found.setdefault(name, []).append((chosen != right, other, moved))
    operand, state = batches.OPERAND_WIDTH[variant], batches.STATE_WIDTH[variant]
    parts = ["label", "operator", *["operand"] * operand, *["state"] * state]
    made = {name: [torch.cat(one).cpu().numpy() for one in zip(*rest, strict=True)] for name, rest in found.items()}
    return {name: Arm(measure.ended(wrong, asked, parts), *rest) for name, (wrong, *rest) in made.items()}


@dataclass(frozen=True)
class Changed:
    """Tokens of each text whose greedy choice an intervention changed, of how many; both of shape (n,)."""

    changed: np.ndarray
    tokens: np.ndarray

    @property
    def share(self) -> Estimate:
        """Share in %: the wider ends of Wilson's interval over tokens and of Student's over texts."""
        pooled = proportion(int(self.changed.sum()), int(self.tokens.sum()))
        low, high = pooled.low, pooled.high
        if self.tokens.size > 1:
            texts = mean((self.changed / self.tokens).tolist(), "1")
            low, high = max(0.0, min(low, texts.low)), max(high, texts.high)
        return Estimate(pooled.value, low, high, pooled.n, "1").scaled(100, "%")


@torch.inference_mode()
def language(model: Model, samples: Sequence[Sample], after: int, arms: Arms) -> dict[str, Changed]:
    """Greedy choices that change in the steps past ``after``, in language, given the right text so far.

    Returns
    -------
    dict of str to Changed
        ``"wrong"``: choices of the exact arm that differ from the right text; then each arm against the exact one.

    Raises
    ------
    DecodingError, ModelError
        A chain has no step past ``after``; a prompt does not fit the model's context.
    """
    rows: dict[str, list[tuple[int, int]]] = {}
    for sample in samples:
        if not 0 < after < len(sample.steps):
            raise DecodingError(f"after={after}: {sample.id} has {len(sample.steps)} steps")
        prompt, lines = (
            model.turn(render.prompt(sample, "language")),
            render.gold(sample, "language").splitlines(keepends=True),
        )
        late = "".join(lines[after : len(sample.steps)])
        tail = torch.tensor(model.tokenizer(late, add_special_tokens=False).input_ids, device=model.device)
        ids = torch.cat([model.encode(prompt + "".join(lines[:after])), tail[None]], 1)
        chosen: dict[str, torch.Tensor] = {}
        for name, opened in {EXACT: nullcontext, **arms}.items():
            with opened():
                logits = model.model(ids[:, :-1], use_cache=False, logits_to_keep=len(tail)).logits[0]
            chosen[name] = logits.argmax(-1)
        exact = chosen.pop(EXACT)
        for name, other in {"wrong": tail, **chosen}.items():
            rows.setdefault(name, []).append((int((other != exact).sum()), len(tail)))
    return {name: Changed(*np.array(counts).T) for name, counts in rows.items()}
