"""Designs of a KV cache behind one interface.

A design admits a sequence, grows it token by token and ends it. :class:`Growing` copies the whole cache at each step as
``torch.cat`` does (a ``DynamicCache``), :class:`Static` reserves the longest length at once, :class:`Paged` takes pages
from a pool. What they ask of memory goes through one of :mod:`o1lab.kv.backing`.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from o1lab.kv.backing import Modelled
from o1lab.kv.pool import CHUNK_BYTES, PAGE_BYTES, PagePool, PoolError, PoolExhausted
from o1lab.kv.traffic import Request


@dataclass(frozen=True)
class KVShape:
    """Sizes of a model's cache; the default is 8 layers of 8 heads of 128 in 16 bit, 32 KiB a token."""

    layers: int = 8
    kv_heads: int = 8
    head_dim: int = 128
    item_bytes: int = 2

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise PoolError(f"{field.name}={value!r}: a whole number, at least 1")

    @property
    def half_bytes(self) -> int:
        """Bytes of one token's keys, or values, in one layer."""
        return self.kv_heads * self.head_dim * self.item_bytes

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's keys and values in all layers."""
        return 2 * self.layers * self.half_bytes

    def page_tokens(self, page_bytes: int = PAGE_BYTES) -> int:
        """Tokens of one layer that fit into a page.

        Raises
        ------
        PoolError
            Not even one does.
        """
        tokens = page_bytes // (2 * self.half_bytes)
        if not tokens:
            raise PoolError(f"a page of {page_bytes} bytes holds no token of {2 * self.half_bytes} bytes")
        return tokens

    def pages(self, tokens: int, page_bytes: int = PAGE_BYTES) -> int:
        """Pages of a sequence: one per layer for every ``page_tokens``. Exact: the whole account of a pool.

        Examples
        --------
        >>> KVShape().page_tokens(), KVShape().pages(65)
        (64, 16)
        """
        return self.layers * -(-tokens // self.page_tokens(page_bytes))


class Design:
    """One way to keep caches; ``tokens`` are always counted from the beginning of the sequence.

    Attributes
    ----------
    saved_tokens : int
        Tokens that are there once and belong to several sequences, counted for all but one of them.
    """

    name = "design"

    def __init__(self, shape: KVShape, memory: Any = None) -> None:
        self.shape, self.memory, self.saved_tokens = shape, Modelled() if memory is None else memory, 0
        self._held: dict[int, list[Any]] = {}

    def admit(self, request: Request, tokens: int) -> bool:
        """Make room for ``tokens`` of a new sequence; ``False`` (and nothing kept) where there is none."""
        raise NotImplementedError

    def grow(self, number: int, tokens: int) -> bool:
        """Make room for more; ``False`` where there is none: end the sequence then."""
        raise NotImplementedError

    def end(self, number: int) -> None:
        """Forget a sequence."""
        for handle in self._held.pop(number):
            self.memory.drop(handle)

    def needs(self, tokens: int) -> int:
        """Bytes that a sequence of ``tokens`` takes."""
        return tokens * self.shape.token_bytes

    def fits(self, tokens: int) -> bool:
        """Whether a sequence of so many tokens could be served if it were alone."""
        return self.capacity_bytes is None or self.needs(tokens) <= self.capacity_bytes

    @property
    def capacity_bytes(self) -> int | None:
        """Most bytes there are, where that is known."""
        return getattr(self.memory, "capacity_bytes", None)

    @property
    def used_bytes(self) -> int:
        """Bytes taken by sequences."""
        return self.memory.allocated_bytes

    @property
    def reserved_bytes(self) -> int:
        """Bytes taken from the device."""
        return self.memory.reserved_bytes

    def _new(self, number: int, tokens: int) -> bool:
        held: list[Any] = []
        for _ in range(2 * self.shape.layers):
            handle = self.memory.new(tokens * self.shape.half_bytes)
            if handle is None:
                for old in held:
                    self.memory.drop(old)
                return False
            held.append(handle)
        self._held[number] = held
        return True


class Growing(Design):
    """Keys and values of each layer in a tensor that ``torch.cat`` makes anew at each step."""

    name = "growing cat"

    def admit(self, request: Request, tokens: int) -> bool:
        """Two tensors a layer of just the prompt's length."""
        if not self._new(request.number, tokens):
            return False
        for handle in self._held[request.number]:
            self.memory.write(handle, 0, tokens * self.shape.half_bytes)
        return True

    def grow(self, number: int, tokens: int) -> bool:
        """Each tensor is copied into a longer one."""
        held = self._held[number]
        for place, handle in enumerate(held):
            longer = self.memory.extend(handle, tokens * self.shape.half_bytes)
            if longer is None:
                return False
            held[place] = longer
        return True


class Static(Design):
    """Each sequence gets the longest length at once.

    Parameters
    ----------
    most_tokens : int
        That length.
    """

    name = "static"

    def __init__(self, shape: KVShape, memory: Any = None, *, most_tokens: int) -> None:
        super().__init__(shape, memory)
        self.most_tokens, self._tokens = most_tokens, {}

    def admit(self, request: Request, tokens: int) -> bool:
        """Two tensors a layer of the longest length."""
        if tokens > self.most_tokens or not self._new(request.number, self.most_tokens):
            return False
        self._tokens[request.number] = 0
        return self.grow(request.number, tokens)

    def grow(self, number: int, tokens: int) -> bool:
        """Written in place."""
        begin, half = self._tokens[number], self.shape.half_bytes
        if tokens > self.most_tokens:
            return False
        for handle in self._held[number]:
            self.memory.write(handle, begin * half, (tokens - begin) * half)
        self._tokens[number] = tokens
        return True

    def needs(self, tokens: int) -> int:
        """The same for every sequence."""
        return super().needs(self.most_tokens)

    def fits(self, tokens: int) -> bool:
        """Nor can it be longer than the longest."""
        return tokens <= self.most_tokens and super().fits(tokens)


class Paged(Design):
    """Sequences in groups of one page per layer, each group a run where there is one, behind the one before it.

    Parameters
    ----------
    capacity_bytes : int
        Of the pool.

    Attributes
    ----------
    pool : PagePool
        On the memory's device; without memory where the memory is modelled.
    """

    name = "paged pool"

    def __init__(
        self, shape: KVShape, memory: Any = None, *, capacity_bytes: int, page_bytes: int = PAGE_BYTES,
        chunk_bytes: int = CHUNK_BYTES,
    ) -> None:  # fmt: skip
        super().__init__(shape, memory)
        device = self.memory.device
        self.pool = PagePool(capacity_bytes, device=device, page_bytes=page_bytes, chunk_bytes=chunk_bytes)
        self.page_tokens = shape.page_tokens(page_bytes)
        if device == "meta":
            self.memory.new(self.pool.bytes)
        self._tokens: dict[int, int] = {}
        self._prefixes: dict[str, tuple[list[int], set[int]]] = {}  # pages, and the sequences that hold them
        self._prefix: dict[int, str] = {}

    def admit(self, request: Request, tokens: int) -> bool:
        """Pages for the prompt; the full pages of a known prefix are shared, not taken again."""
        number, name = request.number, request.prefix
        groups = request.prefix_tokens // self.page_tokens
        known, holders = self._prefixes.get(name or "", ([], set()))
        self._held[number] = self.pool.share(known, number)
        self._tokens[number] = len(known) // self.shape.layers * self.page_tokens
        if not self.grow(number, tokens):
            self.end(number)
            return False
        if name and groups:
            if not known:
                self._prefixes[name] = self._held[number][: groups * self.shape.layers], holders
            else:
                self.saved_tokens += groups * self.page_tokens
            holders.add(number)
            self._prefix[number] = name
        return True

    def grow(self, number: int, tokens: int) -> bool:
        """A new group of pages after every ``page_tokens`` tokens; written in place."""
        held, layers = self._held[number], self.shape.layers
        begin = self._tokens[number]
        try:
            while len(held) * self.page_tokens < tokens * layers:
                held += self.pool.allocate(layers, number, after=held[-1] if held else None)
        except PoolExhausted:
            return False
        if self.memory.device != "meta":
            self._write(held, begin, tokens)
        self._tokens[number] = tokens
        return True

    def _write(self, held: list[int], begin: int, tokens: int) -> None:
        bytes_per_token, layers = 2 * self.shape.half_bytes, self.shape.layers
        while begin < tokens:
            group, place = divmod(begin, self.page_tokens)
            count = min(tokens - begin, self.page_tokens - place)
            for page in held[group * layers : (group + 1) * layers]:
                self.memory.write(self.pool.page(page), place * bytes_per_token, count * bytes_per_token)
            begin += count

    def end(self, number: int) -> None:
        """Give its pages back; a prefix goes with the last sequence that holds it."""
        self.pool.free(self._held.pop(number), number)
        name = self._prefix.pop(number, None)
        if name is not None:
            pages, holders = self._prefixes[name]
            holders.discard(number)
            if holders:
                self.saved_tokens -= len(pages) // self.shape.layers * self.page_tokens
            else:
                del self._prefixes[name]

    def needs(self, tokens: int) -> int:
        """Whole groups of pages."""
        return self.shape.pages(tokens, self.pool.page_bytes) * self.pool.page_bytes

    @property
    def capacity_bytes(self) -> int:
        """The whole pool."""
        return self.pool.bytes

    @property
    def used_bytes(self) -> int:
        """Pages in use."""
        return (self.pool.pages - self.pool.free_pages) * self.pool.page_bytes

    @property
    def reserved_bytes(self) -> int:
        """The whole pool."""
        return self.pool.bytes
