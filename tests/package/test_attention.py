"""Paged attention without a GPU: the plain bodies against an oracle in loops, the checks, and what surrounds them."""

from __future__ import annotations

import json
import math
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from package.attention_fixture import make, oracle, rms, sdpa

from o1lab.attention import (
    AttentionError,
    PagedKV,
    PositionBias,
    adapter,
    attend,
    bench,
    chain_weights,
    counted,
    flex,
    launch,
    paged_decode,
    paged_prefill,
    printed,
    quantise,
    reference,
    resources,
    splits,
    step_weights,
    workspace,
)
from o1lab.attention.checks import Problem, problem
from o1lab.attention.traffic import Workload
from o1lab.errors import O1labError


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


calls = st.builds(
    make,
    st.lists(st.integers(0, 70), min_size=1, max_size=5).map(tuple),
    heads=st.sampled_from([(1, 1), (4, 2), (6, 1), (3, 3)]),
    head_dim=st.sampled_from([4, 16, 80]),
    page_tokens=st.sampled_from([1, 5, 16, 64]),
    bias=st.booleans(),
    seed=st.integers(0, 10**6),
)


# --- decode ----------------------------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(calls)
def test_random_calls_agree_with_the_oracle_and_read_no_poison(call):
    exact = oracle(call)
    double = [call.q.double(), call.pages.double(), call.table, call.lengths]
    assert torch.allclose(paged_decode(*double, **call.options, body="reference"), exact, atol=1e-12)
    assert torch.allclose(paged_decode(*call.given, **call.options).double(), exact, atol=2e-6)
    assert torch.allclose(paged_decode(*double, **call.options, body="gather"), exact, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bias", [False, True])
def test_the_error_is_that_of_sdpa_in_the_same_type(dtype, bias):
    ours, theirs, float64 = 0.0, 0.0, 0.0
    for seed in range(4):  # on short sequences the order of summation alone moves fp32 errors by half
        call = make((1500, 1024), heads=(8, 2), page_tokens=64, dtype=dtype, bias=bias, seed=seed)
        exact = oracle(call)
        ours += rms(paged_decode(*call.given, **call.options), exact)
        theirs += rms(sdpa(call), exact)
        float64 += rms(paged_decode(*call.given, **call.options, body="reference"), exact)
    assert 0 < ours <= 1.1 * theirs
    assert 0 < float64 <= 1.1 * theirs


@pytest.mark.parametrize("body", ["gather", "reference"])
def test_an_empty_sequence_and_one_that_is_hidden_give_zeros(body):
    call = make((0, 20), bias=True)
    call.bias[1, :20] = -torch.inf
    answer = paged_decode(*call.given, **call.options, body=body)
    assert torch.equal(answer, torch.zeros_like(answer))


@pytest.mark.parametrize("body", ["gather", "reference"])
@pytest.mark.parametrize("per", ["token", "page"])
def test_int8_pages(body, per):
    call = make((40, 0, 9), per=per, bias=True)
    assert torch.allclose(paged_decode(*call.given, **call.options, body=body).double(), oracle(call), atol=1e-6)


@pytest.mark.parametrize("per", ["token", "page"])
def test_int8_rounding_is_within_half_a_scale(per):
    pages = torch.randn(3, 2, 8, 2, 16) * torch.logspace(-3, 3, 8)[:, None, None]
    pages[0] = 0
    whole, scales = quantise(pages, per)
    assert scales.shape == (3, 2, 8 if per == "token" else 1, 2)
    back = whole.float() * scales.unsqueeze(-1)
    assert ((back - pages).abs() <= scales.unsqueeze(-1) * 0.5001).all()
    with pytest.raises(AttentionError, match="per='head'"):
        quantise(pages, "head")


@pytest.mark.parametrize("body", ["gather", "reference"])
def test_the_answer_goes_into_the_buffer_that_was_given(body):
    call = make()
    out = torch.full_like(call.q, math.nan)
    assert paged_decode(*call.given, body=body, out=out) is out
    assert torch.equal(out, paged_decode(*call.given, body=body))


def test_other_strides_and_another_scale():
    call = make((20, 3))
    wide = torch.full((len(call.pages) * 2, *call.pages.shape[1:]), math.nan)
    wide[::2] = call.pages
    moved = paged_decode(call.q, wide[::2], call.table, call.lengths, scale=0.5)
    assert torch.equal(moved, paged_decode(call.q * 4.0, call.pages, call.table, call.lengths))  # 64 ** -0.5 is 1/8


def test_one_query_of_prefill_is_decode_and_attend_serves_both():
    call = make((20, 3, 33), bias=True)
    decoded = paged_decode(*call.given, bias=call.bias)
    kv = PagedKV(call.pages, call.table, call.lengths)
    assert torch.equal(attend(call.q[:, :, None], kv, bias=call.bias)[:, 0], decoded)
    q = torch.stack([torch.randn_like(call.q), call.q], 2)
    both = attend(q, kv, bias=call.bias)
    assert both.shape == (3, 2, 4, 64)
    assert torch.allclose(both[:, 1], decoded, atol=1e-6)


@pytest.mark.parametrize("queries", [None, 3])
@pytest.mark.parametrize("heads", [(4, 2), (3, 3)])
def test_the_batched_form_that_a_gpu_uses(queries, heads):
    call = make((20, 0, 3, 33), heads=heads, queries=queries, bias=True)
    call.bias[2, :3] = -torch.inf
    sizes = problem(*call.given, prefill=queries is not None)
    q = call.q[:, :, None] if queries is None else call.q
    answer = reference.batched(q, *call.given[1:], sizes, 64**-0.5, call.bias)
    exact = oracle(call).nan_to_num()  # the oracle knows no row of which nothing is seen
    assert torch.allclose(answer.double(), exact[:, :, None] if queries is None else exact, atol=2e-6)


# --- errors ----------------------------------------------------------------------------------------------------------

WRONG = [
    ("q has shape", {"q": torch.zeros(4, 64)}),
    ("pages has shape", {"pages": torch.zeros(9, 3, 16, 2, 64)}),
    ("pages has shape", {"pages": torch.zeros(0, 2, 16, 2, 64)}),
    ("heads of 32, pages of 64", {"q": torch.zeros(4, 4, 32)}),
    ("3 query heads cannot share 2", {"q": torch.zeros(4, 3, 64)}),
    ("q is torch.int64", {"q": torch.zeros(4, 4, 64, dtype=torch.int64)}),
    ("pages are torch.float16", {"q": torch.zeros(4, 4, 64, dtype=torch.bfloat16), "half": True}),
    ("block_table has shape", {"table": torch.zeros(3, 4, dtype=torch.int32)}),
    ("block_table is torch.int64", {"table": torch.zeros(4, 4, dtype=torch.int64)}),
    ("lengths has shape", {"lengths": torch.zeros(5, dtype=torch.int32)}),
    ("lengths is torch.int64", {"lengths": torch.zeros(4, dtype=torch.int64)}),
    ("bias has shape (4, 3)", {"bias": torch.zeros(4, 3)}),
    ("bias is torch.float64", {"bias": torch.zeros(4, 64, dtype=torch.float64)}),
    ("PositionBias|position_bias.vector", {"bias": PositionBias(1.0, torch.ones(4, 64))}),
    ("scales belong to int8 pages", {"scales": torch.ones(11, 2, 16, 2)}),
    ("int8 pages need scales", {"int8": True}),
    ("on meta, q on cpu", {"lengths": torch.zeros(4, dtype=torch.int32, device="meta")}),
    ("lengths[1] = -1", {"lengths": torch.tensor([5, -1, 3, 3], dtype=torch.int32)}),
    ("lengths[0] = 65 does not fit: 4 pages of 16", {"lengths": torch.tensor([65, 0, 3, 3], dtype=torch.int32)}),
    ("block_table[2, 0] = -7 names no page", {"entry": -7}),
    ("block_table[2, 0] = 999 names no page", {"entry": 999}),
    ("body='cuda' is unknown; choose from auto, triton", {"body": "cuda"}),
    ("out is (4, 4, 32)", {"out": torch.zeros(4, 4, 32)}),
]


@pytest.mark.parametrize(("message", "change"), WRONG, ids=[message for message, _ in WRONG])
def test_what_does_not_fit_is_named(message, change):
    call = make()
    given = {"q": call.q, "pages": call.pages, "table": call.table, "lengths": call.lengths}
    given |= {key: value for key, value in change.items() if key in given}
    options = {key: value for key, value in change.items() if key in ("bias", "scales", "body", "out")}
    if "half" in change:
        given["pages"] = call.pages.half()
    if "int8" in change:
        given["pages"] = torch.zeros_like(call.pages, dtype=torch.int8)
    if "entry" in change:
        given["table"][2, 0] = change["entry"]
    with pytest.raises(AttentionError) as caught:
        paged_decode(*given.values(), **options)
    assert any(part in str(caught.value) for part in message.split("|"))
    assert isinstance(caught.value, (O1labError, ValueError))


def test_contents_are_looked_at_only_when_asked():
    call = make()
    call.table[2, 0] = 999
    assert paged_decode(*call.given, check=False).shape == call.q.shape


@pytest.mark.parametrize(
    ("why", "call"),
    [
        ("head dimension 12", make(head_dim=12)),
        ("head dimension 264", make(head_dim=264)),
        ("80 query heads on one KV head", make(heads=(80, 1))),
        ("q is torch.float64", make(dtype=torch.float64)),
        ("must be contiguous; strides", None),
    ],
)
def test_what_the_kernel_does_not_take_is_named_and_auto_takes_another(why, call):
    if call is None:
        call = make()
        call = type(call)(**{**vars(call), "pages": call.pages.transpose(3, 4).contiguous().transpose(3, 4)})
    with pytest.raises(AttentionError, match=why):
        paged_decode(*call.given, body="triton")
    assert torch.allclose(paged_decode(*call.given).double(), oracle(call), atol=1e-5)


def test_the_kernel_takes_no_strided_table_or_lengths():
    call = make()
    for change in ({"table": call.table.T.contiguous().T}, {"lengths": call.lengths.repeat_interleave(2)[::2]}):
        strided = type(call)(**{**vars(call), **change})
        with pytest.raises(AttentionError, match="must be contiguous in their last dimension"):
            paged_decode(*strided.given, body="triton")
        assert torch.equal(paged_decode(*strided.given), paged_decode(*call.given))


def test_the_kernel_needs_a_device_and_says_so(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(AttentionError, match=r"cannot run: (tensors are on cpu|the package triton)"):
        paged_decode(*make().given, body="triton")


def test_importing_loads_neither_torch_nor_triton():
    code = "import sys, o1lab.attention; assert not {'torch', 'triton'} & set(sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stderr == ""


# --- prefill ---------------------------------------------------------------------------------------------------------

PREFILL = ("gather", "reference", "flex-eager")


def finite(call):
    """The same call with zeros for poison: uncompiled FlexAttention multiplies the whole pool."""
    return type(call)(**{**vars(call), "pages": call.pages.nan_to_num()})


@pytest.mark.parametrize("body", PREFILL)
@pytest.mark.parametrize("kind", ["none", "vector", "position"])
@pytest.mark.filterwarnings("ignore:flex_attention called without:UserWarning")
def test_prefill_is_causal_over_pages(body, kind):
    call = make((40, 3, 0, 17), queries=7, bias=kind == "vector", heads=(4, 2))
    call = finite(call) if body == "flex-eager" else call
    bias, weight = call.bias, None
    if kind == "position":
        bias = PositionBias(0.3, torch.rand(4, 64))

        def weight(row, keys, at):
            return -0.3 * torch.log(at - keys + 1.0).double() * bias.weights[row, keys]

    elif kind == "vector" and body == "flex-eager":
        bias = bias.nan_to_num()
    answer = paged_prefill(*call.given, bias=bias, body=body)
    assert torch.allclose(answer.double(), oracle(call, weight), atol=2e-6)
    assert (answer[2] == 0).all()
    assert (answer[1, :, :4] == 0).all(), "queries before the start of a sequence of 3"


@pytest.mark.parametrize("kind", ["one head each", "eight on one"])
def test_prefill_heads_and_types(kind):
    call = make((33, 50), queries=33, heads=(3, 3) if kind == "one head each" else (8, 1), dtype=torch.bfloat16)
    assert rms(paged_prefill(*call.given), oracle(call)) < 3e-3


def test_prefill_on_int8_pages():
    call = make((33, 50), queries=4, per="page")
    assert torch.allclose(paged_prefill(*call.given, scales=call.scales).double(), oracle(call), atol=2e-6)
    with pytest.raises(AttentionError, match="pages are int8"):
        paged_prefill(*call.given, scales=call.scales, body="flex")


def test_flex_names_what_it_does_not_take():
    with pytest.raises(AttentionError, match="pages of 5 tokens"):
        paged_prefill(*make(page_tokens=5, queries=2).given, body="flex")
    call = make(queries=2)
    with pytest.raises(AttentionError, match="must be contiguous"):
        paged_prefill(call.q, call.pages[::2], call.table % 2, call.lengths, body="flex", check=False)


def test_only_what_is_not_finite_behind_a_last_token_is_zeroed():
    call = make((5, 16, 0, 33), page_tokens=16)
    pages = call.pages.clone()
    last = call.table[0, 0]
    pages[last, :, 9] = 7.0  # finite, behind the end: another sequence's, for all that is known
    before = pages.clone()
    flex.clean_tails(pages, call.table, call.lengths)
    changed = (pages != before) & ~(pages.isnan() & before.isnan())
    assert (pages[last, :, 5:9] == 0).all()
    assert (pages[last, :, 9] == 7).all()
    tail = call.table[3, 2]
    assert (pages[tail, :, 1:] == 0).all()
    assert sorted(changed.flatten(1).any(1).nonzero().flatten().tolist()) == sorted({int(last), int(tail)})
    assert before[changed].isnan().all()


def test_the_block_mask_is_the_page_table_and_differs_by_device():
    call = make((40, 3, 0), queries=7, page_tokens=16)
    sizes = problem(*call.given, prefill=True)
    mask, logical = flex.block_mask(call.table, call.lengths, sizes)
    assert mask.kv_num_blocks[:, 0, 0].tolist() == [3, 1, 0]
    assert mask.kv_indices[0, 0, 0, :3].tolist() == (2 * call.table[0, :3]).tolist()
    assert logical[0, (2 * call.table[0, :3]).long()].tolist() == [0, 1, 2]
    assert (logical[:, :-1] >= 0).sum().item() == 4
    assert mask.full_kv_num_blocks.sum().item() == 0, "a CPU needs a list of full blocks, and none in it"
    elsewhere, _ = flex.block_mask(call.table.to("meta"), call.lengths.to("meta"), sizes)
    assert elsewhere.full_kv_num_blocks is None


# --- bias ------------------------------------------------------------------------------------------------------------


def test_the_bias_vector_is_the_articles_formula():
    bias = PositionBias(0.3, chain_weights(torch.tensor([4, 0]), 32))
    lengths = torch.tensor([20, 7], dtype=torch.int32)
    out = torch.full((2, 32), math.nan)
    vector = bias.vector(lengths, out=out)
    assert vector is out
    for row, (start, length) in enumerate(zip([4, 0], [20, 7], strict=True)):
        for j in range(length):
            i = length - 1
            wanted = -math.log(abs(i - j) + 1) * 0.3 * (0.8 if j < start else 1.2)
            assert vector[row, j].item() == pytest.approx(wanted, abs=1e-6)
    assert vector.isfinite().all()
    at = torch.tensor([[18, 19], [5, 6]])
    assert torch.allclose(bias.matrix(at, 32)[:, 1].float(), vector)


def test_with_equal_weights_attention_falls_as_a_power_of_distance():
    """KERPLE-log with r₂ = 1: equal scores leave weights (i − j + 1) ** −α, normalised."""
    alpha, length = 0.7, 30
    call = make((length,), heads=(1, 1), head_dim=32, page_tokens=16, dtype=torch.float64)
    values = torch.zeros_like(call.pages)
    page, slot = torch.arange(length) // 16, torch.arange(length) % 16
    values[call.table[0, page].long(), 1, slot, 0, torch.arange(length)] = 1.0
    bias = PositionBias(alpha, torch.ones(1, 48)).vector(call.lengths)
    weights = paged_decode(torch.zeros_like(call.q), values, call.table, call.lengths, bias=bias)[0, 0, :length]
    power = torch.arange(length, 0, -1.0).double() ** -alpha
    assert torch.allclose(weights, power / power.sum(), atol=1e-6)


def test_weights_by_step_and_what_a_bias_must_be():
    assert step_weights(torch.tensor([[2, 0]]), torch.tensor([1.0, 2.0, 3.0])).tolist() == [[3.0, 1.0]]
    with pytest.raises(AttentionError, match=r"weights must be .* not \(4,\)"):
        PositionBias(0.3, torch.ones(4))


# --- cuts of the kernel ----------------------------------------------------------------------------------------------


def shape_of(batch, tokens, kv_heads=8, group=4):
    return Problem(batch, 1, kv_heads * group, kv_heads, 128, 64, 10**6, tokens // 64)


@pytest.mark.parametrize(("batch", "tokens"), [(8, 16384), (64, 2048), (1, 131072), (3, 32768)])
def test_splits_fill_whole_waves_of_an_h200(batch, tokens):
    sizes, shape = shape_of(batch, tokens), splits.blocks(2, 2, 128)
    number = splits.choose(sizes, 2, 2, 132)
    waves = batch * 8 * number / 132
    assert waves / math.ceil(waves) > 0.9
    assert tokens / number >= splits.FEWEST_BLOCKS * shape.block_n


@pytest.mark.parametrize(("batch", "tokens", "best"), [(8, 16384, 2), (64, 2048, 1), (1, 131072, 16)])
def test_splits_are_those_that_were_fastest_on_an_h200(batch, tokens, best):
    assert splits.choose(shape_of(batch, tokens), 2, 2, 132) == best


@settings(deadline=None)
@given(st.integers(1, 300), st.integers(1, 4000), st.integers(1, 32), st.integers(1, 200))
def test_splits_are_never_more_than_there_is_work(batch, pages, kv_heads, multiprocessors):
    sizes = Problem(batch, 1, kv_heads, kv_heads, 128, 64, 10**6, pages)
    assert 1 <= splits.choose(sizes, 2, 2, multiprocessors) <= max(1, pages / splits.FEWEST_BLOCKS)


def test_buffers_are_checked():
    call = make((100, 20))
    work = workspace(*call.given[:3], splits=3)
    assert work.partials.shape == (8, 3, 64)
    assert work.arrivals.tolist() == [0, 0, 0, 0]
    work.check(problem(*call.given), torch.device("cpu"))
    with pytest.raises(AttentionError, match=r"the workspace holds \(8, 3, 64\) on cpu; this call needs \(4, 3, 64\)"):
        work.check(problem(*make((100,)).given), torch.device("cpu"))
    assert workspace(*call.given[:3], splits=1).partials.numel() == 0
    for bad in (0, -1, True, 2.0):
        with pytest.raises(AttentionError, match="splits="):
            workspace(*call.given[:3], splits=bad)


def test_resources_are_arithmetic():
    one = resources.Resources(registers=128, spilled_bytes=0, shared_bytes=71680, warps=4)
    assert one.programs_per_sm() == 3
    assert resources.Resources(255, 0, 0, 8).programs_per_sm() == 1, "by registers"
    assert resources.Resources(16, 0, 0, 4).programs_per_sm() == 16, "by threads"
    with pytest.raises(AttentionError, match="not loaded"):
        resources.resources(object())


# --- the article's adapter and kernel, bytes, the bench --------------------------------------------------------------


def test_the_adapter_packs_what_the_pages_hold():
    call = make((20, 0, 33), per="token")
    rows = adapter.packed(*call.given, scales=call.scales)
    assert rows.offsets.tolist() == [0, 20, 20, 53]
    assert rows.longest == 33
    assert torch.allclose(rows.keys.double(), torch.cat(call.keys), atol=1e-6)
    assert torch.allclose(rows.values.double(), torch.cat(call.values), atol=1e-6)


@pytest.mark.skipif(torch.cuda.is_available(), reason="an implementation may be usable here")
def test_the_adapter_says_why_no_implementation_runs():
    with pytest.raises(
        AttentionError, match=r"'FA3' cannot be used here \(FA3: the module flash_attn_interface is not"
    ):
        adapter.flash_decode(*make((5,)).given)
    with pytest.raises(AttentionError, match="'FA9' cannot be used here"):
        adapter.flash_decode(*make((5,)).given, implementation="FA9")


def test_the_adapter_activates_and_restores(monkeypatch):
    attention = pytest.importorskip("torch.nn.attention")
    if not hasattr(attention, "register_flash_attention_impl"):
        pytest.skip("this torch has no registry of flash implementations")
    log = []

    class Handle:
        def remove(self):
            log.append("removed")

    def register():
        log.append("made")
        return Handle()

    from torch.nn.attention import _registry

    monkeypatch.setattr(_registry, "_FLASH_ATTENTION_IMPLS", dict(_registry._FLASH_ATTENTION_IMPLS))
    attention.register_flash_attention_impl("counting", register_fn=register)
    monkeypatch.setattr(adapter, "implementations", lambda: {"counting": ""})

    def fail_inside():
        with adapter.activated("counting"):
            assert attention.current_flash_attention_impl() == "counting"
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_inside()
    assert log == ["made", "removed"]
    assert attention.current_flash_attention_impl() is None


def test_the_printed_kernel_does_not_compute_attention():
    q, k, v = torch.randn(3, 6, 4, dtype=torch.float64)
    flat = torch.empty(24, dtype=torch.float64)
    for tid in range(24):
        scores = [(q.flatten()[tid] * k.flatten()[i * 4 + tid % 4]).item() for i in range(6)]
        total = sum(math.exp(s - max(scores)) for s in scores)
        flat[tid] = math.exp((q.flatten()[tid] * v.flatten()[tid]).item()) / total
    answer = printed.fused_qk_softmax_v(q, k, v)
    assert torch.allclose(answer.flatten(), flat)
    attention = torch.softmax(q @ k.T * 0.5, -1) @ v
    assert rms(answer, attention) > 0.1


def test_bytes_of_each_way():
    work = Workload(8, 16384)
    assert work.kv_bytes == 2**29
    assert work.fused(bias=True) - work.fused() == 8 * 16384 * 4
    assert work.fused(splits=6) - work.fused() == 2 * 8 * 32 * 6 * 129 * 4
    assert work.gathered() == 3 * 2**29 + work.io_bytes
    assert work.three_stage() - work.io_bytes - work.kv_bytes == 4 * 8 * 32 * 16384 * 2


@pytest.mark.skipif(torch.cuda.is_available(), reason="measures the device where there is one")
def test_the_bench_shows_the_cpu_bodies_and_says_what_it_cannot(capsys, tmp_path):
    file = tmp_path / "rows.json"
    small = ["--q-heads", "4", "--kv-heads", "2", "--head-dim", "16", "--budget", "0.01", "--dtype", "float32"]
    assert bench.main(["--shapes", "2x128", *small, "--json", str(file)]) == 0
    said = capsys.readouterr().out
    assert said.startswith("No CUDA device: the kernel and its targets cannot be measured here.")
    rows = json.loads(file.read_text("utf-8"))
    assert {row["name"] for row in rows} >= {"gather + SDPA", "gather + SDPA, bias", "SDPA, contiguous"}
    assert all(0 < row["error"] < 3 and row["rate"]["value"] > 0 for row in rows)
    assert bench.main(["--shapes", "nonsense"]) == 2
    assert bench.main(["--shapes", "2x100"]) == 2
    assert "multiple of the 64" in capsys.readouterr().err


def test_ncu_is_read_or_its_absence_said(monkeypatch):
    with pytest.raises(AttentionError, match="ncu wrote no table; it said: ==ERROR== no permission"):
        counted.total("==ERROR== no permission")
    monkeypatch.setattr(counted.shutil, "which", lambda name: None)
    assert "not on the PATH" in counted.report("8x64", bench.parser().parse_args([]))


def test_why_triton_is_missing_is_said(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "not installed" in launch.missing(torch.device("cuda"))
