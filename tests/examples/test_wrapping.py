"""Owns: examples/wrapping/ and docs/your-app.md: an app is recorded with 3 changed lines, and trained with 10 in all.

- Each diff applies to the app as its user had it; the app answers as before, and its run is in the store, with the
  nodes and the edges of D worked out by hand.
- `collect` runs with the guide's bridge.toml on the app as it was and on the changed one, with exact tokens, into its
  own store alone.
- OpenInference's own spans still go where they went.
- The page is what the files give, and its counts are those of the files.
"""

from __future__ import annotations

import io
import itertools
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from support.compare_rig import save_model
from support.edge_rig import edges_of
from support.fake_vllm import END_OF_TURN, Answer, FakeVllm, calls_to_text, running
from support.pages import wrapping_page

from marft_bridge.commands.collect import collect
from marft_bridge.common.progress import Reporter
from marft_bridge.config.bridge import toml_to_config
from marft_bridge.config.serve import ServeOptions
from marft_bridge.recording.instrument import uninstrument
from trace_store.records import Trajectory
from trace_store.store import TraceStore

GUIDES = wrapping_page.FOLDER
QUESTION = "What is 2 + 3?"
ADD = [("add", {"a": 2, "b": 3})]


def chat_openai(body: dict[str, Any]) -> Answer:
    return "add them" if "In one line" in body["messages"][-1]["content"] else "5"


def added(body: dict[str, Any]) -> bool:
    return any(m["role"] == "tool" and m["content"] == "5" for m in body["messages"])


def create_agent(body: dict[str, Any]) -> Answer:
    return "5" if added(body) else ADD


def supervisor(body: dict[str, Any]) -> Answer:
    profile, said = body["messages"][0]["content"], json.dumps(body["messages"])
    if profile.startswith("Work out"):
        return "it is 5" if added(body) else ADD
    if profile.startswith("Say the result"):
        return "five is 5"
    if "transfer_to_writer" in said:
        return "5"
    return [("transfer_to_writer" if "transfer_to_solver" in said else "transfer_to_solver", {})]


def swarm(body: dict[str, Any]) -> Answer:
    if body["messages"][0]["content"].startswith("Say the result"):
        return "5"
    return [("transfer_to_writer", {})] if added(body) else ADD


def langgraph_json(body: dict[str, Any]) -> Answer:
    return "5" if body["messages"][-1]["content"] == "Answer with one number." else "2 and 3 make it"


def openinference(body: dict[str, Any]) -> Answer:
    asked = body["messages"][-1]["content"]
    return "five" if asked.startswith("Work") else "the sign" if asked.startswith("What is easily") else "5"


@dataclass(frozen=True, slots=True)
class Guide:
    """What a question must come to, worked out by hand."""

    answer: Callable[[dict[str, Any]], Answer]
    called: list[str]  # nodes of the actions; D says in which order
    edges: dict[str, str]
    said: dict[str, Answer]  # one answer of each node: what it says last


SUPERVISED = (
    "supervisor1>solver1 supervisor1>solver2 supervisor1>supervisor2 supervisor1>supervisor3 supervisor1>writer "
    "supervisor2>supervisor3 supervisor2>writer"
)
EXPECTED = {
    "chat_openai": Guide(
        chat_openai,
        ["planner", "writer"],
        {"trigger": "planner>writer", "data": "planner>writer"},
        {"planner": "add them", "writer": "5"},
    ),
    "create_agent": Guide(
        create_agent,
        ["model", "model"],
        {"trigger": "model1>model2", "data": "model1>model2", "tool": "model1>model2"},
        {"model": "5"},
    ),
    "supervisor": Guide(
        supervisor,
        ["supervisor", "solver", "solver", "supervisor", "writer", "supervisor"],
        {
            "trigger": "solver1>solver2 solver2>supervisor2 supervisor1>solver1 supervisor2>writer writer>supervisor3",
            "tool": f"solver1>solver2 {SUPERVISED}",  # handoffs are tool calls, which all later prompts show
            # Of each agent only its last message goes back to the others.
            "data": f"solver1>solver2 solver2>supervisor2 solver2>supervisor3 solver2>writer {SUPERVISED} "
            "writer>supervisor3",
        },
        {"supervisor": "5", "solver": "it is 5", "writer": "five is 5"},
    ),
    "swarm": Guide(
        swarm,
        ["solver", "solver", "writer"],
        {
            "trigger": "solver1>solver2 solver2>writer",
            "data": "solver1>solver2 solver1>writer solver2>writer",
            "tool": "solver1>solver2 solver1>writer solver2>writer",
        },
        {"solver": [("transfer_to_writer", {})], "writer": "5"},
    ),
    "langgraph_json": Guide(
        langgraph_json,
        ["solve", "say"],
        {"trigger": "solve>say", "data": "solve>say"},
        {"solve": "2 and 3 make it", "say": "5"},
    ),
    "openinference": Guide(
        openinference,
        ["drafter", "reviewer", "editor"],
        {"trigger": "drafter>editor reviewer>editor", "data": "drafter>editor reviewer>editor"},
        {"drafter": "five", "reviewer": "the sign", "editor": "5"},
    ),
}


def unique_ids() -> Callable[[dict[str, Any]], bytes]:
    """Tool calls with an id of their own, as a server gives them."""
    numbers = itertools.count()

    def renamed(whole: dict[str, Any]) -> bytes:
        return re.sub(r'"id": "call-\d+"', lambda _: f'"id": "call-{next(numbers)}"', json.dumps(whole)).encode()

    return renamed


@contextmanager
def serving(guide: Guide) -> Iterator[FakeVllm]:
    """Stands for the provider of gpt-4o-mini, and for the served model."""
    server = FakeVllm()
    server.adapters["gpt-4o-mini"] = "hosted"
    server.answer, server.auto_tools, server.spoil = guide.answer, True, unique_ids()
    with running(server):
        yield server


class _Sink(BaseHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        """Quiet."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.server.paths.append(self.path)  # type: ignore[attr-defined]
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()


@pytest.fixture
def sink() -> Iterator[ThreadingHTTPServer]:
    """An OTLP endpoint that keeps which paths were posted to."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Sink)
    server.paths = []  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the guides, where nothing of the checkout is in reach."""
    shutil.copytree(GUIDES, tmp_path / "wrapping", ignore=shutil.ignore_patterns("__pycache__", "runs", "traces.*"))
    for name in ("OPENAI_API_KEY", "SUMS_STYLE", "OTEL_EXPORTER_OTLP_ENDPOINT"):
        monkeypatch.setenv(name, "x")  # put back afterwards, whatever an app sets
    monkeypatch.delenv("SUMS_STYLE")
    return tmp_path / "wrapping"


def apply(diff: str, file: Path) -> None:
    """What `patch` does, without looking around for a place that fits."""
    old, new = file.read_text().splitlines(), []
    at = 0
    header, *hunks = re.split(r"^@@ -(\d+)(?:,\d+)? \+\d+(?:,\d+)? @@$\n", diff, flags=re.MULTILINE)
    assert header == "--- a/app.py\n+++ b/app.py\n"
    for start, body in zip(hunks[::2], hunks[1::2], strict=True):
        new += old[at : int(start) - 1]
        at = int(start) - 1
        for line in body.splitlines():
            if line[0] != "+":
                assert old[at] == line[1:], f"line {at + 1} of the app is another one"
                at += 1
            if line[0] != "-":
                new.append(line[1:])
    file.write_text("\n".join([*new, *old[at:]]) + "\n")


def answer_of(app: Path, server: FakeVllm, sink: ThreadingHTTPServer) -> str:
    """What the app prints when its user runs it, in a process of its own."""
    environment = os.environ | surroundings(server, sink) | {"PYTHONPATH": str(wrapping_page.ROOT)}
    command = [sys.executable, "-W", "ignore", app.name, QUESTION]
    done = subprocess.run(command, cwd=app.parent, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def surroundings(server: FakeVllm, sink: ThreadingHTTPServer) -> dict[str, str]:
    """The variables that the app's user has set; SUMS_STYLE is what LangGraph's server takes from langgraph.json."""
    return {
        "OPENAI_BASE_URL": f"{server.url}/v1",
        "OPENAI_API_KEY": "hosted",
        "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{sink.server_address[1]}",
        "NO_PROXY": "127.0.0.1",
        "SUMS_STYLE": "Answer with one number.",
    }


def short(name: str) -> str:
    """A node by its agent: `solver/model` and `supervisor/agent` without their last part."""
    return re.sub("/(agent|model)", "", name)


def check_game(trajectory: Trajectory, guide: Guide, *, bounds: bool = False) -> None:
    """The nodes and D. `bounds`: whether a data edge may be an upper bound."""
    assert sorted(short(action.node) for action in trajectory.actions) == sorted(guide.called)
    found = {kind: short(text) for kind, text in edges_of(trajectory).items()}
    if bounds:
        found["data"] = found["data"].replace("?", ">")
    edges = {kind: " ".join(sorted(text.split())) for kind, text in found.items()}
    assert edges == {kind: " ".join(sorted(text.split())) for kind, text in guide.edges.items()}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::langgraph.warnings.LangGraphDeprecatedSinceV10")  # of langgraph-supervisor
@pytest.mark.parametrize("name", EXPECTED)
def test_an_app_with_the_diff_answers_as_before_and_is_recorded(
    folder: Path,
    name: str,
    sink: ThreadingHTTPServer,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    guide, app = EXPECTED[name], folder / name / "app.py"
    apply((folder / name / "record.diff").read_text(), app)
    with serving(guide) as server:
        if name == "chat_openai":
            assert answer_of(app, server, sink) == "5"
        else:  # as in a process of its own, without loading LangChain once more for each
            monkeypatch.chdir(app.parent)
            monkeypatch.setattr(sys, "argv", [app.name, QUESTION])
            for variable, value in surroundings(server, sink).items():
                monkeypatch.setenv(variable, value)
            try:
                runpy.run_path(app.name, run_name="__main__")
            finally:
                _forget()
            assert capsys.readouterr().out.strip() == "5"
        assert {body["model"] for body in server.asked} == {"gpt-4o-mini"}
        assert len(server.asked) == len(guide.called)
    with TraceStore.open(app.with_name("traces.duckdb")) as store:
        store.take_in()
        (trajectory,) = store.trajectories()
    check_game(trajectory, guide)
    for action in trajectory.actions:
        assert action.model == "gpt-4o-mini"
        assert (action.sampled_ids, action.trainable) == (None, False)  # a hosted model tells no ids
    if name == "openinference":
        assert set(sink.paths) == {"/v1/traces"}  # type: ignore[attr-defined]


@pytest.mark.filterwarnings("ignore::langgraph.warnings.LangGraphDeprecatedSinceV10")  # of langgraph-supervisor
@pytest.mark.parametrize(
    ("name", "changed"), [*((name, True) for name in EXPECTED), ("chat_openai", False), ("swarm", False)]
)
def test_collect_runs_with_the_guides_configuration_and_has_every_token(
    folder: Path, name: str, changed: bool, monkeypatch: pytest.MonkeyPatch, sink: ThreadingHTTPServer
) -> None:
    guide = EXPECTED[name]
    monkeypatch.chdir(folder / name)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{sink.server_address[1]}")
    if changed:
        apply(Path("record.diff").read_text(), Path("app.py"))
    save_model(folder / "model")
    with serving(guide) as server:
        changes = {"collect.episodes": 2, "model.path": str(folder / "model")}
        config = toml_to_config(Path("bridge.toml"), changes)
        config = config.model_copy(update={"serve": ServeOptions(attach=server.url)})  # in the place of a real server
        said = io.StringIO()
        try:
            collect(config, Reporter(Console(file=said, width=200)), resume=False)
        finally:
            _forget()
        models = Counter(body["model"] for body in server.asked)
        assert {re.sub(r"(\.2F(agent|model))?@0", "", model) for model in models} == set(guide.called)
    with TraceStore.open(Path("runs/app/store.duckdb")) as store:
        first, second = store.trajectories()
        values = sorted(value for (value,) in store.sql("SELECT value FROM rewards"))
    assert all(value in (0.0, 1.0) for value in values)
    assert len(values) == 2
    for trajectory in (first, second):
        # In async runs OpenInference copies each node's whole state, so who read what is an upper bound.
        check_game(trajectory, guide, bounds=name == "openinference")
        for action in trajectory.actions:
            assert action.trainable, action.untrainable_reason
        last = {short(action.node): action for action in trajectory.actions}
        for node, text in guide.said.items():
            sampled = text if isinstance(text, str) else calls_to_text(text)
            assert list(last[node].sampled_ids or ()) == [*sampled.encode(), END_OF_TURN]
            assert len(last[node].logprobs or ()) == len(sampled.encode()) + 1
    if changed:
        with TraceStore.open(Path("traces.duckdb")) as store:
            store.take_in()
            assert list(store.trajectories()) == []  # the command's store has them, and only that


def _forget() -> None:
    """Takes back what an app of these did to the process."""
    from openinference.instrumentation.langchain import LangChainInstrumentor

    uninstrument()
    if LangChainInstrumentor().is_instrumented_by_opentelemetry:
        LangChainInstrumentor().uninstrument()


def test_recording_takes_three_lines_at_most_and_ten_with_a_configuration() -> None:
    assert set(EXPECTED) == set(wrapping_page.GUIDES) == {path.name for path in GUIDES.iterdir() if path.is_dir()}
    for name in EXPECTED:
        changed = wrapping_page.diff_to_changed((GUIDES / name / "record.diff").read_text())
        counted = wrapping_page.toml_to_counted((GUIDES / name / "bridge.toml").read_text())
        assert 1 <= changed <= 3, name
        assert changed + counted <= 10, name


def test_lines_are_counted_as_the_page_says() -> None:
    diff = "--- a/app.py\n+++ b/app.py\n@@ -1,3 +1,4 @@\n same\n-old\n+new\n+\n--- old\n"
    assert wrapping_page.diff_to_changed(diff.replace("--- old\n", "-x\n")) == 4
    assert wrapping_page.toml_to_counted("# why\n\n[graph]\napp = 1  # this\n  # that\n") == 2


def test_the_page_is_what_the_files_give() -> None:
    written = wrapping_page.PAGE.read_text()
    assert wrapping_page.filled(written) == written, "run `make pages`"
