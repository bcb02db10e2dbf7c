"""Growth behind the interpreter's own registries: threads, tasks, log records, warnings, finalizers, defaults."""

from __future__ import annotations

import asyncio
import logging
import threading
import warnings
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from o1lab.memory.catalogue import Step, case
from o1lab.memory.catalogue.python_objects import KV_BYTES, activation


@case(
    "https://docs.python.org/3/library/threading.html#thread-local-data",
    "per-call leak",
    bytes_per_request=KV_BYTES,
    owner="scratch|thread local",
)
def thread_local(leak: bool) -> Iterator[Step]:
    """A worker that never ends keeps scratch buffers in thread-local storage. Cure: one buffer, overwritten."""
    local = threading.local()
    pool = ThreadPoolExecutor(1)

    def work(number: int) -> None:
        local.scratch = getattr(local, "scratch", [])
        local.scratch.append(activation())
        if not leak:
            del local.scratch[:-1]

    def step(number: int) -> None:
        pool.submit(work, number).result()

    step(0)  # starts the worker
    yield step
    pool.shutdown()


@case(
    "https://docs.python.org/3/library/logging.handlers.html#memoryhandler",
    "per-call leak",
    bytes_per_request=KV_BYTES,
    owner="buffer",
)
def kept_log_records(leak: bool) -> Iterator[Step]:
    """A handler that buffers records keeps their arguments: ``log.info("%s", tensor)``. Cure: log a number."""
    from logging.handlers import BufferingHandler

    log, handler = logging.Logger("server"), BufferingHandler(1_000_000)
    log.addHandler(handler)

    def step(number: int) -> None:
        hidden = activation()
        log.info("request %s", hidden if leak else len(hidden))
        del handler.buffer[: 0 if leak else -1]

    yield step


@case(
    "https://github.com/python/cpython/issues/97557",
    "keyed growth",
    bytes_per_request=2112 + 80,
    owner="__warningregistry__",
    note="malloc's chunk of the text, its tuple of three; the dictionary grows in rare leaps",
)
def warning_texts(leak: bool) -> Iterator[Step]:
    """``warnings`` remembers each text it has shown, per module, for good. Cure: a text without the request in it."""

    with warnings.catch_warnings():
        warnings.simplefilter("default")
        warnings.showwarning = lambda *_, **__: None
        yield lambda number: warnings.warn("slow request " * 157 + (str(number) if leak else ""), stacklevel=1)
    globals().get("__warningregistry__", {}).clear()


@case("https://github.com/BerriAI/litellm/pull/7737", "per-call leak", bytes_per_request=KV_BYTES, owner="tasks")
def kept_tasks(leak: bool) -> Iterator[Step]:
    """Tasks held in a set, as asyncio asks, keep their results. Cure: ``add_done_callback(tasks.discard)``."""
    loop, tasks = asyncio.new_event_loop(), set()

    async def answer() -> Any:
        return activation()

    async def serve() -> None:
        task = asyncio.create_task(answer())
        tasks.add(task)
        task.add_done_callback(tasks.discard if not leak else bool)
        await task

    yield lambda number: loop.run_until_complete(serve())
    tasks.clear()
    loop.close()


@case(
    "https://docs.python.org/3/library/weakref.html#weakref.finalize",
    "per-call leak",
    bytes_per_request=KV_BYTES,
    owner="finalize",
)
def finalizers(leak: bool) -> Iterator[Step]:
    """``weakref.finalize(model, f, batch)`` holds the batch until the *model* dies. Cure: tie it to the request."""

    class Thing:
        pass

    model = Thing()

    def step(number: int) -> None:
        request = Thing()
        weakref.finalize(model if leak else request, len, activation())

    yield step


@case(
    "https://docs.python.org/3/reference/compound_stmts.html#function-definitions",
    "per-call leak",
    bytes_per_request=KV_BYTES,
    owner="default|history",
)
def default_argument(leak: bool) -> Iterator[Step]:
    """A mutable default argument is made once and shared by all calls. Cure: ``None``, and a new list in the call."""

    def chat(hidden: Any, history: list[Any] = []) -> int:  # noqa: B006 - the cause under study
        history = history if leak else []
        history.append(hidden)
        return len(history)

    yield lambda number: chat(activation())
