"""How a problem is shown and its chain written: in the reasoner's tokens, or in language for instruction-tuned models.

>>> from o1lab.chains import make
>>> sample = make("arithmetic", 2, 1, 0, variant="digits")[0]
>>> print(gold(sample, "language"))
Step 35: 288 - 193 = 95 -> 095
Step 36: 095 - 182 = -87 -> 913
Answer: 913
>>> parse(sample, gold(sample, "language"), "language").answer == sample.answer
True
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from o1lab.chains import reading
from o1lab.chains.hops import ENTITIES, HOPS, RELATIONS
from o1lab.chains.samples import FAMILIES, Entry, Parsed, Sample, worked
from o1lab.errors import UnknownName

STYLES = ("tokens", "language")
_EXAMPLES = {
    "modular": ("21", (("+", "14"), ("*", "5"), ("-", "26"))),
    "digits": ("8 4 7", (("+", "5 9 3"), ("-", "0 6 4"), ("-", "7 0 0"))),
    "symbols": ("B A D A F", (("swap14", ""), ("left", ""), ("AxC", ""))),
    "hops": ("e0", (("r1", ""), ("r0", ""), ("r1", ""))),
}


def _known(style: str) -> None:
    if style not in STYLES:
        raise UnknownName("style", str(style), STYLES)


def prompt(sample: Sample, style: str = "tokens") -> str:
    """The problem as it is given to a model.

    Parameters
    ----------
    sample : Sample
    style : str
        ``"tokens"``: the reasoner's tokens, ``<bos>`` included. ``"language"``: instructions, one worked example, the
        problem; the text of one user turn, without a chat template.

    Raises
    ------
    UnknownName
        No such style.
    """
    _known(style)
    if style == "tokens":
        return sample.prompt
    example = _example(sample.variant)
    rule = FAMILIES[sample.variant].rule
    return (
        f"{rule} Do the steps asked for in the order of their numbers. Write one line for each step, exactly as in the "
        f'example and nothing else, then a last line that begins with "Answer:" and gives the last result.\n\n'
        f"Example\n{_problem(example)}\n\n{gold(example, 'language')}\n\nYour turn\n{_problem(sample)}\n\n"
        f'Write the lines now, beginning with "Step {sample.steps[0].label}:".\n'
    )


def gold(sample: Sample, style: str = "tokens", premises: Mapping[int, str] | None = None) -> str:
    """The right chain as a model should write it; in language with the answer line, in tokens without ``<eos>``.

    ``premises`` are states that single steps (1-based) are said to begin with, in place of the state before; only
    language shows them.
    """
    _known(style)
    if style == "tokens":
        return sample.gold
    family, before, lines = FAMILIES[sample.variant], sample.start, []
    for step in sample.steps:
        before = (premises or {}).get(step.index, before)
        lines.append(f"Step {step.label}: {family.say_step(before, step.operator, step.operand, step.state)}")
        before = step.state
    return "\n".join([*lines, f"Answer: {family.say_state(sample.answer)}"])


def parse(sample: Sample, text: str, style: str = "tokens") -> Parsed:
    """Read a produced chain; what cannot be read is ``None``, nothing is corrected.

    Examples
    --------
    >>> from o1lab.chains import make
    >>> sample = make("symbols", 3, 1, 0)[0]
    >>> [step.state for step in parse(sample, "s195 BxF A B F C D s196 DxE A B").steps]
    ['A B F C D', None]
    """
    _known(style)
    return (reading.read_tokens if style == "tokens" else reading.read_language)(sample, text)


def _problem(sample: Sample) -> str:
    family = FAMILIES[sample.variant]
    lines = [HOPS.say_fact(*fact) for fact in sample.facts]
    lines += [family.say_start(sample.start), "Instructions:"]
    lines += [f"Step {entry.label}: {family.say_entry(entry.operator, entry.operand)}" for entry in sample.program]
    first, last = sample.steps[0].label, sample.steps[-1].label
    return "\n".join([*lines, f"Do step {first}." if first == last else f"Do steps {first} to {last}."])


@cache
def _example(variant: str) -> Sample:
    start, entries = _EXAMPLES[variant]
    program = tuple(Entry(label, *entry) for label, entry in enumerate(entries, 41))
    facts = ()
    if variant == "hops":
        people = ENTITIES[:3]
        facts = tuple(
            (relation, name, people[(place + turn) % 3])
            for turn, relation in enumerate(RELATIONS[:2], 1)
            for place, name in enumerate(people)
        )
    sample = Sample("example", FAMILIES[variant].task, variant, 0, 0, len(program), start, (), program, facts, {})
    return worked(sample, [entry.label for entry in program])
