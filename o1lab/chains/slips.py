"""Ways to come to a wrong result although everything was read right: faults of carrying, and an earlier state reused.

>>> from o1lab.chains import make
>>> sample = make("arithmetic", 1, 1, seed=0, variant="digits")[0]  # 291 - 499 = -208, which wraps to 792
>>> sample.start, sample.gold
('1 9 2', 's27 - 9 9 4 2 9 7')
>>> carries(sample, sample.steps[0], sample.start)["2 0 8"]
'the borrow out of the units digit is dropped'
"""

from __future__ import annotations

from collections.abc import Iterator

from o1lab.chains.arithmetic import MODULUS, WRAP
from o1lab.chains.samples import FAMILIES, Sample, Step
from o1lab.chains.symbols import LETTERS, PLACES

DIGIT_NAMES = ("units", "tens")


def states(sample: Sample) -> int:
    """How many states a result can be: 31, 1,000, 7,776, or the entities of the table."""
    if sample.variant == "hops":
        return len({name for _, name, _ in sample.facts})
    return {"modular": MODULUS, "digits": WRAP, "symbols": len(LETTERS) ** PLACES}[sample.variant]


def reuse(sample: Sample, gold: Step) -> dict[str, int]:
    """Wrong results of the step's operation on states before the last, with the latest step after which each stood.

    Step 0 is the state given.
    """
    before = [sample.start, *(step.state for step in sample.steps[: max(0, gold.index - 2)])]
    found = {sample.apply(state, gold.operator, gold.operand): after for after, state in enumerate(before)}
    found.pop(gold.state, None)
    return found if gold.index > 1 else {}


def carries(sample: Sample, gold: Step, before: str) -> dict[str, str]:
    """Wrong results that a fault of carrying gives from the state ``before``, each with what that fault is."""
    found: dict[str, str] = {}
    if sample.task == "arithmetic":
        for state, what in _carries(sample, gold, before):
            if state != gold.state:
                found.setdefault(state, what)
    return found


def _carries(sample: Sample, gold: Step, before: str) -> Iterator[tuple[str, str]]:
    family = FAMILIES[sample.variant]
    a, b = family.value(before), family.value(gold.operand)
    raw = a + b if gold.operator == "+" else a - b if gold.operator == "-" else a * b
    if sample.variant == "modular":
        for value in range(raw % MODULUS - MODULUS**2, MODULUS**2, MODULUS):
            if not 0 <= value < MODULUS:
                yield str(value), f"{value} is not reduced modulo {MODULUS}"
        return
    sign, name = (1, "carry") if gold.operator == "+" else (-1, "borrow")
    right, carried = _column(a, b, sign)
    for place, digit in enumerate(DIGIT_NAMES):
        what = f"the {name} out of the {digit} digit is {'dropped' if carried[place] else 'invented'}"
        yield _joined(_column(a, b, sign, turned=place)[0]), what
        by = -sign if carried[place] else sign
        yield _joined([*right[: place + 1], (right[place + 1] + by) % 10, *right[place + 2 :]]), what
    yield _joined([(a // unit + sign * (b // unit)) % 10 for unit in (1, 10, 100)]), "carrying is left out"
    if not 0 <= raw < WRAP:
        yield family.state(raw), f"{raw} is not wrapped at {WRAP}"
        yield family.state(abs(raw) % WRAP), f"{raw} loses its sign instead of wrapping"


def _column(a: int, b: int, sign: int, turned: int | None = None) -> tuple[list[int], list[bool]]:
    """Digits and carries, units first; the carry out of place ``turned`` is the wrong way round and goes on so."""
    digits, carried, carry = [], [], False
    for place in range(3):
        total = a // 10**place % 10 + sign * (b // 10**place % 10 + carry)
        digits.append(total % 10)
        carry = not 0 <= total < 10
        if place == turned:
            carry = not carry
        carried.append(carry)
    return digits, carried


def _joined(digits: list[int]) -> str:
    return " ".join(map(str, digits))
