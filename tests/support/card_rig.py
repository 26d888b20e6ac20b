"""Machines and models that are described, not at hand -> the placement that a command would make on them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from marft_bridge.config.bridge import BridgeConfig, set_dotted
from marft_bridge.devices.machine import Card, Machine
from marft_bridge.serving import placement as placement_module
from marft_bridge.serving.base_models import BaseModelSpec, with_modules
from marft_bridge.serving.placement import Placement

MIB = 2**20

# kind, layers, width, inner, heads, heads of keys, vocabulary, tied, context
MODELS: dict[str, tuple[str, int, int, int, int, int, int, bool, int]] = {
    "0.1B": ("llama", 30, 576, 1536, 9, 3, 49152, True, 8192),  # SmolLM2-135M
    "0.5B": ("qwen2", 24, 896, 4864, 14, 2, 151936, True, 32768),  # Qwen2.5-0.5B
    "1.7B": ("llama", 24, 2048, 8192, 32, 32, 49152, True, 8192),  # SmolLM2-1.7B
    "8B": ("llama", 32, 4096, 14336, 32, 8, 128256, False, 131072),  # Llama-3.1-8B
    "32B": ("llama", 64, 5120, 27648, 40, 8, 152064, False, 32768),
    "70B": ("llama", 80, 8192, 28672, 64, 8, 128256, False, 131072),  # Llama-3-70B
}
# MiB, as the driver tells them
MACHINES = {
    "none": (),
    "1 x 8": (8188,),
    "1 x 12": (12282,),
    "1 x 16": (16376,),
    "1 x 24": (24564,),
    "1 x 48": (49140,),
    "1 x 80": (81559,),
    "2 x 24": (24564,) * 2,
    "4 x 80": (81559,) * 4,
    "8 x 80": (81559,) * 8,
    # unlike ones, in the driver's order
    "4 + 24": (4096, 24564),
    "24 + 4": (24564, 4096),
    "8 + 24": (8188, 24564),
    "24 + 8": (24564, 8188),
    "16 + 48": (16376, 49140),
    "4 + 24 + 24": (4096, 24564, 24564),
}


def write_model(root: Path, name: str) -> Path:
    """A folder with the model's config.json; made once."""
    kind, layers, width, inner, heads, kv_heads, vocabulary, tied, context = MODELS[name]
    folder = root / name
    folder.mkdir(exist_ok=True)
    config = {
        "model_type": kind,
        "num_hidden_layers": layers,
        "hidden_size": width,
        "intermediate_size": inner,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocabulary,
        "tie_word_embeddings": tied,
        "max_position_embeddings": context,
        "torch_dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def pretend_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where vLLM's CUDA build is installed and torch sees the cards."""
    monkeypatch.setattr(placement_module, "vllm_runs_on_cpu", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(placement_module, "has_driver", lambda: False)  # what is described is all there is
    for name in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"):
        monkeypatch.delenv(name, raising=False)


def machine_of(name: str, free_mib: Mapping[int, int] | None = None) -> Machine:
    free_mib = free_mib or {}
    return Machine(
        tuple(
            Card("GPU", total * MIB, free_mib.get(i, total - 400) * MIB, visible_name=str(i))
            for i, total in enumerate(MACHINES[name])
        )
    )


def config_of(model: Path, options: Mapping[str, Any]) -> BridgeConfig:
    raw: dict[str, Any] = {
        "graph": {"app": "a:b", "nodes": ["planner", "writer"], "tasks": "t.jsonl", "reward": "a:r"},
        "model": {"path": str(model)},
    }
    for key, value in options.items():
        set_dotted(raw, key, value)
    return BridgeConfig.model_validate(raw)


def place(
    machine: Machine, model: Path, options: Mapping[str, Any] = {}, *, trains: bool = True, **more: Any
) -> Placement:
    config = config_of(model, options)
    bases = [BaseModelSpec("", model, with_modules(config, config.serve), nodes=config.graph.nodes)]
    return Placement(config, bases, [base.serve for base in bases], trains=trains, machine=machine, **more)


SAVING = {"train.trainer.system.activation_checkpointing": True}
SIDE_BY_SIDE = {"train.max_staleness": 1, "train.trainer.importance.mismatch": "truncate", "serve.max_loras": 6}
FOUR_BIT = {"train.trainer.system.load_in_4bit": True}
FOUR_BIT_SERVER = {"serve.extra_args": ["--quantization", "bitsandbytes", "--load-format", "bitsandbytes"]}
