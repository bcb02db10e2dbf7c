"""From samples to a report: what is scored, what is not, and a run that breaks off and goes on."""

from __future__ import annotations

import copy
import dataclasses
import fcntl
import importlib
import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from package.endpoint_fixture import said, serving

from o1lab import chains, models
from o1lab.chains import render
from o1lab.chains.report import ChainReport
from o1lab.errors import ChainError, EndpointError, EstimateError, ResultsError, UnknownName
from o1lab.models import decode_rows, vocabulary
from o1lab.models.endpoint import Endpoint

pytestmark = pytest.mark.usefixtures("one_thread")

judge = importlib.import_module("o1lab.chains.evaluate").judge  # the attribute of that name is the function


@pytest.fixture(scope="module")
def reasoner():
    """A random model with the reasoner's vocabulary; the tests say what it writes through ``on_logits``."""
    from tokenizers import Tokenizer, pre_tokenizers
    from tokenizers.models import WordLevel
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    words = Tokenizer(WordLevel({word: place for place, word in enumerate(vocabulary.TOKENS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {f"{name}_token": f"<{name}>" for name in ("pad", "bos", "eos", "unk")}
    config = LlamaConfig(
        vocab_size=len(vocabulary.TOKENS), hidden_size=16, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=1024, pad_token_id=0, bos_token_id=1,
        eos_token_id=2,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LlamaForCausalLM(config).eval().requires_grad_(False)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, **special)
    return models.Model(model, tokenizer, "mine", "a test", torch.device("cpu"), torch.float32, 0, 1024)


@pytest.fixture(scope="module")
def samples():
    return [
        *chains.make("arithmetic", 4, 4, seed=1),
        *chains.make("symbols", 3, 3, seed=1),
        *chains.make("hops", 6, 3, seed=1),
    ]


def writing(texts: list[str], broken: int | None = None):
    """Make the model write these texts, row by row; row ``broken`` gets NaN at its third token."""
    scripts = [[*vocabulary.encode(text), vocabulary.EOS] for text in texts]

    def on_logits(logits, rows, step):
        out = torch.full_like(logits, -1.0)
        for place, row in enumerate(rows.tolist()):
            script = scripts[row]
            out[place, script[min(step, len(script) - 1)]] = 1.0
            if row == broken and step == 2:
                out[place, 0] = float("nan")
        return out

    return on_logits


def run(model, samples, texts=None, **options) -> ChainReport:
    texts = [sample.gold for sample in samples] if texts is None else texts
    script = writing(texts, options.pop("broken", None))
    return chains.evaluate(model, samples, on_logits=script, progress=False, **options)


def with_fault(sample, step: int) -> str:
    """The gold text with the state of one step gone wrong, and all right after it from the program's view."""
    words, width = sample.gold.split(), sample.tokens_per_step
    at = step * width - 1
    others = {"modular": ("30", "29"), "digits": ("9", "8"), "symbols": ("F", "E"), "hops": ("e63", "e62")}
    words[at] = others[sample.variant][words[at] == others[sample.variant][0]]
    return " ".join(words)


# ---- what is scored --------------------------------------------------------------------------------------------------


def test_right_chains_of_mixed_lengths_and_tasks_in_one_call(reasoner, samples):
    report = run(reasoner, samples)
    assert report.style == "tokens"
    assert report.accuracy.value == report.answer_accuracy.value == report.accuracy_of_finished.value == 1
    assert report.accuracy.n == 10 == len(report.outcomes)
    assert str(report.step_accuracy).startswith("1 [")
    assert report.step_accuracy.n == 4 * 4 + 3 * 3 + 3 * 6
    assert report.first_fault == [None] * 10 == report.faults
    assert report.problems == {} == report.fault_kinds
    assert report.capped.value == 0
    assert report.tokens == sum(len(sample.gold.split()) + 1 for sample in samples)
    assert [result.sample for result in report.results] == samples
    assert report.survival().at(6).value == 1


def test_faults_are_counted_where_they_are(reasoner, samples):
    texts = [sample.gold for sample in samples]
    texts[1], texts[5], texts[9] = with_fault(samples[1], 2), with_fault(samples[5], 1), with_fault(samples[9], 6)
    report = run(reasoner, samples, texts)
    assert report.first_fault == [None, 2, None, None, None, 1, None, None, None, 6]
    assert report.outcomes.tolist() == [place not in (1, 5, 9) for place in range(10)]
    assert report.accuracy.value == 0.7
    assert sum(report.fault_kinds.values()) == 3
    assert report.step_accuracy.n == 3 * 4 + 2 + 2 * 3 + 1 + 3 * 6
    assert report.step_accuracy.value == 1 - 3 / report.step_accuracy.n
    assert report.survival().faults.sum() == 3


def test_groups_have_estimates_of_their_own(reasoner, samples):
    texts = [sample.gold for sample in samples]
    texts[7] = with_fault(samples[7], 3)
    report = run(reasoner, samples, texts)
    lengths = report.by_length()
    assert list(lengths) == [3, 4, 6]
    assert {length: part.accuracy.n for length, part in lengths.items()} == {3: 3, 4: 4, 6: 3}
    assert lengths[6].accuracy.value == pytest.approx(2 / 3)
    assert lengths[6].first_fault == [3, None, None]
    assert list(report.by("task")) == ["arithmetic", "hops", "symbols"]
    assert list(report.by("variant")) == ["digits", "hops", "modular", "symbols"]
    assert list(report.by("facts")) == [0, 12]
    with pytest.raises(UnknownName, match=r"unknown factor 'lenght'; did you mean length"):
        report.by("lenght")


def test_a_chain_that_hits_the_cap_is_wrong_but_no_fault(reasoner, samples):
    report = run(reasoner, samples[:4], cap=9)  # modular: two whole steps and a word; digits: one and a half
    assert report.capped.value == 1
    assert report.accuracy.value == 0
    assert report.first_fault == [None] * 4
    watched = {"modular": 2, "digits": 1}
    assert [result.watched for result in report.results] == [watched[sample.variant] for sample in samples[:4]]
    assert report.step_accuracy.value == 1
    assert report.survival().at(1).value == 1
    with pytest.raises(EstimateError, match="nothing to take a share of: no sample fits"):
        _ = report.accuracy_of_finished
    wrong = run(reasoner, samples[:1], [with_fault(samples[0], 1)], cap=9)
    assert wrong.first_fault == [1]  # what is wrong before the cap stays wrong
    assert wrong.capped.value == 1


def test_an_end_that_comes_late_or_never_is_told_apart(reasoner, samples):
    sample = samples[0]
    again = f"{sample.gold} {' '.join(sample.gold.split()[: sample.tokens_per_step])}"
    report = run(reasoner, [sample], [again])
    assert report.fault_kinds == {"ran over": 1}
    assert report.first_fault == [None]  # it was right to its end
    assert report.survival().at(4).value == 1
    assert report.accuracy.value == 0
    endless = run(reasoner, [sample], [f"{again} {again}"])
    assert endless.capped.value == 1
    early = run(reasoner, [sample], [" ".join(sample.gold.split()[: 2 * sample.tokens_per_step])])
    assert (early.fault_kinds, early.first_fault, early.capped.value) == ({"stopped early": 1}, [3], 0)


def test_what_cannot_be_scored_is_excluded_and_shown(reasoner, samples):
    small = dataclasses.replace(reasoner, context=150)  # too little for hops, whose facts alone take 144
    report = run(small, samples, broken=2)
    assert report.problems == {"context too short": 3, "not finite": 1}
    assert report.accuracy.n == 6
    assert report.accuracy.value == 1
    assert report.faults == [None] * 10
    assert len(report.outcomes) == len(report.ids) == 6
    assert samples[2].id not in report.ids
    assert "context too short 3, not finite 1" in str(report)
    nothing = run(small, samples[7:])
    with pytest.raises(EstimateError, match="nothing to take a share of: context too short 3"):
        _ = nothing.accuracy
    assert "whole chain right" in str(nothing)  # the report is still there to be read
    with pytest.raises(EstimateError, match="no step of any chain can be judged"):
        nothing.survival()


def test_report_as_text_html_and_frame(reasoner, samples):
    texts = [sample.gold for sample in samples]
    texts[5] = with_fault(samples[5], 2)
    report = run(reasoner, samples, texts, broken=0)
    text = str(report)
    for part in (
        "mine: 10 samples (tokens)",
        "whole chain right",
        "0.8889 [",
        "first faults",
        "not scored",
        "finite 1",
    ):
        assert part in text
    assert "<table" in report._repr_html_()
    frame = report.frame()
    assert frame["id"].tolist() == [sample.id for sample in samples]
    assert frame["right"].sum() == 8
    assert frame.loc[5, "first_fault"] == 2
    assert frame.loc[0, "problem"] == "not finite"
    assert frame["asked"].tolist() == [len(sample.steps) for sample in samples]
    assert frame["task"].nunique() == 3


def test_margins_come_along_on_request(reasoner, samples):
    report = run(reasoner, samples[:2], scores=True)
    for result in report.results:
        assert len(result.margins) == len(result.entropies) == result.tokens
        assert set(result.margins) == {2.0}
    assert run(reasoner, samples[:1]).results[0].margins is None


def test_reports_are_paired_by_sample(reasoner, samples):
    texts = [sample.gold for sample in samples]
    texts[3] = with_fault(samples[3], 1)
    first = run(reasoner, samples, broken=0)
    back = list(reversed(samples))
    second = run(reasoner, back, list(reversed(texts)))
    paired = first.paired(second)
    assert paired.ids == [sample.id for sample in samples[1:]]
    assert paired.left_out == 1
    assert paired.first.all()
    assert np.flatnonzero(~paired.second).tolist() == [2]
    with pytest.raises(ChainError, match=f"of different samples: only here {samples[9].id}; only there none"):
        first.paired(run(reasoner, samples[:9]))


def test_temperature_draws_for_each_sample_by_its_id(reasoner, samples):
    options = {"temperature": 1.0, "progress": False, "cap": 6}
    first = chains.evaluate(reasoner, samples[:4], seed=1, **options)
    back = chains.evaluate(reasoner, samples[3::-1], seed=1, **options)
    other = chains.evaluate(reasoner, samples[:4], seed=2, **options)
    assert [result.text for result in first.results] == [result.text for result in back.results][::-1]
    assert [result.text for result in first.results] != [result.text for result in other.results]


# ---- language, and items without steps -------------------------------------------------------------------------------


def tiny(**changes) -> models.Model:
    return dataclasses.replace(models.load("tiny", "cpu"), **changes)


class Said:
    """In place of :func:`o1lab.models.decode.stream`: answers by prompt, and what it was asked."""

    def __init__(self, monkeypatch, answers) -> None:
        self.asked, self.caps = [], []
        monkeypatch.setattr("o1lab.models.decode.stream", self)
        self.answers = answers

    def __call__(self, model, prompts, *, max_new_tokens, **options):
        self.asked, self.caps = prompts, max_new_tokens
        for place, answer in enumerate(self.answers):
            text, ended = answer if isinstance(answer, tuple) else (answer, "stop")
            yield place, decode_rows.Generation((1,) * 5, text, ended)


def test_a_model_without_template_gets_plain_text_and_the_report_says_so(monkeypatch, samples):
    play = Said(monkeypatch, [render.gold(sample, "language") for sample in samples])
    report = chains.evaluate(tiny(), samples, progress=False)
    assert play.asked == [render.prompt(sample, "language") for sample in samples]
    assert report.style == "language"
    assert report.accuracy.value == 1
    assert any("no chat template" in note for note in report.notes)
    gold = render.gold(samples[0], "language")
    assert play.caps[0] == int(1.5 * len(gold.encode())) + 64  # this tokenizer has one token per byte


def test_a_chat_model_gets_its_template(monkeypatch, samples):
    model = tiny()
    template = "{% for m in messages %}[{{ m.role }}] {{ m.content }}{% endfor %}[assistant]"
    monkeypatch.setattr(model.tokenizer, "chat_template", template)
    play = Said(monkeypatch, [render.gold(sample, "language") for sample in samples])
    report = chains.evaluate(model, samples, progress=False)
    assert play.asked[0] == f"[user] {render.prompt(samples[0], 'language')}[assistant]"
    assert report.notes == ()
    assert report.accuracy.value == 1


def test_a_wrong_format_is_not_wrong_reasoning(monkeypatch, samples):
    good = render.gold(samples[0], "language")
    lines = good.split("\n")
    wrong = "\n".join([lines[0], render.gold(samples[2], "language").split("\n")[1], *lines[2:]])
    answers = [good, "I would rather talk about the weather.", "", ("", "cap"), wrong]
    asked = [dataclasses.replace(samples[0], id=f"s{place}") for place in range(5)]
    Said(monkeypatch, answers)
    report = chains.evaluate(tiny(), asked, progress=False)
    assert report.problems == {"no answer": 1}
    assert report.accuracy.n == 4
    assert report.unreadable.value == 0.25
    assert report.accuracy.value == 0.25
    assert report.capped.value == 0.25
    assert report.results[1].fault.kind == "format"
    assert report.results[4].fault.kind not in ("format", "stopped early")
    assert report.survival().faults.sum() == 1  # only the reasoning counts
    assert report.survival(formats=True).faults.sum() == 2


def test_half_a_line_at_the_cap_is_not_read(samples):
    sample = next(s for s in chains.make("arithmetic", 4, 40, seed=3, variant="modular") if len(s.steps[1].state) == 2)
    good = render.gold(sample, "language")
    cut = good[: good.index("\n", good.index("\n") + 1) - 1]  # the last digit of the second result is missing
    result = judge(sample, {"text": cut, "ended": "cap"}, "language")
    assert (result.capped, result.fault, result.watched) == (True, None, 1)
    ran_on = f"{good}\nStep 99: and now another problem"
    result = judge(sample, {"text": ran_on, "ended": "cap"}, "language")
    assert (result.right, result.capped) == (True, False)  # the answer stood there before the cap


def item(place: int, score) -> SimpleNamespace:
    return SimpleNamespace(id=f"i{place}", task="sums", length=3, prompt=f"add {place}", answer="7", score=score)


def test_items_without_steps_are_scored_on_their_answer(monkeypatch, samples):
    items = [item(place, lambda text: {"7": 1.0, "8": 0.5}.get(text, 0.0)) for place in range(4)]
    play = Said(monkeypatch, ["7", "8", "nothing", ("7", "cap"), render.gold(samples[0], "language")])
    report = chains.evaluate(tiny(), [*items, samples[0]], progress=False)
    assert play.asked[0] == "add 0"
    assert [result.right for result in report.results] == [True, False, False, True, True]
    assert [result.score for result in report.results] == [1, 0.5, 0, 1, 1]
    assert report.score.value == pytest.approx(0.7)
    assert report.first_fault == [None] * 5
    assert report.step_accuracy.n == len(samples[0].steps)
    assert list(report.by("task")) == ["arithmetic", "sums"]
    only = report.by("task")["sums"]
    assert only.accuracy.value == 0.5
    with pytest.raises(EstimateError, match="no step"):
        _ = only.step_accuracy
    assert "steps right up to the first fault" in str(only)
    assert len(report.frame()) == 5


# ---- a run that breaks off and goes on -------------------------------------------------------------------------------


def count_asked(monkeypatch) -> list[int]:
    """How many prompts each call of the decoder gets."""
    seen = []
    from o1lab.models import decode

    plain = decode.stream
    monkeypatch.setattr(
        decode, "stream", lambda model, prompts, **rest: seen.append(len(prompts)) or plain(model, prompts, **rest)
    )
    return seen


def lines_of(path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_results_are_written_as_they_come_and_a_second_run_does_the_rest(reasoner, samples, tmp_path, monkeypatch):
    out = tmp_path / "deep" / "results.jsonl"
    forced, seen = writing([sample.gold for sample in samples]), []

    def breaks(logits, rows, step):
        if len(samples) - len(rows) >= 4:
            seen.append(len(lines_of(out)) - 1)
            raise KeyboardInterrupt
        return forced(logits, rows, step)

    with pytest.raises(KeyboardInterrupt):
        chains.evaluate(reasoner, samples, on_logits=breaks, out=out, progress=False)
    assert seen[0] >= 4  # what had ended stood in the file while the rest went on
    kept = {line["id"] for line in lines_of(out)[1:]}
    assert 4 <= len(kept) < 10
    asked = count_asked(monkeypatch)
    left = [sample.gold for sample in samples if sample.id not in kept]
    report = run(reasoner, samples, left, out=out)
    assert asked == [10 - len(kept)]
    assert report.accuracy.value == 1
    assert report.accuracy.n == 10
    assert len(lines_of(out)) == 11
    assert report.notes == (f"{len(kept)} of the results were in results.jsonl",)
    again = run(reasoner, samples, [], out=out)
    assert asked == [10 - len(kept)]
    assert again.outcomes.all()
    assert [result.text for result in again.results] == [result.text for result in report.results]


def finished(reasoner, samples, tmp_path):
    out = tmp_path / "results.jsonl"
    run(reasoner, samples, out=out, scores=True)
    return out


@pytest.mark.parametrize("cut", [1, 30])
def test_a_torn_last_line_is_done_again(reasoner, samples, tmp_path, monkeypatch, cut):
    out = finished(reasoner, samples, tmp_path)
    whole = out.read_bytes()
    out.write_bytes(whole[:-cut])
    lost = json.loads(whole.splitlines()[-1])["id"]
    asked = count_asked(monkeypatch)
    run(reasoner, samples, [next(s.gold for s in samples if s.id == lost)], out=out, scores=True)
    assert asked == [1]
    assert out.read_bytes() == whole


def test_a_torn_header_begins_anew(reasoner, samples, tmp_path):
    out = finished(reasoner, samples, tmp_path)
    whole = out.read_bytes()
    for size in (0, 5, 60):
        out.write_bytes(whole[:size])
        run(reasoner, samples, out=out, scores=True)
        assert sorted(out.read_bytes().splitlines()) == sorted(whole.splitlines())


def test_results_of_another_run_are_refused_and_kept(reasoner, samples, tmp_path):
    out = finished(reasoner, samples[:4], tmp_path)
    whole = out.read_bytes()
    changed = dataclasses.replace(reasoner, model=copy.deepcopy(reasoner.model))
    changed.model.model.norm.weight.data[3] += 0.5
    moved = [dataclasses.replace(samples[0], start="0"), *samples[1:4]]
    cases = [
        ("samples was '4, .*' and is '3, ", reasoner, samples[:3], {}),
        ("samples was", reasoner, moved, {}),
        ("weights was", changed, samples[:4], {}),
        ("model was 'a test' and is 'other'", dataclasses.replace(reasoner, source="other"), samples[:4], {}),
        ("style was 'tokens' and is 'language'", reasoner, samples[:4], {"style": "language"}),
        ("cap was None and is 7", reasoner, samples[:4], {"cap": 7}),
        ("temperature was None and is 0.5", reasoner, samples[:4], {"temperature": 0.5}),
        ("stop_ids was None and is ", reasoner, samples[:4], {"stop_ids": [5]}),
        ("bits was None and is 4", reasoner, samples[:4], {"settings": {"bits": 4}}),
    ]
    for message, model, asked, options in cases:
        with pytest.raises(ResultsError, match=message):
            run(model, asked, out=out, **options)
    assert out.read_bytes() == whole
    run(reasoner, samples[:4], out=out, batch_size=2)  # how it is batched is no other run


@pytest.mark.parametrize("content", [b"a,b\n1,2\n", b"my diary", b'{"format": "other"}\n', b"[1]\n", b"\n"])
def test_a_file_of_something_else_is_refused_and_kept(reasoner, samples, tmp_path, content):
    out = tmp_path / "x.jsonl"
    out.write_bytes(content)
    with pytest.raises(ResultsError, match="something else than chain results|line 1 of .* is damaged"):
        run(reasoner, samples, out=out)
    assert out.read_bytes() == content


@pytest.mark.parametrize("damage", [b"{broken", b"[]", b'{"id": "nobody", "text": "", "ended": ""}', b'{"id": 3}'])
def test_a_damaged_line_is_named(reasoner, samples, tmp_path, damage):
    out = finished(reasoner, samples, tmp_path)
    rows = out.read_bytes().splitlines()
    rows[3] = damage
    out.write_bytes(b"\n".join(rows) + b"\n")
    with pytest.raises(ResultsError, match="line 4 of .* is damaged: delete that line"):
        run(reasoner, samples, out=out, scores=True)


def test_two_writers_do_not_meet(reasoner, samples, tmp_path):
    out = finished(reasoner, samples, tmp_path)
    with out.open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(ResultsError, match="another process is writing"):
            run(reasoner, samples, out=out, scores=True)


def test_a_folder_that_cannot_be_written_is_said_before_the_work(reasoner, samples, tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(ResultsError, match="cannot write to .*a file stands where the folder should be"):
        run(reasoner, samples, out=tmp_path / "file" / "results.jsonl")


# ---- an endpoint -----------------------------------------------------------------------------------------------------


@pytest.fixture
def server():
    with serving() as server:
        yield server


def test_an_endpoint_is_asked_in_language_and_its_failures_are_no_faults(server, samples):
    by_prompt = {render.prompt(sample, "language"): sample for sample in samples}
    odd = {samples[1].id: (500, b"down"), samples[4].id: said("", "length"), samples[6].id: said("")}
    server.behave = lambda prompt, before: odd.get(
        by_prompt[prompt].id, said(render.gold(by_prompt[prompt], "language"), tokens=11)
    )
    report = chains.evaluate(Endpoint(server.url, retries=0), samples, progress=False)
    assert report.model == f"the-model at {server.url}"
    assert report.problems == {"server error": 1, "no answer": 1}
    assert report.accuracy.n == 8
    assert report.accuracy.value == 7 / 8
    assert report.accuracy_of_finished.value == 1
    assert report.capped.value == 1 / 8
    assert report.tokens == 7 * 11 + 2 * 3
    assert set(server.paths) == {"/v1/chat/completions"}
    assert server.bodies[0]["temperature"] == 0


def test_a_reasoner_behind_an_endpoint_gets_tokens(server, samples):
    by_prompt = {sample.prompt: sample for sample in samples}
    server.behave = lambda prompt, before: said(by_prompt[prompt].gold)
    report = chains.evaluate(Endpoint(server.url), samples, style="tokens", progress=False)
    assert report.accuracy.value == 1
    assert set(server.paths) == {"/v1/completions"}
    body = next(body for body in server.bodies if body["prompt"] == samples[0].prompt)
    assert body["max_tokens"] == len(samples[0].gold.split()) + samples[0].tokens_per_step + 1


def test_a_second_run_asks_only_for_what_is_missing(server, samples, tmp_path, monkeypatch):
    monkeypatch.setenv("MY_KEY", "sk-secret-0123456789")
    by_prompt = {sample.prompt: sample for sample in samples}
    out, down = tmp_path / "results.jsonl", {samples[2].id: (503, b""), samples[3].id: b"{}", samples[5].id: (400, b"")}
    context = (400, b"maximum context length is 12")
    server.behave = lambda prompt, before: (
        context if by_prompt[prompt] is samples[8] else down.get(by_prompt[prompt].id, said(by_prompt[prompt].gold))
    )
    this = Endpoint(server.url, retries=0, key_env="MY_KEY")
    first = chains.evaluate(this, samples, style="tokens", out=out, progress=False)
    assert first.problems == {"server error": 1, "malformed answer": 1, "refused": 1, "context too short": 1}
    assert "sk-secret" not in out.read_text()
    down.clear()
    server.asked.clear()
    second = chains.evaluate(this, samples, style="tokens", out=out, progress=False)
    assert set(server.asked) == {samples[place].prompt for place in (2, 3, 5)}
    assert second.problems == {"context too short": 1}
    assert second.accuracy.n == 9
    with pytest.raises(ResultsError, match="model was 'the-model' and is 'b'"):
        chains.evaluate(Endpoint(server.url, model="b"), samples, style="tokens", out=out, progress=False)


def test_an_endpoint_that_dies_leaves_what_it_gave(server, samples, tmp_path):
    out, by_prompt = tmp_path / "results.jsonl", {sample.prompt: sample for sample in samples}
    alive = {samples[place].prompt for place in range(4)}
    server.behave = lambda prompt, before: said(by_prompt[prompt].gold) if prompt in alive else "reset"
    this = Endpoint(server.url, retries=0, concurrency=1)
    with pytest.raises(EndpointError, match="lost 2 prompts in a row, the last one by connection"):
        chains.evaluate(this, samples, style="tokens", out=out, progress=False)
    alive |= set(by_prompt)
    server.asked.clear()
    assert chains.evaluate(this, samples, style="tokens", out=out, progress=False).accuracy.n == 10
    assert len(server.asked) == 6


# ---- what is refused -------------------------------------------------------------------------------------------------


def test_bad_input(reasoner, samples, server):
    for asked, options, error, message in [
        ([], {}, ChainError, "no samples"),
        ([samples[0], samples[0]], {}, ChainError, f"two samples have the id '{samples[0].id}'"),
        (["text"], {}, ChainError, "a str is no sample"),
        (samples, {"style": "prose"}, UnknownName, "unknown style 'prose'"),
        (samples, {"cap": 0}, ChainError, "cap=0"),
        (samples, {"cap": 2.5}, ChainError, "cap=2.5"),
        (samples, {"batchsize": 3}, UnknownName, "option of evaluate 'batchsize'; did you mean batch_size"),
    ]:
        with pytest.raises(error, match=message):
            chains.evaluate(reasoner, asked, progress=False, **options)
    with pytest.raises(UnknownName, match="option of evaluate for an endpoint 'scores'"):
        chains.evaluate(Endpoint(server.url), samples, scores=True)


def test_progress_is_shown(reasoner, samples, capsys, monkeypatch):
    monkeypatch.setenv("O1LAB_HEADLESS", "1")
    chains.evaluate(reasoner, samples, cap=2)
    assert "chains: 10 done" in capsys.readouterr().out
