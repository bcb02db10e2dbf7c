"""The first fault of a produced chain, by replaying it: which step, what kind, and what it rests on.

No similarity is guessed. Label, operator, operand and state of each step are compared with gold until one differs;
up to there the produced state *is* the gold state, so what follows from it can be worked out again, with each way to
go wrong tried in turn.

>>> from o1lab import chains
>>> sample = chains.make("arithmetic", 3, 1, seed=0, variant="digits")[0]
>>> sample.start, sample.gold
('3 7 2', 's473 + 8 9 0 1 7 3 s474 - 0 0 2 1 7 1 s475 - 3 9 9 8 7 1')
>>> print(localise(sample, "s473 + 8 9 0 1 6 3 s474 - 0 0 2 1 6 1 s475 - 3 9 9 8 6 1"))
step 1, carry: 1 6 3 instead of 1 7 3: the carry out of the units digit is dropped in 3 7 2 + 8 9 0
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from o1lab.chains import loops, slips
from o1lab.chains.render import STYLES, parse
from o1lab.chains.samples import FAMILIES, Parsed, Produced, Sample, Step
from o1lab.errors import ChainError, EstimateError, UnknownName
from o1lab.stats import Estimate, proportion

KINDS = (
    "operand fetch", "operator fetch", "arithmetic", "carry", "premise reuse", "label", "format", "stopped early",
    "ran over", "loop",
)  # fmt: skip
UNCLEAR = 0.05
"""Chance of an accidental fit above which a kind is not counted as known."""


@dataclass(frozen=True)
class Fault:
    """The first fault of a chain.

    Attributes
    ----------
    step : int
        1-based; for ``ran over``, and for a ``loop`` after the end, one past the last step asked for.
    kind : str
        ``operand fetch`` or ``operator fetch``: the step shows another one than its program entry has. ``carry``: one
        carry or borrow dropped or invented, or a result not wrapped. ``premise reuse``: the right operation on an
        earlier state. ``arithmetic``: any other wrong result (in hops and symbols a wrong fact or rewriting).
        ``label``: a wrong step id. ``format``: cannot be read. ``stopped early``, ``ran over``. ``loop``: what would
        be ``label``, ``format`` or ``ran over``, but from there on the chain only repeats itself
        (:mod:`o1lab.chains.loops`).
    expected, got : str
        What stands in gold and what was produced, as far as it is at fault.
    evidence : str
        What the kind rests on, in words.
    source : int or None
        Fetches: label of the nearest program entry that has what was fetched. ``premise reuse``: step after which the
        state stood that was used (0: the state given). ``label``: the step that the label belongs to. Else ``None``.
    also : tuple of str
        Other kinds that explain the same result.
    chance : float
        Of wrong results only: how likely one drawn at random would pass for ``premise reuse`` here. In families of few
        states many results follow from *some* earlier state.
    """

    step: int
    kind: str
    expected: str
    got: str
    evidence: str
    source: int | None = None
    also: tuple[str, ...] = ()
    chance: float = 0.0

    @property
    def clear(self) -> bool:
        """Whether nothing else explains it, nor accident in more than 5 % of cases."""
        return not self.also and (self.chance <= UNCLEAR or self.kind != "premise reuse")

    @property
    def past_end(self) -> bool:
        """Whether every step asked for is right, and the fault is that the chain went on."""
        return self.kind == "ran over" or (self.kind == "loop" and not self.expected)

    def __str__(self) -> str:
        also = f" (or {', '.join(self.also)})" if self.also else ""
        return f"step {self.step}, {self.kind}{also}: {self.evidence}"


@dataclass(frozen=True)
class Propagation:
    """What became of a chain after its first fault.

    Attributes
    ----------
    later, right : int
        Steps after the fault; how many of them are right given the produced state before them.
    rejoined : int or None
        First later step whose state is gold again.
    """

    later: int
    right: int
    rejoined: int | None

    @property
    def share(self) -> Estimate | None:
        """Share of later steps that are right in themselves; ``None`` without any."""
        return proportion(self.right, self.later) if self.later else None


def localise(sample: Sample, produced: str | Parsed, style: str = "tokens") -> Fault | None:
    """First fault of a produced chain, ``None`` if all of it is right.

    Parameters
    ----------
    sample : Sample
        The problem.
    produced : str or Parsed
        The model's text, or the same already read by :func:`o1lab.chains.render.parse`.
    style : str
        ``"tokens"``: every part of a step must be there. ``"language"``: a label, operator or operand that a step does
        not mention is no fault, nor are steps numbered from 1, nor prose around them.

    Examples
    --------
    >>> from o1lab import chains
    >>> sample = chains.make("hops", 4, 1, seed=0)[0]
    >>> localise(sample, sample.gold) is None
    True
    >>> print(localise(sample, " ".join(sample.gold.split()[:6])))
    step 3, stopped early: 2 of 4 steps, then nothing more and no end mark
    """
    chain = _read(sample, produced, style)
    steps = _renumbered(sample, chain.steps) if style == "language" else chain.steps
    fault = _first(sample, chain, steps, style == "language")
    if fault is None or fault.kind not in ("label", "format", "ran over"):
        return fault
    if (turn := loops.of_steps(steps, fault.step)) is None:
        return fault
    evidence = f"{fault.evidence}; to its end it repeats the same {turn.period}, {turn.times} times over"
    return replace(fault, kind="loop", evidence=evidence)


def _first(sample: Sample, chain: Parsed, steps: Sequence[Produced], language: bool) -> Fault | None:
    """The first fault, whatever comes after it."""
    if not language and chain.rest:
        return Fault(1, "format", _text(sample.steps[0]), chain.rest, f"before the first step stands {chain.rest!r}")
    before = sample.start
    for gold, step in zip(sample.steps, steps, strict=False):
        cut_off = step is steps[-1] and not chain.ended
        if (fault := _step_fault(sample, gold, step, before, language, cut_off)) is not None:
            return fault
        before = gold.state
    asked, done = len(sample.steps), len(steps)
    if done < asked:
        end = "the end mark" if chain.ended else "nothing more and no end mark"
        evidence = f"{done} of {asked} steps, then {end}"
        return Fault(done + 1, "stopped early", _text(sample.steps[done]), "", evidence)
    if done > asked:
        return Fault(asked + 1, "ran over", "", steps[asked].text, f"{done} steps where {asked} were asked for")
    if chain.answer is not None and chain.answer != sample.answer:
        evidence = f"every step is right, but the answer given is {chain.answer} instead of {sample.answer}"
        return Fault(asked, "format", sample.answer, chain.answer, evidence)
    return None


def propagation(sample: Sample, produced: str | Parsed, fault: Fault, style: str = "tokens") -> Propagation:
    """What became of the chain after its first fault: are later steps right in themselves, does it rejoin gold?

    A later step is right in itself if it works the program's entry with its label, next after the label before, and
    its state follows from the *produced* state before.
    """
    chain = _read(sample, produced, style)
    steps = _renumbered(sample, chain.steps) if style == "language" else chain.steps
    entries = {entry.label: entry for entry in sample.program}
    gold = {step.label: step.state for step in sample.steps}
    right, rejoined = 0, None
    for index in range(fault.step, len(steps)):
        step, last = steps[index], steps[index - 1]
        label = sample.steps[0].label + index if step.label is None and style == "language" else step.label
        entry = entries.get(label)
        said = [(step.operator, entry.operator), (step.operand, entry.operand)] if entry else [("", None)]
        fits = all(got == want or (got is None and style == "language") for got, want in said)
        if last.label is not None and label != last.label + 1:
            fits = False
        if fits and sample.valid(last.state) and step.state == sample.apply(last.state, entry.operator, entry.operand):
            right += 1
        if rejoined is None and step.state is not None and step.state == gold.get(label):
            rejoined = index + 1
    return Propagation(max(0, len(steps) - fault.step), right, rejoined)


def first_steps(faults: Iterable[Fault | None]) -> list[int | None]:
    """Step of each first fault for :mod:`o1lab.chains.survival`: a chain that only ran over was right to its end."""
    return [None if fault is None or fault.past_end else fault.step for fault in faults]


def tally(faults: Iterable[Fault | None]) -> dict[str, Estimate]:
    """Shares of the kinds among the faults (Wilson), those that are not :attr:`Fault.clear` under ``"unclear"``.

    Examples
    --------
    >>> print(tally([Fault(1, "label", "s1", "s2", "…"), None])["label"])
    1 [0.2065, 1] (n=1)
    """
    kinds = [fault.kind if fault.clear else "unclear" for fault in faults if fault is not None]
    if not kinds:
        raise EstimateError("no fault: shares of kinds need at least one")
    return {kind: proportion(kinds.count(kind), len(kinds)) for kind in (*KINDS, "unclear") if kind in kinds}


def reuse_share(faults: Iterable[Fault | None]) -> Estimate:
    """Share of wrong results that reuse an earlier state, beyond what accident makes look so.

    A wrong result of another cause follows from *some* earlier state with its own known ``chance``; the share has the
    greatest likelihood given that, and its interval is that of the likelihood ratio.

    Examples
    --------
    >>> fits = Fault(9, "premise reuse", "3", "5", "…", source=2, chance=0.5)
    >>> print(reuse_share([fits, Fault(9, "arithmetic", "3", "6", "…", chance=0.5)] * 50))
    0 [0, 0.1945] (n=100)
    """
    import numpy as np
    from scipy.special import xlog1py

    wrong = [fault for fault in faults if fault and fault.kind in ("carry", "premise reuse", "arithmetic")]
    wrong = [fault for fault in wrong if fault.chance < 1]
    if not wrong:
        raise EstimateError("no wrong result that could be told from an accident")
    fits = np.array(["premise reuse" in (fault.kind, *fault.also) for fault in wrong])
    chance = np.array([fault.chance for fault in wrong])[fits, None]
    shares = np.linspace(0, 1, 2001)
    with np.errstate(divide="ignore"):
        found = np.log(shares + (1 - shares) * chance).sum(0) + xlog1py((~fits).sum(), -shares)
    within = np.flatnonzero(found >= found.max() - 1.9207)
    low, high = shares[max(within[0] - 1, 0)], shares[min(within[-1] + 1, 2000)]
    return Estimate(float(shares[found.argmax()]), float(low), float(high), len(wrong), "1")


def _read(sample: Sample, produced: str | Parsed, style: str) -> Parsed:
    if style not in STYLES:
        raise UnknownName("style", str(style), STYLES)
    if not isinstance(sample, Sample):
        raise ChainError(f"a {type(sample).__name__} is no sample: o1lab.chains.make gives them")
    if isinstance(produced, str):
        if style == "tokens":
            before, mark, _ = produced.partition("<eos>")
            produced = before + mark
        return parse(sample, produced, style)
    if not isinstance(produced, Parsed):
        raise ChainError(f"produced={produced!r} is neither text nor a parsed chain")
    return produced


def _renumbered(sample: Sample, steps: Sequence[Produced]) -> Sequence[Produced]:
    """The steps with the program's labels, if a model numbered them from 1 throughout."""
    first = sample.steps[0].label
    if not steps or first == 1 or [step.label for step in steps] != list(range(1, len(steps) + 1)):
        return steps
    return [Produced(first + k, s.operator, s.operand, s.state, s.text) for k, s in enumerate(steps)]


def _text(step: Step) -> str:
    return " ".join(filter(None, (f"s{step.label}", step.operator, step.operand, step.state)))


def _step_fault(sample: Sample, gold: Step, step: Produced, before: str, language: bool, cut_off: bool) -> Fault | None:
    """The fault of one step, all before it being right."""
    parts = (step.label, step.operator, step.operand, step.state)
    unread = step.state is None if language else None in parts
    cut_off = cut_off and unread and step.state is None
    if unread and not cut_off:
        return Fault(gold.index, "format", _text(gold), step.text, f"{step.text!r} cannot be read as a whole step")
    if step.label not in (None, gold.label):
        return _label_fault(sample, gold, step)
    wrong = [name for name in ("operator", "operand") if getattr(step, name) not in (None, getattr(gold, name))]
    if wrong:
        return _fetch_fault(sample, gold, step, wrong)
    if cut_off:
        evidence = f"the text breaks off in this step, after {step.text!r}"
        return Fault(gold.index, "stopped early", _text(gold), step.text, evidence)
    return None if step.state == gold.state else _result_fault(sample, gold, str(step.state), before)


def _label_fault(sample: Sample, gold: Step, step: Produced) -> Fault:
    source = next((other.index for other in sample.steps if other.label == step.label), None)
    entry = next((entry for entry in sample.program if entry.label == step.label), None)
    if source is None:
        what = "which is not asked for" if entry else "which no program entry has"
    else:
        what = f"which {'repeats' if source < gold.index else 'skips to'} step {source}"
    shown = (step.operator, step.operand)
    if entry and shown == (entry.operator, entry.operand):
        what += "; it works that entry"
    elif shown == (gold.operator, gold.operand):
        what += "; it works the right entry"
    got, expected = f"s{step.label}", f"s{gold.label}"
    return Fault(gold.index, "label", expected, got, f"the label is {got} instead of {expected}, {what}", source)


def _fetch_fault(sample: Sample, gold: Step, step: Produced, wrong: Sequence[str]) -> Fault:
    got, expected = ({name: getattr(each, name) for name in wrong} for each in (step, gold))
    for sought in (wrong, wrong[:1]):  # both from one entry, or else the first of them
        holders = [entry.label for entry in sample.program if all(getattr(entry, name) == got[name] for name in sought)]
        if holders:
            break
    source = min(holders, key=lambda label: (abs(label - gold.label), label)) if holders else None
    names, shown, right = (" ".join(part) for part in (wrong, got.values(), expected.values()))
    if source is None:
        where = "no program entry has it"
    else:
        what = "it" if len(sought) == len(wrong) else f"the {sought[0]}"
        where = f"{what} stands at s{source}, {abs(source - gold.label)} {'after' if source > gold.label else 'before'}"
        where += f" (and at {len(holders) - 1} other entries)" if len(holders) > 1 else ""
    kind = f"{wrong[0]} fetch"
    return Fault(
        gold.index, kind, right, shown, f"{names} {shown} instead of {right} of s{gold.label}: {where}", source
    )


def _result_fault(sample: Sample, gold: Step, got: str, before: str) -> Fault:
    """A wrong state although everything shown is right: each way to come to it is tried."""
    wrong = f"{got} instead of {gold.state}"
    done = " ".join(filter(None, (before, gold.operator, gold.operand)))
    carries, reuse = slips.carries(sample, gold, before), slips.reuse(sample, gold)
    chance = len(reuse) / (slips.states(sample) - 1)
    told = {"carry": f"{wrong}: {carries[got]} in {done}"} if got in carries else {}
    if got in reuse:
        where = f"the state after step {reuse[got]}" if reuse[got] else "the state given at the start"
        told["premise reuse"] = f"{wrong}: it follows from {where}, not from {before}"
        if chance > UNCLEAR:
            told["premise reuse"] += f"; {100 * chance:.0f} % of wrong results would follow from some earlier state"
    if told:
        kind, *also = told
        source = reuse[got] if kind == "premise reuse" else None
        return Fault(gold.index, kind, gold.state, got, told[kind], source, tuple(also), chance)
    if sample.variant != "digits" and len(got.split()) != FAMILIES[sample.variant].state_width:
        return Fault(gold.index, "format", gold.state, got, f"{got!r} cannot be read as a state")
    evidence = f"{wrong}: a slip in {done}{_hint(sample, gold, got, before)}"
    return Fault(gold.index, "arithmetic", gold.state, got, evidence, chance=chance)


def _hint(sample: Sample, gold: Step, got: str, before: str) -> str:
    """What else the wrong result could be, for the evidence only."""
    if got == before:
        return "; the state before is kept"
    if sample.task == "arithmetic":
        return ""
    others = sorted({entry.operator for entry in sample.program} | {relation for relation, _ in sample.table})
    same = [other for other in others if other != gold.operator and sample.apply(before, other, "") == got]
    return f"; it is what {' or '.join(same)} gives" if same else ""
