"""Where an intervention enters a model: an attention function of ours, put in front of the model's own one.

Transformers looks its attention function up by name in ``AttentionInterface`` on every call. While a context manager of
this package is open, the model's configs carry a name of ours, registered for the purpose; the function behind it asks
the open interventions in the order in which they were opened and then calls the model's own function. On exit the name
is taken back, so a model is never copied, subclassed or patched, and what no intervention touches stays bitwise equal.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from o1lab.errors import DecodingError

BASES = ("sdpa", "eager")
_numbers = itertools.count()
_taps: WeakKeyDictionary[nn.Module, Tap] = WeakKeyDictionary()


class Slots:
    """Which columns of the keys are the queries, and which token of its row each one is, padding not counted.

    Read off the mask that attention is given, so that left padding, a static cache and rows that were dropped or
    reordered between two calls need no book-keeping.

    Attributes
    ----------
    keys, queries
        Token positions from 0, LongTensors of shape (B or 1, T_k) and (B or 1, T_q); a padded place has -1 or repeats.
    new
        LongTensor of shape (T_q,): the columns of the keys that the queries wrote.
    visible
        How many keys each query may look at, LongTensor of shape (B or 1, T_q).
    """

    def __init__(self, mask: Tensor | None, queries: int, keys: int, device: torch.device) -> None:
        self.shape, self.device = (queries, keys), device
        self._mask = mask

    @cached_property
    def seen(self) -> Tensor:
        """Which key each query may look at, bool of shape (B or 1, T_q, T_k)."""
        if self._mask is None:
            return causal(*self.shape, self.device)[None]
        mask = self._mask[:, 0, :, : self.shape[1]]
        return mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2

    @cached_property
    def visible(self) -> Tensor:
        """How many keys each query may look at, (B or 1, T_q)."""
        return self.seen.sum(-1)

    @cached_property
    def keys(self) -> Tensor:
        """Position of each key among those that are no padding, (B or 1, T_k)."""
        return self.seen.any(-2).long().cumsum(-1) - 1

    @cached_property
    def new(self) -> Tensor:
        """Slot of each query's own key, (T_q,)."""
        queries, keys = self.shape
        if self._mask is None:
            return torch.arange(keys - 1 if queries == 1 else 0, keys if queries == 1 else queries, device=self.device)
        columns = torch.arange(keys, device=self.device)
        last = (columns * self.seen.any(-2).any(0)).max()
        return torch.arange(1 - queries, 1, device=self.device) + last

    @cached_property
    def queries(self) -> Tensor:
        """Position of each query, (B or 1, T_q)."""
        return self.keys.index_select(1, self.new)


def causal(queries: int, keys: int, device: torch.device) -> Tensor:
    """What transformers means where it gives no mask: all keys for one query, else the upper left triangle."""
    if queries == 1:
        return torch.ones(1, keys, dtype=torch.bool, device=device)
    return torch.ones(queries, keys, dtype=torch.bool, device=device).tril()


class Call:
    """One call of attention: the tensors as transformers gives them, keys and values already out of the cache."""

    def __init__(self, tap: Tap, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None,
                 options: dict[str, Any]) -> None:  # fmt: skip
        self.tap, self.module, self.query, self.key, self.value = tap, module, query, key, value
        self.mask, self.options = mask, options
        self.slots = tap.slots(mask, query.shape[2], key.shape[2], query.device)

    @property
    def decoding(self) -> bool:
        """One new token that looks back at others: the decode path of an engine."""
        return self.slots.shape[0] == 1 and self.slots.shape[1] > 1

    def positions(self) -> Slots:
        """The slots, for one who needs to know how far apart two tokens are."""
        window = getattr(self.module, "sliding_window", None)
        if window and self.slots.shape[1] >= window:
            raise DecodingError(f"positions are not known behind a sliding window of {window} tokens: use shorter text")
        return self.slots

    def own(self, mask: Tensor | None) -> Any:
        """The model's own attention."""
        base = self.tap.base(self.module, self.options.pop("o1lab_base", None))
        return base(self.module, self.query, self.key, self.value, mask, **self.options)


class Intervention:
    """What a context manager may do inside one call of attention; as it stands, nothing."""

    moves = False
    """Whether it has an :meth:`attend` of its own because it moves positions; a model can have one such."""

    def query(self, call: Call) -> Tensor:
        """The queries to use, shape (B, H_q, T_q, D)."""
        return call.query

    def bias(self, call: Call) -> Tensor | None:
        """What to add to the scores, fp32 of shape (B or 1, 1, T_q, T_k)."""

    def options(self, call: Call) -> None:
        """Change ``call.options``, the keyword arguments of the model's own attention function."""

    def attend(self, call: Call, bias: Tensor | None) -> tuple[Tensor, None] | None:
        """Attention with moved positions, (B, T_q, H_q, D); ``None`` where nothing moves."""

    def stored(self, call: Call) -> None:
        """Change what stays in the cache, after the call that wrote it."""


class Tap:
    """The open interventions of one model."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.open: list[Intervention] = []
        self.exact = False
        """While set, the cache is refilled: nothing lossy is stored, and a prompt is not taken for a prompt."""
        self.probe: Callable[[nn.Module, Tensor, Tensor, Tensor], Any] | None = None
        """While set, it answers instead of attention, and nothing else is asked."""
        self.calls = 0
        self._last: tuple[Any, Slots] | None = None
        self._names: dict[int, str] = {}
        self._undo: list[Callable[[], Any]] = []

    def slots(self, mask: Tensor | None, queries: int, keys: int, device: torch.device) -> Slots:
        """The slots of a call; the layers of one forward pass share them because they share the mask."""
        asked = (mask, queries, keys, device)
        if self._last is None or self._last[0][0] is not mask or self._last[0][1:] != asked[1:]:
            self._last = (asked, Slots(mask, queries, keys, device))
        return self._last[1]

    def attach(self) -> None:
        """Register this tap's attention and mask functions, and name them in the model's configs."""
        from transformers import AttentionInterface
        from transformers.masking_utils import AttentionMaskInterface

        configs = {}
        for module in self.model.modules():
            config = getattr(module, "config", None)
            if getattr(config, "_attn_implementation_internal", None):
                configs[id(config)] = config
        used = {config._attn_implementation_internal for config in configs.values()}
        ready = {*BASES, *(name for name in used if name.startswith("o1lab-"))}
        if not any(getattr(type(module), "_supports_attention_backend", False) for module in self.model.modules()):
            raise DecodingError(
                f"{type(self.model).__name__} has attention code of its own: only models that go through transformers' "
                "AttentionInterface can be changed from outside (Llama, Qwen, Mistral, GPT-NeoX, GPT-2, …)"
            )
        if other := sorted(used - ready):
            raise DecodingError(f"attention runs in {other[0]!r}: call model.set_attn_implementation('sdpa') before")
        number = next(_numbers)
        for base in used:
            name = f"o1lab-{number}-{base}"
            AttentionInterface.register(name, self.attend)
            AttentionMaskInterface.register(name, AttentionMaskInterface._global_mapping[base])
            self._undo.append(lambda name=name: AttentionInterface._global_mapping.pop(name))
            self._undo.append(lambda name=name: AttentionMaskInterface._global_mapping.pop(name))
        for key, config in configs.items():
            base = self._names[key] = config._attn_implementation_internal
            config._attn_implementation_internal = f"o1lab-{number}-{base}"
            self._undo.append(lambda config=config, base=base: setattr(config, "_attn_implementation_internal", base))
        self._undo.append(self.model.register_forward_pre_hook(self._begin).remove)
        self._undo.append(self.model.register_forward_hook(self._end).remove)

    def detach(self) -> None:
        """Undo :meth:`attach`, last first."""
        while self._undo:
            self._undo.pop()()

    def _begin(self, *_: Any) -> None:
        self.calls = 0

    def _end(self, *_: Any) -> None:
        if not self.calls:
            raise DecodingError(f"{type(self.model).__name__} ran without its attention interface: nothing was changed")

    def base(self, module: nn.Module, name: str | None = None) -> Callable[..., Any]:
        """The model's own attention function."""
        from transformers import AttentionInterface

        name = name or self._names[id(module.config)]
        if name != "eager":
            return AttentionInterface._global_mapping[name]
        own = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
        if own is None:
            raise DecodingError(f"{type(module).__name__} has no eager attention to call: use 'sdpa'")
        return own

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
               **options: Any) -> Any:  # fmt: skip
        """What transformers calls instead of the model's own attention function; same arguments, same answer."""
        self.calls += 1
        if self.probe is not None:
            return self.probe(module, query, key, value)
        if not getattr(module, "is_causal", True):
            return self.base(module)(module, query, key, value, attention_mask, **options)
        call, total = Call(self, module, query, key, value, attention_mask, options), None
        for item in self.open:
            call.query = item.query(call)
            item.options(call)
            bias = item.bias(call)
            if bias is not None:
                total = bias if total is None else total + bias
        answer = next((item.attend(call, total) for item in self.open if item.moves), None)
        if answer is None:
            answer = call.own(call.mask if total is None else _masked(total, call))
        if not self.exact:
            for item in self.open:
                item.stored(call)
        return answer


def _masked(bias: Tensor, call: Call) -> Tensor:
    """The additive mask that holds both the bias and what may not be seen, in the queries' dtype."""
    if call.mask is not None and call.mask.dtype != torch.bool:
        return bias.to(call.mask.dtype) + call.mask
    seen = causal(*call.slots.shape, bias.device) if call.mask is None else call.mask
    bias = bias.to(call.query.dtype)
    return torch.where(seen, bias, torch.finfo(bias.dtype).min)


def plain(model: Any) -> nn.Module:
    """The transformers model in what the caller has: itself, or the ``Model`` that ``o1lab.models.load`` returns."""
    from o1lab.models import Model

    model = model.model if isinstance(model, Model) else model
    if not isinstance(model, nn.Module) or not hasattr(model, "config"):
        raise DecodingError(f"a {type(model).__name__} is no transformers model: give one that models.load returns")
    if hasattr(model, "_orig_mod"):
        raise DecodingError("the model is compiled: give the one that torch.compile was called on")
    return model


@contextmanager
def opened(model: Any, item: Intervention) -> Iterator[Tap]:
    """Keep ``item`` in front of the model's attention while the context is open."""
    model = plain(model)
    tap = _taps.get(model)
    if tap is None:
        tap = Tap(model)
        try:
            tap.attach()
        except BaseException:
            tap.detach()
            raise
        _taps[model] = tap
    try:
        if item.moves and any(other.moves for other in tap.open):
            raise DecodingError("positions are moved already: close the other clip_distance or group_positions first")
        tap.open.append(item)
        yield tap
    finally:
        tap.open[:] = [other for other in tap.open if other is not item]
        if not tap.open:
            tap.detach()
            _taps.pop(model, None)


def whole(name: str, value: Any, least: int) -> int:
    """``value`` if it is a whole number of at least ``least``."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise DecodingError(f"{name}={value!r}: give a whole number, {least} or more")
    return value
