"""What the ledger's rules are applied to: errors against float64, shares of the copy rate, what attention must do."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from importlib.util import find_spec
from multiprocessing import get_context
from typing import TYPE_CHECKING, Any

from o1lab import stats
from o1lab.attention import launch
from o1lab.attention.bench import Row, rms
from o1lab.attention.checks import AttentionError
from o1lab.attention.dispatch import paged_decode
from o1lab.attention.printed import fused_qk_softmax_v
from o1lab.attention.rivals import Case, Step, sdpa, three_stages
from o1lab.attention.traffic import Workload
from o1lab.stats import Estimate

if TYPE_CHECKING:
    from torch import Tensor

Attend = Callable[..., Any]
NORMS: dict[str, Callable[[Any, Any], float]] = {
    "largest": lambda value, exact: float((value.double() - exact).abs().max()), "rms": rms,
}  # fmt: skip


def every(estimates: Iterable[Estimate], pick: Callable[[list[float]], float]) -> Estimate:
    """One estimate for a claim about all of them: ``max`` for "none is above", ``min`` for "none is below".

    Value and both ends are picked each for itself, so the whole interval lies on the good side of a bound only if all
    intervals do, and on the bad side if one does.

    Examples
    --------
    >>> print(every([Estimate(1, 0.9, 1.3, 5, "×"), Estimate(1.1, 1.0, 1.2, 9, "×")], max))
    1.1 [1, 1.3] × (n=5)
    """
    found = list(estimates)
    ends = (pick([getattr(one, end) for one in found]) for end in ("value", "low", "high"))
    return Estimate(*ends, min(one.n for one in found), found[0].unit)


def share(row: Row) -> Estimate | None:
    """Keys and values read per second in % of the copy rate of the same run; None for a body that did not run."""
    if row.rate is None:
        return None
    ends = (row.rate.value / row.copy.value, row.rate.low / row.copy.high, row.rate.high / row.copy.low)
    return Estimate(*ends, row.rate.n, "1").scaled(100, "%")


def slowdown(plain: Row, other: Row) -> Estimate:
    """Time that ``other`` takes beyond ``plain``, in % of it; an :class:`AttentionError` if one of them did not run."""
    a, b = plain.rate, other.rate
    if a is None or b is None:
        raise AttentionError(f"no time to compare: {plain.note or other.note}")
    return Estimate(a.value / b.value, a.low / b.high, a.high / b.low, min(a.n, b.n), "1").shifted(-1).scaled(100, "%")


def bodies(case: Case, bias: bool = False) -> dict[str, Step]:
    """Every body of ``paged_decode`` that runs here and, where there is no bias, the three stages."""
    given, added = case.given, case.bias if bias else None
    found: dict[str, Step] = {
        "float64, step by step": lambda: paged_decode(*given, bias=added, body="reference"),
        "gather + SDPA": lambda: paged_decode(*given, bias=added, body="gather"),
    }
    if case.q.device.type == "cuda" and not launch.missing(case.q.device):
        found["paged kernel"] = lambda: paged_decode(*given, bias=added, body="triton")
    return found if bias else found | {"three stages": lambda: three_stages(case)}


def interpreted(case: Case, bias: bool = False) -> Tensor:
    """The kernel's answer on a CPU, from Triton's interpreter in a process of its own; it multiplies in float32.

    Raises
    ------
    AttentionError
        Triton is not installed.
    """
    if find_spec("triton") is None:
        raise AttentionError("the kernel cannot be interpreted: the package triton is not installed")
    before = os.environ.get("TRITON_INTERPRET")
    os.environ["TRITON_INTERPRET"] = "1"  # read once, when triton is imported: so not in this process
    try:
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            ask = pool.submit(paged_decode, *case.given, bias=case.bias if bias else None, body="triton")
            return ask.result()
    finally:
        if before is None:
            del os.environ["TRITON_INTERPRET"]
        else:
            os.environ["TRITON_INTERPRET"] = before


def _ratio(values: Sequence[float]) -> Estimate:
    """Geometric mean with its interval."""
    found = stats.mean([math.log(value) for value in values], "1")
    return Estimate(*(math.exp(end) for end in (found.value, found.low, found.high)), found.n, "×")


def errors(
    dtype: Any, device: Any, tokens: int, *, bias: bool = False, norm: str = "largest", draws: int = 12, batch: int = 4,
    heads: tuple[int, int, int] = (32, 8, 128), seed: int = 0,
) -> dict[str, Estimate]:  # fmt: skip
    """Error of each body against float64 over that of SDPA in the same type on contiguous keys, by body.

    Parameters
    ----------
    tokens : int
        A multiple of 16, the tokens of a page.
    norm : {"largest", "rms"}
        Of an answer's differences from float64: the ledger judges the largest.
    draws : int
        Random cases; the estimate is the geometric mean of their ratios.
    heads : tuple
        Query heads, KV heads, head dimension.
    """
    import torch

    work, found = Workload(batch, tokens, 1, *heads, element_bytes=dtype.itemsize), {}
    with torch.inference_mode():
        for draw in range(draws):
            case = Case.make(work, dtype, torch.device(device), 16, seed=seed + draw)
            exact = case.exact(bias)
            base = NORMS[norm](sdpa(case, bias=bias)(), exact)
            for name, step in bodies(case, bias).items():
                found.setdefault(name, []).append(NORMS[norm](step(), exact) / base)
    return {name: _ratio(ratios) for name, ratios in found.items()}


def printed_error(dtype: Any, *, tokens: int = 64, head_dim: int = 128, draws: int = 12, seed: int = 0) -> Estimate:
    """As :func:`errors`, the largest, for the article's kernel: one head, as many queries as keys, nothing hidden."""
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    ratios = []
    for draw in range(draws):
        chance = torch.Generator().manual_seed(seed + draw)
        q, k, v = torch.randn(3, tokens, head_dim, generator=chance).to(dtype)
        exact = torch.softmax(q.double() @ k.double().T * head_dim**-0.5, -1) @ v.double()
        base = NORMS["largest"](scaled_dot_product_attention(*(one[None, None] for one in (q, k, v)))[0, 0], exact)
        ratios.append(NORMS["largest"](fused_qk_softmax_v(q, k, v), exact) / base)
    return _ratio(ratios)


def through_pages(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """:func:`o1lab.attention.paged_decode` with the signature of the printed kernel: (n, D) each, one head."""
    import torch

    pages = torch.stack([k, v])[None, :, :, None]  # one page holds all tokens
    table, lengths = (
        torch.full(shape, fill, dtype=torch.int32) for shape, fill in (((len(q), 1), 0), ((len(q),), len(k)))
    )
    return paged_decode(q[:, None], pages, table, lengths, body="gather")[:, 0]


def properties(attend: Attend, *, tokens: int = 24, head_dim: int = 16, seed: int = 0) -> dict[str, bool]:
    """Whether ``attend(q, k, v)``, shapes (n, D), does in float64 what every softmax attention does.

    Examples
    --------
    >>> all(properties(through_pages).values()), any(properties(fused_qk_softmax_v).values())
    (True, False)
    """
    import torch

    chance = torch.Generator().manual_seed(seed)
    q, k, v = torch.randn(3, tokens, head_dim, generator=chance, dtype=torch.float64)
    out, order, others = attend(q, k, v), torch.randperm(tokens, generator=chance), v.clone()
    others[1:] += 1
    return {
        "queries of zero give the mean of the values": torch.allclose(attend(0 * q, k, v), v.mean(0).expand_as(v)),
        "twice the values give twice the output": torch.allclose(attend(q, k, 2 * v), 2 * out),
        "tokens in another order give the same": torch.allclose(attend(q, k[order], v[order]), out),
        "the values of other tokens matter": not torch.allclose(attend(q, k, others)[0], out[0]),
    }
