"""Small random decoders with sharp attention, a greedy loop with a cache, and all that a context could leave behind."""

from __future__ import annotations

import functools
import inspect
import sys

import torch
from transformers import AttentionInterface, DynamicCache, GPT2Config, GPTNeoXConfig, LlamaConfig, Qwen2Config
from transformers.masking_utils import AttentionMaskInterface
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

KINDS = ("llama", "qwen2", "neox", "gpt2")
SHAPE = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 256, "initializer_range": 0.2, "eos_token_id": None, "bos_token_id": None,
    "pad_token_id": 0,
}  # fmt: skip
GPT2_SHAPE = {
    "vocab_size": 97, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256, "initializer_range": 0.2,
    "eos_token_id": None, "bos_token_id": None, "pad_token_id": 0,
}  # fmt: skip


def build(kind: str = "llama", attention: str = "sdpa", **changes):
    """A decoder of that family with fixed random weights, in eval mode, fp32."""
    configs = {
        "llama": functools.partial(LlamaConfig, num_key_value_heads=2),
        "qwen2": functools.partial(Qwen2Config, num_key_value_heads=2),
        "neox": functools.partial(GPTNeoXConfig, rotary_pct=0.5),
    }
    config = GPT2Config(**{**GPT2_SHAPE, **changes}) if kind == "gpt2" else configs[kind](**{**SHAPE, **changes})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    return model.eval().requires_grad_(False)


def prompt(length: int, seed: int = 0) -> torch.Tensor:
    """Token ids of shape (1, length)."""
    return torch.randint(1, 97, (1, length), generator=torch.Generator().manual_seed(seed))


def padded(prompts: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Left padding: ids and mask, both (B, T)."""
    length = max(ids.shape[1] for ids in prompts)
    ids, mask = torch.zeros(2, len(prompts), length, dtype=torch.long)
    for row, one in enumerate(prompts):
        ids[row, length - one.shape[1] :] = one
        mask[row, length - one.shape[1] :] = 1
    return ids, mask


@torch.no_grad()
def decode(model, ids, mask=None, steps: int = 8, forced=None, cache=None):
    """Greedy (or forced) decoding with a cache; tokens (B, steps) and the logits that chose them (B, steps, V)."""
    mask = torch.ones_like(ids) if mask is None else mask
    cache = DynamicCache() if cache is None else cache
    places, tokens, logits = (mask.cumsum(-1) - 1).clamp_min(0), [], []
    for step in range(steps):
        out = model(ids, attention_mask=mask, position_ids=places, use_cache=True, **{cache_name(model): cache})
        logits.append(out.logits[:, -1])
        ids = forced[:, step : step + 1] if forced is not None else logits[-1].argmax(-1, keepdim=True)
        tokens.append(ids)
        mask = torch.cat([mask, torch.ones_like(ids)], 1)
        places = places[:, -1:] + 1
    return torch.cat(tokens, 1), torch.stack(logits, 1)


def cache_name(model) -> str:
    return "cache" if "cache" in inspect.signature(type(model).forward).parameters else "past_key_values"


def generate(model, ids, mask=None, steps: int = 8, **options) -> torch.Tensor:
    """The tokens that ``model.generate`` appends, greedily."""
    mask = torch.ones_like(ids) if mask is None else mask
    made = model.generate(ids, attention_mask=mask, max_new_tokens=steps, do_sample=False, **options)
    return made[:, ids.shape[1] :]


def state(model) -> dict[str, object]:
    """Everything that an intervention could forget to put back."""
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_forward_hooks_with_kwargs",
             "_forward_pre_hooks_with_kwargs")  # fmt: skip
    found: dict[str, object] = {
        "registry": sorted(AttentionInterface._global_mapping),
        "masks": sorted(AttentionMaskInterface._global_mapping),
        "functions": {name: id(body) for name, body in AttentionInterface._global_mapping.items()},
        "taps": len(sys.modules["o1lab.decoding.tap"]._taps),
    }
    for name, module in model.named_modules():
        found[f"{name} hooks"] = [len(module.__dict__[kind]) for kind in kinds]
        found[f"{name} own"] = sorted(module.__dict__)
        found[f"{name} forward"] = module.__dict__.get("forward")
        if hasattr(module, "config"):
            found[f"{name} attention"] = module.config._attn_implementation
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        found[f"{name} data"] = (tensor.data_ptr(), tensor.dtype, tensor.double().sum().item())
    return found
