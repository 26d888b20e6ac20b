"""Owns: `marft-bridge credit` runs teams with agents replaced and writes what each agent added.

- Teams run next to each other, on the same seeds; the reward of an episode is what the agent added to that episode.
- The rewards land with level, node and source, are seen in `traces show`, and can be trained on.
- Who helps, idles and harms is said; a stored run can be the team; a run that was cut short goes on.
- What cannot be told, or would change nothing, is refused in one line.
"""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from rich.console import Console
from support.credit_rig import NODES, CreditLab
from support.fake_vllm import FakeVllm, running
from support.paths import ROOT

from marft_bridge import cli
from marft_bridge.agent_credit import command, replacement_rewards
from marft_bridge.agent_credit.command import CreditOptions, credit
from marft_bridge.agent_credit.replacement_rewards import changed_tools
from marft_bridge.commands.collect import collect
from marft_bridge.common.errors import BridgeError, ConfigError
from marft_bridge.config.bridge import BridgeConfig
from marft_bridge.recording.tool_schemas import NodeTools, Surface
from marft_bridge.rollouts.app import split_tasks
from marft_bridge.rollouts.episode_plan import EpisodeRequest
from marft_bridge.rollouts.run_counts import Tally
from marft_bridge.rollouts.session import Session
from marft_bridge.runs.named_version import NamedVersion, write_named_version
from marft_bridge.serving.model_versions import config_to_versions
from marft_bridge.serving.zero_adapter import write_zero_adapter
from marft_bridge.traces.show import show
from trace_store.records import Trajectory
from trainers.rewards import ShapingTerm, trajectory_to_rewards


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[CreditLab]:
    with running(FakeVllm()) as server:
        yield CreditLab(tmp_path, server)


def run(lab: CreditLab, resume: bool = False, **options: Any) -> list[str]:
    config = lab.config()
    return lab.say(lambda reporter: credit(config, CreditOptions(**options), reporter, resume))


def episodes(lab: CreditLab, run_id: str = "credit-1", variant: str | None = None) -> list[Trajectory]:
    with lab.store() as store:
        return list(store.trajectories(run_ids=[run_id], variant=variant))


def agent_rewards(episode: Trajectory) -> dict[tuple[str, str | None], float]:
    return {(r.name, r.node): r.value for r in episode.rewards if r.scope == "agent"}


@pytest.mark.slow
def test_who_helps_who_idles_and_who_harms_is_written_and_said(lab: CreditLab) -> None:
    """Even tasks need the helper's hint; on odd ones the harmer spoils it; the idler is not read."""
    lab.train_all()
    said = run(lab, tasks=32, min_contribution=0.2)
    team = episodes(lab, variant="team")
    assert len(team) == 32
    for episode in team:
        odd = episode.episode.task["x"] % 2
        expected = {("difference", "helper"): 1.0 - odd, ("difference", "idler"): 0.0, ("difference", "harmer"): -odd}
        assert agent_rewards(episode) == expected
        assert {r.source for r in episode.rewards if r.scope == "agent"} == {"credit:credit-1: reward, base instead"}
    rows = {
        line.split("│")[1].strip(): [cell.strip() for cell in line.split("│")[2:-1]] for line in said if "│" in line
    }
    odd = sum(episode.episode.task["x"] % 2 for episode in team)
    assert [rows[node][-1] for node in NODES] == ["adds", "lazy", "harmful"]
    assert [rows[node][-2] for node in NODES] == [f"{32 - odd} / 0 of 32", "0 / 0 of 32", f"0 / {odd} of 32"]
    assert rows["helper"][:2] == ["1.00", f"{(32 - odd) / 32:+.3f}"]
    page = (ROOT / "docs/credit.md").read_text().split("```text\n")[1].split("```")[0].strip().splitlines()
    assert [[cell.strip() for cell in row.split("│")[1:-1]] for row in page[1:]] == [[n, *r] for n, r in rows.items()]
    assert "idler is lazy: it makes 1.00 calls a run, and adds less than 0.2 over base in its place" in said
    assert "harmer is harmful: the team does better with base in its place" in said
    assert said[-1] == "credit-1: wrote 96 rewards of agents (difference) to the episodes of credit-1"


@pytest.mark.slow
def test_the_team_is_the_version_that_training_names_unless_one_is_typed(lab: CreditLab) -> None:
    lab.train_all()
    write_named_version(lab.run_folder, NamedVersion(version=1, newest=2, reward="reward"))
    registry = config_to_versions(lab.config(), lab.run_folder.adapters, lab.reporter().say).registry
    for node in NODES:
        write_zero_adapter(registry.new_folder(node, 2), lab.folder / "model", ("q_proj", "v_proj"))
        registry.register(node, 2, 1, {})
    run(lab, tasks=2)
    run(lab, tasks=2, version="newest")
    for run_id, version in (("credit-1", 1), ("credit-2", 2)):
        (adapters,) = {tuple(e.episode.adapters[node] for node in NODES) for e in episodes(lab, run_id, "team")}
        assert adapters == (version,) * 3


@pytest.mark.slow
def test_teams_share_tasks_and_seeds_and_only_the_replaced_agent_differs(lab: CreditLab) -> None:
    lab.train_all()
    run(lab, tasks=6, samples=2, nodes=("helper", "harmer"))
    by_variant: dict[str | None, dict[Any, Trajectory]] = {}
    for episode in episodes(lab):
        e = episode.episode
        by_variant.setdefault(e.variant, {})[e.task_id, e.sample] = episode
    assert set(by_variant) == {"team", "without helper (base)", "without harmer (base)"}
    assert {len(found) for found in by_variant.values()} == {12}
    heldout = {task["id"] for task in split_tasks([{"id": f"t{x}"} for x in range(48)], 0.25)[1]}
    assert not {task for task, _ in by_variant["team"]} & heldout
    for key, team in by_variant["team"].items():
        other = by_variant["without helper (base)"][key]
        assert (team.episode.seed, team.episode.split) == (other.episode.seed, "train")
        assert team.episode.adapters == {"helper": 1, "idler": 1, "harmer": 1}
        assert other.episode.adapters == {"helper": 0, "idler": 1, "harmer": 1}
        seeds = [{action.node: action.seed for action in episode.actions} for episode in (team, other)]
        assert seeds[0] == seeds[1]


def test_rewards_are_seen_in_traces_show_and_reach_the_agents_own_actions_in_training(lab: CreditLab) -> None:
    lab.train_all()
    run(lab, tasks=4)
    episode = next(e for e in episodes(lab, variant="team") if e.episode.task["x"] % 2 == 0)
    text = io.StringIO()
    console = Console(file=text, width=200)
    arguments: dict[str, Any] = {"matrix": False, "as_json": False, "text_limit": 0, "gamma": 1.0, "lam": 1.0}
    show(lab.run_folder.store, episode.episode.episode_id, console, **arguments)
    (line,) = [line for line in text.getvalue().splitlines() if "difference" in line and "helper" in line]
    assert "1" in line
    term = ShapingTerm(reward="difference", level="agent", weight=0.5)
    earned, absent = trajectory_to_rewards(episode, ("reward", 1.0), [term], [], [True] * 4)
    assert (absent, earned.private["difference"]) == ([], {"helper": 0.5, "idler": 0.0, "harmer": 0.0})


def test_what_credit_writes_may_shape_training_though_no_table_declares_it() -> None:
    table = {"name": "reward", "kind": "tokens"}
    graph = {"app": "m:b", "nodes": ["a", "b"], "tasks": "t.jsonl"}

    def config(**term: Any) -> BridgeConfig:
        trainer = {"shaping": [{"weight": 1.0, **term}]}
        compare = {"metric": "reward"}
        return BridgeConfig.model_validate(
            {"graph": graph, "rewards": [table], "train": {"trainer": trainer}, "compare": compare}
        )

    for name in ("difference", "shapley"):
        assert config(reward=name, level="agent").train.trainer.shaping[0].reward == name
        with pytest.raises(ValidationError, match=f"no ..rewards.. table gives '{name}' with level 'episode'"):
            config(reward=name, level="episode")
    with pytest.raises(ValidationError, match=r"no ..rewards.. table gives 'differences'"):
        config(reward="differences", level="agent")


def test_the_command_line_says_what_the_functions_are_given(
    lab: CreditLab, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given: list[Any] = []
    monkeypatch.setattr(command, "credit", lambda config, options, reporter, resume: given.append((options, resume)))
    lab.config()
    flags = ["credit", "--config", str(lab.folder / "bridge.toml")]
    more = ["--nodes", "helper, solver", "--substitute", "silent", "--method", "shapley", "--tasks", "9"]
    more += ["--samples", "2", "--metric", "correct", "--worth", "0.2", "--resume"]
    assert cli.run(flags) == 0
    assert cli.run([*flags, *more]) == 0
    assert cli.run([*flags, "--run-of", "collect"]) == 0
    assert given == [
        (CreditOptions(), False),
        (CreditOptions(("helper", "solver"), "silent", "shapley", 9, 2, None, "correct", 0.2), True),
        (CreditOptions(run_of="collect"), False),
    ]
    assert cli.run([*flags, "--run-of", "collect", "--samples", "2"]) == 2
    assert "credit --samples has no effect with --run-of" in capsys.readouterr().err


@pytest.mark.slow
def test_a_text_in_an_agents_place_and_one_that_is_frozen_can_be_replaced(lab: CreditLab) -> None:
    lab.train_all()
    said = run(lab, tasks=8, nodes=("idler", "solver"), substitute="text:right")
    team, idler, solver = (
        episodes(lab, variant=name)
        for name in ("team", "without idler (text 27042f4e)", "without solver (text 27042f4e)")
    )
    assert (len(team), len(idler), len(solver)) == (8, 8, 8)
    assert {e.team_reward("reward") for e in solver} == {1.0}  # it always says the answer
    for episode in team:
        odd = episode.episode.task["x"] % 2
        assert agent_rewards(episode) == {("difference", "idler"): 0.0, ("difference", "solver"): -float(odd)}
    assert all(a.untrainable_reason for e in solver for a in e.actions if a.node == "solver")
    assert not any("right" in line for line in said)  # the text may hold anything


@pytest.mark.slow
def test_shapley_runs_every_combination_and_says_who_matters_only_together(lab: CreditLab) -> None:
    """The helper's hint and the idler's silence: here the solver needs the words of both."""
    lab.train_all()
    both = lab.server.answer

    def answer(body: dict[str, Any]) -> Any:
        said = body["messages"][-1]["content"]
        if said.startswith("idler"):
            return "word" if body["model"].endswith("@1") else "hm"
        if said.startswith("solver"):
            return "right" if "hint" in said and "word" in said else "wrong"
        return both(body)

    lab.server.answer = answer
    said = run(lab, tasks=24, nodes=("helper", "idler"), method="shapley")
    assert Counter(e.episode.variant for e in episodes(lab)) == {
        "team": 24,
        "without helper (base)": 24,
        "without idler (base)": 24,
        "without helper+idler (base)": 24,
    }
    for episode in episodes(lab, variant="team"):
        assert agent_rewards(episode) == {
            ("difference", "helper"): 1.0,
            ("difference", "idler"): 1.0,
            ("shapley", "helper"): 0.5,
            ("shapley", "idler"): 0.5,
        }
    assert "helper and idler, only together: each is needed for what the other adds" in " ".join(said)
    assert said[-1] == "credit-1: wrote 96 rewards of agents (difference and shapley) to the episodes of credit-1"


@pytest.mark.slow
def test_a_stored_run_can_be_the_team_and_its_episodes_get_the_rewards(lab: CreditLab) -> None:
    """Collected at version 0; the solver then hears nothing from a silent helper, which is what it heard before."""
    lab.say(lambda reporter: collect(lab.config(), reporter, False))
    asked = len(lab.server.asked)
    said = run(lab, run_of="collect", tasks=6, nodes=("helper",), substitute="text:hint")
    assert len(lab.server.asked) - asked == 6 * 3  # without the team, and without the helper's calls
    assert {e.episode.variant for e in episodes(lab)} == {"without helper (text b80e0af6)"}
    rewarded = [agent_rewards(e) for e in episodes(lab, "collect") if agent_rewards(e)]
    assert rewarded == [{("difference", "helper"): -1.0}] * 6
    assert said[-1] == "credit-1: wrote 6 rewards of agents (difference) to the episodes of collect"
    replays = {(e.episode.task_id, e.episode.sample): e.episode.seed for e in episodes(lab)}
    collected = {(e.episode.task_id, e.episode.sample): e.episode.seed for e in episodes(lab, "collect")}
    assert replays.items() <= collected.items()


@pytest.mark.slow
def test_a_run_that_was_cut_short_goes_on_and_another_one_is_not_mixed_into_it(
    lab: CreditLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    lab.train_all()
    whole = Session.run

    def stopped(session: Session, requests: Sequence[EpisodeRequest], title: str, reward: str, **_: int) -> Tally:
        whole(session, requests[:5], title, reward)
        raise KeyboardInterrupt

    monkeypatch.setattr(Session, "run", stopped)
    with pytest.raises(KeyboardInterrupt):
        run(lab, tasks=4)
    assert len(episodes(lab)) == 5
    monkeypatch.setattr(Session, "run", whole)
    with pytest.raises(ConfigError, match="credit-1 began with other teams, tasks or versions"):
        run(lab, tasks=4, substitute="silent", resume=True)
    asked = len(lab.server.asked)
    said = run(lab, tasks=4, resume=True)
    assert len(lab.server.asked) - asked == (16 - 5) * 4  # what is there is not run again
    assert said[-1] == "credit-1: wrote 12 rewards of agents (difference) to the episodes of credit-1"
    run(lab, tasks=4)
    assert len(episodes(lab, "credit-2")) == 16


def test_a_tool_that_changed_since_the_stored_run_is_seen_and_one_that_was_not_offered_is_no_change() -> None:
    before: Surface = {"worker": NodeTools({"s"}, {"add": {"1", "2"}, "old": {"3"}}), "gone": NodeTools()}
    same: Surface = {"worker": NodeTools({"t"}, {"add": {"2"}, "new": {"4"}}), "other": NodeTools()}
    assert changed_tools(before, same) == []
    now: Surface = {"worker": NodeTools({"t"}, {"add": {"5"}, "old": {"3"}})}
    assert changed_tools(before, now) == ["tool 'add' of node 'worker'"]


@pytest.mark.slow
def test_a_stored_run_with_another_tool_of_the_same_name_gets_no_rewards(
    lab: CreditLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    lab.say(lambda reporter: collect(lab.config(), reporter, False))
    surfaces = {
        run_id: {"solver": NodeTools({schema}, {"add": {schema}})}
        for run_id, schema in {"collect": "1", "credit-1": "2"}.items()
    }
    monkeypatch.setattr(replacement_rewards, "store_to_surface", lambda _, run_id: surfaces[run_id])
    with pytest.raises(ConfigError, match="tool 'add' of node 'solver' has another schema than in run 'collect'"):
        run(lab, run_of="collect", tasks=2, nodes=("helper",), substitute="silent")
    assert not any(agent_rewards(episode) for episode in episodes(lab, "collect"))


def test_there_is_nothing_to_go_on_with_before_a_run(lab: CreditLab) -> None:
    lab.train_all()
    with pytest.raises(ConfigError, match="credit: nothing to resume in"):
        run(lab, resume=True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"nodes": ("nobody",)}, "credit --nodes: 'nobody' is not in graph.nodes or graph.frozen: helper, idler"),
        ({"substitute": "nothing"}, "credit --substitute: 'nothing' is none of base, silent"),
        ({"nodes": ("solver",)}, "node 'solver' runs at version 0 already"),
        ({"substitute": "version:1"}, "node 'helper' runs at version 1 already"),
        ({"substitute": "version:7"}, "node 'helper' has no adapter v7"),
        ({"tasks": 999}, "credit --tasks: 999 asked for, but there are"),
        ({"run_of": "collect"}, "credit --run-of: there is no run 'collect'"),
        ({"metric": "safety", "tasks": 2}, "have the reward 'safety' together in 0 runs"),
        ({"method": "shapley", "nodes": ("helper", "idler", "harmer", "solver", "a", "b", "c")}, "'a' is not in"),
    ],
)
def test_what_cannot_be_told_is_refused(lab: CreditLab, options: dict[str, Any], message: str) -> None:
    lab.train_all()
    with pytest.raises(BridgeError) as caught:
        run(lab, **options)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.slow
def test_a_stored_run_of_other_sampling_or_versions_is_no_team(lab: CreditLab) -> None:
    lab.train_all()
    run(lab, tasks=2)
    with pytest.raises(ConfigError, match="the episodes of run 'credit-1' are of several teams or versions"):
        run(lab, run_of="credit-1", substitute="silent")
    lab.say(lambda reporter: collect(lab.config(), reporter, False))
    config = lab.config("[sampling]\ntemperature = 0.5")
    with pytest.raises(ConfigError, match=r"run 'collect' ran with another \[sampling\]"):
        lab.say(lambda r: credit(config, CreditOptions(run_of="collect", substitute="silent"), r, False))
