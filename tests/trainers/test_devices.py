"""Owns: the trainer on a device other than the CPU, as far as that can be seen without one; see second_device.py.

- Every way to update computes where its model is, and gives the CPU's numbers in float32.
- There the base is bfloat16, and adapters, their moments and their files are float32.
- What it saves there it goes on from, bit for bit.
- The negative control: a tensor that is left on the CPU stops the update.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.paths import TESTS
from support.shared_update import UPDATES, leaves, updates
from support.tiny_policy import save_tiny_llama

from trainers.common.workers import Workers

pytestmark = pytest.mark.slow  # one costly fixture serves them all


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("devices")


@pytest.fixture(scope="module")
def asked(folder: Path) -> dict[str, Any]:
    fixed = {"device": "cpu", "tokens_per_microbatch": 64, "lr": 0.005, "kl_stop": None}
    options = {name: (what, 7, fixed | own) for name, (what, own) in UPDATES.items()}
    save_tiny_llama(folder / "teacher", seed=7)
    return {"model": str(save_tiny_llama(folder / "model")), "folder": str(folder), "options": options}


@pytest.fixture(scope="module")
def on_cpu(asked: dict[str, Any]) -> dict[str, Any]:
    return updates(Workers.alone(), asked)


@pytest.fixture(scope="module")
def said(folder: Path, asked: dict[str, Any]) -> dict[str, Any]:
    (folder / "asked.json").write_text(json.dumps(asked))
    environment = os.environ | {"PYTHONPATH": f"{TESTS.parent}{os.pathsep}{TESTS}"}
    command = [sys.executable, str(TESTS / "support/device_laws.py"), str(folder)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads((folder / "said.json").read_text())  # type: ignore[no-any-return]


def law(said: dict[str, Any], name: str) -> Any:
    result = said[name]
    assert not (isinstance(result, dict) and "error" in result), result["error"]
    return result


def test_the_second_device_refuses_what_a_gpu_refuses_and_allows_what_it_allows(said: dict[str, Any]) -> None:
    told = law(said, "mixing")
    allowed = {"copy", "copy in place", "a number of the CPU", "index of the CPU", "item"}
    assert {name for name, refusal in told.items() if refusal is None} == allowed
    mixed = {name: refusal for name, refusal in told.items() if refusal and name not in {"generator", "numpy"}}
    assert all("expected all tensors on one device" in refusal for refusal in mixed.values()), mixed


@pytest.mark.parametrize("name", UPDATES)
def test_an_update_on_another_device_has_the_numbers_of_the_cpu(
    on_cpu: dict[str, Any], said: dict[str, Any], name: str
) -> None:
    here, there = on_cpu[name], law(said, "rounds")[name]
    for what in ("values", "critics"):
        for expected, found in zip(here[what], there[what], strict=True):
            # AdamW makes a whole step of a gradient that is nearly zero: its rounding then shows in the fifth digit
            torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), atol=1e-4, rtol=1e-3)
    assert (there["order"], there["batches"]) == (here["order"], here["batches"])
    figures = leaves(there["metrics"])
    for key, value in leaves(here["metrics"]).items():
        close = pytest.approx(value, rel=1e-2, abs=1e-4) if isinstance(value, float) else value
        assert figures[key] == close, key
    moved = [agent["adapter_moved"] for agent in there["metrics"]["agents"].values()]
    assert moved
    assert min(moved) > 1e-3


def test_on_another_device_the_base_is_bfloat16_and_what_is_trained_float32(said: dict[str, Any], folder: Path) -> None:
    told = law(said, "bfloat16")
    assert told["types"] == {
        "base": ["There torch.bfloat16"],
        "adapters": ["There torch.float32"],
        "moments": ["There torch.float32"],
    }
    assert told["packs"]  # rows that begin alike are computed once there, too
    law(said, "resumed")
    assert {tensor.dtype for tensor in load_file(folder / "actor@2" / "adapter_model.safetensors").values()} == {
        torch.float32
    }


def test_in_bfloat16_an_update_goes_the_way_of_float32(said: dict[str, Any]) -> None:
    small, full = (torch.tensor(law(said, "bfloat16")[name]) for name in ("bfloat16", "float32"))
    assert torch.cosine_similarity(small, full, dim=0) > 0.9


def test_what_is_saved_on_another_device_goes_on_bit_for_bit(said: dict[str, Any]) -> None:
    whole, loaded = law(said, "resumed")
    assert loaded == whole


def test_a_tensor_that_is_left_on_the_cpu_stops_the_update(said: dict[str, Any]) -> None:
    assert "expected all tensors on one device, found cpu and second" in law(said, "stray")
