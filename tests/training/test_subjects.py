"""Owns: how an episode says whose data it holds, and what `train.traces` brings in.

- A run's metadata names the subject, whoever attached the recorder; every span of the run carries it, and no other's.
- A command takes it from the field of the task that the configuration names; a task without it is refused by name.
- A run that dies before its root span leaves spans that can be found by subject.
- Episodes that lie elsewhere are learned from once, never those of held-out tasks or of another base model.
"""

from __future__ import annotations

import asyncio
import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from support.duo_rig import COMMON, TASKS, route_of
from support.growth_rig import fill, trace_id
from support.sample_spans import START, chain
from support.stand_in_backend import StandInBackend
from support.two_node_graph import fake_model, graph_of

import marft_bridge
from graphs import math_duo
from marft_bridge.common.errors import ConfigError, GraphError
from marft_bridge.common.progress import Reporter
from marft_bridge.config.bridge import GraphOptions
from marft_bridge.model_calls.scripted_model import ScriptedPolicy
from marft_bridge.recording.recorder import Recorder
from marft_bridge.recording.wrap import wrap
from marft_bridge.rollouts.app import App, options_to_app
from marft_bridge.rollouts.collector import Collector
from marft_bridge.rollouts.episode_plan import EpisodeRequest
from marft_bridge.training.external_traces import config_to_names, traces_to_episodes
from trace_store import conventions as c
from trace_store.erasure import subject_to_traces
from trace_store.journal import Journal, read_segment
from trace_store.parquet import store_to_parquet
from trace_store.records import RunRow, SpanRow
from trace_store.store import TraceStore


def spans_in(folder: Path) -> list[SpanRow]:
    records = [record for path in folder.glob("*.segment") for record in read_segment(path)[0]]
    return [record for record in records if isinstance(record, SpanRow)]


def subjects(folder: Path) -> dict[str, set[Any]]:
    """Trace -> what its spans say of the subject."""
    found: dict[str, set[Any]] = {}
    for span in spans_in(folder):
        found.setdefault(span.trace_id, set()).add(span.attributes.get(c.SUBJECT_ID))
    return found


def about(subject: Any) -> Any:
    return {"metadata": {"marft_subject_id": subject}}


def test_metadata_names_the_subject_on_every_span_of_its_run(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j")
    graph = wrap(graph_of(fake_model()), Recorder(journal))

    async def at_once() -> None:
        await asyncio.gather(*(graph.ainvoke({"text": "x"}, about(f"user-{n}")) for n in range(4)))

    graph.invoke({"text": "x"})
    graph.invoke({"text": "x"}, about(17))
    asyncio.run(at_once())
    journal.close()
    found = subjects(tmp_path / "j")
    assert all(len(said) == 1 for said in found.values()), "all spans of a trace say the same"
    assert sorted(str(next(iter(said))) for said in found.values()) == ["17", "None", *(f"user-{n}" for n in range(4))]


def test_metadata_names_the_subject_of_an_instrumented_process(tmp_path: Path) -> None:
    marft_bridge.instrument(tmp_path / "s.duckdb")
    try:
        graph_of(fake_model()).invoke({"text": "x"}, about("ann"))
    finally:
        marft_bridge.uninstrument()
    with TraceStore.open(tmp_path / "s.duckdb") as store:
        store.take_in()
        assert [episode.subject_id for episode in store.episodes()] == ["ann"]


def test_a_run_whose_root_never_came_is_found_by_subject(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j")
    wrap(graph_of(fake_model()), Recorder(journal)).invoke({"text": "x"}, about("ann"))
    journal.close()
    torn = [span for span in spans_in(tmp_path / "j") if span.parent_span_id is not None]
    fill(tmp_path / "s.duckdb", [torn])
    with TraceStore.open(tmp_path / "s.duckdb") as store:
        assert store.counts()["waiting"] == 1
        assert subject_to_traces(store, "ann").trace_ids == (torn[0].trace_id,)


def test_a_command_takes_the_subject_from_the_task(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "s.duckdb.journal")
    graph = wrap(math_duo.build(ScriptedPolicy()), Recorder(journal))
    app = App(
        *(math_duo.build, TASKS, TASKS, math_duo.task_to_input, lambda task, state: {"r": 1.0}, "test:reward"),
        subject_field="asked_by",
    )
    tasks = [task | {"asked_by": person} for task, person in zip(TASKS, ["ann", 17, None], strict=False)]
    requests = [EpisodeRequest(task=task, sample=0, seed=1, **COMMON) for task in tasks]
    collector = Collector(graph=graph, app=app, backend=StandInBackend(route_of))
    asyncio.run(collector.requests_to_episodes(requests))
    journal.close()
    with TraceStore.open(tmp_path / "s.duckdb") as store:
        store.take_in()
        assert {episode.task_id: episode.subject_id for episode in store.episodes()} == {
            "t0": "ann",
            "t1": "17",
            "t2": None,
        }


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ({}, "lacks 'asked_by'"),
        ({"asked_by": ["ann"]}, "is a list; name a field that holds a text"),
        ({"asked_by": True}, "is a bool"),
    ],
)
def test_a_task_that_names_nobody_is_refused_before_anything_runs(
    tmp_path: Path, task: dict[str, Any], message: str
) -> None:
    lines = [json.dumps({"id": str(n), "question": "?", "answer": 1, "asked_by": None}) for n in range(20)]
    (tmp_path / "tasks.jsonl").write_text("\n".join([*lines, json.dumps({"id": "x", "question": "?"} | task)]))
    options = GraphOptions(
        app="graphs.math_duo:build",
        nodes=("actor",),
        tasks=str(tmp_path / "tasks.jsonl"),
        reward="graphs.math_duo:reward",
        subject_field="asked_by",
    )
    with pytest.raises(GraphError, match=message):
        options_to_app(options)


def exported(folder: Path, traces: list[list[SpanRow]], model: str | None = None, **others: Any) -> str:
    """A folder of Parquet files with these traces, recorded with a model, and with `others` beside it."""
    fill(folder.with_suffix(".duckdb"), traces)
    with TraceStore.open(folder.with_suffix(".duckdb")) as store:
        if model is not None:
            store.put_run(RunRow("run", "collect", 1, {"model": {"path": model}, "models": others}))
        store_to_parquet(store, folder)
    return str(folder)


def learned(places: list[str], known: set[str] = frozenset(), **of_node: str) -> list[str]:  # type: ignore[assignment]
    reporter = Reporter(Console(file=io.StringIO()))
    found = traces_to_episodes(places, known, {"": "tiny", **of_node}, reporter)
    return [trajectory.episode.episode_id.lstrip("0") for trajectory in found]


def test_episodes_that_lie_elsewhere_are_learned_from_once_and_never_held_out_ones(tmp_path: Path) -> None:
    first = exported(
        tmp_path / "first",
        [
            chain("a", START + 2).spans(),
            chain("b", START + 1).spans(SPLIT="live"),
            chain("c").spans(SPLIT="heldout"),
            chain("e", START + 1).spans(),
        ],
        "models/tiny",
    )
    second = exported(tmp_path / "second", [chain("a", START + 2).spans(), chain("f").spans()])
    assert learned([first, second], known={trace_id("e")}) == ["a", "b", "f"]
    assert learned([]) == []


def test_episodes_of_another_model_or_none_at_all_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="runs of the model other, not tiny"):
        learned([exported(tmp_path / "other", [chain("a").spans()], "models/other")])
    with pytest.raises(ConfigError, match="no episode of the split train or live"):
        learned([exported(tmp_path / "held", [chain("a").spans(SPLIT="heldout")])])


def test_every_node_must_have_run_on_the_model_that_it_runs_on_here(tmp_path: Path) -> None:
    larger = {"big": {"path": "models/large", "nodes": ["actor"]}}
    place = exported(tmp_path / "two", [chain("a").spans()], "models/tiny", **larger)
    assert config_to_names({"model": {"path": "models/tiny"}, "models": larger}) == {"": "tiny", "actor": "large"}
    assert learned([place], actor="large") == ["a"]
    with pytest.raises(ConfigError, match=r"runs of the model large for node 'actor', not tiny; its token ids mean"):
        learned([place])
    with pytest.raises(ConfigError, match=r"runs of the model tiny for node 'critic', not large"):
        learned([place], actor="large", critic="large")
