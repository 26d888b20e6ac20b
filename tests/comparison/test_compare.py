"""Owns: what a comparison runs.

- Every variant runs every task and sample with one seed, next to each other, in an order that the seed decides.
- Another graph, another base model and a graph on its own models run beside the base, and nothing is redirected that
  should not be.
- The teams between base and candidate run once, and neither of the two is run twice.
- A variant may sample under a limit of its own; teams of two limits are not mixed, and none of them is promoted.
- Resuming runs what is missing, and nothing else; another plan is refused.
- An episode that fails takes its pair out and is counted.
- The reward that is trained on decides where nobody said which does, and none has the default's name.
- The exit code says whether a condition holds.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
from support.compare_rig import NODES, Lab, lab_in, save_model
from support.growth_rig import fill
from support.hub_cache import NAME, put_in_cache

from marft_bridge import cli
from marft_bridge.common.errors import ConfigError, GraphError, ServingError
from marft_bridge.common.progress import Reporter
from marft_bridge.comparison.command import VersionFlags
from marft_bridge.comparison.episodes import resolve_metric
from marft_bridge.comparison.records import Report
from marft_bridge.comparison.views import describe_variant
from marft_bridge.config.compare import text_to_version
from marft_bridge.promotion.candidate_check import check_candidate
from marft_bridge.rollouts.app import split_tasks
from marft_bridge.rollouts.collector import MIN_FAILED, Collector
from marft_bridge.runs.named_version import NamedVersion, write_named_version
from marft_bridge.runs.run_folder import RunFolder
from trace_store.records import Reward
from trace_store.store import TraceStore

BEFORE = {"name": "before"}
AFTER = {"name": "after", "adapters": "newest"}


TOOLED = """

def tooled(model: BaseChatModel):
    def look_up(word: str) -> str:
        '''Looks a word up.'''
        return word

    graph = StateGraph(State)
    graph.add_node("reasoner", speaker(model))
    graph.add_node("actor", speaker(model.bind_tools([look_up])))
    graph.add_edge(START, "reasoner")
    graph.add_edge("reasoner", "actor")
    graph.add_edge("actor", END)
    return graph.compile()
"""


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    with lab_in(tmp_path) as found:
        yield found


@pytest.mark.parametrize(
    ("given", "decides"),
    [((), "correct"), (("reward",), "reward"), (("correct", "reward"), "correct"), (("other",), "correct")],
)
def test_the_reward_that_is_trained_on_decides_where_none_is_called_correct(
    lab: Lab, given: tuple[str, ...], decides: str
) -> None:
    path = lab.run / "store.duckdb"
    fill(path, [[Reward("e1", name, 1.0, "a:r", 1) for name in given]])
    with TraceStore.open(path) as store:
        assert resolve_metric(lab.config(), store).compare.metric == decides
        assert resolve_metric(lab.config(metric="other"), store).compare.metric == "other"


@pytest.mark.slow
def test_three_variants_and_another_graph_run_next_to_each_other_with_one_seed(lab: Lab) -> None:
    tables = (BEFORE, AFTER, {"name": "one", "adapters": {"actor": 1}}, lab.solo())
    report = lab.compare(*tables, tasks=5, samples_per_task=2, in_flight=1, seed=3)
    episodes = [trajectory.episode for trajectory in lab.stored()]
    assert [e.variant for e in episodes] == ["before", "after", "one", "one agent"] * 10
    groups = [episodes[at : at + 4] for at in range(0, 40, 4)]
    for group in groups:
        assert len({(e.task_id, e.sample, e.seed) for e in group}) == 1
    assert len({group[0].seed for group in groups}) == 10  # each task and sample has its own
    assert [group[0].sample for group in groups] == [0, 1] * 5
    # The seed decides the order, whatever the names of the tasks: the first five of all held-out ones, shuffled by it.
    _, heldout = split_tasks([{"id": f"t{n}"} for n in range(400)], 0.25)
    shuffled = sorted(str(task["id"]) for task in heldout)
    random.Random(3).shuffle(shuffled)
    assert [group[0].task_id for group in groups[::2]] == shuffled[:5]
    assert {e.split for e in episodes} == {"heldout"}
    # The same calls in the same order reach the server with the same seeds, whichever version answers.
    seeds = {(model.split("@")[0], number): set[int]() for model, number, _ in lab.asked}
    for model, number, seed in lab.asked:
        seeds[model.split("@")[0], number].add(seed)
    assert {len(found) for (node, _), found in seeds.items() if node in NODES} == {2}  # one for each sample
    assert [(v.name, v.adapters, v.graph) for v in report.variants] == [
        ("before", {"reasoner": 0, "actor": 0}, None),
        ("after", {"reasoner": 2, "actor": 2}, None),
        ("one", {"reasoner": 0, "actor": 1}, None),
        ("one agent", {"solo": 0}, f"{lab.apps}:solo"),
    ]
    answered = Counter(model for model, _, _ in lab.asked)
    assert answered == {"reasoner@0": 20, "actor@0": 10, "reasoner@2": 10, "actor@2": 10, "actor@1": 10, "solo@0": 10}


@pytest.mark.slow
def test_without_variants_version_0_is_compared_with_the_newest(lab: Lab) -> None:
    report = lab.compare()
    assert [(v.name, v.adapters) for v in report.variants] == [
        ("before", {"reasoner": 0, "actor": 0}),
        ("after", {"reasoner": 2, "actor": 2}),
    ]
    assert "by training's rounds" not in lab.said
    report = lab.compare(flags=VersionFlags(before_version=1, after_version=0))
    assert [v.adapters["actor"] for v in report.variants] == [1, 0]


def test_the_version_that_training_names_is_the_one_after_and_the_newest_stays_at_hand(lab: Lab) -> None:
    write_named_version(RunFolder(lab.run), NamedVersion(version=1, newest=2, reward="reward"))
    lab.answer = lambda model, number: "yes" if model == "actor@1" or number % 3 == 0 else "no"
    report = lab.compare()
    assert [(v.adapters, v.choice) for v in report.variants] == [
        ({"reasoner": 0, "actor": 0}, None),
        ({"reasoner": 1, "actor": 1}, "best by training's rounds"),
    ]
    assert "after: version 1 (best by training's rounds)" in lab.said
    assert "reasoner@1, actor@1 (best by training's rounds)" in (lab.run / "report.md").read_text()
    assert "reasoner@1, actor@1 (best by training&#39;s rounds)" in (lab.run / "report.html").read_text()
    (newest,) = lab.compare(flags=VersionFlags(after_version="newest")).candidates
    assert (newest.adapters, newest.choice) == ({"reasoner": 2, "actor": 2}, None)


def test_a_table_may_take_the_best_of_some_nodes(lab: Lab) -> None:
    write_named_version(RunFolder(lab.run), NamedVersion(version=1, newest=2, reward="reward"))
    adapters = {"reasoner": "best", "actor": "newest"}
    (after,) = lab.compare(BEFORE, {"name": "after", "adapters": adapters}).candidates
    assert after.adapters == {"reasoner": 1, "actor": 2}
    assert after.choice == "reasoner: best by training's rounds"
    assert "after: reasoner@1, actor@2 (reasoner: best by training's rounds)" in lab.said


def test_a_named_version_that_is_not_there_is_refused(lab: Lab) -> None:
    write_named_version(RunFolder(lab.run), NamedVersion(version=7, newest=7, reward="reward"))
    with pytest.raises(ServingError, match=r"node 'reasoner' has no adapter v7; published: v0, v1, v2"):
        lab.compare()


@pytest.mark.parametrize("text", ["latest", "-1", "1.5", ""])
def test_a_version_is_typed_as_a_number_or_a_word(text: str) -> None:
    assert [text_to_version("compare --after", word) for word in ("3", "best", "newest")] == [3, "best", "newest"]
    with pytest.raises(ConfigError, match=r"compare --after: .* is no version; give a number from 0, best or newest"):
        text_to_version("compare --after", text)


def test_a_graph_on_its_own_models_is_recorded_and_not_redirected(lab: Lab) -> None:
    hosted = {"name": "hosted", "app": f"{lab.apps}:hosted", "own_models": True}
    report = lab.compare(BEFORE, hosted, tasks=4)
    assert {body["model"] for body in lab.hosted.asked} == {"hosted"}
    assert len(lab.hosted.asked) == 4
    assert {body["model"] for body in lab.ours.asked} == {"reasoner@0", "actor@0"}
    runs = [trajectory for trajectory in lab.stored() if trajectory.episode.variant == "hosted"]
    assert [(t.episode.adapters, [a.adapter for a in t.actions]) for t in runs] == [({}, [None])] * 4
    assert "base" not in runs[0].episode.lineage  # what answered is not known to us
    variant = report.variants[1]
    assert (variant.adapters, variant.model, variant.graph) == ({}, "its own models", f"{lab.apps}:hosted")


def test_a_graph_that_needs_to_be_given_a_model_has_none_of_its_own(lab: Lab) -> None:
    with pytest.raises(GraphError, match=r"takes the model in 'model' and has none of its own"):
        lab.compare(BEFORE, {"name": "hosted", "own_models": True})
    assert not lab.asked


def test_another_base_model_has_a_server_and_a_version_0_of_its_own(lab: Lab) -> None:
    larger = save_model(lab.folder / "larger", 1.0)
    report = lab.compare(BEFORE, {"name": "larger", "model": str(larger), "serve": {"attach": lab.other.url}}, tasks=4)
    assert {body["model"] for body in lab.other.asked} == {"reasoner@0", "actor@0"}
    assert len(lab.other.asked) == len(lab.ours.asked) == 8
    by_variant = {t.episode.variant: t.episode.lineage["base"] for t in lab.stored()}
    assert by_variant["before"] != by_variant["larger"]
    assert report.variants[1].model == str(larger)
    own = list((lab.run / "models").glob("larger-*/adapters/actor/0/marft.json"))
    assert len(own) == 1
    assert set(lab.other.adapters) == {"reasoner@0", "actor@0"}


def test_another_base_model_may_be_a_name_of_the_hub_whose_commit_is_reported_and_resumed(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = lab.folder / "hub"
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(cache))
    put_in_cache(cache, save_model(lab.folder / "larger", 1.0), "a" * 40)
    variants = (BEFORE, {"name": "larger", "model": NAME, "serve": {"attach": lab.other.url}})
    report = lab.compare(*variants, tasks=4)
    assert len(lab.other.asked) == 8
    assert report.variants[1].model == f"{NAME}@{'a' * 40}"
    assert len(list((lab.run / "models").glob("tiny-llama-*/adapters/actor/0/marft.json"))) == 1
    put_in_cache(cache, save_model(lab.folder / "newer", 2.0), "b" * 40)  # as a later `hf download` does
    with pytest.raises(ConfigError, match="--resume"):
        lab.compare(*variants, tasks=4, resume=True)


def test_a_variant_may_have_a_limit_of_tokens_of_its_own_which_report_plan_and_resume_know(lab: Lab) -> None:
    """`yes` is four tokens of the stand-in: a limit of two leaves `ye`, which is no answer."""
    whole, cut = ({"name": name, "adapters": 2} for name in ("whole", "cut"))
    report = lab.compare(whole, cut | {"max_tokens": 2}, tasks=6)
    assert Counter(body["max_tokens"] for body in lab.ours.asked) == {256: 12, 2: 12}  # 256 is that of [sampling]
    (contrast,) = report.contrasts
    assert (contrast.mean_a, contrast.mean_b) == (1.0, 0.0)
    tokens = report.contrast("cut", "tokens")
    assert tokens is not None
    assert tokens.mean_b == 4
    assert [variant.max_tokens for variant in report.variants] == [None, 2]
    assert [describe_variant(variant) for variant in report.variants] == [
        "reasoner@2, actor@2",
        "reasoner@2, actor@2 · max_tokens: 2",
    ]
    for name in ("report.md", "report.html"):
        assert "max_tokens: 2" in (lab.run / name).read_text()
    assert Report.model_validate_json((lab.run / "report.json").read_text()) == report
    with pytest.raises(ConfigError, match=r"began with whole = .*; cut = .* with max_tokens 2, now it would be .* 3;"):
        lab.compare(whole, cut | {"max_tokens": 3}, tasks=6, resume=True)
    with pytest.raises(ConfigError, match="'whole' and 'cut' would run the same thing"):
        lab.compare(whole, cut | {"max_tokens": 256})
    with pytest.raises(ValueError, match="'hosted': max_tokens has no effect with own_models"):
        lab.compare(whole, {"name": "hosted", "app": f"{lab.apps}:hosted", "own_models": True, "max_tokens": 9})


@pytest.mark.slow
def test_mixed_teams_are_run_once_and_base_and_candidate_not_again(lab: Lab) -> None:
    report = lab.compare(tasks=6, mixed_teams="auto")
    episodes = [t.episode for t in lab.stored()]
    assert Counter(e.variant for e in episodes) == dict.fromkeys(
        ("before", "after", "before+reasoner", "before+actor"), 6
    )
    versions = {e.variant: e.adapters for e in episodes}
    assert versions["before+reasoner"] == {"reasoner": 2, "actor": 0}
    assert versions["before+actor"] == {"reasoner": 0, "actor": 2}
    assert [variant.name for variant in report.variants] == ["before", "after"]  # mixed teams are no variants
    mixed = report.mixed
    assert mixed is not None
    assert mixed.complete
    assert [(team.on, team.variant) for team in mixed.teams] == [
        ((), "before"),
        (("reasoner",), "before+reasoner"),
        (("actor",), "before+actor"),
        (("reasoner", "actor"), "after"),
    ]
    # Only the actor's version is answered differently: it makes the whole difference.
    (main,) = report.contrasts
    assert [(share.node, share.shapley) for share in mixed.shares] == [("reasoner", 0.0), ("actor", main.diff)]


def test_a_variant_that_is_a_mixed_team_already_serves_as_one(lab: Lab) -> None:
    report = lab.compare(BEFORE, AFTER, {"name": "actor", "adapters": {"actor": 2}}, tasks=4, mixed_teams="auto")
    assert Counter(t.episode.variant for t in lab.stored()) == dict.fromkeys(
        ("before", "after", "actor", "before+reasoner"), 4
    )
    assert report.mixed is not None
    assert [team.variant for team in report.mixed.teams] == ["before", "before+reasoner", "actor", "after"]


@pytest.mark.slow
def test_the_candidate_that_is_mixed_may_be_named(lab: Lab) -> None:
    one = {"name": "one", "adapters": 1}
    report = lab.compare(BEFORE, AFTER, one, tasks=4, mixed_teams="auto", mixed_candidate="one")
    assert report.mixed is not None
    assert report.mixed.candidate == "one"
    with pytest.raises(ConfigError, match="'one agent' cannot be mixed with 'before': they do not share a graph"):
        lab.compare(BEFORE, AFTER, lab.solo(), mixed_teams="auto", mixed_candidate="one agent")
    actor = {"name": "actor", "adapters": {"actor": 2}}
    with pytest.raises(ConfigError, match="'actor' cannot be mixed with 'before': they differ in one node only"):
        lab.compare(BEFORE, AFTER, actor, mixed_teams="auto", mixed_candidate="actor")


@pytest.mark.slow
def test_teams_are_mixed_under_one_limit_of_tokens_and_never_across_two(lab: Lab) -> None:
    with pytest.raises(ConfigError, match="'after' cannot be mixed with 'before': they have another max_tokens"):
        lab.compare(BEFORE, AFTER | {"max_tokens": 3}, mixed_teams="auto", mixed_candidate="after")
    report = lab.compare(BEFORE | {"max_tokens": 3}, AFTER | {"max_tokens": 3}, mixed_teams="auto", tasks=3)
    assert report.mixed is not None
    assert {body["max_tokens"] for body in lab.ours.asked} == {3}
    assert len(lab.ours.asked) == 4 * 2 * 3


@pytest.mark.slow
def test_a_variant_with_a_limit_of_its_own_is_not_promoted(lab: Lab) -> None:
    after = AFTER | {"max_tokens": 12}
    report = lab.compare(BEFORE, after, tasks=40)
    config = lab.config(BEFORE, after, tasks=40)
    with pytest.raises(ConfigError, match=r"'after' has max_tokens 12 of its own; .*: set sampling.max_tokens to it"):
        check_candidate(config, report, "correct>0", "after", Reporter())


@pytest.mark.slow
def test_an_episode_that_fails_takes_its_pair_out_and_is_counted_with_the_reason(lab: Lab) -> None:
    lab.compare(tasks=8)
    lost = lab.stored()[0].episode.task_id

    def answer(model: str, number: int) -> str:
        if model == "actor@2" and f"t{number}" == lost:
            return "crash"
        return "yes" if model.startswith("actor") else "think"

    lab.answer = answer
    report = lab.compare(tasks=8)
    (main,) = report.contrasts
    assert (main.n, main.clusters) == (7, 7)
    before, after = report.variants
    assert (before.episodes, before.unscored, before.reasons) == (8, 0, {})
    assert (after.episodes, after.unscored) == (8, 1)
    assert after.reasons == {"failed: ValueError: the node crashed": 1}
    assert "after: 1 pairs left out, because one side has no 'correct'" in lab.said


def test_a_run_that_a_limit_cuts_short_counts_by_what_that_is_worth_and_is_left_out_where_nobody_says(lab: Lab) -> None:
    """Every answer is its bytes and one token: think and yes are 10, think and the older actor's 17, over the limit."""

    def answer(model: str, number: int) -> str:
        return "think" if model.startswith("reasoner") else "yes" if model == "actor@2" else "on and on."

    lab.answer = answer
    options: dict[str, Any] = {"tasks": 4, "metric": "reward", "collect": {"max_tokens_per_episode": 12}}
    with pytest.raises(ConfigError, match="truncated: its limit of 12 sampled tokens is used up"):
        lab.compare(**options)
    report = lab.compare(**options, graph={"limit_reward": -0.5})
    (main,) = report.contrasts
    assert (main.n, main.mean_a, main.mean_b) == (4, -0.5, 1.0)
    assert [variant.unscored for variant in report.variants] == [0, 0]
    with pytest.raises(ConfigError, match=r"now it would be rewards = .*graph\.limit_reward': '-1'"):
        lab.compare(**options, graph={"limit_reward": -1.0}, resume=True)


@pytest.mark.slow
def test_another_tool_surface_is_refused_unless_it_is_allowed(lab: Lab) -> None:
    """The second graph is the same but for a tool that its actor offers."""
    lab.apps.write_text(lab.apps.read_text() + TOOLED)
    lab.ours.auto_tools = True
    tooled = {"name": "tooled", "app": f"{lab.apps}:tooled", "nodes": list(NODES)}
    with pytest.raises(ConfigError, match=r"tool surface of .*added look_up .*set compare.allow_tool_change = true"):
        lab.compare(BEFORE, tooled, tasks=8)
    report = lab.compare(BEFORE, tooled, tasks=8, allow_tool_change=True)
    assert report.setup.tool_surface_differs
    assert report.setup.tool_surface == {}  # the base offers none


# -- going on -------------------------------------------------------------------------------------------------


def test_what_is_complete_is_not_run_again(lab: Lab) -> None:
    report = lab.compare(tasks=6)
    lab.asked.clear()
    again = lab.compare(tasks=6, resume=True)
    assert lab.asked == []
    assert "model server" not in lab.said  # not even a server was needed
    assert again.contrasts == report.contrasts
    assert len(lab.stored()) == 12


def test_tasks_that_always_fail_do_not_stop_the_report_of_a_resumed_comparison(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Collector, "_wait_for_dying_server", lambda _: asyncio.sleep(0))
    newest_is_right, seen = lab.answer, list[int]()

    def answer(model: str, number: int) -> str:
        seen.extend([number] if number not in seen else [])
        return "crash" if seen.index(number) >= 2 * MIN_FAILED else newest_is_right(model, number)

    lab.answer = answer
    report = lab.compare(tasks=3 * MIN_FAILED)
    lab.asked.clear()
    again = lab.compare(tasks=3 * MIN_FAILED, resume=True)
    assert {number for _, number, _ in lab.asked} == {*seen[2 * MIN_FAILED :]}
    assert again.contrasts == report.contrasts
    assert [variant.unscored for variant in again.variants] == [MIN_FAILED, MIN_FAILED]


@pytest.mark.slow
def test_half_a_comparison_is_completed_with_the_same_seeds(lab: Lab) -> None:
    whole = lab.compare(tasks=6, in_flight=1)
    asked = list(lab.asked)
    lab.asked.clear()
    answer, calls = lab.answer, itertools.count()

    lab.answer = lambda model, number: "crash" if next(calls) >= 10 else answer(model, number)
    with pytest.raises(GraphError):
        lab.compare(tasks=60, in_flight=1)
    done = {(t.episode.variant, t.episode.task_id) for t in lab.stored("compare-2") if t.rewards}
    assert len(done) == 5
    lab.answer = answer
    lab.asked.clear()
    lab.compare(tasks=60, in_flight=1, resume=True)
    assert len(lab.asked) == 2 * (2 * 60 - 5)
    assert set(asked) <= {*lab.asked, *asked[:10]}  # a task that both plans hold has one seed
    stored = Counter((t.episode.variant, t.episode.task_id) for t in lab.stored("compare-2") if t.rewards)
    assert set(stored.values()) == {1}
    assert len(stored) == 120
    assert whole.setup.tasks == 6


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"flags": VersionFlags(after_version=1)},
            "before = {'reasoner': 0, 'actor': 0}; after = {'reasoner': 1, 'actor': 1}; start",
        ),
        ({"tasks": 7}, "began with tasks = 6, now it would be tasks = 7"),
        ({"samples_per_task": 2}, "began with samples_per_task = 1, now it would be samples_per_task = 2"),
        ({"temperature": 0.3}, "began with temperature = 1.0, now it would be temperature = 0.3"),
        ({"metric": "reward"}, "began with metric = correct, now it would be metric = reward"),
        ({"seed": 1}, "began with other tasks, now it would be other tasks"),
        ({"mixed_teams": "auto"}, "before+reasoner = "),
        ({"stop_early": True}, "began with looks = [], now it would be looks = [2, 3, 5, 6]"),
    ],
    ids=lambda value: str(next(iter(value))) if isinstance(value, dict) else "",
)
def test_another_plan_is_not_gone_on_with(lab: Lab, changes: dict[str, Any], message: str) -> None:
    lab.compare(tasks=6)
    lab.asked.clear()
    with pytest.raises(ConfigError) as caught:
        lab.compare(**{"tasks": 6, "resume": True} | changes)
    assert message in str(caught.value)
    assert str(caught.value).endswith("start a new comparison without --resume")
    assert not lab.asked


def test_nothing_is_resumed_where_nothing_began(lab: Lab) -> None:
    with pytest.raises(ConfigError, match=r"nothing to resume in .*; leave out --resume"):
        lab.compare(resume=True)


# -- the command line -----------------------------------------------------------------------------------------


def command(lab: Lab, *flags: str) -> int:
    """`marft-bridge compare` on the lab's configuration."""
    config = lab.config(tasks=60)
    text = f"""
run = "{lab.run}"
[graph]
app = "{config.graph.app}"
nodes = ["reasoner", "actor"]
tasks = "{config.graph.tasks}"
task_to_input = "{config.graph.task_to_input}"
reward = "{config.graph.reward}"
[model]
path = "{lab.model}"
[serve]
attach = "{lab.ours.url}"
[compare]
tasks = 60
mixed_teams = "off"
kl_actions = 0
"""
    path = lab.folder / "bridge.toml"
    path.write_text(text)
    return cli.run(["compare", "--config", str(path), *flags])


@pytest.mark.slow
def test_the_exit_code_says_whether_the_condition_holds(lab: Lab, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(lab) == 0
    assert command(lab, "--resume", "--promote-if", "correct>0") == 0
    assert "may be promoted" in capsys.readouterr().out
    assert command(lab, "--resume", "--promote-if", "tokens<0.5x") == 3
    assert command(lab, "--resume", "--promote-if", "correkt>0") == 2
    assert "did you mean 'correct'?" in capsys.readouterr().err
    before = len(lab.asked)
    assert command(lab, "--promote-if", "correct>>0") == 2  # before anything runs
    assert command(lab, "--promote-if", "correct>0", "--candidate", "befor") == 2
    assert "compare --promote-if: name the candidate with --candidate; one of: after" in capsys.readouterr().err
    assert command(lab, "--candidate", "after") == 2
    assert len(lab.asked) == before
    Report.model_validate_json((lab.run / "report.json").read_text())
    assert (lab.run / "report.html").exists()
    assert (lab.run / "report.md").exists()
