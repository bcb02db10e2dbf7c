"""A decode step of Llama-like models in seven kernels a layer: ``DecodeLoop(model, cache, kernels=True)``.

A layer is: norm with Q, K and V in one product; rotation and append; attention over the pages, and the merge of its
splits; output product and residual sum; norm with gate, up and SiLU in one product; down product and residual sum. What
the compiler launches between the products is inside them (:mod:`o1lab.kv.products`), and on compute capability 9.0 each
kernel asks for its weights while the one before it still runs.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM
from transformers.activations import ACT2FN

from o1lab.attention import launch, paged_decode, splits, workspace
from o1lab.attention.checks import Problem
from o1lab.errors import CacheError
from o1lab.kv.compiled import SIBLINGS, Joined
from o1lab.kv.paged_cache import PagedCache
from o1lab.kv.products import MOST_ROWS, Cuts, Scratch, cuts_on, product, rotate

MODELS = (LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM)
STILL = ("default", "linear", "llama3", "yarn")
"""Kinds of rotary positions whose angles do not change with the length."""


def unsupported(model: Any, cache: PagedCache) -> str:
    """Why :class:`KernelStep` does not run this model, or an empty string.

    Examples
    --------
    >>> from transformers import GPTNeoXConfig, GPTNeoXForCausalLM
    >>> tiny = GPTNeoXConfig(
    ...     vocab_size=9, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1
    ... )
    >>> unsupported(GPTNeoXForCausalLM(tiny), None)
    'GPTNeoXForCausalLM is none of LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM'
    """
    if type(model) not in MODELS:
        return f"{type(model).__name__} is none of {', '.join(one.__name__ for one in MODELS)}"
    config = model.config
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    if rope.get("rope_type", "default") not in STILL:
        return f"rotary positions of type {rope['rope_type']!r} change with the length"
    if config.hidden_act not in ("silu", "swish"):
        return f"hidden_act is {config.hidden_act!r}, not 'silu'"
    windows = getattr(config, "layer_types", None) or []
    if any(kind != "full_attention" for kind in windows) or (
        not windows and getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True)
    ):
        return "some layers see a window of tokens only"
    if cache.dtype == torch.int8:
        return "pages of int8"
    weights = list(model.parameters())
    kinds = {(weight.dtype, weight.device) for weight in weights}
    if len(kinds) > 1 or weights[0].dtype not in (torch.float32, torch.bfloat16):
        return f"weights are of {sorted(map(str, kinds))}: one device, float32 or bfloat16"
    if odd := _altered(model):
        return f"{odd} has hooks, a forward of its own, or another class than the model gave it"
    for layer in model.model.layers:
        if len({getattr(layer.self_attn, name).bias is None for name in SIBLINGS[0]}) > 1:
            return "a bias in some of Q, K and V only"
    others = [module for name, module in model.named_modules() if name.rpartition(".")[2] not in SIBLINGS[0]]
    biased = any(isinstance(module, nn.Linear) and module.bias is not None for module in others)
    return "a bias outside of Q, K and V" if biased else ""


def _altered(model: Any) -> str:
    """The first module that the step would not call and whose work is not the model's own, or an empty string.

    Hooks by which transformers collects hidden states do nothing here and stay where they were once asked for.
    """
    home, plain = type(model).__module__, (nn.Linear, nn.ModuleList, type(ACT2FN["silu"]))
    for name, module in model.named_modules():
        if name in ("model.embed_tokens", "model.rotary_emb"):  # these are called
            continue
        hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
        hooks = [hook for hook in hooks if getattr(hook, "__module__", "") != "transformers.utils.output_capturing"]
        own = type(module).__module__ == home or type(module) in plain
        if not own or hooks or "forward" in vars(module):
            return f"{name or 'the model'} ({type(module).__name__})"
    return ""


@dataclass(frozen=True)
class _Product:
    """One product of the step with its fixed buffers."""

    weight: Tensor
    out: Tensor | None
    shape: Cuts
    scratch: Scratch
    options: dict[str, Any]

    def __call__(self, x: Tensor, residual: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        out = self.out if out is None else out
        return product(
            x, self.weight, residual=residual, out=out, shape=self.shape, scratch=self.scratch, **self.options
        )


class KernelStep:
    """A function that reads token ids (B, 1), writes logits (B, vocabulary), and the likeliest tokens over the ids.

    It counts and writes one token, on the device only. Call ``cache.reserve(1)`` before and ``cache.advance(1)`` after.
    Q, K and V become parts of one tensor, gate and up of another: the weights keep their names and take no more memory.
    New values may be copied into them. A hook put on later is not called.

    Parameters
    ----------
    overlap : bool, optional
        Launch each kernel while the one before still runs; by default where the device can (compute capability 9.0).

    Raises
    ------
    CacheError
        A model or cache that it does not run (:func:`unsupported` says why), more than 64 sequences on a GPU, weights
        that were moved or replaced since. Replays of a graph see only the moved ones, and keep reading the replaced.
    """

    def __init__(self, model: Any, cache: PagedCache, overlap: bool | None = None) -> None:
        if reason := unsupported(model, cache):
            raise CacheError(f"kernels=True does not run this model: {reason}; compiled=True may")
        device = model.lm_head.weight.device
        able = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
        if overlap and not able:
            raise CacheError(f"overlap=True on {device}: programmatic launches need compute capability 9.0")
        self.model, self.cache, self.overlap = model, cache, able if overlap is None else overlap
        self._joined = [_whole(layer) for layer in model.model.layers]
        self._weights = list(model.parameters())
        self._places = [weight.data_ptr() for weight in self._weights]
        self._made: dict[int, Any] = {}
        self._angles: tuple[Tensor, Tensor] | None = None

    def __call__(self, ids: Tensor, logits: Tensor) -> None:
        """One step; ``logits`` and ``ids`` are written last, with nothing between that could fail."""
        self.check()
        model, cache, rows = self.model, self.cache, len(ids)
        if rows != cache.batch_size:
            raise CacheError(f"the cache holds {cache.batch_size} sequences and is given {rows}: reset or select first")
        if rows not in self._made:
            self._made[rows] = self._make(rows)
        layers, last, attend, queries = self._made[rows]
        cosines, sines = self._turns()
        lengths, heads = cache.lengths, model.config.num_attention_heads
        lengths.add_(1)
        hidden = model.model.embed_tokens(ids[:, 0])
        for index, (qkv, output, gated, down) in enumerate(layers):
            kv = cache.paged(model.model.layers[index].self_attn.layer_idx)
            given = (kv.pages, kv.block_table, lengths)
            rotate(qkv(hidden), cosines, sines, *given, heads, out=queries, overlap=self.overlap)
            mixed = attend(queries, *given, scale=model.model.layers[index].self_attn.scaling)
            hidden = output(mixed.view(rows, -1), hidden)
            hidden = down(gated(hidden), hidden)
        torch.argmax(last(hidden, out=logits), -1, keepdim=True, out=ids)

    def check(self, *, named: bool = True) -> None:
        """CacheError if a weight was moved, or, if ``named``, another parameter stands where it was: that is slower."""
        weights = list(self.model.parameters()) if named else self._weights
        if [weight.data_ptr() for weight in weights] != self._places:
            raise CacheError("a weight was moved or replaced since this loop was made: make another one")

    def _turns(self) -> tuple[Tensor, Tensor]:
        """Cosines and sines by position, as the model's own embedding makes them."""
        if self._angles is None:
            like = self.model.lm_head.weight
            places = torch.arange(self.cache.max_tokens, device=like.device)[None]
            both = self.model.model.rotary_emb(like[:1, None], places)
            self._angles = tuple(each[0].contiguous() for each in both)
        return self._angles

    def _make(self, rows: int) -> tuple[Any, ...]:
        """The products with their buffers for ``rows`` sequences; layers share what they leave for the next kernel."""
        model, like = self.model, self.model.lm_head.weight
        device = like.device
        if device.type == "cuda" and rows > MOST_ROWS:
            raise CacheError(f"{rows} sequences: kernels=True takes at most {MOST_ROWS} on a GPU; compiled=True more")
        buffers: dict[str, Tensor] = {}

        def one(
            weight: Tensor, norm: Any = None, gated: bool = False, bias: Tensor | None = None, kind: str = ""
        ) -> _Product:  # fmt: skip
            columns, inner = len(weight) // (2 if gated else 1), weight.shape[1]
            shape = cuts_on(device, columns, inner, rows, gated, weight.element_size(), norm is not None)
            if kind and kind not in buffers:
                buffers[kind] = like.new_empty(rows, columns)
            scratch = Scratch.make(columns, rows, gated, shape, device)
            options: dict[str, Any] = {"gated": gated, "bias": bias, "overlap": self.overlap}
            if norm is not None:
                options |= {"gain": norm.weight, "epsilon": norm.variance_epsilon}
            return _Product(weight, buffers.get(kind), shape, scratch, options)

        layers = []
        for layer, (qkv, bias, gate_up) in zip(model.model.layers, self._joined, strict=True):
            layers.append(
                (
                    one(qkv, layer.input_layernorm, bias=bias, kind="qkv"),
                    one(layer.self_attn.o_proj.weight, kind="middle"),
                    one(gate_up, layer.post_attention_layernorm, gated=True, kind="mlp"),
                    one(layer.mlp.down_proj.weight, kind="end"),
                )
            )
        return layers, one(like, model.model.norm), *self._attention(rows)

    def _attention(self, rows: int) -> tuple[Any, Tensor]:
        """Attention of one token over pages, and the buffer that its queries come in."""
        cache, config = self.cache, self.model.config
        kv = cache.paged(0)
        queries = kv.pages.new_empty(rows, config.num_attention_heads, kv.pages.shape[-1])
        pages, table, body = kv.pages, kv.block_table, "auto" if launch.missing(queries.device) else "triton"
        sizes = Problem(rows, 1, queries.shape[1], pages.shape[3], pages.shape[4], pages.shape[2], len(pages),
                        table.shape[1])  # fmt: skip
        if body == "triton" and (reason := splits.unsupported(sizes, queries, pages)):
            raise CacheError(f"kernels=True: {reason}")
        fixed = {"workspace": workspace(queries, pages, table), "out": torch.empty_like(queries)}
        return functools.partial(paged_decode, body=body, overlap=self.overlap, **fixed), queries


def _whole(layer: Any) -> tuple[Tensor, Tensor | None, Tensor]:
    """Q, K and V of a layer as one weight, their biases, and gate and up as one weight."""
    qkv, gate_up = (
        Joined([getattr(module, name) for name in names])
        for module, names in zip((layer.self_attn, layer.mlp), SIBLINGS, strict=True)
    )
    return qkv.weight, qkv.bias, gate_up.weight
