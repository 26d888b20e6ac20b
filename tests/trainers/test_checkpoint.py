"""Owns: a trainer that was saved and loaded goes on exactly like one that never stopped; foreign ones are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny_policy import AGENTS, both_low, play, save_tiny_llama
from support.trainer_options import trainer_options

from trainers import checkpoint
from trainers.errors import TrainError
from trainers.marft import MarftTrainer


def _trainer(model_dir: Path, seed: int, **options: Any) -> MarftTrainer:
    fields: dict[str, Any] = {"device": "cpu", "lr": 0.02, "agent_order": "random", "epochs": 2} | options
    return MarftTrainer(trainer_options(**fields), model_dir, AGENTS, seed)


def _rounds(trainer: MarftTrainer, numbers: range) -> None:
    for number in numbers:
        trainer.update(play(trainer, 8, torch.Generator().manual_seed(number), both_low))


def _everything(trainer: MarftTrainer) -> dict[str, torch.Tensor]:
    state = {f"{a}/{n}": p.detach() for a in AGENTS for n, p in trainer.policies.parameters(a).items()}
    for key, critic in trainer.credit.critics.items():
        state |= {f"{key}/{n}": p.detach() for n, p in critic.parameters.items()}
        state |= {f"{key}/statistics/{n}": t for n, t in critic.statistics.items()}
        state[f"{key}/generator"] = critic.generator.get_state()
    return state | {"order": trainer.generator.get_state(), "replay": trainer.replay_generator.get_state()}


def test_resume_equals_an_uninterrupted_run_bit_for_bit(tmp_path: Path) -> None:
    model_dir = save_tiny_llama(tmp_path / "model")
    whole = _trainer(model_dir, seed=0)
    whole.warm_up(play(whole, 20, torch.Generator().manual_seed(99), both_low))
    _rounds(whole, range(2))
    checkpoint.save(whole, tmp_path / "checkpoint")
    _rounds(whole, range(2, 4))

    resumed = _trainer(model_dir, seed=12345)  # nothing of its own start may survive
    checkpoint.load(resumed, tmp_path / "checkpoint")
    assert resumed.rounds == 2
    _rounds(resumed, range(2, 4))
    expected = _everything(whole)
    assert {n for n, t in _everything(resumed).items() if not torch.equal(t, expected[n])} == set()


@pytest.mark.parametrize(
    "options",
    [
        {"estimator": "rae", "update": "alternating"},
        {"critic": {"sharing": "agent"}, "granularity": "token", "replay": {"share": 0.3, "min_ess": 0.0}},
        {"agents": {"actor": {"adapter": "reasoner"}}, "entropy_coef": 0.01, "kl_coef": 0.1},
        {"agents": {"actor": {"frozen": True}}, "schedule": {"kind": "cosine", "rounds": 4, "warmup_rounds": 1}},
    ],
    ids=["rae-alternating", "critics-replay", "shared", "frozen-schedule"],
)
def test_resume_equals_an_uninterrupted_run_for_every_kind_of_state(tmp_path: Path, options: dict[str, Any]) -> None:
    model_dir = save_tiny_llama(tmp_path / "model")

    def rounds(trainer: MarftTrainer, numbers: range) -> None:
        older = play(trainer, 12, torch.Generator().manual_seed(1000), both_low) if "replay" in options else []
        for number in numbers:
            fresh = play(trainer, 8, torch.Generator().manual_seed(number), both_low)
            trainer.update(fresh, [older[i] for i in trainer.draw_replay(range(len(older)), len(fresh))])

    whole = _trainer(model_dir, seed=0, **options)
    rounds(whole, range(2))
    checkpoint.save(whole, tmp_path / "checkpoint")
    resumed = _trainer(model_dir, seed=12345, **options)
    checkpoint.load(resumed, tmp_path / "checkpoint")
    for trainer in (whole, resumed):
        rounds(trainer, range(2, 4))
    expected = _everything(whole)
    assert {n for n, t in _everything(resumed).items() if not torch.equal(t, expected[n])} == set()
    assert resumed.credit.estimator.state == whole.credit.estimator.state


def test_a_checkpoint_replaces_the_one_before_and_holds_no_pickle(tmp_path: Path) -> None:
    trainer = _trainer(save_tiny_llama(tmp_path / "model"), seed=0)
    checkpoint.save(trainer, tmp_path / "run" / "checkpoint")
    _rounds(trainer, range(1))
    checkpoint.save(trainer, tmp_path / "run" / "checkpoint")
    assert [p.name for p in (tmp_path / "run").iterdir()] == ["checkpoint"]
    names = sorted(p.name for p in (tmp_path / "run" / "checkpoint").iterdir())
    assert names == ["trainer.json", "trainer.safetensors"]
    fresh = _trainer(tmp_path / "model", seed=1)
    checkpoint.load(fresh, tmp_path / "run" / "checkpoint")
    assert fresh.rounds == 1


def test_an_interrupted_save_leaves_the_earlier_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = _trainer(save_tiny_llama(tmp_path / "model"), seed=0)
    folder = tmp_path / "run" / "checkpoint"
    checkpoint.save(trainer, folder)
    before = {p.name: p.read_bytes() for p in folder.iterdir()}
    _rounds(trainer, range(1))

    def full_disk(*_: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(checkpoint, "save_file", full_disk)
    with pytest.raises(OSError, match="no space"):
        checkpoint.save(trainer, folder)
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == before
    assert [p.name for p in folder.parent.iterdir()] == ["checkpoint"]


def test_a_checkpoint_of_something_else_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    model_dir = save_tiny_llama(tmp_path / "model")
    source = _trainer(model_dir, seed=0)
    _rounds(source, range(1))
    checkpoint.save(source, tmp_path / "checkpoint")
    others = {
        "bases": _trainer(save_tiny_llama(tmp_path / "other", seed=1), seed=0),
        "adapters": MarftTrainer(trainer_options(device="cpu"), model_dir, AGENTS[::-1], 0),
        "trainer.lora": _trainer(model_dir, seed=0, lora={"rank": 2}),
        "trainer.advantage.critic": _trainer(model_dir, seed=0, critic={"hidden": 3}),
    }
    for message, other in others.items():
        before = {name: tensor.clone() for name, tensor in _everything(other).items()}
        with pytest.raises(TrainError, match=message):
            checkpoint.load(other, tmp_path / "checkpoint")
        assert all(torch.equal(tensor, before[name]) for name, tensor in _everything(other).items())
    with pytest.raises(TrainError, match="is not a trainer checkpoint"):
        checkpoint.load(source, tmp_path / "nowhere")
