"""Growth around torch itself, on the host: hooks, autograd history, views, traces, recompiles, profilers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from o1lab.memory.catalogue import Step, case
from o1lab.memory.catalogue.python_objects import KIB, KV_BYTES, activation

FAQ = "https://docs.pytorch.org/docs/stable/notes/faq.html#my-model-reports-cuda-runtime-error-2-out-of-memory"


@case("https://github.com/pytorch/opacus/issues/176", "per-call leak", bytes_per_request=KV_BYTES, owner="seen")
def hook_keeps_outputs(leak: bool) -> Iterator[Step]:
    """A forward hook appends each output, under ``no_grad`` too. Cure: keep a number, or the newest only."""
    import torch

    layer, seen, x = torch.nn.Linear(4, 1024), [], torch.ones(8, 4)

    def hook(module: Any, args: Any, out: Any) -> None:
        seen.append(out.detach())
        if not leak:
            del seen[:-1]

    handle = layer.register_forward_hook(hook)
    with torch.inference_mode():
        yield lambda number: layer(x)
    handle.remove()


@case(
    "https://github.com/pytorch/pytorch/issues/46386", "per-call leak", bytes_per_request=KV_BYTES, owner="hook"
)  # fmt: skip
def hooks_never_removed(leak: bool) -> Iterator[Step]:
    """A hook is registered per request and holds what its closure holds. Cure: ``handle.remove()``."""
    import torch

    layer = torch.nn.Identity()

    def step(number: int) -> None:
        hidden = activation()
        handle = layer.register_forward_hook(lambda module, args, out: hidden.shape and None)
        if not leak:
            handle.remove()

    yield step


@case(FAQ, "per-call leak", bytes_per_request=256 * KIB, owner="losses", requests_per_round=8)
def history_kept(leak: bool) -> Iterator[Step]:
    """A kept loss keeps its graph, so every tensor saved for backward. Cure: ``loss.item()`` or ``inference_mode``."""
    import torch

    weight, losses = torch.nn.Parameter(torch.ones(1024)), []

    def step(number: int) -> None:
        hidden = activation(32) * weight  # saves activation(32)
        loss = (hidden * hidden).sum()  # saves hidden
        losses.append(loss if leak else loss.item())
        if not leak:
            losses.clear()

    yield step


@case(FAQ, "per-call leak", bytes_per_request=128 * KIB, owner="meter|total", requests_per_round=8)
def total_plus_loss(leak: bool) -> Iterator[Step]:
    """``total += loss`` makes one graph of all requests. Cure: ``total += loss.detach()``."""
    import torch

    weight, meter = torch.nn.Parameter(torch.ones(1024)), {"total": torch.zeros(())}

    def step(number: int) -> None:
        loss = (activation(32) * weight).sum()  # saves activation(32)
        meter["total"] = meter["total"] + (loss if leak else loss.detach())

    yield step


@case(
    "https://docs.pytorch.org/docs/stable/tensor_view.html", "per-call leak", bytes_per_request=KV_BYTES, owner="kept"
)
def view_of_logits(leak: bool) -> Iterator[Step]:
    """``logits[-1, :1]`` looks like 4 bytes and keeps the whole storage. Cure: ``.clone()``, or a Python number."""
    kept: list[Any] = []

    def step(number: int) -> None:
        logits = activation()
        kept.append(logits[-1, :1] if leak else logits[-1, :1].item())
        if not leak:
            kept.clear()

    yield step


@case(
    "https://github.com/pytorch/pytorch/issues/48049",
    "per-call leak",
    bytes_per_request=192 * KIB,
    note="the cast's 64 KiB, and by its autograd history the parameter's 128 KiB; freed when the outermost one ends",
)
def autocast_cache(leak: bool) -> Iterator[Step]:
    """Autocast keeps the cast of each parameter until it ends; fresh adapters add up. Cure: ``cache_enabled=False``."""
    import torch

    x = torch.ones(1, 128)

    def step(number: int) -> None:
        adapter = torch.nn.Parameter(torch.ones(256, 128))  # 128 KiB; its bfloat16 cast has 64 KiB
        torch.nn.functional.linear(x, adapter)

    with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=leak):
        yield step


@case(
    "https://github.com/pytorch/pytorch/issues/86537",
    "per-call leak",
    bytes_per_request=1024 * KIB,
    requests_per_round=2,
    rounds=8,
    warm_up=3,
    note="the graphs stay in TorchScript's compilation unit (some 10 KiB each); the constants' bytes are given back",
)
def jit_trace(leak: bool) -> Iterator[Step]:
    """TorchScript's compilation unit keeps every trace and its constants for good. Cure: trace once, or don't."""
    import torch

    constants: list[int] = []  # weak references: the owner under study is the compilation unit alone

    def step(number: int) -> None:
        table = torch.ones(256, 1024)
        if leak:
            constants.append(table.untyped_storage()._weak_ref())
            torch.jit.trace(lambda x: x + table, (torch.ones(1),), check_trace=False)

    yield step
    for reference in constants:
        storage = torch.UntypedStorage._new_with_weak_ptr(reference)
        if storage is not None:
            storage.resize_(0)
        torch.UntypedStorage._free_weak_ref(reference)


@case(
    "https://github.com/pytorch/pytorch/pull/51648",
    "per-call leak",
    owner="eval_cache|_loader|linecache",
    requests_per_round=8,
)
def fx_sources(leak: bool) -> Iterator[Step]:
    """torch.fx keeps the source of every ``GraphModule`` ever made, for tracebacks. Cure: trace once per model."""
    import torch
    from torch.fx import graph_module

    model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(4)))
    known = set(graph_module._loader.eval_cache)
    traced = torch.fx.symbolic_trace(model)

    def step(number: int) -> None:
        (torch.fx.symbolic_trace(model) if leak else traced)(torch.ones(1, 4))

    yield step
    import linecache

    for key in set(graph_module._loader.eval_cache) - known:
        del graph_module._loader.eval_cache[key]
        linecache.cache.pop(key, None)


@case(
    "https://github.com/pytorch/pytorch/issues/128424",
    "keyed growth",
    owner="dynamo|double",
    requests_per_round=8,
    rounds=8,
    note="about 0.1 MB per shape with the eager backend, over 1 MB with Inductor",
)
def dynamo_recompiles(leak: bool) -> Iterator[Step]:
    """With a high ``recompile_limit`` each new length is a new graph on the host. Cure: bucket the lengths."""
    import torch
    import torch._dynamo.config as config

    def double(x: Any) -> Any:
        return x * 2

    with config.patch(recompile_limit=1000, accumulated_recompile_limit=1000):
        compiled = torch.compile(double, backend="eager", dynamic=False)
        yield lambda number: compiled(torch.ones(2 + (number if leak else number % 4)))
    torch._dynamo.reset()


@case(
    "https://github.com/Lightning-AI/pytorch-lightning/issues/10717",
    "per-call leak",
    note="growth by whole blocks of the profiler's own lists, so a round has to be long",
    requests_per_round=64,
)
def profiler_left_on(leak: bool) -> Iterator[Step]:
    """A profiler that nobody stops keeps an event per operator. Cure: a ``schedule``, or stop it."""
    import torch

    x = torch.ones(8)
    profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
    profiler.start()
    if not leak:
        profiler.stop()

    def step(number: int) -> None:
        for _ in range(8):
            x.add(1)

    yield step
    if leak:
        profiler.stop()


@case(
    "https://github.com/huggingface/transformers/pull/47731",
    "per-call leak",
    bytes_per_request=128 * KIB,
    owner="conversations",
    note="the tiny Llama: 2 layers × (keys, values) × 2 heads × 16 wide × 256 tokens × 4 bytes = 128 KiB",
    requests_per_round=8,
)
def kept_past_key_values(leak: bool) -> Iterator[Step]:
    """``past_key_values`` of finished conversations are kept. Cure: drop them, or bound how many are kept."""
    import torch

    from o1lab import models

    model, conversations = models.load("tiny", "cpu").model, []
    ids = torch.ones(1, 256, dtype=torch.long)

    def step(number: int) -> None:
        with torch.inference_mode():
            conversations.append(model(ids, use_cache=True).past_key_values)
        if not leak:
            conversations.clear()

    yield step


@case("https://github.com/pytorch/pytorch/issues/149834", "none", group="fixed", requests_per_round=4)
def disabled_inside_compiled(leak: bool) -> Iterator[Step]:
    """A disabled function inside a compiled one recompiled on every call in torch 2.6 and pinned its closure."""
    import torch

    inner = torch.compiler.disable(torch.nn.Linear(64, 64))
    compiled = torch.compile(lambda x: inner(x) * 2, backend="eager")
    x = torch.ones(1, 64)
    with torch.no_grad():
        yield lambda number: compiled(x)
    torch._dynamo.reset()


@case(
    "https://github.com/pytorch/pytorch/issues/119607",
    "per-call leak",
    owner="cached_backends",
    requests_per_round=8,
    note="the reports' pinned weights (also #122969, #129901) are freed today; a wrapper of 272 B is left on 2.13",
)
def compile_per_request(leak: bool) -> Iterator[Step]:
    """``torch.compile`` in the request: Dynamo keeps each call's backend wrapper for good. Cure: compile once."""
    import torch

    model = torch.nn.Linear(64, 64)
    once, x = torch.compile(model, backend="eager"), torch.ones(1, 64)

    def step(number: int) -> None:
        with torch.no_grad():
            (torch.compile(torch.nn.Linear(64, 64), backend="eager") if leak else once)(x)

    yield step
    torch._dynamo.reset()


@case("https://github.com/pytorch/pytorch/issues/174468", "none", group="fixed", requests_per_round=64)
def compiled_call(leak: bool) -> Iterator[Step]:
    """Each call of a compiled function leaked on the host in torch 2.9, at a constant shape."""
    import torch

    compiled, x = torch.compile(lambda x: x + 1, backend="eager"), torch.ones(8)
    yield lambda number: compiled(x)
    torch._dynamo.reset()


@case("https://github.com/huggingface/transformers/pull/30536", "none", group="fixed")
def kv_by_cat(leak: bool) -> Iterator[Step]:
    """KV grown by ``torch.cat`` needs twice its size at the peak: a peak, not a leak."""
    import torch

    def step(number: int) -> None:
        keys = torch.ones(1, 64)
        for _ in range(16):
            keys = torch.cat([keys, torch.ones(1, 64)])

    yield step
