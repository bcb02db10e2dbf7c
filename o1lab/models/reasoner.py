"""The lab's own reasoner: a small standard Llama with rotary positions, and its tokenizer of 662 words.

Step ids are words of the text, so any server of Hugging Face checkpoints (transformers, vLLM) can run it.

>>> words = tokenizer()
>>> words.decode(words("<bos> modular from s7 to s9 state 13").input_ids)
'<bos> modular from s7 to s9 state 13'
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from o1lab.errors import TrainingError, UnknownName
from o1lab.models import gguf, vocabulary
from o1lab.models.batches import Batch
from o1lab.storage import write_json

SIZES = {"tiny": (64, 2, 2, 128), "small": (128, 4, 4, 384), "full": (256, 6, 8, 1024)}
"""Width, layers, heads, inner width."""
THETA = 500_000.0
"""Base of the rotary frequencies: half of a head's dimensions hardly turn within a chain, so step ids meet there."""
CONTEXT = 4096
NOTES = "training.json"
"""File beside the weights that says how they came about."""


def tokenizer() -> PreTrainedTokenizerFast:
    """The tokenizer: one token a word, words separated by spaces, nothing added; decoding joins by single spaces."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel(dict(vocabulary.INDEX), unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    pad, bos, eos, unk = vocabulary.SPECIAL
    return PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token=pad, bos_token=bos, eos_token=eos, unk_token=unk, padding_side="left",
        clean_up_tokenization_spaces=False, model_max_length=CONTEXT,
    )  # fmt: skip


def build(size: str = "small", seed: int = 0) -> LlamaForCausalLM:
    """A new reasoner whose weights follow from ``seed``; the caller's random state is kept.

    >>> {size: sum(weight.numel() for weight in build(size).parameters()) for size in SIZES}
    {'tiny': 124608, 'small': 937856, 'full': 6464256}
    """
    if size not in SIZES:
        raise UnknownName("size", size, tuple(SIZES))
    width, layers, heads, inner = SIZES[size]
    config = LlamaConfig(
        vocab_size=len(vocabulary.TOKENS), hidden_size=width, intermediate_size=inner, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=heads, tie_word_embeddings=True,
        max_position_embeddings=CONTEXT,
        rope_parameters={"rope_type": "default", "rope_theta": THETA},
        pad_token_id=vocabulary.PAD, bos_token_id=vocabulary.BOS, eos_token_id=vocabulary.EOS,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(config)


def hidden(model: LlamaForCausalLM, ids: torch.Tensor, positions: torch.Tensor | None = None) -> torch.Tensor:
    """Hidden states before the head, shape (rows, tokens, width), of rows without padding.

    The body's own forward takes a jump in the positions for the seam of packed sequences and masks across it; here all
    earlier tokens stay in view.

    Parameters
    ----------
    positions : LongTensor, shape (1 or rows, tokens), optional
        Default: 0, 1, 2, …
    """
    body = model.model
    if positions is None:
        positions = torch.arange(ids.shape[1], device=ids.device)[None]
    states = body.embed_tokens(ids)
    rotation = body.rotary_emb(states, positions)
    for layer in body.layers:
        states = layer(states, attention_mask=None, position_ids=positions, position_embeddings=rotation)
    return body.norm(states)


def logits(model: LlamaForCausalLM, batch: Batch, positions: torch.Tensor | None = None) -> torch.Tensor:
    """Logits for ``batch.ids[:, batch.start:]``, given the right tokens so far; (rows, produced tokens, 662)."""
    return model.lm_head(hidden(model, batch.ids[:, :-1], positions)[:, batch.start - 1 :])


def gapped(batch: Batch, reach: int, generator: torch.Generator) -> torch.Tensor:
    """Positions that leave two random gaps a row, so that short chains show the distances of long ones.

    Rotary attention knows differences of positions only: an offset for the whole row would teach nothing. One gap is
    before the chain, one anywhere in the prompt; together they are at most ``reach`` minus the row's tokens.

    Returns
    -------
    LongTensor, shape (rows, tokens - 1)
    """
    rows, count = batch.ids.shape
    device, slack = batch.ids.device, max(0, reach - count)
    total = torch.randint(slack + 1, (rows, 1), generator=generator, device=device)
    inside = (total * torch.rand(rows, 1, generator=generator, device=device)).long()
    steps = torch.ones(rows, count - 1, dtype=torch.long, device=device)
    steps[:, 0] = 0
    place = torch.randint(1, batch.start - 1, (rows, 1), generator=generator, device=device)
    steps.scatter_add_(1, place, inside)
    steps[:, batch.start - 1] += (total - inside)[:, 0]
    return steps.cumsum(1)


@gguf.quiet()
def save(model: Any, folder: str | Path, notes: dict[str, Any], dtype: torch.dtype = torch.float16) -> Path:
    """Write weights (safetensors), tokenizer and notes, as transformers and vLLM load them; the model is not changed.

    Raises
    ------
    TrainingError
        A weight is not finite in ``dtype``.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: value.detach().to("cpu", dtype) for name, value in model.state_dict().items()}
    if broken := [name for name, value in weights.items() if not value.isfinite().all()]:
        raise TrainingError(f"{broken[0]} is not finite in {str(dtype).removeprefix('torch.')}: nothing was written")
    copy = type(model)(type(model.config).from_dict(model.config.to_dict())).to(dtype)
    copy.load_state_dict(weights)
    copy.generation_config = GenerationConfig(
        bos_token_id=vocabulary.BOS, eos_token_id=vocabulary.EOS, pad_token_id=vocabulary.PAD
    )
    copy.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    write_json(folder / NOTES, notes)
    return folder


def notes(folder: str | Path) -> dict[str, Any]:
    """What :func:`save` wrote about how the weights came about."""
    return json.loads((Path(folder) / NOTES).read_text(encoding="utf-8"))
