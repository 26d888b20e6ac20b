"""LoRA matrices to a plain peft folder and back: what vLLM and `PeftModel.from_pretrained` load.

Invariant: only safetensors and JSON are read; a folder is written whole or not at all; the same matrices make the same
bytes; an adapter is only read for the base model, rank, alpha and modules that it was made for. The base model's
fingerprint travels in the header of the safetensors file, which other readers ignore.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from trainers.common.files import whole_folder
from trainers.config import LoraOptions
from trainers.errors import TrainError

_CONFIG = "adapter_config.json"
_WEIGHTS = "adapter_model.safetensors"


def write(
    folder: Path,
    parameters: Mapping[str, torch.Tensor],
    lora: LoraOptions,
    model_dir: Path,
    base_sha256: str,
) -> None:
    """LoRA matrices, by their names in a peft file, to `folder`."""
    config = lora_config(lora)
    config.base_model_name_or_path = str(model_dir.resolve())
    config.inference_mode = True
    fields = {k: sorted(v) if isinstance(v, set) else v for k, v in _fields(config).items()}
    with whole_folder(folder) as fresh:
        (fresh / _CONFIG).write_text(json.dumps(fields, indent=2, sort_keys=True) + "\n")
        tensors = {name: p.detach().cpu().contiguous() for name, p in parameters.items()}
        save_file(tensors, fresh / _WEIGHTS, metadata={"format": "pt", "base_sha256": base_sha256})
        _sort_metadata(fresh / _WEIGHTS)


def _sort_metadata(path: Path) -> None:
    """Puts a safetensors file's metadata in order: the library writes it in that of a hash map, random in each process.

    Else the hash of a version would differ each time that it is written.
    """
    with path.open("r+b") as file:
        size = int.from_bytes(file.read(8), "little")
        header: dict[str, Any] = json.loads(file.read(size))
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        file.seek(8)
        file.write(text.ljust(size))  # spaces at its end belong to the format


def read_into(
    folder: Path,
    parameters: Mapping[str, torch.Tensor],
    lora: LoraOptions,
    model_dir: Path,
    base_sha256: str,
) -> None:
    """The adapter in `folder` to the values of `parameters`.

    Raises:
        TrainError: see the module's invariant. Nothing is changed then.
    """
    try:
        config: dict[str, Any] = json.loads((folder / _CONFIG).read_text())
        with safe_open(folder / _WEIGHTS, framework="pt") as stored:
            made_for = (stored.metadata() or {}).get("base_sha256")
            tensors = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118 (not a mapping)
    except (OSError, ValueError, SafetensorError) as error:
        raise TrainError(f"{folder} is not a LoRA adapter with {_CONFIG} and {_WEIGHTS}: {error}") from None
    if made_for is None:  # made elsewhere: the path is all that it says about its base model
        same_base = Path(str(config.get("base_model_name_or_path"))).resolve() == model_dir.resolve()
    else:
        same_base = made_for == base_sha256
    if not same_base:
        raise TrainError(f"{folder} was made for another base model than {model_dir}: train a new adapter on this one")
    expected = _fields(lora_config(lora))
    for field in ("peft_type", "r", "lora_alpha", "use_rslora", "use_dora", "bias"):
        if config.get(field) != expected[field]:
            raise TrainError(f"{folder} has {field} = {config.get(field)!r}, the trainer's is {expected[field]!r}")
    shapes = {name: tuple(p.shape) for name, p in parameters.items()}
    if {name: tuple(t.shape) for name, t in tensors.items()} != shapes:
        raise TrainError(f"{folder} has other modules or shapes than lora.target_modules {list(lora.target_modules)}")
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(tensors[name])


def folder_to_rank(folder: Path) -> int:
    """The rank of the adapter in a folder. Raises TrainError where there is none."""
    try:
        return int(json.loads((folder / _CONFIG).read_text(encoding="utf-8"))["r"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise TrainError(f"{folder} is not a LoRA adapter with {_CONFIG}: {error}") from None


def lora_config(lora: LoraOptions) -> LoraConfig:
    """The trainer's options to peft's. No dropout: it would make ratios differ from 1 before any update."""
    return LoraConfig(
        r=lora.rank,
        lora_alpha=int(lora.alpha) if lora.alpha == int(lora.alpha) else lora.alpha,  # type: ignore[arg-type]
        target_modules=list(lora.target_modules),
        lora_dropout=0.0,
        bias="none",
        task_type="CAUSAL_LM",
    )


def _fields(config: LoraConfig) -> dict[str, Any]:
    fields: dict[str, Any] = config.to_dict()  # type: ignore[no-untyped-call]
    return fields
