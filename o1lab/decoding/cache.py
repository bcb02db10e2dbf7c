"""Faults of the KV cache: entries rounded, quantised, or read without their scale.

All of them change an entry after the forward pass that wrote it, so what a pass reads of its own tokens is exact and
what later passes read of them is not: a prompt is attended to exactly, as in engines that prefill in full precision.
Each entry is rounded once. Without a cache nothing happens. With ``own=True`` entries are changed before anybody reads
them, as in engines that attend to what they have stored: then one pass over a text gives what decoding it gives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicLayer

from o1lab.decoding.tap import Call, Intervention, opened, plain
from o1lab.errors import DecodingError

FP8_MAX = 448.0
NAMES = ("cache", "past_key_values")
WHERE = ("decode", "all", "nowhere")


class _Store(Intervention):
    def __init__(self, change: Callable[[Tensor, bool], Tensor], own: bool = False) -> None:
        self.change, self.own = change, own
        self.written: set[int] = set()

    def query(self, call: Call) -> Tensor:
        if self.own and not call.tap.exact:
            self.store(call)
        return call.query

    def stored(self, call: Call) -> None:
        if not self.own:
            self.store(call)

    def store(self, call: Call) -> None:
        """Change the entries that this call wrote."""
        new = call.slots.new
        for entries in (call.key, call.value):
            if entries.requires_grad and torch.is_grad_enabled():
                raise DecodingError("a lossy cache has no gradient: decode under torch.no_grad()")
            entries.index_copy_(2, new, self.change(entries.index_select(2, new), call.decoding).to(entries.dtype))
        self.written.add(call.key.untyped_storage().data_ptr())

    def check(self, _: nn.Module, __: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """Forward hook: what attention was given, and was changed here, has to be what the cache keeps."""
        written, self.written = self.written, set()
        for layer in getattr(cache_of(kwargs, output), "layers", ()):
            if isinstance(layer, History) or not written:
                continue
            keys = getattr(layer, "keys", None)  # None where pages hold them
            if keys is None or keys.untyped_storage().data_ptr() not in written:
                raise DecodingError(f"a {type(layer).__name__} keeps copies of its entries: use a DynamicCache")


class History(DynamicLayer):
    """The tokens behind a cache, kept as one more layer of it: reordered, selected and cropped with the others.

    ``keys`` holds the token ids and ``values`` their position ids, LongTensors of shape (B, 1, T, 1).
    """

    refilled = 0
    """How many tokens the cache held when it was last computed afresh."""

    def add(self, ids: Tensor, places: Tensor) -> None:
        """One forward pass' ids and positions, both of shape (B, T)."""
        ids, places = (x[:, None, :, None].contiguous() for x in (ids, places))
        self.keys = ids if self.keys is None else torch.cat((self.keys, ids), 2)
        self.values = places if self.values is None else torch.cat((self.values, places), 2)
        self.is_initialized = True


def cache_of(kwargs: dict[str, Any], output: Any = None) -> Any:
    """The cache of a forward pass, from its arguments or else its output, as this version of transformers names it."""
    found = (holder.get(name) for holder in (kwargs, getattr(output, "__dict__", {})) for name in NAMES)
    return next((cache for cache in found if cache is not None), None)


@contextmanager
def _storing(model: Any, change: Callable[[Tensor, bool], Tensor], own: bool = False) -> Iterator[None]:
    model, store = plain(model), _Store(change, own)
    with opened(model, store):
        hook = model.register_forward_hook(store.check, with_kwargs=True)
        try:
            yield
        finally:
            hook.remove()


@contextmanager
def round_kv(model: Any, dtype: torch.dtype, *, own: bool = False) -> Iterator[None]:
    """Cached keys and values are rounded to ``dtype`` once, and read back in the model's own dtype.

    Parameters
    ----------
    model
        A transformers decoder, or what :func:`o1lab.models.load` returns.
    dtype
        ``torch.float16`` or ``torch.bfloat16``; what is too large for fp16 becomes infinite. With the model's own dtype
        every bit stays.
    own
        Whether a pass reads its own tokens rounded, too.

    Notes
    -----
    Source: the article, § 1, which blames accumulated fp16 rounding of keys and values beyond 96 steps. An entry is
    rounded once and attention averages entries, so nothing accumulates in the cache itself; it does in a cache that
    rounds its entries again and again (https://github.com/osaurus-ai/osaurus/pull/998).

    Examples
    --------
    >>> import torch, o1lab.models
    >>> model = o1lab.models.load("tiny", device="cpu")
    >>> with round_kv(model, torch.float16):
    ...     cache = model.model(torch.arange(1, 9)[None]).cache
    >>> keys = cache.layers[0].keys
    >>> torch.equal(keys, keys.half().float())
    True
    """
    if dtype not in (torch.float16, torch.bfloat16, torch.float32):
        raise DecodingError(f"dtype={dtype!r}: give torch.float16, torch.bfloat16 or torch.float32")
    with _storing(model, lambda new, _: new.to(dtype), own):
        yield


def quantise(x: Tensor, bits: int) -> Tensor:
    """``x`` after one trip through ``bits``-bit codes: one scale and offset per vector of the last axis, in fp32.

    Examples
    --------
    >>> quantise(torch.tensor([0.0, 0.4, 1.0]), bits=2)
    tensor([0.0000, 0.3333, 1.0000])
    """
    x = x.float()
    low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
    scale = (high - low) / (2**bits - 1)
    return ((x - low) / scale.where(scale > 0, 1)).round() * scale + low


@contextmanager
def quantise_kv(model: Any, bits: int, *, own: bool = False) -> Iterator[None]:
    """Cached keys and values go through ``bits``-bit codes once: asymmetric, one scale per token and head.

    Per token, not per channel: a token's codes then depend on nothing but the token, so a batch, its padding and the
    order of its rows change nothing. Keys have channels that are large in every token, which makes this the harder
    choice for keys at 4 bits and below (Liu et al. 2024, KIVI, arXiv 2402.02750, quantises keys per channel).

    Parameters
    ----------
    model
        A transformers decoder, or what :func:`o1lab.models.load` returns.
    bits
        2 to 8.
    own
        Whether a pass reads its own tokens quantised, too.

    Notes
    -----
    Sources: KIVI as above; *Quantization Hurts Reasoning?* (arXiv 2504.04823) for what each width costs.
    """
    if isinstance(bits, bool) or not isinstance(bits, int) or not 2 <= bits <= 8:
        raise DecodingError(f"bits={bits!r}: give a whole number from 2 to 8")
    with _storing(model, lambda new, _: quantise(new, bits), own):
        yield


@contextmanager
def missing_scale(model: Any, where: str = "decode", *, scale: float | None = None) -> Iterator[None]:
    """An fp8 (e4m3) cache whose scale does not arrive where entries are read: codes are taken for values.

    Parameters
    ----------
    model
        A transformers decoder, or what :func:`o1lab.models.load` returns.
    where
        ``"decode"``: lost for entries that single-token steps write, while the prompt's are right; ``"all"``: lost for
        every entry; ``"nowhere"``: the cure, a correct fp8 cache.
    scale
        The scale of every entry; by default each token and head has its own, its largest magnitude / 448.

    Notes
    -----
    Sources: https://github.com/NVIDIA/TensorRT-LLM/pull/16916 (the decode path got no scale: GSM8K 96.4 → 74.5, worse
    with length, prompts exonerated by capping the answer), https://github.com/vllm-project/vllm/pull/42580 and
    https://github.com/sgl-project/sglang/pull/28144 (a scale dropped on one path of several).
    """
    if where not in WHERE:
        raise DecodingError(f"where={where!r}: give one of {', '.join(map(repr, WHERE))}")
    if scale is not None and not (isinstance(scale, (int, float)) and 0 < scale < float("inf")):
        raise DecodingError(f"scale={scale!r}: give a finite number above 0, or None")

    def change(new: Tensor, decoding: bool) -> Tensor:
        new = new.float()
        unit = new.abs().amax(-1, keepdim=True).clamp_min(1e-12) / FP8_MAX if scale is None else torch.tensor(scale)
        codes = (new / unit).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn).float()
        lost = where == "all" or (where == "decode" and decoding)
        return codes if lost else codes * unit

    with _storing(model, change):
        yield
