"""What an evaluation found: accuracy with its interval, where chains first go wrong, and what was never scored."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from o1lab.errors import ChainError, EstimateError, UnknownName
from o1lab.lab_view import Card, table
from o1lab.stats import Estimate, mean, proportion

if TYPE_CHECKING:
    import pandas as pd

    from o1lab.chains.faults import Fault
    from o1lab.chains.survival import Survival


@dataclass(frozen=True)
class Result:
    """One sample's result.

    Attributes
    ----------
    sample
        The problem.
    text, tokens
        What was produced, and how many tokens (``None`` where an endpoint does not say).
    problem
        Why nothing can be said of the model's reasoning here, such as ``"not finite"`` or ``"timeout"``; empty where
        the sample was scored.
    capped
        Whether the allowance of tokens ended the text.
    right, answer_right
        Whether the whole chain is right and ended, and whether the final answer is.
    score
        What an item without steps was given for its answer, 0 to 1; 1.0 or 0.0 for a chain's answer.
    fault
        First fault of the chain; ``None`` if there is none as far as it goes, and for items without steps.
    watched
        Steps that can be judged: all of them, those before the cap, or up to and with the faulty one; 0 for items
        without steps.
    margins, entropies
        As of :class:`o1lab.models.decode.Generation`, where they were asked for.
    """

    sample: Any = field(repr=False)
    text: str = field(repr=False)
    tokens: int | None
    problem: str = ""
    capped: bool = False
    right: bool = False
    answer_right: bool = False
    score: float = 0.0
    fault: Fault | None = None
    watched: int = 0
    margins: tuple[float, ...] | None = field(default=None, repr=False)
    entropies: tuple[float, ...] | None = field(default=None, repr=False)

    def factor(self, key: str) -> Hashable:
        """A factor of the sample, or its ``task``, ``variant``, ``length``, …; ``None`` where it has no such thing."""
        value = getattr(self.sample, "factors", {}).get(key, getattr(self.sample, key, None))
        return value if isinstance(value, (str, int, float)) else None


class Paired(NamedTuple):
    """Outcomes of two reports on the same samples, in the same order: ``ids``, and bool arrays of shape (n,).

    ``left_out`` counts samples that one of the two could not score.
    """

    ids: list[str]
    first: np.ndarray
    second: np.ndarray
    left_out: int


@dataclass(frozen=True)
class ChainReport:
    """Results of :func:`o1lab.chains.evaluate`, in the order of the samples.

    Shares are of the scored samples, with 95 % Wilson intervals; samples with a problem are in ``problems`` and in
    nothing else. A share of nothing raises :class:`~o1lab.errors.EstimateError`.

    Attributes
    ----------
    results
        One :class:`Result` per sample.
    model, style
        What was asked, and in which style.
    seconds
        Wall time of the call; not a number for a group.
    notes
        What a reader of the figures should know, such as a missing chat template.
    """

    results: tuple[Result, ...] = field(repr=False)
    model: str
    style: str
    seconds: float
    notes: tuple[str, ...] = ()

    @cached_property
    def scored(self) -> tuple[Result, ...]:
        """Results without a problem."""
        return tuple(result for result in self.results if not result.problem)

    @property
    def ids(self) -> list[str]:
        """Ids of the scored samples, in the order of :attr:`outcomes`."""
        return [result.sample.id for result in self.scored]

    @property
    def outcomes(self) -> np.ndarray:
        """Whether the whole chain is right, bool of shape (scored,)."""
        return np.array([result.right for result in self.scored], dtype=bool)

    @property
    def accuracy(self) -> Estimate:
        """Share of whole chains right; a chain that hit the cap is wrong. Items without steps: right answers."""
        return self._share(self.outcomes)

    @property
    def accuracy_of_finished(self) -> Estimate:
        """The same among those that did not hit the cap."""
        return self._share(result.right for result in self.scored if not result.capped)

    @property
    def answer_accuracy(self) -> Estimate:
        """Share of final answers right, whatever the steps."""
        return self._share(result.answer_right for result in self.scored)

    @property
    def score(self) -> Estimate:
        """Mean score of the answers, for items that give partial credit (Student's t)."""
        return mean([result.score for result in self.scored], "1")

    @property
    def step_accuracy(self) -> Estimate:
        """Share right of the steps taken while all before them were right; one minus the mean hazard.

        In language a step that cannot be read counts as not taken.
        """
        from o1lab.chains.survival import per_step

        return per_step(*self._watched(None))

    @property
    def capped(self) -> Estimate:
        """Share that hit the cap."""
        return self._share(result.capped for result in self.scored)

    @property
    def unreadable(self) -> Estimate:
        """Share whose first fault is the format: wrong in :attr:`accuracy`, though not for a wrong step."""
        return self._share(bool(result.fault and result.fault.kind == "format") for result in self.scored)

    @property
    def faults(self) -> list[Fault | None]:
        """First fault per sample, ``None`` where there is none or it was not scored."""
        return [result.fault for result in self.results]

    @property
    def first_fault(self) -> list[int | None]:
        """Step of the first fault per sample, 1-based, ``None`` where there is none or it was not scored.

        A chain that only ran over its end was right to its end.
        """
        from o1lab.chains.faults import first_steps

        return first_steps(self.faults)

    @property
    def fault_kinds(self) -> dict[str, int]:
        """How often each kind is the first fault, most frequent first."""
        return dict(Counter(fault.kind for fault in self.faults if fault).most_common())

    @property
    def problems(self) -> dict[str, int]:
        """Samples that were not scored, by reason."""
        return dict(Counter(result.problem for result in self.results if result.problem).most_common())

    @property
    def tokens(self) -> int:
        """Tokens produced, as far as they are known."""
        return sum(result.tokens or 0 for result in self.results)

    def survival(self, *, formats: bool | None = None) -> Survival:
        """Kaplan–Meier curve of chains right so far (:func:`o1lab.chains.survival.kaplan_meier`).

        A chain that hit the cap is watched up to it. ``formats`` says whether a step that cannot be read is a fault
        (default for tokens) or ends what can be watched (default for language).
        """
        from o1lab.chains.survival import kaplan_meier

        return kaplan_meier(*self._watched(formats))

    def by(self, key: str) -> dict[Any, ChainReport]:
        """A report for each value of a factor, in order: ``"length"``, ``"task"``, ``"variant"``, ``"asked"``, ….

        Raises
        ------
        UnknownName
            No sample has it.
        """
        groups: dict[Any, list[Result]] = {}
        for result in self.results:
            groups.setdefault(result.factor(key), []).append(result)
        if set(groups) <= {None}:
            known = {"task", "variant", "length", *(n for r in self.results for n in getattr(r.sample, "factors", {}))}
            raise UnknownName("factor", key, sorted(known))
        order = sorted(groups, key=lambda value: (value is None, isinstance(value, str), value or 0))
        return {value: replace(self, results=tuple(groups[value]), seconds=math.nan) for value in order}

    def by_length(self) -> dict[int, ChainReport]:
        """A report for each length of the program."""
        return self.by("length")

    def paired(self, other: ChainReport) -> Paired:
        """Outcomes of this report and ``other`` on the same samples, for :mod:`o1lab.paired`.

        Raises
        ------
        ChainError
            The two hold different samples.
        """
        mine, theirs = ({result.sample.id: result for result in report.results} for report in (self, other))
        if mine.keys() != theirs.keys():
            only = [
                ", ".join(sorted(a - b)[:3]) or "none"
                for a, b in ((mine.keys(), theirs.keys()), (theirs.keys(), mine.keys()))
            ]
            raise ChainError(f"the two reports are of different samples: only here {only[0]}; only there {only[1]}")
        ids = [name for name in mine if not (mine[name].problem or theirs[name].problem)]
        first, second = (np.array([side[name].right for name in ids], dtype=bool) for side in (mine, theirs))
        return Paired(ids, first, second, len(mine) - len(ids))

    def frame(self) -> pd.DataFrame:
        """One row per sample: what it is, its factors, and its result."""
        import pandas as pd

        return pd.DataFrame([_row(result) for result in self.results])

    def _watched(self, formats: bool | None) -> tuple[list[int | None], list[int]]:
        formats = self.style == "tokens" if formats is None else formats
        first: list[int | None] = []
        steps: list[int] = []
        for result in self.scored:
            fault, watched = result.fault, result.watched
            if fault and fault.kind == "format" and not formats:
                fault, watched = None, fault.step - 1
            if watched > 0:
                first.append(fault.step if fault and not fault.past_end else None)
                steps.append(watched)
        if not first:
            raise EstimateError("no step of any chain can be judged: see problems, capped and fault_kinds")
        return first, steps

    def _share(self, values: Any) -> Estimate:
        flags = [bool(value) for value in values]
        if not flags:
            why = ", ".join(f"{kind} {count}" for kind, count in self.problems.items()) or "no sample fits"
            raise EstimateError(f"nothing to take a share of: {why}")
        return proportion(sum(flags), len(flags))

    def _card(self) -> Card:
        rows = []
        names = {"accuracy": "whole chain right", "accuracy_of_finished": "… of those that finished"}
        names |= {"answer_accuracy": "answer right", "step_accuracy": "steps right up to the first fault"}
        names |= {"capped": "hit the cap of tokens"}
        for name, words in names.items():
            try:
                rows.append((words, str(getattr(self, name))))
            except EstimateError as error:
                rows.append((words, f"– ({error})"))
        for words, counts in (("first faults", self.fault_kinds), ("not scored", self.problems)):
            if counts:
                rows.append((words, ", ".join(f"{kind} {count:,}" for kind, count in counts.items())))
        rows += [("note", note) for note in self.notes]
        time = "" if math.isnan(self.seconds) else f", {self.seconds:,.1f} s"
        title = f"{self.model}: {len(self.results):,} samples ({self.style}), {self.tokens:,} tokens{time}"
        return table(title, ("", ""), rows)

    def __str__(self) -> str:
        return self._card().text

    def _repr_html_(self) -> str:
        return self._card().html


def _row(result: Result) -> dict[str, Any]:
    sample, fault = result.sample, result.fault
    given = {name: getattr(sample, name, None) for name in ("id", "task", "variant", "length")}
    found = {name: getattr(result, name) for name in ("right", "answer_right", "score", "capped", "problem", "tokens")}
    where = {"first_fault": fault.step, "fault": fault.kind, "source": fault.source} if fault else {}
    empty = {"first_fault": None, "fault": None, "source": None}
    return {**given, **getattr(sample, "factors", {}), **found, **empty, **where, "watched": result.watched}
