"""A transformers cache whose keys and values live in the pages of a pool.

It goes where a ``DynamicCache`` goes: ``model.generate(..., past_key_values=PagedCache(model.config, pool))``. Ordinary
attention gets keys and values gathered from the pages; ``attn_implementation="o1lab_paged"`` (after
:func:`o1lab.kv.register`) reads the pages themselves, and a decode step of it can be captured in a CUDA graph:

1. Make the cache with ``max_tokens``, so that block tables and lengths never move, and prefill.
2. ``reserve(n)`` finds the pages of the next n tokens and writes them into the tables, outside the graph.
3. Capture one forward pass inside ``with cache.recording()``: what runs there on the host is forgotten, as the device
   has not run it. The pass counts the lengths up on the device.
4. Each replay writes one token: ``reserve(1)`` before it (nothing to do unless a page is full), ``advance(1)`` after.

:class:`o1lab.kv.decode_loop.DecodeLoop` is these four steps for a whole model. Not for training, and not thread-safe.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from o1lab.attention import PagedKV
from o1lab.errors import CacheError
from o1lab.kv import asked
from o1lab.kv.layout import Heads, Layout, text_config
from o1lab.kv.paged_attention import NAME, Step
from o1lab.kv.paged_layer import PagedLayer
from o1lab.kv.pool import PagePool
from o1lab.kv.sequences import Sequences, whole


class PagedCache(Cache):
    """Keys and values of a batch in pages of a pool, for causal models with plain attention (MHA, GQA, MQA).

    Parameters
    ----------
    config : transformers config
        ``model.config`` itself: its ``attn_implementation`` says what ``update`` returns.
    pool : PagePool
        On the model's device. One page holds tokens of one layer; :func:`o1lab.kv.pool_for` makes one that fits.
    max_tokens : int, optional
        Most tokens of a sequence. The block tables then never move, which a CUDA graph needs. Without it they grow.
    dtype : torch.dtype, optional
        float32, bfloat16 or float16, which must be the keys' own; ``torch.int8`` rounds keys and values with one scale
        for each token and head. Default: the type of the first keys.

    Attributes
    ----------
    owner : str
        Under which the pool lists its pages.
    block_tables : Tensor, shape (layers, B, max_pages), int32
    lengths : Tensor, shape (B,), int32

    Raises
    ------
    CacheError
        A config, type, pool or call that does not fit; :class:`~o1lab.kv.PoolExhausted` where pages are out. What the
        sequences had stays theirs until :meth:`release` or the end of the ``with`` block.

    Examples
    --------
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> from o1lab.kv import pool_for
    >>> config = LlamaConfig(
    ...     vocab_size=99, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4
    ... )
    >>> model, pool = LlamaForCausalLM(config), pool_for(config, 64, device="cpu", dtype=torch.float32, page_tokens=16)
    >>> with PagedCache(model.config, pool) as cache:
    ...     out = model.generate(torch.ones(2, 5, dtype=torch.long), past_key_values=cache, max_length=20)
    ...     len(cache), cache.get_seq_length(), pool.stats().used
    (2, 19, 8)
    >>> pool.stats().used
    0
    """

    def __init__(
        self, config: Any, pool: PagePool, *, max_tokens: int | None = None, dtype: torch.dtype | None = None
    ) -> None:  # fmt: skip
        if max_tokens is not None:
            whole("max_tokens", max_tokens, 1)
        self.config = text_config(config)
        if not isinstance(pool, PagePool):
            raise CacheError(f"a {type(pool).__name__} is no PagePool: o1lab.kv.pool_for(model.config, …) makes one")
        self.heads, self.pool, self.max_tokens = Heads.of(self.config, max_tokens), pool, max_tokens
        if pool.pages < self.heads.layers:
            raise CacheError(f"a pool of {pool.pages} pages holds no request: {self.heads.layers} layers take one each")
        super().__init__(layers=[PagedLayer(self, index) for index in range(self.heads.layers)])
        self._layout: Layout | None = None
        self._books: Sequences | None = None
        self._closed = self._recording = False
        if dtype is not None:
            self._bind(dtype)

    def _bind(self, dtype: torch.dtype) -> None:
        layout = Layout.of(self.heads, self.pool, dtype)
        needed = self.heads.layers * -(-(self.max_tokens or 1) // layout.page_tokens)
        if needed > self.pool.pages:
            raise CacheError(f"max_tokens={self.max_tokens} takes {needed} pages of {self.pool.pages}: no request fits")
        self._layout = layout
        self._books = Sequences(self.pool, self.heads.layers, layout.page_tokens, self.max_tokens)

    def __enter__(self) -> PagedCache:
        return self

    def __exit__(self, *error: object) -> None:
        self.release()

    def __deepcopy__(self, memo: dict[int, Any]) -> PagedCache:
        return self.fork()

    def __repr__(self) -> str:
        state = "released" if self._closed else f"{max(self.batch_size, 0)} sequences of {self.get_seq_length()} tokens"
        return f"PagedCache({len(self)} layers, {state})"

    @property
    def owner(self) -> str | None:
        """Name of this cache in the pool; None before the first tokens."""
        return self._books and self._books.owner

    @property
    def length(self) -> int:
        """Tokens of each sequence as the host counts them, those of a pass that broke off included."""
        return self._books.length if self._books else 0

    @property
    def dtype(self) -> torch.dtype | None:
        """Of what the pages hold; None before the first tokens."""
        return self._layout and self._layout.pages.dtype

    @property
    def batch_size(self) -> int:
        """Sequences held; −1 while there are none."""
        return len(self._books.rows) or -1 if self._books else -1

    @property
    def block_tables(self) -> Tensor:
        """Page numbers by layer and sequence; at a fixed address if ``max_tokens`` was given."""
        return self._used().block_tables

    @property
    def lengths(self) -> Tensor:
        """Tokens of each sequence on the device."""
        return self._used().lengths

    def paged(self, layer_idx: int) -> PagedKV:
        """Pages, table and lengths of one layer, as :func:`o1lab.attention.attend` takes them."""
        books, layer_idx = self._used(), self._layer(layer_idx)
        return PagedKV(self._layout.pages, books.block_tables[layer_idx], books.lengths, self._layout.scales)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Any, Any]:  # fmt: skip
        """Store (B, Hkv, S, D) keys and values of S new tokens; return what attention needs.

        Keys and values (B, Hkv, length, D), or twice the :class:`~o1lab.kv.paged_attention.Step` that the paged
        implementation reads. The first tokens of empty sequences come back as they were given, also where int8 is kept.
        """
        for name, given in (("key_states", key_states), ("value_states", value_states)):
            if not isinstance(given, Tensor):
                raise CacheError(f"{name} is a {type(given).__name__}: give a tensor (B, Hkv, S, D)")
        if not self._open():
            self._bind(key_states.dtype)
        layer_idx = self._layer(layer_idx)
        self.heads.check(key_states, value_states, self._layout.pages)
        layer, books, tokens = self.layers[layer_idx], self._books, key_states.shape[2]
        if layer.seen == books.length:
            self._begin(key_states.shape[0], tokens)
        if layer.seen + tokens != books.length or len(books.rows) != len(key_states):
            raise CacheError(
                f"layer {layer_idx} holds {layer.seen} tokens, others {books.length}, and is given {tokens} for "
                f"{len(key_states)} sequences of {len(books.rows)}: the last pass broke off; crop or reset the cache"
            )
        self._layout.store(self._numbers[layer_idx], self._slots, key_states, value_states)
        layer.seen, layer.is_initialized = books.length, True
        first = (key_states, value_states) if books.length == tokens else None
        if self.config._attn_implementation == NAME:
            step = Step(self.paged(layer_idx), first)
            return step, step
        if self._recording:
            raise CacheError(f"{self.config._attn_implementation!r} gathers more keys each step: capture {NAME!r}")
        return first or self._layout.gathered(books.block_tables[layer_idx], books.length, key_states.dtype)

    def _begin(self, batch: int, tokens: int) -> None:
        books = self._books
        if not books.length and len(books.rows) != batch:
            books.start(batch)
        if len(books.rows) != batch:
            raise CacheError(f"the cache holds {len(books.rows)} sequences and is given {batch}: reset or select first")
        if not self._recording:
            books.reserve(tokens)
        elif books.ready < books.length + tokens:
            raise CacheError(f"a graph cannot find pages: reserve({tokens}) before the capture")
        self._numbers, self._slots = books.step(tokens)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Let sequence i go on from what was sequence ``beam_idx[i]``; they share pages until one of them writes."""
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each sequence ``repeats`` times in a row, sharing pages."""
        count = whole("repeats", repeats, 1)
        if self._open() and self._books.rows:
            self._books.select([row for row in range(len(self._books.rows)) for _ in range(count)])

    def batch_select_indices(self, indices: Tensor | Sequence[int]) -> None:
        """Keep the sequences at ``indices`` (or where a boolean mask is set), in that order."""
        if self._open() and self._books.rows:
            self._books.select(asked.rows(indices, len(self._books.rows)))

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last ``−tokens_to_remove`` tokens of each sequence; also after a pass that broke off midway.

        0 forgets nothing but a token that only the device has counted. Positive numbers, a length to keep in older
        transformers, are refused as by newer ones.
        """
        held, tokens_to_remove = self._books.length if self._open() else 0, asked.count("crop", tokens_to_remove)
        if not -held <= tokens_to_remove <= 0:
            raise CacheError(f"crop({tokens_to_remove}): give −n to forget n of {held} tokens")
        if tokens_to_remove:
            self._books.shorten(held + tokens_to_remove)
        elif self._open() and self._books.rows:
            self._books.lengths.fill_(held)
        if self._open():
            self._level()

    def reset(self) -> None:
        """Give all pages back and start anew, with another batch size if no graph was captured."""
        if self._open():
            self._books.release()
            self._level()

    def release(self) -> None:
        """Give all pages back for good; any number of times. A later use raises CacheError."""
        if self._books is not None and not self._closed:
            self._books.close()
        self._closed = True

    def fork(self, rows: Sequence[int] | None = None, tokens: int | None = None) -> PagedCache:
        """A new cache that shares this one's pages (``copy.deepcopy`` does so too); see :meth:`adopt`."""
        rows, tokens = self._chosen(rows, tokens)
        dtype = self.dtype if self._open() else None
        new = PagedCache(self.config, self.pool, max_tokens=self.max_tokens, dtype=dtype)
        if self._books and self._books.length:
            new.adopt(self, rows, tokens)
        return new

    def adopt(self, other: PagedCache, rows: Sequence[int] | None = None, tokens: int | None = None) -> None:
        """Begin with the first ``tokens`` tokens of the sequences at ``rows`` of another cache over the same pool.

        A row may be named several times. Nothing is copied but, at the first write, a last page that is not full.
        """
        rows, tokens = self._chosen(rows, tokens)
        self._open()
        if not isinstance(other, PagedCache):
            raise CacheError(f"a {type(other).__name__} has no pages to share: adopt another PagedCache")
        if not other._open() or any(layer.seen != other._books.length for layer in other.layers):
            raise CacheError(f"{other!r} holds nothing to adopt, or its last pass broke off: crop it first")
        if other.heads != self.heads:
            raise CacheError(f"the other cache is for {other.heads}, this one for {self.heads}")
        kept = other.dtype
        if self._books is None:
            self._bind(kept)
        if kept != self.dtype:
            raise CacheError(f"the other cache keeps {kept}, this one {self.dtype}")
        source = other._books
        rows = list(range(len(source.rows))) if rows is None else rows
        self._books.adopt(source, rows, source.length if tokens is None else tokens)
        self._level()

    def reserve(self, tokens: int, batch: int | None = None) -> None:
        """Find the pages of the next ``tokens`` tokens of each sequence, and copy what is shared, before they come.

        All or none. ``batch`` is needed while the cache is empty; so is ``dtype`` at its making.
        """
        books = self._used()
        if not books.rows:
            books.start(whole("batch", batch, 1))
        books.reserve(whole("tokens", tokens, 0))

    def advance(self, tokens: int = 1) -> None:
        """Count ``tokens`` that a replayed graph has written, and counted on the device.

        Not reserved, they went into pages of others: that is a CacheError.
        """
        books = self._used()
        if books.length + whole("tokens", tokens, 0) > books.ready:
            raise CacheError(f"advance({tokens}): {books.ready - books.length} were reserved; reserve before a replay")
        books.length += tokens
        self._level()

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Capture reserved steps inside: the host's counts are put back after it; from then on tables never move."""
        books = self._used()
        if self.max_tokens is None or not books.rows:
            raise CacheError(f"max_tokens={self.max_tokens}, {len(books.rows)} sequences: a graph needs both")
        length, self._recording, books.fixed = books.length, True, True
        try:
            yield
        finally:
            self._recording, books.length = False, length
            self._level()

    def _layer(self, layer_idx: int) -> int:
        number = asked.count("layer_idx", layer_idx)
        if not 0 <= number < len(self.layers):
            raise CacheError(f"layer_idx={layer_idx}: the config has {len(self.layers)} layers; is it this model's?")
        return number

    @staticmethod
    def _chosen(rows: Sequence[int] | None, tokens: int | None) -> tuple[list[int] | None, int | None]:
        return None if rows is None else asked.counts("rows", rows), tokens and asked.count("tokens", tokens)

    def _open(self) -> bool:
        """Whether there are books yet; a released cache raises."""
        if self._closed:
            raise CacheError("the cache was released: its pages belong to others by now; make a new one")
        return self._books is not None

    def _used(self) -> Sequences:
        if not self._open():
            raise CacheError("the cache has no type yet: give dtype at its making, or prefill first")
        return self._books

    def _level(self) -> None:
        for layer in self.layers:
            layer.seen = self._books.length
