"""The shipped reasoner in vLLM, where that is installed: it loads as it is, and writes the chains it writes here."""

from __future__ import annotations

import pytest

from o1lab import chains, models
from o1lab.chains.render import prompt

pytestmark = pytest.mark.gpu
ALONE = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_USE_FLASHINFER_SAMPLER": "0", "VLLM_NO_USAGE_STATS": "1"}
KINDS = [("arithmetic", "modular"), ("arithmetic", "digits"), ("symbols", "symbols"), ("hops", "hops")]


@pytest.fixture(scope="module")
def server():
    vllm = pytest.importorskip("vllm", reason="vLLM is not installed; it wants an environment of its own")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ALONE.items():
            patch.setenv(name, value)
        yield vllm.LLM(
            model=str(models.WEIGHTS / "reasoner"), dtype="float16", enforce_eager=True, gpu_memory_utilization=0.3,
            max_model_len=4096,
        )  # fmt: skip


@pytest.mark.parametrize(("task", "variant"), KINDS)
def test_vllm_loads_the_reasoner_and_writes_the_same_chains(server, task, variant):
    from vllm import SamplingParams

    samples = chains.make(task, 32, 32, seed=7, variant=variant)
    longest = max(len(sample.gold.split()) for sample in samples) + 8
    asked = SamplingParams(temperature=0, max_tokens=longest)
    said = [one.outputs[0] for one in server.generate([prompt(sample, "tokens") for sample in samples], asked)]
    reasoner = models.load("reasoner", "cuda")
    words = [reasoner.tokenizer.decode(one.token_ids).replace("<eos>", "").split() for one in said]
    here = chains.evaluate(reasoner, samples, progress=False)
    assert here.results[0].tokens > 60
    assert sum(one.finish_reason == "stop" for one in said) >= 31  # it ends by itself
    assert sum(chains.localise(sample, " ".join(one)) is None for sample, one in zip(samples, words, strict=True)) >= 31
    mine = [one.text.replace("<eos>", "").split() for one in here.results]
    assert sum(one == other for one, other in zip(words, mine, strict=True)) >= 31  # in 16 bits a near-tie may turn
    assert sum(one.text.split() == other for one, other in zip(said, words, strict=True)) == 32  # as a client reads it
