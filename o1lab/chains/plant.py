"""Chains with one planted fault, whose step and kind are known: what a rule that finds faults is judged on.

>>> from o1lab import chains
>>> sample = chains.make("hops", 6, 1, seed=0)[0]
>>> planted = plant(sample, "label", 3, chance=Chance("an example"))
>>> planted.step, chains.localise(sample, planted.text).step
(3, 3)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from o1lab.chains import problems, render
from o1lab.chains.chance import Chance
from o1lab.chains.samples import FAMILIES, VARIANTS, Sample, Step
from o1lab.errors import ChainError, UnknownName

PLANTED = (
    "operand fetch", "operator fetch", "wrong result", "premise reuse", "label", "format", "stopped early", "ran over",
    "loop",
)  # fmt: skip
"""``wrong result`` is any other state; by accident it may be one that a carry or an earlier state explains."""

ALIKE = ("operand fetch", "operator fetch", "wrong result", "premise reuse", "label")
"""Kinds that leave a chain its form: as many steps as the right one, each with all its parts."""
RIGHT = "right"
"""Kind of a chain without a fault."""


class Planted(NamedTuple):
    """A chain with one fault: the problem, its text, the step (1-based) and the kind that was planted.

    Of a right chain the step is ``None`` and the kind :data:`RIGHT`.
    """

    sample: Sample
    text: str
    step: int | None
    kind: str


def plant(sample: Sample, kind: str, step: int, chance: Chance, style: str = "tokens") -> Planted | None:
    """Write the chain of ``sample`` with a fault at ``step``, right in itself after it; ``None`` if it cannot be there.

    Parameters
    ----------
    sample : Sample
    kind : str
        One of :data:`PLANTED`; in language one of :data:`ALIKE`.
    step : int
        1-based.
    chance : Chance
    style : str
        As in :func:`o1lab.chains.render.gold`.

    Raises
    ------
    UnknownName
        No such kind or style.
    ChainError
        In language, a kind that changes the form of a chain.
    """
    if kind not in PLANTED:
        raise UnknownName("kind of planted fault", kind, PLANTED)
    if style == "language" and kind not in ALIKE:
        raise ChainError(f"a fault of kind {kind!r} is planted in tokens only; in language: {', '.join(ALIKE)}")
    gold, steps = sample.steps[step - 1], list(sample.steps)
    if kind == "stopped early":
        return Planted(sample, f"{_write(steps[: step - 1])} <eos>".strip(), step, kind)
    if kind == "ran over":
        return Planted(sample, _write([*steps, replace(steps[-1], label=steps[-1].label + 1)]), len(steps) + 1, kind)
    if kind == "loop":
        back = chance.below(min(step - 1, 4)) + 1 if step > 1 else 0
        turn = steps[step - 1 - back : step - 1]
        return Planted(sample, _write(steps[: step - 1] + 3 * turn), step, kind) if back else None
    if kind == "format":
        words = _write([gold]).split()
        words[1 + chance.below(len(words) - 1)] = "<unk>"
        text = " ".join([_write(steps[: step - 1]), *words, _write(steps[step:]), "<eos>"])
        return Planted(sample, text.strip(), step, kind)
    wrong = _wrong(sample, kind, step, chance)
    if wrong is None:
        return None
    state, rest = wrong.state, []
    for later in steps[step:]:
        state = sample.apply(state, later.operator, later.operand)
        rest.append(replace(later, state=state))
    made = replace(sample, steps=(*steps[: step - 1], wrong, *rest))
    return Planted(sample, _whole(made, style, _premise(sample, wrong) if kind == "premise reuse" else {}), step, kind)


def many(n: int, steps: int, seed: int = 0) -> list[Planted]:
    """``n`` chains of ``steps`` steps with a fault each; variants, kinds and places take turns or are drawn.

    >>> [(each.sample.variant, each.kind) for each in many(2, 8)]
    [('modular', 'operand fetch'), ('digits', 'operator fetch')]
    """
    chance, found, number = Chance("o1lab planted", n, steps, seed), [], 0
    while len(found) < n:
        made = plant(_problem(number, steps, seed), PLANTED[number % len(PLANTED)], 1 + chance.below(steps), chance)
        found += [made] if made else []
        number += 1
    return found


def pairs(n: int, steps: int, seed: int = 0, style: str = "tokens") -> list[Planted]:
    """``n`` problems of ``steps`` steps, the chain of each once right and once with a fault that keeps its form.

    Variants take turns; the step and the kind (of :data:`ALIKE`) are drawn together, again where no such fault can be.
    Those of a smaller ``n`` are the first of a greater one.

    >>> right, faulty = pairs(1, 6, style="language")
    >>> print(next(line for line in faulty.text.splitlines() if line not in right.text), "·", faulty.kind)
    Step 479: 2 - 0 = 2 -> 18 · wrong result
    """
    chance, found = Chance("o1lab pairs", steps, seed), []
    for number in range(problems.whole("n", n, 1)):
        sample, made = _problem(number, steps, seed), None
        while made is None:  # a label can be wrong anywhere, so this ends
            made = plant(sample, chance.pick(ALIKE), 1 + chance.below(steps), chance, style)
        found += [Planted(sample, _whole(sample, style), None, RIGHT), made]
    return found


def _problem(number: int, steps: int, seed: int) -> Sample:
    """One problem of the variant whose turn it is."""
    variants = [(task, name) for task, names in VARIANTS.items() for name in names]
    task, variant = variants[number % len(variants)]
    return problems.make(task, steps, 1, seed * 1_000_003 + number, variant=variant)[0]


def _whole(sample: Sample, style: str, premises: dict[int, str] | None = None) -> str:
    """The chain of the steps of ``sample`` with its end."""
    return render.gold(sample, style, premises) + (" <eos>" if style == "tokens" else "")


def _premise(sample: Sample, wrong: Step) -> dict[int, str]:
    """The earlier state that a step which misuses one was worked from."""
    earlier = [sample.start, *(each.state for each in sample.steps[: wrong.index - 1])][:-1]
    used = next(state for state in earlier if sample.apply(state, wrong.operator, wrong.operand) == wrong.state)
    return {wrong.index: used}


def _wrong(sample: Sample, kind: str, step: int, chance: Chance) -> Step | None:
    """The faulty step, ``None`` if nothing would be wrong."""
    gold = sample.steps[step - 1]
    before = sample.steps[step - 2].state if step > 1 else sample.start
    if kind == "label":
        return replace(gold, label=(gold.label + chance.pick((-1, 1, 2))) % 512)
    if kind == "wrong result":
        state = problems.make(sample.task, 1, 1, chance.below(10**6), variant=sample.variant)[0].start
        state = chance.pick(sorted({name for _, name, _ in sample.facts})) if sample.facts else state
        return replace(gold, state=state) if state != gold.state else None
    if kind == "premise reuse":
        earlier = [sample.start, *(each.state for each in sample.steps[: step - 1])][:-1]
        results = sorted({sample.apply(state, gold.operator, gold.operand) for state in earlier} - {gold.state})
        return replace(gold, state=chance.pick(results)) if results else None
    name = kind.split()[0]
    others = sorted({getattr(entry, name) for entry in sample.program} - {getattr(gold, name)})
    if not others or not FAMILIES[sample.variant].operators:
        return None
    shown = replace(gold, **{name: chance.pick(others)})
    return replace(shown, state=sample.apply(before, shown.operator, shown.operand))


def _write(steps: Sequence[Step]) -> str:
    parts = ((f"s{step.label}", step.operator, step.operand, step.state) for step in steps)
    return " ".join(word for part in parts for word in part if word)
