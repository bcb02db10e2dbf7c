"""The Triton kernel, interpreted on a CPU in a process of its own, and compiled for a GPU that is not here."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from package.attention_fixture import appended, interpreter, make, oracle, rms, sdpa

from o1lab.attention.checks import AttentionError
from o1lab.attention.resources import compile_for
from o1lab.attention.splits import Blocks, blocks


@pytest.fixture(scope="module")
def run():
    with interpreter() as function:
        yield function


def held(run, call, within=2.0, **how):
    """The kernel's answer is finite, and its error at most ``within`` times SDPA's in the same type."""
    exact, answer = oracle(call), run(call, **how)
    assert answer.isfinite().all()
    assert rms(answer, exact) <= within * rms(sdpa(call), exact) + 1e-8
    return answer, exact


@pytest.mark.parametrize(("head_dim", "splits"), [(8, 1), (64, 3), (80, 1), (80, 2), (96, 2), (128, 3), (256, 2)])
def test_head_dimensions_with_and_without_padding(run, head_dim, splits):
    held(run, make((40, 1, 0, 70), heads=(2, 1), head_dim=head_dim, bias=True, seed=head_dim), splits=splits)


@pytest.mark.parametrize("page_tokens", [1, 5, 16, 64, 128, 192])
def test_any_page_length(run, page_tokens):
    held(run, make((140, 64, 1), heads=(2, 1), page_tokens=page_tokens, bias=True), splits=2)


@pytest.mark.parametrize(
    ("dtype", "heads"),
    [
        (torch.float32, (1, 1)),
        (torch.float32, (7, 1)),
        (torch.bfloat16, (3, 3)),
        (torch.bfloat16, (4, 2)),
        (torch.float16, (40, 2)),
    ],
)
def test_types_and_groups_of_heads(run, dtype, heads):
    held(run, make((40, 3), heads=heads, dtype=dtype, head_dim=32), splits=2)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("splits", [2, 12])
def test_more_splits_than_blocks_and_both_merges(run, splits, fused):
    call = make((400, 1, 64, 0), heads=(3, 1), head_dim=32, page_tokens=64, bias=True)
    answer, exact = held(run, call, splits=splits, fused=fused, times=2)
    assert (answer[3] == 0).all()
    assert rms(answer, run(call).double()) < 1e-6


def test_the_error_over_many_calls_is_that_of_sdpa(run):
    ours, theirs = [], []
    for seed in range(4):
        call = make((110, 31, 64), heads=(8, 2), bias=seed % 2 == 0, seed=seed)
        exact = oracle(call)
        ours.append(rms(run(call, splits=1 + seed % 3), exact))
        theirs.append(rms(sdpa(call), exact))
    assert sum(ours) <= 1.1 * sum(theirs)


@pytest.mark.parametrize("per", ["token", "page"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_int8_pages_are_unpacked_in_the_kernel(run, per, dtype):
    call = make((70, 17, 0), heads=(2, 1), dtype=torch.float32, per=per, bias=True)
    call = type(call)(**{**vars(call), "q": call.q.to(dtype)})
    answer = run(call, splits=2)
    tolerance = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}[dtype]
    assert torch.allclose(answer.double(), oracle(call), atol=tolerance, rtol=tolerance)


def test_a_bias_can_hide_blocks_splits_and_everything(run):
    call = make((200, 130, 64), heads=(2, 1), head_dim=32, page_tokens=64, bias=True)
    call.bias[0, :128] = -torch.inf
    call.bias[1, 100:130] = -torch.inf
    call.bias[2, :64] = -torch.inf
    for splits in (1, 3):
        answer = run(call, splits=splits)
        assert (answer[2] == 0).all()
        assert torch.allclose(answer[:2].double(), oracle(call)[:2], atol=1e-6)


def test_pages_stored_head_by_head_and_with_gaps(run):
    call = make((100, 30), heads=(4, 2), head_dim=64)
    stored = call.pages.transpose(2, 3).contiguous()
    wide = torch.full((len(stored) * 2, *stored.shape[1:]), torch.nan)
    wide[::2] = stored
    held(run, type(call)(**{**vars(call), "pages": wide[::2].transpose(2, 3)}), splits=2)


def test_queries_as_a_model_lays_them_out(run):
    call = make((50, 20), heads=(4, 2))
    laid = torch.zeros(2, 4, 3, 64)
    laid[:, :, 1] = call.q
    held(run, type(call)(**{**vars(call), "q": laid[:, :, 1]}))


@pytest.mark.parametrize(("heads", "head_dim"), [((4, 2), 64), ((3, 3), 80)])
def test_appending_writes_one_slot_of_each_sequence_and_nothing_else(run, heads, head_dim):
    call = make((5, 16, 33), heads=heads, head_dim=head_dim)
    laid = torch.randn(2, 3, 4, heads[1], head_dim).permute(0, 1, 3, 2, 4)[..., 1:2, :]  # as a model's projections lie
    expected = call.pages.clone()
    for row, length in enumerate(call.lengths.tolist()):
        page = int(call.table[row, (length - 1) // 16])
        expected[page, :, (length - 1) % 16] = laid[:, row, :, 0]
    given = (call.table, call.lengths, laid[0], laid[1])
    for found in (run((call.pages.clone(), *given), appended), appended(call.pages.clone(), *given)):
        assert torch.equal(found.nan_to_num(nan=7.5), expected.nan_to_num(nan=7.5))


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    lengths=st.lists(st.integers(0, 90), min_size=1, max_size=3),
    page_tokens=st.sampled_from([3, 16, 64]),
    heads=st.sampled_from([(2, 1), (6, 2), (3, 3)]),
    splits=st.integers(1, 4),
    bias=st.booleans(),
    seed=st.integers(0, 10**6),
)
def test_random_calls(run, lengths, page_tokens, heads, splits, bias, seed):
    call = make(tuple(lengths), page_tokens=page_tokens, heads=heads, bias=bias, seed=seed, head_dim=32)
    assert torch.allclose(run(call, splits=splits).double(), oracle(call), atol=2e-6)


@pytest.mark.parametrize(
    "options",
    [{}, {"bias": True, "fused": True, "page_tokens": 16}, {"quantised": True}, {"fused": True, "splits": 40}],
)
def test_compiled_for_hopper_it_spills_nothing_and_two_warps_fit(options):
    pytest.importorskip("triton")
    try:
        found = compile_for(90, **options)
    except AttentionError as error:
        if "cuobjdump" in str(error):
            pytest.skip(str(error))
        raise
    assert found.spilled_bytes == 0
    assert found.programs_per_sm() >= 2
    assert found.warps_per_sm() >= 8


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("splits", [1, 6])
def test_with_less_shared_memory_the_kernel_takes_less(head_dim, splits):
    """Compute capability 8.6 and 8.9 give a program 99 KiB."""
    pytest.importorskip("triton")
    shape = blocks(2, 2, head_dim, 99 << 10)
    try:
        found = compile_for(89, head_dim=head_dim, splits=splits, shape=shape)
    except AttentionError as error:
        pytest.skip(str(error))
    assert found.shared_bytes <= 99 << 10
    assert found.spilled_bytes == 0


def test_stages_deepen_the_pipeline():
    pytest.importorskip("triton")
    shallow, deep = (compile_for(shape=Blocks(64, 4, stages)).shared_bytes for stages in (2, 3))
    assert deep - shallow == 2 * 64 * 128 * 2, "one more block of K and one of V are under way"
