"""Owns: an update that two real processes share is that of one process, and they end with the same bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from shared_update import NAME
from tiny_policy import save_tiny_llama
from workers_rig import in_processes

_OPTIONS: dict[str, dict[str, Any]] = {
    "action": {"kl_coef": 0.1, "epochs": 2, "kl_stop": None},
    "token": {"granularity": "token", "entropy_coef": 0.01, "kl_stop": None},
    "stopped": {"lr": 0.5, "epochs": 3, "kl_stop": 1e-4},
}


def _leaves(value: Any, path: str = "") -> dict[str, Any]:
    if isinstance(value, dict):
        return {k: v for name, part in value.items() for k, v in _leaves(part, f"{path}/{name}").items()}
    return {path: value}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[list[dict[str, Any]]]:
    """What each of one process, and each of two, ended with."""
    folder = tmp_path_factory.mktemp("shared")
    model = save_tiny_llama(folder / "model")
    fixed = {"device": "cpu", "tokens_per_microbatch": 64, "lr": 0.02, "threads": 1}
    argument = {"model": str(model), "options": {kind: fixed | own for kind, own in _OPTIONS.items()}}
    ended = []
    for count in (1, 2):
        (folder / str(count)).mkdir()
        ended.append(in_processes(count, [NAME], folder / str(count), argument)[NAME])
    return ended


@pytest.mark.parametrize("kind", list(_OPTIONS))
def test_two_processes_compute_the_update_of_one(results: list[list[dict[str, Any]]], kind: str) -> None:
    (one,), (first, second) = ([ended[kind] for ended in processes] for processes in results)
    assert first == second
    for name in ("values", "critics"):
        for alone, shared in zip(one[name], first[name], strict=True):
            torch.testing.assert_close(torch.tensor(shared), torch.tensor(alone), atol=1e-5, rtol=1e-4)
    assert first["order"] == one["order"]
    figures, expected = _leaves(first["metrics"]), _leaves(one["metrics"])
    for name, value in expected.items():
        assert figures[name] == (pytest.approx(value, rel=1e-3, abs=1e-6) if isinstance(value, float) else value), name
    if kind == "stopped":
        assert one["metrics"]["agents"]["actor"]["stopped_early"]
