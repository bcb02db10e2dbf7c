"""Tables of first faults: shares by model, what a cosine can see, and three rules on planted faults."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import pandas as pd

from o1lab.chains import cosine, kinds
from o1lab.chains.cosine import BREAK, READINGS, Embedding, RuleComparison
from o1lab.chains.faults import localise
from o1lab.chains.plant import Planted
from o1lab.chains.render import parse
from o1lab.chains.report import ChainReport, Result
from o1lab.chains.samples import Sample
from o1lab.stats import proportion


def shares(reports: Mapping[str, ChainReport]) -> pd.DataFrame:
    """The article's two shares by model, and that of wrong fetches, as text with intervals.

    Overflows are counted in arithmetic with digits, where alone they can be written.
    """
    columns, rows = ["model", "premise misused", "overflow", "wrong fetch"], []
    for name, report in reports.items():
        broken = [one for one in report.results if one.fault]
        if not broken:
            continue
        some = [one.fault for one in broken]
        digits = [one.fault for one in broken if one.sample.variant == "digits"]
        fetched = proportion(sum("fetch" in fault.kind for fault in some), len(some))
        overflow = str(kinds.overflow_share(digits)) if digits else "–"
        rows.append((name, str(kinds.misused_share(some)), overflow, str(fetched)))
    return pd.DataFrame(rows, columns=columns)


def summary(reports: Mapping[str, ChainReport]) -> pd.DataFrame:
    """Chains, share of right ones and first faults by model."""
    rows = [(name, len(one.results), str(one.accuracy), str(one.fault_kinds)) for name, one in reports.items()]
    return pd.DataFrame(rows, columns=["model", "chains", "whole chain right", "first faults"])


def sight(samples: Sequence[Sample], broken: Sequence[Result]) -> pd.DataFrame:
    """How often a wrong state has a cosine below 0.5 to gold: predicted and measured, by family.

    The prediction takes another state of the same family in the place of the wrong one: the gold state of the same
    step of the next problem. The measurement is of the faulty steps of ``broken``, whatever is wrong with them.
    """
    rows = []
    for variant in dict.fromkeys(sample.variant for sample in samples):
        mine = [sample for sample in samples if sample.variant == variant]
        pairs = [
            (step.state, other.state)
            for one, two in zip(mine, mine[1:], strict=False)
            for step, other in zip(one.steps, two.steps, strict=False)
            if step.state != other.state
        ]
        below = [cosine.cosine(*map(cosine.one_hot_bag, pair)) < BREAK for pair in pairs]
        seen = [
            cosine.cosine_scores(one.sample, parse(one.sample, one.text))[one.fault.step - 1] < BREAK
            for one in broken
            if one.sample.variant == variant and one.fault and not one.fault.past_end
        ]
        predicted, measured = (float(np.mean(each)) if each else np.nan for each in (below, seen))
        ratio = measured / predicted if predicted else np.nan
        rows.append((variant, predicted, measured, len(seen), ratio))
    return pd.DataFrame(rows, columns=["family", "predicted", "measured", "faults", "ratio"])


def states(broken: Sequence[Result]) -> list[str]:
    """Every gold and every produced state of these chains, once."""
    said = (step.state for one in broken for step in parse(one.sample, one.text).steps)
    return sorted({step.state for one in broken for step in one.sample.steps} | {state for state in said if state})


def readings(
    broken: Sequence[Result], embeddings: Mapping[str, Callable[[str], Embedding]]
) -> dict[tuple[str, str], RuleComparison]:
    """The cosine rule on faulty chains, for each embedding of the states and each way to walk backwards."""
    parsed = [parse(one.sample, one.text) for one in broken]
    given = ([one.sample for one in broken], parsed)
    found = [one.fault for one in broken]
    return {
        (name, reading): cosine.compare_rules(*given, embed, reading=reading, faults=found)
        for name, embed in embeddings.items()
        for reading in READINGS
    }


def planted(chains: Sequence[Planted], reading: str = "run") -> pd.DataFrame:
    """Whether each rule names the planted step: ``replay``, ``cosine``, and ``states``, a replay of the states only."""
    rows = []
    for one in chains:
        read, fault = parse(one.sample, one.text), localise(one.sample, one.text)
        states = [step.state for step in read.steps] + [None] * len(one.sample.steps)
        wrong = next(
            (gold.index for gold, got in zip(one.sample.steps, states, strict=False) if got != gold.state), None
        )
        rule = cosine.cosine_rule(cosine.cosine_scores(one.sample, read), reading)
        said = (fault.step if fault else None, rule, wrong)
        rows.append((one.sample.variant, one.kind, one.step, *(step == one.step for step in said)))
    return pd.DataFrame(rows, columns=["family", "kind", "step", "replay", "cosine", "states"])
