"""CUDA-graph lifetimes on a real GPU: every case of the article's table, the remedy as written, derivation."""

from __future__ import annotations

import pytest

from o1lab.memory import graph_cases, graph_lifetimes

pytestmark = pytest.mark.gpu
pytest.importorskip("cuda.bindings.runtime")


@pytest.fixture(scope="module")
def cases():
    return graph_cases.measure(runs=8)


def test_alloc_and_free_inside_one_graph_strand_nothing(cases):
    assert cases.of("inside") == (0, 16)


def test_a_block_that_is_never_freed_is_seen_to_be_stranded(cases):
    assert cases.of("forgotten") == (16, 16)


def test_a_free_outside_or_on_another_stream_gives_the_block_back(cases):
    assert cases.of(*graph_cases.OUTSIDE)[0] == 0


def test_cuda_refuses_to_capture_the_free_of_a_block_from_before(cases):
    case = next(case for case in cases.cases if (case.name, case.api) == ("free inside", "raw"))
    assert case.errors
    assert case.unreclaimed == case.n  # the program that goes on without the error's message has lost it


def test_torch_gives_a_block_dropped_during_capture_to_someone_else(cases):
    case = next(case for case in cases.cases if (case.name, case.api) == ("free inside", "torch"))
    assert case.unreclaimed == 0
    assert case.overwritten == case.n  # no leak but a write into another tensor


def test_what_a_graph_leaves_is_taken_over_by_the_next():
    held = graph_cases.parked(graphs=8)
    assert len(set(held)) == 1
    assert held[0] >= graph_cases.BLOCK_BYTES
    assert graph_cases.Raw().held()[0] <= graph_cases.BLOCK_BYTES // 4  # and given back by the trim at its end


def test_pairing_strands_nothing():
    paired = graph_cases.measure(runs=8, pairing=True)
    assert sum(case.unreclaimed for case in paired.cases) == 0
    assert len(paired.cases) == 8


def test_lifetimes_follow_from_a_graph_only_where_it_has_memory_nodes():
    found = graph_lifetimes.derivable(graphs=2, blocks=16)
    assert found.inside[0] == found.inside[1] > 0
    assert found.escaping[0] == 0 < found.escaping[1]
    assert found.torch[0] == 0 < found.torch[1]
    assert found.starts_known == found.escaping[1]
