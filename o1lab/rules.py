"""Decision rules: conditions on the ends of a 95 % interval; two sides, proved exactly to exclude each other."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from o1lab.errors import ClaimsError

BOUNDS = {"low_above": "above", "low_at_least": "at or above", "high_below": "below", "high_at_most": "at or below"}
RANGES = {"within": "within", "outside": "outside"}


@dataclass(frozen=True, slots=True)
class Box:
    """Intervals with ``low`` beyond ``floor`` and ``high`` short of ``roof``; an ``open_`` end is excluded."""

    floor: float = -math.inf
    open_floor: bool = False
    roof: float = math.inf
    open_roof: bool = False

    def __and__(self, other: Box) -> Box:
        floor, roof = max(self.floor, other.floor), min(self.roof, other.roof)
        return Box(
            floor,
            any(box.open_floor for box in (self, other) if box.floor == floor),
            roof,
            any(box.open_roof for box in (self, other) if box.roof == roof),
        )

    def possible(self) -> bool:
        """Whether some interval with ``low <= high`` lies in the box; exact, since ``low = high`` is an interval."""
        return self.floor < self.roof or (self.floor == self.roof and not self.open_floor and not self.open_roof)

    def holds(self, low: float, high: float) -> bool:
        """Whether the interval ``[low, high]`` lies in the box."""
        above = low > self.floor if self.open_floor else low >= self.floor
        return above and (high < self.roof if self.open_roof else high <= self.roof)


@dataclass(frozen=True, slots=True)
class Side:
    """One side of a rule: conditions that must all hold for the whole interval.

    Examples
    --------
    >>> Side({"low_at_least": 64.0}).holds(64, 120), Side({"outside": (1.0, 2.0)}).holds(0, 1)
    (True, False)
    """

    conditions: Mapping[str, float | tuple[float, float]]

    def boxes(self) -> tuple[Box, ...]:
        """The side as a union of boxes; only ``outside`` makes more than one."""
        union: tuple[Box, ...] = (Box(),)
        for key, bound in self.conditions.items():
            if isinstance(bound, tuple):
                a, b = bound
                cases = (Box(floor=a, roof=b),) if key == "within" else (Box(roof=a, open_roof=True), Box(b, True))
            elif key.startswith("low"):
                cases = (Box(floor=bound, open_floor=key == "low_above"),)
            else:
                cases = (Box(roof=bound, open_roof=key == "high_below"),)
            union = tuple(box & case for box in union for case in cases)
        return tuple(box for box in union if box.possible())

    def holds(self, low: float, high: float) -> bool:
        """Whether the interval ``[low, high]`` meets every condition."""
        return any(box.holds(low, high) for box in self.boxes())

    def to_dict(self) -> dict[str, float | list[float]]:
        """Return the conditions as they stand in the file."""
        return {key: list(bound) if isinstance(bound, tuple) else bound for key, bound in self.conditions.items()}

    def words(self, unit: str = "") -> str:
        """The side as the end of a sentence, e.g. ``at or above 64 B/request``."""
        tail = "" if unit in ("", "1") else f" {unit}"
        parts = []
        for key, bound in self.conditions.items():
            if isinstance(bound, tuple):
                one = bound[0] == bound[1]
                where = ("exactly" if key == "within" else "away from") if one else RANGES[key]
                parts.append(f"{where} {bound[0]:.12g}" if one else f"{where} [{bound[0]:.12g}, {bound[1]:.12g}]")
            else:
                parts.append(f"{BOUNDS[key]} {bound:.12g}")
        return " and ".join(parts) + tail


@dataclass(frozen=True, slots=True)
class Rule:
    """Two sides; an interval that meets neither is inconclusive."""

    supported: Side
    refuted: Side

    def outcome(self, low: float, high: float) -> str:
        """``"supported"``, ``"refuted"`` or ``"inconclusive"`` for the interval ``[low, high]``."""
        if self.supported.holds(low, high):
            return "supported"
        return "refuted" if self.refuted.holds(low, high) else "inconclusive"

    def overlaps(self) -> bool:
        """Whether some interval would be both supported and refuted."""
        return any((a & b).possible() for a in self.supported.boxes() for b in self.refuted.boxes())

    def numbers(self) -> tuple[float, ...]:
        """Every bound that the rule names, in order."""
        bounds = [*self.supported.conditions.values(), *self.refuted.conditions.values()]
        return tuple(number for bound in bounds for number in (bound if isinstance(bound, tuple) else (bound,)))


def parse_side(table: Any, bad: Callable[[str, str], ClaimsError]) -> Side:
    """Check one side of a rule; ``bad(problem, way_out)`` makes the error."""
    known = ", ".join((*BOUNDS, *RANGES))
    if not isinstance(table, dict) or not table:
        raise bad("has no condition", f"give at least one of {known}")
    conditions: dict[str, float | tuple[float, float]] = {}
    for key, bound in table.items():
        if key in BOUNDS and finite(bound):
            conditions[key] = float(bound)
        elif key in RANGES and isinstance(bound, list) and len(bound) == 2 and all(map(finite, bound)):
            conditions[key] = (float(bound[0]), float(bound[1]))
            if bound[0] > bound[1]:
                raise bad(f"{key} = {bound} has its ends the wrong way round", "write the smaller one first")
        elif key in BOUNDS or key in RANGES:
            kind = "a finite number" if key in BOUNDS else "a list of two finite numbers"
            raise bad(f"{key} = {bound!r} is not {kind}", "correct the bound")
        else:
            raise bad(f"unknown condition {key!r}", f"use {known}")
    side = Side(conditions)
    if not side.boxes():
        raise bad("no interval can satisfy it", "widen it, or drop one of its conditions")
    return side


def finite(value: Any) -> bool:
    """Whether ``value`` is a number that a float can hold: no bool, NaN, infinity or over-long integer."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
