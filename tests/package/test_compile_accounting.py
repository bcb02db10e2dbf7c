"""What torch.compile holds in this process: entries, reasons, advice; and what an arm with other switches records."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from o1lab.memory import compile_accounting, compile_cache


@pytest.fixture(autouse=True)
def clean():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def find(name):
    return next(item for item in compile_accounting.accounting().functions if item.function.startswith(name))


def test_entries_and_the_reason_of_each_recompilation_are_counted():
    def lengthen(x):
        return x * 2

    compiled = torch.compile(lengthen, backend="eager", dynamic=False)
    for length in range(2, 7):
        compiled(torch.zeros(length))
    found = find("lengthen")
    assert (found.entries, found.compiled) == (5, 5)
    ((reason, count),) = found.reasons.items()
    assert "size mismatch" in reason
    assert count == 4
    assert "mark_dynamic" in found.advice
    text = str(compile_accounting.accounting())
    assert "lengthen (test_compile_accounting.py:" in text
    assert "recompile_limit 8" in text


@pytest.mark.parametrize(
    ("change", "advice"),
    [
        (lambda x: x.double(), "one dtype"),
        (lambda x: x.requires_grad_(), "one dtype"),
    ],
)
def test_other_reasons_get_other_advice(change, advice):
    def square(x):
        return x * x

    compiled = torch.compile(square, backend="eager", dynamic=False)
    compiled(torch.zeros(3))
    compiled(change(torch.zeros(3)))
    assert advice in find("square").advice


def test_a_function_that_never_recompiles_gets_no_advice():
    def once(x):
        return x + 1

    torch.compile(once, backend="eager")(torch.zeros(3))
    found = find("once")
    assert (found.entries, found.reasons, found.advice) == (1, {}, "")


def test_asking_loads_no_compiler():
    code = (
        "import sys; from o1lab.memory.compile_accounting import accounting; found = accounting(); "
        "print(found.functions, 'torch._dynamo' in sys.modules)"
    )
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "() False\n"
    )


def test_reset_empties_the_account():
    def gone(x):
        return x - 1

    torch.compile(gone, backend="eager")(torch.zeros(3))
    assert find("gone").entries == 1
    torch._dynamo.reset()
    assert not any(item.function.startswith("gone") for item in compile_accounting.accounting().functions)


def test_an_arm_records_pools_and_the_drivers_figure():
    (arm,) = compile_cache.run_arms([{"arm": "eager", "shapes": 6, "backend": "none"}])
    assert len(arm.pools) == len(arm.used) == 7
    assert set(arm.pools) == {0}  # no private pools without CUDA graphs
