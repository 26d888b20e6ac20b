"""A trained adapter -> files that others load: a plain peft folder, or a whole model with the adapter merged in.

Invariant: only safetensors and JSON are read; an adapter is exported for the base model that it was made for, which the
result names as others find it, never by a path of this machine; the result appears whole or not at all, and never over
something else. Merging works on the weight files, one at a time: memory is that of the largest file, and every weight
that the adapter does not change keeps its bits.
It knows nothing of nodes, versions or runs.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from trainers.adapters import adapter_files
from trainers.common.files import weights_to_sha256, whole_folder
from trainers.config import LoraOptions
from trainers.errors import TrainError

_ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
_INDEX = "model.safetensors.index.json"
_CONFIGURATIONS = {"config.json", "tokenizer_config.json"}
_OWN_PATHS = ("_name_or_path", "name_or_path")
_NO_TEXTS: Mapping[str, str] = {}
_PREFIX = "base_model.model."  # peft's, before a module's name in the base model
_KEPT_SUFFIXES = {".jinja", ".json", ".model", ".txt"}  # configuration, tokenizer, chat template
# Fields of adapter_config.json that say nothing about what the adapter adds, or that are looked at elsewhere.
_NO_PART_IN_SUM = {
    "auto_mapping",
    "base_model_name_or_path",
    "exclude_modules",
    "inference_mode",
    "layers_pattern",
    "layers_to_transform",
    "lora_alpha",
    "lora_dropout",
    "peft_type",
    "peft_version",
    "r",
    "revision",
    "target_modules",
    "task_type",
}


def export_adapter(
    model_dir: Path,
    adapter_folder: Path,
    out: Path,
    *,
    base_sha256: str | None = None,
    base_name: str | None = None,
    revision: str | None = None,
    texts: Mapping[str, str] = _NO_TEXTS,
) -> None:
    """Copies an adapter into the plain peft folder `out`, once it is known to be one for this base model.

    Args:
        base_sha256: `weights_to_sha256(model_dir)`, where the caller has it already.
        base_name: what the folder calls its base model, as others find it; None: the name of its directory.
        revision: the branch, tag or commit of a base model on the Hub.
        texts: file names and contents to put beside the adapter.

    Raises:
        TrainError: not an adapter, or one for another base model; `out` holds something.
    """
    out = _unused(out)
    _, config, _ = _folder_to_adapter(model_dir, adapter_folder, base_sha256)
    with whole_folder(out) as fresh:
        config["base_model_name_or_path"] = base_name or model_dir.name  # it was a path of this machine
        config["revision"] = revision
        (fresh / _ADAPTER_FILES[0]).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        shutil.copyfile(adapter_folder / _ADAPTER_FILES[1], fresh / _ADAPTER_FILES[1])
        _write_texts(fresh, texts)


def export_merged(
    model_dir: Path,
    adapter_folder: Path,
    out: Path,
    *,
    base_sha256: str | None = None,
    texts: Mapping[str, str] = _NO_TEXTS,
) -> None:
    """Writes the base model with the adapter's update added as the plain model directory `out`.

    Each adapted weight becomes W + alpha / r * B A (LoRA, arXiv 2106.09685, section 4.1), summed in float32 (float64
    where W is) and rounded to the type that W is stored in. Configuration, tokenizer and chat template are copied.

    Args:
        base_sha256: `weights_to_sha256(model_dir)`, where the caller has it already.
        texts: file names and contents to put beside the model.

    Raises:
        TrainError: as `export_adapter`; also an adapter that does more than add B A, and a base model that is stored
            quantised or under other names than its modules'.
    """
    out = _unused(out)
    lora, config, tensors = _folder_to_adapter(model_dir, adapter_folder, base_sha256)
    _check_plain(adapter_folder, lora, config)
    updates = _tensors_to_pairs(adapter_folder, tensors)
    files = _weight_files(model_dir)
    if (model_dir / "additional_chat_templates").exists():
        raise TrainError(f"{model_dir} has several chat templates, which are not copied: export without merging")
    with whole_folder(out) as fresh:
        for path in files:
            _merge_file(path, updates, lora.alpha / lora.rank, out=fresh / path.name)
        if updates:
            raise TrainError(f"{model_dir} stores no {next(iter(updates))!r} to merge into: export without merging")
        for path in model_dir.iterdir():
            if path.is_file() and (path.suffix in _KEPT_SUFFIXES or path.name.startswith("LICENSE")):
                shutil.copyfile(path, fresh / path.name)
                _delete_own_path(fresh / path.name)
        _write_texts(fresh, texts)


def _delete_own_path(copied: Path) -> None:
    """Takes out where a configuration says that it was once loaded from, if that is a path of some machine."""
    if copied.name not in _CONFIGURATIONS:
        return
    content = json.loads(copied.read_text(encoding="utf-8"))
    private_keys = [key for key in _OWN_PATHS if Path(str(content.get(key, ""))).is_absolute()]
    if private_keys:
        kept = {key: value for key, value in content.items() if key not in private_keys}
        copied.write_text(json.dumps(kept, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _write_texts(folder: Path, texts: Mapping[str, str]) -> None:
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")


def _unused(out: Path) -> Path:
    out = out.resolve()
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise TrainError(f"{out} exists already: name a folder that does not, or an empty one")
    return out


def _folder_to_adapter(
    model_dir: Path, folder: Path, base_sha256: str | None
) -> tuple[LoraOptions, dict[str, Any], dict[str, Tensor]]:
    """An adapter's shape, its whole configuration and its matrices, in float32, checked against the base model."""
    try:
        config: dict[str, Any] = json.loads((folder / _ADAPTER_FILES[0]).read_text(encoding="utf-8"))
        lora = LoraOptions(rank=config["r"], alpha=config["lora_alpha"], target_modules=config["target_modules"])
        with safe_open(folder / _ADAPTER_FILES[1], framework="pt") as stored:
            names = list(stored.keys())
            tensors = {name: torch.empty(stored.get_slice(name).get_shape()) for name in names}
    except (OSError, KeyError, TypeError, ValueError, SafetensorError) as error:
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise TrainError(f"{folder} is not a LoRA adapter with {' and '.join(_ADAPTER_FILES)}: {reason[0]}") from None
    adapter_files.read_into(
        folder, tensors, lora, model_dir=model_dir, base_sha256=base_sha256 or weights_to_sha256(model_dir)
    )
    return lora, config, tensors


def _check_plain(folder: Path, lora: LoraOptions, config: dict[str, Any]) -> None:
    """Refuses what peft would add to the base model besides alpha / r * B A."""
    plain: dict[str, Any] = adapter_files.lora_config(lora).to_dict()  # type: ignore[no-untyped-call]
    for name, value in config.items():
        if name not in _NO_PART_IN_SUM and value != plain.get(name):
            raise TrainError(f"{folder} has {name} = {value!r}, which is not merged here: export without merging")


def _tensors_to_pairs(folder: Path, tensors: dict[str, Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
    """Matrices by their names in a peft file -> the base weight's name and its (A, B)."""
    layers = dict.fromkeys(name.partition(".lora_")[0] for name in tensors)
    pairs = {}
    for layer in layers:
        a, b = (tensors.pop(f"{layer}.lora_{matrix}.weight", None) for matrix in "AB")
        if a is None or b is None or not layer.startswith(_PREFIX):
            raise TrainError(f"{folder} holds no pair lora_A, lora_B for {layer!r}: export without merging")
        pairs[f"{layer.removeprefix(_PREFIX)}.weight"] = (a, b)
    if tensors:
        raise TrainError(f"{folder} holds {next(iter(tensors))!r}, which is not merged here: export without merging")
    return pairs


def _weight_files(model_dir: Path) -> list[Path]:
    """The files that transformers loads; a directory can hold the same weights in another format besides."""
    index = model_dir / _INDEX
    if not index.is_file():
        single = model_dir / "model.safetensors"
        if not single.is_file():
            raise TrainError(f"{model_dir} has neither model.safetensors nor {_INDEX}: save it with save_pretrained")
        return [single]
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise TrainError(f"{index} is unreadable ({error}): save the model again") from None
    return [model_dir / Path(name).name for name in names]


def _merge_file(path: Path, updates: dict[str, tuple[Tensor, Tensor]], scale: float, out: Path) -> None:
    """One file of base weights, with the updates that belong to it taken out of `updates` and added."""
    try:
        with safe_open(path, framework="pt") as stored:
            metadata = stored.metadata()
            weights = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118 (not a mapping)
    except (OSError, SafetensorError) as error:
        raise TrainError(f"{path} cannot be read: {error}") from None
    for name in updates.keys() & weights.keys():
        a, b = updates.pop(name)
        weight = weights[name]
        if weight.dtype not in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
            raise TrainError(
                f"{path} stores {name!r} as {weight.dtype}: an adapter is not merged into quantised weights"
            )
        if weight.shape != (len(b), a.shape[1]):
            raise TrainError(f"{path} stores {name!r} in another shape than the adapter's: export without merging")
        wide = torch.promote_types(weight.dtype, torch.float32)
        weights[name] = (weight.to(wide) + scale * (b.to(wide) @ a.to(wide))).to(weight.dtype)
    save_file(weights, out, metadata=metadata)
