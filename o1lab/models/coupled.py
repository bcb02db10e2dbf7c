"""A decoder without positions whose steps are joined by shared random ids: the model for attention dilution.

Next to its word, every position carries the *id* of the step that it helps to predict, and its *slot* in that step, so
that each look-up is one match of content. Nothing in it knows a distance: what is left to go wrong in a longer chain is
that more keys compete for the same attention (dilution). The body is transformers' Llama with rotation switched off, so
whatever changes attention or the cache of a Hugging Face model changes this one too.

It solves ``modular`` chains. Labels are given to it, not produced: they become ids, and its end is the last asked step.
Sources: Cho et al. 2024 (position coupling), Ruoss et al. 2023 (random ordered subsets of a long range of ids).
"""

from __future__ import annotations

import inspect
import math
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, LlamaConfig, LlamaForCausalLM
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.models.llama.modeling_llama import LlamaModel

from o1lab.errors import ModelError, UnknownName
from o1lab.models import coupled_layout as layout
from o1lab.models import gguf, reasoner, vocabulary
from o1lab.models.coupled_layout import FIRST, WORDS, Problems
from o1lab.models.measure import GROUP, Survival, ended

if TYPE_CHECKING:
    from o1lab.models import Model

WEIGHTS = Path(__file__).with_name("weights") / "diluted"
SIZES = {"tiny": (32, 2, 2, 16, 96), "small": (64, 2, 4, 32, 256)}
"""Width, layers, heads, width of a head, inner width."""
_CACHE = next(name for name in ("cache", "past_key_values") if name in inspect.signature(LlamaModel.forward).parameters)


class CoupledConfig(LlamaConfig):
    """A Llama's settings, and ``step_ids`` (how many ids there are) and ``trained_steps`` (the longest trained N)."""

    model_type = "o1lab-coupled"


class NoRotation(nn.Module):
    """Rotary embedding that leaves queries and keys as they are, exactly: cos = 1, sin = 0."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Ones and zeros of shape (1, tokens, head width) in the dtype of ``x``."""
        shape = (1, x.shape[1], self.width)
        return x.new_ones(shape), x.new_zeros(shape)


class CoupledForCausalLM(LlamaForCausalLM):
    """The network. It takes words, step ids and slots; its logits are over the 34 words from ``FIRST`` on."""

    config_class = CoupledConfig

    def __init__(self, config: CoupledConfig) -> None:
        super().__init__(config)
        width, spread = config.hidden_size, config.initializer_range
        self.model.rotary_emb = NoRotation(config.head_dim)
        self.model.embed_tokens = nn.Embedding(WORDS + 1, width)  # the last row is the start mark
        self.step_embedding = nn.Embedding(config.step_ids, width)
        self.slot_embedding = nn.Embedding(len(layout.SLOTS), width)
        self.lm_head = nn.Linear(width, WORDS, bias=False)
        for table in (self.model.embed_tokens, self.step_embedding, self.slot_embedding):
            nn.init.normal_(table.weight, std=5 * spread)
        nn.init.normal_(self.lm_head.weight, std=spread)
        self.before = 0
        """Keys in the cache before the current forward pass."""

    def forward(
        self, input_ids: torch.Tensor, step_ids: torch.Tensor, slots: torch.Tensor, logits_to_keep: int = 0,
        **options: Any,
    ) -> CausalLMOutputWithPast:  # fmt: skip
        """Logits of shape (rows, the last ``logits_to_keep`` columns or all, 34); ``options`` go to the body."""
        kept = options.get(_CACHE)
        self.before = 0 if kept is None else kept.get_seq_length()
        words = torch.where(input_ids == vocabulary.BOS, WORDS, input_ids - FIRST)
        inputs = self.model.embed_tokens(words) + self.step_embedding(step_ids) + self.slot_embedding(slots)
        hidden = self.model(inputs_embeds=inputs, **options).last_hidden_state
        return CausalLMOutputWithPast(logits=self.lm_head(hidden[:, -logits_to_keep:]), **{_CACHE: kept})

    @torch.inference_mode()
    def decode_greedy(
        self, prompts: Sequence[Sequence[int]], max_new_tokens: Sequence[int], stop_ids: Sequence[int] = ()
    ) -> list[list[int]]:
        """Produce the chains of ``modular`` prompts, in the vocabulary's tokens with labels, each with ``<eos>``.

        Parameters
        ----------
        prompts : sequence of token ids
            In the reasoner's tokens.
        max_new_tokens : sequence of int
            A cap for each prompt.
        stop_ids : sequence of int
            Tokens after which a row ends.

        Returns
        -------
        list of list of int
            Produced ids; -1 stands for a word whose logits were not finite, and ends its row.

        Raises
        ------
        ModelError
            Another kind of prompt, or a longer program than there are ids.
        """
        read = [layout.read(prompt) for prompt in prompts]
        made: list[list[int]] = [[] for _ in prompts]
        groups: dict[tuple[int, int], list[int]] = {}
        for row, prompt in enumerate(read):
            groups.setdefault((len(prompt.labels), len(prompt.chain)), []).append(row)
        for rows in groups.values():
            words = decode(self, layout.stack([read[row] for row in rows], self.config.step_ids, self.device))
            for row, produced in zip(rows, words.tolist(), strict=True):
                steps = enumerate(read[row].chain)
                text = [token for k, label in steps for token in (label, *produced[3 * k : 3 * k + 3])]
                text.append(vocabulary.EOS)
                ends = (place + 1 for place, token in enumerate(text) if token == -1 or token in stop_ids)
                made[row] = text[: min(next(ends, len(text)), max_new_tokens[row])]
        return made


@torch.inference_mode()
def decode(model: CoupledForCausalLM, problems: Problems) -> torch.Tensor:
    """What the model produces step by step through its key/value cache: token ids of shape (rows, 3 asked).

    A word whose logits are not finite is -1; the row goes on with the word ``0`` in its place.
    """
    count = problems.targets.shape[1]
    start = problems.words.shape[1] - count
    cache, produced, begin, words = DynamicCache(), [], 0, problems.words[:, : start + 1]
    for end in range(start + 1, start + count + 1):
        given = {"use_cache": True, _CACHE: cache, "logits_to_keep": 1}
        logits = model(words, problems.ids[:, begin:end], problems.slots[:, begin:end], **given).logits[:, -1]
        best, finite, begin = FIRST + logits.argmax(-1), logits.isfinite().all(-1), end
        produced.append(torch.where(finite, best, -1))
        words = torch.where(finite, best, FIRST)[:, None]
    return torch.stack(produced, 1)


@torch.inference_mode()
def forced(model: CoupledForCausalLM, problems: Problems) -> torch.Tensor:
    """What the model predicts where it is given the right chain so far, in one pass: token ids (rows, 3 asked).

    Up to the first fault this is what :func:`decode` produces, so the first fault is the same, rounding aside.
    """
    count = problems.targets.shape[1]
    logits = model(problems.words, problems.ids, problems.slots, logits_to_keep=count, use_cache=False).logits
    return torch.where(logits.isfinite().all(-1), FIRST + logits.argmax(-1), -1)


def survival(
    model: CoupledForCausalLM | Model, steps: int, n: int, seed: int = 0, *, scale: float | str = 1.0,
    free: bool = False, modulus: int = vocabulary.NUMBERS,
) -> Survival:  # fmt: skip
    """Work ``n`` chains of ``steps`` steps and say where each goes wrong first.

    Parameters
    ----------
    scale : float or "log-n"
        Factor on the queries, see :func:`sharpened`.
    free : bool
        Decode step by step through the cache. Default: one pass over the right chain, which finds the same first
        faults many times faster; interventions on a cache need ``free=True``.

    Examples
    --------
    >>> survival(build("tiny"), steps=4, n=8).right.shape
    (8,)
    """
    network = model if isinstance(model, CoupledForCausalLM) else model.model
    if not isinstance(network, CoupledForCausalLM):
        raise ModelError(f"a {type(network).__name__} has no step ids: give what coupled.load or coupled.build returns")
    if n < 1:
        raise ModelError(f"n={n}: work at least one chain")
    wrong = []
    with sharpened(network, scale):
        for group in range(math.ceil(n / GROUP)):
            key = zlib.crc32(f"coupled {steps} {seed} {group}".encode())
            generator = torch.Generator(network.device).manual_seed(key)
            ids = network.config.step_ids
            problems = layout.make(GROUP, steps, generator, step_ids=ids, modulus=modulus).first(n - group * GROUP)
            wrong.append((decode if free else forced)(network, problems) != problems.targets)
    return ended(torch.cat(wrong).cpu().numpy(), steps, ["operator", "operand", "state"])


@contextmanager
def sharpened(model: CoupledForCausalLM, scale: float | str) -> Iterator[None]:
    """Multiply the queries by ``scale`` while the context is open; 1.0 changes no bit.

    ``"log-n"`` is max(1, ln S / ln S₀) with S the keys that a query may look at and S₀ the tokens of the longest
    trained chain: a softmax over more keys spreads out, and this takes it back. Nothing in it is fitted.
    Source: Chiang and Cholak 2022.
    """
    base = math.log(layout.tokens(model.config.trained_steps))

    def hook(_: nn.Module, __: Any, queries: torch.Tensor) -> torch.Tensor:
        if not isinstance(scale, str):
            return queries * scale
        keys = model.before + torch.arange(1, queries.shape[1] + 1, device=queries.device)
        return (queries.float() * (keys.log() / base).clamp_min(1.0)[:, None]).to(queries.dtype)

    if scale != "log-n" and (isinstance(scale, str) or not (math.isfinite(scale) and scale > 0)):
        raise ModelError(f"scale={scale!r}: give a positive number or 'log-n'")
    layers = [] if scale == 1.0 else model.model.layers
    hooks = [layer.self_attn.q_proj.register_forward_hook(hook) for layer in layers]
    try:
        yield
    finally:
        for handle in hooks:
            handle.remove()


def build(size: str = "small", seed: int = 0, *, trained_steps: int = 12, step_ids: int = 320) -> CoupledForCausalLM:
    """A new network whose weights follow from ``seed``; the caller's random state is kept.

    >>> sum(weight.numel() for weight in build("small").parameters())
    189440
    """
    if size not in SIZES:
        raise UnknownName("size", size, tuple(SIZES))
    width, layers, heads, head, inner = SIZES[size]
    config = CoupledConfig(
        vocab_size=len(vocabulary.TOKENS), hidden_size=width, intermediate_size=inner, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=heads, head_dim=head, initializer_range=0.06,
        tie_word_embeddings=False, max_position_embeddings=8 * vocabulary.STEPS, bos_token_id=vocabulary.BOS,
        eos_token_id=vocabulary.EOS, pad_token_id=None, step_ids=step_ids, trained_steps=trained_steps,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return CoupledForCausalLM(config)


@gguf.quiet()
def read(folder: str | Path, dtype: torch.dtype = torch.float32) -> tuple[CoupledForCausalLM, Any]:
    """Network and tokenizer from a folder that training wrote.

    Raises
    ------
    ModelError
        The folder lacks it, its files are damaged, or it is another model.
    """
    from o1lab.models import hub

    folder = Path(folder)
    hub.check_weights(f"the coupled model of {folder.name}", folder, dtype.itemsize, "install the package again")
    try:
        network, report = CoupledForCausalLM.from_pretrained(
            folder, dtype=dtype, use_safetensors=True, local_files_only=True, output_loading_info=True
        )
    except Exception as error:
        raise ModelError(f"transformers cannot load {folder}: {hub.first_line(error)}") from error
    if lacking := [*report["missing_keys"], *report["unexpected_keys"]]:
        raise ModelError(f"{folder} holds another model: {sorted(lacking)[0]} does not fit")
    return network.eval(), reasoner.tokenizer()


def load(folder: str | Path | None = None, device: Any = None, dtype: Any = None) -> Model:
    """The shipped model, or one from a folder, as a :class:`o1lab.models.Model` with the reasoner's tokenizer.

    Raises
    ------
    ModelError
        The package was installed without its weights; ``python -m o1lab train --kind coupled`` makes others.
    """
    from o1lab import models

    if folder is None and not WEIGHTS.is_dir():
        raise ModelError("the weights are not in this installation: train some (python -m o1lab train --kind coupled)")
    place = models._device(device)
    kind = models._dtype(dtype, place)
    source = "coupled ids, no positions: the sibling for attention dilution"
    return models._finish(read(folder or WEIGHTS, kind), "diluted", source, place, kind)


AutoConfig.register(CoupledConfig.model_type, CoupledConfig)
AutoModelForCausalLM.register(CoupledConfig, CoupledForCausalLM)
