"""One token at a time for a whole model with a :class:`PagedCache`; on CUDA the step is captured in a graph, once."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor

from o1lab.errors import CacheError
from o1lab.kv.paged_attention import register
from o1lab.kv.paged_cache import PagedCache


class DecodeLoop:
    """Greedy decoding of equally long prompts, or, with ``step(ids)``, of whatever tokens the caller chooses.

    Parameters
    ----------
    model : transformers causal language model
        Set to evaluation and to paged attention, and stays so: ``model.set_attn_implementation("sdpa")`` before it is
        used without a paged cache again. Llama, Qwen, Mistral, GPT-NeoX and the like.
    cache : PagedCache
        With ``max_tokens``; its tables are read by the graph. ``reset`` it, or :meth:`prefill` again, for new requests
        of the same batch size.
    graph : bool, optional
        Capture the step; by default on CUDA.
    compiled : bool or dict
        Compile the step as one graph, see :mod:`o1lab.kv.compiled`; a dict holds arguments for ``torch.compile``. The
        first step then takes as long as the compiler does.
    kernels : bool or dict
        Run the step with kernels of our own, see :mod:`o1lab.kv.kernel_step`: Llama, Mistral and Qwen2 in float32 or
        bfloat16, up to 64 sequences. A dict holds arguments for ``KernelStep``.

    Attributes
    ----------
    ids : Tensor, shape (B, 1), int64
        The tokens that the next step reads.
    logits : Tensor, shape (B, vocabulary)
        Of the last step; the next one overwrites it.

    Examples
    --------
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> from o1lab.kv import pool_for
    >>> config = LlamaConfig(
    ...     vocab_size=99, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4
    ... )
    >>> model, pool = LlamaForCausalLM(config), pool_for(config, 64, device="cpu", dtype=torch.float32, page_tokens=16)
    >>> with PagedCache(model.config, pool, max_tokens=32) as cache:
    ...     loop = DecodeLoop(model, cache)
    ...     first = loop.prefill(torch.ones(2, 5, dtype=torch.long))
    ...     tuple(loop.step().shape), cache.get_seq_length()
    ((2,), 6)
    """

    def __init__(
        self, model: Any, cache: PagedCache, *, graph: bool | None = None, compiled: bool | dict[str, Any] = False,
        kernels: bool | dict[str, Any] = False,
    ) -> None:  # fmt: skip
        if not isinstance(cache, PagedCache) or not hasattr(model, "set_attn_implementation"):
            raise CacheError(f"a decode loop is of a transformers model and a PagedCache, not of a "
                             f"{type(model).__name__} and a {type(cache).__name__}")  # fmt: skip
        if not isinstance(compiled, (bool, dict)):
            raise CacheError(f"compiled={compiled!r}: True, False or a dict of arguments for torch.compile")
        if not isinstance(kernels, (bool, dict)) or (isinstance(kernels, dict) and set(kernels) - {"overlap"}):
            raise CacheError(f"kernels={kernels!r}: True, False or {{'overlap': …}}")
        if kernels is not False and compiled is not False:
            raise CacheError(f"kernels={kernels} and compiled={compiled}: a step is one or the other")
        on_cuda = cache.pool.arena.device.type == "cuda"
        if cache.max_tokens is None or (graph and not on_cuda):
            raise CacheError(f"max_tokens={cache.max_tokens} and graph={graph} on {cache.pool.arena.device}: a decode "
                             f"loop needs a cache with max_tokens, a graph also a CUDA device")  # fmt: skip
        self.model, self.cache, self.graph = model.eval(), cache, None
        self._capture = on_cuda if graph is None else graph
        self._fixed = {self.cache_name(model): cache, "use_cache": True}
        if "logits_to_keep" in inspect.signature(model.forward).parameters:
            self._fixed["logits_to_keep"] = 1
        model.set_attn_implementation(register())
        self.ids = self.logits = self._compiled = self._kernels = None
        if compiled is not False:
            from o1lab.kv.compiled import compiled_step

            how = {} if compiled is True else compiled
            self._compiled = compiled_step(model, cache, self.cache_name(model), **how)
        if kernels is not False:
            from o1lab.kv.kernel_step import KernelStep

            self._kernels = KernelStep(model, cache, **({} if kernels is True else kernels))

    @staticmethod
    def cache_name(model: Any) -> str:
        """What the model's forward calls its cache; it was ``past_key_values`` in older transformers."""
        names = inspect.signature(model.forward).parameters
        return "cache" if "cache" in names else "past_key_values"

    @torch.no_grad()
    def prefill(self, ids: Tensor) -> Tensor:
        """Read the prompts (B, S) into an emptied cache; returns the likeliest next tokens (B,)."""
        self._check(ids, "prompts", 2)
        self.cache.reset()
        self._follow(self._forward(ids, torch.arange(ids.shape[1], device=ids.device)[None]))
        return self.ids[:, 0].clone()

    def resume(self, ids: Tensor) -> None:
        """Go on from what the cache holds already (adopted pages, say); ``ids`` (B,) are the tokens to be read next."""
        self._check(ids, "ids", 1)
        self.ids = ids[:, None].clone() if self.ids is None else self.ids.copy_(ids[:, None])

    @torch.no_grad()
    def step(self, ids: Tensor | None = None) -> Tensor:
        """Read the tokens ``ids`` (B,), by default the likeliest ones, and return the likeliest next ones (B,).

        The result is a view that the next step overwrites. Nothing waits for the device.

        Raises
        ------
        PoolExhausted, CacheError
            No page for the token, more than ``max_tokens``, or ids that do not fit. Nothing was changed.

        Whatever else the model raises, the token is not counted, and its pages are written again by the next step.
        """
        if self.ids is None:
            raise CacheError("no prompt was read: prefill(prompts) first, or resume(ids) over a cache that holds some")
        if ids is not None:
            self._check(ids, "ids", 1, len(self.ids))
        self.cache.reserve(1)
        if ids is not None:
            self.ids.copy_(ids[:, None])
        if self._capture and self.graph is None:
            self._record()
        if self.graph is None:
            before = self.cache.length
            try:
                self._body()
            except BaseException:
                self.cache.crop(before - self.cache.length)
                raise
        else:
            if self._kernels is not None:
                self._kernels.check(named=False)  # a replay would read where the weights were
            self.graph.replay()
            self.cache.advance(1)
        return self.ids[:, 0]

    def _check(self, ids: Tensor, name: str, dims: int, batch: int | None = None) -> None:
        """Raise CacheError unless ``ids`` are token numbers of that shape, on the cache's device."""
        shape = "(B, S)" if dims == 2 else f"({batch or 'B'},)"
        fits = isinstance(ids, Tensor) and ids.dim() == dims and ids.numel() and not ids.is_floating_point()
        if not fits or ids.dtype == torch.bool or len(ids) != (batch or len(ids)):
            found = f"{tuple(ids.shape)} {ids.dtype}" if isinstance(ids, Tensor) else f"a {type(ids).__name__}"
            raise CacheError(f"{name} are {found}; they must be whole numbers of shape {shape}")
        if ids.device != self.cache.pool.arena.device:
            raise CacheError(f"{name} are on {ids.device}, the cache on {self.cache.pool.arena.device}")

    def _body(self) -> None:
        if self._kernels is not None:
            shape = (len(self.ids), self.model.config.vocab_size)
            if self.logits is None or self.logits.shape != shape:
                self.logits = self.model.lm_head.weight.new_empty(shape)
            self._kernels(self.ids, self.logits)
            self.cache.advance(1)
        elif self._compiled is None:
            self._follow(self._forward(self.ids, self.cache.lengths[:, None].long()))
        else:
            self._follow(*self._compiled(self.ids))
            self.cache.advance(1)

    def _record(self) -> None:
        """Run the step once, which compiles kernels, take it back, and capture it."""
        kept, stream = self.ids.clone(), torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._body()
            self.cache.crop(-1)
            self.ids.copy_(kept)
            self.cache.reserve(1)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with self.cache.recording(), torch.cuda.graph(graph, capture_error_mode="thread_local"):
            self._body()
        self.graph = graph

    def _forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        return self.model(input_ids=ids, position_ids=positions.expand_as(ids), **self._fixed).logits[:, -1]

    def _follow(self, logits: Tensor, best: Tensor | None = None) -> None:
        """Write logits and likeliest tokens where they stay: the graph reads one and writes both."""
        best = logits.argmax(-1, keepdim=True) if best is None else best
        if self.logits is None or self.logits.shape != logits.shape:
            self.logits, self.ids = logits.clone(), best.clone()
        else:
            self.logits.copy_(logits)
            self.ids.copy_(best)
