"""A model directory -> what its config.json says of the model.

Invariant: what it does not say is None, never a guess.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def read_model_config(model_dir: Path) -> dict[str, Any]:
    """The content of config.json; empty where it cannot be read, which `check_model_dir` says better."""
    try:
        config = json.loads((model_dir / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return config if isinstance(config, dict) else {}


def context_length(model_dir: Path) -> int | None:
    """The most tokens that the base model reads."""
    config = read_model_config(model_dir)
    length = config.get("max_position_embeddings") or (config.get("text_config") or {}).get("max_position_embeddings")
    return length if isinstance(length, int) else None


def cache_bytes_of_token(model_dir: Path, number_bytes: int) -> int | None:
    """What keys and values of one token take in all layers, where every layer attends with heads of one size."""
    config = read_model_config(model_dir)
    try:
        heads = config.get("num_key_value_heads") or config["num_attention_heads"]
        head_size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        return 2 * number_bytes * config["num_hidden_layers"] * heads * head_size or None
    except (KeyError, TypeError, ZeroDivisionError):
        return None
