"""What a model shows of chains that it is given to read: how sure it was of each step, how unlikely what stands there.

A model that writes nothing which can be read as steps still says of every token of a given text what it expected in
its place. So chains whose first wrong step is known exactly (:func:`o1lab.chains.plant.pairs`) are given to it, each as
its own answer to the problem, and a detector (:mod:`o1lab.chains.detect`) sees only its logits over the chain.

>>> from o1lab import models
>>> from o1lab.chains import plant
>>> seen = read(models.load("tiny", device="cpu"), plant.pairs(2, 1, style="language"))
>>> [rows.shape for rows in seen.features], seen.first, seen.left_out
([(1, 3), (1, 3), (1, 3), (1, 3)], [None, 1, None, 1], 0)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch.nn.functional import cross_entropy

from o1lab.chains.features import line_ends, step_ends, step_features
from o1lab.chains.plant import Planted
from o1lab.chains.render import parse, prompt
from o1lab.errors import EstimateError
from o1lab.models import Model
from o1lab.models.decode_rows import surety

FEATURES = ("min margin", "max entropy", "max surprise")
"""Columns: smallest top-1 minus top-2 logit, log of the greatest entropy (nats), greatest ``-log p`` (nats)."""


@dataclass(frozen=True)
class Given:
    """Chains that a model read, with what a detector may see.

    Attributes
    ----------
    features : list of ndarray, shape (steps, 3) each
        Columns are :data:`FEATURES`.
    texts : list of Planted
        The chains, in the order in which they were given.
    left_out : int
        Chains left out because a logit was not finite.
    """

    features: list[np.ndarray] = field(repr=False)
    texts: list[Planted] = field(repr=False)
    left_out: int = 0

    @property
    def first(self) -> list[int | None]:
        """Step (1-based) of the fault of each chain, or ``None``."""
        return [text.step for text in self.texts]

    @property
    def problems(self) -> list[str]:
        """Id of the problem of each chain."""
        return [text.sample.id for text in self.texts]

    def of(self, variant: str) -> Given:
        """The chains of one family only."""
        kept = [place for place, text in enumerate(self.texts) if text.sample.variant == variant]
        return Given([self.features[k] for k in kept], [self.texts[k] for k in kept])


def read(model: Model, texts: Sequence[Planted], style: str = "language") -> Given:
    """Let ``model`` read chains, one pass each: the problem is the user's turn, the chain is the answer.

    Parameters
    ----------
    model : Model
        In language one whose tokenizer gives offsets (its chat template is used if it has one); in tokens a reasoner.
    texts : sequence of Planted
        Right chains and faulty ones, written in ``style``.
    style : str
        ``"language"`` or ``"tokens"``.

    Raises
    ------
    EstimateError
        No right chain or no faulty one; no tokenizer, or one without offsets; tokens that are not those of the
        style; a text whose lines are not its steps; no chain with finite logits.
    ModelError
        A problem with its chain does not fit the model's context.
    UnknownName
        No such style.
    """
    faulty = sum(text.step is not None for text in texts)
    if not 0 < faulty < len(texts):
        raise EstimateError(f"{faulty} of {len(texts)} texts have a fault: give right ones too, and faulty ones")
    if getattr(model, "tokenizer", None) is None:
        raise EstimateError(f"{model.name} has no tokenizer here: nothing can be given to it to read")
    features, kept = [], []
    for text in texts:
        asked, tail, ends = _aligned(model, text, style)
        numbers = _shown(model, asked, tail)[:, : ends[-1]]
        if np.isfinite(numbers).all():
            features.append(step_features(*numbers[:2], ends, surprise=numbers[2]))
            kept.append(text)
    if not kept:
        raise EstimateError(f"{model.name}: no text has finite logits, NaN or infinite ones in all {len(texts)}")
    return Given(features, kept, len(texts) - len(kept))


def _aligned(model: Model, text: Planted, style: str) -> tuple[list[int], list[int], list[int]]:
    """Token ids of the problem and of the chain, and the tokens up to the end of each step."""
    coder, question = model.tokenizer, prompt(text.sample, style)
    if style == "language":
        question = model.turn(question)
    tail, chain = coder(text.text, add_special_tokens=False).input_ids, parse(text.sample, text.text, style)
    if style == "language":
        try:
            ends = line_ends(text.text, chain, coder, len(tail))
        except NotImplementedError as error:
            raise EstimateError(f"the tokenizer of {model.name} gives no offsets: use a fast one") from error
    else:
        ends = step_ends(text.text, chain) if coder.convert_tokens_to_ids(text.text.split()) == tail else None
    if ends is None or (text.step or 0) > len(ends):
        wrong = f"{text.sample.id}: the text cannot be aligned to its steps in the {style} of {model.name}"
        raise EstimateError(f"{wrong}; give chains in that style, as plant.pairs(…, style={style!r}) does")
    return model.encode(question)[0].tolist(), tail, ends


@torch.inference_mode()
def _shown(model: Model, asked: list[int], tail: list[int]) -> np.ndarray:
    """Margin, entropy and surprise at each token of ``tail``; shape (3, tokens)."""
    whole = model.encode([*asked, *tail])
    logits = model.model(whole[:, :-1], use_cache=False, logits_to_keep=len(tail)).logits[0].float()
    surprise = cross_entropy(logits, whole[0, -len(tail) :], reduction="none")
    return torch.stack([*surety(logits), surprise]).cpu().double().numpy()
