"""Owner paths: every kind of holder is planted, all at once, and must be named; what does not grow must not be."""

from __future__ import annotations

import collections
import functools
import gc
import itertools
import sys
import threading
import weakref
from types import SimpleNamespace

import pytest
import torch

from o1lab.memory import counters, heap, probe
from o1lab.memory.holding import words
from o1lab.memory.owners import grown, mark, owners_of
from o1lab.memory.sizes import Sizes, census

ROUNDS = 30
CACHE: dict[int, torch.Tensor] = {}
LOG: list[bytes] = []


def row() -> torch.Tensor:
    return torch.zeros(1, 256)  # 1024 bytes


class Loop:
    everyone: list[torch.Tensor] = []

    def __init__(self) -> None:
        self.kept: list[torch.Tensor] = []
        self.buffer, self.head, self.last, self.total = torch.zeros(0), None, None, torch.zeros(())
        self.text = ""


class Slotted:
    __slots__ = ("log",)

    def __init__(self) -> None:
        self.log: list[bytearray] = []


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.Linear(4, 4) for _ in range(2)])

    @functools.cache  # noqa: B019  (the fault under test)
    def encode(self, number: int) -> torch.Tensor:
        return row()


@functools.cache
def tokenise(number: int) -> bytes:
    return bytes(700)


def plain_default(number, seen=[]):  # noqa: B006  (the fault under test)
    seen.append(row())


def keyword_default(number, *, memo={}):  # noqa: B006
    memo[number] = row()


def with_attribute(number):
    with_attribute.calls.append(row())


with_attribute.calls = []


def closing():
    inside = []

    def remember(number):
        inside.append(row())

    return remember


def fail(number):
    batch = row()
    raise ValueError(number, batch.shape)


def keep_error(errors, number):
    try:
        fail(number)
    except ValueError as error:
        errors.append(error)


def stream(number):
    state = row()
    yield number
    yield state


def watch(layer):
    seen = []
    layer.register_forward_hook(lambda module, inputs, output: seen.append(output.detach()))


@pytest.fixture(scope="module")
def named():
    """All leaks in one process at once; the answer of one search."""
    torch.set_num_threads(1)
    loop, slotted, model, storage = Loop(), Slotted(), Model(), threading.local()
    kept, views, sessions, queue, words, raw, errors, streams, losses = (
        [],
        [],
        {},
        collections.deque(),
        set(),
        [],
        [],
        [],
        [],
    )
    blob, per_user, storage.seen, remember = bytearray(), {f"u{i}": [] for i in range(3)}, [], closing()
    weight = torch.zeros(64, 64, requires_grad=True)
    watch(model.layers[1])
    ready, go, done, stop = (threading.Event() for _ in range(4))

    def worker():
        mine = []
        ready.set()
        while go.wait() and not stop.is_set():
            go.clear()
            mine.append(row())
            done.set()

    class Knot:
        pass

    def tie():  # not in step itself: a kept error holds the locals of the calling functions too
        knot = Knot()
        knot.itself, knot.data = knot, bytearray(10_000)

    thread = threading.Thread(target=worker, daemon=True)
    thread.start()
    ready.wait()

    def step(number):
        kept.append(row())
        loop.kept.append(row())
        Loop.everyone.append(row())
        loop.buffer = torch.cat([loop.buffer, torch.zeros(256)])
        loop.head = (bytearray(500), loop.head)
        loop.last = {"logits": torch.zeros(50_000), "extra": [row()]}
        loop.text += "x" * 400
        loop.total += (torch.ones(8, 64) @ weight).exp().sum()
        slotted.log.append(bytearray(300))
        CACHE[number] = row()
        LOG.append(bytes(1000))
        views.append(torch.zeros(100, 100)[0, :1])
        sessions[f"session {number}"] = bytes(800)
        queue.append(row())
        words.add(f"a prompt with the number {number}")
        raw.append(number * 10**30)
        blob.extend(bytes(300))
        per_user[f"u{number % 3}"].append(row())
        storage.seen.append(row())
        model.encode(number)
        tokenise(number)
        plain_default(number)
        keyword_default(number)
        with_attribute(number)
        remember(number)
        model.layers[1](torch.zeros(64, 4))
        losses.append((torch.ones(8, 64) @ weight).relu().sum())
        keep_error(errors, number)
        opened = stream(number)
        next(opened)
        streams.append(opened)
        go.set()
        done.wait()
        done.clear()
        tie()
        return torch.zeros(100_000)  # dropped

    for number in range(4):
        step(number)
    before = mark()
    gc.disable()  # the garbage stays until we have looked
    try:
        for number in range(4, 4 + ROUNDS):
            step(number)
        found = grown(before, top=100, seconds=60)
    finally:
        gc.enable()
        stop.set()
        go.set()
    return {path.path.removeprefix(f"{__name__}."): path for path in found}


TENSOR = "Tensor float32 (1, 256) on cpu"


@pytest.mark.parametrize(
    ("path", "kind", "each", "what"),
    [
        ("kept[…]", "local", 1024, TENSOR),
        ("loop.kept[…]", "attribute", 1024, TENSOR),
        ("Loop.everyone[…]", "attribute", 1024, TENSOR),
        ("slotted.log[…]", "attribute", 357, "bytearray (300)"),
        ("CACHE[…]", "global", 1024, TENSOR),
        ("LOG[…]", "global", 1033, "bytes (1,000)"),
        ("views[…]", "local", 40_000, "Tensor float32 (1,) on cpu"),  # a view owns its whole storage
        ("sessions[…]", "local", 833, "bytes (800)"),
        ("queue[…]", "local", 1024, TENSOR),
        ("words[…]", "local", 70, "str (27)"),
        ("raw[…]", "local", 40, "int"),
        ("per_user[…]", "local", 1024, TENSOR),
        ("storage.seen[…]", "thread local", 1024, TENSOR),
        ("functools.lru_cache of Model.encode", "lru_cache", 1024, TENSOR),
        ("functools.lru_cache of tokenise", "lru_cache", 733, "bytes (700)"),
        ("plain_default.__defaults__.seen[…]", "default", 1024, TENSOR),
        ("keyword_default.__kwdefaults__.memo[…]", "default", 1024, TENSOR),
        ("with_attribute.calls[…]", "attribute", 1024, TENSOR),
        ("remember.__closure__.inside[…]", "closure", 1024, TENSOR),
        ("model.layers[…]._forward_hooks[…].__closure__.seen[…]", "hook", 1024, "Tensor float32 (64, 4) on cpu"),
        ("losses[…]", "local", 4 + 8 * 64 * 4 * 2, "Tensor float32 () on cpu"),  # the input and relu's result
        ("errors[…].__traceback__ → fail().batch", "traceback", 1024, TENSOR),
        ("streams[…] → stream().state", "generator", 1024, TENSOR),
        ("mine[…]", "local", 1024, TENSOR),
    ],
)
def test_every_holder_is_named_with_its_bytes(named, path, kind, each, what):
    found = named[path]
    assert (found.kind, found.what) == (kind, what)
    assert found.count == pytest.approx(ROUNDS, abs=1)
    assert each * ROUNDS * 0.93 <= found.bytes <= (each + 1500) * ROUNDS  # and what Python adds around it


@pytest.mark.parametrize(
    ("path", "least", "most"),
    [
        ("loop.buffer", 1024 * ROUNDS, 1024 * (ROUNDS + 4)),  # a new one each time: at most its whole size
        ("loop.total.grad_fn", 4096 * ROUNDS, 4096 * ROUNDS),  # saved for a backward pass that never comes
        ("loop.head", 557 * ROUNDS, 680 * ROUNDS),  # a chain: the variable is replaced, the old values hang on
        ("loop.text", 400 * ROUNDS, 400 * (ROUNDS + 4) + 49),
        ("blob", 300 * ROUNDS, 300 * ROUNDS),
        ("garbage waiting for the collector: " + "Knot", 10_000 * ROUNDS, 10_300 * ROUNDS),
    ],
)
def test_growth_without_a_container_is_named_net(named, path, least, most):
    if path.startswith("garbage"):
        path = next(name for name in named if name.startswith("garbage"))
        assert "Knot" in path
        assert named[path].kind == "cycle"
    assert least <= named[path].bytes <= most


def test_what_is_only_replaced_or_dropped_is_not_named(named):
    assert not [path for path in named if "last" in path or "logits" in path]
    assert not [path for path in named.values() if path.what.startswith(("ndarray", "array"))]  # the search itself
    assert not [path for path in named.values() if path.kind == "unknown" and path.bytes > 4096]
    assert {path.where for path in named.values() if path.path == "kept[…]"} == {"local of named()"}


def test_several_owners_shortest_first_and_the_search_leaves_nothing_behind():
    loop, box = Loop(), {"a": [1]}
    locals()  # before Python 3.13 the frame now has a dict of its locals, which the search must leave without them
    target = row()
    loop.kept.append(target)
    box["deep"] = [[target]]
    ref = weakref.ref(target)
    gc.collect()
    gc.disable()
    try:
        paths = owners_of(target, top=5, seconds=60)
        assert gc.collect() == 0  # no garbage of its own
    finally:
        gc.enable()
    assert [path.path for path in paths] == ["target", "loop.kept[…]", "box['deep'][…]"]
    assert {path.bytes for path in paths} == {1024}
    del target
    loop.kept.clear()
    box.clear()
    assert ref() is None


def test_a_model_kept_by_a_cached_method_is_named():
    model = Model()
    model.encode(1)
    ref = weakref.ref(model)
    del model
    (path,) = owners_of(ref(), seconds=60)
    assert (path.path, path.kind) == ("functools.lru_cache of Model.encode, key[0]", "lru_cache")
    Model.encode.cache_clear()
    assert ref() is None


def test_a_bounded_cache_is_told_from_an_unbounded_one():
    @functools.lru_cache(maxsize=1000)
    def bounded(number):
        return bytes(700)

    @functools.lru_cache(maxsize=8)
    def full(number):
        return bytes(700)

    for number in range(40):
        bounded(number), full(number)
    assert words([bounded, b""], None).exact == "functools.lru_cache of " + (
        f"{bounded.__qualname__} (bounded, maxsize 1,000, filled 40)"
    )
    assert words([full, b""], None).exact.endswith(".full (full, maxsize 8)")
    bounded.cache_clear()
    report = probe(bounded, rounds=6, requests_per_round=16)
    assert "bounded (bounded, maxsize 1,000, filled " in report.owners[0].path
    assert "below its maxsize" in report.advice
    assert "no limit" not in report.advice
    assert "no limit" in probe(functools.lru_cache(maxsize=None)(bytearray), rounds=6, requests_per_round=16).advice


class Worker(threading.Thread):
    def __init__(self, stop):
        super().__init__(daemon=True)
        self.stop, self.mine = stop, bytearray(3000)

    def run(self):
        self.stop.wait()


def wait_for(stop, started):
    stop.wait()


def test_a_thread_that_is_not_joined_is_named_with_its_target():
    stop, payload = threading.Event(), bytearray(5000)
    try:
        threading.Thread(target=wait_for, name="reader", args=(stop, payload), daemon=True).start()
        before = mark()
        for _ in range(20):
            Worker(stop).start()
        found = grown(before, seconds=60)
        said = {path.path for path in owners_of(payload, seconds=60)}
    finally:
        stop.set()
    assert found[0].path == "threads […] running Worker.run()"
    assert (found[0].bytes > 60_000, found[0].what) == (True, "bytearray (3,000)")
    assert not [path for path in found if path.path.split(".")[0] == "self"]
    assert "thread 'reader' running wait_for()._args[…]" in said


def test_storages_count_for_their_tensors_whichever_object_comes_first():
    tensor = torch.zeros(1000)
    for objects in ([tensor, tensor.untyped_storage()], [tensor.untyped_storage(), tensor]):
        counted = census(SimpleNamespace(objects=objects), Sizes())
        assert counted["Tensor float32 (1000,) on cpu"] == 4000
        assert counted["torch.storage.UntypedStorage"] == 0


def test_a_tensor_saved_for_backward_and_one_in_a_cycle():
    inputs, weight = torch.ones(8, 64), torch.zeros(64, 64, requires_grad=True)
    loss = (inputs @ weight).sum()
    ref = weakref.ref(inputs)
    del inputs
    (path,) = owners_of(ref(), seconds=60)
    assert loss.grad_fn is not None
    assert path.path == "loss.grad_fn → MmBackward0"
    loop = Loop()
    loop.me, loop.kept = loop, [row()]
    ref = weakref.ref(loop.kept[0])
    gc.disable()
    try:
        del loop
        (path,) = owners_of(ref(), seconds=60)
    finally:
        gc.enable()
    assert path.kind == "cycle"


def test_plain_bytes_and_the_last_exception():
    payload = bytes(3000)

    def handle(batch):
        raise RuntimeError("full")

    try:
        handle(payload)
    except RuntimeError as error:
        sys.last_value = error
    try:
        paths = {path.path: path.kind for path in owners_of(payload, seconds=60)}
    finally:
        del sys.last_value
    assert paths == {"payload": "local", "sys.last_value.__traceback__ → handle().batch": "last exception"}


def test_frozen_objects_are_seen_and_stay_frozen():
    kept = []
    with counters.frozen():
        before = mark()
        kept += [row() for _ in range(20)]
        count = gc.get_freeze_count()
        first = grown(before, seconds=60)[0]
        assert gc.get_freeze_count() >= count > 0
        late = grown(before, seconds=0)  # out of time: said, not guessed
    assert (first.path, first.count) == ("kept[…]", 20)
    assert {path.kind for path in late} == {"unknown"}
    assert gc.isenabled()


def test_a_function_that_only_the_probe_holds():
    space: dict[str, object] = {"grown": grown, "mark": mark}
    source = """
def probe(step):
    before = mark()
    for number in range(20):
        step(number)
    return grown(before, seconds=60)
"""
    exec(compile(source, heap.__file__.replace("heap.py", "probe.py"), "exec"), space)

    class Engine:
        def __init__(self):
            self.kept = []

        def handle(self, number):
            self.kept.append(row())

    assert space["probe"](Engine().handle)[0].path == "step.__self__.kept[…]"


def test_the_callers_locals_dict_is_left_alone():
    ref = weakref.ref(item := Loop())
    names = locals()
    names["extra"] = 1
    owners_of(item, seconds=60)
    assert names["extra"] == 1
    assert names["item"] is ref()


@pytest.mark.slow
def test_compiled_code_is_named_as_dynamos():
    def double(x):
        return x * 2

    torch._dynamo.reset()
    compiled = torch.compile(double, backend="eager", dynamic=False)
    compiled(torch.zeros(2))
    before = mark()
    for size in range(3, 6):
        compiled(torch.zeros(size))
    gc.collect()
    paths = grown(before, seconds=60)
    torch._dynamo.reset()
    (code,) = [path for path in paths if path.path.endswith("__compiled_fn_…")]
    (guards,) = [path for path in paths if "double" in path.path]
    assert {code.kind, guards.kind} == {"dynamo"}
    assert code.bytes > 10_000


@pytest.mark.parametrize("search", [lambda kept, before: grown(before), lambda kept, before: owners_of(kept[0])])
def test_a_slow_machine_is_waited_for(monkeypatch, search):
    kept, before = [], mark()
    kept.append(bytearray(300_000))
    clock = itertools.chain([0.0], itertools.repeat(10.0))  # ten seconds pass before the first object is read
    monkeypatch.setattr("o1lab.memory.heap.time.monotonic", lambda: next(clock))
    assert "kept[…]" in [path.path for path in search(kept, before)]
