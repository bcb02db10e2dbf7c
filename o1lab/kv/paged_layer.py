"""A layer of a :class:`~o1lab.kv.PagedCache`, as transformers asks for one; the cache does the work."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from weakref import proxy

from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from o1lab.errors import CacheError

if TYPE_CHECKING:
    from o1lab.kv.paged_cache import PagedCache


class PagedLayer(CacheLayerMixin):
    """One layer of a :class:`PagedCache`; ``seen`` is how many tokens it has stored of each sequence."""

    is_croppable = True
    is_sliding = False

    def __init__(self, cache: PagedCache, index: int) -> None:
        super().__init__()
        self._cache, self.index, self.seen = proxy(cache), index, 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing: the cache makes its tables with the first tokens."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """As :meth:`PagedCache.update`, for this layer."""
        return self._cache.update(key_states, value_states, self.index)

    def get_seq_length(self) -> int:
        """Tokens stored."""
        self._cache._open()  # a released cache is not to be asked
        return self.seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Keys that the next ``query_length`` queries will meet, and the position of the first: 0."""
        self._cache._open()
        return self.seen + query_length, 0

    def get_max_length(self) -> int:
        """``max_tokens``, or −1 without a limit."""
        return self._cache.max_tokens or -1

    def _whole(self, *args: Any) -> None:
        raise CacheError("the layers of a PagedCache share their pages' books: call this on the cache, not on a layer")

    reset = crop = reorder_cache = batch_repeat_interleave = batch_select_indices = offload = prefetch = _whole
