"""Owns: several base models side by side, from the configuration to the comparison.

- A node runs on one base model: tables that say otherwise, or ask more of a server than it holds, are refused by name.
- However a node calls its model, the server of its own base model answers.
- All commands work on two base models of different shapes and vocabularies, on servers of their own and on those of
  `serve`; log-probs, adapters, lineage and hashes are those of each node's own model.
- A table names its model by a directory or by a name of the Hub; what a run notes has the commit.
- One of the servers may die: it is started again, and no episode is lost.
- Stored calls of a node that ran on another base model than today's are not replayed.
"""

from __future__ import annotations

import asyncio
import io
import json
import os
import re
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypedDict

import huggingface_hub.constants
import pytest
import torch
from langchain_core.language_models.fake_chat_models import FakeListChatModel
from langgraph.graph import START, StateGraph
from rich.console import Console
from safetensors import safe_open
from support import fault_server, study_server
from support.compare_rig import save_model
from support.fake_vllm import FakeVllm, running
from support.hub_cache import NAME, put_in_cache
from support.paths import ROOT
from support.tiny_policy import make_action, make_trajectory, save_tiny_llama
from transformers import AutoModelForCausalLM

from examples.study.run import dict_to_toml
from marft_bridge.commands.collect import collect
from marft_bridge.commands.serve import serve
from marft_bridge.common.errors import ConfigError, ServingError
from marft_bridge.common.progress import Reporter
from marft_bridge.config.bridge import toml_to_config
from marft_bridge.live.flags import flags_to_live
from marft_bridge.model_calls.node_chat_model import NodeChat
from marft_bridge.model_calls.redirect import redirected_models
from marft_bridge.model_calls.routing import Route, Routing, current_routing
from marft_bridge.runs.ledger import begin_run
from marft_bridge.runs.run_folder import RunFolder, read_metrics
from marft_bridge.serving import served_bases as served_models
from marft_bridge.serving import server_file
from marft_bridge.serving import vllm_process as server_process
from marft_bridge.serving.base_models import config_to_bases
from marft_bridge.serving.model_versions import config_to_versions
from marft_bridge.serving.served_bases import serve_bases
from marft_bridge.serving.server_file import announced_servers, server_options, starting_servers
from marft_bridge.serving.vllm_server import Endpoint
from marft_bridge.serving.zero_adapter import write_zero_adapter
from marft_bridge.training.external_traces import config_to_names
from trace_store.store import TraceStore
from trainers.common.files import weights_to_sha256
from trainers.config import ReplayOptions
from trainers.offline.replay_gate import gate_episodes

DUO = ROOT / "examples/math_duo/bridge.toml"


# -- the configuration ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("models", "message"),
    [
        ({"b": {"path": "x", "nodes": ["critic"]}}, r"models\.b\.nodes: 'critic' is not in graph\.nodes or graph\.fr"),
        (
            {"b": {"path": "x", "nodes": ["actor"]}, "c": {"path": "y", "nodes": ["actor"]}},
            r"models\.c\.nodes: 'actor' stands in models\.b\.nodes already",
        ),
        (
            {"b": {"path": "x", "nodes": ["actor", "reasoner"]}},
            r"models: every node runs on another model than that",
        ),
        (
            {"b": {"path": "x", "nodes": ["actor"], "serve": {"max_loras": 1}}},
            r"models\.b\.serve\.max_loras is 1, but 1 nodes with 1 \+ 1 versions need 2",
        ),
        (
            {"b": {"path": "x", "nodes": ["actor"], "serve": {"max_lora_rank": 2}}},
            r"train\.trainer\.lora\.rank 8 is above models\.b\.serve\.max_lora_rank 2",
        ),
        ({"b": {"path": "x", "nodes": []}}, r"models\.b\.nodes: Tuple should have at least 1 item"),
        ({"B!": {"path": "x", "nodes": ["actor"]}}, r"models\.B!"),
        ({"b": {"nodes": ["actor"]}}, r"the key 'models\.b\.path' is missing"),
        ({"b": {"path": "x", "nodes": ["actor"], "server": {}}}, r"unknown key 'models\.b\.server'"),
    ],
)
def test_nodes_and_servers_that_do_not_go_together_are_refused(models: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        toml_to_config(DUO, {"models": models})


def test_two_tables_cannot_be_served_by_one_server() -> None:
    at = {"attach": "http://127.0.0.1:1"}
    changes = {
        "serve": at,
        "models": {"b": {"path": "x", "nodes": ["actor"], "serve": {"attach": "http://127.0.0.1:1/"}}},
    }
    with pytest.raises(ConfigError, match=r"models\.b\.serve\.attach is the server of serve\.attach"):
        toml_to_config(DUO, changes)


def test_what_knows_one_base_model_refuses_several_before_anything_starts(tmp_path: Path) -> None:
    changes = {"run": str(tmp_path / "run"), "models": {"b": {"path": "x", "nodes": ["actor"]}}}
    live = flags_to_live("90/10", None, "newest", False, 0, None, 1.0)
    config, quiet = toml_to_config(DUO, changes), Reporter(Console(quiet=True))
    with pytest.raises(ConfigError, match=r"serve: --split serves the nodes of one base model; leave \[models\] out"):
        serve(config, quiet, (), live)
    attached = toml_to_config(
        DUO, changes | {"models": {"b": changes["models"]["b"] | {"serve": {"attach": "http://x"}}}}
    )
    with pytest.raises(ConfigError, match=r"serve: models\.b\.serve\.attach names a server that runs already"):
        serve(attached, quiet, ())
    on_ray = toml_to_config(DUO, changes | {"collect.engine": "ray", "ray": {"endpoints": ["http://127.0.0.1:1"]}})
    with pytest.raises(ConfigError, match=r"ray\.endpoints are servers of one base model each"):
        collect(on_ray, quiet, False)
    assert not (tmp_path / "run").exists()


def test_several_servers_do_not_each_take_a_whole_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served_models, "vllm_runs_on_cpu", lambda: False)
    models = [str(fault_server.write_model(tmp_path / name)) for name in ("one", "two")]
    changes = {"model.path": models[0], "models": {"b": {"path": models[1], "nodes": ["actor"]}}}
    config = toml_to_config(DUO, changes | {"serve.gpu_memory_utilization": 0.4})
    log_of = RunFolder(tmp_path).server_log_of
    quiet = Reporter(Console(quiet=True))
    versions = config_to_versions(config, tmp_path / "adapters", quiet.say)
    options = [base.serve for base in versions.bases]
    with (
        asyncio.Runner() as loop,
        pytest.raises(ServingError, match=r"2 model servers share the GPU: .* with models\.b\.serve\.gpu_mem"),
        serve_bases(config, versions, options, log_of=log_of, loop=loop, reporter=quiet),
    ):
        pass
    with pytest.raises(ServingError, match=r"2 model servers share the GPU"):
        serve(config.model_copy(update={"run": str(tmp_path / "run")}), Reporter(Console(quiet=True)), ())


@pytest.mark.parametrize("parser", ["hermes", None])
def test_commands_on_the_server_of_serve_know_whether_it_parses_tool_calls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, parser: str | None
) -> None:
    monkeypatch.setenv("MARFT_SERVER_KEY", "")  # put back afterwards
    folder, quiet = RunFolder(tmp_path / "run"), Reporter(Console(quiet=True))
    folder.create()
    changes = {"model.path": str(fault_server.write_model(tmp_path / "one")), "serve.tool_call_parser": parser}
    config = toml_to_config(DUO, changes)
    with (
        running(FakeVllm("a key")) as server,
        asyncio.Runner() as loop,
        announced_servers(folder, {"": Endpoint(f"{server.url}/v1", "a key", "base")}),
    ):
        versions = config_to_versions(config, folder.adapters, quiet.say)
        options = server_options(versions.bases, folder, quiet)
        assert [each.attach for each in options] == [server.url]
        log_of = folder.server_log_of
        with serve_bases(config, versions, options, log_of=log_of, loop=loop, reporter=quiet) as models:
            assert models.chat.auto_tools is (parser is not None)


@pytest.mark.parametrize("comes", [True, False])
def test_a_command_waits_for_the_server_that_serve_is_starting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, comes: bool
) -> None:
    monkeypatch.setenv("MARFT_SERVER_KEY", "")  # put back afterwards
    folder, console = RunFolder(tmp_path / "run"), Console(record=True, width=200, file=io.StringIO())
    folder.create()
    config = toml_to_config(DUO, {"model.path": str(fault_server.write_model(tmp_path / "one"))})
    bases = config_to_bases(config)
    with running(FakeVllm("a key")) as server, ThreadPoolExecutor(1) as pool, ExitStack() as announced:
        with starting_servers(folder):
            waiting = pool.submit(server_options, bases, folder, Reporter(console))
            deadline = time.monotonic() + 20
            while "waiting for the server" not in console.export_text(clear=False) and time.monotonic() < deadline:
                time.sleep(0.01)
            assert "waiting for the server" in console.export_text(clear=False)
            assert not waiting.done()
            if comes:
                announced.enter_context(announced_servers(folder, {"": Endpoint(f"{server.url}/v1", "a key", "base")}))
        (options,) = waiting.result(timeout=20)
        assert options.attach == (server.url if comes else None)
    assert not folder.server.exists()


def test_a_command_does_not_wait_for_ever_for_a_serve_that_is_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_file, "_SLACK_S", 0.1)
    folder = RunFolder(tmp_path / "run")
    folder.create()
    changes = {"model.path": str(fault_server.write_model(tmp_path / "one")), "serve.startup_timeout_s": 0.2}
    bases = config_to_bases(toml_to_config(DUO, changes))
    said = rf"serve` \(process {os.getpid()}\) is still starting a server for .* after 0 s; is it stopped\?"
    with starting_servers(folder), pytest.raises(ServingError, match=said):
        server_options(bases, folder, Reporter(Console(quiet=True)))


def test_a_server_needs_room_for_its_own_nodes_only() -> None:
    other = {"path": "x", "nodes": ["actor"], "serve": {"max_loras": 2}}
    assert toml_to_config(DUO, {"models": {"b": other}, "serve.max_loras": 2}).serve.max_loras == 2
    with pytest.raises(ConfigError, match=r"serve\.max_loras is 2, but 2 nodes with 1 \+ 1 versions need 4"):
        toml_to_config(DUO, {"serve.max_loras": 2})


OLD, NEW = "a" * 40, "b" * 40


def test_every_table_takes_a_name_of_the_hub_and_a_run_notes_its_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "hub"
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(cache))
    one = put_in_cache(cache, fault_server.write_model(tmp_path / "one"), OLD)
    two = put_in_cache(cache, fault_server.write_model(tmp_path / "two"), NEW, "acme/other")
    changes = {"model.path": NAME, "models": {"b": {"path": "acme/other@main", "nodes": ["actor"]}}}
    config = toml_to_config(DUO, changes | {"run": str(tmp_path / "run")})
    assert [base.directory for base in config_to_bases(config)] == [one, two]
    assert config.model.path == NAME  # what is asked for stays what it was
    folder = RunFolder(tmp_path / "run")
    folder.create()
    with TraceStore.open(folder.store) as store:
        begin_run(store, "collect", "collect", config=config, folder=folder)
        (stored,) = store.runs()
    noted = json.loads((folder.path / "bridge.json").read_text())["collect"]["config"]
    for record in (stored.config, noted):
        assert record["model"]["path"] == f"{NAME}@{OLD}"
        assert record["models"]["b"]["path"] == f"acme/other@{NEW}"
    # stored episodes of another commit, or of a copy of the model, are not refused by the name alone
    assert config_to_names(stored.config) == {"": "tiny-llama", "actor": "other"}


def test_a_name_that_stands_for_other_weights_by_now_is_another_base_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "hub"
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(cache))
    put_in_cache(cache, save_model(tmp_path / "one", 1.0), OLD)
    config = toml_to_config(DUO, {"model.path": NAME})
    before = config_to_versions(config, tmp_path / "adapters", print)
    write_zero_adapter(before.registry.new_folder("actor", 1), before.bases[0].directory, ("q_proj",))
    before.registry.register("actor", 1, None, metrics={})
    put_in_cache(cache, save_model(tmp_path / "two", 2.0), NEW)  # as a later `hf download` does
    after = config_to_versions(config, tmp_path / "adapters", print)
    assert after.lineage["base"] != before.lineage["base"]
    with pytest.raises(ServingError, match="was trained on another base model"):
        after.registry.get("actor", 1)
    pinned = config_to_versions(toml_to_config(DUO, {"model.path": f"{NAME}@{OLD}"}), tmp_path / "adapters", print)
    assert pinned.lineage == before.lineage
    assert pinned.registry.get("actor", 1).version == 1


def test_a_download_that_was_broken_off_is_said_with_the_command_that_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    snapshot = put_in_cache(tmp_path / "hub", fault_server.write_model(tmp_path / "one"), OLD)
    (snapshot / "model.safetensors").unlink()
    with pytest.raises(ServingError, match=r"lacks \*\.safetensors weights; .*: hf download acme/tiny-llama$"):
        config_to_bases(toml_to_config(DUO, {"model.path": NAME}))


# -- calls ------------------------------------------------------------------------------------------------------------


class State(TypedDict, total=False):
    said: list[str]


CALLS: dict[str, Callable[[Any], str]] = {
    "invoke": lambda model: model.invoke("hi").content,
    "ainvoke": lambda model: asyncio.run(model.ainvoke("hi")).content,
    "stream": lambda model: "".join(chunk.content for chunk in model.stream("hi")),
    "bound": lambda model: model.bind(stop=["never"]).invoke("hi").content,
}


async def streamed(model: Any) -> str:
    return "".join([chunk.content async for chunk in model.astream("hi")])


@pytest.mark.parametrize("own", [False, True], ids=["served model", "a model of its own"])
@pytest.mark.parametrize("call", [*CALLS, "astream"])
def test_the_server_of_a_nodes_base_model_answers_however_it_is_called(call: str, own: bool) -> None:
    with running(FakeVllm("one")) as first, running(FakeVllm("two")) as second:
        chats = [NodeChat(model="base", base_url=f"{at.url}/v1", api_key=at.key) for at in (first, second)]
        for at, node in ((first, "left"), (second, "right")):
            at.adapters[f"{node}@1"] = "somewhere"
        chat = chats[0].add_servers(chats[1:])
        routes = {
            node: Route(f"{node}@1", f"{node}@1", 1, 0.7, 32, server=f"{at.url}/v1")
            for node, at in (("left", first), ("right", second))
        }
        model = FakeListChatModel(responses=["I am nobody's adapter"]) if own else chat

        def node(_: State) -> State:
            return {"said": [CALLS[call](model)]}

        async def anode(_: State) -> State:
            return {"said": [await streamed(model)]}

        graph = StateGraph(State)
        for name in routes:
            graph.add_node(name, anode if call == "astream" else node)
        graph.add_edge(START, "left")
        graph.add_edge("left", "right")
        said: list[str] = []

        async def run() -> None:
            current_routing.set(Routing(routes, 7, chat))
            async for step in graph.compile().astream({}, stream_mode="updates"):
                said.extend(text for update in step.values() for text in update["said"])

        with redirected_models():
            asyncio.run(run())
        assert said == ["left@1 speaks", "right@1 speaks"]
        assert [[body["model"] for body in at.asked] for at in (first, second)] == [["left@1"], ["right@1"]]


# -- all commands, on servers that are processes ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A duo on two tiny models, which differ in width and vocabulary, trained and compared."""
    folder = tmp_path_factory.mktemp("bases")
    study_server.install(folder / "site")
    for name, seed, vocabulary, hidden in (("one", 0, 257, 32), ("two", 1, 300, 48)):
        save_tiny_llama(folder / name, seed, vocabulary, hidden)
        (folder / name / "tokenizer.json").write_text(json.dumps({"of": name}))
    config = DUO.read_text()
    for table in ("[collect]", "[train]", "[compare]", "[serve]"):
        assert table in config
    raw = tomllib.loads(config)
    raw["model"] = {"path": str(folder / "one")}
    raw["serve"] = {"max_model_len": 2048, "max_loras": 4}
    raw["models"] = {"big": {"path": str(folder / "two"), "nodes": ["actor"], "serve": {"max_model_len": 2048}}}
    raw["collect"] |= {"episodes": 12, "in_flight": 4}
    raw["train"] |= {"rounds": 2, "episodes_per_round": 8, "evaluation_episodes": 0}
    raw["compare"] = {"tasks": 10, "kl_actions": 8, "mixed_teams": "off"}
    raw["promote"] = {"safety_command": [sys.executable, str(folder / "suite.py")]}
    (folder / "suite.py").write_text(SUITE)
    (folder / "bridge.toml").write_text(dict_to_toml(raw))
    return folder


SUITE = """
import json, os, urllib.request

places = json.loads(os.environ["MARFT_SERVER_PLACES"])
assert sorted(places) == ["actor", "reasoner"], places
for node, at in places.items():
    body = {"model": at["model"], "messages": [{"role": "user", "content": "1 + 1?"}], "temperature": 1.0, "seed": 1}
    body |= {"max_tokens": 8, "logprobs": True, "return_token_ids": True}
    headers = {"Authorization": "Bearer " + at["api_key"], "Content-Type": "application/json"}
    asked = urllib.request.Request(at["base_url"] + "/chat/completions", json.dumps(body).encode(), headers)
    assert json.load(urllib.request.urlopen(asked))["choices"], node
"""
"""A safety suite: every node answers where it is said to be."""


def in_lab(lab: Path, *words: str, run: str = "run") -> str:
    """What a command says; it must end well."""
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(lab / "site"), str(ROOT / "tests")]), "OMP_NUM_THREADS": "1"}
    where = ["--config", str(lab / "bridge.toml"), "--run", str(lab / run)]
    argv = [sys.executable, "-m", "marft_bridge", words[0], *where, *words[1:]]
    done = subprocess.run(argv, cwd=ROOT, env=env, text=True, capture_output=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def trained(lab: Path) -> Path:
    said = in_lab(lab, "collect") + in_lab(lab, "train")
    assert re.search(r"model server big  ready", said)
    return lab / "run"


def own_logprobs(model_dir: Path, prompt: tuple[int, ...], sampled: tuple[int, ...], temperature: float) -> list[float]:
    model = AutoModelForCausalLM.from_pretrained(model_dir)
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([[*prompt, *sampled]])).logits[0, len(prompt) - 1 : -1]
    rows = (logits / temperature).log_softmax(-1)
    return [float(rows[i, token]) for i, token in enumerate(sampled)]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_each_nodes_calls_are_answered_by_its_own_base_model(lab: Path, trained: Path) -> None:
    with TraceStore.open(trained / "store.duckdb") as store:
        episodes = list(store.trajectories(run_ids=["collect"]))
    assert len(episodes) == 12
    actions = [action for episode in episodes for action in episode.actions]
    for node, model in (("reasoner", "one"), ("actor", "two")):
        action = next(a for a in actions if a.node == node)
        assert action.prompt_ids
        assert action.sampled_ids
        assert action.temperature
        expected = own_logprobs(lab / model, action.prompt_ids, action.sampled_ids, action.temperature)
        assert action.logprobs == pytest.approx(expected, abs=1e-4)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_lineage_and_adapters_are_those_of_each_nodes_own_base_model(lab: Path, trained: Path) -> None:
    one, two = weights_to_sha256(lab / "one"), weights_to_sha256(lab / "two")
    with TraceStore.open(trained / "store.duckdb") as store:
        (lineage,) = {json.dumps(e.lineage, sort_keys=True) for e in store.episodes()}
        registered = {(row.node, row.base_sha256) for row in store.adapters()}
    said = json.loads(lineage)
    assert (said["base"], said["base/actor"]) == (one, two)
    assert said["tokenizer"] != said["tokenizer/actor"]
    assert registered == {("reasoner", one), ("actor", two)}
    for node, width in (("reasoner", 32), ("actor", 48)):
        assert sorted(path.name for path in (trained / "adapters" / node).iterdir()) == ["0", "1", "2", "3"]
        with safe_open(trained / "adapters" / node / "3" / "adapter_model.safetensors", framework="pt") as tensors:
            assert {tensors.get_slice(name).get_shape()[1] for name in tensors.keys() if "lora_A" in name} <= {width}  # noqa: SIM118
    assert (trained / "vllm.log").exists()
    assert (trained / "vllm-big.log").exists()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_rounds_learn_on_both_and_their_log_probs_agree_with_the_servers(trained: Path) -> None:
    lines = read_metrics(trained / "metrics.jsonl")
    assert [line["round"] for line in lines] == [0, 1, 2]
    for line in lines[1:]:
        assert line["served"] == {"reasoner": True, "actor": True}
        for node in ("reasoner", "actor"):
            assert line["agents"][node]["adapter_moved"] > 0


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_other_commands_work_on_the_servers_of_serve(lab: Path, trained: Path) -> None:
    bridge = f"{sys.executable} -m marft_bridge"
    where = f"--config {lab / 'bridge.toml'} --run {trained}"
    script = f"set -e; {bridge} status {where}; {bridge} compare {where}; {bridge} credit {where} --tasks 2"
    said = in_lab(lab, "serve", "--", "sh", "-c", script)
    (addresses,) = re.findall(r"server: (http\S+), (http\S+)\n", said)
    assert len(set(addresses)) == 2
    assert said.count(f"using the model server at {addresses[0]}") == 2
    assert said.count(f"using the model server big at {addresses[1]}") == 2
    assert not (trained / "server.json").exists()
    report = json.loads((trained / "report.json").read_text())
    for node in ("reasoner", "actor"):
        after = report["nodes"][node]["after"]
        assert after["kl_actions"] > 0
        assert after["kl_to_base"] > 0
    with TraceStore.open(trained / "store.duckdb") as store:
        assert len(store.episodes(run_id="credit-1")) == 2 * 3  # the team, and the team without each
    said = in_lab(lab, "promote", "--by", "Ann", "--yes", "--if", "tokens<100x")
    assert "safety suite" in said
    manifest = json.loads((trained / "promoted/1.json").read_text())
    assert manifest["base_sha256"] == weights_to_sha256(lab / "one")
    assert {node: "base_sha256" in adapter for node, adapter in manifest["adapters"].items()} == {
        "reasoner": False,
        "actor": True,
    }
    assert "the weights are those of the newest" in in_lab(lab, "promote", "--verify")
    for node, model in (("reasoner", "one"), ("actor", "two")):
        out = trained / "exported" / node
        in_lab(lab, "export", "--merged", node, str(out))
        merged = AutoModelForCausalLM.from_pretrained(out)
        own = AutoModelForCausalLM.from_pretrained(lab / model)
        assert merged.config.hidden_size == own.config.hidden_size


# -- one of the servers dies ------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_server_that_dies_is_started_again_beside_the_other_and_no_episode_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[str] = []

    def argv(options: Any, model_dir: Path, port: int, cpu: bool) -> list[str]:
        started.append(model_dir.name)
        monkeypatch.setenv(fault_server.FAULTS, str(tmp_path / f"{model_dir.name}.json"))
        wait = "2" if len(started) > 2 else "0"
        return [sys.executable, str(ROOT / "tests/support/fault_server.py"), "--port", str(port), "--wait", wait]

    monkeypatch.setattr(server_process, "server_argv", argv)
    (tmp_path / "two.json").write_text(json.dumps({"die_after": 6}))
    models = {name: str(fault_server.write_model(tmp_path / name)) for name in ("one", "two")}
    changes = {
        "run": str(tmp_path / "run"),
        "model.path": models["one"],
        "models": {"big": {"path": models["two"], "nodes": ["actor"]}},
        "collect.episodes": 16,
        "collect.in_flight": 4,
    }
    said = io.StringIO()
    collect(toml_to_config(DUO, changes), Reporter(Console(file=said, width=1000)), False)
    assert re.search(r"ended with exit code 9; starting it again \(1 of 2\); log \S+vllm-big\.log", said.getvalue())
    assert started == ["one", "two", "two"]
    with TraceStore.open(tmp_path / "run" / "store.duckdb") as store:
        ended = [e.task_id for e in store.episodes(run_id="collect") if e.outcome == "terminated"]
    assert len(ended) == len(set(ended)) == 16


# -- stored calls of another base model -------------------------------------------------------------------------------

ONE, TWO = "1" * 64, "2" * 64


@pytest.mark.parametrize(
    ("today", "recorded", "reason"),
    [
        ({"base": ONE, "base/actor": TWO}, {"base": ONE, "base/actor": TWO}, None),
        ({"base": ONE, "base/actor": TWO}, {"base": TWO, "base/reasoner": ONE}, None),  # the tables changed places
        ({"base": ONE, "base/actor": TWO}, {"base": ONE}, "base/actor differs"),
        ({"base": ONE}, {"base": ONE, "base/actor": TWO}, "base/actor differs"),
        ({"base": TWO}, {"base": TWO, "base/other": ONE}, None),  # a node that did not act
        ({"base": ONE}, {"base": TWO}, "base differs"),
        ({"base": ONE, "base/actor": TWO}, {}, "same: base is not recorded"),
    ],
)
def test_stored_calls_are_replayed_where_every_node_ran_on_todays_model(
    today: dict[str, str], recorded: dict[str, str], reason: str | None
) -> None:
    trajectory = make_trajectory([make_action("reasoner", [1], [2]), make_action("actor", [3], [4])], 1.0)
    object.__setattr__(trajectory.episode, "lineage", recorded)
    options = ReplayOptions(lineage="same" if reason and reason.startswith("same") else "known")
    gated = gate_episodes([trajectory], today, options, {}, needs_behaviour=False)
    kept, drops = gated.kept, gated.drops
    if reason is None:
        assert (len(kept), drops) == (1, {})
    else:
        (why,) = drops
        assert reason.removeprefix("same: ") in why
