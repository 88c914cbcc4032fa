"""Loading models and heads: what is refused, and that the refusal names the file and the reason."""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path

import pytest
import torch
from cerberus_decode import embedded, models
from cerberus_decode.embedded import ModelUnavailable
from cerberus_decode.heads import HeadsMismatch
from cerberus_decode.weight_files import ModelUnreadable, check_folder, check_gguf, check_safetensors
from model_folders import HIDDEN_SIZE, VOCAB_SIZE, save_tiny_heads, save_tiny_model
from safetensors.torch import load_file, save_file


@pytest.fixture(scope="module")
def tiny_folder(tmp_path_factory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def folder(tiny_folder, tmp_path) -> Path:
    """A copy that a test may damage."""
    return Path(shutil.copytree(tiny_folder, tmp_path / "model"))


def one_line(caught) -> str:
    assert "\n" not in str(caught.value)
    return str(caught.value)


def change_config(folder: Path, **changes) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_local_folder_loads_in_the_dtype_asked_for(tiny_folder):
    for dtype in ("float32", torch.bfloat16):
        base = models.load(tiny_folder, dtype=dtype)
        assert base.model.dtype in (torch.float32, torch.bfloat16)
        assert str(base.model.dtype).endswith(str(dtype).removeprefix("torch."))
    assert not base.model.training
    assert not any(weight.requires_grad for weight in base.model.parameters())
    assert base.name == tiny_folder.name
    assert not base.is_embedded
    assert base.tokenizer.decode(base.tokenizer.encode("ab")) == "ab"


def test_dtype_is_checked(tiny_folder):
    with pytest.raises(ValueError, match="dtype must be one of float32, bfloat16, float16, got 'int8'"):
        models.load(tiny_folder, dtype="int8")


def test_none_is_the_embedded_model(folder, monkeypatch, tmp_path):
    monkeypatch.setenv("CERBERUS_CACHE", str(tmp_path))
    folder.rename(tmp_path / embedded.NAME)
    base = models.load()
    assert (base.name, base.is_embedded) == (embedded.NAME, True)
    assert models.load(tmp_path / embedded.NAME).is_embedded


@pytest.mark.parametrize("name", ["./nowhere", "/no/where", "~/no-such-folder", "a/b/c", "nothing.gguf"])
def test_missing_path_is_not_looked_up_on_the_hub(name):
    with pytest.raises(ModelUnavailable, match="no such file or folder: "):
        models.load(name)


def test_what_exists_here_is_never_looked_up_on_the_hub(folder, monkeypatch):
    monkeypatch.chdir(folder.parent)
    (folder.parent / "owner").mkdir()
    shutil.move(folder, folder.parent / "owner" / "name")
    assert models.load("owner/name").name == "name"
    (folder.parent / "owner" / "name" / "config.json").unlink()
    with pytest.raises(ModelUnreadable, match=r"owner/name is no model folder: it holds no config\.json"):
        models.load("owner/name")


def test_hub_without_network_is_one_line(monkeypatch):
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ModelUnavailable, match="cannot load model nobody/nothing"):
        models.load("nobody/nothing")


def test_folder_with_only_a_gguf_file_says_how_to_load_it(tmp_path):
    (tmp_path / "weights.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelUnreadable, match=r"pass the file itself: .*weights\.gguf"):
        models.load(tmp_path)


@pytest.mark.parametrize(("content", "reason"), [("", "not readable JSON"), ("[1]", "not a JSON object")])
def test_damaged_config_is_named(folder, content, reason):
    (folder / "config.json").write_text(content)
    with pytest.raises(ModelUnreadable, match=f"config.json is {reason}"):
        models.load(folder)


def test_unknown_architecture_is_one_line(folder):
    change_config(folder, model_type="no-such-model", architectures=["NoSuchModel"])
    with pytest.raises(ModelUnreadable, match=r"cannot load model .*no-such-model") as caught:
        models.load(folder)
    one_line(caught)


def test_folder_without_weights_is_named(folder):
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelUnreadable, match="holds no weights"):
        models.load(folder)


def test_missing_part_of_several_is_named(folder):
    (folder / "model.safetensors").rename(folder / "part-1.safetensors")
    index = {"weight_map": {"a": "part-1.safetensors", "b": "part-2.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelUnreadable, match=r"index\.json lists part-2\.safetensors, which is missing"):
        models.load(folder)


def damaged_safetensors(path: Path, damage: str) -> None:
    data = path.read_bytes()
    if damage == "folder":
        path.unlink()
        path.mkdir()
        return
    path.write_bytes(
        {
            "last byte": data[:-1],
            "header": data[:40],
            "length": data[:5],
            "magic": b"\xff" * 8 + data[8:],
            "json": data[:8] + b"x" * 8 + data[16:],
            "empty": b"",
            "longer": data + b"\0",
            "lfs": b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12\n",
        }[damage]
    )


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        ("last byte", r"is truncated: it must hold \d+ bytes, got \d+"),
        ("header", "is truncated in its header"),
        ("length", "is truncated in its header"),
        ("magic", "is truncated in its header, or no safetensors file"),
        ("json", "is no safetensors file: its header cannot be read"),
        ("empty", "is empty"),
        ("longer", "is damaged"),
        ("lfs", "is a Git LFS pointer"),
        ("folder", "is a folder, not a file"),
    ],
)
def test_lod_03_damaged_safetensors_are_named(folder, damage, reason):
    damaged_safetensors(folder / "model.safetensors", damage)
    with pytest.raises(ModelUnreadable, match=rf"model\.safetensors {reason}") as caught:
        models.load(folder)
    one_line(caught)


def test_whole_safetensors_give_their_names(tiny_folder):
    names = check_safetensors(tiny_folder / "model.safetensors")
    assert names == sorted(load_file(tiny_folder / "model.safetensors"))
    check_folder(tiny_folder)


def gguf_bytes(*, offset: int = 0, settings: tuple[bytes, ...] = (), magic: bytes = b"GGUF", version: int = 3) -> bytes:
    """A GGUF header with one float32 tensor of 64 elements at ``offset``, padded to its data."""

    def text(value: bytes) -> bytes:
        return struct.pack("<Q", len(value)) + value

    head = magic + struct.pack("<IQQ", version, 1, len(settings) + 1)
    words = struct.pack("<I", 9) + struct.pack("<IQ", 8, 2) + text(b"a") + text(b"bc")
    head += text(b"tokenizer.ggml.tokens") + words + b"".join(settings)
    head += text(b"weight") + struct.pack("<I", 2) + struct.pack("<QQIQ", 32, 2, 0, offset)
    return head + b"\0" * (-len(head) % 32)


def number(name: bytes, kind: int, layout: str, value: int) -> bytes:
    return struct.pack("<Q", len(name)) + name + struct.pack("<I" + layout, kind, value)


TENSOR_BYTES = 64 * 4


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda whole: whole[:-1], r"is truncated: it must hold \d+ bytes, got \d+"),
        (lambda whole: whole[:20], "is truncated or damaged in its header"),
        (lambda whole: whole[:60], "is truncated or damaged in its header"),
        (lambda whole: whole[:90], "is truncated or damaged in its header"),
        (lambda whole: whole[:3], "is no GGUF file: it begins with b'GGU'"),
        (lambda whole: whole[3::-1] + whole[4:], "is no GGUF file: it begins with b'FUGG'"),
        (lambda whole: whole[:4] + struct.pack("<I", 9) + whole[8:], "is of GGUF version 9"),
        (lambda whole: whole[:8] + struct.pack("<Q", 0) + whole[16:], "holds no tensors"),
        (lambda whole: whole[:8] + struct.pack("<QQ", 2**60, 2**60) + whole[24:], "is truncated or damaged"),
        (lambda whole: b"", "is empty"),
    ],
)
def test_lod_03_damaged_gguf_is_named(tmp_path, make, reason):
    path = tmp_path / "weights.gguf"
    path.write_bytes(make(gguf_bytes() + b"\0" * TENSOR_BYTES))
    with pytest.raises(ModelUnreadable, match=rf"weights\.gguf {reason}") as caught:
        models.load(path)
    one_line(caught)


def test_lod_03_folder_named_like_a_file(tmp_path):
    (tmp_path / "weights.gguf").mkdir()
    with pytest.raises(ModelUnreadable, match=r"weights\.gguf is no model folder"):
        models.load(tmp_path / "weights.gguf")
    with pytest.raises(ModelUnreadable, match=r"weights\.gguf is a folder, not a file"):
        check_gguf(tmp_path / "weights.gguf")


def test_lod_03_one_part_of_two_is_said(tmp_path):
    path = tmp_path / "weights.gguf"
    path.write_bytes(gguf_bytes(settings=(number(b"split.count", 2, "H", 2),)) + b"\0" * TENSOR_BYTES)
    with pytest.raises(ModelUnreadable, match=r"weights\.gguf is one part of 2; merge them"):
        models.load(path)


@pytest.mark.parametrize("offset", [0, 2**32 + 64])
def test_lod_03_valid_files_pass_also_past_4_gib(tmp_path, offset):
    path = tmp_path / "weights.gguf"
    head = gguf_bytes(offset=offset, settings=(number(b"general.alignment", 4, "I", 32),))
    with path.open("wb") as file:
        file.write(head)
        file.truncate(len(head) + offset + TENSOR_BYTES)
    check_gguf(path)
    with path.open("r+b") as file:
        file.truncate(len(head) + offset + TENSOR_BYTES - 1)
    with pytest.raises(ModelUnreadable, match="is truncated"):
        check_gguf(path)


def test_lod_07_tied_output_layer_may_be_absent(tmp_path):
    folder = save_tiny_model(tmp_path / "tied")
    assert "lm_head.weight" not in check_safetensors(folder / "model.safetensors")
    model = models.load(folder).model
    assert torch.equal(model.get_output_embeddings().weight, model.get_input_embeddings().weight)


def test_lod_07_untied_output_layer_must_be_there(tmp_path):
    folder = save_tiny_model(tmp_path / "untied", tied=False)
    models.load(folder)
    weights = load_file(folder / "model.safetensors")
    del weights["lm_head.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelUnreadable, match=r"lacks lm_head\.weight and tie_word_embeddings is false"):
        models.load(folder)


def test_other_missing_weights_are_refused(folder):
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelUnreadable, match=r"lacks model\.layers\.1\.mlp\.up_proj\.weight$"):
        models.load(folder)


def test_weights_of_another_shape_are_refused(folder):
    change_config(folder, intermediate_size=48)
    with pytest.raises(ModelUnreadable) as caught:
        models.load(folder)
    one_line(caught)


def test_lod_09_heads_take_the_base_models_dtype(tiny_folder, tmp_path):
    heads = save_tiny_heads(tmp_path / "heads")
    for dtype in (torch.float32, torch.bfloat16):
        bound = models.load_heads(models.load(tiny_folder, dtype=dtype), "cerberus", heads)
        assert bound.weight.dtype == bound.bias.dtype == bound.vocab_weight.dtype == dtype


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"vocab_size": VOCAB_SIZE - 2, "draft_vocab_size": VOCAB_SIZE - 2}, f"{VOCAB_SIZE}.*{VOCAB_SIZE - 2}"),
        ({"vocab_size": VOCAB_SIZE + 2, "draft_vocab_size": VOCAB_SIZE + 2}, f"{VOCAB_SIZE}.*{VOCAB_SIZE + 2}"),
        ({"hidden_size": 40}, f"hidden size must be the base model's {HIDDEN_SIZE}, got 40"),
    ],
)
def test_lod_09_heads_of_another_model_are_refused_with_both_numbers(tiny_folder, tmp_path, changes, reason):
    heads = save_tiny_heads(tmp_path / "heads", **changes)
    with pytest.raises(HeadsMismatch, match=reason):
        models.load_heads(models.load(tiny_folder), "cerberus", heads)


@pytest.mark.parametrize(("says", "holds"), [(2, 5), (5, 2)])
def test_lod_05_head_count_must_be_that_of_the_file(tiny_folder, tmp_path, says, holds):
    heads = save_tiny_heads(tmp_path / "heads", num_heads=holds)
    change_config(heads, num_heads=says)
    with pytest.raises(HeadsMismatch, match=rf"weight must be of shape \[1, {says}, .*got \[1, {holds}, "):
        models.load_heads(models.load(tiny_folder), "cerberus", heads)
    config = json.loads((heads / "config.json").read_text())
    del config["num_heads"]
    (heads / "config.json").write_text(json.dumps(config))
    with pytest.raises(HeadsMismatch, match="num_heads"):
        models.load_heads(models.load(tiny_folder), "cerberus", heads)


def test_heads_are_found_by_kind(tiny_folder, tmp_path):
    base = models.load(tiny_folder)
    both = tmp_path / "both"
    for kind in models.HEAD_KINDS:
        save_tiny_heads(both / kind, kind)
        assert models.find_heads(base, kind, both) == both / kind
        assert models.find_heads(base, kind, both / kind) == both / kind
    with pytest.raises(ModelUnavailable, match="holds no medusa heads"):
        models.find_heads(base, "medusa", both / "cerberus")
    with pytest.raises(ModelUnavailable, match="no such heads folder"):
        models.find_heads(base, "medusa", tmp_path / "nowhere")
    with pytest.raises(ModelUnavailable, match="no medusa heads ship for"):
        models.find_heads(base, "medusa")


@pytest.mark.parametrize("version", ["5.17.0", "5.24.0", "5.99.1.dev0"])
def test_lod_10_supported_transformers(version):
    models.check_transformers(version)


@pytest.mark.parametrize("version", ["4.57.1", "5.16.9", "6.0.0"])
def test_lod_10_unsupported_transformers_is_named(version):
    with pytest.raises(ImportError, match=rf"transformers must be at least 5\.17 and below 6\.0, got {version}"):
        models.check_transformers(version)
