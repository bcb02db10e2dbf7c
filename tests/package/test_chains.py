"""Chain problems: drawn, redrawn, continued, shown in two styles and read back, bad input named."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from o1lab import chains
from o1lab.chains import arithmetic, hops, render, symbols
from o1lab.chains.chance import Chance
from o1lab.chains.samples import BREAKPOINTS, FAMILIES, LABELS, VARIANTS, Entry, Sample, worked
from o1lab.errors import ChainError, UnknownName

TASK_OF = {variant: task for task, variants in VARIANTS.items() for variant in variants}


def one(variant: str, steps: int = 8, seed: int = 0, **options) -> Sample:
    return chains.make(TASK_OF[variant], steps, 1, seed, variant=variant, **options)[0]


def built(variant: str, start: str, entries, facts=(), base: int = 41) -> Sample:
    program = tuple(Entry(base + place, *entry) for place, entry in enumerate(entries))
    sample = Sample("built", TASK_OF[variant], variant, 0, 0, len(program), start, (), program, tuple(facts), {})
    return worked(sample, [entry.label for entry in program])


@st.composite
def samples(draw) -> Sample:
    variant = draw(st.sampled_from(list(TASK_OF)))
    steps = draw(st.integers(1, 40))
    first = draw(st.integers(1, steps))
    options = {"first": first, "asked": draw(st.none() | st.integers(1, steps - first + 1))}
    options |= {"facts": draw(st.integers(2, 64))} if variant == "hops" else {}
    order = draw(st.sampled_from(("sorted", "shuffled")))
    return one(variant, steps, draw(st.integers(0, 10**6)), order=order, **options)


def content(steps) -> list[tuple]:
    return [(step.label, step.operator, step.operand, step.state) for step in steps]


# What a problem is


@given(samples())
def test_gold_steps_follow_from_the_program(sample):
    entries, state = {entry.label: entry for entry in sample.program}, sample.start
    for index, step in enumerate(sample.steps, 1):
        entry = entries[step.label]
        assert (step.index, step.operator, step.operand) == (index, entry.operator, entry.operand)
        state = sample.apply(state, entry.operator, entry.operand)
        assert step.state == state
        assert sample.valid(state)
    assert sample.answer == state
    assert [step.label for step in sample.steps] == list(
        range(sample.steps[0].label, sample.steps[0].label + len(sample.steps))
    )


@given(samples())
def test_texts_have_the_tokens_that_the_factors_say(sample):
    assert len(sample.prompt.split()) == sample.factors["prompt_tokens"]
    assert len(sample.gold.split()) == sample.factors["chain_tokens"] == len(sample.steps) * sample.tokens_per_step
    assert sample.factors["asked"] == len(sample.steps)
    assert sample.factors["facts"] == len({name for _, name, _ in sample.facts})
    assert sample.length == len(sample.program)


@given(samples())
def test_breakpoints_are_what_they_say(sample):
    states = [sample.start, *(step.state for step in sample.steps)]
    for before, step in zip(states, sample.steps, strict=False):

        def other(o, p, before=before, step=step):
            return sample.apply(before, o, p) != step.state

        fetched = any(other(step.operator, entry.operand) for entry in sample.program)
        operated = any(other(entry.operator, step.operand) for entry in sample.program)
        reused = any(sample.apply(old, step.operator, step.operand) != step.state for old in states[: step.index - 1])
        assert ("operand fetch" in step.breakpoints) == fetched
        assert ("operator fetch" in step.breakpoints) == operated
        assert ("premise reuse" in step.breakpoints) == reused
        assert set(step.breakpoints) <= set(BREAKPOINTS)


@pytest.mark.parametrize(
    ("state", "operator", "operand", "carries"),
    [
        ("1 2 3", "+", "8 7 6", False),  # 321 + 678 = 999
        ("1 2 3", "+", "9 0 0", True),
        ("1 9 3", "+", "0 1 0", True),
        ("0 0 9", "+", "0 0 1", True),  # 900 + 100 wraps
        ("9 9 9", "-", "1 2 3", False),
        ("5 5 5", "-", "5 1 5", False),
        ("0 9 9", "-", "1 0 0", True),
        ("9 0 9", "-", "0 1 0", True),
        ("9 9 0", "-", "0 0 1", True),  # 99 - 100 wraps
    ],
)
def test_carries_and_borrows(state, operator, operand, carries):
    sample = built("digits", state, [(operator, operand)])
    assert ("carry" in sample.steps[0].breakpoints) == carries
    assert sample.factors["carries"] == carries


def test_arithmetic_is_pythons():
    for a, b in itertools.product(range(31), repeat=2):
        for sign, right in (("+", a + b), ("-", a - b), ("*", a * b)):
            assert arithmetic.MODULAR.apply(str(a), sign, str(b)) == str(right % 31)
    for a, b in itertools.product(range(0, 1000, 37), range(0, 1000, 41)):
        x, y = (" ".join(reversed(f"{number:03}")) for number in (a, b))
        for sign, right in (("+", a + b), ("-", a - b)):
            assert arithmetic.DIGITS.apply(x, sign, y) == " ".join(reversed(f"{right % 1000:03}"))


@pytest.mark.parametrize("rule", symbols.RULES)
def test_every_rule_is_a_bijection(rule):
    states = [" ".join(letters) for letters in itertools.product("ABCDEF", repeat=5)]
    assert {symbols.SYMBOLS.apply(state, rule, "") for state in states} == set(states)
    assert len(symbols.RULES) == 28


@pytest.mark.parametrize(
    ("rule", "after"),
    [("swap02", "F C A B A"), ("left", "C F B A A"), ("right", "A A C F B"), ("reverse", "A B F C A"),
     ("AxB", "B C F A B"), ("DxE", "A C F B A")],
)  # fmt: skip
def test_rules_do_what_they_are_called(rule, after):
    assert symbols.SYMBOLS.apply("A C F B A", rule, "") == after


@given(st.integers(2, 64), st.integers(0, 10**6))
@settings(max_examples=30)
def test_relations_are_one_to_one_and_distractors_cannot_be_reached(entities, seed):
    sample = one("hops", 4, seed, facts=entities)
    names = {name for _, name, _ in sample.facts}
    assert len(names) == entities
    assert len(sample.facts) == 4 * entities
    for relation in hops.RELATIONS:
        assert {other for kind, _, other in sample.facts if kind == relation} == names
    core = set(one("hops", 4, seed, facts=min(entities, 12)).facts)
    reachable = {name for _, name, _ in core}
    assert core <= set(sample.facts)
    assert sample.start in reachable
    assert all((name in reachable) == (other in reachable) for _, name, other in sample.facts)


# Drawing


def test_the_same_arguments_give_the_same_problems():
    for task in chains.TASKS:
        assert chains.make(task, 12, 6, 3) == chains.make(task, 12, 6, 3)
        assert chains.make(task, 12, 6, 3)[:2] == chains.make(task, 12, 2, 3)
        first, second = chains.make(task, 12, 6, 3), chains.make(task, 12, 6, 4)
        assert not {a.prompt for a in first} & {b.prompt for b in second}
        assert len({a.prompt for a in first}) == 6


def test_problems_do_not_depend_on_hash_seeds():
    code = "from o1lab.chains import bench; print(bench.sha256(bench.problems(lengths=(5,), n=4)))"
    found = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("0", "1")
    }
    assert len(found) == 1
    assert len(found.pop().strip()) == 64


def test_arithmetic_mixes_both_variants_half_and_half():
    mixed = chains.make("arithmetic", 4, 6, 0)
    assert [sample.variant for sample in mixed] == ["modular", "digits"] * 3
    assert {sample.task for sample in mixed} == {"arithmetic"}
    digits = chains.make("arithmetic", 4, 2, 0, variant="digits")
    assert digits[1].prompt == mixed[1].prompt
    assert {sample.id for sample in digits}.isdisjoint(sample.id for sample in mixed)


def test_labels_are_contiguous_and_cover_all_ids():
    bases = {sample.steps[0].label for sample in chains.make("symbols", 500, 60, 0)}
    assert min(bases) >= 0
    assert max(bases) + 500 <= LABELS
    assert len(bases) > 8
    whole = chains.make("symbols", LABELS, 1, 0)[0]
    assert [entry.label for entry in whole.program] == list(range(LABELS))


def test_operators_and_operands_are_drawn_evenly():
    entries = [entry for sample in chains.make("arithmetic", 256, 40, 1) for entry in sample.program]
    modular = [entry for entry in entries if " " not in entry.operand]
    assert len(modular) == 5120
    for sign in "+-*":
        assert 1560 < sum(entry.operator == sign for entry in modular) < 1860  # 4.5 standard deviations
    assert not [entry for entry in modular if (entry.operator, entry.operand) == ("*", "0")]
    assert {entry.operand for entry in modular} == {str(number) for number in range(31)}


def test_length_and_place_are_separate():
    full = one("digits", 16)
    late, short = one("digits", 16, first=9), one("digits", 16, asked=4)
    middle = one("digits", 16, first=5, asked=3, order="shuffled")
    assert late.program == short.program == full.program
    assert late.start == full.steps[7].state
    assert content(late.steps) == content(full.steps[8:])
    assert [step.index for step in late.steps] == list(range(1, 9))
    assert late.answer == full.answer
    assert short.answer == full.steps[3].state
    assert content(middle.steps) == content(full.steps[4:7])
    assert sorted(middle.program, key=lambda entry: entry.label) == list(full.program)
    assert middle.program != full.program
    assert len({full.id, late.id, short.id, middle.id}) == 4
    assert "premise reuse" not in late.steps[0].breakpoints


def test_relations_are_drawn_anew_each_time():
    tables = [sample.table for sample in chains.make("hops", 2, 40, 0)]
    for relation in hops.RELATIONS:
        loops = [name == other for table in tables for (kind, name), other in table.items() if kind == relation]
        assert 15 < sum(loops) < 70  # one of twelve on average: 40 expected


def test_distractors_change_nothing_else():
    plain, more = one("hops", 8), one("hops", 8, facts=30)
    assert content(plain.steps) == content(more.steps)
    assert set(plain.facts) < set(more.facts)


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        (("symbols", 0, 1, 0), {}, "steps=0 must be from 1 to 512"),
        (("symbols", 513, 1, 0), {}, "steps=513 must be from 1 to 512"),
        (("symbols", 8.0, 1, 0), {}, "steps=8.0 must be a whole number"),
        (("symbols", True, 1, 0), {}, "steps=True must be a whole number"),
        (("symbols", 8, 0, 0), {}, "n=0 must be at least 1"),
        (("symbols", 8, "2", 0), {}, "n='2' must be a whole number"),
        (("symbols", 8, 1, "0"), {}, "seed='0' must be a whole number"),
        (("symbols", 8, 1, None), {}, "seed=None must be a whole number"),
        (("symbols", 8, 1, 0), {"first": 9}, "first=9 must be from 1 to 8"),
        (("symbols", 8, 1, 0), {"first": 0}, "first=0 must be from 1 to 8"),
        (("symbols", 8, 1, 0), {"first": 5, "asked": 5}, "asked=5 must be from 1 to 4"),
        (("symbols", 8, 1, 0), {"asked": 0}, "asked=0 must be from 1 to 8"),
        (("hops", 8, 1, 0), {"facts": 65}, "facts=65 must be from 2 to 64"),
        (("symbols", 8, 1, 0), {"facts": 24}, "hops only"),
    ],
)
def test_numbers_out_of_range_are_named(arguments, options, message):
    with pytest.raises(ChainError, match=message.replace("(", r"\(")):
        chains.make(*arguments, **options)


@pytest.mark.parametrize(
    ("task", "options", "message"),
    [
        ("symbol", {}, "unknown task 'symbol'; did you mean symbols"),
        (None, {}, "unknown task 'None'"),
        ("arithmetic", {"variant": "digit"}, "unknown variant of arithmetic 'digit'; did you mean digits"),
        ("hops", {"variant": "digits"}, "unknown variant of hops"),
        ("hops", {"order": "random"}, "unknown order 'random'"),
    ],
)
def test_unknown_names_list_the_near_ones(task, options, message):
    with pytest.raises(UnknownName, match=message):
        chains.make(task, 4, 1, 0, **options)


@pytest.mark.parametrize(
    ("variant", "step"),
    [
        ("modular", ("31", "+", "1")), ("modular", ("3", "+", "1 2 3")), ("modular", ("3", "/", "1")),
        ("digits", ("562", "+", "0 0 0")), ("digits", ("5 6", "+", "0 0 0")), ("digits", ("5 6 2", "*", "0 0 0")),
        ("symbols", ("A B C D", "left", "")), ("symbols", ("A B C D G", "left", "")),
        ("symbols", ("A B C D E", "up", "")), ("symbols", ("A B C D E", "left", "1")),
        ("hops", ("e99", "r0", "")), ("hops", ("", "r0", "")), ("hops", ("{start}", "r9", "")),
        ("hops", ("{start}", "r0", "e1")),
    ],
)  # fmt: skip
def test_what_cannot_be_applied_is_said(variant, step):
    sample = one(variant)
    with pytest.raises(ChainError):
        sample.apply(step[0].format(start=sample.start), *step[1:])


def test_chance_shuffles_evenly_and_repeats():
    counts = dict.fromkeys(itertools.permutations("abc"), 0)
    chance = Chance("test", 1)
    for _ in range(6000):
        counts[tuple(chance.shuffled("abc"))] += 1
    assert min(counts.values()) > 860  # 1000 expected, 4.8 standard deviations
    assert Chance("x", 1).shuffled(range(9)) == Chance("x", 1).shuffled(range(9)) != Chance("x 2").shuffled(range(9))
    assert sorted({Chance("n", number).below(4) for number in range(50)}) == [0, 1, 2, 3]


# Redrawn and continued


@given(samples(), st.integers(0, 10**6), st.sampled_from(("sorted", "shuffled")))
def test_a_redrawn_problem_has_the_same_chain(sample, seed, order):
    again = chains.redraw(sample, seed, order)
    assert [entry[1:] for entry in content(again.steps)] == [entry[1:] for entry in content(sample.steps)]
    assert again.start == sample.start
    assert set(again.facts) == set(sample.facts)
    assert again.id != sample.id
    assert all(0 <= entry.label < LABELS for entry in again.program)
    labels = [entry.label for entry in again.program]
    assert (labels == sorted(labels)) or order == "shuffled"
    assert again == chains.redraw(sample, seed, order)
    assert len(again.prompt.split()) == len(sample.prompt.split())


def test_redrawn_problems_differ_from_each_other():
    sample = one("hops", 12)
    drawn = [chains.redraw(sample, seed) for seed in range(8)]
    assert len({again.prompt for again in drawn}) == 8
    assert len({again.id for again in drawn}) == 8
    with pytest.raises(UnknownName, match="order"):
        chains.redraw(sample, 0, "mixed")
    with pytest.raises(ChainError, match="seed='a'"):
        chains.redraw(sample, "a")


@given(samples(), st.data())
def test_the_rest_of_a_chain_ends_the_same(sample, data):
    done = data.draw(st.integers(0, len(sample.steps) - 1))
    state = sample.steps[done - 1].state if done else sample.start
    left = chains.rest(sample, done, state)
    assert left.answer == sample.answer
    assert content(left.steps) == content(sample.steps[done:])
    assert {entry.label for entry in left.program} == {step.label for step in sample.steps[done:]}
    assert left.length == len(left.program) == len(sample.steps) - done
    shown = [entry for entry in sample.program if entry in left.program]
    assert list(left.program) == shown
    assert left.facts == sample.facts
    asked = data.draw(st.integers(1, len(left.steps)))
    part = chains.rest(sample, done, state, asked=asked)
    assert content(part.steps) == content(left.steps[:asked])
    assert part.length == asked
    assert (part == left) == (asked == len(left.steps))
    assert chains.redraw(left, 1).answer == sample.answer


def test_the_rest_follows_from_the_state_given():
    sample = built("modular", "21", [("+", "14"), ("*", "5"), ("-", "26")])
    assert [step.state for step in chains.rest(sample, 1, "7").steps] == ["4", "9"]
    for done in (3, -1, 1.0, "1"):
        with pytest.raises(ChainError, match="done="):
            chains.rest(sample, done, "7")
    for asked in (0, 3, 1.5):
        with pytest.raises(ChainError, match="asked="):
            chains.rest(sample, 1, "7", asked)
    for state in ("31", "x", "", None):
        with pytest.raises(ChainError, match="no state of built"):
            chains.rest(sample, 1, state)


# JSON


@given(samples())
def test_json_is_lossless(sample):
    assert Sample.from_dict(json.loads(json.dumps(sample.to_dict()))) == sample


def broken(change) -> dict:
    form = json.loads(json.dumps(built("modular", "21", [("+", "14"), ("*", "5")]).to_dict()))
    change(form)
    return form


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda form: form.pop("start"), "lacks 'start'"),
        (lambda form: form.update(variant="octal"), "no variant 'octal'"),
        (lambda form: form.update(variant="digits"), "no number of three digits"),
        (lambda form: form.update(start="40"), "'40' is no number"),
        (lambda form: form.update(length=3), "do not fit"),
        (lambda form: form.update(steps=[]), "0 steps do not fit"),
        (lambda form: form.update(seed="0"), "whole numbers"),
        (lambda form: form["program"][0].update(label=600), "no chain problem"),
        (lambda form: form["program"][0].update(label=42), "do not fit"),
        (lambda form: form["program"][0].update(label=512), "labels must be from 0 to 511"),
        (lambda form: form["program"][0].update(operand="15"), "built was altered: step 1"),
        (lambda form: form["steps"][1].update(state="21"), "built was altered: step 2"),
        (lambda form: form["steps"][1].pop("state"), "lacks 'state'"),
        (lambda form: form.update(program=7), "no chain problem"),
        (lambda form: form.update(facts=[["r0", "e1"]]), "no chain problem"),
    ],
)
def test_an_altered_sample_is_refused(change, message):
    with pytest.raises(ChainError, match=message):
        Sample.from_dict(broken(change))


def test_what_is_no_object_is_refused():
    for content_ in (None, 3, [], "x"):
        with pytest.raises(ChainError, match="no chain problem"):
            Sample.from_dict(content_)


# Shown and read back


@given(samples(), st.sampled_from(render.STYLES))
@settings(max_examples=200)
def test_gold_chains_are_read_back(sample, style):
    read = render.parse(sample, render.gold(sample, style) + (" <eos>" if style == "tokens" else ""), style)
    assert content(read.steps) == content(sample.steps)
    assert (read.answer, read.ended, read.rest) == (sample.answer, True, "")


@given(samples(), st.sampled_from(render.STYLES), st.data())
def test_a_cut_chain_is_read_up_to_the_cut(sample, style, data):
    text = render.gold(sample, style)
    kept = data.draw(st.integers(0, len(sample.steps) - 1))
    cut = text.split(f"s{sample.steps[kept].label} " if style == "tokens" else f"Step {sample.steps[kept].label}:")[0]
    read = render.parse(sample, cut, style)
    assert content(read.steps) == content(sample.steps[:kept])
    assert not read.ended


@given(samples(), st.text(alphabet="s0123 +-*ABxeofr:=>\n.<>| Step", max_size=60), st.sampled_from(render.STYLES))
@settings(max_examples=200)
def test_reading_never_fails(sample, text, style):
    read = render.parse(sample, text, style)
    assert all(step.text is not None for step in read.steps)
    assert read.answer is None or isinstance(read.answer, str)


@pytest.mark.timeout(60)  # what backtracks takes minutes
@pytest.mark.parametrize("unit", ["=", "-", "is ", "is to the ", "swap ", "every A ", " ", "\\mod ", "answer "])
def test_long_nonsense_is_read_in_the_end(unit):
    for sample in (MODULAR, DIGITS, SYMBOLS, HOPS):
        assert not render.parse(sample, "Step 41: " + unit * (40_000 // len(unit)) + "!", "language").ended


@pytest.mark.parametrize("variant", list(TASK_OF))
def test_prompts_in_language_hold_all_that_is_needed(variant):
    sample = one(variant, 9, order="shuffled", first=3, asked=4)
    text = render.prompt(sample, "language")
    problem = text.split("Your turn")[1]
    family = FAMILIES[variant]
    for entry in sample.program:
        assert f"Step {entry.label}: {family.say_entry(entry.operator, entry.operand)}\n" in problem
    assert family.say_start(sample.start) in problem
    assert f"Do steps {sample.steps[0].label} to {sample.steps[-1].label}." in problem
    assert problem.count(" is ") == len(sample.facts)
    assert render.gold(sample, "language").split("\n")[0] not in text
    assert "Do step 41." in render.prompt(built(variant, sample.start, [family.entry(Chance(1))], sample.facts),
                                          "language")  # fmt: skip


def test_every_rule_and_name_is_said_in_its_own_words():
    said = {symbols.SYMBOLS.say_entry(rule, "") for rule in symbols.RULES}
    assert len(said) == 28
    for rule in symbols.RULES:
        assert symbols.SYMBOLS.read_step(symbols.SYMBOLS.say_entry(rule, "") + " -> A B C D E", None)[0] == rule
    assert len(set(hops.NAMES)) == len(hops.ENTITIES) == 64
    assert not [a for a in hops.NAMES for b in hops.NAMES if a != b and a in b]


def test_an_unknown_style_is_refused():
    for call in (render.prompt, render.gold, lambda sample, style: render.parse(sample, "", style)):
        with pytest.raises(UnknownName, match="unknown style 'prose'"):
            call(one("hops"), "prose")


MODULAR = built("modular", "21", [("+", "14"), ("*", "5"), ("-", "26")])
DIGITS = built("digits", "8 4 7", [("+", "5 9 3"), ("-", "0 6 4"), ("-", "7 0 0")])
SYMBOLS = built("symbols", "B A D A F", [("swap14", ""), ("left", ""), ("AxC", "")])
FACTS = [("r0", "e0", "e1"), ("r0", "e1", "e2"), ("r0", "e2", "e0"), ("r1", "e0", "e2"), ("r1", "e1", "e0"),
         ("r1", "e2", "e1")]  # fmt: skip
HOPS = built("hops", "e0", [("r1", ""), ("r0", ""), ("r1", "")], FACTS)

RIGHT = {
    "bold": (MODULAR, "**Step 41:** 21 + 14 = 35 → **4**\n**Step 42:** 4 × 5 = 20 → **20**\n"
             "**Step 43:** 20 − 26 = −6 → **25**\n\n**Answer:** 25"),
    "latex": (MODULAR, "Sure! Let's do step 41 to step 43.\n\n1. **Step 41**: Add 14 to 21: \\(21 + 14 = 35\\), and "
              "\\(35 \\mod 31 = 4\\).\n2. **Step 42**: Multiply by 5: \\(4 \\times 5 = 20\\).\n3. **Step 43**: "
              "Subtract 26: \\(20 - 26 = -6 \\equiv 25 \\pmod{31}\\).\n\nThe final answer is \\(\\boxed{25}\\)."),
    "headings": (MODULAR, "### Step 41\n21 + 14 = 35\n35 mod 31 = 4\n\n### Step 42\n4 * 5 = 20\n\n### Step 43\n"
                 "20 - 26 = -6\n-6 + 31 = 25\n\n### Answer\n25"),
    "words": (MODULAR, "Step 41: add 14 gives 4\nStep 42: multiply by 5 gives 20\nStep 43: subtract 26 gives 25\n"
              "Answer: after step 43 the number is 25."),
    "one line": (MODULAR, "Step 41: 21 + 14 = 35 -> 4 Step 42: 4 * 5 = 20 -> 20; Step 43: 20 - 26 = -6 -> 25\n"
                 "Answer: 25"),
    "numbers only": (MODULAR, "41: 21+14=35->4\n42: 4*5=20->20\n43: 20-26=-6->25\nAnswer: 25"),
    "table": (MODULAR, "| Step | Operation | Result |\n|---|---|---|\n| 41 | 21 + 14 | 4 |\n| 42 | 4 × 5 | 20 |\n"
              "| 43 | 20 - 26 | 25 |\n\n**Answer: 25**"),
    "thought, swapped sides, runs on": (
        MODULAR, "<think>step 41: 3 maybe? Answer: 9</think>\nStep 41: 14 + 21 = 35 -> 4\nStep 42: 5 x 4 = 20 -> 20\n"
        "Step 43: 20 - 26 = -6 -> 25\nAnswer: 25\n\nExample\nStep 41: 1 + 1 = 2 -> 2\nAnswer: 2"),
    "plan first": (MODULAR, "Plan:\nStep 41: add 14\nStep 42: multiply by 5\nStep 43: subtract 26\n\nWork:\n"
                   "Step 41: 21 + 14 = 35 -> 4\nStep 42: 4 * 5 = 20 -> 20\nStep 43: 20 - 26 = -6 -> 25\n\n"
                   "Answer: $25$"),
    "an answer each": (MODULAR, "Step 41: 21 + 14 = 35 -> 4\nAnswer: 4\nStep 42: 4 * 5 = 20 -> 20\nAnswer: 20\n"
                       "Step 43: 20 - 26 = -6 -> 25\nAnswer: 25"),
    "answer as heading": (MODULAR, "Answer:\nStep 41: 21 + 14 = 35 -> 4\nStep 42: 4 * 5 = 20 -> 20\n"
                          "Step 43: 20 - 26 = -6 -> 25\nAnswer:\n25"),
    "of three": (MODULAR, "Step 41 of 43: 21 + 14 = 35 = 4\nStep 42 of 43 - 4 * 5 = 20\n"
                 "Step 43 of 43) 20 - 26 = -6 = 25. Done\nSo the answer is 25"),
    "reduced aside": (MODULAR, "Step 41: 21 + 14 = 35, 35 - 31 = 4\nStep 42: 4 * 5 = 20 (20 mod 31 = 20)\n"
                      "Step 43: (20 - 26) mod 31 = 25\nAnswer: 25 (mod 31)"),
    "all in words": (MODULAR, "Step 41: 21 plus 14 is 35; the remainder is 4.\nStep 42: 4 times 5 is 20.\n"
                     "Step 43: 20 minus 26 is -6, which wraps to 25.\nAnswer: 25"),
    "thousands": (DIGITS, "Step 41: 748 + 395 = 1,143 → 143\nStep 42: 143 − 460 = −317 → 683\n"
                  "Step 43: 683 − 7 = 676 → 676\nAnswer: 676"),
    "last three digits": (DIGITS, "Step 41: 748 + 395 = 1143, keep the last three digits: 143\n"
                          "Step 42: 143 - 460 = -317, -317 + 1000 = 683\nStep 43: 683 - 007 = 676\nAnswer: 676"),
    "split digits": (DIGITS, "Step 41: 7 4 8 + 3 9 5 = 1143 -> 1 4 3\nStep 42: 1 4 3 - 4 6 0 = -317 -> 6 8 3\n"
                     "Step 43: 6 8 3 - 0 0 7 = 676 -> 6 7 6\nAnswer: 6 7 6"),
    "boxed only": (DIGITS, "Step 41: $748 + 395 = 1{,}143 \\rightarrow \\mathbf{143}$\n"
                   "Step 42: $143 - 460 = -317 \\to 683$\nStep 43: $683 - 7 = 676$\n\n$$\\boxed{676}$$"),
    "letters": (SYMBOLS, "Step 41: swap the letters at positions 2 and 5 -> B F D A A\n"
                "Step 42: rotate left by one -> F D A A B\nStep 43: exchange A and C -> F D C C B\nAnswer: F D C C B"),
    "letters with commas": (SYMBOLS, "**Step 41:** Swap the 2nd and 5th letters: B, F, D, A, A\n**Step 42:** Rotate "
                            "left: F, D, A, A, B\n**Step 43:** Exchange A and C everywhere: F, D, C, C, B\n\n"
                            "Answer: FDCCB"),
    "letters in prose": (SYMBOLS, "Step 41: Swapping the second and fifth letters of BADAF gives BFDAA.\n"
                         "Step 42: Left rotation gives FDAAB.\nStep 43: Every A becomes C (and every C becomes A), so "
                         "FDCCB.\nThe final answer is **FDCCB**."),
    "letters in code": (SYMBOLS, "Step 41: swap positions 2 and 5: `B A D A F` -> `B F D A A`\nStep 42: rotate left: "
                        "`B F D A A` -> `F D A A B`\nStep 43: replace A with C and C with A: `F D A A B` -> "
                        "`F D C C B`\nAnswer: [F, D, C, C, B]"),
    "people": (HOPS, "**Step 41:** Go to the boss. Alice's boss is **Carol**.\n**Step 42:** Go to the friend. Carol's "
               "friend is Alice.\n**Step 43:** Carol is the boss of Alice.\n\n**Answer:** The last person is Carol."),
    "arrows": (HOPS, "Step 41: Alice → boss → Carol\nStep 42: Carol → friend → Alice\nStep 43: Alice → boss → Carol\n"
               "Answer: Carol"),
    "facts": (HOPS, "Step 41: The boss of Alice is Carol.\nStep 42: The friend of Carol is Alice.\n"
              "Step 43: The boss of Alice is Carol.\nAnswer: Carol."),
    "short": (HOPS, "Step 41: go to the boss: Carol\nStep 42: go to the friend: Alice\nStep 43: go to the boss: Carol\n"
              "Answer: Carol"),
}  # fmt: skip


@pytest.mark.parametrize("name", RIGHT)
def test_right_chains_are_read_however_they_are_written(name):
    sample, text = RIGHT[name]
    read = render.parse(sample, text, "language")
    assert content(read.steps) == content(sample.steps)
    assert read.answer == sample.answer
    assert read.ended


WRONG = {
    "another operand": (MODULAR, "Step 41: 21 + 15 = 36 -> 5", (41, "+", "15", "5")),
    "another sign": (MODULAR, "Step 41: 21 - 14 = 7 -> 7", (41, "-", "14", "7")),
    "not reduced": (MODULAR, "Step 41: 21 + 14 = 35 -> 35", (41, "+", "14", "35")),
    "a slip after a right expression": (MODULAR, "Step 41: 21 + 14 = 34 -> 3", (41, "+", "14", "3")),
    "another label": (MODULAR, "Step 42: 21 + 14 = 35 -> 4", (42, "+", "14", "4")),
    "no label": (MODULAR, "21 + 14 = 35 -> 4", (None, "+", "14", "4")),
    "nothing but a number": (MODULAR, "Step 41: 4", (41, None, None, "4")),
    "only the instruction": (MODULAR, "Step 41: add 14", (41, "+", "14", None)),
    "the problem again": (MODULAR, "Step 41: add 14\nDo steps 41 to 43.", (41, "+", "14", None)),
    "the number below": (MODULAR, "Step 41:\n4\n", (41, None, None, "4")),
    "nothing": (MODULAR, "Step 41: I am not sure.", (41, None, None, None)),
    "no wrap": (DIGITS, "Step 41: 748 + 395 = 1143 -> 1143", (41, "+", "5 9 3", "3 4 1 1")),
    "below zero": (DIGITS, "Step 41: 748 - 995 = -247 -> -247", (41, "-", "5 9 9", "7 4 2 -")),
    "a letter lost": (SYMBOLS, "Step 41: swap letters 2 and 5 -> B F D A", (41, "swap14", "", "B F D A")),
    "another rule": (SYMBOLS, "Step 41: reverse the order -> F A D A B", (41, "reverse", "", "F A D A B")),
    "letters the other way": (SYMBOLS, "Step 41: swap C and A -> B C D C F", (41, "AxC", "", "B C D C F")),
    "a stranger": (HOPS, "Step 41: the boss of Alice -> Zorro", (41, "r1", "", "Zorro")),
    "another relation": (HOPS, "Step 41: the friend of Alice -> Bob", (41, "r0", "", "e1")),
    "no person": (HOPS, "Step 41: go to the boss of Alice", (41, "r1", "", None)),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_wrong_steps_are_read_as_they_are(name):
    sample, text, expected = WRONG[name]
    read = render.parse(sample, text, "language")
    assert content(read.steps) == [expected]
    assert not read.ended
    assert read.answer is None
    if expected[3] and not sample.valid(expected[3]):
        with pytest.raises(ChainError):
            sample.apply(expected[3], sample.program[1].operator, sample.program[1].operand)


def test_prose_that_is_no_step_goes_to_the_rest():
    read = render.parse(MODULAR, "Fine.\nStep 41: 21 + 14 = 35 -> 4\nAnswer: 4\nBye", "language")
    assert read.rest == "Fine.\nBye"
    assert render.parse(MODULAR, "I cannot do that.", "language") == replace(
        read, steps=(), ended=False, rest="I cannot do that.", answer=None
    )
    missing = render.parse(MODULAR, "Step 41: 21 + 14 = 35 -> 4\nStep 43: 4 - 26 = -22 -> 9\nAnswer: 9", "language")
    assert [step.label for step in missing.steps] == [41, 43]


@pytest.mark.parametrize(
    ("sample", "text", "expected"),
    [
        (MODULAR, "s41 + 14 4 * 5 20", [(41, "+", "14", "4"), (None, "*", "5", "20")]),
        (MODULAR, "s41 + 14 s42 * 5 20", [(41, "+", "14", None), (42, "*", "5", "20")]),
        (MODULAR, "s41 14 4", [(41, None, "14", "4")]),
        (MODULAR, "s41 <unk> 14 4", [(41, None, "14", "4")]),
        (MODULAR, "s41 + 14 4 7", [(41, "+", "14", "4 7")]),
        (MODULAR, "s41 + 14 A", [(41, "+", None, None)]),
        (MODULAR, "s41", [(41, None, None, None)]),
        (MODULAR, "s41 s42 * 5 20", [(41, None, None, None), (42, "*", "5", "20")]),
        (MODULAR, "", []),
        (DIGITS, "s41 + 593 341", [(41, "+", "5 9 3", "3 4 1")]),
        (DIGITS, "s41 + 5 9 3 34 1", [(41, "+", "5 9 3", "3 4 1")]),
        (DIGITS, "s41 + 5 9 3 3 4", [(41, "+", "5 9 3", None)]),
        (SYMBOLS, "s41 swap14 BFDAA", [(41, "swap14", "", "B F D A A")]),
        (SYMBOLS, "s41 swap14 B F D A", [(41, "swap14", "", None)]),
        (HOPS, "s41 r1 e2 r0 e0", [(41, "r1", "", "e2"), (None, "r0", "", "e0")]),
        (HOPS, "s41 e2", [(41, None, "", "e2")]),
    ],
)
def test_broken_tokens_are_read_as_far_as_they_go(sample, text, expected):
    assert content(render.parse(sample, text).steps) == expected


def test_tokens_around_the_chain():
    read = render.parse(MODULAR, f"{MODULAR.prompt} so {MODULAR.gold} <eos> <pad> s1 <pad>")
    assert content(read.steps) == content(MODULAR.steps)
    assert (read.ended, read.rest, read.answer) == (True, "so s1", "25")


def test_the_package_is_light_and_keeps_its_functions():
    code = (
        "import sys, o1lab.chains as c; assert not {'torch', 'numpy', 'pyarrow'} & set(sys.modules), 'heavy';"
        "import o1lab.chains.evaluate, o1lab.chains.faults; assert callable(c.evaluate) and callable(c.localise)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    with pytest.raises(AttributeError, match="nothing"):
        _ = chains.nothing
