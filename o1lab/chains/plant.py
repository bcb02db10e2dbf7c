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

from o1lab.chains import problems
from o1lab.chains.chance import Chance
from o1lab.chains.samples import FAMILIES, VARIANTS, Sample, Step
from o1lab.errors import UnknownName

PLANTED = (
    "operand fetch", "operator fetch", "wrong result", "premise reuse", "label", "format", "stopped early", "ran over",
    "loop",
)  # fmt: skip
"""``wrong result`` is any other state; by accident it may be one that a carry or an earlier state explains."""


class Planted(NamedTuple):
    """A chain with one fault: the problem, its text, the step (1-based) and the kind that was planted."""

    sample: Sample
    text: str
    step: int
    kind: str


def plant(sample: Sample, kind: str, step: int, chance: Chance) -> Planted | None:
    """Write the chain of ``sample`` with a fault at ``step``, right in itself after it; ``None`` if it cannot be there.

    Raises
    ------
    UnknownName
        No such kind.
    """
    if kind not in PLANTED:
        raise UnknownName("kind of planted fault", kind, PLANTED)
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
    return Planted(sample, f"{_write([*steps[: step - 1], wrong, *rest])} <eos>", step, kind)


def many(n: int, steps: int, seed: int = 0) -> list[Planted]:
    """``n`` chains of ``steps`` steps with a fault each; variants, kinds and places take turns or are drawn.

    >>> [(each.sample.variant, each.kind) for each in many(2, 8)]
    [('modular', 'operand fetch'), ('digits', 'operator fetch')]
    """
    variants = [(task, name) for task, names in VARIANTS.items() for name in names]
    chance, found, number = Chance("o1lab planted", n, steps, seed), [], 0
    while len(found) < n:
        task, variant = variants[number % len(variants)]
        kind = PLANTED[number % len(PLANTED)]
        sample = problems.make(task, steps, 1, seed * 1_000_003 + number, variant=variant)[0]
        made = plant(sample, kind, 1 + chance.below(steps), chance)
        found += [made] if made else []
        number += 1
    return found


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
