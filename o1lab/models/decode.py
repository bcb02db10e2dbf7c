"""Decoding many prompts at once: own loop, exact positions, memory within a budget, one look at the device in a while.

In float32 a batch gives token for token what each prompt gives alone. Rows that end leave the batch: their part of the
key/value cache is dropped. A row whose logits are not finite ends there and is counted; it is never decoded on.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from o1lab.errors import ModelError
from o1lab.models.decode_rows import Batch, Generation, Job, OwnBatch
from o1lab.progress import progress as show

if TYPE_CHECKING:
    from o1lab.models import Model

Prompt = str | Sequence[int]
ENDS = ("stop", "cap", "not finite", "context too short")
ROWS = {"cpu": 128}
"""Most rows in a batch by device; elsewhere 4,096. Wider ones are no faster on a few cores."""
MEMORY = {"cpu": (0.25, 2**30), "cuda": (0.6, 2**40)}
"""Share of the free memory that a batch may take by default, and the most bytes."""


def greedy(
    model: Model, prompts: Sequence[Prompt], *, max_new_tokens: int | Sequence[int], progress: str = "", **options: Any
) -> list[Generation]:
    """Continue each prompt with the likeliest tokens, many at once; the answers in the order of the prompts.

    Parameters
    ----------
    model : Model
        Any Hugging Face decoder with a key/value cache, as :func:`o1lab.models.load` gives it.
    prompts : sequence of str or of token ids
        Texts get the special tokens of the tokenizer unless they begin with its ``bos_token``.
    max_new_tokens : int or sequence of int
        The cap, for all or for each prompt.
    progress : str
        Label of a progress display; empty shows none.
    **options
        See :func:`stream`.

    Examples
    --------
    >>> from o1lab import models
    >>> model = models.load("tiny", device="cpu", dtype="float32")
    >>> [(len(made.ids), made.ended) for made in greedy(model, ["ab", "hello"], max_new_tokens=[3, 5])]
    [(3, 'cap'), (5, 'cap')]
    """
    made: list[Any] = [None] * len(prompts)
    source = stream(model, prompts, max_new_tokens=max_new_tokens, **options)
    for place, generation in show(source, total=len(prompts), label=progress) if progress else source:
        made[place] = generation
    return made


def stream(
    model: Model,
    prompts: Sequence[Prompt],
    *,
    max_new_tokens: int | Sequence[int],
    batch_tokens: int | None = None,
    batch_size: int | None = None,
    stop_ids: Sequence[int] | None = None,
    on_logits: Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor | None] | None = None,
    scores: bool = False,
    temperature: float = 0.0,
    seed: int | Sequence[int] = 0,
) -> Iterator[tuple[int, Generation]]:
    """Yield ``(number of the prompt, Generation)`` as rows end, longest first.

    A model with a method ``decode_greedy(prompts, max_new_tokens, stop_ids)`` (token ids, a cap for each, ids that end
    a row) decodes each batch itself: it returns the produced ids of each row, the stop token included and -1 in the
    place of a token whose logits were not finite.

    Parameters
    ----------
    batch_tokens : int, optional
        Most cached positions in a batch: rows × (longest prompt + largest cap). Default: what fits in a share of the
        free memory. A batch that does not fit after all is halved and done again.
    batch_size : int, optional
        Most rows in a batch.
    stop_ids : sequence of int, optional
        Tokens that end a row; default: the end-of-sequence ids of the model and its tokenizer. Empty: none.
    on_logits : callable, optional
        ``on_logits(logits, rows, step)`` sees float32 logits (B, vocabulary), the numbers of the prompts (B,) and the
        step from 0, and may return other logits to choose from. -inf bans a token. Rows that have ended may still be
        among them for a few steps.
    scores : bool
        Also give margins and entropies.
    temperature : float
        Above 0 the tokens are drawn from softmax(logits / temperature).
    seed : int or sequence of int
        Of the draws; a prompt's draws depend on its seed and step alone (and on its number, if one seed is given for
        all), never on the batch.

    Raises
    ------
    ModelError
        An empty prompt, ids outside the vocabulary, text without a tokenizer, a cap below 1, a model without a
        key/value cache, or one single row that does not fit in memory.
    """
    ids = _encode(model, prompts)
    alike = isinstance(max_new_tokens, (int, np.integer))
    caps = np.array([max_new_tokens] * len(ids) if alike else max_new_tokens, dtype=np.int64)
    if caps.size != len(ids):
        raise ModelError(f"{caps.size} caps for {len(ids)} prompts: give one, or one for each")
    if caps.min(initial=1) < 1:
        raise ModelError(f"max_new_tokens={int(caps.min())}: allow at least one new token")
    if not 0 <= temperature < math.inf:
        raise ModelError(f"temperature={temperature} is no finite number from 0 on; 0 is greedy")
    for name, value in (("batch_tokens", batch_tokens), ("batch_size", batch_size)):
        if value is not None and value < 1:
            raise ModelError(f"{name}={value} must be at least 1")
    seeds = _seeds(seed, len(prompts))
    stops = _stops(model) if stop_ids is None else tuple(stop_ids)
    lengths = np.array([len(row) for row in ids], dtype=np.int64)
    room = np.minimum(caps, model.context - lengths)
    job = Job(model, ids, room, room < caps, np.array(stops, dtype=np.int64), on_logits, scores, temperature, seeds)
    for place in np.flatnonzero(room < 1):
        yield int(place), Generation((), "", "context too short", *([torch.empty(0)] * 2 if scores else ()))
    waiting = sorted(np.flatnonzero(room >= 1).tolist(), key=lambda row: (room[row], lengths[row]))
    own = hasattr(model.model, "decode_greedy")
    if own and (on_logits is not None or scores or temperature > 0):
        raise ModelError(f"{model.name} brings its own decoding, which is greedy and shows no logits")
    tokens = batch_tokens or _room_tokens(model, int(lengths.max(initial=1)))
    rows = batch_size or ROWS.get(model.device.type, 4096)
    while waiting:
        chosen = _take(waiting, lengths, room, tokens, rows)
        done, full = set(), ""
        try:
            batch = OwnBatch(job, chosen) if own else Batch(job, chosen)
            while len(batch.rows):
                ended = batch.advance()
                done |= {row for row, _ in ended}
                yield from ended
        except torch.OutOfMemoryError as error:
            full = str(error).partition("\n")[0]
        batch = None
        waiting = waiting[: len(waiting) - len(chosen)] + [row for row in reversed(chosen) if row not in done]
        if full:  # the error is gone by here, and with it the frames that held the tensors
            if len(chosen) == 1:
                size = int(lengths[chosen[0]] + room[chosen[0]])
                raise ModelError(f"one row of {size} tokens does not fit on {model.device}: {full}")
            gc.collect()
            if model.device.type == "cuda":
                torch.cuda.empty_cache()
            rows = len(chosen) // 2


def _take(waiting: list[int], lengths: np.ndarray, room: np.ndarray, tokens: int, most: int) -> list[int]:
    """The next rows, from the end of ``waiting``: as many as the budgets allow, at least one."""
    chosen: list[int] = []
    prompt = cap = 0
    for row in reversed(waiting):
        prompt, cap = max(prompt, int(lengths[row])), max(cap, int(room[row]))
        if chosen and (len(chosen) == most or (len(chosen) + 1) * (prompt + cap) > tokens):
            break
        chosen.append(row)
    return chosen


def _room_tokens(model: Model, prompt: int) -> int:
    """How many positions fit in a share of the free memory: cached keys and values, and one prompt's activations."""
    config = model.model.config.get_text_config()
    heads = getattr(config, "num_attention_heads", 1)
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    cached = 2 * config.num_hidden_layers * (getattr(config, "num_key_value_heads", None) or heads) * width
    active = 4 * config.hidden_size + 3 * (getattr(config, "intermediate_size", None) or 4 * config.hidden_size)
    share, most = MEMORY.get(model.device.type, MEMORY["cpu"])
    if model.device.type == "cuda":
        free = torch.cuda.mem_get_info(model.device)[0]
        free += torch.cuda.memory_reserved(model.device) - torch.cuda.memory_allocated(model.device)
    else:
        import psutil

        free = psutil.virtual_memory().available
    return int(min(share * free, most) / ((cached + active) * model.dtype.itemsize + 5 * prompt))  # 5: the mask


def _encode(model: Model, prompts: Sequence[Prompt]) -> list[Sequence[int]]:
    """Token ids of every prompt, as :meth:`o1lab.models.Model.encode` makes them, at any length."""
    ids: list[Any] = list(prompts)
    texts = [place for place, prompt in enumerate(prompts) if isinstance(prompt, str)]
    if texts and model.tokenizer is None:
        raise ModelError(f"{model.name} has no tokenizer: give token ids instead of text")
    begin = getattr(model.tokenizer, "bos_token", None)
    rendered = {place for place in texts if begin and prompts[place].startswith(begin)}
    for special in (True, False):
        places = [place for place in texts if (place in rendered) is not special]
        if places:
            coded = model.tokenizer([prompts[place] for place in places], add_special_tokens=special, verbose=False)
            for place, row in zip(places, coded.input_ids, strict=True):
                ids[place] = row
    most = model.model.config.get_text_config().vocab_size
    for place, row in enumerate(ids):
        if len(row) == 0:
            raise ModelError(f"prompt {place} is empty: give at least one token")
        if not isinstance(prompts[place], str) and not 0 <= min(row) <= max(row) < most:
            raise ModelError(f"prompt {place}: token ids of {model.name} go from 0 to {most - 1}")
    return ids


def _stops(model: Model) -> tuple[int, ...]:
    """End-of-sequence ids that the model's generation settings, its configuration and its tokenizer name."""
    found: set[int] = set()
    for holder in (getattr(model.model, "generation_config", None), model.model.config, model.tokenizer):
        named = getattr(holder, "eos_token_id", None)
        found |= set(named if isinstance(named, (list, tuple)) else [] if named is None else [named])
    return tuple(sorted(found))


def _seeds(seed: int | Sequence[int], n: int) -> np.ndarray:
    if isinstance(seed, int):
        return (np.arange(n, dtype=np.int64) + 1) * 1_000_003 + seed
    if len(seed) != n:
        raise ModelError(f"{len(seed)} seeds for {n} prompts: give one seed, or one for each")
    return np.array(seed, dtype=np.int64)
