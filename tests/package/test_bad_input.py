"""Arguments of the wrong kind: a typed error that says what was given and what is wanted, wherever they go in."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

from o1lab import chains, models
from o1lab.attention import PagedKV, attend, paged_decode, paged_prefill, workspace
from o1lab.errors import O1labError
from o1lab.kv import EvictingPool, PagedCache, PagePool, Policy, host_pool
from o1lab.kv.lane import Lane

SAMPLES = chains.make("symbols", 2, 1)


def pool() -> PagePool:
    return PagePool(1 << 20, device="cpu", page_bytes=1024, chunk_bytes=65536)


def tiers(**given) -> EvictingPool:
    first = pool()
    made = EvictingPool(first, host_pool(first, 1 << 20), **given)
    made.allocate(1, "a")
    return made


def cache(batch: int = 3, tokens: int = 4) -> PagedCache:
    config = models.load("tiny", "cpu").model.config
    made = PagedCache(config, PagePool(1 << 20, device="cpu", page_bytes=16384, chunk_bytes=65536), dtype=torch.float32)
    for layer in range(made.heads.layers if batch else 0):
        made.update(*torch.zeros(2, batch, made.heads.kv_heads, tokens, made.heads.head_dim), layer)
    return made


def call(function=paged_decode, **changes):
    """A call that is right but for ``changes``."""
    queries = torch.zeros(1, 4, 8) if function is paged_decode else torch.zeros(1, 4, 2, 8)
    table, lengths = torch.tensor([[0]], dtype=torch.int32), torch.tensor([3], dtype=torch.int32)
    given = {"q": queries, "pages": torch.zeros(2, 2, 16, 2, 8), "block_table": table, "lengths": lengths, **changes}
    return function(**given)


NAN, BOOLS = float("nan"), torch.ones(2, dtype=torch.bool)
HELD = "no page of this pool: its pages are 0 to 1023"
PAGES = {
    "a policy's name": (lambda: tiers(policy="lru"), "policy='lru': give a Policy"),
    "a lane's name": (lambda: tiers(lane="two"), "lane='two': give a Lane"),
    "a time in place of a clock": (lambda: tiers(clock=5.0), "clock=5.0: give a function"),
    "a host pool of nothing": (lambda: host_pool(None, 5), "like is a NoneType: give a PagePool"),
    "a lane over nothing": (lambda: Lane(pool(), None), "host is a NoneType: give a PagePool"),
    "time to live below 0": (lambda: tiers().rest("a", ttl=-1), "ttl=-1: a number, 0 or more"),
    "time to live nan": (lambda: tiers().rest("a", ttl=NAN), "ttl=nan: a number, 0 or more"),
    "time to live as text": (lambda: tiers().rest("a", ttl="5"), "ttl='5': a number, 0 or more"),
    "a list of owners": (lambda: tiers().restore(["a"]), r"owner=\['a'\]"),
    "sealing nothing": (lambda: tiers().seal(None, "a"), "pages are whole numbers in a list"),
    "trimming lists": (lambda: tiers().trim([[0]], "a"), "pages are whole numbers in a list"),
    "a policy's share as text": (lambda: Policy(evict_at="most"), "evict_at='most': a number, 0 or more"),
    "a shield of nan": (lambda: Policy(shield=NAN), "shield=nan: a number, 0 or more"),
    "a pool on nothing": (lambda: PagePool(1 << 20, device=None), "device=None: a text such as 'cuda'"),
    "a page as text": (lambda: pool().page("0"), f"page='0' is {HELD}"),
    "half a page": (lambda: pool().page(0.5), f"page=0.5 is {HELD}"),
    "a page that is not there": (lambda: pool().page(1024), f"page=1024 is {HELD}"),
    "a page before the first": (lambda: pool().generation(-1), f"page=-1 is {HELD}"),
    "a generation of no page": (lambda: pool().generation(9999), f"page=9999 is {HELD}"),
    "a generation of text": (lambda: pool().generation("1"), f"page='1' is {HELD}"),
    "references of text": (lambda: pool().references("1"), f"page='1' is {HELD}"),
    "writing to nothing": (lambda: pool().writable(None), f"page=None is {HELD}"),
    "a type's name": (lambda: pool().view("float32", (256,)), r"a page of 1024 bytes is not \(256,\) of 'float32'"),
    "a number for a shape": (lambda: pool().view(torch.float32, 256), "is not 256 of torch.float32"),
    "after a text": (lambda: pool().allocate(after="x"), f"after='x' is {HELD}"),
    "after the last": (lambda: pool().allocate(after=1024), f"after=1024 is {HELD}"),
    "after -1": (lambda: pool().allocate(2, after=-1), f"after=-1 is {HELD}"),
    "a deep copy": (lambda: copy.deepcopy(pool()), "share the pool itself"),
    "a copy": (lambda: copy.copy(pool()), "share the pool itself"),
    "a pickle": (lambda: pickle.dumps(pool()), "share the pool itself"),
    "a copy of both pools": (lambda: copy.deepcopy(tiers()), "share the pool itself"),
    "one generation for a list": (lambda: (lambda p: p.free(p.allocate(1), generations=5))(pool()), "5 generations"),
    "a list that shares": (lambda: (lambda p: p.share(p.allocate(1), [1]))(pool()), r"owner=\[1\]"),
    "adopting nothing": (lambda: cache(0).adopt(None), "a NoneType has no pages to share"),
    "adopting rows of text": (lambda: cache(0).adopt(cache(), rows="ab"), "rows='ab': whole numbers in a list"),
    "adopting a row": (lambda: cache(0).adopt(cache(), rows=1), "rows=1: whole numbers in a list"),
    "a layer as text": (lambda: cache().paged("x"), "layer_idx='x': a whole number"),
    "a layer too many": (lambda: cache().paged(9), "layer_idx=9: the config has"),
    "a layer before the first": (lambda: cache().paged(-1), "layer_idx=-1: the config has"),
    "keys of nothing": (lambda: cache().update(None, None, 0), "key_states is a NoneType"),
    "cropping text": (lambda: cache().crop("x"), "crop='x': a whole number"),
    "cropping half": (lambda: cache().crop(-0.5), "crop=-0.5: a whole number"),
    "a fork of so many letters": (lambda: cache().fork(tokens="a"), "tokens='a': a whole number"),
    "a fork of an empty cache": (lambda: cache(0).fork(tokens="a"), "tokens='a': a whole number"),
    "a fork of half a row": (lambda: cache().fork(rows=[0.5]), r"rows=\[0.5\]: whole numbers in a list"),
    "half a sequence": (lambda: cache().batch_select_indices([0.5]), "indices are torch.float32: whole numbers"),
    "a beam of halves": (lambda: cache().reorder_cache(torch.tensor([0.0])), "indices are torch.float32"),
    "a short mask": (lambda: cache().batch_select_indices(BOOLS), r"a mask of shape \(2,\): 3 sequences need one of"),
    "a square mask": (lambda: cache().batch_select_indices(BOOLS.expand(3, 2)), r"a mask of shape \(3, 2\)"),
    "sequences by name": (lambda: cache().batch_select_indices("x"), "indices='x': whole numbers, or a boolean mask"),
    "a cache's type by name": (
        lambda: PagedCache(models.load("tiny", "cpu").model.config, pool(), dtype="float32"),
        "dtype='float32': give a torch dtype",
    ),
}
ATTENTION = {
    f"{function.__name__}, {name}={value!r:.9}": (
        lambda function=function, name=name, value=value: call(function, **{name: value}),
        words,
    )
    for function in (paged_decode, paged_prefill)
    for name, value, words in (
        *((name, [1.0], f"{name} is a list; it must be a tensor") for name in ("q", "pages", "bias", "scales")),
        *((name, None, f"{name} is a NoneType; it must be a") for name in ("q", "pages", "block_table", "lengths")),
        ("lengths", [3], "lengths is a list; it must be a tensor"),
        ("scale", "x", "scale='x'; it must be a finite number"),
        ("scale", "2", "scale='2'; it must be a finite number"),
        ("scale", NAN, "scale=nan; it must be a finite number"),
        ("scale", float("-inf"), "scale=-inf; it must be a finite number"),
        ("scale", [1], r"scale=\[1\]; it must be a finite number"),
    )
}
BUFFERS = {
    "out as a list": (lambda: call(out=[1]), "out is a list; it must be a tensor"),
    "a workspace by name": (lambda: call(workspace="x"), "workspace is a str; o1lab.attention.workspace"),
    "a workspace of lists": (lambda: workspace([1], [2], [3]), "q is a list; it must be a tensor"),
    "attending to nothing": (lambda: attend(torch.zeros(1, 2, 1, 8), None), "kv a NoneType"),
    "attending with nothing": (lambda: attend(None, PagedKV(None, None, None)), "query is a NoneType"),
}
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
    **PAGES,
    **ATTENTION,
    **BUFFERS,
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


def test_a_refused_call_changes_nothing():
    mine, held = pool(), cache()
    before = held.get_seq_length(), held.batch_size, held.pool.stats()
    for refused in (lambda: mine.allocate(1, after=9999), lambda: mine.allocate(1, after="x")):
        with pytest.raises(O1labError):
            refused()
    for refused in (lambda: held.crop(-0.5), lambda: held.batch_select_indices(BOOLS), lambda: held.update(1, 2, 0)):
        with pytest.raises(O1labError):
            refused()
    assert (mine.free_pages, mine.stats().failures) == (mine.pages, 0)
    assert (held.get_seq_length(), held.batch_size, held.pool.stats()) == before


def test_whole_numbers_of_other_kinds_are_taken():
    mine, held, three = pool(), cache(), torch.tensor(3)
    assert mine.allocate(2, after=three) == [4, 5]
    assert mine.page(three).shape == (1024,)
    assert mine.generation(three) == 0
    held.crop(torch.tensor(-1))
    held.batch_select_indices(torch.tensor([True, False, True]))
    assert (held.get_seq_length(), held.batch_size) == (3, 2)
    assert held.fork(rows=torch.tensor([1]), tokens=torch.tensor(2)).get_seq_length() == 2
    assert call(scale=torch.tensor(0.5)).shape == (1, 4, 8)
