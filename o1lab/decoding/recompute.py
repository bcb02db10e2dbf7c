"""The cache computed afresh every so many tokens: idle on an exact cache, a cure for one that went wrong."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer, QuantizedLayer

from o1lab.decoding.cache import History, cache_of
from o1lab.decoding.tap import Intervention, Tap, opened, plain, whole
from o1lab.errors import DecodingError

KNOWN = {"input_ids", "attention_mask", "position_ids", "cache_position", "labels", "logits_to_keep"}


class _Refill:
    def __init__(self, tap: Tap, every: int) -> None:
        self.tap, self.every = tap, every
        self.pending: tuple[Tensor, Tensor] | None = None
        self.caches: list[weakref.ref[Any]] = []
        self.count = 0
        body = tap.model.base_model
        self.name = "cache" if "cache" in inspect.signature(type(body).forward).parameters else "past_key_values"

    def before(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Refill the cache of this pass if it is due, and note the pass' tokens."""
        if self.tap.exact:
            return
        ids, mask = kwargs.get("input_ids", args[0] if args else None), kwargs.get("attention_mask")
        if ids is None or kwargs.get("inputs_embeds") is not None:
            raise DecodingError("recompute_kv needs input_ids: embeddings cannot be run again")
        more = [name for name, given in kwargs.items() if isinstance(given, Tensor) and name not in KNOWN]
        if len(args) > 1 or more:
            raise DecodingError(f"recompute_kv cannot run {', '.join(more) or 'positional arguments'} again")
        if mask is not None and mask.ndim != 2:
            raise DecodingError("recompute_kv needs a mask of one number per token")
        cache, history = cache_of(kwargs), None
        past = int(cache.get_seq_length()) if cache is not None else 0
        places = kwargs.get("position_ids")
        if places is None:
            places = torch.arange(past, past + ids.shape[1], device=ids.device)[None]
        self.pending = (ids, places.expand(len(ids), -1))
        if past:
            history = next((layer for layer in cache.layers if isinstance(layer, History)), None)
            if history is None or history.keys.shape[2] != past:
                raise DecodingError("the cache holds tokens from before recompute_kv was opened: start with none")
            if past - history.refilled >= self.every:
                self.refill(cache, history, mask)

    def after(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """Write the pass' tokens down beside its entries."""
        cache = cache_of(kwargs, output)
        if cache is None or self.pending is None or self.tap.exact:
            return
        history = next((layer for layer in cache.layers if isinstance(layer, History)), None)
        if history is None:
            history = History()
            cache.layers.append(history)
            self.caches.append(weakref.ref(cache))
        history.add(*self.pending)
        self.pending = None

    @torch.no_grad()
    def refill(self, cache: Any, history: History, mask: Tensor | None) -> None:
        """Run the past and this pass' own tokens, so that RoPE is what it will be in this pass; keep the past."""
        layers = [layer for layer in cache.layers if layer is not history]
        other = (DynamicSlidingWindowLayer, QuantizedLayer)
        if any(not isinstance(layer, DynamicLayer) or isinstance(layer, other) for layer in layers):
            raise DecodingError("recompute_kv needs a DynamicCache without sliding windows")
        fresh = DynamicCache()
        past, held = history.keys.shape[2], (history.keys, history.values)
        ids, places = (torch.cat((old[:, 0, :, 0], new), 1) for old, new in zip(held, self.pending, strict=True))
        self.tap.exact = True
        try:
            given = {"attention_mask": mask, "position_ids": places, "use_cache": True, self.name: fresh}
            self.tap.model.base_model(input_ids=ids, **given)
        finally:
            self.tap.exact = False
        for old, new in zip(layers, fresh.layers, strict=True):
            old.keys, old.values = new.keys[:, :, :past], new.values[:, :, :past]
        history.refilled = past
        self.count += 1

    def close(self) -> None:
        for cache in (held() for held in self.caches):
            if cache is not None:
                cache.layers[:] = [layer for layer in cache.layers if not isinstance(layer, History)]


@contextmanager
def recompute_kv(model: Any, every: int) -> Iterator[_Refill]:
    """Every ``every`` tokens the whole cache is computed afresh from the tokens, exactly, before decoding goes on.

    "Exactly" means with the lossy caches of this package switched off, in one pass as for a prompt. On an exact cache
    that writes what was there already (to the rounding of a matrix product of another shape). A lossy cache is cured up
    to the last refill; with ``every=1`` each step reads an exact one. It also cures entries whose rotation has gone
    stale, where RoPE's frequencies change in mid-text.

    Parameters
    ----------
    model
        A transformers decoder, or what :func:`o1lab.models.load` returns; decoded with a DynamicCache that was empty
        when this was opened.
    every
        Tokens between two refills, at least 1.

    Yields
    ------
    object
        ``.count``: how many refills there were.

    Notes
    -----
    Sources: ReSA (arXiv 2506.04108: a lossy cache made right every 32 to 128 tokens);
    https://github.com/huggingface/transformers/pull/33129 (stale rotations, cured by one recomputation).
    """
    whole("every", every, 1)
    model = plain(model)
    with opened(model, Intervention()) as tap:
        work = _Refill(tap, every)
        hooks = [
            model.register_forward_pre_hook(work.before, with_kwargs=True),
            model.register_forward_hook(work.after, with_kwargs=True),
        ]
        try:
            yield work
        finally:
            for hook in hooks:
                hook.remove()
            work.close()
