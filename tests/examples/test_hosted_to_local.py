"""Owns: examples/hosted_to_local, from its tasks to its last command.

- The reward is that worked by hand; the oracle earns 1 on every task, and each node's mistake costs.
- Structured output and tools are used, and what cannot be read ends in an answer all the same.
- Prompts fit a small model; tasks differ, and so do the teacher's lessons.
- The whole script runs on a tiny model: every command fits the next.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.outputs import ChatGeneration, ChatResult
from pydantic import Field
from support import desk_server
from support.chat_rig import save_chat_model
from support.paths import ROOT

from examples.hosted_to_local import app, looks, orders, teacher
from examples.hosted_to_local.picture import plan_to_lines, plan_to_svg
from examples.hosted_to_local.record import record
from marft_bridge.common.import_name import load_name
from marft_bridge.config.bridge import toml_to_config
from marft_bridge.config.prices import file_to_prices
from marft_bridge.rollouts.app import load_app
from trace_store.store import TraceStore

FOLDER = ROOT / "examples/hosted_to_local"
PROFILES = {"extractor": app.EXTRACTOR, "router": app.ROUTER, "lookup": app.LOOKUP, "writer": app.WRITER}
TASKS = orders.tasks()
OF_ROUTE = {route: next(task for task in TASKS if task["route"] == route) for route in app.ROUTES}


class Nodes(BaseChatModel):
    """The oracle, but for the nodes whose answers are given; keeps its calls."""

    answers: dict[str, str] = Field(default_factory=dict)
    calls: list[tuple[str, str, Any]] = Field(default_factory=list)

    def _generate(self, messages: list[BaseMessage], *_: Any, **options: Any) -> ChatResult:
        profile, text = (str(message.content) for message in messages)
        (node,) = (node for node, its_profile in PROFILES.items() if its_profile == profile)
        self.calls.append((node, text, options.get("response_format")))
        answer = self.answers.get(node) or orders.Oracle(TASKS).answer(profile, text)
        return ChatResult(generations=[ChatGeneration(message=AIMessage(answer))])

    @property
    def _llm_type(self) -> str:
        return "nodes"


def play(task: orders.Task, **answers: str) -> tuple[dict[str, float], Nodes, dict[str, Any]]:
    model = Nodes(answers=answers)
    state = app.make_graph(model).invoke(orders.task_to_input(task))
    return orders.reward(task, state), model, state


# -- tasks and rewards ------------------------------------------------------------------------------------------------


def test_tasks_and_lessons_are_all_of_different_sentences_and_enough_are_on_either_side() -> None:
    sentences = [task["request"] for task in [*TASKS, *orders.lessons()]]
    assert len(set(sentences)) == len(sentences) == orders.TASKS + orders.LESSONS
    assert orders.tasks() == TASKS
    loaded = load_app(toml_to_config(FOLDER / "bridge.toml"))
    assert len(loaded.train_tasks) >= 400
    assert len(loaded.heldout_tasks) >= toml_to_config(FOLDER / "bridge.toml").compare.tasks >= 120
    assert {task["route"] for task in loaded.heldout_tasks} == set(app.ROUTES)


def test_the_reward_is_that_worked_by_hand() -> None:
    wanted = {"item": "shelf", "colour": "red", "count": 2}
    task = {"id": "t", "request": "What would two red shelves cost me?", "route": "price", "wanted": wanted}
    assert orders.task_to_reply(task) == "2 x red shelf: 90 EUR"  # a shelf is 45
    order = '{"count": 2, "colour": "red", "item": "shelf"}'
    right = {"answer": "2 x red shelf: 90 EUR", "order": order, "route": "price"}
    assert orders.reward(task, right) == {"correct": 1.0, "reward": 1.0}
    assert orders.reward(task, right | {"answer": "2 x red shelf: 90"}) == {"correct": 0.0, "reward": 0.5}
    assert orders.reward(task, right | {"route": "stock"}) == {"correct": 1.0, "reward": 0.75}
    assert orders.reward(task, {"order": "", "route": "stock"}) == {"correct": 0.0, "reward": 0.0}
    stock = task | {"route": "stock"}
    assert orders.task_to_reply(stock) == "2 x red shelf: 16 in stock"  # (7 * 5 + 5 * 0) modulo 19
    assert orders.task_to_reply(task | {"route": "return"}) == "2 x red shelf: send it back"


@pytest.mark.parametrize("route", app.ROUTES)
def test_the_oracle_earns_everything_and_uses_form_and_tool(route: str) -> None:
    task = OF_ROUTE[route]
    reward, model, state = play(task)
    assert reward == {"correct": 1.0, "reward": 1.0}
    nodes = [node for node, _, _ in model.calls]
    assert nodes == ["extractor", "router", *([] if route == "return" else ["lookup"]), "writer"]
    assert [form for _, _, form in model.calls] == [app.ORDER_FORM] + [None] * (len(nodes) - 1)
    unit = {"price": " EUR", "stock": " in stock"}
    assert ("result" in state) == (route != "return")
    assert str(state.get("result", "")).endswith(unit.get(route, ""))


def test_the_oracle_is_right_on_every_task() -> None:
    for task in TASKS:
        order = app.Order(**task["wanted"])
        result = "" if task["route"] == "return" else app.call_tool(orders.right_call(task["route"], order))
        assert orders.right_reply(task["route"], order, result) == orders.task_to_reply(task)
        assert app.NOTHING not in result


WRONG = {
    "extractor": ('{"item": "mug", "colour": "blue", "count": 7}', '{"item": "mug"}', "a mug"),  # no task asks for 7
    "router": ("weather", "Price."),
    "lookup": ("stock(table, red)", "price 3 mugs", "quote(mug, red)", "quote(mug, red, many)", "stock()"),
    "writer": ("There you go.", ""),
}


@pytest.mark.parametrize(("node", "answer"), [(node, text) for node, texts in WRONG.items() for text in texts if text])
def test_a_mistake_of_any_node_costs_and_does_not_end_the_run(node: str, answer: str) -> None:
    reward, _, state = play(OF_ROUTE["price"], **{node: answer})
    assert reward["correct"] == 0.0
    assert reward["reward"] < 1.0
    assert state["answer"]


def test_a_tool_call_is_run_only_in_its_form() -> None:
    assert app.call_tool(" quote(mug, red, 3) ") == "24 EUR"
    assert app.call_tool("stock(lamp, blue)") == "12 in stock"  # 7 + 5
    for text in ("quote(mug, red, -3)", "quote(mug, pink, 3)", "stock(mug, red) please", "__import__(os, path)"):
        assert app.call_tool(text) == app.NOTHING


def test_prompts_are_short() -> None:
    """A word has at most two tokens on average in a tokenizer of 49,152; the profile is the longest part."""
    for task in TASKS[:60]:
        _, model, _ = play(task)
        for node, text, _ in model.calls:
            assert len(PROFILES[node]) + len(text) < 240  # characters; with SmolLM2's tokenizer 59 tokens at most


# -- what is recorded -------------------------------------------------------------------------------------------------


def test_lessons_are_recorded_with_task_reward_and_form_and_hold_no_token_ids(tmp_path: Path) -> None:
    store_path = teacher.record_lessons(tmp_path, runs=6)
    with TraceStore.open(store_path, read_only=True) as store:
        trajectories = list(store.trajectories(split="train"))
        tools = store.sql("SELECT count(*) FROM spans WHERE operation = 'execute_tool'")
        forms = store.sql("SELECT count(*) FROM spans WHERE attributes->>'gen_ai.output.type' = 'json'")
    tasks = orders.lessons()[:6]
    assert sorted(t.episode.task_id for t in trajectories) == sorted(task["id"] for task in tasks)
    assert {t.team_reward("correct") for t in trajectories} == {1.0}
    assert {action.sampled_ids for t in trajectories for action in t.actions} == {None}
    assert tools == [(sum(task["route"] != "return" for task in tasks),)]
    assert forms == [(6,)]


def test_a_run_that_fails_is_counted_and_the_others_are_kept(tmp_path: Path) -> None:
    class Breaks(Nodes):
        def _generate(self, messages: list[BaseMessage], *_: Any, **options: Any) -> ChatResult:
            if messages[1].content == TASKS[1]["request"]:
                raise ConnectionError("the line is dead")
            return super()._generate(messages, **options)

    done = record(app.make_graph(Breaks()), TASKS[:3], tmp_path / "s.duckdb", run_id="hosted", in_flight=2)
    assert (done.mean("correct"), done.failures) == (1.0, ["ConnectionError: the line is dead"])


# -- configurations ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["bridge.toml", "teacher.toml", "lookup_hosted.toml"])
def test_a_configuration_is_accepted_and_names_what_there_is(name: str) -> None:
    config = toml_to_config(FOLDER / name)
    hosted = {"lookup"} if name == "lookup_hosted.toml" else set()
    assert config.graph.nodes == tuple(node for node in PROFILES if node not in hosted)
    for key in ("app", "tasks", "task_to_input", "reward"):
        assert load_name(getattr(config.graph, key), key)
    assert config.train.trainer.offline.retokenise


def test_with_a_hosted_lookup_all_else_is_as_in_the_main_configuration() -> None:
    main, other = (toml_to_config(FOLDER / f"{name}.toml").model_dump() for name in ("bridge", "lookup_hosted"))
    assert [key for key in main if main[key] != other[key]] == ["name", "graph", "serve", "train", "compare"]
    for table, keys in {"graph": ["nodes"], "serve": ["max_loras"], "compare": ["variants"]}.items():
        assert [key for key in main[table] if main[table][key] != other[table][key]] == keys
    assert {key for key in main["train"] if main["train"][key] != other["train"][key]} == {"traces", "hosted_answers"}


def test_both_models_have_a_price() -> None:
    table = tomllib.loads((FOLDER / "prices.toml").read_text())
    file_to_prices(FOLDER / "prices.toml", "test")
    assert [price["model"] for price in table["prices"]] == ["hosted-large", "local"]


def test_each_node_is_moved_alone() -> None:
    variants = looks.alone_variants(toml_to_config(FOLDER / "bridge.toml"))
    assert [variant["name"] for variant in variants] == ["hosted", *PROFILES]
    assert [variant["nodes"] for variant in variants[1:]] == [[node] for node in PROFILES]


def interval(mean: float, width: float = 0.1) -> dict[str, float]:
    return {"mean": mean, "low": mean - width, "high": mean + width}


def test_the_picture_of_a_plan_has_its_nodes_in_their_order_and_draws_no_more_than_it_says() -> None:
    probe = {"before": interval(2.5), "after": interval(0.25)}
    nodes = [
        {"node": "silent <b>", "local": None, "usage": {"costs": {}}},
        {"node": "router", "local": {"probe": probe}, "usage": {"costs": {"EUR": 3.0}}},
        {"node": "writer", "local": {"probe": None}, "usage": {"costs": {"EUR": 1.0}}},
    ]
    order = [("router", "first", 1), ("writer", "unknown", 2), ("silent <b>", "local", None)]
    proposal = [{"node": node, "move": move, "place": place} for node, move, place in order]
    svg = plan_to_svg({"nodes": nodes, "proposal": proposal})
    root = ElementTree.fromstring(svg)  # noqa: S314 - our own drawing
    texts = [element.text for element in root.iter() if element.tag.endswith("}text")]
    assert [text for text in texts if text in ("1. router", "2. writer", "silent <b>")] == [
        "1. router",
        "2. writer",
        "silent <b>",
    ]
    assert texts.count("2.50 to 0.25") == 1
    assert {"75%", "25%", "0%"} <= set(texts)
    assert svg.count("<circle") == 2  # of the one node that was probed
    without_prices = [{**node, "usage": {"costs": {}}} for node in nodes]
    assert "%</text>" not in plan_to_svg({"nodes": without_prices, "proposal": proposal})


def test_the_proposal_of_a_plan_is_a_line_a_node_in_which_nothing_moves_the_cursor() -> None:
    proposal = [
        {"node": "router", "move": "first", "place": 1, "reasons": ["likely", "weight 0.42"]},
        {"node": "wri\x1b[2Jter", "move": "local", "place": None, "reasons": []},
    ]
    assert plan_to_lines({"proposal": proposal}) == ["1. router: first, likely, weight 0.42", "wri\\x1b[2Jter: local"]


# -- the whole script -------------------------------------------------------------------------------------------------


SHORTER = {
    "max_model_len = 256": "max_model_len = 2048",  # of the stand-in, a byte each
    "max_tokens = 32": "max_tokens = 64",
    "episodes_per_round = 48": "episodes_per_round = 6",
    "evaluation_episodes = 48": "evaluation_episodes = 4",
    "epochs = 3": "epochs = 1",
    "tasks = 300": "tasks = 12",
    'dtype = "float32"': "",
}


@dataclass
class Lab:
    """A folder with a teacher, and what its commands find in their environment."""

    folder: Path
    model: Path
    environment: dict[str, str]

    def run(self, *command: str, **variables: str) -> tuple[int, str]:
        """Exit code, and everything that was printed."""
        environment = self.environment | variables
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        return done.returncode, done.stdout + done.stderr

    def script(self, config: str, run: Path, **variables: str) -> tuple[int, str]:
        """The whole script on a smaller configuration."""
        text = (FOLDER / config).read_text()
        changes = {f"runs/{Path(config).stem.replace('bridge', 'hosted_to_local')}/traces": str(run / "traces")}
        for old, new in {**SHORTER, "smollm2-135m": str(self.model), **changes}.items():
            assert text.count(old) == 1, old
            text = text.replace(old, new)
        path = self.folder / config
        path.write_text(text)
        return self.run("sh", str(FOLDER / "run.sh"), CONFIG=str(path), RUN=str(run), **variables)


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    folder = tmp_path_factory.mktemp("desk")
    desk_server.install(folder / "site")
    model = save_chat_model(folder / "tiny")
    settings = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(settings | {"max_position_embeddings": 2048}))
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(folder / "site"), str(ROOT / "tests"), str(ROOT)]),
        "OMP_NUM_THREADS": "1",
        "PYTHON": sys.executable,
        "TEACHER": str(folder / "teacher"),
        "MODEL": str(model),
        "RUNS": "24",
        "CALLS": "8",
        "ROUNDS": "1",
    }
    for name in ("HOSTED_BASE_URL", "MARFT_SEED"):
        environment.pop(name, None)
    made = Lab(folder, model, environment)
    making = (sys.executable, "-m", "examples.hosted_to_local.teacher", str(folder / "teacher"))
    code, printed = made.run(*making, "--runs", "12", "--epochs", "1", "--model", str(model))
    assert code == 0, printed
    assert (folder / "teacher/model/config.json").is_file()
    assert not list((folder / "teacher/model").glob("adapter*"))  # merged
    assert "is there already" in made.run(*making)[1]
    return made


def rounds_of(run: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["phase"] in ("offline", "online")]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_script_goes_from_traces_to_a_verdict_on_a_tiny_model(lab: Lab) -> None:
    run = lab.folder / "run"
    code, printed = lab.script("bridge.toml", run, ALONE="1")
    assert code in (3, 4), printed  # twelve tasks cannot show a margin of 0.03
    report = json.loads((run / "report.json").read_text())
    assert [variant["name"] for variant in report["variants"]] == ["hosted", "local", "lookup hosted"]
    assert [variant["hosted"] for variant in report["variants"]] == [list(PROFILES), [], ["lookup"]]
    assert {choice["team"] for choice in report["choices"]} == {"hosted", "local", "lookup hosted"}
    assert {contrast["margin_outcome"] for contrast in report["contrasts"]} <= {
        "worse by more than the margin",
        "not told",
    }
    with TraceStore.open(run / "hosted.duckdb", read_only=True) as store:
        assert store.sql("SELECT DISTINCT model FROM actions") == [("hosted-large",)]
        assert {row.quantity for row in store.predictions()} >= {"place", "gain"}
    assert "nats a token by the local base" in printed
    assert all(f">{place}. " in (run / "plan.svg").read_text() for place in (1, 2, 3, 4))
    assert "Mean correct" in printed  # of the imitated
    assert "rank correlation of its places with what moving each of 4 nodes alone lost" in " ".join(printed.split())
    assert [line["round"] for line in rounds_of(run)] == [0, 1]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_node_that_stays_hosted_is_answered_from_the_record_in_rounds(lab: Lab) -> None:
    run = lab.folder / "lookup"
    code, printed = lab.script("lookup_hosted.toml", run)
    assert code in (3, 4), printed
    with TraceStore.open(run / "store.duckdb", read_only=True) as store:
        hosted_calls = store.sql(
            "SELECT DISTINCT variant, node, model FROM actions JOIN episodes USING (episode_id) "
            "WHERE variant = 'lookup hosted' AND adapter IS NULL"
        )
    assert hosted_calls == [("lookup hosted", "lookup", "hosted-large")]
    (offline, online) = rounds_of(run)
    assert online["hosted"]["calls"] > 0
    assert online["hosted"]["recorded_share"] is not None
    assert "hosted" not in offline
