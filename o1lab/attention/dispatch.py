"""The doors: which body answers a call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from o1lab.attention import flex, launch, reference, splits
from o1lab.attention.bias import PositionBias
from o1lab.attention.checks import AttentionError, Problem, contents, factor, problem, tensors
from o1lab.attention.splits import Workspace

if TYPE_CHECKING:
    from torch import Tensor

DECODE = ("auto", "triton", "gather", "reference")
PREFILL = ("auto", "flex", "flex-eager", "gather", "reference")


def workspace(q: Tensor, pages: Tensor, block_table: Tensor, *, splits: int | None = None) -> Workspace:
    """Buffers for calls of :func:`paged_decode` with these shapes, to be made once and passed each time.

    Only shapes are used. ``splits`` overrides the number that the device's multiprocessors and the table's capacity
    suggest.
    """
    from o1lab.attention.splits import choose, multiprocessors

    tensors(q=q, pages=pages, block_table=block_table)
    count, _, tokens, kv_heads, head_dim = pages.shape
    sizes = Problem(q.shape[0], 1, q.shape[1], kv_heads, head_dim, tokens, count, block_table.shape[1])
    if splits is None:
        splits = choose(sizes, pages.element_size(), q.element_size(), multiprocessors(q.device))
    return Workspace.make(sizes, splits, q.device)


def paged_decode(
    q: Tensor, pages: Tensor, block_table: Tensor, lengths: Tensor, *, scale: float | None = None,
    bias: Tensor | None = None, scales: Tensor | None = None, body: str = "auto", out: Tensor | None = None,
    workspace: Workspace | None = None, fused: bool = False, check: bool | None = None, overlap: bool = False,
) -> Tensor:  # fmt: skip
    """Attention of one new token per sequence over keys and values in pages. For inference: the kernel has no gradient.

    Parameters
    ----------
    q : Tensor, shape (B, Hq, D)
        Queries: float32, bfloat16 or float16 (float64 too, but not in the kernel).
    pages : Tensor, shape (P, 2, T, Hkv, D)
        T tokens a page, keys at ``[:, 0]``, values at ``[:, 1]``; q's type, or int8 with ``scales``. Hq is a multiple
        of Hkv. Any strides, so long as D is contiguous.
    block_table : Tensor, shape (B, max_pages), int32
        Page numbers of each sequence in order. Entries past a sequence's last page are never read, nor are slots past
        its last token: they may hold anything, NaN too.
    lengths : Tensor, shape (B,), int32
        Tokens of each sequence; the query is the last of them. 0 gives zeros.
    scale : float, optional
        Factor of the scores; ``D ** -0.5`` by default.
    bias : Tensor, shape (B, n), fp32, optional
        Added to the scores after the scale, the same for all heads; n is at least ``max_pages · T``. −inf hides a
        token; if all are hidden the result is zeros.
    scales : Tensor, shape (P, 2, T, Hkv) or (P, 2, 1, Hkv), optional
        For int8 pages, see :func:`o1lab.attention.quantise`; multiplied in the kernel, nothing is unpacked in memory.
    body : {"auto", "triton", "gather", "reference"}
        ``auto`` takes the Triton kernel on CUDA where it takes the sizes, else gather + SDPA. ``reference`` computes in
        float64.
    out, workspace : optional
        Buffers to use in place of new ones; see :func:`o1lab.attention.workspace`. With both, a call of the kernel
        allocates nothing. Without, it allocates by shape only: every call is fit for a CUDA graph.
    fused : bool
        Merge the splits in the kernel's last program in place of a second launch.
    check : bool, optional
        Whether to look at lengths and page numbers. By default on a CPU only: on a GPU it waits for the stream.
        Without it, a wrong number reads memory that is not the pool's. A table of another pool cannot be told.
    overlap : bool
        Launch the kernel while the one before it still runs; on compute capability 9.0 and newer.

    Returns
    -------
    Tensor, shape (B, Hq, D), q's type

    Raises
    ------
    AttentionError
        A shape, type, device, length or page number that does not fit, or a body that cannot run here.

    Examples
    --------
    >>> import torch
    >>> pages = torch.zeros(4, 2, 16, 2, 8)
    >>> pages[3, 1] = 1.0
    >>> table = torch.tensor([[3, 0]], dtype=torch.int32)
    >>> paged_decode(torch.zeros(1, 4, 8), pages, table, torch.tensor([5], dtype=torch.int32)).mean().item()
    1.0
    """
    if bias is not None and isinstance(bias, PositionBias):
        raise AttentionError("decode takes the bias as a vector: pass bias=position_bias.vector(lengths)")
    sizes = problem(q, pages, block_table, lengths, bias, scales)
    if check or (check is None and q.device.type == "cpu"):
        contents(sizes, block_table, lengths)
    if out is not None:
        tensors(out=out)
    if workspace is not None and not isinstance(workspace, Workspace):
        raise AttentionError(f"workspace is a {type(workspace).__name__}; o1lab.attention.workspace(…) makes one")
    if out is not None and (out.shape != q.shape or out.dtype != q.dtype or out.device != q.device):
        raise AttentionError(
            f"out is {tuple(out.shape)} {out.dtype} on {out.device}; "
            f"it must be {tuple(q.shape)} {q.dtype} on {q.device}"
        )
    scale = factor(scale, sizes)
    chosen = _choose(body, DECODE, q, sizes, pages, block_table, lengths, bias)
    if chosen != "triton":
        given = (q[:, :, None], pages, block_table, lengths, sizes, scale, bias, scales)
        answer = (reference.exact if chosen == "reference" else reference.gathered)(*given)[:, :, 0].to(q.dtype)
        return answer if out is None else out.copy_(answer)
    if workspace is None:
        number = splits.choose(sizes, pages.element_size(), q.element_size(), splits.multiprocessors(q.device))
        workspace = Workspace.make(sizes, number, q.device)
    workspace.check(sizes, q.device)
    answer = q.new_empty(q.shape) if out is None else out
    if not answer.is_contiguous():
        raise AttentionError(f"out must be contiguous; its strides are {out.stride()}")
    launch.decode(q, pages, block_table, lengths, sizes, scale, bias, scales, answer, workspace, fused=fused,
                  overlap=overlap)  # fmt: skip
    return answer


def _choose(
    body: str, known: tuple[str, ...], q: Tensor, sizes: Problem, pages: Tensor, *others: Tensor | None
) -> str:  # fmt: skip
    if body not in known:
        raise AttentionError(f"body={body!r} is unknown; choose from {', '.join(known)}")
    if body in ("gather", "reference"):
        return body
    if "triton" in known:
        fast, why = "triton", splits.unsupported(sizes, q, pages)
        if not why and any(other is not None and other.stride(-1) != 1 and other.shape[-1] > 1 for other in others):
            why = "block_table, lengths and bias must be contiguous in their last dimension"
        here = q.device.type == "cuda" and not launch.missing(q.device)
    else:
        fast, why, here = "flex", flex.unsupported(sizes, pages), q.device.type == "cuda"
    if body == "auto":
        return fast if here and not why else "gather"
    if why:
        raise AttentionError(f"body={body!r} does not take this call: {why}; body='gather' does")
    return body


def paged_prefill(
    q: Tensor, pages: Tensor, block_table: Tensor, lengths: Tensor, *, scale: float | None = None,
    bias: Tensor | PositionBias | None = None, scales: Tensor | None = None, body: str = "auto",
    check: bool | None = None,
) -> Tensor:  # fmt: skip
    """Causal attention of each sequence's last S tokens over its pages, which already hold those tokens.

    Parameters
    ----------
    q : Tensor, shape (B, Hq, S, D)
        Query i of sequence b stands at ``lengths[b] − S + i``; before the sequence's start (a shorter prompt, padded on
        the left) the result is zeros.
    bias : Tensor of shape (B, n) or PositionBias, optional
        A vector is added for every query alike; a :class:`PositionBias` by distance.
    body : {"auto", "flex", "flex-eager", "gather", "reference"}
        ``auto`` takes compiled FlexAttention on CUDA where it takes the pages, else gather + SDPA. The flex bodies zero
        what is not finite behind the last token of each sequence's last page (see :mod:`o1lab.attention.flex`).

    Other parameters, errors and the result (B, Hq, S, D) as in :func:`paged_decode`.

    Examples
    --------
    >>> import torch
    >>> pages = torch.zeros(2, 2, 16, 1, 8)
    >>> pages[1, 1, 0] = 1.0   # the value of the first token
    >>> table, lengths = torch.tensor([[1]], dtype=torch.int32), torch.tensor([2], dtype=torch.int32)
    >>> paged_prefill(torch.zeros(1, 1, 2, 8), pages, table, lengths)[0, 0, :, 0].tolist()
    [1.0, 0.5]
    """
    vector = bias.weights if isinstance(bias, PositionBias) else bias
    sizes = problem(q, pages, block_table, lengths, vector, scales, prefill=True)
    if check or (check is None and q.device.type == "cpu"):
        contents(sizes, block_table, lengths)
    scale = factor(scale, sizes)
    chosen = _choose(body, PREFILL, q, sizes, pages)
    if chosen.startswith("flex"):
        return flex.prefill(q, pages, block_table, lengths, sizes, scale, bias, compile=chosen == "flex")
    answer = reference.exact if chosen == "reference" else reference.gathered
    return answer(q, pages, block_table, lengths, sizes, scale, bias, scales).to(q.dtype)


@dataclass(frozen=True)
class PagedKV:
    """One layer's keys and values of a batch, as a cache hands them to attention; fields as in :func:`paged_decode`."""

    pages: Tensor
    block_table: Tensor
    lengths: Tensor
    scales: Tensor | None = None
    workspace: Workspace | None = None


def attend(
    query: Tensor, kv: PagedKV, *, scale: float | None = None, bias: Tensor | PositionBias | None = None,
    body: str = "auto", check: bool | None = None,
) -> Tensor:  # fmt: skip
    """What a transformers ``AttentionInterface`` function needs: query (B, Hq, S, D) → (B, S, Hq, D).

    One query per sequence is decode, several are prefill.

    Examples
    --------
    >>> import torch
    >>> kv = PagedKV(torch.zeros(1, 2, 16, 1, 8), *(torch.tensor(x, dtype=torch.int32) for x in ([[0]], [3])))
    >>> tuple(attend(torch.zeros(1, 2, 1, 8), kv).shape)
    (1, 1, 2, 8)
    """
    if not isinstance(kv, PagedKV) or len(getattr(query, "shape", ())) != 4:
        raise AttentionError(
            f"query is a {type(query).__name__}, kv a {type(kv).__name__}; need a tensor (B, Hq, S, D), a PagedKV"
        )
    common = (kv.pages, kv.block_table, kv.lengths)
    if query.shape[2] == 1:
        vector = bias.vector(kv.lengths) if isinstance(bias, PositionBias) else bias
        decoded = paged_decode(
            query[:, :, 0], *common, scale=scale, bias=vector, scales=kv.scales, body=body, workspace=kv.workspace,
            check=check,
        )  # fmt: skip
        return decoded[:, None]
    answer = paged_prefill(query, *common, scale=scale, bias=bias, scales=kv.scales, body=body, check=check)
    return answer.transpose(1, 2).contiguous()
