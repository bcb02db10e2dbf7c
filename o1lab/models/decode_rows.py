"""The rows of one batch while they are decoded: their cache, what they have produced, and which still go on."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from o1lab.errors import ModelError

if TYPE_CHECKING:
    from o1lab.models import Model

CHECK_STEPS = {"cpu": 4}
"""Steps between two looks at which rows have ended, by device; elsewhere 8, because each look waits for the device."""


@dataclass(frozen=True)
class Generation:
    """What one prompt produced.

    Attributes
    ----------
    ids
        Produced tokens, the stop token included.
    text
        The same as text with special tokens, without the stop token; empty for a model without a tokenizer.
    ended
        ``"stop"``; ``"cap"``: as many tokens as were allowed; ``"not finite"``: the next logits held NaN or +inf, or
        nothing but -inf; ``"context too short"``: the prompt leaves no room in the model's context, or what was
        produced filled it below the cap.
    margins, entropies
        For each produced token: the best logit minus the second best, and the entropy of the softmax in nats; float32
        of shape (tokens,) on the CPU, or ``None`` where ``scores`` was not asked for.
    """

    ids: tuple[int, ...]
    text: str
    ended: str
    margins: torch.Tensor | None = None
    entropies: torch.Tensor | None = None


@dataclass(frozen=True)
class Job:
    """What is the same for every batch: ids of the prompts, room for new tokens per prompt, and the options."""

    model: Model
    ids: list[Sequence[int]]
    room: np.ndarray
    cut: np.ndarray  # whether the context, not the cap, is what limits the row
    stops: np.ndarray
    on_logits: Any
    scores: bool
    temperature: float
    seeds: np.ndarray

    @functools.cached_property
    def forward(self) -> Callable[..., Any]:
        """The model's forward with the options that it knows."""
        names = inspect.signature(self.model.model.forward).parameters
        cache = next((name for name in ("cache", "past_key_values") if name in names), None)
        if cache is None:
            raise ModelError(f"{self.model.name} takes no key/value cache, which decoding step by step needs")
        fixed: dict[str, Any] = {"use_cache": True, "return_dict": True}
        fixed |= {"logits_to_keep": 1} if "logits_to_keep" in names else {}

        def forward(ids: Any, mask: Any, positions: Any, kept: Any) -> torch.Tensor:
            given = {"position_ids": positions} if "position_ids" in names else {}
            out = self.model.model(input_ids=ids, attention_mask=mask, **{cache: kept}, **given, **fixed)
            return out.logits[:, -1]

        return forward

    def finish(self, row: int, made: np.ndarray, ended: str, scores: torch.Tensor | None) -> tuple[int, Generation]:
        """The row's number and its generation, from the ids that it made."""
        if ended == "cap" and self.cut[row]:
            ended = "context too short"
        tokenizer, ids = self.model.tokenizer, made.tolist()
        said = ids[:-1] if ended == "stop" else ids
        text = tokenizer.decode(said, clean_up_tokenization_spaces=False) if tokenizer is not None else ""
        return row, Generation(tuple(ids), text, ended, *(scores if scores is not None else ()))


class Batch:
    """Rows that are decoded together: their cache, what they have produced, and which still go on."""

    @torch.inference_mode()
    def __init__(self, job: Job, rows: list[int]) -> None:
        self.job, self.rows, self.step, device = job, np.array(rows), 0, job.model.device
        lengths = np.array([len(job.ids[row]) for row in rows])
        self.width, self.limits = int(lengths.max()), job.room[rows]
        capacity = self.width + int(self.limits.max())
        ids = np.zeros((len(rows), self.width), dtype=np.int64)
        for place, row in enumerate(rows):
            ids[place, self.width - lengths[place] :] = job.ids[row]
        pad = self.width - lengths[:, None]
        positions = np.maximum(np.arange(self.width) - pad, 0)
        self.mask = None
        if pad.any():
            self.mask = torch.from_numpy(np.arange(capacity) >= pad).to(device, torch.long)
        self.open = np.ones(len(rows), dtype=bool)
        self.made = np.empty((len(rows), int(self.limits.max())), dtype=np.int64)
        self.kept = [] if job.scores else None
        self.numbers = torch.from_numpy(self.rows).to(device)
        self.seeds = torch.from_numpy(job.seeds[rows]).to(device)
        self.next = torch.from_numpy(lengths).to(device)  # position of the next token
        self.most = int(lengths.max())
        self.cache = new_cache(job.model.model, capacity)
        self.logits = self._forward(torch.from_numpy(ids).to(device), torch.from_numpy(positions).to(device))

    def _forward(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        mask = None if self.mask is None else self.mask[:, : self.width + self.step]
        return self.job.forward(ids, mask, positions, self.cache)

    @torch.inference_mode()
    def advance(self) -> list[tuple[int, Generation]]:
        """Some steps for every row, then one look at which have ended; these are returned and, in time, dropped."""
        job, start = self.job, self.step
        steps = min(CHECK_STEPS.get(job.model.device.type, 8), int(self.limits[self.open].max()) - start)
        chosen, sure = [], []
        for _ in range(steps):
            if self.logits is None:
                positions = self.next[:, None]
                if self.most >= job.model.context:  # only rows that have ended can be there
                    positions = positions.clamp(max=job.model.context - 1)
                self.logits = self._forward(self.token[:, None], positions)
                self.next.add_(1)
                self.most += 1
            self.token, finite, confidence = self._choose(self.logits)
            chosen.append(torch.where(finite, self.token, -1))
            sure.append(confidence)
            self.logits = None
            self.step += 1
        block = torch.stack(chosen, 1).cpu().numpy()
        self.made[:, start : self.step] = block
        if self.kept is not None:
            self.kept.append(torch.stack(sure, 2).cpu())  # (2, rows, steps)
        bad, stop = block < 0, np.isin(block, job.stops)
        over = bad | stop | (np.arange(start + 1, self.step + 1) >= self.limits[:, None])
        first, ended = over.argmax(1), over.any(1) & self.open
        results = []
        for place in np.flatnonzero(ended):
            at = first[place]
            how = "not finite" if bad[place, at] else "stop" if stop[place, at] else "cap"
            length = start + at + (not bad[place, at])
            scores = None if self.kept is None else torch.cat([part[:, place] for part in self.kept], 1)[:, :length]
            results.append(job.finish(int(self.rows[place]), self.made[place, :length], how, scores))
        self.open &= ~ended
        self._drop()
        return results

    def _choose(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """The next tokens (B,), where the logits are finite (B,), and margins and entropies (2, B) if asked for."""
        job = self.job
        best, token = logits.max(-1)  # NaN comes out on top, and so does +inf
        finite = best.isfinite()
        if job.on_logits is not None:
            changed = job.on_logits(logits.float(), self.numbers, self.step)
            if changed is not None:
                logits = changed
                best, token = logits.max(-1)
                finite = finite & best.isfinite()
        if job.temperature > 0:
            token = (logits.float() / job.temperature + _gumbel(self.seeds, self.step, logits.shape[-1])).argmax(-1)
        if not job.scores:
            return token, finite, None
        return token, finite, torch.stack(surety(logits.float()))

    def _drop(self) -> None:
        """Take rows that have ended out of the batch, once a tenth of it has: moving the cache costs some steps."""
        left = int(self.open.sum())
        if left == 0:
            self.rows, self.cache = self.rows[:0], None
        elif left <= 0.9 * len(self.open):
            places = np.flatnonzero(self.open)
            keep = torch.from_numpy(places).to(self.token.device)
            if all(hasattr(layer, "batch_select_indices") for layer in self.cache.layers):
                self.cache.batch_select_indices(keep)
            else:
                self.cache.reordernew_cache(keep)
            self.mask = None if self.mask is None else self.mask[keep]
            self.token, self.next, self.numbers = self.token[keep], self.next[keep], self.numbers[keep]
            self.seeds = self.seeds[keep]
            self.rows, self.limits, self.made = self.rows[places], self.limits[places], self.made[places]
            self.open = self.open[places]
            if self.kept is not None:
                self.kept = [torch.cat(self.kept, 2)[:, keep.cpu()]]


class OwnBatch:
    """Rows that the model decodes itself, all at once."""

    def __init__(self, job: Job, rows: list[int]) -> None:
        self.job, self.rows = job, rows

    def advance(self) -> list[tuple[int, Generation]]:
        """All of them."""
        job, rows, self.rows = self.job, self.rows, []
        prompts, limits = [list(job.ids[row]) for row in rows], [int(job.room[row]) for row in rows]
        with torch.inference_mode():
            made = job.model.model.decode_greedy(prompts, limits, tuple(job.stops.tolist()))
        results = []
        for row, ids in zip(rows, made, strict=True):
            bad = len(ids) > 0 and ids[-1] < 0
            how = "not finite" if bad else "stop" if len(ids) and ids[-1] in job.stops else "cap"
            results.append(job.finish(row, np.array(ids[: len(ids) - bad], dtype=np.int64), how, None))
        return results


@functools.cache
def _roomy_layer() -> type:
    """A dynamic cache layer that appends in place: nothing is copied as long as the room it was made with lasts."""
    from transformers.cache_utils import DynamicLayer

    class RoomyLayer(DynamicLayer):
        def __init__(self, room: int) -> None:
            super().__init__()
            self.room, self.held = room, {}

        def update(self, key_states: Any, value_states: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
            if not self.is_initialized:
                self.lazy_initialization(key_states, value_states)
            self.keys = self._append("keys", self.keys, key_states)
            self.values = self._append("values", self.values, value_states)
            return self.keys, self.values

        def _append(self, name: str, old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
            seen = old.shape[-2] if old.numel() else 0
            total = seen + new.shape[-2]
            buffer, view = self.held.get(name, (None, None))
            if view is not old or buffer.shape[-2] < total:  # the first call, other rows, or another hand put it there
                shape = (*new.shape[:-2], max(self.room, total), new.shape[-1])
                buffer = torch.empty(shape, dtype=new.dtype, device=new.device)
                if seen:
                    buffer[..., :seen, :] = old
            buffer[..., seen:total, :] = new
            view = buffer[..., :total, :]
            self.held[name] = (buffer, view)
            return view

    return RoomyLayer


def new_cache(model: Any, room: int) -> Any:
    """An empty cache of the kind the model wants, with room for ``room`` positions where it only ever grows."""
    from transformers.cache_utils import DynamicCache, DynamicLayer

    cache = DynamicCache(config=model.config)
    cache.layers = [_roomy_layer()(room) if type(layer) is DynamicLayer else layer for layer in cache.layers]
    return cache


def surety(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Best minus second best of float32 logits (tokens, vocabulary), and the entropy of their softmax in nats."""
    top = logits.topk(2).values
    return top[:, 0] - top[:, 1], torch.special.entr(logits.softmax(-1)).sum(-1)


def _gumbel(seeds: torch.Tensor, step: int, vocabulary: int) -> torch.Tensor:
    """Gumbel noise (B, vocabulary) that depends on seed, step and token alone: SplitMix64 over the three."""
    x = torch.arange(vocabulary, device=seeds.device) * -7046029254386353131 + step * 0x9E3779B97F4A7C1
    x = x[None] + seeds[:, None] * -4658895280553007687
    for shift, factor in ((30, -4658895280553007687), (27, -7723592293110705685), (31, 1)):
        x = (x ^ ((x >> shift) & ((1 << (64 - shift)) - 1))) * factor
    uniform = (((x >> 41) & 0x7FFFFF).float() + 0.5) * 2.0**-23
    return -(-uniform.log()).log()
