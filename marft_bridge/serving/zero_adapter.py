"""A base model -> an adapter that changes nothing: version 0 of every node.

Why the base model itself does not serve as version 0: as soon as all adapter slots are taken, vLLM's CPU build answers
a request without an adapter with the weights in its last slot (seen in 0.32.0, by comparing log-probs with the
trainer's). Through an adapter of zeros every call names its weights, on any build, and version 0 and later versions
take the same time. Only headers of the base model are read; torch is not imported.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from marft_bridge.common.errors import ServingError
from marft_bridge.serving.adapter_checks import weight_shapes


def write_zero_adapter(folder: Path, model_dir: Path, modules: Sequence[str]) -> None:
    """Writes a rank-1 LoRA of zeros on the named linear layers into the empty `folder`, in peft's format.

    Raises:
        ServingError: the model has none of the layers.
    """
    from safetensors.numpy import save_file  # of the extra `train`

    zeros = {}
    for file in sorted(model_dir.glob("*.safetensors")):
        for name, shape in weight_shapes(file).items():
            layer = name.removesuffix(".weight")
            if layer != name and len(shape) == 2 and layer.rpartition(".")[2] in modules:
                zeros[f"base_model.model.{layer}.lora_A.weight"] = np.zeros((1, shape[1]), np.float32)
                zeros[f"base_model.model.{layer}.lora_B.weight"] = np.zeros((shape[0], 1), np.float32)
    if not zeros:
        raise ServingError(f"{str(model_dir)!r} has no layer named {' or '.join(modules)}; check lora.target_modules")
    config = {
        "base_model_name_or_path": str(model_dir.resolve()),
        "bias": "none",
        "inference_mode": True,
        "lora_alpha": 1,
        "peft_type": "LORA",
        "r": 1,
        "target_modules": sorted(modules),
        "task_type": "CAUSAL_LM",
    }
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")
    save_file(zeros, folder / "adapter_model.safetensors", metadata={"format": "pt"})
