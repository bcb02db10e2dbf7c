"""The Hugging Face ``datasets`` folder of LTC-Bench: Parquet files, a dataset card, a manifest.

The Parquet files are read from the JSON lines beside them, so both hold the same rows. The package ``datasets`` is not
needed to write them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from o1lab.chains.samples import TASKS

CARD = """---
pretty_name: LTC-Bench (long chains)
license: apache-2.0
language: en
task_categories: [text-generation]
tags: [reasoning, chain-of-thought, synthetic, step-level]
configs:
{configs}
---
# LTC-Bench

Chain problems with every intermediate state known, made by o1lab from seed {seed}: {main:,} in the main grid
(three families, program lengths {lengths}, {n} a cell), {factors:,} in the split `factors`.

| family | state | steps |
|---|---|---|
| `arithmetic` | one number modulo 31 (`modular`), or three digits (`digits`), in turn | + − ×, or + − with carries |
| `symbols` | five letters A to F | swap, rotate, reverse, exchange two letters everywhere |
| `hops` | one of 12 entities (more with distractors) | one of four relations, by the facts in the prompt |

The split `factors` separates what a longer chain changes at once. Its cells: `short` (a long program, few steps from
its first entry), `late` (the last entries only), `shuffled` (program in mixed order), `distract` (hops: entities that
the chain cannot reach).

Columns: `cell`; `id`, `task`, `variant`, `seed`, `number`; `length` (entries in the program); `start`; `steps` (label,
operator, operand, state after it, and the kinds of fault it can show); `program` and `facts` as shown; `factors`;
`prompt_tokens`, `gold_tokens`, `answer_tokens` (symbolic tokens) and `prompt_language`, `gold_language`,
`answer_language` (plain English with one worked example, for instruction-tuned models).

The JSON lines in `jsonl/` are the same bytes on every machine: SHA-256 of the main grid's three files one after
another `{sha256}`. Check or make them again with `python -m o1lab.chains.bench --out folder{options}`.
"""


def schema() -> Any:
    """The columns as a pyarrow schema."""
    import pyarrow as pa

    text, number = pa.string(), pa.int64()
    entry = [("label", number), ("operator", text), ("operand", text)]
    step = pa.struct([*entry, ("state", text), ("breakpoints", pa.list_(text))])
    counts = ("first", "asked", "facts", "carries", "prompt_tokens", "chain_tokens")
    factors = pa.struct([("order", text), *((name, number) for name in counts)])
    styles = [(f"{what}_{style}", text) for what in ("prompt", "gold", "answer") for style in ("tokens", "language")]
    return pa.schema(
        [
            *((name, text) for name in ("cell", "id", "task", "variant")),
            *((name, number) for name in ("seed", "number", "length")),
            ("start", text),
            ("steps", pa.list_(step)),
            ("program", pa.list_(pa.struct(entry))),
            ("facts", pa.list_(pa.list_(text))),
            ("factors", factors),
            *styles,
        ]
    )


def write_folder(folder: Path, about: dict[str, Any], manifest: str) -> None:
    """Add Parquet files, card and manifest to a folder that holds ``jsonl/<split>-<task>.jsonl``."""
    import pyarrow.json
    import pyarrow.parquet

    (folder / "data").mkdir()
    parsing = pyarrow.json.ParseOptions(explicit_schema=schema(), unexpected_field_behavior="error")
    reading = pyarrow.json.ReadOptions(use_threads=False, block_size=1 << 24)
    for path in sorted((folder / "jsonl").glob("*.jsonl")):
        table = pyarrow.json.read_json(path, read_options=reading, parse_options=parsing)
        pyarrow.parquet.write_table(
            table.select(schema().names), folder / "data" / f"{path.stem}.parquet", compression="zstd",
            row_group_size=1024,
        )  # fmt: skip
    (folder / "README.md").write_text(_card(about), encoding="utf-8", newline="\n")
    (folder / manifest).write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8", newline="\n")


def _card(about: dict[str, Any]) -> str:
    configs = []
    for name, pattern in (("all", "*"), *((task, task) for task in TASKS)):
        configs += [f"- config_name: {name}", *(["  default: true"] if name == "all" else []), "  data_files:"]
        for split, prefix in (("test", "main"), ("factors", "factors")):
            configs += [f"  - split: {split}", f"    path: data/{prefix}-{pattern}.parquet"]
    lengths, n, seed = about["lengths"], about["n"], about["seed"]
    options = f" --seed {seed} --lengths {','.join(map(str, lengths))} --n {n}"
    return CARD.format(
        configs="\n".join(configs), seed=seed, lengths=", ".join(map(str, lengths)), n=n, options=options,
        sha256=about["sha256"]["main"], **about["rows"],
    )  # fmt: skip
