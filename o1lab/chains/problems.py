"""Chain problems from a seed: drawn, drawn again with other labels and order, continued from any step.

How long the program is and how far the chain has come are two factors: ``make("symbols", 64, 8)`` asks for all 64
entries, ``make("symbols", 64, 8, first=33, asked=8)`` for eight in the second half of the same eight problems.
"""

from __future__ import annotations

import operator as operators
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from o1lab.chains import hops
from o1lab.chains.chance import Chance
from o1lab.chains.hops import REACHABLE
from o1lab.chains.samples import FAMILIES, LABELS, TASKS, VARIANTS, Entry, Sample, worked
from o1lab.errors import ChainError, UnknownName

ORDERS = ("sorted", "shuffled")


def whole(name: str, value: Any, low: int | None = None, high: int | None = None) -> int:
    """``value`` as an int within bounds, or a ChainError that names it."""
    try:
        number = operators.index(value)
    except TypeError as error:
        raise ChainError(f"{name}={value!r} must be a whole number") from error
    if isinstance(value, bool):
        raise ChainError(f"{name}={value!r} must be a whole number")
    if (low is not None and number < low) or (high is not None and number > high):
        bounds = f"at least {low}" if high is None else f"from {low} to {high}"
        raise ChainError(f"{name}={number} must be {bounds}")
    return number


def make(
    task: str,
    steps: int,
    n: int,
    seed: int = 0,
    *,
    variant: str | None = None,
    first: int = 1,
    asked: int | None = None,
    order: str = "sorted",
    facts: int = REACHABLE,
) -> list[Sample]:
    """``n`` problems, the same on every machine for the same arguments.

    Parameters
    ----------
    task : str
        ``"arithmetic"``, ``"symbols"`` or ``"hops"``.
    steps : int
        N, entries of the program, 1 to 512.
    n : int
        How many problems; those of a smaller ``n`` are the first of a greater one.
    seed : int
        Another seed, other problems.
    variant : str, optional
        For arithmetic ``"modular"`` or ``"digits"``; default: in turn.
    first, asked : int
        Entry that the chain starts with (1-based) and how many steps are asked for, default up to the last entry. The
        problems stay the same: the state given is the one that the steps before ``first`` lead to.
    order : str
        ``"sorted"`` or ``"shuffled"``: how the program is shown.
    facts : int
        Hops only: entities in the table, 2 to 64. Those past the twelfth are distractors.

    Raises
    ------
    UnknownName
        No such task, variant or order.
    ChainError
        A number is out of range or no whole number.

    Examples
    --------
    >>> sample = make("symbols", 2, 1, 0)[0]
    >>> sample.id, len(sample.steps), sample.answer == sample.gold[-9:]
    ('symbols-2-0-0', 2, True)
    >>> make("sums", 2, 1, 0)
    Traceback (most recent call last):
    ...
    o1lab.errors.UnknownName: unknown task 'sums'; did you mean symbols
    """
    if task not in TASKS:
        raise UnknownName("task", str(task), TASKS)
    if variant is not None and variant not in VARIANTS[task]:
        raise UnknownName(f"variant of {task}", str(variant), VARIANTS[task])
    if order not in ORDERS:
        raise UnknownName("order", str(order), ORDERS)
    steps, n, seed = whole("steps", steps, 1, LABELS), whole("n", n, 1), whole("seed", seed)
    first = whole("first", first, 1, steps)
    asked = steps - first + 1 if asked is None else whole("asked", asked, 1, steps - first + 1)
    facts = whole("facts", facts, 2, len(hops.ENTITIES))
    if task != "hops" and facts != REACHABLE:
        raise ChainError(f"facts={facts} has a meaning for hops only, not for {task}")
    cycle = (variant,) if variant else VARIANTS[task]
    name = variant or task
    suffix = (f"-from{first}" if first > 1 else "") + (f"-asked{asked}" if first + asked <= steps else "")
    suffix += ("-shuffled" if order == "shuffled" else "") + (f"-facts{facts}" if facts != REACHABLE else "")
    return [
        _drawn(f"{name}-{steps}-{seed}-{number}{suffix}", cycle[number % len(cycle)], (steps, seed, number), first,
               asked, order, facts)
        for number in range(n)
    ]  # fmt: skip


def _drawn(
    id: str, variant: str, key: tuple[int, int, int], first: int, asked: int, order: str, entities: int
) -> Sample:
    family, (steps, seed, number) = FAMILIES[variant], key
    chance = Chance("o1lab chain", variant, *key)
    base = chance.below(LABELS - steps + 1)
    facts: Sequence[tuple[str, str, str]] = ()
    if variant == "hops":
        start, facts = hops.table(chance, Chance("o1lab distractors", *key), entities)
        facts = Chance("o1lab order of facts", entities, *key).shuffled(facts)
    else:
        start = family.start(chance)
    entries = [Entry(base + place, *family.entry(chance)) for place in range(steps)]
    shown = Chance("o1lab order", variant, *key).shuffled(entries) if order == "shuffled" else entries
    table = {(relation, name): other for relation, name, other in facts}
    for entry in entries[: first - 1]:
        start = family.apply(start, entry.operator, entry.operand, table)
    factors: dict[str, int | str] = {"first": first, "asked": asked, "order": order, "facts": len(table) // 4}
    sample = Sample(id, family.task, variant, seed, number, steps, start, (), tuple(shown), tuple(facts), factors)
    return worked(sample, range(base + first - 1, base + first - 1 + asked))


def redraw(sample: Sample, seed: int, order: str = "shuffled") -> Sample:
    """The same problem with other labels, its program and facts in another order; names of entities stay.

    Its answer is the same, its steps have the same operators, operands and states.

    Examples
    --------
    >>> sample = make("hops", 8, 1, 0)[0]
    >>> again = redraw(sample, 1)
    >>> again.answer == sample.answer, again.prompt == sample.prompt
    (True, False)
    """
    if order not in ORDERS:
        raise UnknownName("order", str(order), ORDERS)
    chance = Chance("o1lab redraw", sample.id, whole("seed", seed), order)
    labels = [entry.label for entry in sample.program]
    shift = chance.below(LABELS - max(labels) + min(labels)) - min(labels)
    program = sorted((replace(entry, label=entry.label + shift) for entry in sample.program), key=lambda e: e.label)
    shown = tuple(chance.shuffled(program) if order == "shuffled" else program)
    drawn = replace(
        sample,
        id=f"{sample.id}-redraw{seed}",
        program=shown,
        facts=tuple(chance.shuffled(sample.facts)),
        factors={**sample.factors, "order": order},
    )
    return worked(drawn, [step.label + shift for step in sample.steps])


def rest(sample: Sample, done: int, state: str, asked: int | None = None) -> Sample:
    """The same problem from step ``done + 1`` on: ``state`` is given, the program holds what is still asked for.

    That is all the steps left, or the next ``asked`` of them. Labels and the order shown stay. With a state other than
    the gold one the gold steps are those that follow from it.

    Examples
    --------
    >>> sample = make("arithmetic", 8, 1, 0)[0]
    >>> left = rest(sample, 5, sample.steps[4].state)
    >>> left.length, left.answer == sample.answer
    (3, True)
    >>> rest(sample, 5, "7", asked=2).length
    2
    """
    done = whole("done", done, 0, len(sample.steps) - 1)
    if not sample.valid(state):
        raise ChainError(f"{state!r} is no state of {sample.id}")
    left = sample.steps[done:]
    if asked is not None:
        left = left[: whole("asked", asked, 1, len(left))]
    labels = {step.label: None for step in left}
    program = tuple(entry for entry in sample.program if entry.label in labels)
    name = f"{sample.id}-rest{done}" + (f"-asked{len(left)}" if done + len(left) < len(sample.steps) else "")
    factors = {**sample.factors, "first": 1}
    part = replace(sample, id=name, length=len(program), start=state, program=program, factors=factors)
    return worked(part, labels)
