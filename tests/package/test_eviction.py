"""Eviction and write-back: only what the policy allows goes, nothing goes unverified, nothing is lost."""

from __future__ import annotations

import random
import threading
import time

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from o1lab.kv.checksum import checksums, keys
from o1lab.kv.eviction import DamagedCopy, EvictingPool, EvictionRefused
from o1lab.kv.lane import CopyFailed, Lane, host_pool, runs
from o1lab.kv.pool import ForeignPage, PagePool, PoolError, PoolExhausted
from o1lab.kv.ranking import ACTIVE, SHIELDED, Entry, Policy, Ranking, State

pytestmark = pytest.mark.usefixtures("one_thread")

PAGE = 256


class Clock:
    """A clock that stands still until it is told to go on."""

    now = 0.0

    def __call__(self):
        return self.now


def tiers_of(pages=8, host_pages=32, *, device="cpu", lane=None, back=None, clock=None, **policy):
    pool = PagePool(pages * PAGE, device=device, page_bytes=PAGE, chunk_bytes=8 * PAGE)
    host = host_pool(pool, host_pages * PAGE)
    policy = Policy(**policy)
    lane = lane and Lane(pool, host, copy=lane, verify=policy.verify != "none")
    back = back and Lane(pool, host, copy=back, verify=policy.verify == "full")
    return EvictingPool(pool, host, policy, clock=clock or Clock(), lane=lane, back=back)


def fill(tiers, owner, n, group=1, rest=True):
    """An owner with ``n`` random pages in sealed groups, idle; returns their content."""
    pages = []
    for _ in range(n // group):
        new = tiers.allocate(group, owner)
        for page in new:
            tiers.pool.page(page).copy_(torch.randint(0, 256, (PAGE,), dtype=torch.uint8))
        tiers.seal(new, owner)
        pages += new
    content = [tiers.pool.page(page).clone() for page in pages]
    if rest:
        tiers.rest(owner)
    return content


def same(tiers, owner, content):
    pages = tiers.restore(owner)
    tiers.rest(owner)
    return len(pages) == len(content) and all(
        torch.equal(tiers.pool.page(page), one) for page, one in zip(pages, content, strict=True)
    )
