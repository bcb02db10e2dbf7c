"""The catalogue's CUDA cases on a real GPU, leaking and cured, with the owners named."""

from __future__ import annotations

import pytest

from o1lab.memory.catalogue import QUIET, cases

pytestmark = pytest.mark.gpu
LEAKS, NULLS = cases(where="cuda", group="leak"), cases(where="cuda", group="null")


def named(chosen):
    return [pytest.param(one, id=one.name) for one in chosen]


@pytest.fixture(autouse=True)
def empty_cache():
    import torch

    torch.cuda.init()
    torch.cuda.empty_cache()


@pytest.mark.parametrize("one", named(NULLS))
def test_what_is_no_leak_is_none(one):
    report = one.probe(owners=False)
    assert report.kind in one.kinds, str(report)


@pytest.mark.parametrize("one", named(LEAKS))
def test_the_cured_form_is_quiet(one):
    if one.name == "failed_capture":
        pytest.skip("after the leaking forms, below")
    report = one.probe(leak=False, owners=False)
    assert report.kind in QUIET, str(report)


@pytest.mark.parametrize("one", named(LEAKS))
def test_the_leaking_form_grows_as_said(one):
    if one.name == "failed_capture":  # its leaking form spoils the allocator for what comes after
        assert one.probe(leak=False, owners=False).kind in QUIET
    report = one.probe()
    assert report.kind in one.kinds, str(report)
    assert one.rate_right(report) in (True, None), (one.rate(report), one.bytes_per_request)
    assert one.owner_right(report.owners) in (True, None), [owner.path for owner in report.owners]
