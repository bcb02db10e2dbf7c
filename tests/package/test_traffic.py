"""Traffic: the same requests from a seed everywhere, and files and logs read without dropping anything in silence."""

from __future__ import annotations

import json
import statistics

import pytest

from o1lab.kv.compare import compare
from o1lab.kv.designs import KVShape, Paged
from o1lab.kv.own_traffic import DRAWS, bounded, fullest_bytes, over_draws
from o1lab.kv.replay import replay
from o1lab.kv.traffic import Request, Traffic, TrafficError, long_cot
from o1lab.kv.traffic_files import MOST_LISTED, from_file, from_log

# --- made from a seed ------------------------------------------------------------------------------------------------


def test_a_seed_means_the_same_requests_everywhere():
    """Pinned: Python promises the sequence of ``random.Random(text).random()`` for all versions and platforms."""
    made = long_cot(4, 7, per_second=2.0, abort_share=0.5, prefixes=2)
    found = [(one.arrival_s, one.prompt_tokens, one.output_tokens, one.aborted_after, one.prefix) for one in made]
    assert found == PINNED
    assert long_cot(4, 8) != long_cot(4, 7)


PINNED = [
    (0.0, 793, 2080, None, "prefix 0"), (0.440697, 573, 2674, 2615, "prefix 0"),
    (0.487553, 863, 2609, None, "prefix 1"), (0.86051, 693, 2158, None, "prefix 0"),
]  # fmt: skip


def test_the_default_is_long_chains_of_thought():
    outputs = [one.output_tokens for one in long_cot(4000)]
    assert statistics.median(outputs) == pytest.approx(3000, rel=0.05)
    assert max(outputs) == 8000
    assert 0.03 < sum(one == 8000 for one in outputs) / 4000 < 0.08  # 1 − Φ(ln(8/3) / 0.6) = 5.1 %
    assert all(one.arrival_s == 0 and one.aborted_after is None and one.prefix is None for one in long_cot(50))


def test_arrivals_are_a_poisson_stream():
    times = [one.arrival_s for one in long_cot(4000, per_second=5.0)]
    gaps = [after - before for before, after in zip(times, times[1:], strict=False)]
    assert statistics.mean(gaps) == pytest.approx(0.2, rel=0.05)
    assert statistics.stdev(gaps) == pytest.approx(0.2, rel=0.08)


def test_properties_are_drawn_apart():
    plain, busy = long_cot(200), long_cot(200, abort_share=0.3, prefixes=3, per_second=1.0)
    assert [one.output_tokens for one in plain] == [one.output_tokens for one in busy]
    assert all(there.prompt_tokens - one.prompt_tokens == 512 for one, there in zip(plain, busy, strict=True))
    assert {one.prefix for one in busy} == {f"prefix {number}" for number in range(3)}
    aborted = [one for one in busy if one.aborted_after is not None]
    assert 40 < len(aborted) < 80
    assert all(one.tokens < one.prompt_tokens + one.output_tokens for one in aborted)


def test_short_requests_churn_between_the_long_ones():
    outputs = [one.output_tokens for one in long_cot(1000, short_share=0.5)]
    assert 400 < sum(one <= 200 for one in outputs) < 600


@pytest.mark.parametrize(
    "wrong",
    [{"n": 0}, {"median_tokens": 9000}, {"sigma": -1}, {"abort_share": 1.5}, {"short_share": float("nan")},
     {"per_second": 0}, {"prefix_tokens": 0}, {"concurrent": 0}, {"prompt_tokens": 5000}],
)  # fmt: skip
def test_numbers_out_of_range_are_named(wrong):
    with pytest.raises(TrafficError, match=next(iter(wrong))):
        long_cot(**wrong)


@pytest.mark.parametrize(
    "wrong",
    [{"prompt_tokens": 0}, {"output_tokens": 2.5}, {"arrival_s": -1.0}, {"arrival_s": float("inf")},
     {"prefix": "a", "prefix_tokens": 11}, {"aborted_after": 20}, {"output_tokens": True}],
)  # fmt: skip
def test_a_request_that_cannot_be_is_refused(wrong):
    with pytest.raises(TrafficError, match="request 3"):
        Request(**{"number": 3, "arrival_s": 0.0, "prompt_tokens": 10, "output_tokens": 20} | wrong)


def test_traffic_that_cannot_be_is_refused():
    one, two = Request(0, 1.0, 10, 10), Request(1, 0.0, 10, 10)
    with pytest.raises(TrafficError, match="no request"):
        Traffic(())
    with pytest.raises(TrafficError, match="order of their arrival"):
        Traffic((one, two))
    with pytest.raises(TrafficError, match="two lengths"):
        Traffic((Request(0, 0.0, 10, 10, None, "a", 5), Request(1, 0.0, 10, 10, None, "a", 6)))


# --- files -----------------------------------------------------------------------------------------------------------


def test_a_csv_and_the_same_rows_as_json_give_the_same_traffic(tmp_path):
    rows = [
        {"arrival_time": 12.5, "prompt_len": 30, "output_len": 100},
        {"arrival_time": 11.0, "prompt_len": 5, "output_len": 7},
    ]
    lines = ["arrival_time,prompt_len,output_len", *(",".join(map(str, row.values())) for row in rows)]
    (tmp_path / "t.csv").write_text("\ufeff" + "\n".join(lines) + "\n", encoding="utf-8")
    (tmp_path / "t.jsonl").write_text("\n\n".join(map(json.dumps, rows)), encoding="utf-8")
    one, other = (from_file(tmp_path / name, concurrent=3) for name in ("t.csv", "t.jsonl"))
    assert one.requests == other.requests == (Request(0, 0.0, 5, 7), Request(1, 1.5, 30, 100))
    assert one.concurrent == 3


def test_own_names_of_columns_are_taken(tmp_path):
    (tmp_path / "t.csv").write_text("in,out\n4,5\n")
    found = from_file(tmp_path / "t.csv", columns={"prompt_tokens": "in", "output_tokens": "out"})
    assert found.requests == (Request(0, 0.0, 4, 5),)
    with pytest.raises(TrafficError, match="columns names 'tokens'"):
        from_file(tmp_path / "t.csv", columns={"tokens": "in"})
    with pytest.raises(TrafficError, match="row 2: no prompt_tokens or input_tokens .* it has in, out"):
        from_file(tmp_path / "t.csv")


BAD = {
    "no number": '{"prompt_tokens": "many", "output_tokens": 5}',
    "half a token": '{"prompt_tokens": 4.5, "output_tokens": 5}',
    "nothing produced": '{"prompt_tokens": 4, "output_tokens": 0}',
    "not there": '{"prompt_tokens": 4}',
    "null": '{"prompt_tokens": 4, "output_tokens": null}',
    "a list": "[1, 2]",
    "no JSON": '{"prompt_tokens": 4,',
    "infinite": '{"prompt_tokens": 1e999, "output_tokens": 5}',
    "true": '{"prompt_tokens": true, "output_tokens": 5}',
    "no time": '{"prompt_tokens": 4, "output_tokens": 5, "timestamp": "yesterday"}',
    "a true time": '{"prompt_tokens": 4, "output_tokens": 5, "timestamp": true}',
    "a time of 400 digits": '{"prompt_tokens": 4, "output_tokens": 5, "timestamp": 1%s}' % ("0" * 400),
    "400 digits": '{"prompt_tokens": 1%s, "output_tokens": 5}' % ("0" * 400),
    "5000 digits": '{"prompt_tokens": 1%s, "output_tokens": 5}' % ("0" * 5000),
    "beyond the limit": '{"prompt_tokens": 1e12, "output_tokens": 5}',
    "too deep": "[" * 100_000,
}


@pytest.mark.parametrize("row", BAD.values(), ids=BAD)
def test_a_bad_row_is_named_and_left_out_only_if_asked(tmp_path, row):
    path = tmp_path / "t.jsonl"
    path.write_text('{"prompt_tokens": 4, "output_tokens": 5}\n' + row + '\n{"prompt_tokens": 6, "output_tokens": 7}\n')
    with pytest.raises(TrafficError, match=r"t\.jsonl, row 2: .*skip_bad=True"):
        from_file(path)
    found = from_file(path, skip_bad=True)
    assert [one.prompt_tokens for one in found] == [4, 6]
    assert len(found.bad_rows) == 1
    assert "left out: row 2:" in str(found)


def test_many_bad_rows_are_counted(tmp_path):
    path = tmp_path / "t.jsonl"
    path.write_text('{"prompt_tokens": 4, "output_tokens": 5}\n' + "x\n" * 50)
    found = from_file(path, skip_bad=True)
    assert len(found.bad_rows) == MOST_LISTED + 1
    assert found.bad_rows[-1] == f"{50 - MOST_LISTED} more rows"


def test_a_csv_row_with_too_many_fields_is_a_bad_row(tmp_path):
    (tmp_path / "t.csv").write_text("prompt_tokens,output_tokens\n4,5\n4,5,6\n")
    with pytest.raises(TrafficError, match="row 3: more fields"):
        from_file(tmp_path / "t.csv")


def test_times_for_some_rows_only_are_refused(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("prompt_tokens,output_tokens,created\n4,5,1700000000\n4,5,\n")
    with pytest.raises(TrafficError, match="row 3 has no time of arrival"):
        from_file(path, skip_bad=True)


@pytest.mark.parametrize("name", ["missing.csv", "binary.jsonl", "empty.jsonl", "folder"])
def test_a_file_that_cannot_be_read_is_named(tmp_path, name):
    (tmp_path / "binary.jsonl").write_bytes(b"\xff\xfe\x00\x00\x80")
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "folder").mkdir()
    with pytest.raises(TrafficError, match=name):
        from_file(tmp_path / name)


# --- logs ------------------------------------------------------------------------------------------------------------


def answer(number, created, **more):
    usage = {"prompt_tokens": 10 + number, "completion_tokens": 100 + number, "total_tokens": 110 + 2 * number}
    return {"id": f"cmpl-{number}", "object": "chat.completion", "created": created, "usage": usage, **more}


def test_a_log_of_answers_is_read_whatever_wraps_them(tmp_path):
    usages = [None, {"prompt_tokens": 9, "completion_tokens": 1}, {"prompt_tokens": 9, "completion_tokens": 2}]
    streamed = [{"id": "s", "object": "chat.completion.chunk", "created": 1003, "usage": usage} for usage in usages]
    rows = [
        answer(1, 1001),
        {"custom_id": "a", "response": {"status_code": 200, "body": answer(2, 1002)}},
        *streamed,
        {"created_at": "2026-01-01T00:00:00+00:00", "response": {"usage": {"input_tokens": 7, "output_tokens": 8}}},
    ]
    path = tmp_path / "log.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    found = [(one.prompt_tokens, one.output_tokens) for one in from_log(path)]
    assert found == [(11, 101), (12, 102), (9, 2), (7, 8)]
    assert [one.arrival_s for one in from_log(path)][:3] == [0, 1, 2]


def test_an_answer_without_usage_is_a_bad_row(tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_text(json.dumps(answer(1, 1)) + "\n" + json.dumps({"error": {"message": "busy"}}) + "\n")
    with pytest.raises(TrafficError, match="row 2: no usage in it; it has error"):
        from_log(path)
    assert len(from_log(path, skip_bad=True)) == 1


def test_only_bad_rows_are_no_traffic(tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_text("x\n")
    with pytest.raises(TrafficError, match="no request in it"):
        from_log(path, skip_bad=True)
    (tmp_path / "t.csv").write_text("prompt_tokens,output_tokens\n" + "4,none\n" * 30)
    with pytest.raises(TrafficError, match="no request in it, 30 of its rows are bad; the first: row 2: .*'none'"):
        from_file(tmp_path / "t.csv", skip_bad=True)


# --- what people hand in by mistake ----------------------------------------------------------------------------------


def test_spaces_around_the_names_of_columns_do_not_matter(tmp_path):
    (tmp_path / "t.csv").write_text(' prompt_tokens , output_tokens, why\n4, 5, "a, b"\n')
    assert from_file(tmp_path / "t.csv").requests == (Request(0, 0.0, 4, 5),)
    (tmp_path / "t.csv").write_text("in, n_out\n4, 5\n")
    found = from_file(tmp_path / "t.csv", columns={"prompt_tokens": "in", "output_tokens": " n_out"})
    assert found.requests == (Request(0, 0.0, 4, 5),)


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("t.csv", "prompt_tokens;output_tokens\n4;5\n", "one column, 'prompt_tokens;output_tokens'"),
        ("t.csv", "prompt_tokens\toutput_tokens\n4\t5\n", "one column"),
        ("t.tsv", "prompt_tokens\toutput_tokens\n4\t5\n", "it begins with 'prompt_tokens"),
        ("t.txt", "prompt_tokens,output_tokens\n4,5\n", "it begins with 'prompt_tokens"),
        ("t.json", '[{"prompt_tokens": 4, "output_tokens": 5}]', "one JSON array"),
        ("t.json", '\n[\n  {"prompt_tokens": 4, "output_tokens": 5}\n]\n', "one JSON array"),
    ],
)
@pytest.mark.parametrize("skip_bad", [False, True])
def test_a_file_of_another_kind_is_told_what_is_wanted(tmp_path, name, text, words, skip_bad):
    (tmp_path / name).write_text(text)
    with pytest.raises(TrafficError, match=f"{words}.*; wanted is a table with commas .*JSON lines"):
        from_file(tmp_path / name, skip_bad=skip_bad)


@pytest.mark.parametrize("path", [None, 5, "", b"t.csv", "a\0b"])
@pytest.mark.parametrize("read", [from_file, from_log])
def test_what_is_no_path_is_refused(read, path):
    with pytest.raises(TrafficError):
        read(path)


@pytest.mark.parametrize("columns", [5, "output_tokens", ["output_tokens"], {"output_tokens": 5}])
def test_columns_that_are_no_names_are_refused(tmp_path, columns):
    (tmp_path / "t.csv").write_text("prompt_tokens,output_tokens\n4,5\n")
    with pytest.raises(TrafficError, match="columns"):
        from_file(tmp_path / "t.csv", columns=columns)


@pytest.mark.parametrize("finer", [1, 10**3, 10**6, 10**9])
def test_times_of_arrival_may_be_in_milliseconds_or_finer(tmp_path, finer):
    rows = [{"prompt_tokens": 4, "output_tokens": 5, "created": (1_700_000_000 + late) * finer} for late in (0, 90)]
    (tmp_path / "t.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert [one.arrival_s for one in from_file(tmp_path / "t.jsonl")] == [0, 90]


# --- as much of it as there is time for ------------------------------------------------------------------------------


def spread(count, *, least=200, most=16_000, arrival=0.0, concurrent=64):
    """Traffic as a real server has it: many requests, long answers."""
    outputs = [least + (most - least) * number // count for number in range(count)]
    return Traffic(
        tuple(Request(number, arrival * number, 1000, tokens) for number, tokens in enumerate(outputs)),
        concurrent,
        "t.csv",
    )


def tensors(own, shape):
    return sum(1 + -(-one.decoded // own.stride) for one in own.traffic) * 2 * shape.layers


def test_little_traffic_is_left_as_it_is():
    traffic = long_cot(20)
    own = bounded(traffic, KVShape(), work=60_000)
    assert (own.traffic, own.stride) == (traffic, 32)
    assert own.note == "replayed traffic: long CoT, seed 0, 20 of 20 requests, one step for 32 tokens"


@pytest.mark.parametrize("arrival", [0.0, 2.0])
def test_large_traffic_is_cut_to_the_work_and_says_so(arrival):
    own = bounded(spread(600, arrival=arrival), KVShape(), work=60_000)
    assert tensors(own, KVShape()) <= 60_000
    assert own.stride == 256
    assert 64 < len(own.traffic) < 600
    left = 600 - len(own.traffic)
    how = "those that came last" if arrival else "a random part"
    assert f"t.csv, {600 - left} of 600 requests ({left} left out to save time: {how})" in own.note
    assert "one step for 256 tokens instead of 32" in own.note
    outputs = [one.output_tokens for one in own.traffic]
    assert (max(outputs) > 15_000) != bool(arrival)  # rows sorted by length must not decide what is kept


def test_one_endless_answer_is_replayed_in_coarse_steps():
    own = bounded(spread(1, least=9_000_000, concurrent=1), KVShape(), work=60_000)
    assert tensors(own, KVShape()) <= 60_000
    assert f"one step for {own.stride} tokens" in own.note


@pytest.mark.parametrize(
    "requests", [(Request(0, 0.0, 5, 6),), (Request(0, 0.0, 5, 3000), Request(1, 0.0, 5, 6))], ids=["tiny", "one long"]
)
def test_traffic_too_small_to_judge_says_what_is_missing(requests):
    with pytest.raises(TrafficError, match=r"mine\.csv: too small to judge: .* at step 1,024\. Give more requests"):
        bounded(Traffic(requests, 8, "mine.csv"), KVShape(), work=60_000)


def test_draws_are_resamples_of_the_same_requests():
    traffic = long_cot(40, per_second=1.0, prefixes=2)
    own = bounded(traffic, KVShape(), work=60_000, seed=3)
    assert own.draw(1) == own.draw(1) != own.draw(2)
    lengths = {(one.prompt_tokens, one.output_tokens) for one in traffic}
    for drawn in map(own.draw, range(DRAWS)):
        assert {(one.prompt_tokens, one.output_tokens) for one in drawn} < lengths
        assert [one.arrival_s for one in drawn] == [one.arrival_s for one in own.traffic]
        assert [one.number for one in drawn] == list(range(len(own.traffic)))


def test_the_head_is_followed_to_a_token():
    head = bounded(spread(600), KVShape(), work=60_000).head(12, most_tokens=4000, concurrent=8)
    assert (len(head), head.concurrent) == (12, 8)
    assert max(one.decoded for one in head) == 4000


def test_an_interval_over_draws_does_not_shrink_with_their_number():
    few, many = over_draws([1.0, 2.0, 3.0] * 3, "%"), over_draws([1.0, 2.0, 3.0] * 300, "%")
    assert few.high - few.low > many.high - many.low > 2
    assert over_draws([5.0, 5.0], "%").low == 5


def test_a_pool_of_the_fullest_bytes_never_runs_out():
    traffic = spread(100)
    design = Paged(KVShape(), capacity_bytes=fullest_bytes(traffic, KVShape()))
    assert replay(traffic, design, stride=256).clean


def test_a_comparison_breaks_its_first_line_between_words():
    found = str(compare(long_cot(4, concurrent=2, median_tokens=100, most_tokens=200), step_bytes=64 << 20))
    assert max(map(len, found.splitlines())) <= 100
