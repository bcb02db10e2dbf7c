"""A chain problem with its gold steps, a chain as produced and read, and their JSON.

A problem is a program of N labelled entries. The chain starts with the state given, at entry ``first``, and answers
``asked`` steps. In each family every step is a bijection of the states: a wrong state stays wrong until a second fault.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol

from o1lab.chains.arithmetic import DIGITS, MODULAR
from o1lab.chains.chance import Chance
from o1lab.chains.hops import HOPS
from o1lab.chains.symbols import SYMBOLS
from o1lab.errors import ChainError

TASKS = ("arithmetic", "symbols", "hops")
LABELS = 512
"""Step ids go from s0 to s511."""
BREAKPOINTS = ("operand fetch", "operator fetch", "carry", "premise reuse")


class Family(Protocol):
    """What a family of chains brings: how it draws and applies steps. ``table`` is for hops: (relation, from) -> to."""

    variant: str
    task: str
    operators: tuple[str, ...]
    operand_width: int
    state_width: int

    def entry(self, chance: Chance) -> tuple[str, str]:
        """Draw an operator and its operand."""

    def valid(self, state: str, table: Mapping[tuple[str, str], str]) -> bool:
        """Whether ``state`` can be a state."""

    def apply(self, state: str, operator: str, operand: str, table: Mapping[tuple[str, str], str] | None = None) -> str:
        """The state after the step; ChainError for what cannot be applied."""

    def carries(self, state: str, operator: str, operand: str) -> bool:
        """Whether the step has a carry or a borrow."""


FAMILIES: dict[str, Family] = {family.variant: family for family in (MODULAR, DIGITS, SYMBOLS, HOPS)}
VARIANTS = {task: tuple(name for name, family in FAMILIES.items() if family.task == task) for task in TASKS}


@dataclass(frozen=True)
class Entry:
    """One line of the program: label, operator, operand ("" where none)."""

    label: int
    operator: str
    operand: str


@dataclass(frozen=True)
class Step:
    """One gold step: its place in the asked chain (1-based), its entry, the state after it.

    ``breakpoints`` are the kinds of fault that this step can show: ``operand fetch`` and ``operator fetch`` where
    another entry's would give another state, ``carry`` where a digit carries or borrows, ``premise reuse`` where the
    entry applied to an earlier state gives another state.
    """

    index: int
    label: int
    operator: str
    operand: str
    state: str
    breakpoints: tuple[str, ...]


@dataclass(frozen=True)
class Produced:
    """One produced step as read; ``None`` where it could not be read. ``text`` is what it was read from."""

    label: int | None
    operator: str | None
    operand: str | None
    state: str | None
    text: str


@dataclass(frozen=True)
class Parsed:
    """A produced chain as read.

    Attributes
    ----------
    steps
        In the order in which they were written.
    ended
        Whether the end mark was there: ``<eos>``, or the line with the answer.
    rest
        What could not be read.
    answer
        In tokens the last step's state, in language what the answer line says; ``None`` if it cannot be read.
    """

    steps: tuple[Produced, ...]
    ended: bool
    rest: str
    answer: str | None


@dataclass(frozen=True)
class Sample:
    """One problem: what is shown and what is right.

    Attributes
    ----------
    id
        ``"arithmetic-32-0-17"``: task (or variant, where one was asked for), N, seed, number, and what differs from
        the main form.
    length
        N, the entries in ``program``.
    start
        The state given, its tokens joined by spaces.
    steps, program, facts
        Gold steps asked for; entries as shown; (relation, from, to) as shown, empty but for hops.
    factors
        What makes it hard: ``first``, ``asked``, ``order``, ``facts`` (entities in the table, 0 where none),
        ``carries``, ``prompt_tokens``, ``chain_tokens`` (both in the reasoner's tokens).
    """

    id: str
    task: str
    variant: str
    seed: int
    number: int
    length: int
    start: str
    steps: tuple[Step, ...]
    program: tuple[Entry, ...]
    facts: tuple[tuple[str, str, str], ...]
    factors: dict[str, int | str]

    @property
    def answer(self) -> str:
        """The last state."""
        return self.steps[-1].state

    @property
    def prompt(self) -> str:
        """The problem in tokens, ``<bos>`` included."""
        parts = ["<bos>", self.variant, f"from s{self.steps[0].label} to s{self.steps[-1].label} state", self.start]
        if self.facts:
            parts += ["facts", *(" ".join(fact) for fact in self.facts)]
        return " ".join([*parts, "program", *(_tokens(entry) for entry in self.program), "chain"])

    @property
    def gold(self) -> str:
        """The right completion in tokens, without ``<eos>``."""
        return " ".join([f"{_tokens(step)} {step.state}" for step in self.steps])

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one step of the chain: label, operator, operand, state."""
        family = FAMILIES[self.variant]
        return 2 + family.operand_width + family.state_width

    @cached_property
    def table(self) -> dict[tuple[str, str], str]:
        """The facts by (relation, from)."""
        return {(relation, name): other for relation, name, other in self.facts}

    def apply(self, state: str, operator: str, operand: str) -> str:
        """The state that a step leads to from ``state``.

        Raises
        ------
        ChainError
            The state, operator or operand is none of this family, or no fact covers it.

        Examples
        --------
        >>> from o1lab.chains import make
        >>> make("symbols", 4, 1, 0)[0].apply("A C F B A", "left", "")
        'C F B A A'
        """
        return FAMILIES[self.variant].apply(state, operator, operand, self.table)

    def valid(self, state: str | None) -> bool:
        """Whether ``state`` is a state of this problem, so that a step can be applied to it."""
        return state is not None and FAMILIES[self.variant].valid(state, self.table)

    def to_dict(self) -> dict[str, Any]:
        """The JSON form, lossless."""
        return {
            **{name: getattr(self, name) for name in ("id", "task", "variant", "seed", "number", "length", "start")},
            "steps": [
                {
                    "label": step.label,
                    "operator": step.operator,
                    "operand": step.operand,
                    "state": step.state,
                    "breakpoints": list(step.breakpoints),
                }
                for step in self.steps
            ],
            "program": [
                {"label": entry.label, "operator": entry.operator, "operand": entry.operand} for entry in self.program
            ],
            "facts": [list(fact) for fact in self.facts],
            "factors": dict(self.factors),
        }

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Sample:
        """Build a sample from its JSON form, and work its gold steps out again.

        Raises
        ------
        ChainError
            A field is missing or of the wrong kind, or a step is not what the program gives.
        """
        try:
            steps = tuple(
                Step(k, s["label"], s["operator"], s["operand"], s["state"], tuple(s["breakpoints"]))
                for k, s in enumerate(content["steps"], 1)
            )
            program = tuple(Entry(**entry) for entry in content["program"])
            facts = tuple((str(relation), str(name), str(other)) for relation, name, other in content["facts"])
            plain = {name: content[name] for name in ("id", "task", "variant", "seed", "number", "length", "start")}
            sample = cls(**plain, steps=steps, program=program, facts=facts, factors=dict(content["factors"]))
            _check(sample)
            again = worked(sample, [step.label for step in steps])
        except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
            what = f"lacks {error}" if isinstance(error, KeyError) else str(error)
            raise ChainError(f"this is no chain problem: {what}") from error
        for mine, theirs in zip(again.steps, steps, strict=True):
            if mine != theirs:
                raise ChainError(f"{sample.id} was altered: step {mine.index} reads {theirs}, the program gives {mine}")
        return sample


def _tokens(entry: Entry | Step) -> str:
    return f"s{entry.label} {entry.operator} {entry.operand}" if entry.operand else f"s{entry.label} {entry.operator}"


def _check(sample: Sample) -> None:
    """Raise ValueError for what the fields of one sample cannot be."""
    labels = [entry.label for entry in sample.program]
    numbers = (sample.seed, sample.number, sample.length, *labels)
    if any(not isinstance(number, int) or isinstance(number, bool) for number in numbers):
        raise ValueError("seed, number, length and labels must be whole numbers")
    if sample.variant not in VARIANTS.get(sample.task, ()):
        raise ValueError(f"task {sample.task!r} has no variant {sample.variant!r}")
    if sample.length != len(labels) or len(set(labels)) < len(labels) or not sample.steps:
        raise ValueError(f"{sample.length} entries, {len(set(labels))} labels and {len(sample.steps)} steps do not fit")
    if min(labels) < 0 or max(labels) >= LABELS:
        raise ValueError(f"labels must be from 0 to {LABELS - 1}")


def worked(sample: Sample, labels: Iterable[int]) -> Sample:
    """The sample with the gold steps of ``labels`` (of its program) and the factors that follow from them."""
    family, table = FAMILIES[sample.variant], sample.table
    entries = {entry.label: entry for entry in sample.program}
    used_operators = sorted({entry.operator for entry in sample.program})
    used_operands = sorted({entry.operand for entry in sample.program})
    state, seen, steps, carries, apply = sample.start, {sample.start}, [], 0, family.apply
    for index, label in enumerate(labels, 1):
        operator, operand = entries[label].operator, entries[label].operand
        after = apply(state, operator, operand, table)
        kinds = []
        for other in used_operands:
            if other != operand and apply(state, operator, other, table) != after:
                kinds.append("operand fetch")
                break
        for other in used_operators:
            if other != operator and apply(state, other, operand, table) != after:
                kinds.append("operator fetch")
                break
        if family.carries(state, operator, operand):
            kinds.append("carry")
            carries += 1
        if len(seen) > 1:
            kinds.append("premise reuse")
        steps.append(Step(index, label, operator, operand, after, tuple(kinds)))
        state = after
        seen.add(state)
    width = family.operand_width
    factors = {
        **sample.factors,
        "asked": len(steps),
        "carries": carries,
        "prompt_tokens": 9 + family.state_width + (2 + width) * len(sample.program) + bool(table) + 3 * len(table),
        "chain_tokens": (2 + width + family.state_width) * len(steps),
    }
    return replace(sample, steps=tuple(steps), factors=factors)
