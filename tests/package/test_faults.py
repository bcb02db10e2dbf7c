"""Faults planted in produced chains come back at exactly their step, as what they are, in every family."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from o1lab import chains
from o1lab.chains import faults, render
from o1lab.chains.faults import Fault, localise, propagation
from o1lab.chains.samples import FAMILIES, Entry, Produced, Sample
from o1lab.errors import ChainError, EstimateError, UnknownName

VARIANTS = ("modular", "digits", "symbols", "hops")
RESULTS = ("arithmetic", "carry", "premise reuse")
KINDS = (*RESULTS, "operand fetch", "operator fetch", "label", "format", "stopped early", "ran over")


def draw(variant: str, steps: int, seed: int, **settings) -> Sample:
    """One problem of a variant."""
    task = FAMILIES[variant].task
    which = {"variant": variant} if task == "arithmetic" else {}
    return chains.make(task, steps, 1, seed, **which, **settings)[0]


def follow(sample: Sample, state: str, done: int) -> list[Produced]:
    """The steps after ``done`` worked rightly from ``state`` on."""
    steps = []
    for gold in sample.steps[done:]:
        state = sample.apply(state, gold.operator, gold.operand) if sample.valid(state) else gold.state
        steps.append(Produced(gold.label, gold.operator, gold.operand, state, ""))
    return steps


def write(sample: Sample, steps: list[Produced], style: str) -> str:
    """The text of a chain in a style."""
    if style == "tokens":
        parts = [(f"s{s.label}", s.operator, s.operand, s.state) for s in steps]
        return " ".join(word for part in parts for word in part if word)
    family, before, lines = FAMILIES[sample.variant], sample.start, []
    for s in steps:
        lines.append(f"Step {s.label}: {family.say_step(before, s.operator, s.operand, s.state)}")
        before = s.state
    return "\n".join(lines)


def states_of(sample: Sample, chance: random.Random) -> str:
    """A random state."""
    if sample.variant == "hops":
        return chance.choice(sorted({name for _, name, _ in sample.facts}))
    if sample.variant == "symbols":
        return " ".join(chance.choice("ABCDEF") for _ in range(5))
    top = 31 if sample.variant == "modular" else 1000
    return FAMILIES[sample.variant].state(chance.randrange(top))


def carried_wrongly(sample: Sample, index: int) -> set[str]:
    """Results with one carry or borrow too many or too few, by arithmetic on the right result."""
    if sample.variant != "digits":
        return set()
    family, gold = FAMILIES["digits"], sample.steps[index]
    before = family.value(sample.steps[index - 1].state if index else sample.start)
    b, right = family.value(gold.operand), family.value(gold.state)
    sign = 1 if gold.operator == "+" else -1
    results = set()
    for unit in (10, 100):
        happens = before % unit + b % unit >= unit if sign > 0 else before % unit < b % unit
        step = -sign * unit if happens else sign * unit
        results.add((right + step) % 1000)
        digit = right // unit % 10
        results.add(right + ((digit + step // unit) % 10 - digit) * unit)
    results.add(sum((before // u % 10 + sign * (b // u % 10)) % 10 * u for u in (1, 10, 100)))
    raw = before + sign * b
    states = {family.state(value) for value in results} | ({family.state(raw)} if not 0 <= raw < 1000 else set())
    if raw < 0:
        states.add(family.state(-raw % 1000))
    return states - {gold.state}


def reused(sample: Sample, index: int) -> dict[str, set[int]]:
    """Wrong results that the step gives from each earlier state but the last, with where that stood."""
    gold, found = sample.steps[index], {}
    before = [sample.start, *(step.state for step in sample.steps)][:index]
    for after, state in enumerate(before):
        result = sample.apply(state, gold.operator, gold.operand)
        if result != gold.state:
            found.setdefault(result, set()).add(after)
    return found


def plant(sample: Sample, kind: str, index: int, chance: random.Random, style: str = "tokens"):
    """A chain with one fault of ``kind`` at step ``index + 1`` and right after it: (text, step, sources) or None."""
    gold = sample.steps[index]
    before = sample.steps[index - 1].state if index else sample.start
    right = follow(sample, sample.start, 0)
    operator, operand, label, state, sources = gold.operator, gold.operand, gold.label, gold.state, None
    if kind in ("operand fetch", "operator fetch"):
        name = kind.split()[0]
        others = [entry for entry in sample.program if getattr(entry, name) != getattr(gold, name)]
        if not others:
            return None
        wrong = getattr(chance.choice(others), name)
        sources = {entry.label for entry in sample.program if getattr(entry, name) == wrong}
        operator, operand = (wrong, operand) if name == "operator" else (operator, wrong)
        state = sample.apply(before, operator, operand)
    elif kind == "arithmetic":
        while state == gold.state:
            state = states_of(sample, chance)
    elif kind == "carry":
        wrong = sorted(result for result in carried_wrongly(sample, index) if style == "tokens" or sample.valid(result))
        wrong = [result for result in wrong if "-" not in result]
        if not wrong:
            return None
        state = chance.choice(wrong)
    elif kind == "premise reuse":
        results = reused(sample, index)
        if not results:
            return None
        state = chance.choice(sorted(results))
        sources = results[state]
    elif kind == "label":
        label = chance.choice([gold.label - 1, gold.label + 1, gold.label + 2, 511 if gold.label < 500 else 0])
        sources = {label - sample.steps[0].label + 1} & {step.index for step in sample.steps} or {None}
    elif kind == "stopped early":
        text = write(sample, right[:index], style)
        if style == "tokens" and chance.random() < 0.5:
            words = write(sample, right[index : index + 1], style).split()
            return " ".join([text, *words[: chance.randrange(len(words))]]), index + 1, None
        return text + (" <eos>" if style == "tokens" else ""), index + 1, None
    elif kind == "ran over":
        last = right[-1]
        more = [Produced(last.label + k, last.operator, last.operand, last.state, "") for k in (1, 2)]
        return write(sample, right + more[: chance.randint(1, 2)], style), len(right) + 1, None
    wrong = Produced(label, operator, operand, state, "")
    rest = follow(sample, state, index + 1)
    if kind == "format":
        words = write(sample, [wrong], style).split()
        place = chance.randrange(1, len(words))
        words[place : place + 1] = chance.choice([[], ["<unk>"], [words[place], "program"]])
        parts = [write(sample, right[:index], style), " ".join(words), write(sample, rest, style), "<eos>"]
        return " ".join(parts), index + 1, None
    return write(sample, right[:index] + [wrong] + rest, style), index + 1, sources


def cases(count: int, style: str, kinds=KINDS):
    """Planted cases: variant, sample, kind, index, (text, step, sources)."""
    chance, made = random.Random(f"faults {style}"), 0
    while made < count:
        variant, kind = chance.choice(VARIANTS), chance.choice(kinds)
        steps = chance.choice([1, 2, 3, 5, 8, 16, 32])
        first = chance.randint(1, steps) if chance.random() < 0.3 else 1
        order = chance.choice(["sorted", "shuffled"])
        sample = draw(variant, steps, chance.randrange(10**6), first=first, order=order)
        index = chance.randrange(len(sample.steps))
        planted = plant(sample, kind, index, chance, style)
        if planted is not None:
            made += 1
            yield sample, kind, index, planted


def fits(sample: Sample, index: int, state: str) -> set[str]:
    """Kinds that a wrong result fits, worked out without the package's own search."""
    found = {"arithmetic"}
    found |= {"carry"} if state in carried_wrongly(sample, index) else set()
    return found | ({"premise reuse"} if state in reused(sample, index) else set())


@pytest.mark.parametrize("style", render.STYLES)
def test_a_planted_fault_is_found_at_exactly_its_step_and_as_what_it_is(style):
    kinds = KINDS if style == "tokens" else tuple(kind for kind in KINDS if kind != "format")
    ambiguous = total = 0
    for sample, kind, index, (text, step, sources) in cases(1200 if style == "tokens" else 600, style, kinds):
        fault = localise(sample, text, style)
        where = f"{sample.id} {kind} planted at step {step}: {text!r} -> {fault}"
        assert fault is not None, where
        assert fault.step == step, where
        total += 1
        if kind in RESULTS:
            possible = fits(sample, index, fault.got)
            assert {fault.kind, *fault.also} == (possible - {"arithmetic"} or {"arithmetic"}), where
            unsure = len(possible) > (1 if kind == "arithmetic" else 2)
            ambiguous += unsure
            if unsure:
                continue
        assert fault.kind == kind, where
        if sources is not None:
            assert fault.source in sources, where
        assert fault.expected != fault.got, where
        assert fault.evidence, where
    assert ambiguous < 0.2 * total


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("style", render.STYLES)
def test_a_right_chain_has_no_fault(variant, style):
    for seed in range(5):
        sample = draw(variant, 12, seed, order="shuffled", first=3)
        text = render.gold(sample, style)
        assert localise(sample, text, style) is None
        assert localise(sample, render.parse(sample, text, style), style) is None
    assert localise(sample, f"{sample.gold} <eos>") is None
    assert localise(sample, f"{sample.gold} <eos> <pad> <pad> s1 s1") is None


def test_a_fetch_is_traced_to_the_nearest_entry_that_has_it():
    sample = draw("modular", 64, 3)
    here, words = sample.steps[30], sample.gold.split()
    holders: dict[str, list[int]] = {}
    for entry in sample.program:
        holders.setdefault(entry.operand, []).append(entry.label)
    operand, labels = next(
        (operand, labels)
        for operand, labels in holders.items()
        if operand != here.operand and len({abs(label - here.label) for label in labels}) > 2
    )
    words[4 * 30 + 2] = operand
    fault = localise(sample, " ".join(words))
    assert (fault.step, fault.kind) == (31, "operand fetch")
    assert fault.source in labels
    assert abs(fault.source - here.label) == min(abs(label - here.label) for label in labels)
    assert f"at {len(labels) - 1} other entries" in fault.evidence


def test_an_operand_that_no_entry_has_has_no_source():
    sample = draw("modular", 16, 3)
    words, used = sample.gold.split(), {entry.operand for entry in sample.program}
    words[4 * 7 + 2] = next(str(n) for n in range(31) if str(n) not in used)
    fault = localise(sample, " ".join(words))
    assert (fault.step, fault.kind, fault.source) == (8, "operand fetch", None)
    assert "no program entry has it" in fault.evidence


def test_a_result_with_two_explanations_names_both():
    for seed in range(40):
        sample = draw("digits", 32, seed)
        both = [(k, result) for k in range(32) for result in carried_wrongly(sample, k) & set(reused(sample, k))]
        if both:
            break
    index, result = both[0]
    words = sample.gold.split()
    words[8 * index + 5 : 8 * index + 8] = result.split()
    fault = localise(sample, " ".join(words))
    assert (fault.step, fault.kind, fault.also, fault.clear) == (index + 1, "carry", ("premise reuse",), False)
    assert faults.tally([fault])["unclear"].value == 1
    assert "(or premise reuse)" in str(fault)


def test_operator_and_operand_of_another_entry_are_one_fetch():
    drawn = chains.make("arithmetic", 6, 40, 0, variant="digits")
    sample = next(s for s in drawn if s.steps[1].operator != s.steps[4].operator)
    second, fifth = sample.steps[1], sample.steps[4]
    words = sample.gold.split()
    words[8 + 1 : 8 + 5] = [fifth.operator, *fifth.operand.split()]
    fault = localise(sample, " ".join(words))
    assert (fault.kind, fault.source) == ("operator fetch", fifth.label)
    assert fault.expected == f"{second.operator} {second.operand}"
    assert "3 after" in fault.evidence


def test_an_unwrapped_result_is_a_carry_fault():
    drawn = chains.make("arithmetic", 1, 40, 0, variant="modular")
    sample = next(s for s in drawn if s.steps[0].operator == "*" and int(s.start) > 15 < int(s.steps[0].operand))
    step = sample.steps[0]
    raw = int(sample.start) * int(step.operand)
    fault = localise(sample, f"Step {step.label}: {sample.start} * {step.operand} = {raw}", "language")
    assert fault.kind == "carry"
    assert "not reduced modulo 31" in fault.evidence


def test_what_a_slip_could_be_is_in_the_evidence():
    sample = draw("symbols", 4, 1)
    kept = sample.gold.split()
    kept[7 + 2 : 7 + 7] = sample.steps[0].state.split()
    assert "the state before is kept" in localise(sample, " ".join(kept)).evidence
    here = sample.steps[0].state
    other = next(
        rule for rule in ("AxB", "BxC", "CxD") if sample.apply(here, rule, "") not in (here, sample.steps[1].state)
    )
    sample = replace(sample, program=(*sample.program, Entry(511, other, "")))
    kept[7 + 2 : 7 + 7] = sample.apply(sample.steps[0].state, other, "").split()
    fault = localise(sample, " ".join(kept))
    assert fault.kind == "arithmetic"
    assert f"it is what {other} gives" in fault.evidence


def test_language_leaves_unsaid_what_tokens_must_show():
    sample = draw("modular", 4, 0)
    brief = "\n".join(f"Step {step.label}: {step.state}" for step in sample.steps)
    renumbered = "\n".join(f"Step {step.index}: {step.state}" for step in sample.steps)
    assert localise(sample, brief, "language") is None
    assert localise(sample, renumbered, "language") is None
    assert localise(sample, f"{brief}\nAnswer: {sample.answer}", "language") is None
    tokens = " ".join(f"s{step.label} {step.state}" for step in sample.steps)
    assert localise(sample, tokens).kind == "format"
    wrong = next(str(n) for n in range(31) if str(n) != sample.answer)
    fault = localise(sample, f"{brief}\nAnswer: {wrong}", "language")
    assert (fault.step, fault.kind, fault.got) == (4, "format", wrong)
    assert "every step is right" in fault.evidence


@pytest.mark.parametrize("text", ["", "   ", "<eos>"])
def test_nothing_is_stopped_early_at_step_1(text):
    fault = localise(draw("hops", 3, 0), text)
    assert (fault.step, fault.kind) == (1, "stopped early")


def test_junk_before_the_first_step_is_a_format_fault():
    sample = draw("hops", 3, 0)
    for text in (f"e1 e2 {sample.gold}", f"e1 e2 {sample.gold} <eos>"):
        assert localise(sample, text).kind == "format"
        assert localise(sample, render.parse(sample, text)).kind == "format"


@pytest.mark.parametrize("bad", [None, 3, ["s1"], b"s1"])
def test_what_is_no_chain_is_refused(bad):
    with pytest.raises(ChainError, match="neither text nor a parsed chain"):
        localise(draw("hops", 3, 0), bad)


def test_an_unknown_style_is_refused():
    sample = draw("hops", 3, 0)
    for produced in ("s1", render.parse(sample, "s1")):
        with pytest.raises(UnknownName, match="style"):
            localise(sample, produced, "prose")


def test_after_the_fault_later_steps_are_judged_from_the_produced_state():
    sample, chance = draw("digits", 10, 2), random.Random(0)
    text, step, _ = plant(sample, "arithmetic", 3, chance)
    after = propagation(sample, text, localise(sample, text))
    assert (step, after.later, after.right, after.rejoined) == (4, 6, 6, None)
    assert after.share.value == 1
    gold = sample.gold.split()
    planted = text.split()
    mixed = " ".join(planted[: 8 * 6] + gold[8 * 6 :])  # back on gold from step 7
    after = propagation(sample, mixed, localise(sample, mixed))
    assert (after.later, after.right, after.rejoined) == (6, 5, 7)


def test_after_a_skipped_step_the_others_can_be_right():
    sample = draw("modular", 8, 5)
    words = sample.gold.split()
    skipped = follow(sample, sample.steps[2].state, 4)
    text = " ".join([*words[:12], write(sample, skipped, "tokens")])
    fault = localise(sample, text)
    assert (fault.step, fault.kind, fault.source) == (4, "label", 5)
    assert "skips to step 5; it works that entry" in fault.evidence
    after = propagation(sample, text, fault)
    assert (after.later, after.right) == (3, 3)
    assert propagation(sample, " ".join(words[:12]), localise(sample, " ".join(words[:12]))).share is None


def test_shares_of_kinds_keep_what_is_unclear_apart():
    sure, unsure = Fault(2, "carry", "1", "2", "…"), Fault(9, "premise reuse", "1", "2", "…", 3, chance=0.4)
    shares = faults.tally([sure, sure, unsure, None, None])
    assert {kind: share.value for kind, share in shares.items()} == {"carry": 2 / 3, "unclear": 1 / 3}
    assert faults.first_steps([sure, None, Fault(9, "ran over", "", "", "…")]) == [2, None, None]
    with pytest.raises(EstimateError, match="no fault"):
        faults.tally([None])
    with pytest.raises(EstimateError, match="no wrong result"):
        faults.reuse_share([None, Fault(1, "label", "s1", "s2", "…")])
    three = faults.reuse_share([Fault(3, "premise reuse", "1", "2", "…", 0)] * 3)
    assert (three.value, three.high) == (1, 1)
    assert 0.4 < three.low < 0.6  # three of three say little


@pytest.mark.parametrize(("truth", "kind"), [(0.0, "arithmetic"), (0.4, None), (1.0, "premise reuse")])
def test_the_share_of_reused_premises_is_right_although_accident_looks_alike(truth, kind):
    chance, found = random.Random(7), []
    while len(found) < 400:
        sample = draw("modular", 16, chance.randrange(10**6))
        drawn = kind or ("premise reuse" if chance.random() < truth else "arithmetic")
        planted = plant(sample, drawn, chance.randrange(2, 16), chance)
        if planted:
            found.append(localise(sample, planted[0]))
    share = faults.reuse_share(found)
    assert share.low <= truth <= share.high
    naive = sum(fault.kind == "premise reuse" for fault in found) / len(found)
    assert truth == 1 or naive > truth + 0.1
