"""Owns: how long the offline phase goes on: steps that scale with the traces, the held-out stop, the KL budget."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny_policy import (
    AGENTS,
    VOCABULARY,
    make_action,
    make_trajectory,
    play,
    sample_batch,
    save_tiny_llama,
)
from support.trainer_options import trainer_options

from trace_store.records import Trajectory
from trainers.checkpoint import load, save
from trainers.common.spread import spread_rows
from trainers.marft import MarftTrainer
from trainers.offline.held_out import measure_held_out
from trainers.offline.imitate import Demonstrations, _Phase
from trainers.policies.adapter_learner import AdapterLearner


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("model") / "tiny")


def trainer_of(model_dir: Path, lr: float = 0.01, **offline: Any) -> MarftTrainer:
    options = trainer_options(device="cpu", lr=lr, offline={"mode": "filtered", "threshold": 0.0, **offline})
    return MarftTrainer(options, model_dir, AGENTS, seed=0)


def imitated(trainer: MarftTrainer, episodes: list[Trajectory]) -> dict[str, Any]:
    figures: dict[str, Any] = trainer.replay(episodes)["agents"]["actor"]
    return figures


def one_rule(count: int) -> list[Trajectory]:
    """The actor always says 5 after 3: what holds of the fitted holds of the held out."""
    return [make_trajectory([make_action("actor", [3], [5])], 1.0, task_id=str(i)) for i in range(count)]


def by_heart(count: int) -> list[Trajectory]:
    """After each prompt a token at random: what is learned of one says nothing of another."""
    draw = torch.Generator().manual_seed(0)
    tokens = torch.randint(VOCABULARY, (count, 3), generator=draw).tolist()
    return [make_trajectory([make_action("actor", [a, b], [c])], 1.0, task_id=f"{a} {b}") for a, b, c in tokens]


@pytest.mark.parametrize(("count", "steps"), [(32, 2), (320, 18)])
def test_steps_scale_with_the_traces(model_dir: Path, count: int, steps: int) -> None:
    # one task in eight is held out: 28 and 280 are left, in steps of 16
    figures = imitated(trainer_of(model_dir, epochs=1), one_rule(count))
    assert (figures["steps"], figures["held_out_actions"]) == (steps, count // 8)


def test_no_call_of_a_held_out_task_was_ever_learned_from(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over stored episodes and two rounds of a teacher, whose runs have the traces' tasks under ids of their own."""
    fitted, held = list[set[str]](), list[set[str]]()
    begin = _Phase.__init__

    def noted(phase: _Phase, learner: AdapterLearner, data: Demonstrations) -> None:
        begin(phase, learner, data)
        fitted.append({data.task_A[i] for i in phase.fitted})
        held.append({data.task_A[i] for i in phase.held})

    monkeypatch.setattr(_Phase, "__init__", noted)

    def runs(name: str, tasks: range) -> list[Trajectory]:
        episodes = {
            i: make_trajectory([make_action("actor", [3, i % 7], [5])], 1.0, task_id=name + str(i)) for i in tasks
        }
        return [replace(e, episode=replace(e.episode, task={"id": name, "asks": i})) for i, e in episodes.items()]

    trainer = trainer_of(model_dir, epochs=1)
    stored, first, second = runs("trace", range(64)), runs("app", range(40, 100)), runs("app", range(90, 160))
    imitated(trainer, stored)
    trainer.distil(stored, first)
    save(trainer, tmp_path / "checkpoint")
    later = trainer_of(model_dir, epochs=1)
    load(later, tmp_path / "checkpoint")
    later.distil(stored, [*first, *second])
    assert [len(tasks) for tasks in held] == [64 // 8, 100 // 8, 160 // 8]
    assert not set().union(*held) & set().union(*fitted[:1])
    assert not (held[1] | held[2]) & fitted[1]
    assert not held[2] & fitted[2]
    assert len(held[0] & held[1]) == 5  # new tasks have taken the places of three, by their digests


def test_of_tasks_that_were_all_learned_from_none_is_held_out(model_dir: Path) -> None:
    """The first twelve are too few to hold one out; among the forty the other twenty-eight are fresh."""
    trainer = trainer_of(model_dir, epochs=1)
    assert imitated(trainer, one_rule(12))["held_out_actions"] == 0
    assert imitated(trainer, one_rule(40))["held_out_actions"] == 5
    assert imitated(trainer, one_rule(12))["held_out_actions"] == 0


def test_what_generalises_is_learned_for_all_passes(model_dir: Path) -> None:
    figures = imitated(trainer_of(model_dir, epochs=6, kl_budget=1e3), one_rule(64))
    assert (figures["epochs"], figures["stopped_by"]) == (6, None)


def test_the_pass_that_made_held_out_calls_likeliest_is_gone_back_to(model_dir: Path) -> None:
    figures = imitated(trainer := trainer_of(model_dir, lr=0.03, epochs=40, kl_budget=1e3), by_heart(64))
    assert figures["stopped_by"] == "held-out likelihood"
    assert figures["epochs"] < 40
    if figures["epochs"] == 0:
        assert figures["adapter_moved"] == 0.0
        return
    other = trainer_of(model_dir, lr=0.03, epochs=figures["epochs"], kl_budget=1e3)
    assert imitated(other, by_heart(64))["held_out_loss"] == pytest.approx(figures["held_out_loss"])
    for name, weight in trainer.policies.parameters("actor").items():
        torch.testing.assert_close(weight, other.policies.parameters("actor")[name])


def test_held_out_nats_are_those_of_the_held_out_calls_with_the_weights_that_are_kept(model_dir: Path) -> None:
    trainer = trainer_of(model_dir, epochs=4, kl_budget=1e3)
    action = make_action("actor", [3], [5])
    (before,) = trainer.policies.logprobs_of("actor", [action])
    figures = imitated(trainer, one_rule(64))  # whichever of them were held out: they are alike
    (after,) = trainer.policies.logprobs_of("actor", [action])
    assert figures["held_out_nats_before"] == pytest.approx(-before[0], abs=1e-5)
    assert figures["held_out_nats"] == pytest.approx(-after[0], abs=1e-5)
    assert figures["held_out_nats"] < figures["held_out_nats_before"]


def test_a_pass_beyond_the_budget_is_shortened_to_within_it_and_is_the_last(model_dir: Path) -> None:
    def played(trainer: MarftTrainer) -> list[Trajectory]:
        actions = sample_batch(trainer, "actor", [[3]] * 64, 1, torch.Generator().manual_seed(1))
        return [make_trajectory([action], 1.0, task_id=str(i)) for i, action in enumerate(actions)]

    trainer = trainer_of(model_dir, lr=0.05, epochs=30, kl_budget=0.05, threshold=1.0)
    episodes = [*played(trainer), *one_rule(64)]
    figures = imitated(trainer, episodes)
    assert figures["stopped_by"] == "kl"
    assert 0 < figures["kl_after"] <= 0.05
    assert figures["epochs"] < 30
    # that of the weights as they are, on one call in four: k3 = e^d - 1 - d
    probes = [episodes[row].actions[0] for row in spread_rows([0] * 128, 32)]
    now, start = (trainer.policies.logprobs_of("actor", probes, reference=base) for base in (False, True))
    gaps = [new[0] - old[0] for new, old in zip(now, start, strict=True)]
    assert figures["kl_after"] == pytest.approx(sum(math.expm1(gap) - gap for gap in gaps) / 32, rel=1e-4)
    looser = imitated(trainer_of(model_dir, lr=0.05, epochs=2, kl_budget=1e3, threshold=1.0), episodes)
    assert looser["stopped_by"] is None


@pytest.mark.parametrize("count", [24, 64])
def test_the_budget_is_measured_on_calls_of_every_agent_of_an_adapter(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    """Their calls alternate: a stride of 4 over 128 of them, or the first 32 of 48, meets one agent only or mostly."""
    probed = list[Counter[str]]()
    begin = _Phase.__init__

    def noted(phase: _Phase, learner: AdapterLearner, data: Demonstrations) -> None:
        begin(phase, learner, data)
        probed.append(Counter(item.agent for item in phase.probes))

    monkeypatch.setattr(_Phase, "__init__", noted)
    together = {agent: {"adapter": "team"} for agent in AGENTS}
    options = trainer_options(device="cpu", agents=together, offline={"mode": "filtered", "epochs": 1})
    trainer = MarftTrainer(options, model_dir, AGENTS, seed=0)
    trainer.replay(play(trainer, count, torch.Generator().manual_seed(1), lambda *_: 1.0))
    assert probed == [{"reasoner": 16, "actor": 16}]


@pytest.mark.parametrize("epochs", [1, 2, 3])
def test_a_pass_that_is_taken_back_has_its_reason_and_is_warned_of(model_dir: Path, epochs: int) -> None:
    """Every call is another one, at a rate at which the first pass already makes what is held out less likely."""
    trainer = trainer_of(model_dir, lr=0.2, epochs=epochs, kl_budget=1e6)
    result = trainer.replay(by_heart(64))
    figures = result["agents"]["actor"]
    assert (figures["epochs"], figures["steps"], figures["adapter_moved"]) == (0, 0, 0.0)
    assert figures["stopped_by"] == "held-out likelihood"
    assert "adapter 'actor' kept nothing of its offline phase" in result["warnings"][-1]


def test_what_went_badly_has_no_part_in_when_to_stop(model_dir: Path) -> None:
    """awr imitates failures a little; here they are seven of eight calls of a task: only that eighth is looked at."""
    trainer = MarftTrainer(
        trainer_options(device="cpu", lr=0.01, offline={"mode": "awr", "kl_budget": 1e3}, critic={"warmup_epochs": 0}),
        model_dir,
        AGENTS,
        seed=0,
    )
    draw = torch.Generator().manual_seed(0)
    episodes = []
    for task in range(64):
        for k in range(8):
            said = 5 if k == 0 else int(torch.randint(VOCABULARY, (1,), generator=draw))
            episodes.append(make_trajectory([make_action("actor", [3], [said])], float(k == 0), task_id=str(task)))
    looked_at = list[float]()
    weigh = _Phase._good_coefficients

    def noted(phase: _Phase, rows: Any) -> torch.Tensor:
        good = weigh(phase, rows)
        looked_at.extend(phase.advantage_A[list(rows)][good > 0].tolist())
        return good

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_Phase, "_good_coefficients", noted)
        trainer.warm_up(episodes)
        trainer.replay(episodes)
    assert looked_at
    assert min(looked_at) > 0.8  # the return less the mean one, of an eighth or so: no failure among them


def test_too_few_traces_hold_none_out(model_dir: Path) -> None:
    figures = imitated(trainer_of(model_dir, epochs=3), one_rule(12))
    assert (figures["held_out_actions"], figures["held_out_loss"], figures["epochs"]) == (0, None, 3)
    names = ("held_out_nats_before", "held_out_nats", "held_out_exact_before", "held_out_exact")
    assert [figures[name] for name in names] == [None] * 4


def greedy_answer(trainer: MarftTrainer, agent: str, prompt: list[int], tokens: int) -> list[int]:
    """What the agent's policy decodes greedily, one token after another, by plain full-logit steps."""
    model = trainer.policies.model_of(agent)
    model.use(trainer.policies.adapter_of(agent))
    ids = list(prompt)
    with torch.no_grad():
        for _ in range(tokens):
            ids.append(int(model.peft(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    return ids[len(prompt) :]


def test_held_out_answers_count_as_equal_where_real_greedy_decoding_repeats_them(model_dir: Path) -> None:
    """Half of the recorded answers are what the untrained policy decodes, half of them with one token changed."""
    trainer = trainer_of(model_dir)
    actions = []
    for number in range(40):
        prompt = [number % VOCABULARY, 7 * number % VOCABULARY]
        answer = greedy_answer(trainer, "actor", prompt, 5)
        if number % 2:
            changed = number // 2 % 5  # each position in its turn
            answer[changed] = (answer[changed] + 1) % VOCABULARY
        actions.append(make_action("actor", prompt, answer))
    data = [make_trajectory([action], 1.0, task_id=str(i)) for i, action in enumerate(actions)]
    items = trainer._to_round(data, "imitation").items
    learner = trainer.policies.learners["actor"]
    for chosen in (items, items[::2], items[1::2]):
        fit = measure_held_out(learner, chosen)["actor"]
        decoded = [greedy_answer(trainer, "actor", list(item.prompt_ids), 5) for item in chosen]
        equal = sum(answer == list(item.sampled_ids) for answer, item in zip(decoded, chosen, strict=True))
        assert (fit.actions, fit.exact) == (len(chosen), equal / len(chosen))
    assert [measure_held_out(learner, part)["actor"].exact for part in (items[::2], items[1::2])] == [1.0, 0.0]


def test_the_exact_share_before_and_after_is_that_of_the_two_policies(model_dir: Path) -> None:
    untrained = trainer_of(model_dir)
    assert greedy_answer(untrained, "actor", [3], 1) != [5]
    figures = imitated(trainer := trainer_of(model_dir, lr=0.05, epochs=8, kl_budget=1e3), one_rule(64))
    assert greedy_answer(trainer, "actor", [3], 1) == [5]
    assert (figures["held_out_exact_before"], figures["held_out_exact"]) == (0.0, 1.0)
    assert figures["held_out_actions"] == 8


def test_a_forced_token_is_given_and_not_held_against_the_policy(model_dir: Path) -> None:
    trainer = trainer_of(model_dir)
    first = greedy_answer(trainer, "actor", [3], 1)[0]
    other = (first + 1) % VOCABULARY  # the grammar's choice, not the policy's
    last = greedy_answer(trainer, "actor", [3, other], 1)[0]
    for logprobs, exact in (((0.0, -1.0), 1.0), ((-1.0, -1.0), 0.0)):
        action = make_action("actor", [3], [other, last], logprobs=logprobs)
        items = trainer._to_round([make_trajectory([action], 1.0)], "imitation").items
        assert measure_held_out(trainer.policies.learners["actor"], items)["actor"].exact == exact


def test_agents_of_one_adapter_have_held_out_figures_of_their_own(model_dir: Path) -> None:
    """Both say 5 after 3, which is learned; the reasoner was recorded with another answer each time, which is not."""
    team = {name: {"adapter": "team"} for name in AGENTS}
    options = trainer_options(
        device="cpu", lr=0.05, agents=team, offline={"mode": "filtered", "threshold": 0.0, "kl_budget": 1e3}
    )
    trainer = MarftTrainer(options, model_dir, AGENTS, seed=0)
    first, second = (
        (lambda i: make_action("reasoner", [20, i % 7], [i % 5])),
        (lambda i: make_action("actor", [3], [5])),
    )
    episodes = [make_trajectory([first(i), second(i), second(i)], 1.0, task_id=str(i)) for i in range(32)]
    figures = trainer.replay(episodes)["agents"]
    assert (figures["reasoner"]["held_out_actions"], figures["actor"]["held_out_actions"]) == (4, 8)
    assert figures["actor"]["held_out_exact"] == 1.0
    assert figures["actor"]["held_out_nats"] < figures["reasoner"]["held_out_nats"]


def test_every_stored_call_of_a_node_is_imitated_or_counted_with_its_reason(model_dir: Path) -> None:
    right = make_action("actor", [3], [5])
    untold = make_action("actor", [3], [], logprobs=None, trainable=False, untrainable_reason="not re-tokenised: empty")
    episodes = [
        make_trajectory([right, untold, make_action("reasoner", [1], [2])], 1.0),
        make_trajectory([right], -1.0),
        make_trajectory([right, untold], None),
        make_trajectory([right, right], 1.0, outcome="failed"),
    ]
    result = trainer_of(model_dir, epochs=1).replay(episodes)
    assert result["agents"]["actor"]["drops"] == {
        "not re-tokenised: empty": 1,
        "episode below offline.threshold": 1,
        "episode without a finite reward 'reward'": 2,
        "episode failed": 2,
    }
    assert (result["agents"]["actor"]["actions"], result["agents"]["reasoner"]["drops"]) == (1, {})
