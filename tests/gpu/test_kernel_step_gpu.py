"""The decode step of kernels on a real GPU: the plain tokens, its error in 16 bits, and no race between kernels."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from package.paged_fixture import forced, model_of, pool_of, prompts
from transformers import LlamaConfig, LlamaForCausalLM

from o1lab.kv.product_bench import candidates, of_model
from o1lab.kv.products import Scratch, product

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:.*past_key_values.*:FutureWarning")]


def small(kind, dtype=torch.float32):
    return copy.deepcopy(model_of(kind)).to("cuda", dtype)


def wide(dtype=torch.bfloat16, layers=4):
    """Half a gigabyte of weights, so that kernels run long enough to overlap; sizes are no powers of two."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=1152, num_hidden_layers=layers, num_attention_heads=18, num_key_value_heads=6, head_dim=64,
        intermediate_size=3072, vocab_size=32000, max_position_embeddings=4096, eos_token_id=None,
    )  # fmt: skip
    with torch.device("cuda"):
        return LlamaForCausalLM(config).to(dtype).eval()


def run(model, ids, tokens=None, **how):
    """:func:`package.paged_fixture.forced` over a pool of its own."""
    return forced(model, ids, pool_of(model, 20_000, 16, model.dtype), tokens, **how)


def ways():
    able = torch.cuda.get_device_capability() >= (9, 0)
    return [{"overlap": False}, {"overlap": True}] if able else [{"overlap": False}]


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_a_step_of_kernels_captured_or_not_gives_the_plain_tokens(kind):
    model, ids = small(kind), prompts()["input_ids"].cuda()
    fed, plain, logits = run(model, ids, graph=False)
    for how, graph in itertools.product(ways(), (True, False)):
        _, found, same = run(model, ids, fed, kernels=how, graph=graph)
        assert torch.equal(found, plain)
        assert torch.allclose(same, logits, atol=1e-4)


@pytest.mark.parametrize("batch", [1, 5, 32, 64])  # 64: products of another instruction (wgmma)
def test_in_16_bits_it_is_as_near_to_the_exact_step_as_the_plain_one(batch):
    model = wide()
    ids = torch.randint(1, 32000, (batch, 90), generator=torch.Generator().manual_seed(0)).cuda()
    exact = copy.deepcopy(model).float()
    fed, _, plain = run(model, ids, graph=False, steps=20)
    _, _, true = run(exact, ids, fed, graph=False, steps=20)
    most = (plain - true).square().mean().sqrt()
    assert 0 < most < 0.2 * true.std()  # or the bound would hold anything
    for how in ways():
        _, _, found = run(model, ids, fed, kernels=how, steps=20)
        assert (found - true).square().mean().sqrt() <= 1.2 * most


def test_kernels_that_overlap_do_not_race():
    """300 steps, replayed twice and once in turn: the same bits. A read before the wait would show in some of them."""
    model, found = wide(layers=8), []
    ids = torch.randint(1, 32000, (2, 40), generator=torch.Generator().manual_seed(1)).cuda()
    fed, _, _ = run(model, ids, steps=300, kernels={"overlap": False})
    for how in [*ways(), ways()[-1]]:
        found.append(run(model, ids, fed, steps=300, kernels=how)[2])
    assert all(torch.equal(one, found[0]) for one in found[1:])


@pytest.mark.parametrize("batch", [1, 32, 64])
@pytest.mark.parametrize("index", range(4))
def test_any_cut_of_a_product_gives_the_product(index, batch):
    one = of_model("llama")[index]
    chance = torch.Generator("cuda").manual_seed(index)
    many = one.columns * (2 if one.gated else 1)
    make = {"device": "cuda", "dtype": torch.bfloat16, "generator": chance}
    x, weight = torch.randn(batch, one.inner, **make), torch.randn(many, one.inner, **make) * one.inner**-0.5
    gain = torch.randn(one.inner, **make) if one.norm else None
    residual = torch.randn(batch, one.columns, **make) if one.add else None
    how = {"gain": gain, "epsilon": 1e-5, "gated": one.gated, "residual": residual}
    y = x.double()
    if one.norm:
        y = y * (y.square().mean(1, keepdim=True) + 1e-5).rsqrt() * gain.double()
    y = y @ weight.double().T
    if one.gated:
        gate, up = y.chunk(2, 1)
        y = torch.nn.functional.silu(gate) * up
    y = y if residual is None else y + residual.double()
    shapes = candidates(one, batch, 132)
    for shape in shapes[:: max(1, len(shapes) // 5)]:
        scratch = Scratch.make(one.columns, batch, one.gated, shape, x.device)
        for _ in range(3):  # counters must be ready again
            found = product(x, weight, shape=shape, scratch=scratch, **how)
        assert (found.double() - y).square().mean().sqrt() < 6e-3 * y.std(), shape
