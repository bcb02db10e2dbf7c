"""Settings of torch's CUDA caching allocator, as ``PYTORCH_CUDA_ALLOC_CONF`` spells them, and how sizes are rounded."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from o1lab.errors import ProbeError

MIB = 1 << 20
MIN_BLOCK = 512
INTERVALS = 16
"""Sizes of 1 MiB to 64 GiB fall into 16 powers of two, each with its own number of divisions."""


class SettingsError(ProbeError, ValueError):
    """An allocator setting that does not exist or has a value that torch would refuse."""


@dataclass(frozen=True)
class Settings:
    """One configuration of the allocator; the defaults are torch's.

    Attributes
    ----------
    expandable_segments : bool
        Grow one virtual segment a stream by pages (2 MiB small, ``large_segment_size_mb`` large) instead of
        allocating segments.
    max_split_size_mb : int or None
        Blocks of this size and more are neither split nor given to smaller requests. ``None``: no limit.
    max_non_split_rounding_mb : int
        How much larger than the request a block beyond ``max_split_size_mb`` may be.
    garbage_collection_threshold : float
        Fraction of ``capacity_bytes`` above which blocks long unused are given back; 0 or no capacity switches it off.
    roundup_power2_divisions : int, mapping or sequence
        Divisions between powers of two that sizes are rounded up to: one number, ``{64: 8, 256: 4, ">": 1}``
        (MiB and divisions), or the 16 numbers for 1 MiB to 32 GiB that a snapshot lists.
    large_segment_size_mb : int
        Segment for requests between 1 and 10 MiB.
    capacity_bytes : int or None
        Most that may be reserved (torch: memory fraction × memory). ``None``: no limit.
    no_split : bool or tuple of (int, int)
        Pools whose blocks are never split (``MemPool(no_split=True)``); ``True``: all.
    """

    expandable_segments: bool = False
    max_split_size_mb: int | None = None
    max_non_split_rounding_mb: int = 20
    garbage_collection_threshold: float = 0.0
    roundup_power2_divisions: Any = 0
    large_segment_size_mb: int = 20
    capacity_bytes: int | None = None
    no_split: bool | tuple[tuple[int, int], ...] = False

    def __post_init__(self) -> None:
        if not isinstance(self.expandable_segments, bool):
            raise SettingsError(f"expandable_segments={self.expandable_segments!r}: True or False")
        for name in ("max_split_size_mb", "max_non_split_rounding_mb", "garbage_collection_threshold",
                     "large_segment_size_mb", "capacity_bytes"):  # fmt: skip
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float))):
                raise SettingsError(f"{name}={value!r}: a number")
        object.__setattr__(self, "roundup_power2_divisions", _divisions(self.roundup_power2_divisions))
        for name in ("max_split_size_mb", "max_non_split_rounding_mb"):
            value = getattr(self, name)
            if value is not None and not value >= 20:
                raise SettingsError(f"{name}={value!r}: torch takes 20 and more")
        if not 0 <= self.garbage_collection_threshold < 1:
            raise SettingsError(f"garbage_collection_threshold={self.garbage_collection_threshold!r}: 0 to below 1")
        if not self.large_segment_size_mb >= 20:
            raise SettingsError(f"large_segment_size_mb={self.large_segment_size_mb!r}: 20 and more")
        if self.capacity_bytes is not None and not self.capacity_bytes > 0:
            raise SettingsError(f"capacity_bytes={self.capacity_bytes!r}: more than 0, or None for no limit")

    def but(self, changes: Mapping[str, Any]) -> Settings:
        """These settings with ``changes``; an unknown name is refused with the list of the known."""
        known = [field.name for field in dataclasses.fields(self)]
        for name in changes:
            if name not in known:
                raise SettingsError(f"no allocator setting {name!r}; there are {', '.join(known)}")
        return dataclasses.replace(self, **changes)

    @classmethod
    def recorded(cls, settings: Mapping[str, Any], capacity_bytes: int | None = None) -> Settings:
        """The settings that a snapshot lists under ``allocator_settings``.

        Examples
        --------
        >>> Settings.recorded({"expandable_segments": True, "max_split_size": -1}).expandable_segments
        True
        """
        text = str(settings.get("PYTORCH_CUDA_ALLOC_CONF") or "")
        parts = dict(part.split(":", 1) for part in text.replace(" ", "").split(",") if part.count(":") == 1)
        names = ("max_non_split_rounding_mb", "large_segment_size_mb")
        wide = {name: int(parts[name]) for name in names if parts.get(name, "").isdigit()}
        split, divisions = settings.get("max_split_size", -1), settings.get("roundup_power2_divisions", 0)
        return cls(
            expandable_segments=bool(settings.get("expandable_segments", False)),
            max_split_size_mb=split // MIB if 0 <= split < 2**62 else None,
            garbage_collection_threshold=float(settings.get("garbage_collection_threshold", 0.0)),
            roundup_power2_divisions=list(divisions.values()) if isinstance(divisions, Mapping) else divisions,
            capacity_bytes=capacity_bytes,
            **wide,
        )

    def layout(self) -> tuple[Any, ...]:
        """What decides where blocks come to lie: all but the capacity, the collection and pools that are not split."""
        values = dataclasses.astuple(
            dataclasses.replace(self, capacity_bytes=None, garbage_collection_threshold=0.0, no_split=False)
        )
        return values

    def rounded(self, size: int) -> int:
        """Bytes of the block for a request: multiples of 512, or the next division of its power of two.

        Examples
        --------
        >>> Settings().rounded(1000), Settings(roundup_power2_divisions=4).rounded(1200 * 1024) // 1024
        (1024, 1280)
        """
        if size < MIN_BLOCK:
            return MIN_BLOCK
        power = size.bit_length() - 1
        divisions = self.roundup_power2_divisions[min(max(power - 20, 0), INTERVALS - 1)]
        if divisions > 1 and size > MIN_BLOCK * divisions:
            step = (1 << power) >> (divisions.bit_length() - 1)
            return 1 << power if size == 1 << power else -(-size // step) * step if step else 2 << power
        return -(-size // MIN_BLOCK) * MIN_BLOCK


def _divisions(value: Any) -> tuple[int, ...]:
    """One number of divisions per power of two, from any of the three spellings."""
    if isinstance(value, Mapping):
        row, last, first = [0] * INTERVALS, 0, True
        for boundary, divisions in value.items():
            if boundary == ">":
                row[last + 1 :] = [divisions] * (INTERVALS - last - 1)
                continue
            if not isinstance(boundary, int) or boundary < 1 or boundary & (boundary - 1):
                raise SettingsError(f"roundup_power2_divisions: boundary {boundary!r} is no power of two (in MiB)")
            last = min(boundary.bit_length() - 1, INTERVALS - 1)
            if first:
                row[:last], first = [divisions] * last, False
            row[last] = divisions
    else:
        row = [value] * INTERVALS if isinstance(value, int) else list(value)
    for divisions in row:
        if not isinstance(divisions, int) or divisions < 0 or divisions & (divisions - 1):
            raise SettingsError(f"roundup_power2_divisions: {divisions!r} is neither 0 nor a power of two")
    if len(row) != INTERVALS:
        raise SettingsError(f"roundup_power2_divisions: {len(row)} numbers; give one, a mapping, or {INTERVALS}")
    return tuple(row)
