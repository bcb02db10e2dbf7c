"""Re-grounding and voting on a solver whose errors are known: what they cure, what they cannot, and what they cost."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace

import pytest

from o1lab import chains
from o1lab.decoding import recheck, reground, vote
from o1lab.errors import DecodingError, UnknownName
from o1lab.models.endpoint import Answer, Endpoint

OPERATORS = {"+": lambda a, b: (a + b) % 31, "-": lambda a, b: (a - b) % 31, "*": lambda a, b: a * b % 31}


@dataclass(frozen=True)
class Solver(Endpoint):
    """Works modular chains from the prompt's text.

    ``context`` errors hang on the prompt and the step, so that another context has others; ``fact`` errors on the sum
    alone. ``reach`` is the position from which on every step is wrong; ``silent`` ends each chain after one step.
    """

    context: float = 0.0
    fact: float = 0.0
    reach: int = 10**6
    silent: bool = False

    def named(self):
        return self

    @staticmethod
    def chance(*of) -> float:
        return int.from_bytes(hashlib.blake2b(repr(of).encode(), digest_size=4).digest()) / 2**32

    def stream(self, prompts, *, max_new_tokens, **_):
        for place, prompt in enumerate(prompts):
            words = prompt.split()
            first, last, state = int(words[3][1:]), int(words[5][1:]), int(words[7])
            body = words[words.index("program") + 1 : words.index("chain")]
            program = {int(a[1:]): (b, int(c)) for a, b, c in zip(body[::3], body[1::3], body[2::3], strict=True)}
            made: list[str] = []
            for label in range(first, last + 1):
                operator, operand = program[label]
                fact = (state, operator, operand)
                state = OPERATORS[operator](state, operand)
                late = len(words) + len(made) >= self.reach
                if late or self.chance(prompt, label) < self.context or self.chance(fact) < self.fact:
                    state = (state + 1 + int(self.chance(prompt, label, "by") * 29)) % 31
                made += [f"s{label}", operator, str(operand), str(state)]
                if self.silent:
                    break
            yield place, Answer(" ".join(made), "stop", tokens=len(made) + 1)


def solver(**errors):
    return Solver("http://127.0.0.1:9/v1", "solver", **errors)


@pytest.fixture(scope="module")
def samples():
    return chains.make("arithmetic", 64, 60, 5, variant="modular")


KNOWN = {"style": "tokens", "progress": False}


def test_a_faultless_solver_stays_faultless(samples):
    grounded, voted = reground(solver(), samples, every=20, **KNOWN), vote(solver(), samples[:8], every=16, **KNOWN)
    for found in (grounded, voted):
        assert found.report.accuracy.value == 1
        assert found.carried.value == 1
        assert found.report.first_fault == [None] * len(found.report.results)
    assert grounded.calls == 60 * 4
    assert voted.calls == 8 * 4 * 2


def test_regrounding_cures_what_hangs_on_position_and_nothing_else(samples):
    far = solver(reach=9 + 3 * 64 + 20 * 4)
    plain = chains.evaluate(far, samples, **KNOWN)
    assert plain.accuracy.value == 0
    assert set(plain.first_fault) == {21}
    assert reground(far, samples, every=16, **KNOWN).report.accuracy.value == 1
    noisy = solver(context=0.01)
    base = chains.evaluate(noisy, samples, **KNOWN).accuracy
    grounded = reground(noisy, samples, every=16, **KNOWN)
    assert grounded.report.accuracy.low < base.high
    assert base.low < grounded.report.accuracy.high


def test_regrounding_says_where_and_what_it_costs(samples):
    noisy = solver(context=0.01)
    grounded = reground(noisy, samples, every=16, **KNOWN)
    faults = [step for step in grounded.report.first_fault if step]
    assert max(faults) > 32
    assert min(faults) <= 32
    wrong = [result for result in grounded.report.results if result.fault]
    assert {result.fault.kind for result in wrong} <= {"arithmetic", "premise reuse"}
    assert grounded.report.survival().at(64).value == pytest.approx(grounded.report.accuracy.value)
    plain = chains.evaluate(noisy, samples, **KNOWN)
    base = plain.tokens + sum(len(sample.prompt.split()) for sample in samples)
    assert 1.0 < grounded.tokens / base < 1.1
    assert grounded.prompt_tokens == 60 * (64 * 3 + 4 * 10)


def test_carried_states_are_counted_as_the_judge_sees_them(samples):
    found = reground(solver(context=0.02), samples, every=8, **KNOWN)
    right = sum((step or 65) > end for step in found.report.first_fault for end in range(8, 64, 8))
    assert found.carried.n == 60 * 7
    assert found.carried.value == pytest.approx(right / (60 * 7))


def test_voting_cures_errors_of_the_context_and_not_those_of_the_fact(samples):
    noisy, ignorant = solver(context=0.02), solver(fact=0.02)
    before = chains.evaluate(noisy, samples, **KNOWN).accuracy
    assert before.high < 0.5
    cured = vote(noisy, samples, ahead=2, every=4, **KNOWN)
    assert cured.report.accuracy.value >= 0.9
    alone = vote(noisy, samples, ahead=1, every=4, **KNOWN)
    assert alone.report.accuracy.high < 0.5
    known = chains.evaluate(ignorant, samples, **KNOWN)
    again = vote(ignorant, samples, ahead=2, every=4, **KNOWN)
    assert list(again.report.outcomes) == list(known.outcomes)
    assert again.report.first_fault == known.first_fault


def test_votes_in_disguise_cure_errors_of_the_fact_too_and_not_those_of_every_fact(samples):
    ignorant = solver(fact=0.02)
    before = chains.evaluate(ignorant, samples, **KNOWN).accuracy
    assert before.high < 0.5
    cured = vote(ignorant, samples, ahead=2, every=4, disguised=True, **KNOWN)
    assert cured.report.accuracy.value >= 0.9
    alone = vote(ignorant, samples, ahead=1, every=4, disguised=True, **KNOWN)
    assert alone.report.accuracy.high < 0.5
    assert vote(solver(fact=0.9), samples[:4], every=1, most=5, disguised=True, **KNOWN).report.accuracy.value == 0
    whole = vote(solver(), samples[:3], every=64, disguised=True, **KNOWN).report
    assert whole.accuracy.value == 1  # states come back as they were


def test_asking_again_names_the_first_wrong_step(samples):
    for errors in ({"context": 0.01}, {"fact": 0.01}):
        report = chains.evaluate(solver(**errors), samples, **KNOWN)
        first = report.first_fault
        assert 10 < sum(fault is not None for fault in first) < 50
        found = recheck(solver(**errors), report.results, **KNOWN)
        shares = found.against(first)
        assert shares["exact"].value >= 0.9
        assert shares["alarms"].value <= 0.15
        assert shares["judged"].value >= 0.9
        assert shares["auroc"].value >= 0.95
        steps = sum(len(one.sample.steps) for one in report.results)
        assert 2 * steps <= found.calls < 2 * 1.1 * steps + 3 * 64 * 60 * 0.1
        assert found.new_tokens == 5 * found.calls
    nothing = recheck(solver(), chains.evaluate(solver(), samples[:5], **KNOWN).results, **KNOWN)
    assert nothing.said == (None,) * 5
    assert set(nothing.against([None] * 5)) == {"judged", "alarms"}


def test_asking_again_reads_what_the_program_says_without_asking(samples):
    gold = chains.evaluate(solver(), samples[:1], **KNOWN).results[0]
    words = gold.text.split()
    cases = {
        3: [*words[:8], "s0", *words[9:]],  # another label
        5: [*words[:17], "-" if words[17] != "-" else "+", *words[18:]],  # another operator
        2: [*words[:7], "<eos>", *words[8:]],  # no state
        64: words[:-4],  # a step too few
    }
    results = [replace(gold, text=" ".join(text)) for text in cases.values()]
    found = recheck(solver(), results, **KNOWN)
    assert found.said == tuple(cases)
    assert found.doubt[3].size == 63
    with pytest.raises(DecodingError, match="times=2"):
        recheck(solver(), results, times=2)
    assert recheck(solver(), results, times=1, **KNOWN).said == tuple(cases)
    for wrong in (0, 6, True, "1"):
        with pytest.raises(DecodingError, match=f"first={wrong!r}"):
            recheck(solver(), results, first=wrong)
    with pytest.raises(DecodingError, match="3 first faults for 4 chains"):
        found.against([None] * 3)
    with pytest.raises(DecodingError, match="no steps to ask"):
        recheck(solver(), [replace(gold, sample=object())])


def test_asking_twice_finds_what_comes_again_once(samples):
    faulty = chains.evaluate(solver(fact=0.03), samples, **KNOWN)
    missed = []
    for first in (1, 2):
        again = recheck(solver(fact=0.03, context=0.05), faulty.results, first=first, **KNOWN)
        missed.append(1 - again.against(faulty.first_fault)["exact"].value)
    assert missed[1] <= missed[0]


def test_a_tie_ends_with_the_most_frequent_state(samples):
    found = vote(solver(context=0.9), samples[:4], ahead=5, every=1, most=5, **KNOWN)
    assert found.calls <= 4 * 64 * 5
    assert found.report.accuracy.value == 0


def test_a_chain_that_breaks_off_is_not_carried_on(samples):
    for found in (
        reground(solver(silent=True), samples[:5], every=4, **KNOWN),
        vote(solver(silent=True), samples[:5], every=4, most=3, **KNOWN),
    ):
        assert found.carried is None
        assert found.report.fault_kinds == {"stopped early": 5}
        assert found.report.first_fault == [2] * 5


@pytest.mark.parametrize("bad", [0, -1, True, 1.5, "4"])
def test_bad_numbers_are_named(samples, bad):
    with pytest.raises(DecodingError, match=f"every={bad!r}"):
        reground(solver(), samples, every=bad)
    with pytest.raises(DecodingError, match=f"ahead={bad!r}"):
        vote(solver(), samples, ahead=bad)


def test_what_cannot_be_cut_or_won_is_refused(samples):
    with pytest.raises(DecodingError, match="no steps to cut"):
        reground(solver(), [object()])
    with pytest.raises(DecodingError, match="most=2 votes can never lead by ahead=3"):
        vote(solver(), samples, ahead=3, most=2)
    with pytest.raises(UnknownName, match="unknown order"):
        vote(solver(), samples[:1], order="sideways", **KNOWN)
