"""Find a checkpoint, on disk or on the Hugging Face Hub, and check it before a byte of it is loaded."""

from __future__ import annotations

import json
import math
import os
import shutil
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from o1lab.errors import ModelError

TIMEOUT_SECONDS = 5.0
WANTED = ["*.safetensors", "*.json", "*.jinja", "*.txt", "tokenizer.model", "spiece.model"]
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "spiece.model", "vocab.json", "vocab.txt")
ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}  # stored types that are cast to the asked dtype on loading


def download(name: str) -> Path:
    """Return the local snapshot of the Hub repository ``name``, downloading what is not there yet.

    One short request asks whether the Hub is there, before any call that would retry for long; ``HF_HUB_OFFLINE`` and
    ``HF_ENDPOINT`` are read at each call. Without the Hub, an earlier complete download is used.

    Raises
    ------
    ModelError
        The repository does not exist, is gated, is no causal LM, does not fit on the disk, or the Hub cannot be
        reached and nothing is cached.
    """
    from huggingface_hub import HfApi, constants, hf_hub_download, snapshot_download
    from huggingface_hub.errors import GatedRepoError, HTTPError, RepositoryNotFoundError

    endpoint, info, offline, cause = os.environ.get("HF_ENDPOINT") or None, None, "", None
    try:
        if os.environ.get("HF_HUB_OFFLINE", "").upper() in {"1", "ON", "YES", "TRUE"}:
            offline = "HF_HUB_OFFLINE is set"
        else:
            info = HfApi(endpoint=endpoint).model_info(name, files_metadata=True, timeout=TIMEOUT_SECONDS)
    except GatedRepoError as error:
        raise _gated(name) from error
    except RepositoryNotFoundError as error:
        raise ModelError(
            f"{name} is not on the Hugging Face Hub, or is private: check the spelling, or log in with `hf auth login`"
        ) from error
    except (HTTPError, OSError) as error:  # no answer, or none of use: an earlier download may still do
        offline, cause = f"the Hub cannot be reached ({first_line(error)})", error
    except ValueError as error:
        raise ModelError(f"{name} is no Hugging Face id: {first_line(error)}") from error
    sizes = {file.rfilename: file.size or 0 for file in info.siblings or []} if info else {}
    get: dict[str, Any] = {"etag_timeout": TIMEOUT_SECONDS, "endpoint": endpoint, "local_files_only": bool(offline)}
    try:
        if info and "config.json" not in sizes:
            raise ModelError(f"{name} has no config.json, so it is no transformers checkpoint")
        check_config(name, Path(hf_hub_download(name, "config.json", **get)).parent)
        if info and not any(file.endswith(".safetensors") for file in sizes):
            raise _no_safetensors(name, sizes)
        _check_disk(name, sum(size for file, size in sizes.items() if file.endswith(".safetensors")))
        return Path(snapshot_download(name, allow_patterns=WANTED, **get))
    except GatedRepoError as error:
        raise _gated(name) from error
    except (HTTPError, OSError, ValueError) as error:
        if offline:
            raise ModelError(
                f"{name} is no local folder, is not in the download cache, and {offline}: "
                "go online once or give a local folder; 'tiny' and 'smollm2' need no network"
            ) from (cause or error)
        raise ModelError(
            f"downloading {name} into {constants.HF_HUB_CACHE} failed: {first_line(error)}; "
            "try again, it continues where it stopped (HF_HOME moves the folder)"
        ) from error


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or its type if it has none: our own messages are one line."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _gated(name: str) -> ModelError:
    return ModelError(
        f"{name} is gated: accept its terms on its page at the Hub, then log in with `hf auth login` or set HF_TOKEN"
    )


def _no_safetensors(name: str, files: Iterable[str]) -> ModelError:
    if any(Path(file).suffix in {".bin", ".pt", ".pth"} for file in files):
        return ModelError(
            f"{name} holds only pickled weights, which can run code when opened and are refused: "
            "ask for its safetensors version, or convert it where you trust it (save_pretrained writes safetensors)"
        )
    return ModelError(f"{name} holds no model.safetensors: its weights are missing or in another format")


def _check_disk(name: str, needed_bytes: int) -> None:
    from huggingface_hub import constants

    folder = Path(constants.HF_HUB_CACHE)
    free_bytes = shutil.disk_usage(next(part for part in (folder, *folder.parents) if part.exists())).free
    if needed_bytes > free_bytes:
        raise ModelError(
            f"{name} has {needed_bytes / 1e9:.1f} GB of weights and {folder} has room for {free_bytes / 1e9:.1f} GB: "
            "make room or point HF_HOME at another disk"
        )


def check_config(name: str, folder: Path) -> dict[str, Any]:
    """Return the parsed ``config.json`` of ``folder`` if it describes a causal LM that transformers itself knows.

    Raises
    ------
    ModelError
        No or broken ``config.json``, a model that needs its own code (never run here), or no causal LM.
    """
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    )

    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ModelError(f"{name} has no config.json, so it is no transformers checkpoint") from error
    except (ValueError, OSError) as error:
        raise ModelError(f"{name}: config.json cannot be read ({error}); download it again") from error
    kind = config.get("model_type") if isinstance(config, dict) else None
    if kind is None:
        raise ModelError(f"{name}: config.json names no model_type; it is no transformers checkpoint")
    if kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        why = "ships its own code, which is never run here" if "auto_map" in config else "is no causal LM that I know"
        raise ModelError(f"{name} ({kind}) {why}: choose a model whose class transformers itself has")
    classes = config.get("architectures") or []
    if classes:
        causal = any(part in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values() for part in classes)
    else:
        causal = kind not in MODEL_FOR_MASKED_LM_MAPPING_NAMES or bool(config.get("is_decoder"))
    if not causal:
        raise ModelError(f"{name} ({', '.join(classes) or kind}) is no causal LM: it cannot continue a text")
    return config


def check_weights(name: str, folder: Path, item_bytes: int, again: str = "download it again") -> int:
    """Read the headers of the weight files, check that the files are whole, and return the bytes they need in memory.

    Parameters
    ----------
    item_bytes
        Size of one value of the dtype that the weights will be loaded in.
    again
        What to do about a damaged file, for the message.

    Raises
    ------
    ModelError
        No safetensors, a shard that is missing, or a file that is truncated or damaged.
    """
    index = folder / "model.safetensors.index.json"
    if (folder / "model.safetensors").is_file():
        files = ["model.safetensors"]
    elif index.is_file():
        try:
            files = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise ModelError(f"{name}: {index.name} is damaged ({error}); {again}") from error
    else:
        raise _no_safetensors(name, [path.name for path in folder.iterdir()])
    total = 0
    for file in files:
        path = folder / file
        if not path.is_file():
            raise ModelError(f"{name}: {file} is listed in {index.name} but missing; {again}")
        try:
            with path.open("rb") as stream:
                (length,) = struct.unpack("<Q", stream.read(8))
                header = json.loads(stream.read(min(length, path.stat().st_size)))
            tensors = [tensor for key, tensor in header.items() if key != "__metadata__"]
            end = max((tensor["data_offsets"][1] for tensor in tensors), default=0)
            for tensor in tensors:
                stored = tensor["data_offsets"][1] - tensor["data_offsets"][0]
                total += math.prod(tensor["shape"]) * item_bytes if tensor["dtype"] in ITEM_BYTES else stored
        except (struct.error, ValueError, KeyError, AttributeError, TypeError, IndexError) as error:
            raise ModelError(f"{name}: {file} is no safetensors file, or damaged; {again}") from error
        if path.stat().st_size != 8 + length + end:
            raise ModelError(
                f"{name}: {file} has {path.stat().st_size} bytes where its header promises {8 + length + end}; "
                f"it is truncated or damaged, {again}"
            )
    return total
