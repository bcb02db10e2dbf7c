"""The same problem in disguise: each family has symmetries that turn a problem into another one and its answer along.

Letters may change places in the alphabet, entities may change names, and sums and products modulo m stay true when all
states (and what is added) are multiplied by a number that has an inverse. Who knows the answer to the one problem knows
that to the other, but a model has to look at other tokens: an error that hangs on a state comes again in the same
problem, and need not come in a disguised one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import gcd
from typing import Any

from o1lab.chains.arithmetic import DIGITS, MODULAR, MODULUS, WRAP
from o1lab.chains.chance import Chance
from o1lab.chains.hops import ENTITIES
from o1lab.chains.problems import whole
from o1lab.chains.samples import Sample, worked
from o1lab.chains.symbols import LETTERS

Change = Callable[[str], str]


@dataclass(frozen=True)
class Disguised:
    """A problem under a symmetry: ``sample``, and how its states (and those of the original) are taken over."""

    sample: Sample
    over: Change
    back: Change


def disguise(sample: Sample, seed: int) -> Disguised:
    """The problem under a random symmetry of its family.

    Labels, their order and the number of steps stay; start, states, operands and, for symbols, the letters in the rules
    change together, so each gold state of the one is that of the other, taken over.

    Examples
    --------
    >>> from o1lab import chains
    >>> sample = chains.make("symbols", 4, 1, 0)[0]
    >>> other = disguise(sample, 1)
    >>> sample.start, other.sample.start
    ('A A F A F', 'F F A F A')
    >>> other.back(other.sample.answer) == sample.answer
    True
    """
    chance = Chance("o1lab disguise", sample.id, whole("seed", seed), sample.variant)
    over, back, entry = _FAMILIES[sample.variant](chance)
    program = tuple(
        replace(one, operator=operator, operand=operand)
        for one in sample.program
        for operator, operand in (entry(one.operator, one.operand),)
    )
    facts = tuple((relation, over(name), over(other)) for relation, name, other in sample.facts)
    drawn = replace(
        sample, id=f"{sample.id}-disguise{seed}", start=over(sample.start), program=program, facts=facts
    )  # fmt: skip
    return Disguised(worked(drawn, [step.label for step in sample.steps]), over, back)


def _words(mapping: Mapping[str, str]) -> Change:
    return lambda state: " ".join(mapping[word] for word in state.split())


def _permuted(words: Sequence[str], chance: Chance) -> tuple[dict[str, str], Change, Change]:
    there = dict(zip(words, chance.shuffled(words), strict=True))
    return there, _words(there), _words({new: old for old, new in there.items()})


def _symbols(chance: Chance) -> tuple[Change, Change, Callable[[str, str], tuple[str, str]]]:
    there, over, back = _permuted(LETTERS, chance)

    def entry(operator: str, operand: str) -> tuple[str, str]:
        one, mark, other = operator.partition("x")
        exchange = mark and one in there and other in there
        return "x".join(sorted((there[one], there[other]))) if exchange else operator, operand

    return over, back, entry


def _hops(chance: Chance) -> tuple[Change, Change, Callable[[str, str], tuple[str, str]]]:
    _, over, back = _permuted(ENTITIES, chance)
    return over, back, lambda operator, operand: (operator, operand)


def _numbers(family: Any, modulus: int) -> Callable[[Chance], tuple[Change, Change, Callable[..., tuple[str, str]]]]:
    units = [number for number in range(1, modulus) if gcd(number, modulus) == 1]

    def draw(chance: Chance) -> tuple[Change, Change, Callable[[str, str], tuple[str, str]]]:
        unit = chance.pick(units)

        def times(factor: int) -> Change:
            return lambda state: family.state(family.value(state) * factor % modulus)

        over = times(unit)
        return over, times(pow(unit, -1, modulus)), lambda op, operand: (op, operand if op == "*" else over(operand))

    return draw


_FAMILIES = {
    "symbols": _symbols, "hops": _hops, "modular": _numbers(MODULAR, MODULUS), "digits": _numbers(DIGITS, WRAP),
}  # fmt: skip
