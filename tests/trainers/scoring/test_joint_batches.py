"""Owns: with adapters off, agents on one base go through it together, and each gets what it would get alone.

Reference log-probs and the critics' features: the numbers of each row by itself, in fewer passes, none of
them over its budget; what a reference pass saw on its way is not computed again for the critics.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny_policy import make_action, make_trajectory, save_tiny_llama
from support.trainer_options import trainer_options

from trace_store.records import Trajectory
from trainers.batch import Round
from trainers.marft import MarftTrainer
from trainers.objective.scored_round import ScoredRound, score_round
from trainers.scoring import hidden_states

AGENTS = ("planner", "worker", "judge")
BUDGET = 64  # the smallest that is allowed
CLOSE = {"atol": 1e-5, "rtol": 1e-4}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("model") / "tiny")


def games() -> list[Trajectory]:
    """Ragged agents: the planner acts once in each of eight episodes, the worker twice, the judge in every other one.

    The worker's first prompt goes on from the planner's, and the judge's from the worker's second. One is cut short.
    """
    played = []
    for k in range(8):
        plan = [(3 * k + i) % 32 for i in range(2 + k % 3)]
        actions = [
            make_action("planner", [1, 9, 9, k], plan, temperature=0.7),
            make_action("worker", [1, 9, 9, k, *plan], [k, (5 * k) % 32, 4]),
            make_action("worker", [2, 8, 8, 8, *plan], [(7 * k) % 32]),
        ]
        if k % 2:
            actions.append(make_action("judge", [2, 8, 8, 8, *plan, 6], [k, 3]))
        outcome = "truncated" if k == 5 else "terminated"
        played.append(make_trajectory(actions, float(k % 3), task_id=str(k % 2), outcome=outcome))
    return played


def make_trainer(model_dir: Path, progress: Any = None, **options: Any) -> MarftTrainer:
    """A trainer whose adapters do something, so that a pass with one of them on is not the reference."""
    fields = {"device": "cpu", "lr": 0.02, "engine_tolerance": 9.0, "kl_stop": None, "kl_coef": 0.2} | options
    trainer = MarftTrainer(trainer_options(**fields), model_dir, AGENTS, 0, progress)
    generator = torch.Generator().manual_seed(1)
    for agent in AGENTS:
        for name, weight in trainer.policies.parameters(agent).items():
            if "lora_B" in name:
                weight.data = torch.randn(weight.shape, generator=generator) * 0.1
    return trainer


def score(trainer: MarftTrainer) -> tuple[Round, ScoredRound]:
    data = trainer._read(games(), "on_policy")
    scored = score_round(
        data,
        AGENTS,
        trainer.policies,
        options=trainer.options,
        tick_of=trainer._tick,
        reread=lambda _refused: data,
        note=trainer.credit.note,
    )
    return data, scored


@torch.no_grad()
def plain_hidden(trainer: MarftTrainer, ids: tuple[int, ...]) -> torch.Tensor:
    """Last hidden states [L, H] of one row by itself, unpacked."""
    with trainer.policies.model.peft.disable_adapter():
        hidden: torch.Tensor = trainer.policies.model._backbone(input_ids=torch.tensor([ids]), use_cache=False)[0][0]
    return hidden


def plain_logprobs(trainer: MarftTrainer, data: Round, i: int) -> torch.Tensor:
    item = data.items[i]
    hidden = plain_hidden(trainer, item.prompt_ids + item.sampled_ids)[len(item.prompt_ids) - 1 : -1]
    logits = hidden @ trainer.policies.model._head.weight.detach().T / item.temperature
    return logits.log_softmax(-1).gather(1, torch.tensor(item.sampled_ids)[:, None]).squeeze(1)


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """(rows, distinct tokens) of every packed pass through a backbone from now on."""
    seen: list[tuple[int, int]] = []
    original = hidden_states.layout_to_hidden

    def spy(backbone: Any, layout: Any, *others: Any, **named: Any) -> torch.Tensor:
        seen.append((len(layout.node_of), len(layout.ids_N)))
        return original(backbone, layout, *others, **named)

    monkeypatch.setattr(hidden_states, "layout_to_hidden", spy)
    return seen


def distinct(rows: list[tuple[int, ...]]) -> int:
    return len({row[: end + 1] for row in rows for end in range(len(row))})


@pytest.mark.parametrize("budget", [2048, BUDGET])
def test_reference_log_probs_are_those_of_each_row_alone(model_dir: Path, budget: int) -> None:
    trainer = make_trainer(model_dir, tokens_per_microbatch=budget)
    data, scored = score(trainer)
    assert scored.reference_T is not None
    for i, found in enumerate(scored.reference_T):
        torch.testing.assert_close(found, plain_logprobs(trainer, data, i), **CLOSE)
    assert max(float((a - b).abs().max()) for a, b in zip(scored.reference_T, scored.old_T, strict=True)) > 1e-2


def test_one_pass_takes_the_rows_of_all_agents_and_what_two_of_them_begin_with_alike_counts_once(
    model_dir: Path, passes: list[tuple[int, int]]
) -> None:
    data, _ = score(make_trainer(model_dir))
    rows = [item.prompt_ids + item.sampled_ids[:-1] for item in data.items]
    by_agent = [[row for row, item in zip(rows, data.items, strict=True) if item.agent == name] for name in AGENTS]
    *old, reference = passes
    assert old == [(len(own), distinct(own)) for own in by_agent]  # one pass for each adapter that is on
    assert reference == (len(rows), distinct(rows))
    assert distinct(rows) < sum(distinct(own) for own in by_agent)


def test_no_common_pass_is_over_the_budget(model_dir: Path, passes: list[tuple[int, int]]) -> None:
    trainer = make_trainer(model_dir, tokens_per_microbatch=BUDGET, critic={"sharing": "agent"}, granularity="token")
    trainer.update(games())
    assert max(tokens for _, tokens in passes) <= BUDGET
    assert len(passes) > 3 * len(AGENTS)


@pytest.mark.parametrize("tokens", [False, True])
def test_critics_of_their_own_read_features_of_one_pass(
    model_dir: Path, passes: list[tuple[int, int]], tokens: bool
) -> None:
    trainer = make_trainer(model_dir, critic={"sharing": "agent"}, kl_coef=0.0)
    data = trainer._read(games(), "on_policy")
    seen = trainer.credit._team.observe(data, tokens)
    assert len(passes) == 1
    check_features(trainer, data, seen.views, tokens)


@pytest.mark.parametrize("sharing", ["agent", "shared"])
@pytest.mark.parametrize("granularity", ["action", "token"])
def test_what_a_reference_pass_saw_is_not_computed_again_for_the_critics(
    model_dir: Path, passes: list[tuple[int, int]], granularity: str, sharing: str
) -> None:
    trainer = make_trainer(model_dir, critic={"sharing": sharing}, granularity=granularity)
    data, _ = score(trainer)
    passes.clear()
    seen = trainer.credit._team.observe(data, granularity == "token")
    assert [rows for rows, _ in passes] == [1]  # what followed the last action of the one episode that was cut
    check_features(trainer, data, seen.views, granularity == "token")


def check_features(trainer: MarftTrainer, data: Round, views: Any, tokens: bool) -> None:
    """Those of the view of every critic against each row by itself."""
    found = {}
    for view in views.values():
        found.update(zip(view.rows, torch.split(view.features_NF, list(view.lengths)), strict=True))
    assert sorted(found) == list(range(len(data.items)))
    for i, item in enumerate(data.items):
        first, count = len(item.prompt_ids) - 1, len(item.sampled_ids) if tokens else 1
        expected = plain_hidden(trainer, item.prompt_ids + item.sampled_ids)[first : first + count]
        torch.testing.assert_close(found[i], expected, **CLOSE)


@pytest.mark.parametrize(("granularity", "kl_coef"), [("action", 0.2), ("token", 0.2), ("action", 0.0)])
def test_a_whole_update_is_that_of_each_agents_padded_rows_by_themselves(
    model_dir: Path, granularity: str, kl_coef: float
) -> None:
    options = {"granularity": granularity, "kl_coef": kl_coef, "critic": {"sharing": "agent"}, "epochs": 2}
    ended = []
    for packs in (True, False):
        trainer = make_trainer(model_dir, **options)
        if not packs:
            trainer.policies.model.packing = None
        mixed = agents_of_passes(trainer)
        metrics = trainer.update(games())
        assert max(map(len, mixed)) == (len(AGENTS) if packs else 1)
        values = [p.detach().flatten() for a in AGENTS for p in trainer.policies.parameters(a).values()]
        critics = [p.detach().flatten() for c in trainer.credit.critics.values() for p in c.parameters.values()]
        ended.append((torch.cat(values), torch.cat(critics), metrics["agents"]))
    (values, critics, agents), (alone, critics_alone, agents_alone) = ended
    torch.testing.assert_close(values, alone, **CLOSE)
    torch.testing.assert_close(critics, critics_alone, **CLOSE)
    for agent in AGENTS:
        for name in ("approx_kl", "grad_norm", "advantage_mean", "adapter_moved"):
            assert agents[agent][name] == pytest.approx(agents_alone[agent][name], rel=1e-3, abs=1e-6), name


def agents_of_passes(trainer: MarftTrainer) -> list[set[str]]:
    """Whose actions each pass with adapters off takes, from now on: found out by which profile rows begin with."""
    seen: list[set[str]] = []
    model = trainer.policies.model
    original = model._hidden_at
    agent_of = {item.prompt_ids: item.agent for item in trainer._read(games(), "on_policy").items}

    def spy(adapter: str | None, ids: torch.Tensor, *where: torch.Tensor, **columns: torch.Tensor) -> torch.Tensor:
        if adapter is None:
            rows = [tuple(row) for row in ids.tolist()]
            longest = [max((p for p in agent_of if row[: len(p)] == p), key=len) for row in rows]
            seen.append({agent_of[prompt] for prompt in longest})
        return original(adapter, ids, *where, **columns)

    model._hidden_at = spy  # type: ignore[method-assign]
    return seen


def test_the_bar_of_a_common_pass_ends_where_it_should(model_dir: Path) -> None:
    told: dict[str, list[tuple[int, int]]] = {}

    def progress(phase: str, done: int, total: int) -> None:
        told.setdefault(phase, []).append((done, total))

    options = {"tokens_per_microbatch": BUDGET, "critic": {"sharing": "agent"}}
    make_trainer(model_dir, progress, **options).update(games())
    assert told["reference"][-1] == (28, 28)
    assert told["features"] == [(1, 1)]
    told.clear()
    make_trainer(model_dir, progress, kl_coef=0.0, **options).update(games())
    prompts = {action.prompt_ids for game in games() for action in game.actions}
    assert told["features"][-1] == (len(prompts) + 1, len(prompts) + 1)  # and after the last action of the cut one
    assert "reference" not in told
    for steps in told.values():
        assert [done for done, _ in steps] == sorted({done for done, _ in steps})
