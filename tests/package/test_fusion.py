"""What notebook 12 judges: errors, shares, what attention must do; and that its rules fail with the fix off."""

from __future__ import annotations

import json
import os

import pytest
import torch

from o1lab import claims, paths, plots
from o1lab.attention import fusion_view, judge
from o1lab.attention.bench import Row
from o1lab.attention.checks import AttentionError
from o1lab.attention.printed import fused_qk_softmax_v
from o1lab.attention.rivals import Case
from o1lab.attention.traffic import Workload
from o1lab.stats import Estimate

SMALL = {"batch": 2, "heads": (8, 2, 64)}
RECORDED = paths.PACKAGE.parent / "results/reference/2026-11-30-h200-kv/attention.json"


def outcome(claim: str, estimate: Estimate) -> str:
    return claims.decide(claims.load()[claim], estimate, {"cpu", "cuda"}).outcome


def recorded() -> dict[str, list[Row]]:
    """The rows of the recorded run in bfloat16, by shape."""
    tables: dict[str, list[Row]] = {}
    for row in json.loads(RECORDED.read_text("utf-8")):
        if row["dtype"] == "bfloat16":
            rate = row["rate"] and Estimate(**row["rate"])
            one = Row(row["name"], rate, Estimate(**row["copy"]), row["error"], row["note"])
            tables.setdefault(row["shape"], []).append(one)
    return tables


def named(name: str) -> list[Row]:
    return [row for rows in recorded().values() for row in rows if row.name == name]


def test_a_claim_about_all_is_judged_at_its_worst():
    good, bad = Estimate(99, 98, 100, 9, "%"), Estimate(90, 89, 91, 31, "%")
    assert judge.every([good, bad], min) == Estimate(90, 89, 91, 9, "%")
    assert outcome("fused-attention/bandwidth", judge.every([good, good], min)) == "supported"
    assert outcome("fused-attention/bandwidth", judge.every([good, bad], min)) == "refuted"


def test_share_and_slowdown_keep_both_intervals():
    copy = Estimate(100.0, 99.0, 101.0, 31, "B/s")
    slow, fast = (
        Row(name, Estimate(rate, rate - 1, rate + 1, 31, "B/s"), copy) for name, rate in (("s", 49), ("f", 50))
    )
    found = judge.share(fast)
    assert (found.value, found.low, found.high) == pytest.approx((50, 100 * 49 / 101, 100 * 51 / 99))
    cost = judge.slowdown(fast, slow)
    assert (cost.value, cost.low, cost.high) == pytest.approx((100 / 49, -2, 100 * (51 / 48 - 1)))
    lost = Row("lost", None, copy, note="not run: no such kernel")
    assert judge.share(lost) is None
    with pytest.raises(AttentionError, match="no such kernel"):
        judge.slowdown(fast, lost)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_bodies_pass_the_rule_of_errors_and_three_stages_do_not(dtype, bias):
    found = judge.errors(dtype, "cpu", 64, bias=bias, **SMALL)
    stages = found.pop("three stages", None)
    assert set(found) == {"float64, step by step", "gather + SDPA"}
    assert outcome("fused-attention/error", judge.every(found.values(), max)) == "supported"
    assert bias or outcome("fused-attention/error", stages) == "refuted"  # the fix switched off


def test_a_body_that_forgets_the_scale_fails(monkeypatch):
    real = judge.paged_decode
    monkeypatch.setattr(judge, "paged_decode", lambda *given, **options: real(*given, scale=0.1, **options))
    found = judge.errors(torch.bfloat16, "cpu", 64, **SMALL)
    assert outcome("fused-attention/error", found["gather + SDPA"]) == "refuted"


def test_the_norms_are_told_apart():
    both = [judge.errors(torch.bfloat16, "cpu", 64, norm=norm, draws=4, **SMALL) for norm in ("largest", "rms")]
    assert both[0]["three stages"] != both[1]["three stages"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_printed_kernel_is_refuted(dtype):
    assert outcome("fused-attention/kernel", judge.printed_error(dtype, draws=6)) == "refuted"


def test_each_property_catches_an_attention_without_it():
    def attend(q, k, v, weights=lambda scores: torch.softmax(scores, -1)):
        return weights(q @ k.T) @ v

    def held(function):
        return list(judge.properties(function).values())

    assert held(attend) == [True] * 4
    assert held(fused_qk_softmax_v) == [False] * 4
    assert not held(lambda q, k, v: attend(q, k, v, torch.exp))[0]
    assert not held(lambda q, k, v: attend(q, k, v**2))[1]
    assert not held(lambda q, k, v: attend(q, k, v, lambda scores: torch.softmax(scores.tril(), -1)))[2]
    assert not held(lambda q, k, v: v)[3]


def test_the_interpreted_kernel_is_the_third_body():
    pytest.importorskip("triton", reason="needs the package triton")
    case = Case.make(Workload(2, 128, 1, 4, 2, 32, 4), torch.float32, torch.device("cpu"))
    try:
        answer = judge.interpreted(case, bias=True)
    except Exception as error:
        if "0-dimensional" in str(error):
            pytest.skip(f"this triton's interpreter does not know this numpy: {error}")
        raise
    assert torch.allclose(answer.double(), case.exact(bias=True), atol=2e-6)
    assert "TRITON_INTERPRET" not in os.environ


def test_without_triton_there_is_a_sentence(monkeypatch):
    monkeypatch.setattr(judge, "find_spec", lambda name: None)
    case = Case.make(Workload(1, 64, 1, 2, 1, 32, 4), torch.float32, torch.device("cpu"))
    with pytest.raises(AttentionError, match="triton is not installed"):
        judge.interpreted(case)


def test_the_rule_of_bandwidth_on_the_recorded_run():
    """Three stages must fail it; so did the kernel as it was cut in that run, by its slowest shape."""
    for name, wanted in (("three stages, contiguous", "refuted"), ("gather + SDPA", "refuted"),
                         ("paged kernel", "refuted"), ("SDPA cuDNN, contiguous", "supported")):  # fmt: skip
        found = judge.every([judge.share(row) for row in named(name)], min)
        assert outcome("fused-attention/bandwidth", found) == wanted, name
    pairs = zip(named("paged kernel"), named("paged kernel, bias"), strict=True)
    slower = judge.every([judge.slowdown(*pair) for pair in pairs], max)
    assert outcome("fused-attention/bias-cost", slower) == "supported"


def test_the_figure_of_shares_draws_what_was_measured():
    works = {text: Workload(*map(int, text.split("x"))) for text in recorded()}
    bars, marks = fusion_view.measured(recorded()), fusion_view.allowed(works)
    figure = fusion_view.ceiling(bars, "Title", "share (%)", allowed=marks)
    names = [trace.name for trace in figure.data]
    assert names == ["gather + SDPA", "three stages", "paged kernel", "cuDNN", "copy rate", "by bytes"]
    first = figure.data[2]
    assert first.y[0] == pytest.approx(99.9, abs=0.05)
    assert first.marker.color == plots.COLOURS["fixed"]
    assert first.error_y.array[0] > 0
    assert len({x for trace in figure.data[:4] for x in trace.x}) == 12
    assert len(figure.data[-1].x) == 12
    plots.check(figure)


def test_without_rates_the_bars_are_the_bounds_and_a_body_that_did_not_run_is_left_out():
    figure = fusion_view.ceiling(fusion_view.allowed({"8x16384": Workload(8, 16384)}), "Title", "at most (%)")
    assert [trace.error_y.array for trace in figure.data[:4]] == [None] * 4
    copy = Estimate(100.0, 99.0, 101.0, 31, "B/s")
    assert fusion_view.measured({"1x64": [Row("paged kernel", None, copy, note="not run")]}) == {"1x64": {}}
