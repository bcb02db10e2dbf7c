"""What calls of the pools and the cache may name; a value that does not fit is a typed error and changes nothing."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable
from operator import index
from typing import Any

from o1lab.errors import CacheError


def page_numbers(pages: Iterable[int]) -> list[int]:
    """The numbers as plain integers; else ForeignPage."""
    try:
        return [*map(index, pages)]
    except TypeError as error:
        from o1lab.kv.pool import ForeignPage

        raise ForeignPage(f"pages are whole numbers in a list, as allocate gave them: {error}") from error


def page_number(page: Any, pages: int, name: str = "page") -> int:
    """``page`` as a plain integer, if a pool of ``pages`` pages has it; else ForeignPage."""
    try:
        number = -1 if isinstance(page, bool) else index(page)
    except TypeError:
        number = -1
    if not 0 <= number < pages:
        from o1lab.kv.pool import ForeignPage

        raise ForeignPage(f"{name}={page!r} is no page of this pool: its pages are 0 to {pages - 1}")
    return number


def one_each(generations: Any, pages: list[int]) -> Any:
    """A generation for each page, or none at all; else PoolError."""
    if generations is None:
        return ()
    try:
        given = len(generations)
    except TypeError:
        given = repr(generations)
    if given != len(pages):
        from o1lab.kv.pool import PoolError

        raise PoolError(f"{given} generations for {len(pages)} pages: give one for each")
    return generations


def hashable(owner: Hashable) -> None:
    """PoolError unless the owner can be a key."""
    try:
        hash(owner)
    except TypeError:
        from o1lab.kv.pool import PoolError

        raise PoolError(f"owner={owner!r}: anything that can be a key of a dict, a text say") from None


def a_pool(name: str, given: Any) -> None:
    """PoolError unless it is a PagePool."""
    from o1lab.kv.pool import PagePool, PoolError

    if not isinstance(given, PagePool):
        raise PoolError(f"{name} is a {type(given).__name__}: give a PagePool (host_pool makes one for the host)")


def span(name: str, value: Any) -> None:
    """PoolError unless it is a number, 0 or more; infinite is one."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0 or math.isnan(value):
        from o1lab.kv.pool import PoolError

        raise PoolError(f"{name}={value!r}: a number, 0 or more")


def count(name: str, value: Any) -> int:
    """A whole number, one of numpy or in a tensor too, as a plain integer; else CacheError."""
    try:
        if isinstance(value, bool):
            raise TypeError
        return index(value)
    except TypeError:
        raise CacheError(f"{name}={value!r}: a whole number") from None


def counts(name: str, values: Any) -> list[int]:
    """Whole numbers in a list; else CacheError."""
    try:
        return [count(name, value) for value in values]
    except (TypeError, CacheError):
        raise CacheError(f"{name}={values!r}: whole numbers in a list") from None


def rows(indices: Any, batch: int) -> list[int]:
    """Numbers of the sequences that ``indices`` names, or that a boolean mask of ``batch`` values sets."""
    import torch

    try:
        found = torch.as_tensor(indices)
    except (TypeError, ValueError, RuntimeError):
        raise CacheError(f"indices={indices!r}: whole numbers, or a boolean mask of {batch} values") from None
    if found.dtype == torch.bool:
        if found.shape != (batch,):
            raise CacheError(f"a mask of shape {tuple(found.shape)}: {batch} sequences need one of shape ({batch},)")
        return found.nonzero().flatten().tolist()
    if found.numel() and (found.is_floating_point() or found.is_complex()):
        raise CacheError(f"indices are {found.dtype}: whole numbers, or a boolean mask of {batch} values")
    return found.flatten().tolist()
