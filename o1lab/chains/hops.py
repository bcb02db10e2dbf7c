"""Hop chains: from entity to entity along relations, with the table of facts in the prompt.

Each relation maps the entities one to one onto themselves, so a wrong entity never finds its way back by chance:
every step is a bijection, as in the other families.

>>> table = {("r0", "e5"): "e9", ("r1", "e9"): "e3"}
>>> HOPS.apply(HOPS.apply("e5", "r0", "", table), "r1", "", table)
'e3'
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from o1lab.chains.chance import Chance
from o1lab.errors import ChainError

ENTITIES = tuple(f"e{number}" for number in range(64))
RELATIONS = tuple(f"r{number}" for number in range(4))
REACHABLE = 12
"""Entities that the chain can come to; more in the table are distractors."""


NAMES = (
    "Alice Bob Carol David Emma Frank Greta Henry Irene Jacob Karen Louis Maria Nadia Oscar Paula Quinn Robert Sarah "
    "Thomas Ursula Victor Wanda Xavier Yvonne Zoltan Aaron Bella Cedric Diana Edgar Fiona Gustav Helena Ivan Julia "
    "Kevin Laura Martin Nora Oliver Petra Ramon Sofia Tobias Ulrich Vera Walter Ximena Yasmin Zelda Albert Bianca "
    "Conrad Daphne Elias Flora Gerald Hannah Igor Judith Klaus Linda Moritz"
).split()
KINDS = ("friend", "boss", "guide", "rival")
_OF_NAME = {name.lower(): entity for name, entity in zip(NAMES, ENTITIES, strict=True)}
_KIND = re.compile(r"\b(friend|boss|guide|rival)\b", re.I)
_NAME = re.compile(r"\b(" + "|".join(NAMES) + r")\b", re.I)
_SUBJECT = re.compile(r"\b([A-Z][a-z]+) is (?:the )?(?:friend|boss|guide|rival) of\b")


class Hops:
    """Entities joined by four relations."""

    variant, task = "hops", "hops"
    operators = RELATIONS
    operand_width, state_width = 0, 1
    rule = "You are with one person. Each instruction leads to another person, as the facts say."

    def entry(self, chance: Chance) -> tuple[str, str]:
        """A relation and no operand."""
        return chance.pick(RELATIONS), ""

    def valid(self, state: str, table: Mapping[tuple[str, str], str]) -> bool:
        """Whether the table says where every relation leads from ``state``."""
        return (RELATIONS[0], state) in table

    def apply(self, state: str, operator: str, operand: str, table: Mapping[tuple[str, str], str] | None = None) -> str:
        """The state after the step."""
        if operand:
            raise ChainError(f"the operand {operand!r} has no meaning: relations take none")
        found = (table or {}).get((operator, state))
        if found is None:
            raise ChainError(f"no fact says where {operator!r} leads from {state!r}")
        return found

    def carries(self, state: str, operator: str, operand: str) -> bool:
        """Never."""
        return False

    def say_state(self, state: str) -> str:
        """The person's name."""
        return NAMES[int(state[1:])]

    def say_start(self, state: str) -> str:
        """The sentence that gives the first state."""
        return f"Start with {self.say_state(state)}."

    def say_fact(self, relation: str, name: str, other: str) -> str:
        """A fact."""
        return f"The {KINDS[int(relation[1:])]} of {self.say_state(name)} is {self.say_state(other)}."

    def say_entry(self, operator: str, operand: str) -> str:
        """An instruction."""
        return f"go to the {KINDS[int(operator[1:])]}"

    def say_step(self, before: str, operator: str, operand: str, after: str) -> str:
        """A worked step."""
        return f"the {KINDS[int(operator[1:])]} of {self.say_state(before)} -> {self.say_state(after)}"

    def read_state(self, text: str) -> str | None:
        """The entity of the last name in ``text``; a name that nobody has is given back as it is."""
        if found := _NAME.findall(text):
            return _OF_NAME[found[-1].lower()]
        found = re.findall(r"\b[A-Z][a-z]+\b", text)
        return found[-1] if found else None

    def read_step(self, text: str, before: str | None) -> tuple[str | None, str | None, str | None]:
        """Relation, no operand, and state of one step, ``None`` where ``text`` does not say."""
        said, arrow, after = text.rpartition("->")
        kind = _KIND.search(said if arrow else text)
        operator = f"r{KINDS.index(kind[1].lower())}" if kind else None
        if not arrow:
            subject = _SUBJECT.search(text)
            after = subject[1] if subject else re.sub(r"^\s+of\s+\w+", "", text[kind.end() :] if kind else text)
        return operator, None if operator is None else "", self.read_state(after)


def table(chance: Chance, extra: Chance, entities: int) -> tuple[str, list[tuple[str, str, str]]]:
    """A first entity and the facts (relation, from, to), unshuffled.

    Parameters
    ----------
    chance, extra : Chance
        For what the chain can reach, and for the distractors: the former is the same however many of the latter.
    entities : int
        How many entities the table has, 4 facts each. Those past the twelfth have facts among themselves only.
    """
    names = chance.shuffled(ENTITIES)
    facts = _closed(chance, names[: min(entities, REACHABLE)])
    return chance.pick(names[: min(entities, REACHABLE)]), facts + _closed(extra, names[REACHABLE:entities])


def _closed(chance: Chance, names: list[str]) -> list[tuple[str, str, str]]:
    """Facts that map ``names`` onto themselves, one shuffle a relation."""
    return [
        (relation, name, other)
        for relation in RELATIONS
        for name, other in zip(names, chance.shuffled(names), strict=True)
    ]


HOPS = Hops()
