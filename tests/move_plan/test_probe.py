"""Owns: what the probe says of a local base model: figures as of a plain forward pass, and what imitation did.

- A node whose answers follow a rule gains on held-out tasks; one whose answers are the base's own draws does not.
- No group is in both halves, and no adapter is left behind. What cannot be rendered is counted by its reason.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from support.chat_rig import save_chat_model
from support.plan_rig import many_calls
from support.tiny_policy import save_tiny_llama
from transformers import LlamaForCausalLM

from marft_bridge.move_plan.drawn_calls import draw_calls
from marft_bridge.move_plan.local_calls import LocalCalls, calls_to_local
from marft_bridge.move_plan.probe import LEAST_GROUPS, hold_out, probe_nodes
from marft_bridge.move_plan.probe_figures import NodeFit
from trace_store.store import TraceStore
from trainers.batch import ActionItem
from trainers.config import OptimizerOptions, SystemOptions, TrainerOptions

CALLS = 48
OPTIONS = TrainerOptions(optimizer=OptimizerOptions(lr=0.01), system=SystemOptions(device="cpu"))


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("model") / "tiny")


@torch.no_grad()
def drawn_from(model_dir: Path, node: str, count: int) -> LocalCalls:
    """Answers of three tokens that the base model itself draws: it predicts them as well as they can be predicted."""
    model, generator = LlamaForCausalLM.from_pretrained(model_dir), torch.Generator().manual_seed(5)
    local = LocalCalls()
    for number in range(count):
        ids = [2, 4 + number % 24]
        for _ in range(3):
            probabilities = model(input_ids=torch.tensor([ids])).logits[0, -1].softmax(-1)
            ids.append(int(torch.multinomial(probabilities, 1, generator=generator)))
        item = ActionItem(node, tuple(ids[:2]), tuple(ids[2:]), behaviour=None, temperature=1.0, retokenised=True)
        local.items.append(item)
        local.groups.append(str(number))
    return local


def by_rule(node: str, count: int) -> LocalCalls:
    """Always the same three tokens, whatever is asked."""
    items = [
        ActionItem(node, (1, 4 + k % 24), (5, 6, 7), behaviour=None, temperature=1.0, retokenised=True)
        for k in range(count)
    ]
    return LocalCalls(items, [str(k) for k in range(count)])


@pytest.fixture(scope="module")
def fits(model_dir: Path) -> dict[str, NodeFit]:
    calls = {"rule": by_rule("rule", CALLS), "chance": drawn_from(model_dir, "chance", CALLS)}
    return probe_nodes(calls, dict.fromkeys(calls, model_dir), OPTIONS, seed=0)


def test_a_node_whose_answers_follow_a_rule_gains_and_one_of_chance_does_not(fits: dict[str, NodeFit]) -> None:
    rule, chance = fits["rule"].probe, fits["chance"].probe
    assert rule is not None
    assert chance is not None
    assert rule.helps
    assert rule.after.mean < rule.before.mean / 2
    assert not chance.helps
    assert chance.gain.mean == pytest.approx(chance.before.mean - chance.after.mean, abs=1e-6)
    for probe, least_steps in ((rule, 1), (chance, 0)):  # of chance the first pass may already be taken back
        assert (probe.fitted_calls, probe.held_calls) == (CALLS - CALLS // 3, CALLS // 3)
        assert least_steps <= probe.steps <= 12  # three passes over 28 of 32 calls, eight at a time


@torch.no_grad()
def test_the_figures_of_the_base_are_those_of_a_plain_forward_pass(fits: dict[str, NodeFit], model_dir: Path) -> None:
    model = LlamaForCausalLM.from_pretrained(model_dir)
    means = []
    for item in drawn_from(model_dir, "chance", CALLS).items:
        ids = torch.tensor([[*item.prompt_ids, *item.sampled_ids]])
        logp = model(input_ids=ids).logits[0].log_softmax(-1)[1:-1]
        means.append(-float(logp.gather(1, ids[0, 2:, None]).mean()))
    fit = fits["chance"]
    assert (fit.calls, fit.tokens) == (CALLS, 3 * CALLS)
    assert fit.base is not None
    assert fit.base.mean == pytest.approx(sum(means) / CALLS, rel=1e-5)
    assert fit.spread == pytest.approx(float(torch.tensor(means).std()), rel=1e-4)
    half = 2.0117405 * float(torch.tensor(means).std()) / math.sqrt(CALLS)  # t(47; 0.975)
    assert fit.base[1:] == pytest.approx((fit.base.mean - half, fit.base.mean + half), rel=1e-4)


def test_groups_are_held_out_whole_by_the_seed(model_dir: Path) -> None:
    groups = [str(k // 4) for k in range(CALLS)]
    held = hold_out(groups, seed=3)
    assert len(held) == 4  # of twelve
    assert held == hold_out(groups[::-1], seed=3)
    assert len({frozenset(hold_out(groups, seed)) for seed in range(5)}) > 1
    local = by_rule("rule", CALLS)
    probe = probe_nodes({"rule": LocalCalls(local.items, groups)}, {"rule": model_dir}, OPTIONS, seed=3)["rule"].probe
    assert probe is not None
    assert (probe.fitted_calls, probe.held_calls) == (32, 16)


def test_too_few_tasks_are_scored_and_not_probed(model_dir: Path) -> None:
    local = by_rule("rule", 3 * (LEAST_GROUPS - 1))
    groups = [str(k // 3) for k in range(len(local.items))]
    fit = probe_nodes({"rule": LocalCalls(local.items, groups)}, {"rule": model_dir}, OPTIONS, seed=0)["rule"]
    assert (fit.calls, fit.probe) == (15, None)
    assert fit.no_probe == "its calls are of 5 tasks; 6 are needed to hold some out"


def test_what_cannot_be_rendered_is_counted_by_its_reason_and_probed_by_none(tmp_path: Path) -> None:
    model = save_chat_model(tmp_path / "chat")
    picture = json.dumps([{"role": "user", "parts": [{"type": "uri", "uri": "x"}]}])
    answers = {"good": lambda _: "four", "control": lambda _: "four<|im_end|>"}
    plain = many_calls(tmp_path / "a.duckdb", answers, 2)
    seeing = many_calls(tmp_path / "b.duckdb", {"eye": lambda _: "four"}, 2, INPUT_MESSAGES=picture)
    calls = []
    for path in (plain, seeing):
        with TraceStore.open(path, read_only=True) as store:
            calls += draw_calls(store, 10, seed=0)
    local = calls_to_local(calls, dict.fromkeys(("good", "control", "eye"), model))
    assert {node: (len(rows.items), dict(rows.refused)) for node, rows in local.items()} == {
        "good": (2, {}),
        "control": (0, {"the answer holds a control token of the base model": 2}),
        "eye": (0, {"it holds a part that is no text": 2}),
    }
    fits = probe_nodes(local, dict.fromkeys(local, model), OPTIONS, seed=0)
    assert fits["eye"] == NodeFit(
        "eye", 0, 0, None, None, {"it holds a part that is no text": 2}, no_probe="no call of it could be rendered"
    )
    assert fits["good"].calls == 2
