"""Chain problems as tensors, made on the device: endless training data without a Python loop over problems.

Every step of a chain is a map of a small set onto itself (31 numbers, 5 places, 6 letters, a table of entities), so all
states of all problems come from a parallel prefix composition of maps, log2(N) gathers instead of N steps; digits are
running sums.

>>> batch = make("modular", 50, 2, torch.Generator().manual_seed(0))
>>> batch.ids.shape, batch.start  # two steps of four words and the end are to be produced
(torch.Size([50, 25]), 16)
>>> vocabulary.decode(batch.ids[0]).split()[:3], vocabulary.decode(batch.ids[0, batch.start - 1 :]).split()[0]
(['<bos>', 'modular', 'from'], 'chain')
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import torch

from o1lab.errors import TrainingError, UnknownName
from o1lab.models import vocabulary

OPERAND_WIDTH = {"modular": 1, "digits": 3, "symbols": 0, "hops": 0}
STATE_WIDTH = {"modular": 1, "digits": 3, "symbols": 5, "hops": 1}
REACHABLE = 12
"""Entities of a hop table that the chain can come to; more are distractors."""


@dataclass(frozen=True)
class Batch:
    """Problems of one shape: the same variant, program length and number of asked steps in every row.

    Attributes
    ----------
    ids : LongTensor, shape (rows, tokens)
        Prompt, chain and ``<eos>``, without padding.
    start : int
        Column of the first token to be produced; the loss is on ``ids[:, start:]``.
    steps, asked : int
        Program length N, and how many of its steps are asked for.
    """

    variant: str
    ids: torch.Tensor
    start: int
    steps: int
    asked: int


@dataclass(frozen=True)
class Parts:
    """The pieces of a batch of problems as token ids, before they are laid out.

    Attributes
    ----------
    operators : LongTensor, shape (rows, steps)
    operands : LongTensor, shape (rows, steps, operand width)
    states : LongTensor, shape (rows, steps + 1, state width)
        The start state and the state after each step.
    facts : LongTensor, shape (rows, facts, 3), or None
    """

    operators: torch.Tensor
    operands: torch.Tensor
    states: torch.Tensor
    facts: torch.Tensor | None = None


def tokens(
    variant: str, steps: int, asked: int | None = None, entities: int = REACHABLE, difficulty: float = 1.0
) -> tuple[int, int]:
    """Tokens of a prompt, and of what is to be produced (with ``<eos>``).

    >>> tokens("hops", 128), tokens("digits", 192)
    ((411, 385), (972, 1537))
    """
    wide, state = OPERAND_WIDTH[variant], STATE_WIDTH[variant]
    facts = 1 + 3 * math.prod(table(entities, difficulty)) if variant == "hops" else 0
    asked = steps if asked is None else asked
    return 9 + state + facts + (2 + wide) * steps, (2 + wide + state) * asked + 1


def table(entities: int, difficulty: float) -> tuple[int, int]:
    """Entities and relations of a hop table of ``entities``, at a difficulty.

    Relations matter more: with one of them a fact is found by its entity alone, with more it takes both.

    >>> table(12, 0.15), table(12, 0.6), table(12, 1.0)
    ((4, 1), (7, 2), (12, 4))
    """
    return min(entities, max(4, round(entities * difficulty))), max(1, round(vocabulary.RELATIONS * difficulty))


def make(
    variant: str, rows: int, steps: int, generator: torch.Generator, *, asked: int | None = None,
    shuffled: float = 0.0, entities: int = REACHABLE, difficulty: float = 1.0,
) -> Batch:  # fmt: skip
    """``rows`` new problems of one variant on the generator's device.

    Parameters
    ----------
    steps : int
        Program length N, 1 to 512.
    asked : int, optional
        How many steps are asked for, from a random entry on; default all.
    shuffled : float
        Share of the rows whose program is shown in random order.
    entities : int
        Size of the hop table, 2 to 64; past the twelfth they are distractors.
    difficulty : float
        0 to 1: the share of operands, digits, rules or relations and entities in use, for a curriculum. Steps of a few
        kinds are learnt at once, and each new one soon after; all of them from the start are a long plateau.

    Raises
    ------
    UnknownName, TrainingError
        No such variant; sizes that the vocabulary cannot show.
    """
    asked = steps if asked is None else asked
    if variant not in vocabulary.VARIANTS:
        raise UnknownName("variant", variant, vocabulary.VARIANTS)
    if not (rows > 0 and 0 < asked <= steps <= vocabulary.STEPS and 1 < entities <= vocabulary.ENTITIES):
        raise TrainingError(
            f"no batch has rows={rows}, steps={steps}, asked={asked}, entities={entities}: at least one row, "
            f"1 to {vocabulary.STEPS} steps, no more asked for than there are, 2 to {vocabulary.ENTITIES} entities"
        )
    parts = draw(variant, rows, steps, generator, entities=entities, difficulty=difficulty)
    device = generator.device
    base = torch.randint(vocabulary.STEPS - steps + 1, (rows, 1), generator=generator, device=device)
    labels = vocabulary.STEP + base + torch.arange(steps, device=device)
    entries = torch.cat([labels.unsqueeze(2), parts.operators.unsqueeze(2), parts.operands], 2)
    first = torch.randint(steps - asked + 1, (rows, 1), generator=generator, device=device)
    places = first + torch.arange(asked, device=device)
    chain = torch.cat([taken(entries, places), taken(parts.states, places + 1)], 2)
    order = shown(rows, steps, shuffled, generator)

    def word(token: str) -> torch.Tensor:
        return torch.full((rows, 1), vocabulary.INDEX[token], device=device)

    pieces = [word("<bos>"), word(variant), word("from"), labels.gather(1, places[:, :1])]
    pieces += [word("to"), labels.gather(1, places[:, -1:]), word("state"), taken(parts.states, first).flatten(1)]
    if parts.facts is not None:
        pieces += [word("facts"), parts.facts.flatten(1)]
    pieces += [word("program"), taken(entries, order).flatten(1), word("chain")]
    start = sum(piece.shape[1] for piece in pieces)
    return Batch(variant, torch.cat([*pieces, chain.flatten(1), word("<eos>")], 1), start, steps, asked)


def draw(
    variant: str, rows: int, steps: int, generator: torch.Generator, *, entities: int = REACHABLE,
    modulus: int = vocabulary.NUMBERS, difficulty: float = 1.0,
) -> Parts:  # fmt: skip
    """Operators, operands and all states of ``rows`` random chains of ``steps`` steps, as token ids."""
    device = generator.device

    def random(high: int, *shape: int) -> torch.Tensor:
        return torch.randint(high, shape, generator=generator, device=device)

    none = torch.empty(rows, steps, 0, dtype=torch.long, device=device)
    if variant == "modular":
        most = max(2, round(modulus * difficulty))
        operators, start = random(3, rows, steps), random(modulus, rows, 1)
        operands = torch.where(operators == 2, 1 + random(most - 1, rows, steps), random(most, rows, steps))
        through = compose(_modular(modulus, device)[operators, operands])
        after = through.gather(2, start.unsqueeze(1).expand(-1, steps, 1)).squeeze(2)
        states = vocabulary.NUMBER + torch.cat([start, after], 1).unsqueeze(2)
        return Parts(vocabulary.OPERATOR + operators, vocabulary.NUMBER + operands.unsqueeze(2), states)
    if variant == "digits":
        operators, start = random(2, rows, steps), random(1000, rows, 1)
        each = random(max(2, round(10 * difficulty)), rows, steps, 3)
        operands = each[..., 0] + 10 * each[..., 1] + 100 * each[..., 2]
        after = (start + ((1 - 2 * operators) * operands).cumsum(1)) % 1000
        states = _digits(torch.cat([start, after], 1))
        return Parts(vocabulary.OPERATOR + operators, _digits(operands), states)
    if variant == "symbols":
        letters, places = _rules(device)
        some = max(4, round(len(letters) * difficulty))
        rules, start = random(some, rows, steps), random(len(vocabulary.LETTERS), rows, vocabulary.PLACES)
        moved = start.unsqueeze(1).expand(-1, steps, -1).gather(2, compose(places[rules], inner=True))
        after = compose(letters[rules]).gather(2, moved)
        states = vocabulary.LETTER + torch.cat([start.unsqueeze(1), after], 1)
        return Parts(vocabulary.RULE + rules, none, states)
    entities, count = table(entities, difficulty)
    reachable = min(entities, REACHABLE)
    keys = torch.rand(rows, vocabulary.ENTITIES, generator=generator, device=device)
    names = vocabulary.ENTITY + keys.argsort(1)[:, :entities]
    words = vocabulary.RELATION + torch.arange(vocabulary.RELATIONS, device=device).expand(rows, -1)
    if count < vocabulary.RELATIONS:
        words = vocabulary.RELATION + torch.rand(words.shape, generator=generator, device=device).argsort(1)[:, :count]
    groups = [(size, begin) for size, begin in ((reachable, 0), (entities - reachable, reachable)) if size]

    def shuffles(size: int) -> torch.Tensor:
        return torch.rand(rows, count, size, generator=generator, device=device).argsort(2)

    leads = torch.cat([shuffles(size) + begin for size, begin in groups], 2)
    relations, start = random(count, rows, steps), random(reachable, rows, 1)
    through = compose(taken(leads[:, :, :reachable], relations))
    after = through.gather(2, start.unsqueeze(1).expand(-1, steps, 1)).squeeze(2)
    states = names.gather(1, torch.cat([start, after], 1)).unsqueeze(2)
    targets = names.gather(1, leads.flatten(1)).view(rows, count, entities)
    known = words.unsqueeze(2).expand_as(targets), names.unsqueeze(1).expand_as(targets), targets
    facts = torch.stack(known, 3).flatten(1, 2)
    facts = taken(facts, shown(rows, count * entities, 1.0, generator))
    return Parts(words.gather(1, relations), none, states, facts)


def compose(maps: torch.Tensor, inner: bool = False) -> torch.Tensor:
    """Prefix compositions of maps of ``m`` things onto themselves (Hillis and Steele's scan).

    Parameters
    ----------
    maps : LongTensor, shape (rows, steps, m)
        ``maps[:, k, x]`` is what step k makes of x.
    inner : bool
        Compose on the inside (first map outermost), as for moves of places; default: the first map acts first.

    Examples
    --------
    >>> compose(torch.tensor([[[1, 2, 0], [1, 2, 0], [0, 0, 0]]])).tolist()
    [[[1, 2, 0], [2, 0, 1], [0, 0, 0]]]
    """
    reach = 1
    while reach < maps.shape[1]:
        early, late = maps[:, :-reach], maps[:, reach:]
        joined = early.gather(2, late) if inner else late.gather(2, early)
        maps = torch.cat([maps[:, :reach], joined], 1)
        reach *= 2
    return maps


def taken(values: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """``values`` (rows, n, width) at ``places`` (rows, k), as (rows, k, width)."""
    return values.gather(1, places.unsqueeze(2).expand(-1, -1, values.shape[2]))


def shown(rows: int, count: int, shuffled: float, generator: torch.Generator) -> torch.Tensor:
    """Row by row either 0 to count - 1, or (for the share ``shuffled``) a random order of it."""
    device = generator.device
    keys = torch.rand(rows, count, generator=generator, device=device)
    straight = torch.rand(rows, 1, generator=generator, device=device) >= shuffled
    return torch.where(straight, torch.arange(count, device=device) / count, keys).argsort(dim=1, stable=True)


def _digits(values: torch.Tensor) -> torch.Tensor:
    """Token ids of three digits, least significant first."""
    return vocabulary.NUMBER + torch.stack([values % 10, values // 10 % 10, values // 100], -1)


@cache
def _modular(modulus: int, device: torch.device) -> torch.Tensor:
    """Maps of the operators + - * by operand, shape (3, modulus, modulus)."""
    if not 2 <= modulus <= vocabulary.NUMBERS:
        raise TrainingError(f"a modulus is 2 to {vocabulary.NUMBERS}, not {modulus}")
    operand, state = torch.arange(modulus, device=device).view(-1, 1), torch.arange(modulus, device=device)
    return torch.stack([(state + operand) % modulus, (state - operand) % modulus, state * operand % modulus])


@cache
def _rules(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """What each rewriting rule does to letters, shape (28, 6), and where each place's letter comes from, (28, 5)."""
    letters, places = list(range(len(vocabulary.LETTERS))), list(range(vocabulary.PLACES))

    def exchanged(values: list[int], one: int, other: int) -> list[int]:
        return [other if value == one else one if value == other else value for value in values]

    moves = [exchanged(places, *pair) for pair in vocabulary.SWAPS]
    moves += [places[1:] + places[:1], places[-1:] + places[:-1], places[::-1]]
    changes = [exchanged(letters, *map(vocabulary.LETTERS.index, pair)) for pair in vocabulary.EXCHANGES]
    by_letter = [letters] * len(moves) + changes
    by_place = moves + [places] * len(changes)
    return torch.tensor(by_letter, device=device), torch.tensor(by_place, device=device)
