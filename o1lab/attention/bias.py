"""The article's positional bias, ``−α · log(|i − j| + 1) · w[step(j)]`` (§4.2), as a vector that a kernel adds.

In decode the query stands at one place i, so ``u[j] = log(i − j + 1) · w[step(j)]`` is one fp32 number per key, shared
by all heads and layers: 4 B to read beside 4,096 B of keys and values (8 heads × 128 × bf16). With ``w = 1`` it is
KERPLE's logarithmic kernel with r₂ = 1 (Chi et al., NeurIPS 2022); the weight by step is what the article adds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from o1lab.attention.checks import AttentionError

if TYPE_CHECKING:
    from torch import Tensor

ALPHA, BEFORE, INSIDE = 0.3, 0.8, 1.2
"""The article's figures: strength, weight before the chain starts, weight inside it."""


@dataclass(frozen=True)
class PositionBias:
    """``−alpha · log(i − j + 1) · weights[b, j]`` for key j and a query at position i ≥ j.

    Parameters
    ----------
    alpha : float
        Strength; 0 switches it off.
    weights : Tensor, shape (B, max_tokens), fp32
        ``w[step(j)]`` of each key; see :func:`chain_weights` and :func:`step_weights`.

    Examples
    --------
    >>> import torch
    >>> bias = PositionBias(1.0, torch.ones(1, 4))
    >>> [round(x, 3) for x in bias.vector(torch.tensor([3], dtype=torch.int32))[0].tolist()]
    [-1.099, -0.693, -0.0, -0.0]
    """

    alpha: float
    weights: Tensor

    def __post_init__(self) -> None:
        import torch

        if self.weights.dim() != 2 or self.weights.dtype != torch.float32:
            found = f"{tuple(self.weights.shape)} {self.weights.dtype}"
            raise AttentionError(f"weights must be (B, max_tokens) torch.float32, not {found}")

    def vector(self, lengths: Tensor, out: Tensor | None = None) -> Tensor:
        """The decode bias (B, max_tokens), for the query that is each sequence's last token; no host sync.

        ``out`` is a buffer to fill, such as the one that a captured graph reads.
        """
        import torch

        place = torch.arange(self.weights.shape[1], device=self.weights.device)
        distance = (lengths[:, None] - place[None, :]).clamp_min(1)  # i − j + 1 with i = length − 1
        added = torch.mul(torch.log(distance.float()), self.weights, out=out)
        return added.mul_(-self.alpha)

    def matrix(self, at: Tensor, keys: int) -> Tensor:
        """The prefill bias (B, S, keys) in float64 for queries at positions ``at`` (B, S)."""
        import torch

        place = torch.arange(keys, device=at.device)
        distance = (at[:, :, None] - place + 1).clamp_min(1)
        return -self.alpha * torch.log(distance.double()) * self.weights[:, None, :keys].double()

    def row(self, number: int) -> PositionBias:
        """The bias of one sequence."""
        return PositionBias(self.alpha, self.weights[number : number + 1])


def chain_weights(starts: Tensor, max_tokens: int, before: float = BEFORE, inside: float = INSIDE) -> Tensor:
    """The article's two weights: ``before`` up to the token at which the chain starts, ``inside`` from it on.

    Parameters
    ----------
    starts : Tensor, shape (B,), integer
        First token of each sequence's chain of thought.

    Examples
    --------
    >>> import torch
    >>> chain_weights(torch.tensor([1]), 3).tolist()[0] == torch.tensor([0.8, 1.2, 1.2]).tolist()
    True
    """
    import torch

    place = torch.arange(max_tokens, device=starts.device)
    return torch.where(place[None, :] < starts[:, None], before, inside).float()


def step_weights(steps: Tensor, table: Tensor) -> Tensor:
    """``w[step(j)]``: ``steps`` (B, max_tokens) holds each token's step number, ``table`` (n,) a weight per step.

    Examples
    --------
    >>> import torch
    >>> step_weights(torch.tensor([[0, 1, 1]]), torch.tensor([1.0, 0.5])).tolist()
    [[1.0, 0.5, 0.5]]
    """
    return table.float()[steps.long()]
