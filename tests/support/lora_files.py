"""Adapter folders in PEFT's file format, written without torch or peft."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file


def write_adapter(
    folder: Path,
    layers: dict[str, tuple[int, int]],
    *,
    rank: int = 8,
    scale: float = 0.0,
    seed: int = 0,
) -> Path:
    """`layers`: name such as "layers.0.self_attn.q_proj" -> (outputs, inputs). `scale` 0 changes nothing."""
    folder.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(seed)
    weights = {}
    for name, (outputs, inputs) in layers.items():
        prefix = f"base_model.model.model.{name}"
        weights[f"{prefix}.lora_A.weight"] = random.normal(0, 0.05, (rank, inputs)).astype(np.float32)
        weights[f"{prefix}.lora_B.weight"] = random.normal(0, scale, (outputs, rank)).astype(np.float32)
    save_file(weights, folder / "adapter_model.safetensors")
    modules = sorted({name.rpartition(".")[2] for name in layers})
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": 4 * rank, "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config | {"target_modules": modules}))
    return folder
