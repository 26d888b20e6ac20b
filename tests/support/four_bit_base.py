"""A model directory -> the same with every linear layer as its 4 bits say, made by bitsandbytes and transformers alone.

What a trainer with `load_in_4bit` computes is held against a plain one on such a folder.
"""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, BitsAndBytesConfig


@torch.no_grad()
def save_dequantised(
    model_dir: Path, folder: Path, device: str = "cpu", dtype: torch.dtype = torch.float32
) -> tuple[Path, list[str]]:
    """The folder, and the paths of the layers that were quantised."""
    from bitsandbytes.functional import dequantize_4bit
    from bitsandbytes.nn import Linear4bit

    how = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
    quantised = AutoModelForCausalLM.from_pretrained(
        model_dir, dtype=dtype, device_map={"": device}, quantization_config=how
    )
    plain = AutoModelForCausalLM.from_pretrained(model_dir, dtype=dtype)
    layers = {path: layer for path, layer in quantised.named_modules() if isinstance(layer, Linear4bit)}
    for path, layer in layers.items():
        dequantised = dequantize_4bit(layer.weight.data, layer.weight.quant_state)
        plain.get_submodule(path).weight.copy_(dequantised)
    plain.save_pretrained(folder)
    return folder, list(layers)
