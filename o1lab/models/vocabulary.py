"""The fixed vocabulary of the lab's own models: 662 words, separated by spaces in text.

The order is part of every checkpoint, so words may be added at the end and nowhere else.

>>> encode("<bos> modular from s7 to s9 state 13")
[1, 4, 8, 21, 9, 23, 10, 539]
>>> decode([21, 557, 531])
's7 + 5'
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import combinations

from o1lab.errors import ModelError

SPECIAL = ("<pad>", "<bos>", "<eos>", "<unk>")
VARIANTS = ("modular", "digits", "symbols", "hops")
FRAME = ("from", "to", "state", "facts", "program", "chain")
STEPS, NUMBERS, ENTITIES, RELATIONS = 512, 31, 64, 4
"""How many step ids ``s0 …``, numbers ``0 …``, entities ``e0 …`` and relations ``r0 …`` there are."""
OPERATORS, LETTERS, PLACES = ("+", "-", "*"), tuple("ABCDEF"), 5
SWAPS = tuple(combinations(range(PLACES), 2))
EXCHANGES = tuple(combinations(LETTERS, 2))
RULES = (
    *(f"swap{first}{second}" for first, second in SWAPS),
    *("left", "right", "reverse"),
    *(f"{first}x{second}" for first, second in EXCHANGES),
)
"""Rewriting rules: exchange two places (from 0), rotate, rotate, turn round, exchange two letters everywhere."""

TOKENS = (
    *SPECIAL, *VARIANTS, *FRAME,
    *(f"s{number}" for number in range(STEPS)), *(str(number) for number in range(NUMBERS)),
    *OPERATORS, *LETTERS, *RULES,
    *(f"r{number}" for number in range(RELATIONS)), *(f"e{number}" for number in range(ENTITIES)),
)  # fmt: skip
INDEX = {token: place for place, token in enumerate(TOKENS)}
PAD, BOS, EOS, UNK = range(4)
STEP, NUMBER, OPERATOR, LETTER = (INDEX[token] for token in ("s0", "0", "+", "A"))
RULE, RELATION, ENTITY = INDEX[RULES[0]], INDEX["r0"], INDEX["e0"]
"""Ids of the first word of each kind."""


def encode(text: str) -> list[int]:
    """Token ids of ``text``; words outside the vocabulary become ``<unk>``."""
    return [INDEX.get(word, UNK) for word in text.split()]


def decode(ids: Iterable[int]) -> str:
    """Text of token ids, joined by single spaces.

    Raises
    ------
    ModelError
        An id outside the vocabulary.
    """
    ids = [int(number) for number in ids]
    if wrong := [number for number in ids if not 0 <= number < len(TOKENS)]:
        raise ModelError(f"{wrong[0]} is no token id of this vocabulary: they go from 0 to {len(TOKENS) - 1}")
    return " ".join(TOKENS[number] for number in ids)
