"""Checkpoints of a training run: weights and optimiser state in safetensors, and a JSON file that vouches for them.

The JSON file is written last and names the other by its SHA-256, so a checkpoint is whole or it is not there.
Batches follow from the seed and the number of the step, so no random state has to be kept.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load as read_tensors
from safetensors.torch import save as write_tensors
from torch import nn

from o1lab.errors import TrainingError
from o1lab.storage import atomic_write, write_json

FILE = "checkpoint.json"
FORMAT = 2
"""1 had another curriculum: a run goes on only under the one that it began with."""
BUDGET = ("steps", "seconds", "marks", "problems")
"""Settings that may change on resuming."""


def save(folder: Path, model: nn.Module, optimiser: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Write a checkpoint; ``state`` is a JSON dictionary with at least ``step`` and ``config``."""
    tensors = {}
    for name, weight in model.named_parameters():
        tensors[f"weight/{name}"] = weight.detach().cpu()
        tensors |= {f"{key}/{name}": value.cpu() for key, value in optimiser.state.get(weight, {}).items()}
    data = write_tensors({name: tensor.contiguous() for name, tensor in tensors.items()})
    file = f"state-{state['step']}.safetensors"
    atomic_write(folder / file, data)
    stamp = {"format": FORMAT, "file": file, "sha256": hashlib.sha256(data).hexdigest()}
    write_json(folder / FILE, {**state, **stamp})
    for old in folder.glob("state-*.safetensors"):
        if old.name != file:
            old.unlink()


def read(folder: Path, config: dict[str, Any]) -> dict[str, Any]:
    """The JSON state of the checkpoint in ``folder``, if it goes with ``config``.

    Raises
    ------
    TrainingError
        No checkpoint, one that cannot be read, or one of other settings.
    """
    try:
        state = json.loads((folder / FILE).read_text(encoding="utf-8"))
        old = {**state["config"]}
        step, stamp = int(state["step"]), (str(state["file"]), str(state["sha256"]))
        if state["format"] != FORMAT or step < 0 or Path(stamp[0]).name != stamp[0]:
            raise ValueError(f"format {state['format']}, step {step}, file {stamp[0]}")
    except FileNotFoundError as error:
        raise TrainingError(f"{folder} holds no checkpoint to resume: start without --resume") from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise TrainingError(f"{folder / FILE} is damaged ({error}): start again in another folder") from error
    names = [name for name in {**old, **config} if name not in BUDGET and old.get(name) != config.get(name)]
    if names:
        what = ", ".join(f"{name} was {old.get(name)} and is now {config.get(name)}" for name in names)
        raise TrainingError(f"the checkpoint in {folder} is of other settings: {what}; give the same, or another --out")
    return state


def restore(folder: Path, state: dict[str, Any], model: nn.Module, optimiser: torch.optim.Optimizer) -> None:
    """Put the tensors that ``state`` names into model and optimiser.

    Raises
    ------
    TrainingError
        The file is missing or is not the one that was written, or its weights are not this model's.
    """
    path = folder / state["file"]
    try:
        data = path.read_bytes()
    except OSError as error:
        raise TrainingError(f"{path} cannot be read ({error.strerror}): start again in another folder") from error
    if hashlib.sha256(data).hexdigest() != state["sha256"]:
        raise TrainingError(f"{path} is not what was written (SHA-256 differs): start again in another folder")
    try:
        tensors = read_tensors(data)
    except Exception as error:
        raise TrainingError(f"{path} is no safetensors file ({error}): start again in another folder") from error
    named = dict(model.named_parameters())
    shapes = {name.removeprefix("weight/"): t.shape for name, t in tensors.items() if name.startswith("weight/")}
    for name in {**named, **shapes}:
        if name not in named or name not in shapes or named[name].shape != shapes[name]:
            raise TrainingError(f"{path} holds another model's weights: {name} does not fit; give another --out")
    with torch.no_grad():
        for name, weight in named.items():
            weight.copy_(tensors[f"weight/{name}"])
    order = [weight for group in optimiser.param_groups for weight in group["params"]]
    names = {id(weight): name for name, weight in named.items()}
    kept: dict[int, dict[str, torch.Tensor]] = {}
    for place, weight in enumerate(order):
        ending = f"/{names[id(weight)]}"
        found = {key.removesuffix(ending): t for key, t in tensors.items() if key.endswith(ending)}
        found.pop("weight")
        if found:
            kept[place] = found
    optimiser.load_state_dict({"state": kept, "param_groups": optimiser.state_dict()["param_groups"]})
