"""Fixtures that more than one test file uses: the small real model, and one real model server per session."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from marft_bridge.prepare_model import SMOLLM2_NAME, installed_gguf, prepare_smollm2
from marft_bridge.serving import Endpoint, ModelServer, ServeOptions

_CACHE = Path(os.environ.get("MARFT_CACHE") or Path(__file__).parents[1] / ".cache")


@dataclass(frozen=True)
class RunningServer:
    """The session's vLLM. Adapters are served from below `adapter_root`; versions and names must be new."""

    server: ModelServer
    endpoint: Endpoint
    adapter_root: Path
    model_dir: Path
    log_path: Path


@pytest.fixture(scope="session")
def smollm2_dir() -> Path:
    """SmolLM2-135M-Instruct; made once (some 20 s) under MARFT_CACHE or .cache, then found."""
    if not (_CACHE / SMOLLM2_NAME).exists():
        pytest.importorskip("gguf")
        pytest.importorskip("transformers")
        installed_gguf()
    return prepare_smollm2(_CACHE)


@pytest.fixture(scope="session")
def vllm_server(smollm2_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """The real engine on the real small model in float32, with room for 8 adapters on q_proj and v_proj."""
    pytest.importorskip("vllm", exc_type=ImportError)
    folder = tmp_path_factory.mktemp("vllm")
    modules = ("q_proj", "v_proj")
    options = ServeOptions(
        dtype="float32",
        max_loras=8,
        lora_target_modules=modules,
        tool_call_parser="hermes",
        startup_timeout_s=600,
    )
    with ModelServer(options, smollm2_dir, folder / "adapters", folder / "vllm.log") as server:
        yield RunningServer(server, server.start(), folder / "adapters", smollm2_dir, folder / "vllm.log")
