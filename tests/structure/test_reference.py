"""The recorded runs are whole, and README's table says what they say."""

from __future__ import annotations

import collections
import re

import pytest

from o1lab import claims, paths, records

ROOT = paths.PACKAGE.parent
REFERENCE = ROOT / "results" / "reference"
RECORDS = sorted(REFERENCE.glob("*/records/*.json"))
ROW = re.compile(r"^\| \[(\d\d_\w+)\]\(notebooks/.*\| ([^|]+) \|$", re.MULTILINE)


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: f"{path.parts[-3]}/{path.stem}")
def test_a_recorded_run_is_whole_and_dated(path):
    record = records.read_record(path)
    assert re.match(r"\d{4}-\d\d-\d\d-", path.parts[-3]), "a recorded run's folder begins with its date"
    assert path.parts[-3].startswith(record.started[:10])
    known = {claim.id for claim in claims.for_notebook(record.notebook)}
    assert set(record.verdicts) <= known
    younger = len(known - set(record.verdicts))  # rows that the ledger has got since this record
    if younger:
        row = dict(ROW.findall((ROOT / "README.md").read_text("utf-8")))[record.notebook]
        assert f"{younger} not recorded yet" in row


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: f"{path.parts[-3]}/{path.stem}")
def test_the_rules_of_today_give_the_recorded_verdicts(path):
    record = records.read_record(path)
    for name, estimate in record.estimates.items():
        claim = claims.load()[name]
        assert claims.decide(claim, estimate, set(claim.needs)).outcome == record.verdicts[name].outcome, name


def test_readmes_table_counts_the_recorded_verdicts():
    rows = dict(ROW.findall((ROOT / "README.md").read_text("utf-8")))
    assert rows, "README's table of notebooks was not found"
    for notebook, words in rows.items():
        known = [records.read_record(path) for path in RECORDS if path.stem == notebook]
        record = max(known, key=lambda record: record.preset == "full")
        counts = collections.Counter(verdict.outcome for verdict in record.verdicts.values())
        said = {
            outcome: int(number) for number, outcome in re.findall(r"(\d+) (supported|refuted|inconclusive)", words)
        }
        assert said == {outcome: number for outcome, number in counts.items() if outcome != "not evaluated"}, notebook
