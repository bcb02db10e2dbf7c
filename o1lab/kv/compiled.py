"""A decode step as one compiled graph: ``torch.compile`` fuses what lies between the matrix products.

What a decode step spends beside reading weights and pages is launches: norms, rotations, activations and sums, each a
small kernel or several. :func:`compiled_step` compiles the model's forward pass with the paged operators inside it, and
:func:`joined` makes one product of those that read the same input (Q, K and V; gate and up).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import get_ident
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from o1lab.attention import ops  # noqa: F401 - registers the operators
from o1lab.errors import CacheError
from o1lab.kv.paged_cache import PagedCache

SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Linear layers of one module that read the same input, in the order in which the model calls them."""


class StepCache(Cache):
    """A :class:`PagedCache` as a compiled step sees it: tensors and two operators, no books and no checks.

    ``update`` hands back the :class:`~o1lab.attention.PagedKV` that paged attention then reads.
    """

    is_compileable = True

    def __init__(self, cache: PagedCache) -> None:
        self.layers, self.tables = [], cache.block_tables
        self.kv = [cache.paged(index) for index in range(len(cache))]

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        """Write the token's keys and values (B, Hkv, 1, D)."""
        kv = self.kv[layer_idx]
        torch.ops.o1lab.append(kv.pages, kv.block_table, kv.lengths, key_states, value_states)
        return kv, kv

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """0: how many tokens there are only the device knows."""
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """Of no use: there is no mask."""
        return query_length, 0


def compiled_step(model: Any, cache: PagedCache, name: str, **how: Any) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """A function from token ids (B, 1) to logits (B, vocabulary) and likeliest tokens (B, 1), on the device only.

    It counts and writes one token. Call ``cache.reserve(1)`` before and ``cache.advance(1)`` after. ``name`` is what
    the model calls its cache, ``how`` goes to ``torch.compile``. The first call compiles.

    Raises
    ------
    CacheError
        Pages of int8, or arguments that ``torch.compile`` does not take; or, at the first call, a forward pass that is
        not one graph for ``torch.compile``: nothing was counted then.
    """
    if cache.dtype == torch.int8:
        raise CacheError("a compiled step reads no int8 pages: make the cache without dtype, or compiled=False")

    def forward(ids: Tensor, lengths: Tensor, view: StepCache) -> tuple[Tensor, Tensor]:
        lengths.add_(1)
        places = (lengths - 1)[:, None].long()
        logits = model(input_ids=ids, position_ids=places, use_cache=True, **{name: view}).logits[:, -1]
        return logits, logits.argmax(-1, keepdim=True)

    # Dynamo counts recompilations by code object: with one of its own, no other loop's shapes count against this one.
    forward.__code__ = forward.__code__.replace()
    try:
        compiled = torch.compile(forward, fullgraph=True, dynamic=False, **how)
    except (TypeError, RuntimeError) as error:
        raise CacheError(f"compiled={how}: torch.compile takes no such arguments ({error})") from error
    view: StepCache | None = None

    def step(ids: Tensor) -> tuple[Tensor, Tensor]:
        nonlocal view
        if view is None or view.tables is not cache.block_tables:
            view = StepCache(cache)
        try:
            return compiled(ids, cache.lengths, view)
        except torch._dynamo.exc.Unsupported as error:
            reason = str(error).splitlines()[0]
            raise CacheError(
                f"{type(model).__name__} does not compile as one graph ({reason}): compiled=False"
            ) from error

    return step


def _stacked(tensors: list[Tensor]) -> Tensor:
    """The rows of all tensors in one; where they lie one after the other already, that memory itself."""
    first, at = tensors[0].detach(), tensors[0].storage_offset()
    for tensor in tensors:
        same = tensor.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        if not (same and tensor.is_contiguous() and tensor.storage_offset() == at):
            return torch.cat([tensor.detach() for tensor in tensors])
        at += tensor.numel()
    return first.as_strided((sum(map(len, tensors)), *first.shape[1:]), first.stride(), first.storage_offset())


class Joined:
    """Linear layers as one product: the first that is called computes all, the last one forgets them."""

    def __init__(self, layers: list[nn.Linear]) -> None:
        self.sizes = [layer.out_features for layer in layers]
        self.weight = _stacked([layer.weight for layer in layers])
        biases = [layer.bias for layer in layers]
        self.bias = None if biases[0] is None else _stacked(biases)
        self.parts: dict[int, tuple[Tensor, ...]] = {}  # by thread
        for layer, weight in zip(layers, self.weight.split(self.sizes), strict=True):
            layer.weight.data = weight  # the same memory, so that nothing is kept twice
        for layer, bias in zip(layers, () if self.bias is None else self.bias.split(self.sizes), strict=False):
            layer.bias.data = bias


class _Part:
    """What a layer's ``forward`` is inside :func:`joined`."""

    def __init__(self, whole: Joined, index: int, layer: nn.Linear) -> None:
        self.whole, self.index, self.layer, self.own = whole, index, layer, (layer.weight, layer.bias)

    def __call__(self, x: Tensor) -> Tensor:
        layer, whole = self.layer, self.whole
        if torch.is_grad_enabled():
            return nn.functional.linear(x, layer.weight, layer.bias)
        moved = layer.weight.dtype != whole.weight.dtype or layer.weight.device != whole.weight.device
        if moved or layer.weight is not self.own[0] or layer.bias is not self.own[1]:
            raise CacheError("a weight was moved or replaced inside joined(model): leave the block first")
        thread = 0 if torch.compiler.is_compiling() else get_ident()
        if self.index == 0:
            whole.parts[thread] = nn.functional.linear(x, whole.weight, whole.bias).split(whole.sizes, -1)
        elif thread not in whole.parts:
            raise CacheError(f"joined projections must be called in the order {SIBLINGS}: leave joined(model) first")
        last = self.index == len(whole.sizes) - 1
        return (whole.parts.pop(thread) if last else whole.parts[thread])[self.index]

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[[Tensor], Tensor]:
        return MethodType(nn.Linear.forward, copy.deepcopy(self.layer, memo))  # a copy of the model is not joined


def _joinable(layer: Any) -> bool:
    plain = type(layer) is nn.Linear and not layer._forward_hooks and not layer._forward_pre_hooks
    own = getattr(layer, "forward", None)  # replaced, if it is joined already or somebody else's
    return plain and getattr(own, "__func__", None) is nn.Linear.forward


@contextmanager
def joined(model: Any) -> Iterator[int]:
    """Inside, Q, K and V are one matrix product, gate and up another; gives how many products were saved.

    The weights move once, take no more memory and keep their names. Only where no gradients are asked for
    (``torch.no_grad``, ``generate``); with them the layers are what they were. For models that call the layers of
    :data:`SIBLINGS` in that order with the same input, as Llama, Qwen and Mistral do. Layers with another name, of
    another class (quantised, LoRA) or with hooks stay as they are, and a hook put on inside is not called. New values
    may be copied into the weights inside; weights that are moved or replaced raise CacheError at the next call.

    Examples
    --------
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> config = LlamaConfig(
    ...     vocab_size=99, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4
    ... )
    >>> with joined(LlamaForCausalLM(config)) as saved:
    ...     saved
    6
    """
    if not isinstance(model, nn.Module):
        raise CacheError(f"a {type(model).__name__} has no layers to join: give the transformers model")
    replaced: list[nn.Linear] = []
    saved = 0
    for module in list(model.modules()):
        for names in SIBLINGS:
            layers = [getattr(module, name, None) for name in names]
            if not all(map(_joinable, layers)):
                continue
            if len({(layer.in_features, layer.weight.dtype, layer.weight.device, layer.bias is None)
                    for layer in layers}) > 1:  # fmt: skip
                continue
            whole, saved = Joined(layers), saved + len(layers) - 1
            for index, layer in enumerate(layers):
                layer.forward = _Part(whole, index, layer)
            replaced += layers
    try:
        yield saved
    finally:
        for layer in replaced:
            layer.__dict__.pop("forward", None)
