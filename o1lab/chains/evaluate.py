"""Let a model work chain problems, judge every step, and keep what it produced so that a broken run goes on.

>>> from o1lab import chains, models
>>> model = models.load("tiny", device="cpu")
>>> report = chains.evaluate(model, chains.make("symbols", 2, 4, seed=0), cap=8, progress=False)
>>> print(report.accuracy, report.capped.value)
0 [0, 0.4899] (n=4) 1.0
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from o1lab.chains import render
from o1lab.chains.changes import changes
from o1lab.chains.report import ChainReport, Result
from o1lab.chains.results_file import ResultsFile
from o1lab.chains.samples import Sample
from o1lab.errors import ChainError, ModelError, UnknownName
from o1lab.models import Model, decode, endpoint
from o1lab.progress import progress as show

REASONER_WORDS = {"<bos>", "chain", "s0", "s511", "e63", "swap34"}
ITEM_CAP = 1024
"""Default cap in tokens for items without steps, whose length nobody knows."""


def evaluate(
    model: Model | endpoint.Endpoint,
    samples: Sequence[Any],
    *,
    style: str | None = None,
    cap: int | None = None,
    out: str | Path | None = None,
    seed: int = 0,
    temperature: float = 0.0,
    settings: Mapping[str, Any] | None = None,
    progress: bool = True,
    **decoding: Any,
) -> ChainReport:
    """Ask ``model`` every sample and judge what it writes.

    Parameters
    ----------
    model : Model or Endpoint
        What :func:`o1lab.models.load` gives.
    samples : sequence
        Chain problems of any lengths and tasks, or items without steps that have ``id``, ``prompt``, ``answer`` and
        ``score(text)``. Ids must differ.
    style : str, optional
        ``"tokens"`` or ``"language"``. Default: tokens for a model whose tokenizer is the reasoner's, else language.
    cap : int, optional
        Most new tokens for each sample. Default for a chain: its gold length and one step more in tokens, one and a
        half gold lengths and 64 in language.
    out : path, optional
        JSON lines file that each result is appended to as it comes. If it is there, only what it lacks is done: what
        is missing, a torn last line, and what an endpoint lost. It must be of the same samples, model and settings.
    seed, temperature
        Above temperature 0 tokens are drawn, for each sample from its own seed.
    settings : mapping, optional
        What else makes this run what it is, for example the intervention that is open around the call: it goes into
        the file's header and must be the same when the run goes on. Values that JSON can hold.
    progress : bool
        Show progress.
    **decoding
        For a model on this machine, of :func:`o1lab.models.decode.stream`: ``batch_size``, ``batch_tokens``,
        ``scores=True`` for margins and entropies, ``stop_ids``, ``on_logits``.

    Returns
    -------
    ChainReport

    Raises
    ------
    ChainError
        No samples, two with the same id, or options that do not fit.
    ResultsError
        ``out`` holds other results, is damaged, cannot be written, or another process writes to it.
    ModelError, EndpointError
        The model cannot answer anything; what came before is in ``out``.
    """
    start = time.perf_counter()
    samples = list(samples)
    remote = isinstance(model, endpoint.Endpoint)
    if not remote and not hasattr(model, "tokenizer"):
        raise ModelError(f"a {type(model).__name__} answers nothing: give what o1lab.models.load returns")
    style = style or ("tokens" if _is_reasoner(model) else "language")
    _check(samples, style, cap, remote, decoding)
    if remote:
        model = model.named()
    prompts, template = _prompts(model, samples, style)
    settings = {**_marks(model), "style": style, "cap": cap, "template": template, **(settings or {})}
    settings |= {"temperature": temperature, "seed": seed} if temperature > 0 else {}
    settings |= {"stop_ids": list(decoding["stop_ids"])} if decoding.get("stop_ids") is not None else {}
    settings["samples"] = _digest(samples, prompts)
    with ResultsFile(out, settings, [sample.id for sample in samples]) as book:
        missing = [place for place, sample in enumerate(samples) if sample.id not in book.kept]
        caps = [cap or _cap(model, samples[place], style) for place in missing]
        made = _ask(model, [samples[i] for i in missing], [prompts[i] for i in missing], caps, style, seed,
                    temperature, decoding)  # fmt: skip
        for place, content in show(made, total=len(missing), label="chains") if progress and missing else made:
            book.add(samples[missing[place]].id, content)
        notes = (f"{len(samples) - len(missing):,} of the results were in {book.path.name}",) if book.resumed else ()
    if template is None and style == "language" and not remote:
        notes += ("the tokenizer has no chat template: prompts were given as plain text",)
    results = tuple(judge(sample, book.kept[sample.id], style) for sample in samples)
    return ChainReport(results, model.name, style, time.perf_counter() - start, notes)


def judge(sample: Any, produced: Mapping[str, Any], style: str) -> Result:
    """Score what was produced for one sample.

    Parameters
    ----------
    sample
        A chain problem, or an item with ``score(text)``.
    produced
        ``text``, ``ended`` (``"stop"``, ``"cap"`` or empty) and ``problem`` (empty where there is none); ``tokens``,
        ``margins`` and ``entropies`` where they are known.
    style : str
        ``"tokens"`` or ``"language"``.
    """
    from o1lab.chains.faults import localise

    text, capped, problem = produced["text"], produced["ended"] == "cap", produced.get("problem", "")
    scores = {name: tuple(produced[name]) for name in ("margins", "entropies") if produced.get(name) is not None}
    common: dict[str, Any] = {"sample": sample, "text": text, "tokens": produced.get("tokens"), **scores}
    if not problem and not capped and not text.strip() and style == "language":
        problem = "no answer"
    if problem:
        return Result(problem=problem, **common)
    if not hasattr(sample, "steps"):
        score = float(sample.score(text))
        right = score >= 1.0
        return Result(capped=capped, right=right, answer_right=right, score=score, **common)
    if style == "tokens":
        text = text if capped else f"{text} <eos>"
    elif capped:
        text = text.rpartition("\n")[0]  # half a line may read as a whole one with another number
    parsed = render.parse(sample, text, style)
    capped, fault, asked = capped and not parsed.ended, localise(sample, parsed, style), len(sample.steps)
    last = parsed.steps[-1].state if len(parsed.steps) >= asked else None
    answer = not capped and sample.answer == (last if parsed.answer is None else parsed.answer)
    common |= {"capped": capped, "answer_right": answer, "score": float(answer)}
    if fault is None:
        return Result(right=not capped, watched=asked, **common)
    if capped and fault.kind == "stopped early":
        return Result(watched=fault.step - 1, **common)
    if style == "language" and not parsed.steps:
        fault = replace(fault, kind="format", got=text[:80], evidence="there is text, and no step in it can be read")
    return Result(fault=fault, watched=min(fault.step, asked), **common)


def _check(samples: list[Any], style: str, cap: int | None, remote: bool, decoding: Mapping[str, Any]) -> None:
    if not samples:
        raise ChainError("no samples: give at least one")
    if style not in render.STYLES:
        raise UnknownName("style", str(style), render.STYLES)
    if cap is not None and (isinstance(cap, bool) or not isinstance(cap, int) or cap < 1):
        raise ChainError(f"cap={cap!r} must be a whole number of tokens, at least 1")
    seen: set[str] = set()
    for sample in samples:
        if not (isinstance(sample, Sample) or all(hasattr(sample, name) for name in ("id", "prompt", "score"))):
            raise ChainError(f"a {type(sample).__name__} is no sample: it needs id, prompt and score(text), or steps")
        if sample.id in seen:
            raise ChainError(f"two samples have the id {sample.id!r}: draw them with different seeds or lengths")
        seen.add(sample.id)
    known = set() if remote else {"batch_size", "batch_tokens", "scores", "stop_ids", "on_logits"}
    for name in decoding:
        if name not in known:
            raise UnknownName("option of evaluate" + " for an endpoint" * remote, name, sorted(known))


def _is_reasoner(model: Any) -> bool:
    tokenizer = getattr(model, "tokenizer", None)
    return tokenizer is not None and tokenizer.get_vocab().keys() >= REASONER_WORDS


def _prompts(model: Any, samples: list[Any], style: str) -> tuple[list[str], str | None]:
    """What each sample's prompt reads, before any chat template, and the mark of the template if there is one."""
    prompts = [render.prompt(s, style) if isinstance(s, Sample) else str(s.prompt) for s in samples]
    template = None if style == "tokens" else getattr(getattr(model, "tokenizer", None), "chat_template", None)
    return prompts, _hash(json.dumps(template)) if template else None


def _cap(model: Any, sample: Any, style: str) -> int:
    if not isinstance(sample, Sample):
        return ITEM_CAP
    gold = render.gold(sample, style)
    if style == "tokens":
        return len(gold.split()) + sample.tokens_per_step + 1
    tokenizer = getattr(model, "tokenizer", None)
    return int(1.5 * (len(gold) if tokenizer is None else len(tokenizer(gold, verbose=False).input_ids))) + 64


def _ask(
    model: Any, samples: list[Any], prompts: list[str], caps: list[int], style: str, seed: int, temperature: float,
    decoding: Mapping[str, Any],
) -> Iterator[tuple[int, dict[str, Any]]]:  # fmt: skip
    """(place, what goes into the file) for each sample, as it comes."""
    if not samples:
        return
    if isinstance(model, endpoint.Endpoint):
        options = {"chat": style == "language", "temperature": temperature, "seed": seed if temperature > 0 else None}
        for place, answer in model.stream(prompts, max_new_tokens=caps, **options):
            content = {"text": answer.text, "ended": answer.ended, "tokens": answer.tokens}
            more = {"problem": answer.problem, "detail": answer.detail} if answer.problem else {}
            yield place, {**content, **more}
        return
    if style == "language":
        prompts = [model.turn(prompt) for prompt in prompts]
    seeds = [int(_hash(f"{seed} {sample.id}")[:15], 16) for sample in samples] if temperature > 0 else 0
    for place, made in decode.stream(
        model, prompts, max_new_tokens=caps, temperature=temperature, seed=seeds, **decoding
    ):
        content = {"text": made.text, "ended": made.ended, "tokens": len(made.ids)}
        if made.ended not in ("stop", "cap"):
            content |= {"ended": "", "problem": made.ended}
        for name in ("margins", "entropies"):
            if (values := getattr(made, name)) is not None:
                content[name] = [round(value, 5) for value in values.tolist()]
        yield place, content


def _marks(model: Any) -> dict[str, Any]:
    """What tells one model from another."""
    if isinstance(model, endpoint.Endpoint):
        return {"model": model.model, "endpoint": model.url, "extra": dict(model.extra)}
    total = hashlib.sha256()
    for name, weight in model.model.named_parameters():
        whole = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[weight.element_size()]
        bits = weight.detach().contiguous().view(whole)
        total.update(f"{name} {tuple(weight.shape)} {int(bits.sum(dtype=torch.int64))} ".encode())
    marks = {"model": model.source, "weights": total.hexdigest()[:16], "dtype": str(model.dtype)}
    return marks | ({"changes": found} if (found := changes(model.model)) else {})


def _digest(samples: list[Any], prompts: list[str]) -> str:
    total = hashlib.sha256()
    for sample, prompt in zip(samples, prompts, strict=True):
        right = sample.gold if isinstance(sample, Sample) else getattr(sample, "answer", None)
        total.update(json.dumps([sample.id, prompt, str(right)]).encode())
    return f"{len(samples)}, {total.hexdigest()[:16]}"


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
