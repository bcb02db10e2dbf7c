"""What a training run does and where it stands: its settings, its problems, one optimiser step.

What step i sees follows from the seed, i, and how far the kinds have come: the kinds of steps (operands, digits, rules,
relations) come in one after the other, and chains grow from a few steps to ``longest`` as they are mastered
(:mod:`~o1lab.models.ladder`) or, for the coupled model, by the clock.
"""

from __future__ import annotations

import json
import math
import random
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import nn

from o1lab.errors import TrainingError, UnknownName
from o1lab.models import batches, checkpoint, coupled, coupled_layout, measure, reasoner, vocabulary
from o1lab.models.ladder import EVERY, Ladder

GRID = tuple(n for n in range(1, 513) if n <= 8 or n % (1 << max(0, n.bit_length() - 3)) == 0)
"""Program lengths in use (1 to 8, 10, 12, 14, 16, 20, …): few shapes, so that memory and compiled code are reused."""


@dataclass(frozen=True)
class Config:
    """What a run does.

    Attributes
    ----------
    kind, size : str
        ``"reasoner"`` or ``"coupled"``, and one of its sizes.
    seed : int
        Of weights and problems.
    longest : int
        N_max, the longest trained program.
    steps, seconds : int, float
        The budget, in optimiser steps or in seconds of wall-clock time; exactly one is positive.
    tokens : int
        Tokens in a step, over all variants; with ``pace``, those that are not mastered get more of them.
    rate, warm_up, weight_decay : float, int, float
        AdamW; the rate falls to 3 % along a cosine.
    pace : float
        Share of the longest chains of a variant that must be right before it gets harder or longer ones; 0: by the
        clock.
    grow, ease : float
        Shares of the run in which N grows to ``longest``, and in which all kinds of steps come in. With ``pace``,
        ``grow`` is the share after which all kinds are at their longest and hardest, mastered or not, and ``ease`` is
        not used.
    shuffled : float
        Share of programs shown in random order. A program in order can be read by position; one out of order has to
        be looked up by its step ids.
    reach : int
        N whose distances are shown through random gaps in the positions, in half of the batches; 0: no gaps.
    variants : tuple of str
        What the reasoner learns.
    modulus, step_ids : int
        Of the coupled model: the modulus of its chains (31 is that of ``chains.make``), and how many ids there are.
    problems : int
        Problems of each kind and length in a measurement of accuracy.
    marks : int
        How many times in the run loss and accuracy are looked at and logged.
    compiled : bool
        Compile the layers.
    """

    kind: str = "reasoner"
    size: str = "small"
    seed: int = 0
    longest: int = 8
    steps: int = 0
    seconds: float = 0.0
    tokens: int = 2048
    rate: float = 2e-3
    warm_up: int = 100
    weight_decay: float = 0.01
    pace: float = 0.0
    grow: float = 0.5
    ease: float = 0.3
    shuffled: float = 0.75
    reach: int = 0
    variants: tuple[str, ...] = vocabulary.VARIANTS
    modulus: int = vocabulary.NUMBERS
    step_ids: int = 320
    problems: int = 64
    marks: int = 20
    compiled: bool = False

    def __post_init__(self) -> None:
        if self.kind not in PRESETS:
            raise UnknownName("kind of model", self.kind, tuple(PRESETS))
        if self.size not in module(self.kind).SIZES:
            raise UnknownName("size", self.size, tuple(module(self.kind).SIZES))
        if unknown := [name for name in self.variants if name not in vocabulary.VARIANTS]:
            raise UnknownName("variant", unknown[0], vocabulary.VARIANTS)
        if (self.steps > 0) == (self.seconds > 0) or min(self.steps, self.seconds) < 0:
            raise TrainingError(f"steps={self.steps}, seconds={self.seconds}: give a budget in one of them")
        positive = {name: getattr(self, name) for name in ("tokens", "rate", "longest", "problems", "marks")}
        shares = {name: getattr(self, name) for name in ("grow", "ease", "pace", "shuffled")}
        wrong = [name for name, value in positive.items() if not (math.isfinite(value) and value > 0)]
        wrong += [name for name, value in shares.items() if not 0 <= value <= 1]
        wrong += [] if self.longest < vocabulary.STEPS and self.reach < vocabulary.STEPS else ["longest or reach"]
        wrong += [] if self.variants else ["variants"]
        wrong += [] if 2 <= self.modulus <= vocabulary.NUMBERS else ["modulus"]
        wrong += [] if self.kind != "coupled" or self.longest < self.step_ids else ["step_ids"]
        if wrong:
            raise TrainingError(f"{wrong[0]} is out of range in {self}")


PRESETS: dict[str, dict[str, dict[str, Any]]] = {
    "reasoner": {
        "tiny": {"longest": 4, "tokens": 1024, "problems": 16, "marks": 5},
        "small": {"problems": 16, "marks": 10},
        "full": {
            "longest": 128,
            "tokens": 65536,
            "rate": 9e-4,
            "pace": 0.6,
            "grow": 0.75,
            "warm_up": 300,
            "problems": 128,
        },  # fmt: skip
    },
    "coupled": {
        "tiny": {"longest": 4, "tokens": 512, "rate": 5e-3, "warm_up": 20, "grow": 0.0, "marks": 5},
        "small": {"longest": 12, "tokens": 1024, "rate": 3e-3, "weight_decay": 0.08, "grow": 0.0, "ease": 0.2},
    },
}
"""What differs from ``Config``'s own values by kind and size."""


class Run:
    """A model in training: its weights, its optimiser, and where it stands."""

    def __init__(self, config: Config, device: torch.device) -> None:
        self.config, self.device = config, device
        self.model = module(config.kind).build(config.size, config.seed, **_extra(config)).to(device)
        matrices = [w for name, w in self.model.named_parameters() if w.ndim == 2 and "embed" not in name]
        chosen = {id(weight) for weight in matrices}
        others = [weight for weight in self.model.parameters() if id(weight) not in chosen]
        groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": others, "weight_decay": 0.0}]
        self.optimiser = torch.optim.AdamW(groups, config.rate, betas=(0.9, 0.98), fused=device.type == "cuda")
        self.generator = torch.Generator(device)
        self.step = self.tokens = 0
        self.seconds = 0.0
        self.start = ""
        self.ladder = Ladder(self.kinds, config.longest, config.pace, device)
        if config.compiled:
            for layer in self.model.model.layers:
                layer.compile(dynamic=True)

    def begin_from(self, folder: Path) -> None:
        """Take the weights of an earlier run (or of its model's folder) in place of random ones.

        Raises
        ------
        TrainingError
            There is no such model, or it is of another size.
        """
        folder = folder / "model" if (folder / "model" / "model.safetensors").exists() else folder
        try:
            earlier = checkpoint.read_tensors((folder / "model.safetensors").read_bytes())
            settings = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        except Exception as error:
            raise TrainingError(f"no model to begin from in {folder}: {error}") from error
        weights = dict(self.model.named_parameters())
        if "lm_head.weight" in earlier and "lm_head.weight" not in weights:
            raise TrainingError(f"the model in {folder} has a head of its own, as calibrated ones do: begin from the "
                                "model that it was made of")  # fmt: skip
        shapes = [{name: value.shape for name, value in some.items()} for some in (weights, earlier)]
        wrong = [name for name in {**weights, **earlier} if shapes[0].get(name) != shapes[1].get(name)]
        own = self.model.config.to_dict()
        wrong += [name for name in ("num_attention_heads", "rope_parameters") if settings.get(name) != own.get(name)]
        if wrong:
            raise TrainingError(f"the model in {folder} is no {self.config.kind} of size {self.config.size!r}: "
                                f"{wrong[0]} does not fit; give its own kind and size")  # fmt: skip
        with torch.no_grad():
            for name, weight in weights.items():
                weight.copy_(earlier[name])
        self.start = folder.name

    @property
    def share(self) -> float:
        """How much of the budget is used, 0 to 1."""
        config = self.config
        return min(1.0, self.step / config.steps if config.steps else self.seconds / config.seconds)

    def difficulty(self, kind: str) -> float:
        """Share of the operands, digits, rules or relations in use now for one kind of chain."""
        if self.config.pace:
            return self.ladder.at(kind, late=self.share >= self.config.grow)[1]
        return min(1.0, self.share / self.config.ease) if self.config.ease else 1.0

    def longest(self, kind: str) -> int:
        """Longest program in use now for one kind of chain."""
        config = self.config
        if config.pace:
            return self.ladder.at(kind, late=self.share >= config.grow)[0]
        grown = min(1.0, self.share / config.grow) if config.grow else 1.0
        return min(config.longest, math.ceil(2 * (config.longest / 2) ** grown))  # by equal factors

    @property
    def kinds(self) -> tuple[str, ...]:
        """What is learnt side by side: variants, or ``coupled`` alone."""
        return self.config.variants if self.config.kind == "reasoner" else ("coupled",)

    def advance(self) -> torch.Tensor:
        """One optimiser step; the losses by kind stay on the device."""
        config = self.config
        chance = random.Random(f"{config.seed} {self.step}")
        self.generator.manual_seed(chance.getrandbits(32))
        losses = []
        for kind in self.kinds:
            with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
                logits, targets = self._predict(kind, round(config.tokens * self.ladder.share(kind)), chance)
            loss = nn.functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
            (loss / len(self.kinds)).backward()
            losses.append(loss.detach())
        warm = min(1.0, (self.step + 1) / config.warm_up) if config.warm_up else 1.0
        for group in self.optimiser.param_groups:
            group["lr"] = config.rate * warm * (0.03 + 0.97 * 0.5 * (1 + math.cos(math.pi * self.share)))
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimiser.step()
        self.optimiser.zero_grad()
        self.step += 1
        if config.pace and self.step % EVERY == 0:
            self.ladder.climb()
        return torch.stack(losses)

    def _predict(self, kind: str, tokens: int, chance: random.Random) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits and targets of new problems of one kind, about ``tokens`` tokens of them."""
        longest = self.longest(kind)
        drawn = longest if self.config.pace and chance.random() < 0.25 else chance.randint(1, longest)
        if kind == "coupled":  # longer ones hold more pairs of ids to tell apart
            drawn = max(drawn, chance.randint(1, longest))
        steps = max(n for n in GRID if n <= drawn)
        if kind == "coupled":
            settings = {"step_ids": self.config.step_ids, "modulus": self.config.modulus}
            rows = max(1, tokens // coupled_layout.tokens(steps))
            made = coupled_layout.make(rows, steps, self.generator, difficulty=self.difficulty(kind), **settings)
            self.tokens += made.words.numel()
            count = made.targets.shape[1]
            logits = self.model(made.words, made.ids, made.slots, logits_to_keep=count, use_cache=False).logits
            return logits, made.targets - coupled_layout.FIRST
        asked = steps if chance.random() < 0.75 else chance.randint(1, steps)
        size = chance.choice((batches.REACHABLE, batches.REACHABLE, batches.REACHABLE, 16, 24))
        difficulty = self.difficulty(kind)
        rows = max(1, tokens // sum(batches.tokens(kind, steps, asked, size, difficulty)))
        batch = batches.make(
            kind, rows, steps, self.generator, asked=asked, shuffled=self.config.shuffled, entities=size,
            difficulty=difficulty,
        )  # fmt: skip
        self.tokens += batch.ids.numel()
        positions = None
        if self.config.reach and chance.random() < 0.5:
            positions = reasoner.gapped(batch, sum(batches.tokens(kind, self.config.reach)), self.generator)
        logits, targets = reasoner.logits(self.model, batch, positions), batch.ids[:, batch.start :]
        if self.config.pace:
            self.ladder.saw(kind, steps, (logits.detach().argmax(-1) == targets).all(1))
        return logits, targets

    @property
    def finite(self) -> bool:
        """Whether all weights are finite."""
        return bool(torch.stack([weight.detach().isfinite().all() for weight in self.model.parameters()]).all())

    def accuracy(self) -> dict[str, dict[str, float]]:
        """Whole-chain accuracy by variant, at a quarter of the longest trained N and at it."""
        config, found = self.config, {}
        lengths = sorted({max(1, config.longest // 4), config.longest})
        self.model.eval()
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
            for kind in self.kinds:
                for n in lengths:
                    if kind == "coupled":
                        right = coupled.survival(self.model, n, config.problems, seed=-1, modulus=config.modulus).right
                    else:
                        right = measure.survival(self.model, kind, n, config.problems, seed=-1).right
                    found.setdefault(kind, {})[str(n)] = float(right.mean())
        self.model.train()
        return found

    def save(self, folder: Path) -> None:
        """Write a checkpoint."""
        state = {"step": self.step, "tokens": self.tokens, "seconds": self.seconds, "config": plain(self.config)}
        state |= {"ladder": self.ladder.state(), "start": self.start}
        checkpoint.save(folder, self.model, self.optimiser, state)

    def restore(self, folder: Path) -> None:
        """Go back to the checkpoint in ``folder``."""
        state = checkpoint.read(folder, plain(self.config))
        checkpoint.restore(folder, state, self.model, self.optimiser)
        self.step, self.tokens, self.seconds = state["step"], state["tokens"], state["seconds"]
        self.ladder.restore(state["ladder"])
        self.start = state.get("start", "")


def preset(kind: str, size: str, **changes: Any) -> Config:
    """The settings of a kind and size, with ``changes``.

    >>> preset("coupled", "small", steps=100).longest
    12
    """
    if kind not in PRESETS:
        raise UnknownName("kind of model", kind, tuple(PRESETS))
    if size not in PRESETS[kind]:
        raise UnknownName("size", size, tuple(PRESETS[kind]))
    known = [field.name for field in fields(Config)]
    if unknown := [name for name in changes if name not in known]:
        raise UnknownName("setting", unknown[0], known)
    return Config(**{"kind": kind, "size": size, **PRESETS[kind][size], **changes})


def module(kind: str) -> Any:
    """The module that builds models of this kind."""
    return {"reasoner": reasoner, "coupled": coupled}[kind]


def _extra(config: Config) -> dict[str, Any]:
    return {"trained_steps": config.longest, "step_ids": config.step_ids} if config.kind == "coupled" else {}


def plain(config: Config) -> dict[str, Any]:
    """The settings as JSON reads them back."""
    return json.loads(json.dumps(asdict(config)))
