"""Owns: what a comparison refuses, in one line and before anything starts; what it does not go on with."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.compare_rig import Lab, lab_in

from marft_bridge.commands.collect import collect
from marft_bridge.common.errors import BridgeError, ConfigError, GraphError
from marft_bridge.common.progress import Reporter
from marft_bridge.comparison.command import VersionFlags
from marft_bridge.comparison.episodes import Plan, config_to_plan, refuse_other_plan
from marft_bridge.comparison.variants import options_to_lineup
from marft_bridge.config.bridge import BridgeConfig
from marft_bridge.config.serve import ServeOptions
from marft_bridge.rollouts.held_out import record_learned_tasks
from marft_bridge.serving.adapter_registry import AdapterRegistry
from marft_bridge.training.train import train
from trace_store.records import RunRow
from trace_store.store import TraceStore
from trainers.common.files import weights_to_sha256

BEFORE = {"name": "before"}
AFTER = {"name": "after", "adapters": "newest"}


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    with lab_in(tmp_path) as found:
        yield found


@pytest.mark.parametrize(
    ("tables", "options", "message"),
    [
        ([BEFORE, {"name": "x", "adapters": 9}], {}, "node 'reasoner' has no adapter v9; published: v0, v1, v2"),
        (
            [BEFORE, {"name": "x", "adapters": {"planer": 1}}],
            {},
            "compare.variants 'x': adapters: 'planer' is not one of its nodes: reasoner, actor",
        ),
        (
            [BEFORE, {"name": "x"}],
            {},
            "'before' and 'x' would run the same thing (APPS:duo with reasoner@0, actor@0); change one of them",
        ),
        (
            [BEFORE, {"name": "x", "app": "APPS:nothing", "nodes": ["solo"]}],
            {},
            "compare.variants 'x': graph.app: 'APPS' has no 'nothing'; it has: ",
        ),
        (
            [BEFORE, {"name": "x", "app": "APPS:solo", "nodes": ["duo"]}],
            {},
            "'APPS:solo' has no node 'duo'; its nodes: solo",
        ),
        (
            [BEFORE, {"name": "x", "app": "APPS:solo", "nodes": ["solo"], "adapters": "newest"}],
            {},
            "node 'solo' has no trained adapter, so variant 'x' has no newest one; run `marft-bridge train` first",
        ),
        (
            [BEFORE, {"name": "x", "model": "MODEL", "serve": {"max_loras": 8}}],
            {},
            "compare.variants 'x': serve has no effect: 'MODEL' is the model of [model]",
        ),
        ([], {"tasks": 10_000}, "compare.tasks asks for 10000 held-out tasks, but graph.heldout = "),
        ([], {"stop_early": True, "tasks": 5}, "5 tasks settle nothing, however clear; take 6 or more"),
    ],
    ids=["version", "node", "same", "app", "app-node", "newest", "serve", "tasks", "looks"],
)
def test_what_cannot_run_is_refused_in_one_line(
    lab: Lab, tables: list[dict[str, Any]], options: dict[str, Any], message: str
) -> None:
    text = json.dumps(tables).replace("APPS", str(lab.apps)).replace("MODEL", str(lab.model))
    with pytest.raises(BridgeError) as caught:
        lab.compare(*json.loads(text), **options)
    assert message.replace("APPS", str(lab.apps)).replace("MODEL", str(lab.model)) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not lab.ours.adapters  # no server was asked for anything


@pytest.mark.parametrize("command", [collect, train])
def test_more_held_out_tasks_than_there_are_is_refused_before_hours_of_training_not_after(
    lab: Lab, command: Callable[[BridgeConfig, Reporter, bool], None]
) -> None:
    config = lab.config(tasks=10_000)
    with pytest.raises(ConfigError) as caught:
        command(config, Reporter(), False)
    assert str(caught.value) == (  # 101 of t0 .. t399 have a sha256 of "marft/<id>" in the first quarter
        "compare.tasks asks for 10000 held-out tasks, but graph.heldout = 0.25 leaves 101 of 400: "
        "lower compare.tasks or add tasks"
    )
    assert not lab.ours.adapters


def test_flags_beside_tables_have_no_effect_and_are_refused(lab: Lab) -> None:
    with pytest.raises(ConfigError, match="--before and --after have no effect beside"):
        lab.compare(BEFORE, AFTER, flags=VersionFlags(before_version=1))


def test_a_server_is_not_asked_to_hold_more_adapters_than_it_has_room_for(lab: Lab) -> None:
    tables = (BEFORE, AFTER, {"name": "one", "adapters": 1}, lab.solo())
    config = lab.config(*tables).model_copy(update={"serve": ServeOptions(max_loras=6)})
    registry = AdapterRegistry(lab.run / "adapters", weights_to_sha256(lab.model))
    with pytest.raises(ConfigError) as caught:
        options_to_lineup(config, registry)
    assert str(caught.value) == (
        "serve.max_loras is 6, but the variants need 7 adapters at once (reasoner at 0, 1, 2; actor at 0, 1, 2; "
        "solo at 0); raise it, or compare fewer"
    )
    roomy = config.model_copy(update={"serve": ServeOptions(max_loras=7)})
    assert len(options_to_lineup(roomy, registry).teams) == 4
    # Mixed teams need no adapter besides those of base and candidate.
    mixed = lab.config(mixed_teams="auto").model_copy(update={"serve": ServeOptions(max_loras=4)})
    assert len(options_to_lineup(mixed, registry).all_teams) == 4


def with_options(config: BridgeConfig, changes: dict[str, Any]) -> BridgeConfig:
    """The configuration with options of its tables changed, or a list replaced."""
    tables = config.model_dump(exclude_unset=True)
    changed = {name: tables.get(name, {}) | new if isinstance(new, dict) else new for name, new in changes.items()}
    return BridgeConfig.model_validate(tables | changed)


def plan_of(lab: Lab, config: BridgeConfig, topic: str = "even") -> Plan:
    """The plan of `compare-1` with ten held-out tasks on a topic."""
    registry = AdapterRegistry(lab.run / "adapters", weights_to_sha256(lab.model))
    tasks = [{"id": f"t{number}", "number": number, "topic": topic} for number in range(10)]
    return config_to_plan(config, "compare-1", options_to_lineup(config, registry), heldout=tasks)


def stored_plan(lab: Lab, content: dict[str, Any]) -> TraceStore:
    """A store with a comparison that began with this plan."""
    store = TraceStore.open(lab.run / "store.duckdb")
    store.put_run(RunRow("compare-1", "compare", 0, config={"plan": content}))
    return store


STEPS = {"name": "steps", "kind": "step_count", "budget": 4}


def test_a_resumed_comparison_samples_cuts_and_scores_as_it_began(lab: Lab) -> None:
    began = with_options(lab.config(tasks=4), {"rewards": [STEPS]})
    with stored_plan(lab, plan_of(lab, began).content()) as store:
        for same in ({"compare": {"temperature": 1.0}}, {"collect": {"in_flight": 2}}, {"compare": {"kl_actions": 8}}):
            refuse_other_plan(store, plan_of(lab, with_options(began, same)))
        for changes, message in (
            ({"sampling": {"temperature": 0.2}}, "began with temperature = 1.0, now it would be temperature = 0.2"),
            ({"compare": {"temperature": 0.2}}, "began with temperature = 1.0, now it would be temperature = 0.2"),
            ({"sampling": {"max_tokens": 512}}, "began with max_tokens = 256, now it would be max_tokens = 512"),
            ({"collect": {"max_tokens_per_episode": 9}}, "began with max_tokens_per_episode = None, now it would be "),
            ({"collect": {"timeout_s": 250.0}}, "began with timeout_s = 300.0, now it would be timeout_s = 250.0"),
            ({"graph": {"reward": "app:other"}}, "now it would be rewards = {'graph.reward': 'app:other', 'steps': '"),
            ({"graph": {"limit_reward": -1.0}}, "'graph.limit_reward': '-1'"),
            ({"rewards": [STEPS | {"budget": 5}]}, "began with rewards = {"),
            ({"rewards": []}, "began with rewards = {"),
        ):
            with pytest.raises(ConfigError) as caught:
                refuse_other_plan(store, plan_of(lab, with_options(began, changes)))
            assert message in str(caught.value)
            assert "\n" not in str(caught.value)
        with pytest.raises(ConfigError, match="began with other tasks' contents, now it would be other"):
            refuse_other_plan(store, plan_of(lab, began, topic="odd"))


def test_a_judge_may_have_another_address_when_a_comparison_goes_on(lab: Lab) -> None:
    judge = {"name": "j", "kind": "judge", "answer_from": "log", "rubric": "?", "model": "m"}
    began, moved, other = (
        with_options(lab.config(tasks=4), {"rewards": [judge | {"base_url": f"http://127.0.0.1:{port}/v1"} | more]})
        for port, more in ((1, {}), (2, {}), (1, {"model": "other"}))
    )
    with stored_plan(lab, plan_of(lab, began).content()) as store:
        refuse_other_plan(store, plan_of(lab, moved))
        with pytest.raises(ConfigError, match="began with rewards = "):
            refuse_other_plan(store, plan_of(lab, other))


@pytest.mark.parametrize("entry", ["task_contents", "temperature", "max_tokens_per_episode", "rewards"])
def test_a_plan_from_before_an_entry_was_kept_is_not_gone_on_with(lab: Lab, entry: str) -> None:
    plan = plan_of(lab, lab.config(tasks=4))
    before = {key: value for key, value in plan.content().items() if key != entry}
    if entry == "temperature":
        before["temperature"] = None  # such a plan had that of [compare] alone
    title = "tasks' contents" if entry == "task_contents" else entry
    with (
        stored_plan(lab, before) as store,
        pytest.raises(ConfigError, match=f"compare-1 began with no record of its {title}, now it would be "),
    ):
        refuse_other_plan(store, plan)


@pytest.mark.slow
def test_tasks_that_were_trained_on_are_not_compared_on(lab: Lab) -> None:
    lab.compare(tasks=4)
    leaked = lab.stored()[0].episode
    record_learned_tasks(lab.run, [t for t in lab.stored() if t.episode.task_id == leaked.task_id])
    with pytest.raises(
        ConfigError, match=f"1 of 4 held-out tasks were trained on in this run folder .{leaked.task_id}"
    ):
        lab.compare(tasks=4)


@pytest.mark.slow
def test_a_variant_whose_episodes_all_fail_ends_the_run_by_name(lab: Lab) -> None:
    lab.answer = lambda model, _: "crash" if model == "solo@0" else "yes"
    with pytest.raises(GraphError, match="variant 'one agent': 8 of 8 episodes failed"):
        lab.compare(BEFORE, lab.solo(), tasks=30)
