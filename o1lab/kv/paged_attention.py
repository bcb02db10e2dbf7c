"""``attn_implementation="o1lab_paged"``: transformers models whose attention reads a :class:`PagedCache`'s pages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from o1lab.attention import PagedKV, attend
from o1lab.errors import CacheError

NAME = "o1lab_paged"
UNKNOWN = ("softcap", "s_aux", "position_bias")
"""What some models ask of attention and paged attention does not do."""


@dataclass(frozen=True)
class Step:
    """What the cache hands to attention: a layer's pages, and the new keys and values where there are no others."""

    kv: PagedKV
    first: tuple[Tensor, Tensor] | None


def paged_attention(
    module: Any, query: Tensor, key: Step, value: Step, attention_mask: Tensor | None, scaling: float | None = None,
    dropout: float = 0.0, **kwargs: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """What transformers calls for each layer: query (B, Hq, S, D) → (B, S, Hq, D)."""
    if not isinstance(key, (Step, PagedKV)):
        raise CacheError(f"{NAME} reads pages: call the model with past_key_values=PagedCache(model.config, pool), or "
                         f'go back with model.set_attn_implementation("sdpa")')  # fmt: skip
    asked = [name for name in UNKNOWN if kwargs.get(name) is not None] + (["dropout"] if dropout else [])
    if asked or (attention_mask is not None and attention_mask.dim() != 2):
        shape = None if attention_mask is None else tuple(attention_mask.shape)
        raise CacheError(f"{NAME} takes no {', '.join(asked) or f'mask of shape {shape}'}: use sdpa or eager")
    if isinstance(key, PagedKV):  # a compiled step
        given = (key.pages, key.block_table, key.lengths, scaling)
        return torch.ops.o1lab.decode(query[:, :, 0], *given)[:, None], None
    if key.first is not None:
        mask = attention_mask
        if mask is not None:
            square = torch.ones(2 * query.shape[2:3], dtype=torch.bool, device=query.device).tril()
            mask = square & (mask[:, None, None] | torch.eye(len(square), dtype=torch.bool, device=query.device))
        options = {"attn_mask": mask, "is_causal": mask is None, "scale": scaling}
        grouped = query.shape[1] != key.first[0].shape[1]
        out = scaled_dot_product_attention(query, *key.first, enable_gqa=grouped, **options)
        return out.transpose(1, 2).contiguous(), None
    bias = None
    if attention_mask is not None:
        capacity = key.kv.block_table.shape[1] * key.kv.pages.shape[2]
        hidden = pad(~attention_mask, (0, capacity - attention_mask.shape[1]))
        bias = torch.zeros(hidden.shape, device=query.device).masked_fill_(hidden, float("-inf"))
    return attend(query, key.kv, scale=scaling, bias=bias), None


def padding(
    batch_size: int, q_length: int, kv_length: int, *args: Any, attention_mask: Tensor | None = None, **kwargs: Any
) -> Tensor | None:  # fmt: skip
    """The mask that :func:`paged_attention` gets: (B, kv_length), False at padding, or None where there is none.

    One token at a time on a GPU the mask is passed on unread, as reading it would wait for the device.
    """
    if kwargs.get("use_vmap"):
        raise CacheError(f"{NAME} takes padding masks only, not functions of positions: use sdpa or eager")
    if attention_mask is None:
        return None
    mask = attention_mask[:, :kv_length].bool()
    if (q_length > 1 or mask.device.type == "cpu") and mask.all():
        return None
    return mask


def register() -> str:
    """Make the implementation known to transformers; returns its name, for ``model.set_attn_implementation``.

    Examples
    --------
    >>> register()
    'o1lab_paged'
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, paged_attention)
    AttentionMaskInterface.register(NAME, padding)
    return NAME
