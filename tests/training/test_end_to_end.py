"""Owns: the main job on real parts: one real vLLM, real spans, real DuckDB, real updates.

(a) Every sampled token id and log-prob in the store is what the engine answered, and so are the prompt ids; also
    when the answer is streamed.
(b) The trainer's log-probs of those ids are the engine's, within TOLERANCE.
(c) A published update is what is served: the engine's log-probs moved, and are the trainer's.
(d) collect and train killed with SIGKILL go on with --resume and lose no finished episode.
(e) The three commands end in a report.
(f) Older episodes join a round as far as the share allows; the server is seen to answer with the newest version.

TOLERANCE: with an engine in float32 the two differ by arithmetic order only: 1e-3 nats per token, where the measured
largest difference is 1e-4. An update of one round moves the mean log-prob of a token by hundredths, so the check
in (c) can tell a served adapter from one that is not.
"""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from conftest import RunningServer
from support.commands import start_command
from support.paths import ROOT
from support.stand_in_backend import StandInBackend
from support.trainer_options import trainer_options

from graphs import math_duo
from marft_bridge.comparison.records import Report
from marft_bridge.config.bridge import CollectOptions
from marft_bridge.model_calls.node_chat_model import NodeChat
from marft_bridge.model_calls.routing import Route
from marft_bridge.recording.recorder import Recorder
from marft_bridge.recording.wrap import wrap
from marft_bridge.rollouts.app import App
from marft_bridge.rollouts.collector import Collector
from marft_bridge.rollouts.episode_plan import plan_episodes
from marft_bridge.runs.run_folder import RunFolder, read_metrics
from marft_bridge.serving.adapter_registry import AdapterRegistry, publish
from marft_bridge.serving.zero_adapter import write_zero_adapter
from trace_store.journal import Journal, read_segment, record_to_rewards
from trace_store.records import Action, Trajectory
from trace_store.store import TraceStore
from trainers.config import TrainerOptions
from trainers.marft import MarftTrainer

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

NODES = ("reasoner", "actor")
TOLERANCE = 1e-3
TEMPERATURE = 0.8
MAX_TOKENS = 16


def answer_length(_task: dict[str, Any], result: dict[str, Any]) -> float:
    """A reward that differs between episodes from the first one on; being right is too rare for two dozen."""
    return len(result["answer"]) / 100


class Rig:
    """The duo on the session's server, recorded, and every chat answer as the engine sent it.

    The answers are kept apart from what our code makes of them.
    """

    def __init__(self, server: RunningServer, folder: Path, **chat: Any) -> None:
        self.answers: dict[str, dict[str, Any]] = {}
        self.store = folder / "store.duckdb"
        hooks = {} if chat.get("streaming") else {"response": [self._keep]}
        self._client = httpx.AsyncClient(event_hooks=hooks, timeout=120, trust_env=False)
        endpoint = server.endpoint
        model = NodeChat(
            model=endpoint.model,
            base_url=endpoint.base_url,
            api_key=endpoint.api_key,
            http_async_client=self._client,
            **chat,
        )
        self.graph = wrap(math_duo.build(model), Recorder(Journal(folder / "store.duckdb.journal")))

    def __enter__(self) -> Rig:
        self.loop = asyncio.Runner()
        return self

    def __exit__(self, *_: object) -> None:
        self.graph.unwrap()
        self.graph.recorder.journal.close()
        self.loop.run(self._client.aclose())
        self.loop.close()

    async def _keep(self, response: httpx.Response) -> None:
        body = json.loads(await response.aread())
        self.answers[body["id"]] = body

    def episodes(self, run_id: str) -> list[Trajectory]:
        with TraceStore.open(self.store) as store:
            store.take_in()
            return list(store.trajectories(run_ids=[run_id]))

    def run(self, versions: Sequence[int], count: int, run_id: str) -> list[Trajectory]:
        """`count` episodes that take turns between the versions."""

        def route(node: str, at: int, _: float | None) -> Route:
            name = AdapterRegistry.served_name(node, at)
            return Route(name, name, at, TEMPERATURE, MAX_TOKENS)

        app = App(math_duo.build, [], [], math_duo.task_to_input, answer_length, "answer_length")
        plan = plan_episodes(list(math_duo.tasks()), count, 1, seed=1, run_id=run_id, split="train", adapters={})
        requests = [
            replace(request, adapters=dict.fromkeys(NODES, versions[number % len(versions)]))
            for number, request in enumerate(plan)
        ]
        options = CollectOptions(in_flight=16, timeout_s=120.0)
        collector = Collector(graph=self.graph, app=app, backend=StandInBackend(route), options=options)
        self.loop.run(collector.requests_to_episodes(requests))
        return self.episodes(run_id)


def actions_of(episodes: Sequence[Trajectory], node: str) -> list[Action]:
    return [action for episode in episodes for action in episode.actions if action.node == node]


def differences(trainer: MarftTrainer, node: str, actions: Sequence[Action]) -> list[float]:
    """Engine minus trainer, per sampled token."""
    scored = trainer.policies.logprobs_of(node, actions)
    return [
        engine - ours
        for action, row in zip(actions, scored, strict=True)
        for engine, ours in zip(action.logprobs or (), row, strict=True)
    ]


def mean_size(values: Sequence[float]) -> float:
    return sum(map(abs, values)) / len(values)


def test_tokens_are_the_engines_and_what_is_trained_is_what_is_served(
    vllm_server: RunningServer, tmp_path: Path
) -> None:
    options = trainer_options(lr=3e-3, minibatch_actions=10_000, tokens_per_microbatch=1024)
    trainer = MarftTrainer(options, vllm_server.model_dir, NODES, seed=0)
    untrained = MarftTrainer(options, vllm_server.model_dir, NODES, seed=0)
    null, version = 500, 501  # of this test's own: the session's server keeps what other tests loaded
    registry = AdapterRegistry(vllm_server.adapter_root, trainer.policies.model.base_sha256)
    for node in NODES:
        write_zero_adapter(registry.new_folder(node, null), vllm_server.model_dir, options.lora.target_modules)
        registry.register(node, null, None, {})
        publish(vllm_server.server, registry, node, null)
    with Rig(vllm_server, tmp_path) as rig:
        episodes = rig.run([null], 12, "first")
        assert len(episodes) == 12
        assert_store_holds_what_was_on_the_wire(rig, episodes)  # (a)
        for node in NODES:  # (b)
            assert max(map(abs, differences(trainer, node, actions_of(episodes, node)))) < TOLERANCE

        # (c) Update, publish, and sample from the new version.
        assert len({e.team_reward("reward") for e in episodes}) > 1
        metrics = trainer.update(episodes)
        for node in NODES:
            assert trainer.policies.adapter_norm(node) > 0
            assert metrics["agents"][node]["steps"] >= 1
            trainer.policies.save_adapter(node, registry.new_folder(node, version))
            registry.register(node, version, null, {})
            publish(vllm_server.server, registry, node, version)
        both = rig.run([null, version], 24, "second")  # side by side in the engine's batches, as compare does
    for node in NODES:
        before = [action for action in actions_of(both, node) if action.adapter_version == null]
        fresh = [action for action in actions_of(both, node) if action.adapter_version == version]
        assert len(before) == len(fresh) == 12
        assert {(action.adapter, action.model) for action in fresh} == {(f"{node}@{version}",) * 2}
        assert max(map(abs, differences(untrained, node, before))) < TOLERANCE
        assert max(map(abs, differences(trainer, node, fresh))) < TOLERANCE
        # Without the update, what the engine sampled does not fit: the adapter is really served, and it moved.
        assert mean_size(differences(untrained, node, fresh)) > 10 * TOLERANCE


def assert_store_holds_what_was_on_the_wire(rig: Rig, episodes: Sequence[Trajectory]) -> None:
    """The stored actions against the engine's answers, found by the engine's own response ids."""
    with TraceStore.open(rig.store) as store:
        spans = [span for e in episodes for span in store.spans(e.episode.episode_id) if span.operation == "chat"]
    response_ids = {span.span_id: span.attributes["gen_ai.response.id"] for span in spans}
    actions = [action for episode in episodes for action in episode.actions]
    assert len(actions) == len(rig.answers) == 2 * len(episodes)
    for action in actions:
        answer = rig.answers[response_ids[action.action_id]]
        choice = answer["choices"][0]
        assert action.prompt_ids == tuple(answer["prompt_token_ids"])
        assert action.sampled_ids == tuple(choice["token_ids"])
        assert action.logprobs == tuple(entry["logprob"] for entry in choice["logprobs"]["content"])
        assert (action.trainable, action.completion) == (True, choice["message"]["content"])
        assert len(action.sampled_ids) == answer["usage"]["completion_tokens"]


@pytest.mark.slow
def test_a_streamed_answer_has_the_same_exact_tokens(vllm_server: RunningServer, tmp_path: Path) -> None:
    with Rig(vllm_server, tmp_path, streaming=True, max_tokens=MAX_TOKENS, temperature=TEMPERATURE) as rig:
        rig.loop.run(rig.graph.ainvoke({"question": "What is 2 + 3?"}))
        with TraceStore.open(rig.store) as store:
            store.take_in()
            (episode,) = store.trajectories()
    trainer = MarftTrainer(TrainerOptions(), vllm_server.model_dir, NODES, seed=0)
    for action in episode.actions:
        assert action.trainable, action.untrainable_reason
        assert action.temperature == TEMPERATURE  # outside a command the model's own setting holds
        assert max(map(abs, differences(trainer, action.node, [action]))) < TOLERANCE


# -- the commands, as a user runs them -------------------------------------------------------------------------


class Shell:
    """Runs `marft-bridge` on one run folder, against the session's server."""

    def __init__(self, announce: Callable[[RunFolder], None], folder: Path) -> None:
        self.run = RunFolder(folder / "run")
        self.run.create()
        announce(self.run)
        text = (ROOT / "examples/math_duo/bridge.toml").read_text()
        text = text.replace("evaluation_episodes = 64", "evaluation_episodes = 0")
        self.config = folder / "bridge.toml"
        self.config.write_text(text)

    def change(self, *changes: tuple[str, str]) -> None:
        """Replaces text of the configuration."""
        text = self.config.read_text()
        for old, new in changes:
            assert old in text
            text = text.replace(old, new)
        self.config.write_text(text)

    def start(self, command: str, *flags: str) -> subprocess.Popen[str]:
        return start_command(command, self.config, self.run.path, *flags)

    def finish(self, command: str, *flags: str) -> str:
        process = self.start(command, *flags)
        output, _ = process.communicate(timeout=600)
        assert process.returncode == 0, output
        return output

    def acknowledged(self) -> set[str]:
        """Episodes whose reward has reached the journal: what a killed command had finished."""
        found = set()
        for path in self.run.journal.glob("*.segment"):
            with suppress(FileNotFoundError):  # a segment that was taken in is deleted
                found |= {r.episode_id for record in read_segment(path)[0] for r in record_to_rewards(record)}
        return found

    def signal_after(
        self, process: subprocess.Popen[str], episodes: int, number: signal.Signals, known: set[str]
    ) -> tuple[set[str], str]:
        """Sends the signal once that many episodes beyond `known` are acknowledged; returns those, and the output."""
        finished: set[str] = set()
        while len(finished) < episodes:
            assert process.poll() is None, process.communicate()[0]
            time.sleep(0.02)
            finished = self.acknowledged() - known
        process.send_signal(number)
        return finished, process.communicate(timeout=60)[0]

    def stored(self, run_id: str) -> list[Trajectory]:
        with TraceStore.open(self.run.store) as store:
            return list(store.trajectories(run_ids=[run_id]))


def rewarded_ids(episodes: Sequence[Trajectory]) -> set[str]:
    return {e.episode.episode_id for e in episodes if e.team_reward("reward") is not None}


@pytest.mark.slow
def test_killed_commands_resume_without_loss_and_end_in_a_report(
    announce: Callable[[RunFolder], None], tmp_path: Path
) -> None:
    shell = Shell(announce, tmp_path)
    collect = ("--episodes", "16", "--in-flight", "4")

    # (d) collect, killed in the middle.
    finished, _ = shell.signal_after(shell.start("collect", *collect), 4, signal.SIGKILL, set())
    assert 4 <= len(finished) < 16
    # Ctrl-C on the resumed run: a clean stop with the way on, and resumed again.
    process = shell.start("collect", *collect, "--resume")
    more, output = shell.signal_after(process, 3, signal.SIGINT, finished)
    finished |= more
    assert process.returncode == 130
    assert "stopped; what was finished is kept; go on with: marft-bridge collect" in output
    assert "Traceback" not in output
    assert "there, " in shell.finish("collect", *collect, "--resume")
    collected = shell.stored("collect")
    assert finished <= rewarded_ids(collected)
    # Each planned episode once. One killed between its end and its reward was not finished, and was run again.
    whole = [(e.episode.task_id, e.episode.sample) for e in collected if e.team_reward("reward") is not None]
    assert len(whole) == len(set(whole)) == 16

    # (d) train, killed in its first round of rollouts: after the offline phase, before the first update.
    shell.change(
        ("episodes_per_round = 64", 'episodes_per_round = 8\nloggers = ["tensorboard"]'),
        ('proximal = "engine"', 'proximal = "recomputed"'),
        ('mismatch = "none"', 'mismatch = "truncate"\n\n[train.trainer.replay]\nshare = 0.3'),
    )
    known = {e.episode.episode_id for e in collected}
    finished, _ = shell.signal_after(
        shell.start("train", "--rounds", "2", "--without-signal"), 4, signal.SIGKILL, known
    )
    assert not any(line["round"] == 1 for line in read_metrics(shell.run.metrics))
    output = shell.finish("train", "--rounds", "2", "--resume")
    assert "resuming after round 0 of 2" in output
    trained = shell.stored("train")
    assert finished <= rewarded_ids(trained)
    for round_number in (1, 2):
        of_round = [e for e in trained if e.episode.round == round_number and e.team_reward("reward") is not None]
        assert len({e.episode.task_id for e in of_round}) == len(of_round) == 8
        # On-policy: every action of round r came from version r.
        assert {a.adapter for e in of_round for a in e.actions} == {f"{node}@{round_number}" for node in NODES}
    lines = read_metrics(shell.run.metrics)
    assert [(line["phase"], line["round"]) for line in lines] == [("offline", 0), ("online", 1), ("online", 2)]
    # (f) 3 older episodes beside 8 fresh ones are not more than 0.3 of 11; the first round draws on those of collect.
    assert [line["replayed"] for line in lines[1:]] == [3, 3]
    assert [line["served"] for line in lines[1:]] == [dict.fromkeys(NODES, True)] * 2
    assert {path.stat().st_mode & 0o777 for path in shell.run.path.rglob("events.out.tfevents*")} == {0o600}
    with TraceStore.open(shell.run.store) as store:
        lineages = [set(e.lineage) for e in store.episodes()]
        assert lineages == [{"base", "tokenizer", "template"}] * len(lineages)
        assert [(row.node, row.version, row.parent) for row in store.adapters()] == [
            *(("actor", 1, 0), ("actor", 2, 1), ("actor", 3, 2)),
            *(("reasoner", 1, 0), ("reasoner", 2, 1), ("reasoner", 3, 2)),
        ]

    # (e) compare, and what it leaves behind.
    output = shell.finish("compare", "--tasks", "10")
    assert "report.html" in output
    report = Report.model_validate_json((shell.run.path / "report.json").read_text())
    assert [(row.variant, row.clusters, row.n) for row in report.contrasts] == [("after", 10, 20)]
    assert [variant.adapters for variant in report.variants] == [dict.fromkeys(NODES, 0), dict.fromkeys(NODES, 3)]
    assert [point.round for point in report.learning_curve] == [0, 1, 2]
    assert report.mixed is not None
    assert [team.variant for team in report.mixed.teams] == ["before", "before+reasoner", "before+actor", "after"]
    assert {team.n for team in report.mixed.teams} == {10}
    for sides in report.nodes.values():
        assert (sides["before"].kl_to_base, sides["before"].kl_actions) == (0.0, 20)
        assert (sides["after"].kl_to_base or 0.0) > 0.0
        assert sides["after"].kl_actions == 20
    compared = [e.episode for e in shell.stored("compare-1")]
    ran = [{(e.task_id, e.seed) for e in compared if e.variant == side} for side in ("before", "after")]
    assert ran[0] == ran[1]
    assert {e.split for e in compared} == {"heldout"}
    assert {task for task, _ in ran[0]}.isdisjoint(e.episode.task_id for e in [*collected, *trained])
    assert "compare-1 after: 20 episodes terminated" in shell.finish("status")


# -- rollouts beside the update --------------------------------------------------------------------------------

AHEAD = """
from langgraph.graph import END, START, StateGraph

from graphs.math_duo import DuoState


def build(model):
    async def drafter(state):
        return {"guidance": str((await model.ainvoke(state["question"])).text)}

    async def closer(state):
        return {"answer": str((await model.ainvoke(f"{state['question']} {state['guidance']}")).text)}

    graph = StateGraph(DuoState)
    graph.add_node("drafter", drafter)
    graph.add_node("closer", closer)
    graph.add_edge(START, "drafter")
    graph.add_edge("drafter", "closer")
    graph.add_edge("closer", END)
    return graph.compile()


def reward(task, result):
    return {"correct": float(len(result["answer"]) > 20), "reward": len(result["answer"]) / 100}
"""


@pytest.mark.slow
def test_rounds_are_sampled_while_the_trainer_updates_and_are_never_older_than_allowed(
    announce: Callable[[RunFolder], None], tmp_path: Path
) -> None:
    """(g) Names of nodes are this test's own: the server's cache goes by the names of adapters."""
    nodes = ("drafter", "closer")
    (tmp_path / "ahead_app.py").write_text(AHEAD)
    shell = Shell(announce, tmp_path)
    shell.change(
        ('app = "graphs.math_duo:build"', f'app = "{tmp_path}/ahead_app.py:build"'),
        ('nodes = ["reasoner", "actor"]', 'nodes = ["drafter", "closer"]'),
        ('reward = "graphs.math_duo:reward"', f'reward = "{tmp_path}/ahead_app.py:reward"'),
        ("max_loras = 4", "max_loras = 6"),
        ("episodes_per_round = 64", "episodes_per_round = 8\nmax_staleness = 1"),
        ('proximal = "engine"', 'proximal = "recomputed"'),
        ('mismatch = "none"', 'mismatch = "truncate"'),
    )
    shell.finish("collect", "--episodes", "8")
    shell.finish("train", "--rounds", "4", "--without-signal")
    trained = shell.stored("train")
    lines = read_metrics(shell.run.metrics)[1:]
    for number, line in enumerate(lines, start=1):
        of_round = [e for e in trained if e.episode.round == number and e.team_reward("reward") is not None]
        assert len(of_round) == 8
        behind = {number - (a.adapter_version or 0) for e in of_round for a in e.actions}
        assert behind == ({0} if number == 1 else {1})  # sampled by the version before the update that it ran beside
        assert line["staleness"] == {"mean": max(behind), "max": max(behind)}
        assert line["served"] == dict.fromkeys(nodes, True)
    # The rollouts of a round began before the update that they ran beside had made its version.
    with TraceStore.open(shell.run.store) as store:
        made = {(row.node, row.version): row.created_ns for row in store.adapters()}
    for number in (2, 3, 4):
        began = min(e.episode.started_ns for e in trained if e.episode.round == number)
        assert began < min(made[node, number] for node in nodes)
