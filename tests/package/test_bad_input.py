"""Arguments of the wrong kind: a typed error that says what was given and what is wanted, wherever they go in."""

from __future__ import annotations

import pytest
import torch

from o1lab import chains, models
from o1lab.errors import O1labError
from o1lab.kv import PagedCache, PagePool

SAMPLES = chains.make("symbols", 2, 1)


def pool() -> PagePool:
    return PagePool(1 << 20, device="cpu", page_bytes=1024, chunk_bytes=65536)


CASES = {
    "a model's name in place of the model": (lambda: chains.evaluate("reasoner", SAMPLES), "str answers nothing"),
    "no model": (lambda: chains.evaluate(None, SAMPLES), "NoneType answers nothing"),
    "text in place of a sample": (lambda: chains.localise("abc", "x"), "a str is no sample"),
    "nothing in place of a chain": (lambda: chains.localise(SAMPLES[0], None), "neither text nor"),
    "temperature nan": (
        lambda: chains.evaluate(models.load("reasoner", "cpu"), SAMPLES, temperature=float("nan")),
        "temperature=nan is no finite number",
    ),
    "endless temperature": (
        lambda: chains.evaluate(models.load("reasoner", "cpu"), SAMPLES, temperature=float("inf")),
        "temperature=inf is no finite number",
    ),
    "a cache of nothing": (lambda: PagedCache(None, pool()), "NoneType is no transformers config"),
    "a cache over nothing": (
        lambda: PagedCache(models.load("tiny", "cpu").model.config, None),
        "NoneType is no PagePool",
    ),
    "an owner that no dict takes": (lambda: pool().allocate(1, owner=[1]), r"owner=\[1\]"),
    "an owner of many pages that no dict takes": (lambda: pool().allocate(3, owner={}), "owner={}"),
    "a device that is not there": (lambda: PagePool(1 << 20, device="cuda:99", page_bytes=1024), "no pool of"),
}


@pytest.mark.parametrize("case", CASES)
def test_the_error_is_typed_and_names_what_was_given(case):
    call, words = CASES[case]
    with pytest.raises(O1labError, match=words):
        call()


def test_a_refused_owner_takes_no_page():
    mine = pool()
    with pytest.raises(O1labError):
        mine.allocate(2, owner=[1])
    assert mine.free_pages == mine.pages
    assert torch.is_tensor(mine.page(mine.allocate(1, owner=("a", 1))[0]))
