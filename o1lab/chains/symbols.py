"""Symbol chains: five places with letters A to F, rewritten by rules that each can be undone.

>>> SYMBOLS.apply("A C F B A", "swap02", "")
'F C A B A'
>>> SYMBOLS.apply("F C A B A", "left", ""), SYMBOLS.apply("F C A B A", "AxB", "")
('C A B A F', 'F C B A B')
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import combinations, product

from o1lab.chains.chance import Chance
from o1lab.errors import ChainError

LETTERS = "ABCDEF"
PLACES = 5
_STATES = frozenset(" ".join(letters) for letters in product(LETTERS, repeat=PLACES))


def _swapped(i: int, j: int) -> tuple[int, ...]:
    return tuple(j if place == i else i if place == j else place for place in range(PLACES))


_MOVES = {f"swap{i}{j}": _swapped(i, j) for i, j in combinations(range(PLACES), 2)}
_MOVES |= {"left": (1, 2, 3, 4, 0), "right": (4, 0, 1, 2, 3), "reverse": (4, 3, 2, 1, 0)}
_EXCHANGES = {f"{a}x{b}": str.maketrans(a + b, b + a) for a, b in combinations(LETTERS, 2)}
RULES = (*_MOVES, *_EXCHANGES)
"""The 28 rules: 10 swaps of two places, left, right, reverse, 15 exchanges of two letters everywhere."""


_WORDS = {
    "left": "rotate one place to the left, the first letter goes to the end",
    "right": "rotate one place to the right, the last letter goes to the front",
    "reverse": "reverse the order",
}
LONGEST = 400
"""Characters of a step in which its rule is looked for."""
_PLACES = re.compile(r"\b([1-5])(?:st|nd|rd|th)?\b\D+?\b([1-5])(?:st|nd|rd|th)?\b")
_ORDINALS = {word: str(place) for place, word in enumerate(("first", "second", "third", "fourth", "fifth"), 1)}
_TURN = re.compile(r"\b(?:rotat|shift|cycl|mov)\w*\b.*?\b(left|right)\b|\b(left|right)[- ](?:rotat|shift)", re.I | re.S)
_PAIR = re.compile(
    r"(?:exchang|swap|switch|interchang|replac|every|all|each)\w*\b[^>]*?\b([A-F])\b[^>]*?\b([A-F])\b", re.I
)
_ROW = re.compile(r"\b[A-Z]\b(?:[\s,;.|'\"\[\]()-]*\b[A-Z]\b)+|\b[A-F]{3,8}\b")


class Symbols:
    """Five letters; every rule is a bijection of the 7,776 states."""

    variant, task = "symbols", "symbols"
    operators = RULES
    operand_width, state_width = 0, PLACES
    rule = "You keep five letters in a row, at positions 1 to 5. Each instruction changes them."

    def start(self, chance: Chance) -> str:
        """A first state."""
        return " ".join(chance.pick(LETTERS) for _ in range(PLACES))

    def entry(self, chance: Chance) -> tuple[str, str]:
        """A rule and no operand."""
        return chance.pick(RULES), ""

    def valid(self, state: str, table: Mapping[tuple[str, str], str]) -> bool:
        """Whether ``state`` can be a state."""
        return state in _STATES

    def apply(self, state: str, operator: str, operand: str, table: Mapping[tuple[str, str], str] | None = None) -> str:
        """The state after the step."""
        if state not in _STATES:
            raise ChainError(f"{state!r} is no state of five letters A to F")
        if operand:
            raise ChainError(f"the operand {operand!r} has no meaning: rules take none")
        if operator in _MOVES:
            return " ".join([state[2 * place] for place in _MOVES[operator]])
        if operator in _EXCHANGES:
            return state.translate(_EXCHANGES[operator])
        raise ChainError(f"{operator!r} is no rule; there are {', '.join(RULES[:3])} … {RULES[-1]}")

    def carries(self, state: str, operator: str, operand: str) -> bool:
        """Never."""
        return False

    def say_state(self, state: str) -> str:
        """The letters with spaces."""
        return state

    def say_start(self, state: str) -> str:
        """The sentence that gives the first state."""
        return f"Start with the letters {state}."

    def say_entry(self, operator: str, operand: str) -> str:
        """An instruction."""
        if operator in _EXCHANGES:
            return f"exchange {operator[0]} and {operator[2]} everywhere"
        if operator in _WORDS:
            return _WORDS[operator]
        return f"swap the letters at positions {int(operator[4]) + 1} and {int(operator[5]) + 1}"

    def say_step(self, before: str, operator: str, operand: str, after: str) -> str:
        """A worked step."""
        return f"{self.say_entry(operator, operand)} -> {after}"

    def read_state(self, text: str) -> str | None:
        """The last row of letters in ``text``, however it is set apart and whatever its length."""
        found = _ROW.findall(text)
        return " ".join(re.findall("[A-Z]", found[-1])) if found else None

    def read_step(self, text: str, before: str | None) -> tuple[str | None, str | None, str | None]:
        """Rule, no operand, and state of one step, ``None`` where ``text`` does not say."""
        said, arrow, after = text.rpartition("->")
        state = self.read_state(after) if arrow else self.read_state(text)
        operator = self._read_rule((said.split("->")[0] if arrow else text)[:LONGEST])
        return operator, None if operator is None else "", state

    def _read_rule(self, text: str) -> str | None:
        places = re.sub(
            r"\b(first|second|third|fourth|fifth)\b(?! letter goes)",
            lambda m: _ORDINALS[m[1].lower()],
            text,
            flags=re.I,
        )
        turn, pair = _TURN.search(text), _PAIR.search(text)
        if "revers" in text.lower():
            return "reverse"
        if turn:
            return (turn[1] or turn[2]).lower()
        if (found := _PLACES.search(places)) and found[1] != found[2]:
            i, j = sorted((int(found[1]) - 1, int(found[2]) - 1))
            return f"swap{i}{j}"
        if pair and pair[1].upper() != pair[2].upper():
            return "x".join(sorted((pair[1].upper(), pair[2].upper())))
        return None


SYMBOLS = Symbols()
