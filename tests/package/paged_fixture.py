"""Small random models, prompts, and keys and values to try PagedCache with, on any device."""

from __future__ import annotations

from contextlib import nullcontext
from functools import cache as once

import torch
from transformers import (
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from o1lab.kv import DecodeLoop, PagedCache, joined, pool_for, register

PAGED = register()
SMALL = {
    "vocab_size": 99, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "initializer_range": 0.4, "max_position_embeddings": 256, "eos_token_id": None, "bos_token_id": None,
    "pad_token_id": 0,
}  # fmt: skip
KINDS = {
    "llama": (LlamaConfig, LlamaForCausalLM, {"num_key_value_heads": 2}),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {"num_key_value_heads": 1}),
    "neox": (GPTNeoXConfig, GPTNeoXForCausalLM, {}),
    "mistral": (MistralConfig, MistralForCausalLM, {"num_key_value_heads": 2, "sliding_window": 32}),
}
HEADS, WIDTH = 2, 8


@once
def model_of(kind, seed=0):
    config, model, more = KINDS[kind]
    torch.manual_seed(seed)
    return model(config(**SMALL, **more)).eval()


def config(**changes):
    return LlamaConfig(**(SMALL | {"num_attention_heads": 8, "num_key_value_heads": HEADS} | changes))


def pool_of(model, tokens=2000, page_tokens=8, dtype=torch.float32):
    pool = pool_for(model.config, tokens, device=model.device, dtype=dtype, page_tokens=page_tokens)
    pool.arena.fill_(255)  # NaN in every type: what was not written must not be read
    return pool


def prompts(batch=3, length=7, padded=False, seed=3):
    ids = torch.randint(1, 99, (batch, length), generator=torch.Generator().manual_seed(seed))
    mask = torch.ones_like(ids)
    if padded:
        mask[1, :3] = mask[2, :1] = 0
    return {"input_ids": ids * mask, "attention_mask": mask}


def generated(model, given, cache=None, *, attention="sdpa", new=20, **how):
    model.set_attn_implementation(attention)
    torch.manual_seed(1)
    if cache is not None:
        how["past_key_values"] = cache
    return model.generate(**given, max_new_tokens=new, **how)


def stored(cache, layer, side):
    """What a layer's pages hold, by table and lengths, in plain loops: (B, Hkv, length, D)."""
    kv = cache.paged(layer)
    tokens = kv.pages.shape[2]
    rows = []
    for row, length in enumerate(kv.lengths.tolist()):
        at = [(int(kv.block_table[row, place // tokens]), side, place % tokens) for place in range(length)]
        found = torch.stack([kv.pages[one].float() for one in at])
        if kv.scales is not None:
            found *= torch.stack([kv.scales[one] for one in at]).unsqueeze(-1)
        rows.append(found)
    return torch.stack(rows).transpose(1, 2)


def some(batch, tokens, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, 2, batch, HEADS, tokens, WIDTH, generator=generator).to(dtype)


def append(cache, new):
    """``new`` (layers, 2, B, Hkv, S, D), and what the cache answers."""
    return [cache.update(keys, values, layer) for layer, (keys, values) in enumerate(new)]


MODES = {
    "sampling": {"do_sample": True},
    "beams": {"num_beams": 3},
    "sampled beams": {"num_beams": 2, "do_sample": True},
    "prompt lookup": {"prompt_lookup_num_tokens": 3},
}


def forced(model, ids, pool, tokens=None, steps=60, **how):
    """Tokens fed (``tokens`` (steps, B), by default the loop's own), the next ones, and the logits, step by step."""
    most = max(120, ids.shape[1] + steps + 2)
    together = joined(model) if how.get("compiled") else nullcontext()
    with PagedCache(model.config, pool, max_tokens=most) as cache, together:
        loop = DecodeLoop(model, cache, **how)
        fed, found, logits = [loop.prefill(ids)], [], []
        for place in range(steps):
            if tokens is not None:
                fed[place:] = [tokens[place]]
            found.append(loop.step(fed[place]).clone())
            fed.append(found[-1])
            logits.append(loop.logits.clone().float())
        assert cache.lengths.tolist() == [ids.shape[1] + steps] * len(ids)
    return torch.stack(fed[:steps]), torch.stack(found), torch.stack(logits)
