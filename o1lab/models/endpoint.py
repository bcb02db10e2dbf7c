"""Models behind an OpenAI-compatible address (vLLM, SGLang, llama.cpp, a hosted one): many requests, few at a time.

>>> Endpoint("http://127.0.0.1:8000/v1/", model="reasoner")
Endpoint(url='http://127.0.0.1:8000/v1', model='reasoner', key_env='', concurrency=8)
"""

from __future__ import annotations

import email.utils
import math
import os
import queue
import random
import re
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from o1lab.errors import EndpointError

RETRIED = {429: "rate limited", 500: "server error", 502: "server error", 503: "server error", 504: "server error"}
FATAL = {401: "the API key is missing or wrong", 403: "the API key may not do this", 404: "no such address or model"}
TOO_LONG = re.compile(r"context.?(length|window|size)|max_model_len|(prompt|input).{0,40}too (long|large)", re.I | re.S)
ENDED = {"stop": "stop", "eos": "stop", "end_turn": "stop", "length": "cap", "max_tokens": "cap"}
PROBLEMS = ("timeout", "connection", "rate limited", "server error", "malformed answer", "empty answer", "refused")
"""What can go wrong with one request and not with another; the same request may go well another time."""
LOCAL = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True)
class Answer:
    """What came back for one prompt.

    Attributes
    ----------
    text, ended
        The completion, and ``"stop"`` or ``"cap"``; both empty where there is a problem.
    problem, detail
        One of :data:`PROBLEMS`, ``"context too short"``, or ``"ended: …"`` with a reason that is neither; empty where
        there is none. ``detail`` says what the server or the connection said last.
    tokens
        Tokens produced, as the server counts them; ``None`` where it does not say.
    tries
        Requests sent.
    """

    text: str
    ended: str
    problem: str = ""
    detail: str = ""
    tokens: int | None = None
    tries: int = 1


@dataclass(frozen=True)
class Endpoint:
    """An OpenAI-compatible server: ``/completions`` and ``/chat/completions`` below one address.

    Parameters
    ----------
    url : str
        The address up to ``/v1``, without user, password or query.
    model : str
        The name that the server knows it by; may be left out where it serves exactly one.
    key_env : str
        Name of the environment variable that holds the API key. The key is read when it is needed and goes into the
        request's header and nowhere else.
    concurrency : int
        Most requests in flight.
    timeout_seconds : float
        How long one request may stay without an answer.
    retries : int
        Further tries after status 429, 500, 502, 503 or 504, a timeout, a lost connection or an answer that is none;
        waits double from ``backoff_seconds`` on, with jitter, or are what the server's ``Retry-After`` asks for.
    longest_wait_seconds : float
        A server that asks for a longer wait than this is not asked again for that prompt.
    extra : mapping
        More fields for each request's body, for example ``{"reasoning_effort": "low"}``.

    Raises
    ------
    EndpointError
        The address or the name of the variable is none, or a number is out of range.
    """

    url: str
    model: str = ""
    key_env: str = ""
    concurrency: int = 8
    timeout_seconds: float = field(default=120.0, repr=False)
    retries: int = field(default=5, repr=False)
    backoff_seconds: float = field(default=0.5, repr=False)
    longest_wait_seconds: float = field(default=60.0, repr=False)
    extra: Mapping[str, Any] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise EndpointError("an endpoint is an address such as http://127.0.0.1:8000/v1")
        if parts.username or parts.password or parts.query or parts.fragment:
            raise EndpointError(f"the address of {parts.hostname} must hold no user, password or query; see key_env")
        if re.search(r"/(completions|models)/?$", parts.path):
            raise EndpointError(
                f"give the address of {parts.hostname} up to /v1, without {parts.path.split('/v1')[-1]}"
            )
        if self.key_env and not re.fullmatch(r"[A-Z_][A-Z0-9_]*", self.key_env):
            raise EndpointError("key_env names an environment variable, such as OPENAI_API_KEY; it is never the key")
        for name, least in (("concurrency", 1), ("retries", 0)):
            if not isinstance(getattr(self, name), int) or getattr(self, name) < least:
                raise EndpointError(f"{name}={getattr(self, name)!r} must be a whole number of at least {least}")
        if not self.timeout_seconds > 0:
            raise EndpointError(f"timeout_seconds={self.timeout_seconds!r} must be above 0")
        object.__setattr__(self, "url", self.url.rstrip("/"))

    @property
    def name(self) -> str:
        """How reports call it."""
        return f"{self.model or 'the model'} at {self.url}"

    def served(self) -> list[str]:
        """Names of the models that the server offers."""
        with _Session(self) as session:
            return session.served()

    def named(self) -> Endpoint:
        """The same endpoint with the model's name filled in from the server, where it serves exactly one."""
        if self.model:
            return self
        offered = self.served()
        if len(offered) != 1:
            raise EndpointError(
                f"{self.url} serves {len(offered)} models ({', '.join(offered[:8])}): name one (model=…)"
            )
        values = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return Endpoint(**{**values, "model": offered[0]})

    def stream(
        self,
        prompts: Sequence[str],
        *,
        max_new_tokens: int | Sequence[int],
        chat: bool = True,
        temperature: float = 0.0,
        seed: int | None = None,
    ) -> Iterator[tuple[int, Answer]]:
        """Yield ``(number of the prompt, Answer)`` as answers come.

        A prompt that cannot be answered comes back with its problem; the others go on.

        Parameters
        ----------
        chat : bool
            Ask ``/chat/completions`` with the prompt as the one user turn, else ``/completions``.

        Raises
        ------
        EndpointError
            Nothing can be answered: httpx is not installed, the key's variable is not set, the server refuses the key,
            the address or the model, or twice ``concurrency`` prompts in a row were lost.
        """
        caps = [max_new_tokens] * len(prompts) if isinstance(max_new_tokens, int) else list(max_new_tokens)
        if not 0 <= temperature < math.inf:
            raise EndpointError(f"temperature={temperature} is no finite number from 0 on; 0 is greedy")
        if len(caps) != len(prompts):
            raise EndpointError(f"{len(caps)} caps for {len(prompts)} prompts: give one, or one for each")
        if not prompts:
            return
        this = self.named()
        common = {"model": this.model, "temperature": temperature} | ({} if seed is None else {"seed": seed})
        left, lost, flying = iter(range(len(prompts))), 0, 0
        with _Session(this) as session:
            while True:
                while flying < this.concurrency and (place := next(left, None)) is not None:
                    session.ask(place, prompts[place], caps[place], chat, common)
                    flying += 1
                if not flying:
                    return
                place, answer = session.done.get()
                flying -= 1
                if not isinstance(answer, Answer):
                    raise answer or EndpointError(f"{this.url}: a request failed in an unforeseen way, shown above")
                lost = lost + 1 if answer.problem in PROBLEMS else 0
                yield place, answer
                if lost >= 2 * this.concurrency:
                    raise EndpointError(
                        f"{this.url} lost {lost} prompts in a row, the last one by {answer.problem} after "
                        f"{answer.tries} tries ({answer.detail}); see that it is up, then run again"
                    )


class _Session:
    """One HTTP client and its threads. Leaving it wakes those that wait; the last one to end closes the client."""

    def __init__(self, endpoint: Endpoint) -> None:
        try:
            import httpx
        except ImportError as error:
            raise EndpointError("endpoints need httpx: pip install 'o1lab[serving]'") from error
        self.httpx, self.endpoint, self.key = httpx, endpoint, _key(endpoint.key_env)
        self.closing, self.lock, self.threads = threading.Event(), threading.Lock(), 0
        self.jobs: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.done: queue.SimpleQueue[tuple[int, Answer | EndpointError | None]] = queue.SimpleQueue()

    def __enter__(self) -> _Session:
        endpoint, httpx = self.endpoint, self.httpx
        limits = httpx.Limits(max_connections=endpoint.concurrency, max_keepalive_connections=endpoint.concurrency)
        self.client = httpx.Client(
            headers={"Authorization": f"Bearer {self.key}"} if self.key else {},
            timeout=httpx.Timeout(endpoint.timeout_seconds, connect=min(10.0, endpoint.timeout_seconds)),
            limits=limits,
            trust_env=urlsplit(endpoint.url).hostname not in LOCAL,
            verify=endpoint.url.startswith("https"),  # making a TLS context takes longer than a local request
        )
        return self

    def __exit__(self, *_: object) -> None:
        self.closing.set()
        for _ in range(self.threads):
            self.jobs.put(None)
        if not self.threads:
            self.client.close()

    def served(self) -> list[str]:
        content, problem, detail, tries = self._send("GET", "models", None)
        try:
            return [str(entry["id"]) for entry in content["data"]]
        except (KeyError, TypeError) as error:
            problem = problem or "malformed answer"
            raise EndpointError(f"{self.endpoint.url}/models: {problem} after {tries} tries ({detail})") from error

    def ask(self, place: int, prompt: str, cap: int, chat: bool, common: Mapping[str, Any]) -> None:
        """Send one prompt; ``(place, answer)`` comes in ``done``."""
        asked = {"messages": [{"role": "user", "content": prompt}]} if chat else {"prompt": prompt}
        limit = {} if "max_completion_tokens" in self.endpoint.extra else {"max_tokens": int(cap)}
        body = {**common, **asked, **limit, **self.endpoint.extra}
        self.jobs.put((place, "chat/completions" if chat else "completions", body))
        if self.threads < self.endpoint.concurrency:
            self.threads += 1
            threading.Thread(target=self._work, name="o1lab-endpoint", daemon=True).start()

    def _work(self) -> None:
        try:
            while (job := self.jobs.get()) is not None and not self.closing.is_set():
                place, path, body = job
                answer: Answer | EndpointError | None = None
                try:
                    answer = self._answer(path, body)
                except EndpointError as error:
                    answer = error
                finally:
                    self.done.put((place, answer))
        finally:
            with self.lock:
                self.threads -= 1
                if not self.threads:
                    self.client.close()

    def _answer(self, path: str, body: Mapping[str, Any]) -> Answer:
        content, problem, detail, tries = self._send("POST", path, body)
        if problem:
            return Answer("", "", problem, detail, tries=tries)
        choice = content["choices"][0]
        reason = str(choice.get("finish_reason"))
        usage = content.get("usage")
        tokens = usage.get("completion_tokens") if isinstance(usage, dict) else None
        tokens = tokens if isinstance(tokens, int) else None
        if reason not in ENDED:
            return Answer("", "", f"ended: {reason}", "", tokens, tries)
        return Answer(_text(choice), ENDED[reason], "", "", tokens, tries)

    def _send(self, method: str, path: str, body: Mapping[str, Any] | None) -> tuple[Any, str, str, int]:
        """Send until there is a good answer or no try is left: (content, problem, detail, tries)."""
        endpoint, httpx = self.endpoint, self.httpx
        for tries in range(1, endpoint.retries + 2):
            asked_seconds = None
            try:
                response = self.client.request(method, f"{endpoint.url}/{path}", json=body)
            except httpx.TimeoutException:
                problem, detail = "timeout", f"no answer within {endpoint.timeout_seconds:g} s"
            except httpx.TransportError as error:
                problem, detail = "connection", self._clean(str(error) or type(error).__name__)
            else:
                content, problem, detail = self._read(response, choices=method == "POST")
                if not problem or problem in ("refused", "context too short"):
                    return content, problem, detail, tries
                asked_seconds = _seconds(response.headers.get("Retry-After"))
                if asked_seconds is not None and asked_seconds > endpoint.longest_wait_seconds:
                    return None, problem, f"it asks to wait {asked_seconds:.0f} s", tries
            pause = endpoint.backoff_seconds * 2 ** (tries - 1) * (0.5 + random.random() / 2)
            pause = min(pause, endpoint.longest_wait_seconds) if asked_seconds is None else asked_seconds
            if tries > endpoint.retries or self.closing.wait(pause):
                break
        return None, problem, detail, tries

    def _read(self, response: Any, choices: bool) -> tuple[Any, str, str]:
        """Content, or the problem and what the server said about it."""
        status = response.status_code
        said = f"status {status}: {self._clean(response.text)}"
        if status in FATAL:
            raise EndpointError(f"{self.endpoint.url}: {FATAL[status]} ({said})")
        if status in RETRIED:
            return None, RETRIED[status], said
        if status != 200:
            return None, "context too short" if TOO_LONG.search(response.text) else "refused", said
        try:
            content = response.json()
        except ValueError:
            return None, "malformed answer", said
        if not isinstance(content, dict) or content.get("error"):
            return None, "server error" if isinstance(content, dict) else "malformed answer", said
        if choices:
            listed = content.get("choices")
            if isinstance(listed, list) and not listed:
                return None, "empty answer", said
            if not isinstance(listed, list) or not isinstance(listed[0], dict) or _text(listed[0]) is None:
                return None, "malformed answer", said
        return content, "", ""

    def _clean(self, text: str) -> str:
        """At most 200 characters in one line, without the key."""
        text = text.replace(self.key, "[key]") if self.key else text
        return " ".join(text.split())[:200]


def _text(choice: Mapping[str, Any]) -> str | None:
    """The text of a choice of either kind; ``""`` where the content is null, ``None`` where there is none at all."""
    message = choice.get("message", choice)
    if not isinstance(message, dict) or not ("content" in message or "text" in message):
        return None
    content = message.get("content", message.get("text"))
    if isinstance(content, list):
        content = "".join(part.get("text", "") for part in content if isinstance(part, dict))
    return content if isinstance(content, str) else "" if content is None else None


def _key(name: str) -> str:
    if not name:
        return ""
    key = os.environ.get(name, "").strip()
    if not key or not re.fullmatch(r"[!-~]+", key):
        why = "is not set" if not key else "holds something that is no key"
        raise EndpointError(f"the environment variable {name} {why}: put the API key there")
    return key


def _seconds(asked: str | None) -> float | None:
    """``Retry-After`` in seconds, from a number or a date; ``None`` where there is none that can be read.

    >>> _seconds("2.5"), _seconds("soon"), _seconds("Wed, 21 Oct 2015 07:28:00 GMT")
    (2.5, None, 0.0)
    """
    if asked is None:
        return None
    if re.fullmatch(r"\d+(\.\d+)?", asked.strip()):
        return float(asked)
    try:
        return max(0.0, email.utils.parsedate_to_datetime(asked).timestamp() - time.time())
    except (ValueError, TypeError, OverflowError):
        return None
