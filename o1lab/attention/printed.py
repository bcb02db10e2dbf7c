"""The article's fused kernel (§4.3) as printed, line by line, so that its answer can be judged."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def fused_qk_softmax_v(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """What ``fused_qk_softmax_v`` computes, one thread per number of the output. Shapes (n, D), n tokens, one head.

    The printed code, for thread ``tid`` of ``n · D``::

        for i in range(seq_len):
            s = dot(Q[tid], K[i * head_dim + tid % head_dim])
            sum += expf(s - max_s)          // max_s is never set; a comment names a block-level maximum
        O[tid] = expf(dot(Q[tid], V[tid])) / sum

    ``dot`` of two floats is their product, so no score is a sum over the head dimension; V enters an exponent and is
    never weighted. Here ``max_s`` is taken as the thread's own maximum over i, the kindest reading.
    """
    import torch

    scores = q[:, None, :] * k[None, :, :]  # (n, n, D): one product for each thread and i
    top = scores.amax(1)
    total = torch.exp(scores - top[:, None, :]).sum(1)
    return torch.exp(q * v) / total
