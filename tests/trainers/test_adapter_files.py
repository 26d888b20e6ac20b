"""Owns: an adapter's file is a function of its weights, so that its hash says which weights they are."""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file

from trainers.adapters import adapter_files
from trainers.config import LoraOptions


def test_the_same_weights_make_the_same_bytes_each_time(tmp_path: Path) -> None:
    weights = {f"layer.{n}.lora_A.weight": torch.full((2, 3), float(n)) for n in range(3)}
    hashes = set()
    for number in range(16):  # of two entries in random order, all would be the same once in 32,768 tries
        folder = tmp_path / str(number)
        adapter_files.write(folder, weights, LoraOptions(), model_dir=tmp_path, base_sha256="f" * 64)
        hashes.add(hashlib.sha256((folder / "adapter_model.safetensors").read_bytes()).hexdigest())
    assert len(hashes) == 1
    stored = load_file(folder / "adapter_model.safetensors")
    assert stored.keys() == weights.keys()
    assert all(torch.equal(stored[name], weights[name]) for name in weights)
    with safe_open(folder / "adapter_model.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt", "base_sha256": "f" * 64}
