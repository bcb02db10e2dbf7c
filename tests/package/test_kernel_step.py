"""The decode step of kernels: products and rotation in Triton's interpreter, and the whole step against the plain."""

from __future__ import annotations

import copy
import itertools
import types

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from package.attention_fixture import interpreter
from package.paged_fixture import SMALL, model_of, pool_of, prompts
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

from o1lab.attention.checks import AttentionError
from o1lab.attention.resources import compiled
from o1lab.errors import CacheError
from o1lab.kv import DecodeLoop, PagedCache, joined, kernel_step
from o1lab.kv.products import Cuts, Scratch, arguments, cuts, product, rotate

LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip


def llama(**changes):
    torch.manual_seed(1)
    return LlamaForCausalLM(LlamaConfig(**(SMALL | {"num_key_value_heads": 2} | changes))).eval()


def mistral(**changes):
    torch.manual_seed(1)
    how = SMALL | {"num_key_value_heads": 2, "sliding_window": None} | changes
    return MistralForCausalLM(MistralConfig(**how)).eval()


MADE = {
    "llama": llama,
    "tied": lambda: llama(tie_word_embeddings=True),
    "llama3": lambda: llama(rope_parameters=LLAMA3),
    "wide heads": lambda: llama(head_dim=24, num_key_value_heads=4),
    "biases of q, k and v": lambda: copy.deepcopy(model_of("qwen2")),
    "mistral": mistral,
    "layers in another order": lambda: reordered(llama()),
}


def reordered(model):
    model.model.layers = torch.nn.ModuleList(reversed(model.model.layers))
    return model


@pytest.fixture(scope="module")
def run():
    with interpreter() as function:
        yield function


def drawn(rows, inner, columns, dtype=torch.float32, gated=False):
    chance = torch.Generator().manual_seed(rows + inner)
    many = columns * (2 if gated else 1)
    shapes = {
        "x": (rows, inner), "weight": (many, inner), "gain": (inner,), "bias": (many,), "residual": (rows, columns),
    }  # fmt: skip
    return {name: torch.randn(shape, generator=chance).to(dtype) for name, shape in shapes.items()}


def exact(x, weight, gain=None, bias=None, residual=None, gated=False, epsilon=0.0):
    x, weight = x.double(), weight.double()
    if gain is not None:
        x = x * (x.square().mean(1, keepdim=True) + epsilon).rsqrt() * gain.double()
    y = x @ weight.T + (0 if bias is None else bias.double())
    if gated:
        gate, up = y.chunk(2, 1)
        y = gate * gate.sigmoid() * up
    return y if residual is None else y + residual.double()


def interpreted(rows, inner, columns, dtype=torch.float32, with_=(), gated=False, shape=None, times=1):
    """A product by the kernel, in the process that interprets it; ``shape`` as a tuple."""
    parts = drawn(rows, inner, columns, dtype, gated)
    chosen = {name: parts[name] for name in with_}
    shape = Cuts(*(shape or (16, 32, 1, 4, 2)))
    scratch = Scratch.make(columns, rows, gated, shape, torch.device("cpu"))
    scratch.partials.fill_(torch.nan)
    scratch.squares.fill_(torch.nan)
    out = torch.full((rows, columns), torch.nan, dtype=dtype)
    for _ in range(times):  # counters must be ready again
        product(parts["x"], parts["weight"], gated=gated, epsilon=1e-5, out=out, shape=shape, scratch=scratch, **chosen)
    assert scratch.arrivals.eq(0).all()
    return out


def turned(rows, heads, kv_heads, width, tokens, plain):
    chance = torch.Generator().manual_seed(width)
    qkv = torch.randn(rows, (heads + 2 * kv_heads) * width, generator=chance)
    cosines, sines = torch.randn(2, 40, width, generator=chance)
    pages = torch.full((12, 2, tokens, kv_heads, width), torch.nan)
    table = torch.randperm(12, generator=chance)[: rows * 4].view(rows, 4).int()
    lengths = torch.tensor([1, 3 * tokens, 2 * tokens + 1][:rows], dtype=torch.int32)
    queries = rotate(qkv, cosines, sines, pages, table, lengths, heads)
    return [queries, pages] if plain else torch.cat([queries.flatten(), pages.flatten()])


@pytest.mark.parametrize("with_", [(), ("gain",), ("bias",), ("residual",), ("gain", "bias", "residual")])
@pytest.mark.parametrize("shape", [(16, 32, 1, 4, 2), (16, 32, 3, 4, 2), (32, 16, 2, 4, 2)])
@pytest.mark.parametrize("gated", [False, True])
def test_the_kernel_computes_the_product(run, with_, shape, gated):
    parts = drawn(3, 104, 40, gated=gated)  # neither dimension is a multiple of its block
    wanted = exact(parts["x"], parts["weight"], gated=gated, epsilon=1e-5, **{name: parts[name] for name in with_})
    found = run((3, 104, 40), interpreted, with_=with_, gated=gated, shape=shape, times=2)
    assert torch.allclose(found.double(), wanted, atol=2e-4, rtol=1e-5)


@pytest.mark.parametrize(("rows", "splits"), [(1, 1), (17, 2), (64, 4)])
def test_clean_blocks_many_rows_and_bf16(run, rows, splits):
    parts = drawn(rows, 128, 48, torch.bfloat16, gated=True)
    wanted = exact(parts["x"], parts["weight"], parts["gain"], gated=True, epsilon=1e-5)
    found = run((rows, 128, 48, torch.bfloat16), interpreted, with_=("gain",), gated=True, shape=(16, 32, splits, 4, 2))
    plain = product(parts["x"], parts["weight"], gain=parts["gain"], epsilon=1e-5, gated=True)
    errors = [(one.double() - wanted).square().mean().sqrt() for one in (found, plain)]
    assert errors[0] <= 1.1 * errors[1]  # it rounds less often than torch's own sequence
    assert errors[0] < 0.01 * wanted.std()


@pytest.mark.parametrize(("heads", "kv_heads", "width"), [(4, 2, 16), (3, 1, 24), (2, 2, 8)])
def test_rotation_and_append(run, heads, kv_heads, width):
    given = (3, heads, kv_heads, width, 4)
    queries, pages = turned(*given, plain=True)
    found = run((*given, False), turned)
    assert torch.allclose(found, torch.cat([queries.flatten(), pages.flatten()]), atol=1e-5, equal_nan=True)
    assert pages.isnan().sum() == pages.numel() - 3 * 2 * kv_heads * width  # three tokens were written, nothing else


@pytest.mark.parametrize("kind", MADE)
def test_a_kernel_step_is_the_step(kind):
    model, ids = MADE[kind](), prompts()["input_ids"]
    found, logits = [], []
    for how in ({}, {"kernels": True}):
        with PagedCache(model.config, pool_of(model), max_tokens=32) as cache:
            loop = DecodeLoop(model, cache, **how)
            found.append([loop.prefill(ids)] + [loop.step().clone() for _ in range(20)])
            assert (cache.get_seq_length(), cache.lengths.tolist()) == (27, [27] * 3)
            loop.prefill(ids[:, :4])  # again, on the same tables
            found[-1] += [loop.step().clone() for _ in range(3)]
            logits.append(loop.logits.clone())
    assert torch.equal(torch.stack(found[0]), torch.stack(found[1]))
    assert torch.allclose(*logits, atol=1e-4)


def steps(kind, how):
    """Tokens and logits of six steps; in the interpreting process these are the kernels, attention among them."""
    torch.set_num_threads(1)
    model, ids = MADE[kind](), prompts()["input_ids"]
    with PagedCache(model.config, pool_of(model), max_tokens=32) as cache:
        loop = DecodeLoop(model, cache, **how)
        tokens = [loop.prefill(ids)] + [loop.step().clone() for _ in range(6)]
        return torch.cat([torch.stack(tokens).double().flatten(), loop.logits.double().flatten()])


@pytest.mark.parametrize("kind", ["llama", "biases of q, k and v"])
def test_the_whole_step_in_the_interpreter_is_the_plain_one(run, kind):
    assert torch.allclose(run((kind, {"kernels": True}), steps), steps(kind, {}), atol=1e-4)


def test_weights_are_joined_once_and_keep_their_names_and_values():
    model = llama()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with PagedCache(model.config, pool_of(model), max_tokens=32) as cache:
        first = kernel_step.KernelStep(model, cache)
        places = [weight.data_ptr() for weight in model.parameters()]
        second = kernel_step.KernelStep(model, cache)
    assert places == [weight.data_ptr() for weight in model.parameters()]
    for one, other in itertools.product(first._joined, second._joined):
        assert (one[0].data_ptr() == other[0].data_ptr()) == (torch.equal(one[0], other[0]))
    after = model.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[name], before[name]) for name in before)


def test_a_kernel_step_that_fails_is_not_counted():
    model, ids = llama(), prompts(batch=2)["input_ids"]
    with PagedCache(model.config, pool_of(model), max_tokens=40) as cache:
        loop = DecodeLoop(model, cache, kernels=True)
        first = loop.prefill(ids)
        with pytest.raises(IndexError):
            loop.step(torch.tensor([1000, 2]))
        assert (cache.get_seq_length(), cache.lengths.tolist()) == (7, [7, 7])
        hook = model.model.rotary_emb.register_forward_pre_hook(lambda *_: 1 / 0)  # asked once, at the first step
        with pytest.raises(ZeroDivisionError):
            DecodeLoop(model, cache, kernels=True)._kernels(first[:, None], loop.logits)
        hook.remove()
        cache.crop(0)
        assert loop.step(first).shape == (2,)


def windowed():
    return copy.deepcopy(model_of("mistral"))


REFUSED = {
    "another model": (lambda: model_of("neox"), {}, "GPTNeoXForCausalLM is none of"),
    "a window": (windowed, {}, "window"),
    "another activation": (lambda: llama(hidden_act="gelu"), {}, "hidden_act is 'gelu'"),
    "angles that change": (lambda: llama(rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}),
                           {}, "'dynamic' change with the length"),
    "fp16": (lambda: llama().half(), {"dtype": torch.float16}, "float32 or bfloat16"),
    "int8 pages": (llama, {"kept": torch.int8}, "pages of int8"),
    "a bias behind attention": (lambda: llama(attention_bias=True), {}, "a bias outside of Q, K and V"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_a_kernel_step_does_not_run_is_refused(case):
    make, how, words = REFUSED[case]
    model = make()
    pool = pool_of(model, dtype=how.get("kept") or how.get("dtype", torch.float32))
    kept = PagedCache(model.config, pool, max_tokens=32, dtype=how.get("kept"))
    with kept as cache, pytest.raises(CacheError, match=words):
        DecodeLoop(model, cache, kernels=True)


ALTERED = {
    "a hook on a layer": lambda inner: inner.layers[0].register_forward_hook(lambda *_: None),
    "a hook before a norm": lambda inner: inner.norm.register_forward_pre_hook(lambda *_: None),
    "a norm of another class": lambda inner: setattr(inner, "norm", torch.nn.RMSNorm(64)),
    "a forward of its own": lambda inner: setattr(inner.layers[1].mlp, "forward", torch.nn.Identity()),
    "another activation": lambda inner: setattr(inner.layers[1].mlp, "act_fn", torch.nn.ReLU()),
}


@pytest.mark.parametrize("case", ALTERED)
def test_what_the_step_would_pass_over_is_refused(case):
    model = llama()
    ALTERED[case](model.model)
    kept, words = PagedCache(model.config, pool_of(model), max_tokens=32), "has hooks, a forward of its own, or another"
    with kept as cache, pytest.raises(CacheError, match=words):
        DecodeLoop(model, cache, kernels=True)


def test_a_bias_in_k_only_is_refused_and_hidden_states_may_have_been_asked_for():
    model, ids = llama(), prompts()["input_ids"]
    model(ids, output_hidden_states=True)
    with PagedCache(model.config, pool_of(model), max_tokens=32) as cache:
        loop = DecodeLoop(model, cache, kernels=True)
        loop.prefill(ids)
        assert loop.step().shape == (3,)
        cache.batch_select_indices([1])
        with pytest.raises(CacheError, match="holds 1 sequences and is given 3"):
            loop.step()
        model.model.layers[0].self_attn.k_proj.bias = torch.nn.Parameter(torch.ones(32))
        with pytest.raises(CacheError, match="some of Q, K and V"):
            DecodeLoop(model, cache, kernels=True)


def test_a_replay_does_not_read_where_weights_were():
    model = llama()
    with PagedCache(model.config, pool_of(model), max_tokens=32) as cache:
        loop = DecodeLoop(model, cache, kernels=True)
        loop.prefill(prompts()["input_ids"])
        loop.graph = types.SimpleNamespace(replay=loop._body)  # as a CPU has none
        loop.cache.advance = lambda count: None
        loop.step()
        model.double().float()
        loop.graph.replay = pytest.fail
        with pytest.raises(CacheError, match="moved or replaced"):
            loop.step()


def test_kernels_and_compiled_hooks_and_joined_projections():
    model = llama()
    with PagedCache(model.config, pool_of(model), max_tokens=32) as cache:
        with pytest.raises(CacheError, match="one or the other"):
            DecodeLoop(model, cache, kernels=True, compiled=True)
        for wrong in ("all", {"speed": 2}):
            with pytest.raises(CacheError, match="True, False or"):
                DecodeLoop(model, cache, kernels=wrong)
        with pytest.raises(CacheError, match="overlap=True on cpu"):
            DecodeLoop(model, cache, kernels={"overlap": True})
        with joined(model), pytest.raises(CacheError, match="a forward of its own"):
            DecodeLoop(model, cache, kernels=True)
        loop = DecodeLoop(model, cache, kernels=True)
        loop.prefill(prompts()["input_ids"])
        model.lm_head.weight.data = model.lm_head.weight.data.clone()
        with pytest.raises(CacheError, match="moved or replaced"):
            loop.step()
        assert cache.lengths.tolist() == [7] * 3


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"x": torch.ones(2, 3)}, "have no product"),
        ({"weight": torch.ones(8, 4).T}, "have no product"),
        ({"weight": torch.ones(3, 8), "gated": True}, "two halves"),
        ({"gain": torch.ones(7)}, "gain is"),
        ({"bias": torch.ones(4, dtype=torch.bfloat16)}, "bias is"),
        ({"residual": torch.ones(2, 5)}, "residual is"),
        ({"out": torch.ones(4, 2).T}, "out is"),
        ({"weight": torch.ones(4, 8, dtype=torch.float64)}, "weight is"),
    ],
)
def test_a_product_names_what_does_not_fit(change, words):
    with pytest.raises(CacheError, match=words):
        product(**({"x": torch.ones(2, 8), "weight": torch.ones(4, 8)} | change))


SHAPES = {  # of a Llama with 16 layers of 2048, and SmolLM2
    "gated": (8192, 2048, True, True, False), "split": (2048, 8192, False, False, True),
    "uneven": (960, 576, False, True, False), "head": (32000, 2048, False, True, False),
}  # fmt: skip


@pytest.mark.parametrize("rows", [1, 32])
@pytest.mark.parametrize("name", SHAPES)
def test_compiled_for_a_gpu_the_product_streams_spills_nothing_and_asks_before_it_waits(name, rows):
    pytest.importorskip("triton")
    columns, inner, gated, norm, add = SHAPES[name]
    shape = cuts(columns, inner, rows, gated, 2, 132, norm=norm)
    found, ptx = compile_for(columns, inner, rows, gated=gated, norm=norm, add=add, shape=shape)
    assert found.spilled_bytes == 0
    assert found.programs_per_sm() >= 2
    assert "cp.async.cg" in ptx  # whole lines, asynchronously: a pipeline
    assert 0 < ptx.index("prefetch.global.L2") < ptx.index("griddepcontrol.wait") < ptx.index("cp.async.cg")
    plain = compile_for(columns, inner, rows, gated=gated, norm=norm, add=add, shape=shape, overlap=False)[1]
    assert not any(word in plain for word in ("prefetch.global", "griddepcontrol"))


def test_a_kernel_that_does_not_fit_the_device_is_a_cache_error(monkeypatch):
    pytest.importorskip("triton")
    from triton.runtime.errors import OutOfResources

    from o1lab.kv import product_kernel, products

    def launch(*given, **options):
        raise OutOfResources(131072, 101376, "shared memory")

    monkeypatch.setattr(product_kernel, "product", {(1, 1): launch})
    with pytest.raises(CacheError, match="out of resource: shared memory"):
        products.run((1, 1), [torch.ones(1)], {"BLOCK_K": 512})


@pytest.mark.parametrize(("capability", "multiprocessors", "shared"), [(80, 108, 163 << 10), (89, 142, 99 << 10)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("rows", [1, 64])
def test_a_product_stays_within_the_shared_memory_of_other_devices(capability, multiprocessors, shared, dtype, rows):
    for name in ("uneven", "gated"):
        columns, inner, gated, norm, add = SHAPES[name]
        shape = cuts(columns, inner, rows, gated, dtype.itemsize, multiprocessors, norm=norm, shared=shared)
        found, _ = compile_for(columns, inner, rows, gated=gated, norm=norm, add=add, shape=shape, overlap=False,
                               dtype=dtype, capability=capability)  # fmt: skip
        assert found.shared_bytes <= shared
        assert found.spilled_bytes <= 16


def compile_for(
    columns, inner, rows, *, gated, norm, add, shape, overlap=True, dtype=torch.bfloat16, capability=90
):  # fmt: skip
    import triton.language as tl

    from o1lab.kv import product_kernel

    one, many = torch.empty(1, 1, dtype=dtype), torch.empty(rows, inner, dtype=dtype)
    out, norm_or_not = torch.empty(rows, columns, dtype=dtype), many if norm else None
    name, dot = ("bf16", tl.bfloat16) if dtype == torch.bfloat16 else ("fp32", tl.float32)
    _, _, options = arguments(many, one, norm_or_not, 1e-5, None, out if add else None, gated, out, shape,
                              Scratch.make(1, 1, False, shape, one.device), overlap)  # fmt: skip
    assert options["DOT"] == dot
    launch = {name: options.pop(name) for name in ("num_warps", "num_stages", "launch_pdl") if name in options}
    pointers = dict.fromkeys(("x", "weight", "gain", "bias", "residual", "out"), name)
    pointers |= {"partials": "fp32", "squares": "fp32", "arrivals": "i32"}
    try:
        found, code = compiled(
            product_kernel.product, options, pointers, (*pointers, "x_row"), launch, capability, epsilon="fp32"
        )
    except AttentionError as error:
        pytest.skip(str(error))
    return found, code["ptx"]


@given(
    st.integers(1, 200_000), st.integers(16, 30_000), st.integers(1, 64), st.booleans(), st.sampled_from([2, 4]),
    st.integers(1, 200), st.booleans(), st.sampled_from([64 << 10, 99 << 10, 163 << 10, 227 << 10]),
)  # fmt: skip
@example(100, 1000, 64, True, 4, 1, False, 64 << 10)
def test_every_product_has_a_shape_with_work_for_all_splits(
    columns, inner, rows, gated, itemsize, programs, norm, shared
):  # fmt: skip
    shape = cuts(columns, inner, rows, gated, itemsize, programs, norm=norm, shared=shared)
    assert shape.fits(inner)
    for size in (shape.block_n, shape.block_k):
        assert size >= 16
        assert size & (size - 1) == 0
    weights = shape.block_n * shape.block_k * itemsize * (2 if gated else 1)
    inputs = max(16, 1 << (rows - 1).bit_length()) * shape.block_k * itemsize
    assert shape.stages * (weights + inputs) <= shared


def test_rotation_names_what_does_not_fit():
    pages, table, lengths = torch.zeros(4, 2, 4, 1, 8), torch.zeros(1, 2).int(), torch.ones(1).int()
    angles = torch.zeros(2, 8, 8)
    with pytest.raises(CacheError, match="qkv is"):
        rotate(torch.zeros(1, 24), *angles, pages, table, lengths, 2)
    with pytest.raises(CacheError, match="cosines are"):
        rotate(torch.zeros(1, 32), angles[0], angles[1, :4], pages, table, lengths, 2)
