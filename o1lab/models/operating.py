"""Operating points: a model of a chosen whole-chain accuracy, with an error rate that is the same at every step.

Where a chain ends at a wrong step is decided by two things: whether the model finds what it needs, which depends on how
much there is to search, and whether it then works out the right result, which does not. A model with a constant error
per step therefore needs look-ups that never fail and a result that sometimes does. ``calibrate`` makes one from a fully
trained model by noise in the rows of its head that write results (letters, numbers, entities), untied from the
embeddings for that, and finds the strength by bisection on problems of their own; ``between`` does the same on the line
between two checkpoints of a run. Noise in feed-forward blocks, in the last normalisation or in embeddings disturbs
look-ups too: the error then depends on the step or on the program's length (LOG.md). Whether the hazard is constant is
to be measured each time (``decay``).

``python -m o1lab.models.operating runs/reasoner/model --out runs/calibrated`` does it and shows the hazard.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaForCausalLM

from o1lab.errors import O1labError, TrainingError
from o1lab.models import measure, reasoner, vocabulary
from o1lab.stats import Estimate

RESULTS = {
    "modular": (vocabulary.NUMBER, vocabulary.NUMBERS), "digits": (vocabulary.NUMBER, 10),
    "symbols": (vocabulary.LETTER, len(vocabulary.LETTERS)), "hops": (vocabulary.ENTITY, vocabulary.ENTITIES),
}  # fmt: skip
"""The tokens that a variant's results are written in: the first id, and how many."""
ROUNDS = 14
"""Most bisections: a strength to one part in 16,000 of the bracket."""


@dataclass(frozen=True)
class Point:
    """Where a model is to work: whole-chain ``accuracy`` ± ``tolerance`` of ``variant`` chains of ``steps`` steps."""

    accuracy: float = 0.826
    tolerance: float = 0.015
    variant: str = "modular"
    steps: int = 32
    problems: int = 4096

    def __post_init__(self) -> None:
        if not (0 < self.accuracy < 1 and 0 < self.tolerance < 1 and self.problems > 0 and self.steps > 0):
            raise TrainingError(f"{self} is no operating point: accuracy and tolerance lie between 0 and 1")

    def measured(self, model: LlamaForCausalLM, seed: int) -> float:
        """The model's whole-chain accuracy on problems that follow from ``seed``."""
        return float(measure.survival(model, self.variant, self.steps, self.problems, seed).right.mean())


@dataclass(frozen=True)
class Calibrated:
    """What a calibration found.

    Attributes
    ----------
    knob : float
        Strength of the noise, or the place between two checkpoints.
    chosen : float
        Accuracy on the problems that it was chosen on.
    confirmed : Estimate
        Accuracy on others.
    tried : tuple of (knob, accuracy)
    """

    knob: float
    chosen: float
    confirmed: Estimate
    tried: tuple[tuple[float, float], ...]


def calibrate(model: LlamaForCausalLM, point: Point | None = None, *, seed: int = 0, most: float = 4.0) -> Calibrated:
    """Add noise to the head's rows of result tokens of ``model``, in place, until it works at ``point``.

    A head that shares its weights with the embeddings gets weights of its own.

    Parameters
    ----------
    point : Point, optional
        Default: 82.6 ± 1.5 % of ``modular`` chains of 32 steps.
    seed : int
        Of the noise and of the problems.
    most : float
        Strongest noise tried, relative to the root mean square of the weights.

    Raises
    ------
    TrainingError
        The model is not better than the point as it is, or not worse with the strongest noise, or the accuracy jumps
        over the point. The weights are as before then.
    """
    point, tied = point or Point(), model.config.tie_word_embeddings
    clean = _results(model, point.variant).detach().clone()
    try:
        return _search(model, lambda strength: disturb(model, point.variant, strength, seed, clean), point, seed, most)
    except TrainingError:
        if tied:
            model.lm_head.weight, model.config.tie_word_embeddings = model.model.embed_tokens.weight, True
        raise


def disturb(
    model: LlamaForCausalLM, variant: str, strength: float, seed: int = 0, clean: torch.Tensor | None = None
) -> None:  # fmt: skip
    """Add noise to the head's rows of a variant's result tokens, in place.

    Parameters
    ----------
    strength : float
        Standard deviation, relative to the root mean square of the rows.
    clean : Tensor, shape (result tokens, width), optional
        The rows without noise; default: as they are.
    """
    rows = _results(model, variant)
    clean = rows.detach().clone() if clean is None else clean
    noise = torch.randn(clean.shape, generator=torch.Generator().manual_seed(seed))
    noise *= clean.float().square().mean().sqrt().cpu()
    with torch.no_grad():
        rows.copy_((clean + strength * noise.to(clean)).half())  # as it will be saved


def between(
    model: LlamaForCausalLM, good: Mapping[str, torch.Tensor], bad: Mapping[str, torch.Tensor],
    point: Point | None = None, *, seed: int = 0,
) -> Calibrated:  # fmt: skip
    """Set ``model`` to the weights between two state dicts of a run at which it works at ``point``; see above."""

    if any(not torch.equal(one["lm_head.weight"], one["model.embed_tokens.weight"]) for one in (good, bad)):
        _untie(model)

    def turn(share: float) -> None:
        model.load_state_dict({name: torch.lerp(weight, bad[name].to(weight), share) for name, weight in good.items()})

    return _search(model, turn, point or Point(), seed, 1.0)


def _search(model: LlamaForCausalLM, turn: Callable[[float], None], point: Point, seed: int, most: float) -> Calibrated:
    """Bisect the knob, at 0 too good and at ``most`` too bad."""
    tried: list[tuple[float, float]] = []

    def at(knob: float) -> float:
        turn(knob)
        tried.append((knob, point.measured(model, seed=1000 + seed)))
        return tried[-1][1]

    low, high = 0.0, most
    first, last = at(low), at(high)
    problem = ""
    if first < point.accuracy:
        problem = f"the model is right in {first:.1%} as it is: train it further, {point.accuracy:.1%} is asked for"
    elif last > point.accuracy:
        problem = f"at the far end the model is still right in {last:.1%}: allow more than {most:g}"
    while not problem and len(tried) < ROUNDS + 2:
        if min(abs(accuracy - point.accuracy) for _, accuracy in tried) <= point.tolerance / 6:
            break
        middle = (low + high) / 2
        if at(middle) > point.accuracy:
            low = middle
        else:
            high = middle
    knob, chosen = min(tried, key=lambda pair: abs(pair[1] - point.accuracy))
    if not problem and abs(chosen - point.accuracy) > point.tolerance:
        problem = f"the accuracy jumps over {point.accuracy:.1%} (nearest: {chosen:.1%} at {knob:g})"
    turn(0.0 if problem else knob)
    if problem:
        raise TrainingError(problem)
    fresh = measure.survival(model, point.variant, point.steps, point.problems, seed=2000 + seed)
    return Calibrated(knob, chosen, fresh.estimate, tuple(tried))


class EarlyStop:
    """End a run at a point: call it after each step, as ``train(watch=…)`` does.

    It looks every ``every`` steps. A run that has passed the point in between is taken back on the line between its
    weights then and now.
    """

    def __init__(self, point: Point, every: int = 50) -> None:
        self.point, self.every = point, every
        self.before: dict[str, torch.Tensor] | None = None
        self.quick = replace(point, problems=min(point.problems, 256))

    def __call__(self, run: Any) -> bool:
        """Whether the run has come to the point."""
        point = self.point
        if run.step % self.every:
            return False
        model = run.model
        now = self.quick.measured(model, seed=999)
        if now > point.accuracy - 0.1:
            now = point.measured(model, seed=1000)
        if now < point.accuracy - point.tolerance:
            self.before = {name: weight.detach().clone() for name, weight in model.state_dict().items()}
            return False
        if now > point.accuracy + point.tolerance:
            if self.before is None:
                raise TrainingError(f"the run is past the point already ({now:.1%}): start it anew")
            between(model, {name: w.detach().clone() for name, w in model.state_dict().items()}, self.before, point)
        return True


def _results(model: LlamaForCausalLM, variant: str) -> torch.Tensor:
    """The head's rows of the tokens that results are written in: a view, so that writing to it changes the model."""
    _untie(model)
    first, count = RESULTS[variant]
    return model.lm_head.weight[first : first + count]


def _untie(model: LlamaForCausalLM) -> None:
    """Give the head weights of its own."""
    if model.config.tie_word_embeddings:
        model.config.tie_word_embeddings = False
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())


@dataclass(frozen=True)
class Decay:
    """Whole-chain accuracy at one N, with faults per step in the first and in the second half of the chain.

    ``late`` is ``None`` where no chain came that far. ``predicted`` is the accuracy that the shortest chain's error per
    step gives at this N, if it is constant.
    """

    steps: int
    accuracy: Estimate
    early: Estimate
    late: Estimate | None
    predicted: float


def decay(
    model: LlamaForCausalLM, variant: str = "modular", lengths: tuple[int, ...] = (16, 32, 64, 128), n: int = 1024,
    seed: int = 3000,
) -> list[Decay]:  # fmt: skip
    """Accuracy and hazard by N: under a constant error per step, early, late and all N agree."""
    rows, rate = [], None
    for steps in lengths:
        made = measure.survival(model, variant, steps, n, seed)
        rate = made.hazard.value if rate is None else rate
        half = max(1, steps // 2)
        early, late = made.hazard_between(1, half), made.hazard_between(half + 1, steps)
        rows.append(Decay(steps, made.estimate, early, late, (1 - rate) ** steps))
    return rows


def main(arguments: list[str] | None = None) -> int:
    """The command line."""
    about = (__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser(prog="python -m o1lab.models.operating", description=about)
    parser.add_argument("model", help="folder of a trained reasoner")
    parser.add_argument("--out", required=True, help="folder for the calibrated one")
    parser.add_argument("--device")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--variant", nargs="+", choices=RESULTS, default=[Point.variant], help="one after the other")
    for name, default in asdict(Point()).items():
        if name != "variant":
            parser.add_argument(f"--{name}", type=type(default), default=default)
    given = vars(parser.parse_args(arguments))
    source, out, device, seed, variants = (given.pop(name) for name in ("model", "out", "device", "seed", "variant"))
    try:
        from o1lab import models

        if {"modular", "digits"} <= set(variants):
            raise TrainingError("modular and digits write their results with the same numbers: calibrate one of them")
        loaded = models.load(str(Path(source).resolve()), device=device, dtype="float32").model
        notes: dict[str, Any] = {"from": reasoner.notes(source), "seed": seed, "points": []}
        for variant in variants:
            point = Point(variant=variant, **given)
            found = calibrate(loaded, point, seed=seed)
            print(f"{variant}, noise {found.knob:.4f} of the head's size: {found.chosen:.1%} where chosen, "
                  f"{found.confirmed} elsewhere", flush=True)  # fmt: skip
            notes["points"].append(asdict(point) | {
                "noise": found.knob, "chosen": found.chosen, "confirmed": found.confirmed.to_dict(), "decay": [],
            })  # fmt: skip
        for kept in notes["points"]:
            for row in decay(loaded, kept["variant"]):
                kept["decay"].append(asdict(row))
                print(f"{kept['variant']}, N = {row.steps}: {row.accuracy}, predicted {row.predicted:.3f}; "
                      f"faults per step {row.early} | {row.late}", flush=True)  # fmt: skip
        reasoner.save(loaded, out, notes)
    except O1labError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
