"""The two bodies made of plain torch: an exact one to measure against, and gather + SDPA, which is quick on a CPU.

Both serve decode and prefill: ``q`` is (B, Hq, S, D), and the S queries of a sequence are its last S tokens. A query
before the sequence's start, or one that every key is hidden from, gets zeros.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from o1lab.attention.bias import PositionBias
from o1lab.attention.checks import Problem
from o1lab.attention.pages import gather

if TYPE_CHECKING:
    from torch import Tensor


def positions(lengths: Tensor, queries: int) -> Tensor:
    """Position of each query in its sequence, (B, S): the last query stands at ``length − 1``.

    Examples
    --------
    >>> import torch
    >>> positions(torch.tensor([5, 1]), 2).tolist()
    [[3, 4], [-1, 0]]
    """
    import torch

    return lengths.long()[:, None] - queries + torch.arange(queries, device=lengths.device)[None, :]


def hidden(at: Tensor, keys: int, bias: Tensor | PositionBias | None, dtype: object) -> Tensor:
    """What is added to the scores: the bias, and −inf at keys after the query; (B, S, keys)."""
    import torch

    place = torch.arange(keys, device=at.device)
    if isinstance(bias, PositionBias):
        added = bias.matrix(at, keys).to(dtype)
    elif bias is not None:
        added = bias[:, None, :keys].to(dtype).expand(-1, at.shape[1], -1)
    else:
        added = torch.zeros((), dtype=dtype, device=at.device)
    return added.masked_fill(place > at[:, :, None], float("-inf"))


def exact(
    q: Tensor, pages: Tensor, block_table: Tensor, lengths: Tensor, sizes: Problem, scale: float,
    bias: Tensor | PositionBias | None = None, scales: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Attention in float64, step by step: gather, scores, softmax, sum. (B, Hq, S, D) in float64."""
    import torch

    keys, values = gather(pages, block_table, sizes, torch.float64, scales)
    live = torch.arange(sizes.capacity, device=q.device)[None, :] < lengths[:, None]
    keys, values = (part.masked_fill(~live[:, :, None, None], 0) for part in (keys, values))
    queries = q.double().unflatten(1, (sizes.kv_heads, sizes.group))
    added = hidden(positions(lengths, sizes.queries), sizes.capacity, bias, torch.float64)
    scores = torch.einsum("bhgsd,bnhd->bhgsn", queries, keys) * scale + added[:, None, None]
    top = scores.amax(-1, keepdim=True)
    weights = torch.exp(scores - top.masked_fill(top == float("-inf"), 0))
    total = weights.sum(-1, keepdim=True)
    out = torch.einsum("bhgsn,bnhd->bhgsd", weights / total.masked_fill(total == 0, 1), values)
    return out.flatten(1, 2)


def gathered(
    q: Tensor, pages: Tensor, block_table: Tensor, lengths: Tensor, sizes: Problem, scale: float,
    bias: Tensor | PositionBias | None = None, scales: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Copy the pages together and call SDPA. (B, Hq, S, D) in q's dtype.

    On a CPU, where lengths are at hand, one sequence after the other with exactly its tokens; elsewhere
    :func:`batched`. K and V are written and read once more than in a kernel that reads pages, so this is at most a
    third of its speed where memory decides.
    """
    import torch

    if q.device.type != "cpu":
        return batched(q, pages, block_table, lengths, sizes, scale, bias, scales)
    out = torch.zeros_like(q)
    for row, length in enumerate(lengths.tolist()):
        if length == 0:
            continue
        numbers = block_table[row : row + 1, : -(-length // sizes.page_tokens)]
        keys, values = (part[:, :length] for part in gather(pages, numbers, sizes, q.dtype, scales))
        own = bias.row(row) if isinstance(bias, PositionBias) else bias if bias is None else bias[row : row + 1]
        added = None
        if own is not None or sizes.queries > 1:
            added = hidden(positions(lengths[row : row + 1], sizes.queries), length, own, torch.float32)
        out[row : row + 1] = _sdpa(q[row : row + 1], keys, values, added, sizes, scale)
    return out


def batched(
    q: Tensor, pages: Tensor, block_table: Tensor, lengths: Tensor, sizes: Problem, scale: float,
    bias: Tensor | PositionBias | None = None, scales: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """As :func:`gathered`, the whole table at once under a mask: more to copy, but nothing waits for the device."""
    import torch

    keys, values = gather(pages, block_table, sizes, q.dtype, scales)
    dead = (torch.arange(sizes.capacity, device=q.device)[None, :] >= lengths[:, None])[:, :, None, None]
    added = hidden(positions(lengths, sizes.queries), sizes.capacity, bias, torch.float32)
    answer = _sdpa(q, keys.masked_fill_(dead, 0), values.masked_fill_(dead, 0), added, sizes, scale)
    nothing = (added == float("-inf")).all(-1)[:, None, :, None]  # some backends give NaN for such a row
    return answer.masked_fill_(nothing, 0)


def _sdpa(q: Tensor, keys: Tensor, values: Tensor, added: Tensor | None, sizes: Problem, scale: float) -> Tensor:
    """SDPA with the query heads of a KV head as its queries (one per sequence), or as a batch (several).

    For one query a CPU takes a half to a sixth of the time that ``enable_gqa`` takes.
    """
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    batch, queries = q.shape[0], sizes.queries
    keys, values = keys.transpose(1, 2), values.transpose(1, 2)
    if added is not None and (q.device.type != "cpu" or q.dtype == torch.float64):
        added = added.to(q.dtype)  # a CPU takes an fp32 mask beside bf16, which would round a bias
    if queries == 1:
        packed = q.reshape(batch, sizes.kv_heads, sizes.group, sizes.head_dim)
        mask = None if added is None else added[:, None]
        return scaled_dot_product_attention(packed, keys, values, attn_mask=mask, scale=scale).reshape(q.shape)
    each = (batch * sizes.kv_heads, sizes.group, -1, sizes.head_dim)
    keys, values = (part.flatten(0, 1)[:, None].expand(each) for part in (keys, values))
    mask = added.repeat_interleave(sizes.kv_heads, 0)[:, None]
    split = q.reshape(batch * sizes.kv_heads, sizes.group, queries, sizes.head_dim)
    return scaled_dot_product_attention(split, keys, values, attn_mask=mask, scale=scale).reshape(q.shape)
