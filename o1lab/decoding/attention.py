"""Interventions on the scores: attention temperature, the article's bias, its dropout setting."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from o1lab.decoding.tap import Call, Intervention, Slots, opened, whole
from o1lab.errors import DecodingError


class _LogN(Intervention):
    def __init__(self, trained_length: int) -> None:
        self.trained = math.log(trained_length)

    def query(self, call: Call) -> Tensor:
        factor = (call.slots.visible.clamp_min(1).float().log() / self.trained).clamp_min(1.0)
        return (call.query.float() * factor[:, None, :, None]).to(call.query.dtype)


@contextmanager
def log_n(model: Any, trained_length: int) -> Iterator[None]:
    """Sharpen attention as the number of keys grows: q · max(1, ln S / ln S₀), S the keys this query may look at.

    A softmax over more keys spreads out; dividing by a temperature that falls with ln S undoes it. Nothing is fitted,
    and while S ≤ S₀ the factor is exactly 1 and every bit stays.

    Parameters
    ----------
    model
        A transformers decoder, or what :func:`o1lab.models.load` returns.
    trained_length
        S₀ in tokens: the longest sequence that training saw; at least 2.

    Notes
    -----
    Sources: Chiang & Cholak 2022 (log-length scaled attention), Nakanishi 2025 (Scalable-Softmax, arXiv 2501.19399),
    and arXiv 2501.08570 for its use without training.

    Examples
    --------
    >>> import torch, o1lab.models
    >>> model = o1lab.models.load("tiny", device="cpu")
    >>> ids = torch.arange(1, 33)[None]
    >>> before = model.model(ids).logits
    >>> with log_n(model, trained_length=16):
    ...     after = model.model(ids).logits
    >>> torch.equal(before[:, :16], after[:, :16]), torch.equal(before[:, 16:], after[:, 16:])
    (True, False)
    """
    with opened(model, _LogN(whole("trained_length", trained_length, 2))):
        yield


class _ArticleBias(Intervention):
    def __init__(self, alpha: float, chain_start: int | None, weights: tuple[float, float]) -> None:
        self.alpha, self.chain_start, self.weights = alpha, chain_start, weights
        self.prompt: Tensor | None = None
        self.last: tuple[Slots, Tensor] | None = None

    def bias(self, call: Call) -> Tensor | None:
        if not self.alpha:
            return None
        slots = call.positions()
        if self.last is None or self.last[0] is not slots:
            if not call.decoding and not call.tap.exact:
                self.prompt = slots.new[-1] + 1
            distance = (slots.queries.float()[:, :, None] - slots.keys.float()[:, None, :]).abs_()
            bias = distance.add_(1).log_().mul_(-self.alpha * self.weight(slots)[:, None, :])
            self.last = (slots, bias[:, None])
        return self.last[1]

    def weight(self, slots: Slots) -> Tensor:
        """w of every key, shape (B or 1, T_k)."""
        before, inside = self.weights
        if self.chain_start is not None:
            chain = slots.keys >= self.chain_start
        elif self.prompt is None:
            raise DecodingError("the prompt was read before article_bias was opened: give chain_start")
        else:
            chain = (torch.arange(slots.shape[1], device=slots.device) >= self.prompt)[None]
        return torch.where(chain, inside, before).float()


@contextmanager
def article_bias(
    model: Any, alpha: float = 0.3, *, chain_start: int | None = None, weights: tuple[float, float] = (0.8, 1.2)
) -> Iterator[None]:
    """The article's positional bias, as written: add −α · log(|i−j| + 1) · w[step(j)] to the score of query i, key j.

    Its code gives w to the key: 0.8 before the chain of thought starts, 1.2 inside it. A weight of attention is thereby
    multiplied by (distance + 1)^(−αw), a recency bias that a model was not trained with.

    Parameters
    ----------
    model
        A transformers decoder, or what :func:`o1lab.models.load` returns.
    alpha
        α, 0 or more. With 0 nothing is added and every bit stays.
    chain_start
        The token position (padding not counted) where the chain starts; by default the end of the prompt, that is of
        the last forward pass of more than one token (or of the first token, where a prompt has only one).
    weights
        w before and inside the chain.

    Notes
    -----
    Source: the article, § 4.2 (α = 0.3). The same shape with learnt numbers is Chi et al. 2022 (KERPLE, logarithmic).
    """
    numbers = (alpha, *weights) if isinstance(weights, (tuple, list)) and len(weights) == 2 else (math.nan,)
    if not all(isinstance(number, (int, float)) and math.isfinite(number) and number >= 0 for number in numbers):
        raise DecodingError(f"alpha={alpha!r}, weights={weights!r}: give finite numbers of 0 or more, two weights")
    if chain_start is not None:
        whole("chain_start", chain_start, 0)
    with opened(model, _ArticleBias(float(alpha), chain_start, (float(weights[0]), float(weights[1])))):
        yield


class _NoDropout(Intervention):
    def options(self, call: Call) -> None:
        call.options["dropout"] = 0.0
        call.options["o1lab_base"] = "sdpa"


@contextmanager
def dropout_zero(model: Any) -> Iterator[None]:
    """The article's second remedy, as written: ``scaled_dot_product_attention`` with ``dropout_p=0.0`` forced.

    0.0 is what transformers passes in eval mode anyway, so on an SDPA model in eval mode every bit stays. A model in
    eager attention runs in SDPA while this is open, which is the other half of the sentence.

    Notes
    -----
    Source: the article, § 1. What is true near it: SDPA itself knows no eval mode and drops whatever it is told to
    (https://github.com/pytorch/pytorch/issues/124464), so code that passes a constant has a real bug.
    """
    with opened(model, _NoDropout()):
        yield
