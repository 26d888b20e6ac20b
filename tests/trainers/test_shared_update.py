"""Owns: an update that two, three or four real processes share is that of one, and they end with the same bits.

Also where its micro-batches do not divide evenly among them, and where most of them get none; so is the offline phase.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.shared_update import NAME, leaves
from support.tiny_policy import save_tiny_llama
from support.workers_rig import in_processes

pytestmark = pytest.mark.slow  # one costly fixture serves them all

_OPTIONS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "action": ("update", 7, {"kl_coef": 0.1, "epochs": 2, "kl_stop": None}),
    "token": ("update", 7, {"granularity": "token", "entropy_coef": 0.01, "kl_stop": None}),
    "stopped": ("update", 7, {"lr": 0.5, "epochs": 3, "kl_stop": 1e-4}),
    "shortened": ("update", 7, {"lr": 0.1, "kl_stop": None, "kl_target": 1e-3, "update": "simultaneous"}),
    "one episode": ("update", 1, {"minibatch_actions": 1000, "normalize": "none", "kl_stop": None}),
    "distilled": ("distil_on_policy", 7, {"epochs": 2, "kl_stop": None}),
    "group baselines": (
        "update",
        7,
        {"estimator": "grpo", "normalize": "none", "kl_stop": None, "granularity": "token"},
    ),
    "in reverse": ("update", 7, {"agent_order": "reverse", "kl_stop": None, "critic": {"sharing": "agent"}}),
    "one adapter": ("update", 7, {"agents": {"actor": {"adapter": "reasoner"}}, "nll_coef": 0.1, "kl_stop": None}),
    "weighted": ("replay", 5, {"offline": {"mode": "awr"}}),
    "imitated": ("replay", 5, {"offline": {"mode": "filtered", "threshold": 0.0, "epochs": 2}}),
}
_COUNTS = (2, 3, 4)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[dict[str, Any]]]:
    """What each of one process, and each of several, ended with, by the number of processes."""
    folder = tmp_path_factory.mktemp("shared")
    model = save_tiny_llama(folder / "model")
    save_tiny_llama(folder / "teacher", seed=7)
    fixed = {"device": "cpu", "tokens_per_microbatch": 64, "lr": 0.02, "threads": 1}
    options = {kind: (what, number, fixed | own) for kind, (what, number, own) in _OPTIONS.items()}
    argument = {"model": str(model), "options": options}
    ended = {}
    for count in (1, *_COUNTS):
        (folder / str(count)).mkdir()
        ended[count] = in_processes(count, [NAME], folder / str(count), argument)[NAME]
    return ended


@pytest.mark.parametrize("count", _COUNTS)
@pytest.mark.parametrize("kind", list(_OPTIONS))
def test_several_processes_compute_the_update_of_one(
    results: dict[int, list[dict[str, Any]]], kind: str, count: int
) -> None:
    (one,), (first, *others) = ([ended[kind] for ended in results[number]] for number in (1, count))
    assert len(others) == count - 1
    assert all(other == first for other in others)
    for name in ("values", "critics"):
        for alone, shared in zip(one[name], first[name], strict=True):
            torch.testing.assert_close(torch.tensor(shared), torch.tensor(alone), atol=1e-5, rtol=1e-4)
    assert first["order"] == one["order"]
    figures, expected = leaves(first["metrics"]), leaves(one["metrics"])
    for name, value in expected.items():
        assert figures[name] == (pytest.approx(value, rel=1e-3, abs=1e-6) if isinstance(value, float) else value), name
    if kind == "stopped":
        assert one["metrics"]["agents"]["actor"]["stopped_early"]
    if kind == "shortened":
        assert all(0 < agent["step_share"] < 1 for agent in one["metrics"]["agents"].values())


def test_two_processes_with_a_micro_batch_each_end_with_the_bits_of_one(tmp_path: Path) -> None:
    """Where one process cuts as two do: a + b is b + a, and there is no third to be added before or after."""
    model = save_tiny_llama(tmp_path / "model")
    fixed = {"device": "cpu", "tokens_per_microbatch": 4096, "lr": 0.02, "threads": 1, "epochs": 2, "kl_stop": None}
    ways: dict[str, dict[str, Any]] = {
        "group baselines": {"estimator": "rloo"},
        "token": {"estimator": "grpo", "granularity": "token"},
        "all at once": {"estimator": "rloo", "update": "simultaneous", "kl_coef": 0.0},
    }
    options = {kind: ("update", 7, fixed | way | {"cut_for": 2}) for kind, way in ways.items()}
    ended = {}
    for count in (1, 2):
        (tmp_path / str(count)).mkdir()
        ended[count] = in_processes(count, [NAME], tmp_path / str(count), {"model": str(model), "options": options})[
            NAME
        ]
    for kind in ways:
        assert ended[2][0][kind]["values"] == ended[2][1][kind]["values"] == ended[1][0][kind]["values"], kind
        assert all(agent["adapter_moved"] > 0 for agent in ended[1][0][kind]["metrics"]["agents"].values()), kind


def test_the_rounds_do_not_divide_evenly_and_leave_processes_without_any(
    results: dict[int, list[dict[str, Any]]],
) -> None:
    batches = {kind: ended["batches"] for kind, ended in results[4][0].items()}
    assert batches["one episode"] == [1, 1]  # one of four processes computes
    assert all(batches["action"][0] % count for count in _COUNTS), batches


def test_an_update_and_an_offline_phase_move_every_adapter(results: dict[int, list[dict[str, Any]]]) -> None:
    for kind, ended in results[4][0].items():
        moved = [agent["adapter_moved"] for agent in ended["metrics"]["agents"].values()]
        assert len(moved) == 2, kind
        assert min(moved) > 0, kind
