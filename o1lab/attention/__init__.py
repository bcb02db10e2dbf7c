"""Attention over a paged KV cache: one function with three bodies for decode, one with two for prefill.

``paged_decode`` and ``paged_prefill`` choose the body by device and shape; ``body=`` names one. All give the answer of
the float64 body within the error of SDPA in the same type.
"""

from __future__ import annotations

from o1lab.attention.bias import PositionBias, chain_weights, step_weights
from o1lab.attention.checks import AttentionError
from o1lab.attention.dispatch import PagedKV, attend, paged_decode, paged_prefill, workspace
from o1lab.attention.pages import quantise
from o1lab.attention.splits import Workspace

__all__ = [
    "AttentionError",
    "PagedKV",
    "PositionBias",
    "Workspace",
    "attend",
    "chain_weights",
    "paged_decode",
    "paged_prefill",
    "quantise",
    "step_weights",
    "workspace",
]
