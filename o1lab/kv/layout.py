"""How a model's keys and values lie in the pages of a pool, and for which models that works.

A page holds ``page_tokens`` tokens of one layer as (2, T, Hkv, D): keys, then values. int8 pages carry their scales,
(2, T, Hkv) in fp32, behind the numbers. A *group* is one page for each layer: the same tokens through the whole model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from o1lab.attention.checks import Problem
from o1lab.attention.pages import gather, store
from o1lab.attention.splits import MOST_HEAD_DIM, blocks
from o1lab.errors import CacheError
from o1lab.kv.pool import PagePool

DTYPES = ("float32", "bfloat16", "float16", "int8")


def text_config(config: Any) -> Any:
    """The part of a transformers config that is about text; CacheError for what is no config."""
    if not hasattr(config, "get_text_config"):
        raise CacheError(f"a {type(config).__name__} is no transformers config: give model.config")
    return config.get_text_config(decoder=True)


@dataclass(frozen=True)
class Heads:
    """What a model stores per token: ``layers`` × ``kv_heads`` heads of ``head_dim`` numbers, twice."""

    layers: int
    kv_heads: int
    head_dim: int

    @classmethod
    def of(cls, config: Any, max_tokens: int | None = None) -> Heads:
        """Read a transformers config.

        Raises
        ------
        CacheError
            Not plain causal attention with equal heads in all layers, a head dimension that paged attention does not
            take, or a sliding window that ``max_tokens`` does not keep every token inside.
        """
        odd = ("is_encoder_decoder", "kv_lora_rank", "num_kv_shared_layers", "kv_sharing_modes")
        if any(getattr(config, name, None) for name in odd):
            raise CacheError(f"{type(config).__name__} keeps no plain keys and values in each layer; use its own cache")
        windows = {
            "full_attention": None,
            "sliding_attention": getattr(config, "sliding_window", None),
            "chunked_attention": getattr(config, "attention_chunk_size", None),
        }
        default = next((name for name, size in windows.items() if size), "full_attention")
        for kind in set(getattr(config, "layer_types", None) or [default]):
            if kind not in windows:
                raise CacheError(f"layers of type {kind!r} keep no pages of keys and values; use DynamicCache")
            if kind != "full_attention" and not (max_tokens and windows[kind] and max_tokens <= windows[kind]):
                raise CacheError(
                    f"{kind} with a window of {windows[kind]} tokens and max_tokens={max_tokens}: a paged cache keeps "
                    f"every token; give a max_tokens that the window holds, or use DynamicCache"
                )
        heads = config.num_attention_heads
        kv_heads = getattr(config, "num_key_value_heads", None) or heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        if not isinstance(kv_heads, int):
            raise CacheError(f"num_key_value_heads={kv_heads!r} differs between layers; use DynamicCache")
        if head_dim % 8 or not 8 <= head_dim <= MOST_HEAD_DIM:
            raise CacheError(f"head_dim={head_dim}: paged attention takes multiples of 8 up to {MOST_HEAD_DIM}")
        return cls(config.num_hidden_layers, kv_heads, head_dim)

    def token_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of one token in one layer, scales included."""
        if not isinstance(dtype, torch.dtype):
            raise CacheError(f"dtype={dtype!r}: give a torch dtype, such as torch.bfloat16")
        name = str(dtype).removeprefix("torch.")
        if name not in DTYPES:
            raise CacheError(f"dtype={dtype}: pages are {', '.join(DTYPES)}")
        return 2 * self.kv_heads * (self.head_dim * dtype.itemsize + (4 if name == "int8" else 0))

    def check(self, keys: torch.Tensor, values: torch.Tensor, pages: torch.Tensor) -> None:
        """Raise CacheError unless keys and values are (B, Hkv, S, D), without gradient, and ``pages`` can hold them."""
        for shape in (keys.shape, values.shape):
            if len(shape) != 4 or (shape[1], shape[3]) != (self.kv_heads, self.head_dim) or not shape[0] * shape[2]:
                raise CacheError(
                    f"keys or values are {tuple(shape)}; they must be (B, {self.kv_heads}, S, {self.head_dim})"
                )
        if keys.requires_grad and torch.is_grad_enabled():
            raise CacheError("pages keep no gradients: call the model under torch.no_grad()")
        if keys.device != pages.device:
            raise CacheError(f"keys are on {keys.device}, the pool on {pages.device}")
        if keys.dtype != values.dtype or pages.dtype not in (torch.int8, keys.dtype):
            raise CacheError(f"keys are {keys.dtype}, values {values.dtype}, pages {pages.dtype}")


@dataclass(frozen=True)
class Layout:
    """Pages of a pool as tensors: ``pages`` (P, 2, T, Hkv, D) and, for int8, ``scales`` (P, 2, T, Hkv), both views."""

    page_tokens: int
    pages: torch.Tensor
    scales: torch.Tensor | None

    @classmethod
    @torch.inference_mode(False)  # or the views could not be written outside it
    def of(cls, heads: Heads, pool: PagePool, dtype: torch.dtype) -> Layout:
        """As many tokens a page as fit, in whole blocks of the decode kernel where a page holds one.

        Raises
        ------
        CacheError
            A page does not hold one token, or does not start where ``dtype`` can be read.
        """
        each = heads.token_bytes(dtype)
        fit, step = pool.page_bytes // each, blocks(dtype.itemsize, 2, heads.head_dim).block_n
        if not fit:
            raise CacheError(
                f"page_bytes={pool.page_bytes} does not hold one token of a layer, {each} bytes of {dtype} "
                f"({heads.kv_heads} heads of {heads.head_dim}); make the pool with larger pages, see pool_for"
            )
        align = 4 if dtype == torch.int8 else dtype.itemsize
        if pool.page_bytes % align:
            raise CacheError(f"page_bytes={pool.page_bytes} is not a multiple of {align}, as pages of {dtype} need")
        while step > fit:
            step //= 2
        tokens = fit // step * step
        rows = pool.arena.view(pool.pages, pool.page_bytes)
        end = 2 * tokens * heads.kv_heads * heads.head_dim * dtype.itemsize
        pages = rows[:, :end].view(dtype).unflatten(1, (2, tokens, heads.kv_heads, heads.head_dim))
        if dtype != torch.int8:
            return cls(tokens, pages, None)
        scales = rows[:, end : end + 8 * tokens * heads.kv_heads].view(torch.float32)
        return cls(tokens, pages, scales.unflatten(1, (2, tokens, heads.kv_heads)))

    def store(self, numbers: torch.Tensor, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Write (B, Hkv, S, D) keys and values to the pages and slots (B, S) of their tokens."""
        store(self.pages, self.scales, numbers, slots, keys, values)

    def gathered(self, table: torch.Tensor, length: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values (B, Hkv, length, D) of the pages in a table (B, max_pages), in ``dtype``."""
        table = table[:, : -(-length // self.page_tokens)]
        count, _, tokens, kv_heads, head_dim = self.pages.shape
        sizes = Problem(len(table), 1, kv_heads, kv_heads, head_dim, tokens, count, table.shape[1])
        keys, values = gather(self.pages, table, sizes, dtype, self.scales)
        return keys[:, :length].transpose(1, 2), values[:, :length].transpose(1, 2)


def pool_for(
    config: Any, tokens: int, *, device: str | torch.device, dtype: torch.dtype, page_tokens: int = 128
) -> PagePool:  # fmt: skip
    """A pool whose pages hold exactly ``page_tokens`` tokens of this model, and ``tokens`` tokens in all.

    ``tokens`` counts those of all sequences, each rounded up to whole pages.

    Examples
    --------
    >>> import torch
    >>> from transformers import LlamaConfig
    >>> config = LlamaConfig(hidden_size=64, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=3)
    >>> pool_for(config, 1000, device="meta", dtype=torch.bfloat16)
    PagePool(24 pages of 16384 bytes on meta, 24 free)
    """
    for name, value in (("tokens", tokens), ("page_tokens", page_tokens)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise CacheError(f"{name}={value!r}: a whole number, at least 1")
    config = text_config(config)
    window = getattr(config, "sliding_window", None) or getattr(config, "attention_chunk_size", None)
    heads = Heads.of(config, window)
    size = page_tokens * heads.token_bytes(dtype)
    pages = heads.layers * -(-tokens // page_tokens)
    return PagePool(pages * size, device=device, page_bytes=size, chunk_bytes=256 * size)
