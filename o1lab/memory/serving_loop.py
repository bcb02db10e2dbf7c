"""A minimal serving loop around ``model.generate`` with one knob: how it keeps a statistic of each request."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from o1lab.errors import ProbeError, UnknownName

LOGS = ("off", "view", "copy", "mean")


@dataclass
class ServingLoop:
    """Serve prompts one by one; ``log`` is the line in which the broken and the fixed server differ.

    Parameters
    ----------
    model : o1lab.models.Model
        What serves; greedy decoding, ``new_tokens`` tokens per request.
    log : str
        What is kept of each request to watch the model's confidence: ``"off"`` nothing; ``"view"`` one logit as a view,
        which looks like 4 bytes and keeps the whole row of logits alive (vocabulary × 4 bytes per request);
        ``"copy"`` the same logit cloned, so only a small tensor stays; ``"mean"`` a running mean, which cannot grow.
    new_tokens : int
        Tokens generated per request; 0 only reads the prompt (one forward pass, no cache kept, nothing logged).

    Examples
    --------
    >>> from o1lab import models
    >>> loop = ServingLoop(models.load("tiny", device="cpu"), log="view")
    >>> loop(loop.model.encode("hello"))
    >>> loop.kept_bytes(), loop.seen_bytes()
    (1024, 4)
    """

    model: Any
    log: str = "off"
    new_tokens: int = 2
    kept: list[Any] = field(default_factory=list, repr=False)
    count: int = 0
    mean: float = 0.0

    def __post_init__(self) -> None:
        if self.log not in LOGS:
            raise UnknownName("log", self.log, LOGS)
        if self.new_tokens < 0 or (self.new_tokens == 0 and self.log != "off"):
            raise ProbeError(f"new_tokens={self.new_tokens} with log={self.log!r}: a log needs at least one new token")

    def __call__(self, ids: Any) -> None:
        """Serve one request; ``ids`` is a LongTensor of shape (1, T) on the model's device."""
        import torch

        with torch.inference_mode():
            if self.new_tokens == 0:
                self.model.model(ids, use_cache=False)
                return
            out = self.model.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=self.new_tokens,
                min_new_tokens=self.new_tokens,
                do_sample=False,
                pad_token_id=0,
                return_dict_in_generate=True,
                output_logits=self.log != "off",
            )
        if self.log == "view":
            self.kept.append(out.logits[-1][0, :1])
        elif self.log == "copy":
            self.kept.append(out.logits[-1][0, :1].clone())
        elif self.log == "mean":
            self.count += 1
            self.mean += (float(out.logits[-1][0, 0]) - self.mean) / self.count

    def seen_bytes(self) -> int:
        """Bytes the kept tensors say they have (``numel × element size``)."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.kept)

    def kept_bytes(self) -> int:
        """Bytes of the storages that the kept tensors hold alive."""
        return sum(tensor.untyped_storage().nbytes() for tensor in self.kept)


def with_plant(step: Callable[[Any], Any], plant: Callable[[], None]) -> Callable[[Any], None]:
    """A step that serves and then leaks: ``plant`` is called once per request."""

    def both(request: Any) -> None:
        step(request)
        plant()

    return both


def generating(model: Any, requests: Sequence[Any], new_tokens: int = 2) -> tuple[Callable[[Any], None], list[Any]]:
    """A step that serves a request by ``generate``, and the requests as token ids of shape (1, T).

    Parameters
    ----------
    model : o1lab.models.Model or transformers model
        The first encodes texts itself.

    Raises
    ------
    ProbeError
        Texts for a bare transformers model, whose tokenizer is not known here.
    """
    import torch

    if hasattr(model, "encode"):
        return ServingLoop(model, new_tokens=new_tokens), [model.encode(request) for request in requests]
    if any(isinstance(request, str) for request in requests):
        raise ProbeError("a transformers model takes token ids of shape (1, T); tokenize first, or use models.load")

    def serve(ids: Any) -> None:
        with torch.inference_mode():
            model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=new_tokens,
                min_new_tokens=new_tokens,
                do_sample=False,
                pad_token_id=0,
            )

    return serve, list(requests)
