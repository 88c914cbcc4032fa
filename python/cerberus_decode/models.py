"""Loading a base model and its draft heads: the embedded model, a local folder or GGUF file, or a model hub id.

Whatever is wrong with what was asked for is said in one line that names the file and the reason, before a weight is
read where that is possible. No weight is ever left at its random initial value.
"""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .embedded import NAME, ModelUnavailable, ensure_model, model_dir, quiet_transformers
from .weight_files import ModelUnreadable, check_folder, check_gguf, first_line, read_json

if TYPE_CHECKING:
    import torch

    from .heads import DraftHeads

ASSETS = Path(__file__).resolve().parent / "assets"
OLDEST_TRANSFORMERS = (5, 17)
NEXT_UNKNOWN_TRANSFORMERS = (6, 0)
DTYPES = ("float32", "bfloat16", "float16")
HEAD_KINDS = ("cerberus", "medusa")


@dataclass(frozen=True)
class LoadedModel:
    """A base model ready to run.

    Attributes:
        model: transformers causal LM in evaluation mode.
        tokenizer: its tokenizer.
        name: what to call it in output.
        is_embedded: whether it is the embedded model.
    """

    model: Any
    tokenizer: Any
    name: str
    is_embedded: bool


def load(
    model: str | Path | None = None,
    *,
    dtype: str | torch.dtype = "float32",
    device: str | torch.device = "cpu",
    report: Callable[[str], None] = lambda line: None,
) -> LoadedModel:
    """Load a causal language model with its tokenizer.

    Args:
        model: None for the embedded model; else a folder in transformers' format, a ``.gguf`` file, or the id of a
            repository on the model hub. What exists on disk is never looked up on the hub.
        dtype: element type of the weights and of the computation.
        device: where the weights go.
        report: called with one line per slow stage.

    Raises:
        ModelUnavailable: the model is neither here nor to be fetched.
        ModelUnreadable: it is here and damaged, foreign or incomplete.
        ImportError: transformers is missing or of an unsupported version.

    Example:
        >>> load("no/such/folder/anywhere")  # doctest: +IGNORE_EXCEPTION_DETAIL
        Traceback (most recent call last):
        ModelUnavailable: no such file or folder: no/such/folder/anywhere
    """
    check_transformers()
    if model is None:
        folder = ensure_model(report)
        return _load(str(folder), folder, NAME, dtype, device, embedded=True)
    source = Path(model).expanduser()
    if source.exists():
        is_embedded = source.resolve() == model_dir().resolve()
        return _load(str(source), source, source.resolve().name, dtype, device, embedded=is_embedded)
    if _looks_like_a_path(str(model)):
        raise ModelUnavailable(f"no such file or folder: {model}")
    report(f"looking for {model} on the model hub")
    return _load(str(model), None, str(model), dtype, device, embedded=False)


def check_transformers(version: str | None = None) -> None:
    """Refuse an unsupported version of transformers by name.

    Args:
        version: version to judge, by default the installed one.

    Raises:
        ImportError: transformers is missing, older than 5.17, or of a major version that this release was not made for.
    """
    if version is None:
        try:
            version = importlib.metadata.version("transformers")
        except importlib.metadata.PackageNotFoundError as error:
            raise ImportError("transformers is not installed; pip install 'cerberus-kernels[decode]'") from error
    numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
    if not OLDEST_TRANSFORMERS <= numbers < NEXT_UNKNOWN_TRANSFORMERS:
        oldest, unknown = (".".join(map(str, bound)) for bound in (OLDEST_TRANSFORMERS, NEXT_UNKNOWN_TRANSFORMERS))
        raise ImportError(f"transformers must be at least {oldest} and below {unknown}, got {version}")


def _looks_like_a_path(text: str) -> bool:
    return text.startswith((".", "/", "~")) or text.count("/") > 1 or text.endswith((".gguf", ".safetensors"))


def _load(
    source: str,
    path: Path | None,
    name: str,
    dtype: str | torch.dtype,
    device: str | torch.device,
    *,
    embedded: bool,
) -> LoadedModel:
    """Check what can be checked on disk, load, and refuse weights that the file does not hold."""
    import torch

    options: dict[str, Any] = {}
    if path is not None:
        options["local_files_only"] = True
        if path.is_dir():
            check_folder(path)
        else:
            check_gguf(path)
            source, options["gguf_file"] = str(path.parent), path.name
    if isinstance(dtype, str):
        if dtype not in DTYPES:
            raise ValueError(f"models.load: dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
        dtype = getattr(torch, dtype)
    import transformers

    with quiet_transformers():
        try:
            tokenizer = transformers.AutoTokenizer.from_pretrained(source, **options)
            loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(
                source, dtype=dtype, output_loading_info=True, **options
            )
        except Exception as error:  # whatever the reader throws, the user gets the model's name and the reason
            kind = ModelUnavailable if path is None and isinstance(error, OSError) else ModelUnreadable
            hint = " (is it a local folder? it does not exist here)" if path is None else ""
            raise kind(f"cannot load model {path or name}{hint}: {first_line(error)}") from error
    model, found = loaded  # with output_loading_info
    _refuse_missing_weights(path or name, model, found)
    model.requires_grad_(False)
    return LoadedModel(model.to(device).eval(), tokenizer, name, embedded)


def _refuse_missing_weights(source: object, model: Any, found: dict[str, Any]) -> None:
    missing = sorted(found.get("missing_keys") or ())
    if missing:
        tied = getattr(model.config, "tie_word_embeddings", False)
        why = " and tie_word_embeddings is false" if not tied and any("lm_head" in key for key in missing) else ""
        raise ModelUnreadable(f"{source} lacks {', '.join(missing[:4])}{', ...' if len(missing) > 4 else ''}{why}")
    mismatched = sorted(map(str, found.get("mismatched_keys") or ()))
    if mismatched:
        raise ModelUnreadable(f"{source} holds weights of another shape than its config.json says: {mismatched[0]}")


def find_heads(base: LoadedModel, kind: str, heads: str | Path | None = None) -> Path:
    """Folder of the draft heads of one kind for a base model.

    Args:
        base: the base model.
        kind: ``"cerberus"`` or ``"medusa"``.
        heads: a heads folder, or a folder that holds one per kind under the kind's name; None for the heads that
            ship with this package.

    Raises:
        ModelUnavailable: there is no such folder.
    """
    if heads is None:
        folder = ASSETS / NAME / kind
        if base.is_embedded and (folder / "config.json").is_file():
            return folder
        raise ModelUnavailable(
            f"no {kind} heads ship for {base.name}; train some with `cerberus train` and pass --heads FOLDER, "
            "or take --method ar"
        )
    given = Path(heads).expanduser()
    for folder in (given / kind, given):
        config = folder / "config.json"
        if config.is_file() and read_json(config).get("kind") == kind:
            return folder
    if not given.exists():
        raise ModelUnavailable(f"no such heads folder: {given}")
    raise ModelUnavailable(f"{given} holds no {kind} heads: no config.json of that kind, there or in {kind}{os.sep}")


def load_heads(base: LoadedModel, kind: str, heads: str | Path | None = None) -> DraftHeads:
    """Draft heads of one kind, bound to a base model: their weights take the base model's dtype and device.

    Args:
        base: the base model.
        kind: ``"cerberus"`` or ``"medusa"``.
        heads: as for :func:`find_heads`.

    Raises:
        ModelUnavailable: there are none.
        HeadsMismatch: they are unreadable or belong to another base model; hidden sizes or vocabularies are named.
    """
    from .heads import DraftHeads

    embedding = base.model.get_input_embeddings().weight
    vocab_weight = base.model.get_output_embeddings().weight
    return DraftHeads.load(find_heads(base, kind, heads)).bind(embedding, vocab_weight)
