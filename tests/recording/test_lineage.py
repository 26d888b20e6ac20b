"""Owns: an episode says what its prompts and samples depend on, from the recorder to the store and out of it.

- Base, tokenizer and template are those of the served model; a template is its text, wherever that stands.
- Tools are those that the node's calls offered, as the server saw them; which call offered which makes no difference.
- What an engine recorded passes the gate of its own lineage, and not that of another.
- What is not known is absent, never a hash of nothing; hashes are kept when content is not captured or redacted.
- Lineage that no recorder writes is refused with the trace.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, TypedDict

import numpy as np
import pytest
from langchain.agents import create_agent
from langchain_core.tools import tool
from langchain_core.utils.function_calling import convert_to_openai_tool
from langgraph.graph import START, StateGraph
from langgraph.graph.message import add_messages
from rich.console import Console
from safetensors.numpy import save_file
from support.duo_rig import COMMON, TASKS, Rig
from support.fake_vllm import FakeVllm, running
from support.growth_rig import LINEAGE, fill, trace_id
from support.sample_spans import chain
from support.sessions import session_of

from marft_bridge.common.errors import ConfigError
from marft_bridge.common.progress import Reporter
from marft_bridge.config.bridge import BridgeConfig
from marft_bridge.config.record import RecordOptions
from marft_bridge.model_calls.scripted_model import ScriptedPolicy
from marft_bridge.recording.recorder import Recorder
from marft_bridge.recording.tool_lineage import request_to_tools, tools_to_lineage, tools_to_single_lineage
from marft_bridge.recording.wrap import wrap
from marft_bridge.rollouts.app import App
from marft_bridge.rollouts.episode_plan import plan_episodes
from marft_bridge.runs.run_folder import RunFolder
from marft_bridge.serving.model_lineage import model_to_lineage
from trace_store.assemble import Malformed, spans_to_trajectory
from trace_store.journal import Journal
from trace_store.parquet import parquet_to_store, store_to_parquet
from trace_store.readers import folder_to_reader
from trace_store.store import TraceStore
from trainers.common.files import weights_to_sha256
from trainers.config import ReplayOptions
from trainers.offline.replay_gate import Gated, gate_episodes

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}\n"


def sha256(content: str | bytes) -> str:
    return hashlib.sha256(content.encode() if isinstance(content, str) else content).hexdigest()


def model_dir(folder: Path, **files: str) -> Path:
    """A directory with these files, by name; a dot is written as two underscores."""
    folder.mkdir(parents=True)
    for name, text in files.items():
        path = folder / name.replace("__", ".")
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    return folder


# -- the model's part ---------------------------------------------------------------------------------------------


def test_a_tokenizer_is_its_one_file_and_a_template_its_text(tmp_path: Path) -> None:
    folder = model_dir(tmp_path / "m", tokenizer__json="{}", chat_template__jinja=TEMPLATE, vocab__json="{}")
    assert model_to_lineage(folder) == {"tokenizer": sha256("{}"), "template": sha256(TEMPLATE)}


def test_a_template_is_the_same_in_the_configuration_and_in_a_file_of_its_own(tmp_path: Path) -> None:
    config = json.dumps({"chat_template": TEMPLATE})
    named = json.dumps({"chat_template": [{"name": "default", "template": TEMPLATE}]})
    stale = json.dumps({"chat_template": "old"})
    folders = [
        model_dir(tmp_path / "a", tokenizer_config__json=config),
        model_dir(tmp_path / "b", tokenizer_config__json=named),
        model_dir(tmp_path / "c", chat_template__jinja=TEMPLATE, tokenizer_config__json=stale),
    ]
    assert [model_to_lineage(folder) for folder in folders] == [{"template": sha256(TEMPLATE)}] * 3


def test_a_template_for_tools_beside_the_default_one_counts(tmp_path: Path) -> None:
    one = model_dir(tmp_path / "a", chat_template__jinja=TEMPLATE)
    two = model_dir(tmp_path / "b", chat_template__jinja=TEMPLATE)
    (two / "additional_chat_templates").mkdir()
    (two / "additional_chat_templates/tool_use.jinja").write_text("tools")
    parts = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": TEMPLATE}]
    listed = model_dir(tmp_path / "c", tokenizer_config__json=json.dumps({"chat_template": parts}))
    assert model_to_lineage(two) == model_to_lineage(listed) != model_to_lineage(one)


def test_a_tokenizer_of_several_files_depends_on_each(tmp_path: Path) -> None:
    found = [
        model_to_lineage(model_dir(tmp_path / name, vocab__json=vocab, merges__txt=merges))["tokenizer"]
        for name, vocab, merges in (("a", "v", "m"), ("b", "v", "m"), ("c", "w", "m"), ("d", "v", "n"), ("e", "m", "v"))
    ]
    assert found[0] == found[1]
    assert len(set(found)) == 4


def test_what_a_directory_does_not_have_is_absent(tmp_path: Path) -> None:
    assert model_to_lineage(model_dir(tmp_path / "m", tokenizer_config__json="{}")) == {}


@pytest.mark.parametrize("broken", ["{", "[]", '{"chat_template": [1]}', '{"chat_template": [{"name": "x"}]}'])
def test_a_configuration_of_another_shape_is_one_line(tmp_path: Path, broken: str) -> None:
    folder = model_dir(tmp_path / "m", tokenizer_config__json=broken)
    with pytest.raises(ConfigError, match=r"^model\.path: cannot read the tokenizer of .*m: .+$"):
        model_to_lineage(folder)


# -- the nodes' part ----------------------------------------------------------------------------------------------

ADD = {"type": "function", "function": {"name": "add", "parameters": {"x": 1, "y": 2}}}
ADD_AGAIN = {"function": {"parameters": {"y": 2, "x": 1}, "name": "add"}, "type": "function"}
MUL = {"type": "function", "function": {"name": "mul", "parameters": {}}}


def of(*calls: list[Any]) -> dict[str, str]:
    """The lineage of a node whose calls offered these tools."""
    offered: set[str] = set()
    for tools in calls:
        offered |= request_to_tools({"tools": tools})
    return tools_to_lineage({"a": offered})


def test_tools_are_equal_where_their_schemas_are() -> None:
    assert of([ADD, MUL]) == of([MUL, ADD_AGAIN]) == of([ADD], [MUL], []) == of([ADD, MUL], [ADD])
    assert len({of(tools)["tools/a"] for tools in ([ADD], [MUL], [ADD, MUL])}) == 3
    # By hand: each schema as compact JSON with sorted keys, these as a sorted JSON list.
    mul = '{"function":{"name":"mul","parameters":{}},"type":"function"}'
    assert of([MUL]) == {"tools/a": sha256(json.dumps([mul]))}


def test_a_tool_has_one_hash_whichever_providers_form_it_was_offered_in() -> None:
    @tool
    def add(x: Annotated[int, "the left one"], y: int = 2) -> int:
        """Adds."""
        return x + y

    chat_anthropic = pytest.importorskip("langchain_anthropic").ChatAnthropic(model="claude-sonnet-4-5", api_key="x")
    (anthropic_form,) = chat_anthropic.bind_tools([add]).kwargs["tools"]
    openai_form = convert_to_openai_tool(add)
    with_hint = {**anthropic_form, "cache_control": {"type": "ephemeral"}}
    assert of([openai_form]) == of([anthropic_form]) == of([with_hint]) == of([openai_form["function"]])
    assert anthropic_form != openai_form
    assert tools_to_single_lineage({"a": request_to_tools({"tools": [with_hint]})}).keys() == {"tool/a/add"}


def test_no_tools_have_no_hash() -> None:
    assert of([]) == of() == {}
    assert request_to_tools({"tools": None, "model": "m"}) == set()


def test_a_tool_that_is_no_json_counts_by_its_name_and_harms_nobody() -> None:
    circular: dict[Any, Any] = {}
    circular["self"] = circular
    odd = [sha256, FakeVllm, object(), circular, {1: "a", "b": 2}]
    assert of(odd) == of([sha256, FakeVllm, object(), circular, {1: "a", "b": 2}])
    assert of([sha256]) != of([model_dir])
    assert of([object()]) == of([object()])  # not by where it lies in memory


# -- recorded -----------------------------------------------------------------------------------------------------


class Chat(TypedDict):
    messages: Annotated[list[Any], add_messages]


@tool
def look_up(word: str) -> str:
    """Looks a word up."""
    return f"{word} is a bird"


@pytest.fixture
def server() -> Iterator[FakeVllm]:
    with running(FakeVllm()) as server:
        yield server


def test_an_engine_records_the_served_model_and_the_tools_that_the_server_saw(server: FakeVllm, tmp_path: Path) -> None:
    def answer(body: dict[str, Any]) -> Any:
        return "a bird" if body["messages"][-1]["role"] == "tool" else [("look_up", {"word": "owl"})]

    server.auto_tools = True
    server.answer = lambda body: answer(body) if body.get("tools") else "what is an owl?"
    folder = model_dir(tmp_path / "model", tokenizer__json="{}", chat_template__jinja=TEMPLATE)
    layer = "model.layers.0.self_attn.{}_proj.weight"
    save_file({layer.format(name): np.zeros((4, 4), np.float32) for name in "qv"}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))

    def build(model: Any) -> Any:
        graph = StateGraph(Chat)
        graph.add_node("ask", lambda state: {"messages": [model.invoke(state["messages"])]})
        graph.add_node("researcher", create_agent(model, [look_up]))
        graph.add_edge(START, "ask")
        graph.add_edge("ask", "researcher")
        return graph.compile()

    nodes = ("ask", "researcher/model")
    options = {"app": "a:b", "nodes": nodes, "tasks": "t.jsonl", "reward": "a:r"}
    config = BridgeConfig.model_validate(
        {"graph": options, "serve": {"attach": server.url}, "model": {"path": str(folder)}}
    )
    task = {"id": "t", "question": "owl?"}
    app = App(
        *(build, [task], [task], lambda task: {"messages": [("user", task["question"])]}, lambda *_: 1.0, "a:r"),
        nodes=nodes,
    )
    run = RunFolder(tmp_path / "run")
    run.create()
    versions = dict.fromkeys(nodes, 0)
    plan = plan_episodes([task], 2, 1, seed=0, run_id="r", split="train", adapters=versions)
    with session_of(config, run, Reporter(Console(quiet=True)), app) as session:
        session.models.publish(versions)
        session.run(plan, "collect", "reward")
    with TraceStore.open(run.store) as store:
        store.take_in()
        trajectories = list(store.trajectories(run_ids=["r"]))
    ((schema,),) = {tuple(map(canonical, body["tools"])) for body in server.asked if body.get("tools")}
    expected = {
        "base": weights_to_sha256(folder),
        "tokenizer": sha256("{}"),
        "template": sha256(TEMPLATE),
        "tools/researcher/model": sha256(json.dumps([schema])),
        "tool/researcher/model/look_up": sha256(schema),
    }
    assert [trajectory.episode.lineage for trajectory in trajectories] == [expected] * 2
    today = session.models.lineage
    for options in (ReplayOptions(lineage="same"), ReplayOptions(lineage="known")):
        assert gate_episodes(trajectories, today, options, versions, True) == Gated(trajectories, [])
        gated = gate_episodes(trajectories, today | {"template": sha256("x")}, options, versions, True)
        assert (gated.kept, gated.drops) == ([], {"replay: lineage: template differs from today's": 2})


def canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def test_a_collector_writes_the_lineage_that_it_was_given(tmp_path: Path) -> None:
    rig = Rig(tmp_path, lineage={"base": "0" * 64})
    rig.run(plan_episodes(TASKS, 3, 1, seed=0, **COMMON))
    with rig.store() as store:
        assert [episode.lineage for episode in store.episodes(run_id="run")] == [{"base": "0" * 64}] * 3


def recorded(folder: Path, options: RecordOptions, *tools: Any) -> dict[str, str]:
    """The lineage of a live run of a node that calls its model twice."""
    folder.mkdir()
    path = folder / "s.duckdb"
    recorder = Recorder(Journal(path.with_name("s.duckdb.journal")), options)
    model = ScriptedPolicy(script=lambda *_: "hello")

    def speak(state: Chat) -> dict[str, Any]:
        model.invoke("again")
        return {"messages": [model.bind(tools=list(tools)).invoke(state["messages"])]}

    graph = StateGraph(Chat)
    graph.add_node("speak", speak)
    graph.add_edge(START, "speak")
    wrap(graph.compile(), recorder).invoke({"messages": [("user", "hi")]})
    recorder.journal.close()
    with TraceStore.open(path) as store:
        store.take_in()
        (episode,) = store.episodes()
    return episode.lineage


def test_an_apps_own_run_has_its_tools_and_nothing_else(tmp_path: Path) -> None:
    expected = {"tools/speak": of([ADD])["tools/a"], "tool/speak/add": sha256(canonical(ADD))}
    assert recorded(tmp_path / "a", RecordOptions(), ADD) == expected
    assert recorded(tmp_path / "b", RecordOptions()) == {}


def test_hashes_are_kept_when_content_is_not_or_is_redacted(tmp_path: Path) -> None:
    secret = {"name": "mail", "description": "writes to ada@example.com"}
    expected = {
        "tools/speak": of([secret])["tools/a"],
        "tool/speak/mail": sha256(canonical({"type": "function", "function": secret})),
    }
    assert recorded(tmp_path / "a", RecordOptions(content=False), secret) == expected
    assert recorded(tmp_path / "b", RecordOptions(redact=("email",)), secret) == expected


# -- stored -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "said", ['["base"]', '{"base": 1}', '{"base": ""}', '{"base": "abc"}', json.dumps({"base": "A" * 64}), "no json"]
)
def test_lineage_that_is_no_hash_is_refused(said: str) -> None:
    with pytest.raises(Malformed, match=r"marft\.lineage"):
        spans_to_trajectory(chain().spans(LINEAGE=said))


def test_no_lineage_is_null_in_the_store_and_none_in_the_record(tmp_path: Path) -> None:
    path = tmp_path / "s.duckdb"
    fill(path, [chain("a").spans(), chain("b").spans(LINEAGE=LINEAGE), chain("c").spans(LINEAGE="{}")])
    with TraceStore.open(path) as store:
        found = {episode.episode_id: episode.lineage for episode in store.episodes()}
        null = store.sql("SELECT episode_id FROM episodes WHERE lineage IS NULL ORDER BY 1")
        asked = store.sql("SELECT lineage ->> 'base', lineage ->> 'tools/a' FROM episodes WHERE lineage IS NOT NULL")
    assert found == {trace_id("a"): {}, trace_id("b"): json.loads(LINEAGE), trace_id("c"): {}}
    assert null == [(trace_id("a"),), (trace_id("c"),)]
    assert asked == [("0" * 64, "f" * 64)]


def test_lineage_travels_through_parquet(tmp_path: Path) -> None:
    path = tmp_path / "s.duckdb"
    fill(path, [chain("a").spans(), chain("b").spans(LINEAGE=LINEAGE)])
    expected = {trace_id("a"): {}, trace_id("b"): json.loads(LINEAGE)}
    with TraceStore.open(path) as store:
        store_to_parquet(store, tmp_path / "out")
    with folder_to_reader(tmp_path / "out") as reader:
        assert {t.episode.episode_id: t.episode.lineage for t in reader.trajectories()} == expected
    with TraceStore.open(tmp_path / "other.duckdb") as store:
        parquet_to_store(tmp_path / "out", store)
        assert {t.episode.episode_id: t.episode.lineage for t in store.trajectories()} == expected
