"""Interventions on decoding, each a context manager with one knob around any Hugging Face decoder.

>>> import torch, o1lab.models
>>> from o1lab.decoding import log_n, quantise_kv
>>> model = o1lab.models.load("tiny", device="cpu")
>>> prompt = torch.arange(1, 9)[None]
>>> with log_n(model, trained_length=32), quantise_kv(model, bits=4):
...     text = model.model.generate(prompt, max_new_tokens=4, do_sample=False)
>>> text.shape
torch.Size([1, 12])

Baseline and treatment differ by the one ``with`` line. Contexts nest, and whatever happens inside, on exit the model is
what it was. They act on one process and one thread, on models in ``sdpa`` or ``eager`` attention, not compiled.
"""

from o1lab.decoding.attention import article_bias, dropout_zero, log_n
from o1lab.decoding.cache import missing_scale, quantise, quantise_kv, round_kv
from o1lab.decoding.output import ScalerReport, fp32_head, fp32_softmax, grad_scaler_step
from o1lab.decoding.positions import clip_distance, group_positions, rope_in
from o1lab.decoding.recheck import Rechecked, recheck
from o1lab.decoding.recompute import recompute_kv
from o1lab.decoding.regrounding import reground
from o1lab.decoding.segments import Segmented
from o1lab.decoding.stopping import (
    ArticleStop,
    Outcome,
    StopRule,
    StopSet,
    after_steps,
    broken,
    entropy,
    first_stop,
    judge,
    rates,
)
from o1lab.decoding.voting import vote

__all__ = [
    "ArticleStop",
    "Outcome",
    "Rechecked",
    "ScalerReport",
    "Segmented",
    "StopRule",
    "StopSet",
    "after_steps",
    "article_bias",
    "broken",
    "clip_distance",
    "dropout_zero",
    "entropy",
    "first_stop",
    "fp32_head",
    "fp32_softmax",
    "grad_scaler_step",
    "group_positions",
    "judge",
    "log_n",
    "missing_scale",
    "quantise",
    "quantise_kv",
    "rates",
    "recheck",
    "recompute_kv",
    "reground",
    "rope_in",
    "round_kv",
    "vote",
]
