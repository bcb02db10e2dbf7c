"""The ledger: every row present, every rule decided on each side of each bound, every unusable file refused."""

from __future__ import annotations

import json
import math
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from o1lab import claims, claims_view
from o1lab.__main__ import main
from o1lab.errors import ClaimsError, EstimateError, UnknownName
from o1lab.registry import METRICS, NEEDS
from o1lab.rules import BOUNDS, Rule, Side, parse_side
from o1lab.stats import Estimate

LEDGER = claims.load()
# every row of the list of claims: section, and its figures letter for letter
ROWS = {
    "leak-rate": ("A", ["17.3 %/h → 0.8 %/h (−95.4 %)", "peak 11.8 → 9.8 GB"]),
    "leak-cause": ("A", ["`torch._dynamo.config.cache_size_limit = 32`", "`suppress_errors = True`"]),
    "leak-sampling": ("A", ["`nvidia-smi --query-compute-apps=pid,used_memory`"]),
    "cot-decay": ("A", ["128 steps: 82.6 % → 47.9 %", "repaired 82.1 % (+34.2 pp)"]),
    "cot-cause": ("A", ["onset at 96 steps", "`softmax(logits, dtype=float32)`", "`dropout_p=0.0`", "every 32 steps"]),
    "kv-jitter": ("A", ["±312 ms", "P99 1247 → 683 ms (−45.2 %)"]),
    "graph-lifetime": ("B", ["pair each `cudaMallocAsync` with its `cudaFreeAsync` across graph boundaries"]),
    "dynamic-extension": (
        "B",
        ["0.85", "0.12", "`decay = (w[-3] − w[-1]) / w[-3]`", "Llama-3-8B: decay 0.092, 4.3 extensions/sample, 1.78×"]
        + ["Qwen2-7B: 0.136, 6.1, 1.42×", "thresholds by grid search"],
    ),
    "extension-stability": ("B", ["beyond 128 cached tokens", "12.7 %"]),
    "page-table": (
        "B",
        ["steps 1 / 512 / 1024: active PTEs 2 147 / 38 612 / 74 905", "page-table L2 hit rate 99.8 / 73.2 / 41.6 %"]
        + ['an allocation-failure signature that means "PTE pool exhausted"'],
    ),
    "beam-sync": (
        "B",
        ["per step: K/V pointer remap 3.8 µs", "top-k gather + reorder 62 % of sync time", "step 16: 33.4 / 128.9 µs"]
        + ["step 1: 12.1 (beam 4) / 5.7 (beam 16) µs", "L2 line invalidation +47 % at beam 16"],
    ),
    "mixed-residual": (
        "B",
        ["argmax stability (LCB) −12.7 % or worse", "norm drift 3.8×", "error 4.27 % vs < 0.001 %"]
        + ["residual scale 0.92 ± 0.03"],
    ),
    "ltc-bench": ("C", ["Principles: controllable, decomposable, traceable"]),
    "fault-localisation": (
        "C",
        ["0.92, 0.87, 0.41, 0.33, 0.29 breaks at step 3 (Δ −0.46)", "a step below 0.5 is a break", "overflow 29 %"]
        + ["misused premise 38 % (an earlier conclusion reused wrongly)"],
    ),
    "leak-profiling": ("C", ["17.3 %"]),
    "serving-soak": (
        "C",
        ["`--max-num-seqs 256`", "`--gpu-memory-utilization 0.92`", "Llama-3.1-70B", "success ≥ 99.997 % over 12 h"]
        + ["GPU memory within ±3 %", "P99 time-to-first-token ≤ 85 ms", "a 3× burst (P99 210 → 91 ms)"]
        + ["2k-token prompts at 64 req/s (12.7 % OOM → 0)"],
    ),
    "kv-pool": (
        "D",
        ["64 MB chunks", "bitmap at 256 KB", "10 K concurrent KV inserts: 237 ms (native malloc) vs 42 ms"]
        + ["24 h memory swing ±18 % vs ±1.2 %"],
    ),
    "lazy-eviction": ("D", ["≥ 95 %", "LRU + TTL", "asynchronous GPU→CPU write-back with verification"]),
    "position-bias": (
        "D",
        ["`−α · log(|i−j|+1) · w[step(j)]`", "α = 0.3", "w = 0.8 before the chain starts, 1.2 inside it"],
    ),
    "stop-calibration": ("D", ["72.4 % → 85.9 %", "a sliding window over the last 3 tokens"]),
    "fused-attention": ("D", ["−42 % HBM traffic", "≥ 2 warps fit per SM"]),
    "observability": ("D", ["P95 128 vs 217 ms", "errors 0.03 % vs 1.82 %"]),
    "trace-regression": ("D", ["47 → 6 min to locate a fault"]),
}
# the rows whose rule was agreed before anything was measured: metric's unit, needs, supported, refuted, notebook
FIXED = {
    "leak-rate": ("B/request", {"cuda"}, {"low_at_least": 64}, {"high_below": 64}, "01_memory_leak"),
    "leak-rate/host": ("B/request", {"glibc"}, {"low_at_least": 64}, {"high_below": 64}, "01_memory_leak"),
    "leak-rate/patch": ("%", {"glibc"}, {"low_at_least": 50}, {"high_below": 50}, "01_memory_leak"),
    "leak-rate/cure": ("B/request", {"glibc"}, {"high_below": 64}, {"low_at_least": 64}, "01_memory_leak"),
    "leak-cause": ("B/graph", {"cuda", "compiler"}, {"low_at_least": 512}, {"high_below": 512}, "01_memory_leak"),
    "leak-cause/host": (
        "B/graph",
        {"glibc", "compiler"},
        {"low_at_least": 4096},
        {"high_below": 4096},
        "01_memory_leak",
    ),
    "leak-cause/default-limit": ("graphs", {"cpu"}, {"within": [256, 256]}, {"outside": [256, 256]}, "00_start_here"),
    "leak-sampling": ("1", {"cuda", "nvml-process"}, {"low_at_least": 0.8}, {"high_below": 0.8}, "01_memory_leak"),
    "leak-sampling/host": ("1", {"glibc"}, {"low_at_least": 0.8}, {"high_below": 0.8}, "01_memory_leak"),
    "leak-sampling/probe": ("1", {"glibc"}, {"low_at_least": 0.8}, {"high_below": 0.8}, "01_memory_leak"),
    "leak-sampling/false-alarms": ("1", {"glibc"}, {"high_at_most": 0.2}, {"low_above": 0.2}, "01_memory_leak"),
    "template": ("B/request", {"cpu"}, {"high_below": 64}, {"low_at_least": 64}, "_template"),
}
# rows for which the article offers a remedy, or is one
REMEDIES = {
    *("leak-rate", "cot-decay", "cot-cause", "kv-jitter", "graph-lifetime", "serving-soak", "fault-localisation"),
    *("leak-profiling", "kv-pool", "lazy-eviction", "position-bias", "stop-calibration", "fused-attention"),
    *("observability", "trace-regression"),
}


def family(name: str) -> list[claims.Claim]:
    return [claim for claim in LEDGER.values() if name in (claim.id, claim.parent)]


def estimate(claim: claims.Claim, low: float, high: float) -> Estimate:
    return Estimate(low if low == high else (low + high) / 2, low, high, 100, claim.unit)


# ------------------------------------------------------------------------------------------ the rows


def test_the_ledger_holds_every_row_and_no_other() -> None:
    parents = [claim for claim in LEDGER.values() if claim.parent is None and claim.group != "Z"]
    assert [claim.id for claim in parents] == list(ROWS)
    assert {claim.id: claim.group for claim in parents} == {name: group for name, (group, _) in ROWS.items()}
    assert [claim.id for claim in LEDGER.values() if claim.group == "Z"] == ["template"]


@pytest.mark.parametrize("name", ROWS)
def test_the_articles_figures_stand_letter_for_letter(name: str) -> None:
    figures = [figure for claim in family(name) for figure in claim.figures]
    assert not [text for text in ROWS[name][1] if text not in figures]


@pytest.mark.parametrize("name", FIXED)
def test_agreed_rules_are_as_agreed(name: str) -> None:
    unit, needs, supported, refuted, notebook = FIXED[name]
    claim = LEDGER[name]
    assert (claim.unit, set(claim.needs), claim.notebook) == (unit, needs, notebook)
    assert (claim.rule.supported.to_dict(), claim.rule.refuted.to_dict()) == (supported, refuted)


@pytest.mark.parametrize("name", sorted(REMEDIES))
def test_a_remedy_stands_as_written_beside_one_of_ours(name: str) -> None:
    assert {"remedy as written", "our remedy"} <= {claim.role for claim in family(name)}


@pytest.mark.parametrize("claim", LEDGER.values(), ids=lambda claim: claim.id)
def test_a_row_is_whole(claim: claims.Claim) -> None:
    assert claim.role in claims.ROLES
    assert claim.unit in METRICS[claim.metric].units
    assert set(claim.needs) <= set(NEEDS)
    assert not claim.title.endswith(".")
    assert len(claim.title) <= 90
    assert claim.why.endswith(".")
    assert len(claim.why) > 25
    assert (claim.parent is None) == ("/" not in claim.id)
    if claim.parent:
        assert (claim.group, claim.section) == (LEDGER[claim.parent].group, LEDGER[claim.parent].section)
    if claim.role in ("claim", "remedy as written"):
        assert len(claim.article) > 20


def test_every_metric_is_used() -> None:
    assert {claim.metric for claim in LEDGER.values()} == set(METRICS)


# ------------------------------------------------------------------------------------------ the rules


def sides_of(claim: claims.Claim) -> list[tuple[str, str, float | list[float]]]:
    return [
        (outcome, key, bound)
        for outcome in ("supported", "refuted")
        for key, bound in getattr(claim.rule, outcome).to_dict().items()
    ]


def cases(claim: claims.Claim) -> list[tuple[float, float, str]]:
    """Intervals exactly at, just inside and just outside every bound, with the outcome they must or must not have."""
    below, above = (lambda x: math.nextafter(x, -math.inf)), (lambda x: math.nextafter(x, math.inf))
    found = []
    for outcome, key, bound in sides_of(claim):
        if key == "low_at_least":
            found += [(bound, bound + 9, outcome), (bound, bound, outcome), (below(bound), bound + 9, f"not {outcome}")]
        elif key == "low_above":
            found += [(above(bound), bound + 9, outcome), (bound, bound + 9, f"not {outcome}")]
        elif key == "high_at_most":
            found += [(bound - 9, bound, outcome), (bound, bound, outcome), (bound - 9, above(bound), f"not {outcome}")]
        elif key == "high_below":
            found += [(bound - 9, below(bound), outcome), (bound - 9, bound, f"not {outcome}")]
        elif key == "within":
            a, b = bound
            found += [(a, b, outcome), (a, a, outcome), (b, b, outcome)]
            found += [
                (below(a), b, f"not {outcome}"),
                (a, above(b), f"not {outcome}"),
                (below(a), above(b), f"not {outcome}"),
            ]
        else:
            a, b = bound
            found += [(a - 9, below(a), outcome), (above(b), b + 9, outcome)]
            found += [(a - 9, a, f"not {outcome}"), (b, b + 9, f"not {outcome}"), (a - 9, b + 9, f"not {outcome}")]
    return found


@pytest.mark.parametrize("claim", LEDGER.values(), ids=lambda claim: claim.id)
def test_each_side_of_each_bound_of_each_row(claim: claims.Claim) -> None:
    found = cases(claim)
    assert {want for *_, want in found} >= {"supported", "refuted", "not supported", "not refuted"}
    for low, high, want in found:
        got = claims.decide(claim, estimate(claim, low, high), set(NEEDS)).outcome
        assert got != want.removeprefix("not ") if want.startswith("not ") else got == want, (low, high, want, got)


@pytest.mark.parametrize("claim", LEDGER.values(), ids=lambda claim: claim.id)
def test_an_interval_across_everything_is_inconclusive(claim: claims.Claim) -> None:
    verdict = claims.decide(claim, estimate(claim, -1e6, 1e6), set(NEEDS))
    assert verdict.outcome == "inconclusive"
    assert "the interval is neither wholly" in verdict.reason


numbers = st.floats(allow_nan=False, allow_infinity=False, width=32)


@given(claim=st.sampled_from(list(LEDGER.values())), ends=st.tuples(numbers, numbers), snap=st.integers(0, 9))
def test_no_interval_is_both_supported_and_refuted(claim: claims.Claim, ends: tuple[float, float], snap: int) -> None:
    bounds = claim.rule.numbers()
    if snap < len(bounds):  # a random interval seldom touches a bound: put one end on it
        ends = (bounds[snap], ends[1])
    low, high = min(ends), max(ends)
    assert not (claim.rule.supported.holds(low, high) and claim.rule.refuted.holds(low, high))


bound_values = st.sampled_from([-1.0, 0.0, 1.0, 2.0])
random_sides = st.dictionaries(
    st.sampled_from([*BOUNDS, "within", "outside"]),
    st.tuples(bound_values, bound_values).map(lambda pair: (min(pair), max(pair))),
    min_size=1,
    max_size=3,
).map(lambda table: Side({key: pair if key in ("within", "outside") else pair[0] for key, pair in table.items()}))
GRID = [-2.0, -1.0, -0.5, 0.0, 0.5, 1.0, 1.5, 2.0, 3.0]
GRID_INTERVALS = [(low, high) for low in GRID for high in GRID if low <= high]


def plainly(side: Side, low: float, high: float) -> bool:
    """The conditions spelled out once more, without boxes."""
    tests = {
        "low_above": lambda b: low > b,
        "low_at_least": lambda b: low >= b,
        "high_below": lambda b: high < b,
        "high_at_most": lambda b: high <= b,
        "within": lambda b: b[0] <= low and high <= b[1],
        "outside": lambda b: high < b[0] or low > b[1],
    }
    return all(tests[key](bound) for key, bound in side.conditions.items())


@given(one=random_sides, two=random_sides)
def test_feasibility_is_exact(one: Side, two: Side) -> None:
    """With bounds on a grid and intervals on a finer one, a search finds an interval if and only if there is one."""
    assert bool(one.boxes()) == any(plainly(one, *interval) for interval in GRID_INTERVALS)
    both = any(plainly(one, *interval) and plainly(two, *interval) for interval in GRID_INTERVALS)
    assert Rule(one, two).overlaps() == both
    for interval in GRID_INTERVALS:
        assert one.holds(*interval) == plainly(one, *interval)


# ------------------------------------------------------------------------------------------ decide


def test_reasons_are_sentences_with_value_interval_and_bound() -> None:
    host = LEDGER["leak-rate/host"]

    def reason(value: float, low: float, high: float) -> str:
        return claims.decide(host, Estimate(value, low, high, 12, "B/request"), {"glibc"}).reason

    assert reason(96, 64, 120) == "96 [64, 120] B/request: the whole interval is at or above 64"
    assert (
        reason(96.123456, 70.123456, 1e7) == "96.12 [70.12, 10,000,000] B/request: the whole interval is at or above 64"
    )
    assert reason(3, -1, 5) == "3 [-1, 5] B/request: the whole interval is below 64"
    assert (
        reason(96, 50, 120)
        == "96 [50, 120] B/request: the interval is neither wholly at or above 64 nor wholly below 64"
    )
    assert reason(63.999999, 1, 63.999999) == "63.999999 [1, 63.999999] B/request: the whole interval is below 64"
    limit = claims.decide(LEDGER["leak-cause/default-limit"], Estimate(8, 8, 8, 1, "graphs"), {"cpu"})
    assert (limit.outcome, limit.reason) == ("refuted", "8 [8, 8] graphs: the whole interval is away from 256")
    share = claims.decide(LEDGER["leak-sampling/host"], Estimate(0.2, 0.1, 0.3, 10, "1"), {"glibc"})
    assert share.reason == "0.2 [0.1, 0.3]: the whole interval is below 0.8"


def test_missing_needs_come_before_any_estimate() -> None:
    claim = LEDGER["leak-cause"]
    measured = Estimate(1, 1, 1, 1, claim.unit)
    for given_estimate in (None, measured):
        verdict = claims.decide(claim, given_estimate, {"cpu", "compiler"})
        assert (verdict.outcome, verdict.needs) == ("not evaluated", ("cuda",))
        assert verdict.reason == "needs an NVIDIA GPU that torch can use"
    nothing = claims.decide(claim, None, set())
    assert nothing.reason == "needs an NVIDIA GPU that torch can use and a C++ compiler that torch.compile can call"
    assert claims.missing(claim, {"cuda", "compiler"}) == ()


def test_nothing_measured_is_not_evaluated() -> None:
    verdict = claims.decide(LEDGER["template"], None, {"cpu"})
    assert (verdict.outcome, verdict.reason, verdict.needs) == ("not evaluated", "not measured in this run", ())


def test_a_unit_that_does_not_fit_is_refused() -> None:
    with pytest.raises(EstimateError, match="decided in 'B/request', the estimate is in 'KiB/request'"):
        claims.decide(LEDGER["template"], Estimate(1, 1, 1, 1, "KiB/request"), {"cpu"})


def test_a_verdict_has_one_of_four_outcomes() -> None:
    with pytest.raises(ClaimsError, match="'passed' is none of supported"):
        claims.Verdict("leak-rate", "passed", "because")


def test_rule_words() -> None:
    assert claims.rule_words(LEDGER["cot-cause"]) == (
        "supported if the whole 95 % interval is below -1 pp; refuted if it is within [-1, 1] pp; else inconclusive"
    )


# ------------------------------------------------------------------------------------------ lookups


def test_lookups(tmp_path, monkeypatch) -> None:
    assert [claim.id for claim in claims.for_notebook("00_start_here")] == ["leak-cause/default-limit"]
    assert [claim.id for claim in claims.for_notebook("_template")] == ["template"]
    assert claims.for_notebook("15_claims_ledger") == ()
    assert LEDGER.get("leek-rate") is None
    assert "leek-rate" not in LEDGER
    with pytest.raises(UnknownName, match="unknown claim 'leek-rate'; did you mean leak-rate"):
        LEDGER["leek-rate"]
    monkeypatch.setenv("O1LAB_NOTEBOOKS", str(tmp_path))
    claim = LEDGER["kv-pool"]
    assert not claim.notebook_exists()
    (tmp_path / "10_kv_pool.ipynb").write_text("{}")
    assert claim.notebook_exists()


def test_loading_needs_no_torch_and_no_hardware() -> None:
    code = "import sys; from o1lab import claims; claims.load(); print({'torch', 'o1lab.hardware'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


# ------------------------------------------------------------------------------------------ unusable files

GOOD = {
    "id": '"some-claim"',
    "role": '"claim"',
    "group": '"A"',
    "section": '"1"',
    "title": '"A title"',
    "article": '"What it says"',
    "figures": "[]",
    "metric": '"host_bytes_per_request"',
    "unit": '"B/request"',
    "needs": '["cpu"]',
    "supported": "{ low_at_least = 64 }",
    "refuted": "{ high_below = 64 }",
    "notebook": '"01_memory_leak"',
    "why": '"Because."',
}


def row(**changes: str | None) -> str:
    """One table; ``None`` leaves a key out."""
    fields = {key: value for key, value in (GOOD | changes).items() if value is not None}
    return "[[claim]]\n" + "".join(f"{key} = {value}\n" for key, value in fields.items())


def sub_row(name: str, **changes: str | None) -> str:
    return row(id=f'"{name}"', group=None, section=None, **changes)


def test_the_planted_files_start_from_a_good_one(tmp_path) -> None:
    file = tmp_path / "good.toml"
    file.write_text(row() + sub_row("some-claim/part", role='"our measure"', article=None, figures=None), "utf-8")
    loaded = claims.load(file)
    assert list(loaded) == ["some-claim", "some-claim/part"]
    assert loaded["some-claim/part"].parent == "some-claim"
    assert loaded["some-claim/part"].group == "A"


BAD = {
    "unknown key": (row(metrik='"x"'), "'some-claim', key 'metrik': unknown key; remove it, or use one of"),
    "unknown metric": (
        row(metric='"host_bytes"'),
        "key 'metric': unknown metric 'host_bytes'; use one of host_bytes_per",
    ),
    "unit of another metric": (row(unit='"%"'), "key 'unit': '%' is no unit of host_bytes_per_request; use B/request"),
    "unknown need": (row(needs='["cudaa"]'), "key 'needs': unknown need 'cudaa'; use some of cuda"),
    "no needs": (row(needs="[]"), "key 'needs': is missing or empty; write [\"cpu\"]"),
    "needs no list": (row(needs='"cpu"'), "key 'needs': 'cpu' is no list of texts"),
    "unknown role": (row(role='"fix"'), "key 'role': unknown role 'fix'; use one of"),
    "unknown group": (row(group='"E"'), "key 'group': unknown group 'E'"),
    "duplicate id": (row() + row(), "key 'id': is given twice; rename or remove"),
    "sub-row without parent": (sub_row("other/part"), "'other/part', key 'id': its parent 'other' is not above it"),
    "sub-row before parent": (sub_row("some-claim/part") + row(), "its parent 'some-claim' is not above it"),
    "sub-row with a group": (row() + row(id='"some-claim/part"'), "key 'group': a sub-row takes it from its parent"),
    "malformed id": (row(id='"Some claim"'), "key 'id': 'Some claim' is no id"),
    "id no text": (row(id="3"), "key 'id': 3 is no id"),
    "no id": (row(id=None), "claim number 1, key 'id': None is no id"),
    "notebook malformed": (
        row(notebook='"memory leak.ipynb"'),
        "key 'notebook': 'memory leak.ipynb' is malformed; write",
    ),
    "no title": (row(title=None), "key 'title': is missing; write it as a text"),
    "empty why": (row(why='" "'), "key 'why': ' ' is no text"),
    "no article": (row(article=None), "key 'article': is missing"),
    "article no text": (
        row() + sub_row("some-claim/x", role='"our measure"', article="3"),
        "key 'article': 3 is no text",
    ),
    "figures no texts": (row(figures="[17.3]"), "key 'figures': [17.3] is no list of texts"),
    "article_value NaN": (row(article_value="nan"), "key 'article_value': nan is no finite number"),
    "no rule": (row(supported=None), "key 'supported': has no condition; give at least one of low_above"),
    "empty side": (row(refuted="{}"), "key 'refuted': has no condition"),
    "code for a rule": (row(supported='"low >= 64"'), "key 'supported': has no condition"),
    "unknown condition": (row(supported="{ low = 64 }"), "key 'supported': unknown condition 'low'; use low_above"),
    "NaN bound": (row(supported="{ low_above = nan }"), "low_above = nan is not a finite number; correct the bound"),
    "infinite bound": (row(refuted="{ high_below = inf }"), "key 'refuted': high_below = inf is not a finite number"),
    "over-long bound": (row(refuted="{ high_below = 1" + "0" * 400 + " }"), "is not a finite number"),
    "bool bound": (row(supported="{ low_above = true }"), "low_above = True is not a finite number"),
    "text bound": (row(supported='{ low_above = "64" }'), "low_above = '64' is not a finite number"),
    "range of one": (row(supported="{ within = [1] }"), "within = [1] is not a list of two finite numbers"),
    "range reversed": (row(supported="{ within = [2, 1] }"), "within = [2, 1] has its ends the wrong way round; write"),
    "NaN in a range": (row(refuted="{ outside = [nan, 1] }"), "outside = [nan, 1] is not a list of two finite"),
    "both sides at a point": (
        row(refuted="{ high_at_most = 64 }"),
        "key 'refuted': some interval is both supported and refuted; make the two sides exclude each other",
    ),
    "both sides in a range": (
        row(supported="{ within = [-1, 1] }", refuted="{ high_below = 0 }"),
        "some interval is both supported and refuted",
    ),
    "both sides by an outside": (
        row(supported="{ outside = [0, 1] }", refuted="{ low_above = 5 }"),
        "some interval is both supported and refuted",
    ),
    "low and high overlap": (
        row(supported="{ low_above = 1 }", refuted="{ high_below = 2 }"),
        "some interval is both supported and refuted",
    ),
    "side that nothing meets": (
        row(supported="{ low_above = 5, high_below = 5 }"),
        "key 'supported': no interval can satisfy it; widen it",
    ),
    "range and bound apart": (
        row(supported="{ within = [0, 1], low_above = 1 }"),
        "key 'supported': no interval can satisfy it",
    ),
    "no claim at all": ("", "may hold [[claim]] tables only; found no [[claim]] table"),
    "stray table": (row() + "[extra]\nx = 1\n", "may hold [[claim]] tables only; found extra"),
    "claim is one table": ("[claim]\nid = 1\n", "may hold [[claim]] tables only"),
    "claim is a list of texts": ('claim = ["x"]\n', "claim number 1, key 'claim': is no table; write it as [[claim]]"),
    "malformed line": (row() + "oops\n", "is no valid TOML: Expected '=' after a key in a key/value pair (at line 16"),
    "cut short": (row() + 'x = "abc', "line 16"),
}


@pytest.mark.parametrize("name", BAD)
def test_unusable_files_are_refused(name: str, tmp_path) -> None:
    text, message = BAD[name]
    file = tmp_path / "bad.toml"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(ClaimsError) as caught:
        claims.load(file)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_that_cannot_be_read_is_refused(tmp_path) -> None:
    with pytest.raises(ClaimsError, match=r"none.toml cannot be read \(No such file or directory\); restore it"):
        claims.load(tmp_path / "none.toml")
    (tmp_path / "latin.toml").write_bytes(b'title = "\xe9"')
    with pytest.raises(ClaimsError, match="is not UTF-8 at byte 9; save it as UTF-8"):
        claims.load(tmp_path / "latin.toml")


def test_rules_that_only_touch_are_accepted() -> None:
    def fine(table: dict) -> Side:
        return parse_side(table, lambda problem, way: ClaimsError(f"{problem}; {way}"))

    assert not Rule(fine({"low_at_least": 64}), fine({"high_below": 64})).overlaps()
    assert not Rule(fine({"within": [-1, 1]}), fine({"outside": [-1, 1]})).overlaps()
    assert not Rule(fine({"high_below": -1}), fine({"within": [-1, 1]})).overlaps()
    assert Rule(fine({"high_at_most": -1}), fine({"within": [-1, 1]})).overlaps()
    assert fine({"outside": [0, 1], "low_at_least": 0.5}).holds(1.5, 2)  # one of the two branches is left


# ------------------------------------------------------------------------------------------ the command line


def printed(capsys, monkeypatch, *arguments: str, columns: int = 100) -> str:
    monkeypatch.setenv("COLUMNS", str(columns))
    assert main(["claims", *arguments]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("columns", [40, 80, 120, 159, 160, 200, 300])
def test_the_table_fits_the_terminal(columns: int, capsys, monkeypatch) -> None:
    out = printed(capsys, monkeypatch, columns=columns)
    assert max(map(len, out.splitlines())) <= columns
    for claim in LEDGER.values():
        shown = (
            claim.id if columns < claims_view.TABLE_FROM or not claim.parent else claim.id.replace(claim.parent, "· ")
        )
        assert claim.group == "Z" or any(line.startswith(shown) for line in out.splitlines()), claim.id
    assert "template" not in out
    for title in ("A · Headline bottlenecks", "B · Mechanisms", "C · Methods", "D · Remedies"):
        assert title in out
    assert f"{len(LEDGER) - 1} rows" in " ".join(out.split())


def test_the_wide_table_is_aligned_and_says_what_is_there(capsys, monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("O1LAB_NOTEBOOKS", str(tmp_path))
    (tmp_path / "01_memory_leak.ipynb").write_text("{}")
    lines = printed(capsys, monkeypatch, columns=200).splitlines()
    head = next(line for line in lines if line.startswith("claim"))
    leak = next(line for line in lines if line.startswith("leak-rate"))
    limit = next(line for line in lines if line.startswith("· /default-limit"))
    for word, cell in (
        ("metric", "device_bytes_per_request"),
        ("unit", "B/request"),
        ("needs", "cuda"),
        ("exists", "yes"),
    ):
        assert leak[head.index(word) :].startswith(cell)
    assert leak[head.index("supported") :].startswith("≥ 64")
    assert leak[head.index("refuted") :].startswith("< 64")
    assert limit[head.index("supported") :].startswith("= 256")
    assert limit[head.index("refuted") :].startswith("≠ 256")
    assert limit[head.index("exists") :] == "no"
    assert "17.3 %/h → 0.8 %/h (−95.4 %)" in leak


def test_one_row_in_full(capsys, monkeypatch) -> None:
    out = " ".join(printed(capsys, monkeypatch, "--id", "leak-cause", columns=80).split())
    claim = LEDGER["leak-cause"]
    for text in (claim.title, claim.article, claim.why, claims.rule_words(claim), METRICS[claim.metric].meaning):
        assert text in out
    assert all(NEEDS[need] in out for need in claim.needs)
    assert all(figure in out for figure in claim.figures)


def test_a_notebooks_rows(capsys, monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("O1LAB_NOTEBOOKS", str(tmp_path))
    (tmp_path / "20_mine.ipynb").write_text("{}")
    out = printed(capsys, monkeypatch, "--notebook", "09_page_table_pressure.ipynb")
    assert "page-table/signature" in out
    assert "page-table/fragmentation" not in out
    assert "0 rows" in printed(capsys, monkeypatch, "--notebook", "20_mine")
    assert main(["claims", "--notebook", "09_page_table"]) == 2
    assert "unknown notebook '09_page_table'; did you mean 09_page_table_pressure" in capsys.readouterr().err


def test_json(capsys, monkeypatch) -> None:
    rows = json.loads(printed(capsys, monkeypatch, "--json"))
    assert [entry["id"] for entry in rows] == [name for name in LEDGER if name != "template"]
    assert rows[0]["supported"] == {"low_at_least": 64.0}
    assert rows[0]["notebook_exists"] in (True, False)
    assert "missing" not in rows[0]


def test_capabilities_mark_what_this_machine_decides(capsys, monkeypatch) -> None:
    hardware = pytest.importorskip("o1lab.hardware")
    monkeypatch.setattr(hardware, "capabilities", lambda: {"cpu"})
    rows = {entry["id"]: entry for entry in json.loads(printed(capsys, monkeypatch, "--json", "--capabilities"))}
    assert rows["leak-cause"]["missing"] == ["cuda", "compiler"]
    assert rows["ltc-bench"]["missing"] == []
    narrow = " ".join(printed(capsys, monkeypatch, "--capabilities", columns=80).split())
    assert "cannot be decided: needs an NVIDIA GPU that torch can use" in narrow
    lines = printed(capsys, monkeypatch, "--capabilities", columns=200).splitlines()
    assert next(line for line in lines if line.startswith("leak-rate")).endswith("no")
    assert next(line for line in lines if line.startswith("ltc-bench")).endswith("yes")


def test_an_unknown_id_is_one_line_and_exit_code_2(capsys) -> None:
    assert main(["claims", "--id", "leak-smapling"]) == 2
    said = capsys.readouterr().err
    assert "unknown claim 'leak-smapling'; did you mean leak-sampling" in said
    assert said.count("\n") == 1


def test_a_terminal_without_unicode_gets_no_traceback() -> None:
    command = [sys.executable, "-m", "o1lab", "claims", "--id", "leak-rate"]
    done = subprocess.run(command, capture_output=True, env={"PYTHONIOENCODING": "ascii", "PATH": ""}, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"leak-rate" in done.stdout
