"""Arithmetic chains: one number modulo 31 (``modular``), or three digits with carries and borrows (``digits``).

>>> MODULAR.apply("18", "*", "3")
'23'
>>> DIGITS.apply("5 6 2", "-", "9 9 9")  # 265 - 999 = -734, which wraps to 266
'6 6 2'
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from o1lab.chains.chance import Chance
from o1lab.errors import ChainError

MODULUS = 31
WRAP = 1000
NUMBERS = tuple(str(number) for number in range(MODULUS))
_VALUE = {text: number for number, text in enumerate(NUMBERS)}
_DIGITS = tuple(" ".join(f"{number:03}"[::-1]) for number in range(WRAP))
_OF_DIGITS = {text: number for number, text in enumerate(_DIGITS)}


VERBS = {"+": "add", "-": "subtract", "*": "multiply by"}
_VERB = re.compile(
    r"\b(add(?:ing)?|plus|subtract(?:ing)?|minus|multipl\w+\s(?:\w+\s){0,2}?by|times)\s*\(?(-?\d+)", re.I
)
_SIGNS = {"ad": "+", "pl": "+", "su": "-", "mi": "-", "mu": "*", "ti": "*"}
_EXPRESSION = re.compile(r"(-?\d+)\s*\)?\s*([-+*])\s*\(?\s*(-?\d+)")
_ANY = re.compile(r"(?<![\w-])-?\d+")
_ARROW = re.compile(r"->\D{0,12}?(-?\d+)")
_RESULT = re.compile(
    r"(?:[=:]|\b(?:remainder|becom\w+|wrap\w*|leav\w+|giv\w+|gets?|results?|now|reduc\w+|is|so|keep\w*)\b"
    r"(?:\s(?:to|us|is|of|in|the|new|number|state|value|result|back|around|down|we|have|get|it)){0,6})"
    r"[\s:=]{0,6}\(?\s{0,2}(-?\d+)",
    re.I,
)


class _Numbers:
    """What the two variants share: how a step on numbers is said and read in ordinary language."""

    def value(self, state: str) -> int:
        """The number that a state stands for."""
        raise NotImplementedError

    def state(self, value: int) -> str:
        """The state of a number; of one that is out of range a text that is no valid state."""
        raise NotImplementedError

    def say_state(self, state: str) -> str:
        """The number as a person writes it."""
        raise NotImplementedError

    def say_start(self, state: str) -> str:
        """The sentence that gives the first state."""
        return f"Start with the number {self.say_state(state)}."

    def say_entry(self, operator: str, operand: str) -> str:
        """An instruction."""
        return f"{VERBS[operator]} {self.say_state(operand)}"

    def say_step(self, before: str, operator: str, operand: str, after: str) -> str:
        """A worked step."""
        a, b = self.value(before), self.value(operand)
        raw = a + b if operator == "+" else a - b if operator == "-" else a * b
        return f"{self.say_state(before)} {operator} {self.say_state(operand)} = {raw} -> {self.say_state(after)}"

    def read_state(self, text: str) -> str | None:
        """The first number in ``text``."""
        found = _ANY.search(re.sub(r"(?i)\bsteps?\s*\d+", "", text))
        return self.state(int(found[0])) if found else None

    def read_step(self, text: str, before: str | None) -> tuple[str | None, str | None, str | None]:
        """Operator, operand and state of one step, ``None`` where ``text`` does not say.

        ``before``, the state as last read, tells which side of ``5 + 13`` is the operand.
        """
        expression, verb = _EXPRESSION.search(text), _VERB.search(text)
        operator = operand = None
        end = 0
        if expression:
            a, operator, b = expression.groups()
            a, b, end = self.state(int(a)), self.state(int(b)), expression.end()
            operand = a if operator in "+*" and before == b and before != a else b
        elif verb:
            operator, operand, end = _SIGNS[verb[1][:2].lower()], self.state(int(verb[2])), verb.end()
        line = text[end:].partition("\n")[0] if end else text.strip().partition("\n")[0]
        for pattern, where in ((_ARROW, text[end:]), (_RESULT, text[end:]), (_ANY, line)):
            if found := pattern.findall(where):
                return operator, operand, self.state(int(found[-1]))
        return operator, operand, None


class Modular(_Numbers):
    """States 0 to 30; ``+``, ``-`` and ``*`` modulo 31. Every drawn step is a bijection: 31 is prime, no ``* 0``."""

    variant, task = "modular", "arithmetic"
    operators = ("+", "-", "*")
    operand_width, state_width = 1, 1
    rule = (
        f"You keep one number. Each instruction changes it. The result is always taken modulo {MODULUS}, "
        f"so it lies between 0 and {MODULUS - 1}."
    )

    def start(self, chance: Chance) -> str:
        """A first state."""
        return chance.pick(NUMBERS)

    def entry(self, chance: Chance) -> tuple[str, str]:
        """An operator and its operand."""
        operator = chance.pick(self.operators)
        return operator, chance.pick(NUMBERS[1:] if operator == "*" else NUMBERS)

    def valid(self, state: str, table: Mapping[tuple[str, str], str]) -> bool:
        """Whether ``state`` can be a state."""
        return state in _VALUE

    def apply(self, state: str, operator: str, operand: str, table: Mapping[tuple[str, str], str] | None = None) -> str:
        """The state after the step."""
        try:
            a, b = _VALUE[state], _VALUE[operand]
        except KeyError as error:
            raise ChainError(f"{error.args[0]!r} is no number from 0 to {MODULUS - 1}") from error
        if operator == "+":
            return NUMBERS[(a + b) % MODULUS]
        if operator == "-":
            return NUMBERS[(a - b) % MODULUS]
        if operator == "*":
            return NUMBERS[a * b % MODULUS]
        raise ChainError(f"{operator!r} is no operator of modular chains; they have + - *")

    def carries(self, state: str, operator: str, operand: str) -> bool:
        """Never: a number is one token here."""
        return False

    def value(self, state: str) -> int:
        """The number that a state stands for."""
        return _VALUE[state]

    def state(self, value: int) -> str:
        """The state of a number."""
        return str(value)

    def say_state(self, state: str) -> str:
        """The number as a person writes it."""
        return state


class Digits(_Numbers):
    """States of three digits, least significant first; ``+`` and ``-`` modulo 1000, so a real overflow wraps."""

    variant, task = "digits", "arithmetic"
    operators = ("+", "-")
    operand_width, state_width = 3, 3
    rule = (
        "You keep one number of three digits. Each instruction changes it. Only the last three digits are kept: "
        f"the result is always taken modulo {WRAP}, so it lies between 0 and {WRAP - 1}."
    )

    def start(self, chance: Chance) -> str:
        """A first state."""
        return chance.pick(_DIGITS)

    def entry(self, chance: Chance) -> tuple[str, str]:
        """An operator and its operand."""
        return chance.pick(self.operators), chance.pick(_DIGITS)

    def valid(self, state: str, table: Mapping[tuple[str, str], str]) -> bool:
        """Whether ``state`` can be a state."""
        return state in _OF_DIGITS

    def apply(self, state: str, operator: str, operand: str, table: Mapping[tuple[str, str], str] | None = None) -> str:
        """The state after the step."""
        try:
            a, b = _OF_DIGITS[state], _OF_DIGITS[operand]
        except KeyError as error:
            raise ChainError(f"{error.args[0]!r} is no number of three digits, least significant first") from error
        if operator == "+":
            return _DIGITS[(a + b) % WRAP]
        if operator == "-":
            return _DIGITS[(a - b) % WRAP]
        raise ChainError(f"{operator!r} is no operator of digits chains; they have + -")

    def carries(self, state: str, operator: str, operand: str) -> bool:
        """Whether a digit carries or borrows, a wrap at 1000 or below 0 included."""
        a, b = _OF_DIGITS[state], _OF_DIGITS[operand]
        if operator == "+":
            return any(a % place + b % place >= place for place in (10, 100, WRAP))
        return any(a % place < b % place for place in (10, 100, WRAP))

    def value(self, state: str) -> int:
        """The number that a state stands for."""
        return _OF_DIGITS[state]

    def state(self, value: int) -> str:
        """The state of a number; one with a sign or more than three digits keeps them and is no valid state."""
        return _DIGITS[value] if 0 <= value < WRAP else " ".join(str(abs(value))[::-1]) + (" -" if value < 0 else "")

    def say_state(self, state: str) -> str:
        """The number as a person writes it, most significant digit first."""
        return state[::-2]


MODULAR, DIGITS = Modular(), Digits()
