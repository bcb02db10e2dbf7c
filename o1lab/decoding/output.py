"""Interventions behind the last layer: the head in fp32, and the article's two remedies that come after it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from o1lab.decoding.tap import plain, whole
from o1lab.errors import DecodingError

HOW = ("as written", "optimizer", "disabled")


@contextmanager
def fp32_head(model: Any) -> Iterator[None]:
    """The last matrix product in fp32: hidden state and head are widened before it, not the logits after it.

    That is where precision can still change a greedy token: 16-bit logits tie, and casting them later keeps the tie. On
    a model in fp32 every bit stays. Costs a second copy of the head, in fp32, while it is open.

    Notes
    -----
    Sources: https://github.com/vllm-project/vllm/pull/19592 (repeated and missing characters cured by an fp32 head),
    https://github.com/sgl-project/sglang/issues/33627 (bf16 logits change 141 of 5,120 greedy tokens, fp32 none).
    """
    model = plain(model)
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    weight = getattr(head, "weight", None)
    if weight is None or weight.ndim != 2 or not weight.is_floating_point():
        raise DecodingError(f"{type(model).__name__} has no linear head whose product could be taken in fp32")
    wide = weight.float()
    bias = None if getattr(head, "bias", None) is None else head.bias.float()
    before = head.__dict__.get("forward")
    head.forward = lambda hidden: nn.functional.linear(hidden.float(), wide, bias)
    try:
        yield
    finally:
        if before is None:
            del head.forward
        else:
            head.forward = before


@contextmanager
def fp32_softmax(model: Any) -> Iterator[None]:
    """The article's third remedy, as written: ``softmax(logits, dim=-1, dtype=torch.float32)`` on the final logits.

    ``.logits`` of the model's output are then probabilities, for greedy choice only: who samples from them takes a
    softmax of a softmax, and who reads entropies off them reads nonsense. The order of two logits is the order of their
    probabilities, so a greedy token can change only where two fp32 logits are so near that their probabilities tie.

    Notes
    -----
    Source: the article, § 1. What it does not touch is the product that made the logits: see :func:`fp32_head`.
    """
    model = plain(model)

    def change(_: nn.Module, __: Any, output: Any) -> Any:
        if getattr(output, "logits", None) is None:
            raise DecodingError(f"{type(model).__name__} gives no logits: use a causal LM, and no tuple output")
        output.logits = torch.nn.functional.softmax(output.logits, dim=-1, dtype=torch.float32)
        return output

    hook = model.register_forward_hook(change)
    try:
        yield
    finally:
        hook.remove()


@dataclass
class ScalerReport:
    """What became of the article's calibration step.

    Attributes
    ----------
    calls
        How often ``step`` was called.
    raised
        What it raised, each text once, in order.
    changed
        Names of parameters with other bits than before. Filled in when the context closes.
    """

    calls: int = 0
    raised: list[str] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)


@contextmanager
def grad_scaler_step(model: Any, every: int = 32, *, how: str = "as written") -> Iterator[ScalerReport]:
    """The article's first remedy, as written: ``torch.cuda.amp.GradScaler().step()`` every ``every`` forward passes.

    Written so, the call has no optimizer and raises; decoding goes on, and the report says what was raised and whether
    any weight changed. A scaler has no state that decoding reads.

    Parameters
    ----------
    model
        A transformers model, or what :func:`o1lab.models.load` returns.
    every
        Forward passes (decoding steps) between two calls, at least 1.
    how
        ``"as written"``; ``"optimizer"``: ``step(AdamW)`` of an enabled scaler; ``"disabled"``: the same, switched off.

    Notes
    -----
    Source: the article, § 1 ("gradient calibration in the inference loop").
    """
    if how not in HOW:
        raise DecodingError(f"how={how!r}: give one of {', '.join(map(repr, HOW))}")
    model, report, passes = plain(model), ScalerReport(), 0
    whole("every", every, 1)
    step = _step(model, how)
    before = {name: _bits(weight) for name, weight in model.named_parameters()}

    def count(*_: Any) -> None:
        nonlocal passes
        passes += 1
        if passes % every:
            return
        report.calls += 1
        try:
            step()
        except (TypeError, AssertionError, RuntimeError, ValueError) as error:
            text = f"{type(error).__name__}: {error}"
            if text not in report.raised:
                report.raised.append(text)

    hook = model.register_forward_hook(count)
    try:
        yield report
    finally:
        hook.remove()
        report.changed = [name for name, weight in model.named_parameters() if _bits(weight) != before[name]]


def _step(model: nn.Module, how: str) -> Callable[[], Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if how == "as written":
            return torch.cuda.amp.GradScaler().step
        weights = list(model.parameters())
        scaler = torch.amp.GradScaler(weights[0].device.type, enabled=how == "optimizer")
        optimizer = torch.optim.AdamW(weights)
    return lambda: scaler.step(optimizer)


def _bits(weight: Tensor) -> int:
    """The sum of a tensor's bit patterns as whole numbers: other bits, another sum (but for chance)."""
    kind = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[weight.element_size()]
    return int(weight.detach().contiguous().view(kind).sum(dtype=torch.int64))
