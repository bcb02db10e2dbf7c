"""A server that behaves badly: each way in which it fails has a name, and a way on."""

from __future__ import annotations

import datetime
import email.utils
import socket
import sys
import threading
from collections import Counter

import pytest
from package.endpoint_fixture import Server, said, serving

from o1lab import models
from o1lab.errors import EndpointError, ModelError, UnknownName
from o1lab.models import endpoint
from o1lab.models.endpoint import Endpoint

KEY = "sk-very-secret-0123456789"


@pytest.fixture
def server():
    with serving() as server:
        yield server


def ask(server: Server, prompts: list[str], *, cap: int = 10, chat: bool = True, **options) -> list[endpoint.Answer]:
    options = {"backoff_seconds": 0.001, "timeout_seconds": 5.0, **options}
    answers: list = [None] * len(prompts)
    for place, answer in Endpoint(server.url, **options).stream(prompts, max_new_tokens=cap, chat=chat):
        assert answers[place] is None
        answers[place] = answer
    return answers


def test_good_answers_come_back_to_their_prompts(server):
    prompts = [f"p{number}" for number in range(20)]
    answers = ask(server, prompts)
    assert [answer.text for answer in answers] == [f"<{prompt}>" for prompt in prompts]
    assert {(a.ended, a.problem, a.tokens, a.tries) for a in answers} == {("stop", "", 3, 1)}
    assert set(server.paths) == {"/v1/chat/completions"}
    body = server.bodies[0]
    assert body["model"] == "the-model"
    assert body["temperature"] == 0
    assert body["max_tokens"] == 10
    assert "Authorization" not in server.headers[0]


def test_plain_completions_and_a_cap_for_each(server):
    caps = {"a": 3, "b": 5}
    source = Endpoint(server.url, model="m", extra={"top_k": 1}).stream(
        list(caps), max_new_tokens=list(caps.values()), chat=False, temperature=0.5, seed=7
    )
    assert {answer.text for _, answer in source} == {"<a>", "<b>"}
    assert set(server.paths) == {"/v1/completions"}
    for body in server.bodies:
        assert body == {"model": "m", "temperature": 0.5, "seed": 7, "prompt": body["prompt"], "top_k": 1,
                        "max_tokens": caps[body["prompt"]]}  # fmt: skip
    newer = Endpoint(server.url, model="m", extra={"max_completion_tokens": 9})
    list(newer.stream(["a"], max_new_tokens=2))
    assert "max_tokens" not in server.bodies[-1]


def test_the_end_is_told_from_the_cap_and_from_anything_else(server):
    reasons = {"a": "length", "b": "stop", "c": "content_filter", "d": None}
    server.behave = lambda prompt, _: said("text", reasons[prompt])
    answers = ask(server, list(reasons))
    assert [answer.ended for answer in answers] == ["cap", "stop", "", ""]
    assert [answer.problem for answer in answers] == ["", "", "ended: content_filter", "ended: None"]


def test_a_null_text_is_empty_and_parts_are_joined(server):
    server.behave = lambda prompt, _: said(None if prompt == "a" else [{"type": "text", "text": "x"}, {"text": "y"}])
    assert [answer.text for answer in ask(server, ["a", "b"])] == ["", "xy"]


def test_concurrency_is_used_and_never_above_the_bound(server):
    gate = threading.Barrier(3)  # opens only if three are in flight at once

    def behave(prompt, before):
        gate.wait(10)
        return said("ok")

    server.behave = behave
    answers = ask(server, [str(number) for number in range(12)], concurrency=3)
    assert {answer.problem for answer in answers} == {""}
    assert server.most == 3


@pytest.mark.parametrize("status", [429, 500, 502, 503, 504])
def test_a_passing_refusal_is_tried_again(server, status):
    server.behave = lambda prompt, before: said("good") if before == 2 else (status, b"later")
    (answer,) = ask(server, ["a"])
    assert (answer.text, answer.problem, answer.tries) == ("good", "", 3)


BROKEN = {
    "reset": ("reset", "connection"),
    "half": ("half", "connection"),
    "no JSON": (b"<html>busy</html>", "malformed answer"),
    "JSON, not an object": (b"[1]", "malformed answer"),
    "no choices": (b"{}", "malformed answer"),
    "choices of nothing": (b'{"choices": [{"index": 0}]}', "malformed answer"),
    "a number for a text": (b'{"choices": [{"text": 3}]}', "malformed answer"),
    "empty choices": (b'{"choices": []}', "empty answer"),
    "an error in a good answer": (b'{"error": {"message": "provider"}}', "server error"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_answer_is_tried_again_and_named_when_it_stays(server, case):
    deed, problem = BROKEN[case]
    server.behave = lambda prompt, before: said("good") if prompt == "heals" and before else deed
    answers = ask(server, ["heals", "stays"], retries=2)
    assert (answers[0].text, answers[0].tries) == ("good", 2)
    assert (answers[1].problem, answers[1].tries, answers[1].text) == (problem, 3, "")
    assert answers[1].detail
    assert answers[1].problem in endpoint.PROBLEMS


def test_a_timeout_is_named_and_the_others_are_answered(server):
    server.behave = lambda prompt, before: "hang" if prompt == "slow" else said("good")
    answers = ask(server, ["slow", "a", "b"], timeout_seconds=0.2, retries=1)
    assert (answers[0].problem, answers[0].detail, answers[0].tries) == ("timeout", "no answer within 0.2 s", 2)
    assert [answer.text for answer in answers[1:]] == ["good", "good"]


def test_retry_after_is_honoured(server):
    server.behave = lambda prompt, before: said("good") if before else (429, b"", {"Retry_After": "0.3"})
    (answer,) = ask(server, ["a"])
    assert answer.text == "good"
    assert server.times[1] - server.times[0] >= 0.3  # its own wait would have been a thousandth of a second


def test_a_wait_longer_than_the_longest_is_not_waited(server):
    server.behave = lambda prompt, before: (429, b"", {"Retry_After": "3600"}) if prompt == "a" else said("good")
    answers = ask(server, ["a", "b"])
    assert (answers[0].problem, answers[0].tries) == ("rate limited", 1)
    assert answers[0].detail == "it asks to wait 3600 s"
    assert answers[1].text == "good"


def test_retry_after_as_a_date():
    soon = datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=30)
    assert 25 < endpoint._seconds(email.utils.format_datetime(soon)) <= 30
    assert endpoint._seconds("nan") is None


def test_waits_double_up_to_the_longest(server, monkeypatch):
    waits, plain = [], threading.Event.wait

    def wait(self, seconds=None):
        waits.append(seconds)
        return plain(self, 0 if seconds in (1.0, 2.0, 3.0) else seconds)

    monkeypatch.setattr(endpoint.random, "random", lambda: 1.0)
    monkeypatch.setattr(threading.Event, "wait", wait)
    server.behave = lambda prompt, before: (500, b"")
    ask(server, ["a"], backoff_seconds=1.0, retries=4, longest_wait_seconds=3.0)
    assert [seconds for seconds in waits if seconds in (1.0, 2.0, 3.0, 4.0, 8.0)] == [1.0, 2.0, 3.0, 3.0]


CONTEXT = b'{"error": {"message": "This model\'s maximum context length is 2048 tokens. However, you asked for 5000"}}'


def test_what_is_refused_for_good_is_asked_once(server):
    deeds = {"long": (400, CONTEXT), "odd": (422, b"bad field"), "fine": said("good")}
    server.behave = lambda prompt, before: deeds[prompt]
    answers = ask(server, list(deeds))
    assert [answer.problem for answer in answers] == ["context too short", "refused", ""]
    assert server.asked == Counter(deeds.keys())
    assert answers[1].detail == "status 422: bad field"


@pytest.mark.parametrize(("status", "words"), [(401, "API key"), (403, "API key"), (404, "no such address or model")])
def test_a_refusal_of_everything_ends_the_run(server, status, words):
    server.behave = lambda prompt, before: (status, b"no")
    with pytest.raises(EndpointError, match=f"{words}.*status {status}: no"):
        ask(server, ["a"] * 50)
    assert server.asked["a"] < 50


def test_a_server_that_loses_everything_is_given_up(server):
    def behave(prompt, before):
        return said("good") if prompt in ("p0", "p1") else (500, b"disk full")

    server.behave = behave
    lost = "lost 4 prompts in a row, the last one by server error after 1 tries"
    with pytest.raises(EndpointError, match=lost):
        ask(server, [f"p{number}" for number in range(50)], concurrency=2, retries=0)
    assert len(server.asked) < 10


def test_nothing_listens_there(server):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    dead = Endpoint(f"http://127.0.0.1:{port}/v1", retries=1, backoff_seconds=0.001)
    with pytest.raises(EndpointError, match=r"/models: connection after 2 tries \(.*refused"):
        list(dead.stream(["a"], max_new_tokens=1))


def test_leaving_early_wakes_what_waits(server):
    server.behave = lambda prompt, before: said("good") if prompt == "a" else (429, b"", {"Retry_After": "30"})
    source = Endpoint(server.url, concurrency=2).stream(["a", "b", "c"], max_new_tokens=1)
    assert next(source)[1].text == "good"
    source.close()
    for thread in threading.enumerate():
        if thread.name == "o1lab-endpoint":
            thread.join(5)
            assert not thread.is_alive()


def test_leaving_early_waits_for_no_answer(server):
    server.behave = lambda prompt, before: said("good") if prompt == "a" else "hang"
    source = Endpoint(server.url, concurrency=2).stream(["a", "b", "c"], max_new_tokens=1)
    assert next(source)[1].text == "good"
    source.close()
    left = [thread for thread in threading.enumerate() if thread.name == "o1lab-endpoint"]
    assert all(thread.daemon for thread in left)  # the interpreter may end without them
    server.free.set()
    for thread in left:
        thread.join(5)
        assert not thread.is_alive()


# ---- which model, which key ------------------------------------------------------------------------------------------


def test_the_models_name_is_asked_for_where_there_is_one(server):
    assert Endpoint(server.url).served() == ["the-model"]
    server.models = ["a", "b"]
    with pytest.raises(EndpointError, match=r"serves 2 models \(a, b\): name one"):
        ask(server, ["x"])
    assert ask(server, ["x"], model="b")[0].text == "<x>"
    assert server.bodies[-1]["model"] == "b"


def test_the_key_goes_into_the_header_and_nowhere_else(server, monkeypatch):
    monkeypatch.setenv("MY_KEY", KEY)
    this = Endpoint(server.url, key_env="MY_KEY", model="m", retries=0)
    assert next(this.stream(["a"], max_new_tokens=1))[1].text == "<a>"
    assert server.headers[-1]["Authorization"] == f"Bearer {KEY}"
    assert KEY not in repr(this)
    assert KEY not in str(vars(this))
    server.behave = lambda prompt, before: (401 if prompt == "a" else 400, f"wrong key: {KEY}!".encode())
    with pytest.raises(EndpointError) as caught:
        list(this.stream(["a"], max_new_tokens=1))
    assert KEY not in str(caught.value)
    assert "wrong key: [key]!" in str(caught.value)
    assert next(this.stream(["b"], max_new_tokens=1))[1].detail == "status 400: wrong key: [key]!"


@pytest.mark.parametrize("content", [None, "", "  ", f"{KEY}\nX-Other: 1", "schlüssel"])
def test_a_key_that_is_none(server, monkeypatch, content):
    monkeypatch.delenv("MY_KEY", raising=False)
    if content is not None:
        monkeypatch.setenv("MY_KEY", content)
    with pytest.raises(EndpointError, match="the environment variable MY_KEY (is not set|holds)") as caught:
        list(Endpoint(server.url, key_env="MY_KEY").stream(["a"], max_new_tokens=1))
    assert KEY not in str(caught.value)
    assert not server.asked


@pytest.mark.parametrize(
    ("url", "options", "message"),
    [
        ("ftp://host/v1", {}, "an endpoint is an address"),
        ("http://", {}, "an endpoint is an address"),
        (f"http://me:{KEY}@host/v1", {}, "must hold no user, password or query"),
        (f"http://host/v1?key={KEY}", {}, "must hold no user, password or query"),
        ("http://host/v1/chat/completions", {}, r"up to /v1, without /chat/completions"),
        ("http://host/v1", {"key_env": KEY}, "never the key"),
        ("http://host/v1", {"concurrency": 0}, "concurrency=0"),
        ("http://host/v1", {"retries": -1}, "retries=-1"),
        ("http://host/v1", {"timeout_seconds": 0}, "timeout_seconds=0"),
    ],
)
def test_bad_address_and_bad_options(url, options, message):
    with pytest.raises(EndpointError, match=message) as caught:
        Endpoint(url, **options)
    assert KEY not in str(caught.value)


def test_caps_must_fit(server):
    with pytest.raises(EndpointError, match="2 caps for 1 prompts"):
        list(Endpoint(server.url).stream(["a"], max_new_tokens=[1, 2]))
    assert list(Endpoint(server.url).stream([], max_new_tokens=1)) == []


def test_without_httpx_the_extra_is_named(server, monkeypatch):
    monkeypatch.setitem(sys.modules, "httpx", None)
    with pytest.raises(EndpointError, match=r"pip install 'o1lab\[serving\]'"):
        list(Endpoint(server.url).stream(["a"], max_new_tokens=1))


def test_load_gives_an_endpoint_and_asks_nothing(server):
    loaded = models.load(f"{server.url}/", "cpu", concurrency=3, model="m", key_env="MY_KEY")
    assert loaded == Endpoint(server.url, model="m", key_env="MY_KEY", concurrency=3)
    assert loaded.name == f"m at {server.url}"
    assert isinstance(EndpointError("x"), ModelError)
    with pytest.raises(UnknownName, match="'modell'.*did you mean model"):
        models.load(server.url, modell="m")
    with pytest.raises(UnknownName, match="option of load 'concurrency'"):
        models.load("tiny", concurrency=3)
    assert not server.asked
