"""Decode steps of whole models, paged and not: ``python -m o1lab.kv.decode_bench [--device cuda]``.

Every arm gets the same random keys and values as context and then decodes greedily. After every 256 steps it is set
back to where it began, so that all work at the same lengths and a static cache is hardly longer than its content.
Quantiles are of steps that are waited for, from the call until the device is done. Tokens/s and the roofline share are
of 256 steps in a row without a wait (the median of three), as a server that looks at its tokens later runs them. The
share is the time that a plain copy takes for a step's bytes (weights, and keys and values at the mean length, once
each), as a part of such a step.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import asdict, dataclass
from typing import Any

import torch

from o1lab.attention.bench import copy_rate
from o1lab.errors import EstimateError, O1labError
from o1lab.kv.compiled import joined
from o1lab.kv.decode_loop import DecodeLoop
from o1lab.kv.latency import quantile
from o1lab.kv.layout import Heads, pool_for
from o1lab.kv.paged_cache import PagedCache
from o1lab.options import device, ended, new_file, seconds, settings, whole
from o1lab.stats import Estimate

ARMS = (
    "kernels + graph", "kernels in turn + graph", "fused tuned + graph", "fused + graph", "compiled + graph",
    "paged + graph", "paged", "dynamic", "static", "static compiled",
)  # fmt: skip
CPU_ARMS = ("paged", "dynamic", "static")
"""``compiled``: the paged step as one compiled graph; ``fused``: with joined projections too; ``tuned``: and with
kernels that the compiler chose by measuring them, which takes minutes. ``kernels``: our own for all of the step
(:mod:`o1lab.kv.kernel_step`); ``in turn``: each begins when the one before has ended."""
TUNED = {
    "max_autotune_gemm": True, "max_autotune_gemm_backends": "ATEN,TRITON", "max_autotune_pointwise": True,
    "coordinate_descent_tuning": True,
}  # fmt: skip
SIZES = {"llama": (2048, 16, 32, 8, 64, 8192, 32000), "tiny": (64, 2, 4, 2, 16, 128, 256)}
"""Random Llamas: hidden size, layers, query heads, KV heads, head dimension, MLP, vocabulary."""
WARM, SPAN = 5, 256
"""Steps before the clock runs, and steps between two settings back."""
TURN = 64
"""Steps of an arm before another one has its turn."""


@dataclass(frozen=True)
class Row:
    """One arm: ``rate`` in tokens/s of all sequences, quantiles of a step in ms, ``share`` of the copy rate."""

    model: str
    batch: int
    arm: str
    steps: int
    rate: float
    share: float
    quantiles: dict[str, Estimate | None]
    note: str = ""

    def __str__(self) -> str:
        times = "".join(f"{one.value:>9.3f}" if one else f"{'–':>9}" for one in self.quantiles.values())
        start = f"{self.model:<8}{self.batch:>6}  {self.arm:<20}"
        return (
            f"{start}{self.steps:>7}{self.rate:>10,.1f}{times}{self.share:>9.1%}" if self.steps else start + self.note
        )


HEADER = "model    batch  arm                   steps  tokens/s   P50 ms      P99    P99.9 roofline"


def load(name: str, device: str, dtype: torch.dtype) -> Any:
    """A model by name: one of :data:`SIZES` with random weights, else whatever ``o1lab.models.load`` knows."""
    if name not in SIZES:
        from o1lab.models import load as named

        return named(name, device, dtype).model
    from transformers import LlamaConfig, LlamaForCausalLM

    hidden, layers, heads, kv_heads, head_dim, mlp, words = SIZES[name]
    config = LlamaConfig(
        hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=kv_heads,
        head_dim=head_dim, intermediate_size=mlp, vocab_size=words, max_position_embeddings=32768,
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device(device):
        return LlamaForCausalLM(config).to(dtype).eval()


def step_of(arm: str, model: Any, batch: int, context: int) -> tuple[Callable[[], Any], Callable[[int], Any]]:
    """Decoding one token of ``batch`` sequences behind ``context`` random keys, and forgetting so many tokens again."""
    from transformers import DynamicCache, StaticCache

    config, device, dtype, most = model.config, model.device, model.dtype, context + WARM + SPAN
    first = torch.ones(batch, 1, dtype=torch.long, device=device)
    paged = arm.startswith(("kernels", "fused", "compiled", "paged"))
    if paged:
        tokens = batch * (most + 256)
        cache: Any = PagedCache(config, pool_for(config, tokens, device=device, dtype=dtype), max_tokens=most)
    else:
        cache = StaticCache(config, max_cache_len=most) if arm.startswith("static") else DynamicCache(config=config)
    heads, chance = Heads.of(config, most), torch.Generator(device).manual_seed(0)
    for layer in range(heads.layers):
        shape = (2, batch, heads.kv_heads, context, heads.head_dim)
        cache.update(*torch.randn(shape, generator=chance, device=device, dtype=dtype), layer)
    if paged:
        compiled = arm.startswith(("fused", "compiled")) and ({"options": TUNED} if "tuned" in arm else True)
        how: dict[str, Any] = {"graph": arm.endswith("graph") and device.type == "cuda", "compiled": compiled}
        if arm.startswith("kernels"):
            how["kernels"] = {"overlap": False} if "in turn" in arm else True
        loop = DecodeLoop(model, cache, **how)
        loop.resume(first[:, 0])
        return loop.step, lambda count: cache.crop(-count)
    model.set_attn_implementation("sdpa")
    forward = model.forward
    if arm.endswith("compiled"):
        torch.compiler.reset()
        forward = torch.compile(forward, mode="reduce-overhead")
    place = torch.full((batch, 1), context, device=device)
    given = {DecodeLoop.cache_name(model): cache, "use_cache": True, "logits_to_keep": 1}

    def step() -> None:
        first.copy_(forward(input_ids=first, position_ids=place, **given).logits[:, -1].argmax(-1, keepdim=True))
        place.add_(1)

    def back(count: int) -> None:
        place.sub_(count)
        if not arm.startswith("static"):
            cache.crop(-count)
        for layer in cache.layers if arm.startswith("static") else ():  # older transformers cannot crop one
            layer.cumulative_length.sub_(count)

    return step, back


def measure(name: str, model: Any, arm: str, batch: int, context: int, steps: int, seconds: float, copy: float) -> Row:
    """Time up to ``steps`` steps of one arm within ``seconds``; an arm that fails says why in its note."""
    if "graph" in arm and model.device.type != "cuda":
        return Row(name, batch, arm, 0, 0.0, 0.0, {}, "needs a CUDA device")
    try:
        with _projections(arm, model):
            taken, mean = _timed(model, *step_of(arm, model, batch, context), steps, seconds)
    except (O1labError, RuntimeError) as error:
        return Row(name, batch, arm, 0, 0.0, 0.0, {}, f"failed: {str(error).splitlines()[0][:80]}")
    heads = Heads.of(model.config, context)
    weights = {id(one): one.nbytes for one in model.parameters()}
    if not model.config.tie_word_embeddings:
        del weights[id(model.get_input_embeddings().weight)]  # read by row
    stored = batch * heads.layers * heads.token_bytes(model.dtype) * (context + WARM + min(len(taken), SPAN) / 2)
    share = (sum(weights.values()) + stored) / copy / (mean / 1e3)
    found = {label: _quantile(taken, q) for label, q in (("p50", 0.5), ("p99", 0.99), ("p99.9", 0.999))}
    return Row(name, batch, arm, len(taken), 1e3 * batch / mean, share, found)


@torch.no_grad()
def _timed(
    model: Any, step: Callable[[], Any], back: Callable[[int], Any], steps: int, seconds: float
) -> tuple[list[float], float]:  # fmt: skip
    """Milliseconds of each step that was waited for, and the mean step of a span in which nothing waited."""
    wait = torch.cuda.synchronize if model.device.type == "cuda" else lambda: None
    taken: list[float] = []
    for _ in range(WARM):
        step()
    wait()
    end = time.perf_counter() + seconds
    while len(taken) < steps and (not taken or time.perf_counter() < end):
        taken.append(_clocked(step, wait))
        if len(taken) % SPAN == 0:
            back(SPAN)
    if len(taken) % SPAN:
        back(len(taken) % SPAN)
    span, means = min(len(taken), SPAN), []
    for _ in range(3):
        means.append(_clocked(step, wait, span) / span)
        back(span)
    return taken, sorted(means)[1]


@torch.no_grad()
def interleaved(
    steps: Mapping[str, int], *, size: str = "llama", batch: int = 16, context: int = 4096, device: str = "cuda",
    seed: int = 0,
) -> dict[str, list[float]]:  # fmt: skip
    """Times in ms of so many decode steps by arm, taken in turns of 64 in random order and at the same lengths.

    Each arm has a model of its own with the same weights. After each turn the arm is set back; its first step, in which
    it comes back to caches that the others have used, is not timed.
    """
    dtype = torch.bfloat16 if device.startswith("cuda") else torch.float32
    wait = torch.cuda.synchronize if device.startswith("cuda") else lambda: None
    taken: dict[str, list[float]] = {arm: [] for arm in steps}
    turns = [arm for arm, count in steps.items() for _ in range(-(-count // TURN))]
    random.Random(f"interleaved {seed}").shuffle(turns)
    with ExitStack() as stack:
        made = {}
        for arm in steps:
            model = load(size, device, dtype)
            stack.enter_context(_projections(arm, model))
            made[arm] = step_of(arm, model, batch, context)
        for step, _ in made.values():
            for _ in range(WARM):
                step()
        for arm in turns:
            step, back = made[arm]
            step()
            wait()
            for _ in range(TURN):
                taken[arm].append(_clocked(step, wait))
            back(TURN + 1)
    return taken


def _projections(arm: str, model: Any) -> AbstractContextManager[Any]:
    """Joined ones, if the arm has them."""
    return joined(model) if arm.startswith("fused") else nullcontext()


def _clocked(step: Callable[[], Any], wait: Callable[[], Any], times: int = 1) -> float:
    """Milliseconds of ``times`` steps in a row, until the device is done."""
    begin = time.perf_counter()
    for _ in range(times):
        step()
    wait()
    return 1e3 * (time.perf_counter() - begin)


def _quantile(values: list[float], q: float) -> Estimate | None:
    try:
        return quantile(values, q, "ms")
    except EstimateError:  # too few steps
        return None


@ended
def main(argv: Sequence[str] | None = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="o1lab.kv.decode_bench", description=__doc__.splitlines()[0])
    parser.add_argument("--device", type=device, default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--models", nargs="+", help=f"{', '.join(SIZES)}, or a name for o1lab.models.load")
    parser.add_argument("--arms", nargs="+", choices=ARMS, help="by default all; on a CPU without graph and compiler")
    parser.add_argument("--batch", nargs="+", type=whole(1), help="sequences (1 32; 1 2 on a CPU)")
    parser.add_argument("--context", type=whole(1), help="tokens before the first step (4096; 64 on a CPU)")
    parser.add_argument("--steps", type=whole(1), help="most steps of an arm (4000; 50 on a CPU)")
    parser.add_argument("--seconds-per-arm", type=seconds, default=30.0, help="most seconds of an arm (30)")
    parser.add_argument("--tuned", type=settings, help="compiler options of the tuned arm, as JSON, in place of ours")
    parser.add_argument("--json", type=new_file, help="also write the figures into this file")
    options = parser.parse_args(argv)
    if options.tuned is not None:
        TUNED.clear()
        TUNED.update(options.tuned)
    cuda = options.device.startswith("cuda")
    dtype = torch.bfloat16 if cuda else torch.float32
    steps = options.steps or (4000 if cuda else 50)
    copy = copy_rate(torch.device(options.device), (1 << 30) if cuda else (16 << 20), 2.0 if cuda else 0.3)
    print(f"copy rate {copy.value / 1e9:,.0f} GB/s on {options.device}, {dtype}", HEADER, sep="\n")
    rows = []
    for name in options.models or (["smollm2", "llama"] if cuda else ["tiny"]):
        try:
            model = load(name, options.device, dtype)
        except O1labError as error:
            print(f"{name}: {error}", file=sys.stderr)
            continue
        for batch in options.batch or ([1, 32] if cuda else [1, 2]):
            for arm in options.arms or (ARMS if cuda else CPU_ARMS):
                context = options.context or (4096 if cuda else 64)
                rows.append(measure(name, model, arm, batch, context, steps, options.seconds_per_arm, copy.value))
                print(rows[-1], flush=True)
                gc.collect()
                if cuda:
                    torch.cuda.empty_cache()
    if options.json:
        options.json.write_text(json.dumps({"copy": asdict(copy), "rows": list(map(asdict, rows))}, indent=1), "utf-8")
    return 0 if rows and any(row.steps for row in rows) else 2


if __name__ == "__main__":
    sys.exit(main())
