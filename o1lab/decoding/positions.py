"""Interventions on RoPE: far tokens brought back to distances that training saw, and phases built in 16 bit.

Keys are cached with their rotation applied. Rotations add up, so a cached key is moved from position p to position p'
by rotating it once more, by p' - p; nothing has to be cached twice. That is exact while the frequencies stay what they
were when the key was written, which leaves out RoPE types that change them as the text grows (dynamic, longrope).
"""

from __future__ import annotations

import sys
from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from o1lab.decoding.tap import Call, Intervention, Slots, Tap, opened, plain, whole
from o1lab.errors import DecodingError

CHUNK_BYTES = 256 << 20
CHANGING = ("dynamic", "longrope")


def rotary(model: nn.Module) -> nn.Module:
    """The module that makes the phases of ``model``.

    Raises
    ------
    DecodingError
        There is none, or more kinds than one, or its frequencies change with the length of the text.
    """
    found = [module for module in model.modules() if isinstance(getattr(module, "inv_freq", None), Tensor)]
    if not found or not found[0].inv_freq.any():
        raise DecodingError(f"{type(model).__name__} has no rotary embedding (RoPE) whose positions could be moved")
    if any(not torch.equal(module.inv_freq, found[0].inv_freq) for module in found[1:]):
        raise DecodingError(f"{type(model).__name__} has several rotary embeddings: only models with one are supported")
    kind = getattr(found[0], "rope_type", "default")
    if kind in CHANGING:
        raise DecodingError(f"RoPE of type {kind!r} changes its frequencies with the length: keys cannot be moved")
    return found[0]


class _Move(Intervention):
    """Scores at distance ``window`` and beyond are those of other positions; nearer ones stay as they are."""

    moves = True

    def __init__(self, window: int) -> None:
        self.window = window
        self.rotary: nn.Module = nn.Identity()
        self.turns: dict[nn.Module, Any] = {}
        self.asked: Tensor | None = None
        self.last: tuple[Any, ...] = (None,)

    @abstractmethod
    def moved(self, positions: Tensor, queries: bool) -> Tensor:
        """Where a query or key at ``positions`` is to stand for the far scores."""

    def catch(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Forward pre-hook of the rotary module: the positions that this pass rotates by, (B or 1, T)."""
        self.asked = kwargs["position_ids"] if "position_ids" in kwargs else args[1]
        if self.asked.ndim != 2:
            raise DecodingError(f"positions of shape {tuple(self.asked.shape)}: one number per token is supported")

    def phases(self, slots: Slots) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        """cos and sin that carry the queries, and the keys, from where they are to where they are to stand."""
        if self.last[0] is not slots or self.last[1] is not self.asked:
            real = slots.seen.any(-2).index_select(1, slots.new)
            gap = self.asked - slots.queries
            offset = gap.gather(1, real.long().argmax(1, keepdim=True).expand(len(gap), 1))
            if slots.shape[0] > 1 and bool(((gap != offset) & real).any()):
                raise DecodingError("position_ids do not count the unmasked tokens of a row one by one: pass none")
            turn = [
                self.moved(slots.queries, True) - slots.queries - offset,
                self.moved(slots.keys, False) - slots.keys - offset,
            ]
            self.last = (slots, self.asked, *(self.phase(by) for by in turn))
        return self.last[2], self.last[3]

    def phase(self, by: Tensor) -> tuple[Tensor, ...]:
        """cos and sin of ``by`` positions in fp32, without the factor that some types of RoPE put on them."""
        scale = getattr(self.rotary, "attention_scaling", 1.0)
        return tuple(part / scale for part in self.rotary.forward(torch.zeros(1, device=by.device), by))

    @torch.no_grad()
    def learn(self, tap: Tap) -> None:
        """Find out how each layer rotates, and that a key moved here is the key that the model makes there.

        The model is run on four tokens at two spacings of positions, with attention that answers nothing, so that all
        layers see the same hidden states. A layer without rotation is left alone.
        """
        if tap.model.training:
            raise DecodingError("positions can be moved in eval mode only: call model.eval()")
        keys: list[dict[nn.Module, Tensor]] = []

        def probe(module: nn.Module, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, None]:
            keys[-1][module] = key.float()
            return value.new_zeros(*query.shape[:3], value.shape[-1]).transpose(1, 2), None

        place = torch.arange(4, device=self.rotary.inv_freq.device)[None]
        tap.probe, tap.exact = probe, True
        try:
            for factor in (1, 2):
                keys.append({})
                ones = torch.ones_like(place)
                tap.model(place + 1, attention_mask=ones, position_ids=place * factor, use_cache=False)
        finally:
            tap.probe, tap.exact = None, False
        for module, near in keys[0].items():
            far, turn = keys[1][module], None
            if not torch.equal(near, far):
                turn = getattr(sys.modules[type(module).__module__], "apply_rotary_pos_emb", None)
                try:
                    error = (turn(near, near[:, :1], *self.phase(place))[0] - far).abs().max() / far.abs().max()
                except (TypeError, RuntimeError) as failed:
                    raise DecodingError(f"{type(module).__name__} rotates in a way that is not known here") from failed
                if not error < 0.05:
                    raise DecodingError(f"{type(module).__name__} rotates in a way that is not known here")
            self.turns[module] = turn
        if not any(self.turns.values()):
            raise DecodingError(f"{type(tap.model).__name__} rotates nothing: there are no positions to move")

    def attend(self, call: Call, bias: Tensor | None) -> tuple[Tensor, None] | None:
        slots, turn = call.positions(), self.turns[call.module]
        queries, keys = slots.shape
        if turn is None or keys - 1 < self.window:
            return None
        extra = [name for name in ("softcap", "s_aux", "position_bias") if call.options.get(name) is not None]
        if extra or self.asked is None:
            raise DecodingError(f"attention with {extra[0] if extra else 'unknown positions'} cannot be moved")
        to_query, to_key = self.phases(slots)
        query, key, value = call.query.float(), call.key.float(), call.value.float()
        far_query, far_key = (turn(x, x[:, :1], *by)[0] for x, by in ((query, to_query), (key, to_key)))
        scaling = call.options.get("scaling") or query.shape[-1] ** -0.5
        batch, heads, shared = query.shape[0], query.shape[1], key.shape[1]
        rows = max(1, CHUNK_BYTES // (8 * batch * heads * keys))
        parts = []
        for start in range(0, queries, rows):
            part = slice(start, start + rows)
            near, far = (
                torch.einsum("bhgqd,bhkd->bhgqk", x[:, :, part].unflatten(1, (shared, -1)), y)
                for x, y in ((query, key), (far_query, far_key))
            )
            distance = slots.queries[:, part, None] - slots.keys[:, None, :]
            scores = torch.where((distance < self.window)[:, None, None], near, far) * scaling
            if bias is not None:
                scores = scores + bias[:, :, None, part]
            scores = scores.masked_fill(~slots.seen[:, None, None, part], torch.finfo(scores.dtype).min)
            parts.append(torch.einsum("bhgqk,bhkd->bhgqd", scores.softmax(-1), value).flatten(1, 2))
        return torch.cat(parts, 2).to(call.query.dtype).transpose(1, 2).contiguous(), None


class _Clip(_Move):
    def moved(self, positions: Tensor, queries: bool) -> Tensor:
        return torch.full_like(positions, self.window if queries else 0)


class _Group(_Move):
    def __init__(self, group: int, window: int) -> None:
        super().__init__(window)
        self.group = group

    def moved(self, positions: Tensor, queries: bool) -> Tensor:
        shift = self.window - self.window // self.group if queries else 0
        return positions.div(self.group, rounding_mode="floor") + shift


@contextmanager
def _moving(model: Any, item: _Move) -> Iterator[None]:
    model = plain(model)
    item.rotary = rotary(model)
    with opened(model, item) as tap:
        item.learn(tap)
        hook = item.rotary.register_forward_pre_hook(item.catch, with_kwargs=True)
        try:
            yield
        finally:
            hook.remove()


@contextmanager
def clip_distance(model: Any, window: int) -> Iterator[None]:
    """No pair of tokens is further apart than ``window``: RoPE sees min(i − j, window) instead of i − j.

    Exact (both scores are computed, in fp32, and the right one is taken). Where no pair is that far apart, every bit
    stays.

    Parameters
    ----------
    model
        A transformers decoder with RoPE of fixed frequencies, or what :func:`o1lab.models.load` returns.
    window
        Largest relative distance in tokens, at least 1: somewhat below the trained length.

    Notes
    -----
    Source: Su 2023, ReRoPE (https://github.com/bojone/rerope).
    """
    with _moving(model, _Clip(whole("window", window, 1))):
        yield


@contextmanager
def group_positions(model: Any, group: int, window: int) -> Iterator[None]:
    """Self-Extend: exact positions for the nearest ``window`` tokens, positions in groups of ``group`` beyond.

    A far pair is scored as if the query stood at ⌊i/group⌋ + window − ⌊window/group⌋ and the key at ⌊j/group⌋.

    Parameters
    ----------
    model
        A transformers decoder with RoPE of fixed frequencies, or what :func:`o1lab.models.load` returns.
    group
        Tokens that share a position. With 1 every bit stays.
    window
        How many of the nearest tokens keep their own position, at least 1.

    Notes
    -----
    Source: Jin et al. 2024, *LLM Maybe LongLM: Self-Extend* (arXiv 2401.01325). It reaches
    (trained length − window) · group + window tokens.
    """
    whole("window", window, 1)
    if whole("group", group, 1) == 1:
        rotary(plain(model))
        yield
        return
    with _moving(model, _Group(group, window)):
        yield


@contextmanager
def rope_in(model: Any, dtype: torch.dtype) -> Iterator[None]:
    """The fault of building RoPE's phases in ``dtype``: position · frequency, cos and sin all in 16 bit.

    bf16 holds whole numbers up to 256 only, fp16 up to 2,048; a product of some hundreds then has an error of the order
    of a full turn. With ``torch.float32`` the phases are those of transformers and every bit stays.

    Parameters
    ----------
    model
        A transformers decoder with RoPE of fixed frequencies, or what :func:`o1lab.models.load` returns.
    dtype
        ``torch.bfloat16``, ``torch.float16`` or ``torch.float32``.

    Notes
    -----
    Sources: https://github.com/EleutherAI/gpt-neox/issues/1003,
    https://github.com/huggingface/transformers/pull/29285, https://github.com/huggingface/candle/pull/3520.
    """
    if dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise DecodingError(f"dtype={dtype!r}: give torch.bfloat16, torch.float16 or torch.float32")
    module = rotary(plain(model))
    join = _layout(module)

    def forward(x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        turn = join(position_ids[..., None].to(dtype) * module.inv_freq.to(x.device, dtype))
        return tuple((part * module.attention_scaling).to(x.dtype) for part in (turn.cos(), turn.sin()))

    before = module.__dict__.get("forward")
    module.forward = forward
    try:
        yield
    finally:
        if before is None:
            del module.forward
        else:
            module.forward = before


def _layout(module: nn.Module) -> Any:
    """How this model lays the two halves of a phase out: one after the other, or interleaved."""
    place = torch.arange(8, device=module.inv_freq.device)[None]
    cos, _ = type(module).forward(module, torch.zeros(1, device=place.device), place)
    turn = place[..., None].float() * module.inv_freq.float()
    for join in (lambda x: torch.cat((x, x), -1), lambda x: x.repeat_interleave(2, -1)):
        if join(turn).shape == cos.shape and torch.allclose(join(turn).cos() * module.attention_scaling, cos):
            return join
    raise DecodingError(f"{type(module).__name__} builds its phases in a way that is not known here")
