"""Owns: the runs of every app of the suite can be forked at their last call, threads, resumes and sub-agents included.

The provider answers as it did, so a fork has to end as its parent did: the same prompts, the same D, the same state.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from apps.by_hand import FOLDER, SUITE
from apps.test_suite import IS_ASYNC, module_of, provider
from support.edge_rig import edges_of, recorded_traces
from support.replay_rig import record_runs

from marft_bridge.forks.fork_plan import ForkChange, plan_forks
from marft_bridge.forks.given_tools import given_tools
from marft_bridge.forks.recorded_prefix import run_to_prefix
from marft_bridge.forks.thread_start import run_to_start
from marft_bridge.model_calls.clients.hooks import redirected_clients
from marft_bridge.model_calls.redirect import redirected_models
from marft_bridge.recording.recorder import Recorder
from marft_bridge.recording.wrap import wrap
from marft_bridge.replay.earlier_runs import EarlierRun, RunWithEarlier
from marft_bridge.replay.private_memory import PrivateMemory, private_memory
from marft_bridge.replay.recorded_run import RecordedRun, spans_to_run
from marft_bridge.replay.replayed_run import to_comparable_output
from marft_bridge.rollouts.app import App
from marft_bridge.rollouts.collector import OWN_MODELS, Collector
from trace_store.journal import Journal

FAST = ("swarm", "memory_store", "human_review")  # a turn, what a store holds, and a resume


def to_forked(runs: list[RecordedRun]) -> RunWithEarlier:
    """The last of the runs of a thread, as `load_with_earlier` gives it."""
    has_links = runs[-1].trajectory.episode.begins is not None
    branch = runs[0 if has_links else -1].episode_id
    earlier = [
        EarlierRun(run.episode_id, run.root.start_ns, runs[0].episode_id, is_needed=has_links) for run in runs[:-1]
    ]
    return RunWithEarlier(runs[-1], earlier, branch)


def fork_last_call(graph: Any, runs: list[RecordedRun], folder: Path, context: Any) -> RecordedRun:
    """A fork of the last of these runs at its last call, on the app's own models."""
    parent, recorder = runs[-1], Recorder(Journal(folder / "journal"))
    recorded = wrap(graph, recorder)
    app = App(lambda _: graph, [], [], dict, lambda task, state: 1.0, "reward")
    prefix = run_to_prefix(parent, parent.calls[-1])
    (request,) = plan_forks(parent, prefix, ForkChange(), run_id="fork-1", samples=1, seed=0)
    settings = {} if context is None else {"context": context}
    with asyncio.Runner() as runner, redirected_models(), redirected_clients(), given_tools():
        start = run_to_start(
            recorded,
            to_forked(runs),
            prefix.forked,
            samples=1,
            tools="recorded",
            load={run.episode_id: run for run in runs}.__getitem__,
            settings=settings,
            runner=runner,
        )
        request = replace(request, start=start, beginning=start.prefix_to_rest(prefix))
        with private_memory(PrivateMemory()):
            collector = Collector(graph=recorded, app=app, backend=OWN_MODELS)
            tally = runner.run(collector.requests_to_episodes([request]))
    assert tally.outcomes["failed"] == 0, tally.failures
    (spans,) = recorded_traces(recorder)
    recorded.unwrap()
    recorder.journal.close()
    return spans_to_run(spans)


@pytest.mark.filterwarnings("ignore::langgraph.warnings.LangGraphDeprecatedSinceV10")
@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in SUITE])
def test_a_fork_of_every_app_at_its_last_call_ends_as_its_parent_did(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "hosted")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    app, text = SUITE[name], (FOLDER / f"{name}.py").read_text()
    with provider(app, monkeypatch) as server, module_of(text, tmp_path / f"app_{name}.py") as module:
        runs = record_runs(
            module.graph,
            [module.tasks[0], *app.later_inputs],
            tmp_path / "parent",
            is_async=name in IS_ASYNC,
            config={"configurable": {"thread_id": "t"}},
            context=app.context or app.default_context,
        )
        server.asked.clear()
        fork = fork_last_call(module.graph, runs, tmp_path, app.context or app.default_context)
    parent = runs[-1]
    assert len(server.asked) == 1
    assert sorted(str(call.prompt) for call in fork.calls) == sorted(str(call.prompt) for call in parent.calls)
    assert edges_of(fork.trajectory) == edges_of(parent.trajectory)
    assert to_comparable_output(fork.output) == to_comparable_output(parent.output)
