"""Owns: the commands that the README and the pages of docs/ show do, run as they stand, what the pages say.

- The way of a new user (docs/start.md) is walked from the first command to the last, and so is the README's.
- Every command of a page runs here, in the page's order, or in the test that is named for it. What never runs is
  declared with the reason; a command that is in no list, and one that is in a list and on no page, is found.
- Written out for the run are only sizes, free ports, answers to questions, and where the models are: a stand-in
  answers for them, with the log-probs of a tiny model where something is trained.
"""

from __future__ import annotations

import gzip
import json
import os
import re
import signal
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import huggingface_hub.constants
import pytest
import torch
from peft import LoraConfig
from support.chat_rig import save_chat_model
from support.compare_rig import Lab, lab_in, save_model
from support.fake_vllm import FakeVllm, running
from support.growth_rig import fill
from support.hub_server import TOKEN, running_hub
from support.ingest_rig import request, small_trace
from support.paths import source_of_test
from support.plan_rig import many_calls
from support.sample_spans import START, chain
from support.snippets import PROGRAM, ROOT, line_to_words, pages, shown_commands, snippets
from support.study_server import StudyServer
from support.tiny_policy import save_tiny_llama

from marft_bridge import cli
from marft_bridge.runs.run_folder import RunFolder
from marft_bridge.serving.adapter_registry import AdapterRegistry
from marft_bridge.serving.prepare_model import SMOLLM2_NAME
from marft_bridge.serving.server_file import announced_servers
from marft_bridge.serving.vllm_server import Endpoint
from marft_bridge.serving.zero_adapter import write_zero_adapter
from trace_store.store import TraceStore
from trainers.common.files import weights_to_sha256

LOOKED_AT = "test_snippets.py: test_commands_that_look_into_a_store_or_change_it_run_as_they_are_written"
LAUNCHED = "test_training_page.py: test_the_script_for_several_processes_runs_as_the_page_starts_it"
# (page, how the command begins) -> the test that runs it as it stands.
RUN_BY = {
    ("docs/store.md", "marft-bridge traces"): LOOKED_AT,
    ("docs/store.md", "(umask"): "test_store_page.py: test_a_backup_holds_every_row_and_is_a_store",
    ("docs/replay.md", "marft-bridge"): "test_replay_page.py: test_the_commands_of_the_page_run_as_they_are_written",
    ("docs/forks.md", "marft-bridge fork"): (
        "test_fork_command.py: test_the_commands_of_the_page_run_on_an_episode_that_is_there"
    ),
    ("docs/hosted-to-local.md", "marft-bridge rank"): (
        "test_rank.py: test_the_commands_of_the_page_run_as_they_are_written"
    ),
    ("docs/comparison.md", "marft-bridge compare --config bridge.toml --opponents"): (
        "test_tournament.py: test_the_command_of_the_page_has_all_versions_play_each_other_on_the_same_tasks"
    ),
    ("docs/training.md", "torchrun"): LAUNCHED,
    ("docs/training.md", "accelerate"): LAUNCHED,
}
ZOO = "takes the real model an hour; the tests of the zoo collect and train each configuration in small, on a stand-in"
BENCHMARKS = "takes hours, in runs/; test_benchmarks.py runs a small one on a stand-in, and plans in another folder"
CLUSTER = "listens to other machines; test_ray_cluster.py starts the same parts on loopback"
TEAM_IN_ONE = "needs a trained team, and trains the real model; test_team_in_one.py does all three on stand-ins"
# (page, the command) -> why no test runs it. Each is looked at by test_snippets.py: it exists, and takes these flags.
NOT_RUN = {
    ("README.md", "make demo"): "trains on the real vLLM for minutes; test_end_to_end.py does it in small",
    ("README.md", "make setup"): "installs everything from an index; test_set_up.py runs it on a small project",
    ("README.md", ". .venv/bin/activate"): "changes the user's shell",
    (
        "docs/index.md",
        "pip install .",
    ): "installs from an index; test_light_core.py installs the wheel",
    ("docs/start.md", "make setup"): "installs everything from an index; test_set_up.py runs it on a small project",
    ("docs/start.md", ". .venv/bin/activate"): "changes the user's shell",
    ("docs/small-study.md", "python -m examples.study.small.run build/small.jsonl --seeds 0 1 2 3"): (
        "pre-trains a model and trains it fifty times; test_small_study.py holds its games, model and conditions"
    ),
    ("docs/small-study.md", "python -m examples.study.small.contest build/contest.jsonl"): (
        "hours; its rates, its table and its contenders are tested in tests/examples/test_contest.py"
    ),
    ("docs/small-study.md", "python -m examples.study.small.trees build/trees.jsonl --seeds 40 41 42 43 44"): (
        "pre-trains a model and trains it sixty times; test_small_trees.py holds its forks, tokens and table"
    ),
    (
        "docs/reliability.md",
        "PYTHONPATH=tests:. .venv/bin/python -m support.kill_rig --kills 1000 --seed 1 --keep failed-stories",
    ): "kills for an hour; test_kills.py kills sixty times",
    ("docs/promotion.md", 'marft-bridge promote --efficient --by "Jane Doe"'): (
        "needs prices and a margin in the report; test_promote_efficient.py makes one and promotes by it"
    ),
    ("docs/study.md", "python -m examples.study.run --dry-run"): "looks into runs/; test_study.py names another folder",
    ("docs/study.md", "python -m examples.study.run"): "takes hours; test_study.py runs a small study on a stand-in",
    ("docs/study.md", "python -m examples.study.report"): "writes docs/study.md; test_study.py names another folder",
    ("docs/benchmarks.md", "python -m examples.benchmarks.run --dry-run"): BENCHMARKS,
    ("docs/benchmarks.md", "python -m examples.benchmarks.run"): BENCHMARKS,
    (
        "docs/benchmarks.md",
        "python -m examples.benchmarks.run --only at-grpo --level published --published --model models/Qwen3-1.7B",
    ): "takes a GPU for days; test_benchmarks.py holds that its configurations load",
    (
        "docs/benchmarks.md",
        "python -m examples.benchmarks.run --model smollm2-135m --over examples/benchmarks/smollm2.toml --folder "
        "runs/real",
    ): "trains the real model for hours; test_benchmarks.py holds that its configurations load",
    (
        "docs/benchmarks.md",
        "python -m examples.benchmarks.report",
    ): "writes docs/benchmarks.md; test_benchmarks.py names another folder",
    (
        "docs/benchmarks.md",
        "python -m examples.benchmarks.small_model .cache --measure",
    ): "makes a model for minutes; test_benchmarks.py makes two steps of it",
    (
        "docs/hosted-to-local.md",
        "python -m examples.hosted_to_local.agreement runs/agreement",
    ): "runs three graphs on the real model for minutes; test_agreement.py runs it on stand-ins",
    (
        "docs/hosted-to-local.md",
        "python -m examples.hosted_to_local.agreement runs/agreement --judge runs/judge/model",
    ): "asks a trained judge for minutes; test_agreement.py runs it on stand-ins",
    (
        "docs/hosted-to-local.md",
        "python -m examples.hosted_to_local.judge runs/judge",
    ): "teaches the real model for minutes; test_judge.py does it on a tiny one",
    (
        "docs/hosted-to-local.md",
        "sh examples/hosted_to_local/run.sh",
    ): "teaches and trains the real model for minutes; test_hosted_to_local.py runs all of it on a stand-in",
    ("docs/zoo.md", "marft-bridge collect --config examples/zoo/defer.toml"): ZOO,
    ("docs/zoo.md", "marft-bridge train --config examples/zoo/defer.toml"): ZOO,
    ("docs/zoo.md", "marft-bridge compare --config examples/zoo/defer.toml"): ZOO,
    (
        "docs/gpus.md",
        "torchrun --nproc-per-node 3 -m marft_bridge train --config bridge.toml",
    ): "wants three cards; test_learners.py starts two processes so on the CPU",
    (
        "docs/training.md",
        "marft-bridge distil runs/math_duo --into solver --config examples/team_in_one/bridge.toml",
    ): TEAM_IN_ONE,
    ("docs/training.md", "sh examples/team_in_one/run.sh runs/math_duo"): TEAM_IN_ONE,
    ("docs/training.md", "marft-bridge train --config examples/team_in_one/bridge.toml"): TEAM_IN_ONE,
    ("docs/training.md", "marft-bridge compare --config examples/team_in_one/bridge.toml"): TEAM_IN_ONE,
    ("docs/cluster.md", "ray start --head"): CLUSTER,
    ("docs/cluster.md", "ray start --address=HOST:PORT"): CLUSTER,
    (
        "docs/speed.md",
        "make bench BENCH=rollout_vs_raw_vllm",
    ): "measures the real vLLM; test_rollout_benches.py",
    ("docs/speed.md", "make bench BENCH=round_seconds"): "measures for minutes; test_bench.py runs the command",
    ("docs/speed.md", "make bench BENCH='round_seconds*'"): "measures for minutes; test_bench.py runs the command",
    ("docs/speed.md", "PYTHONPATH=tests .venv/bin/python -m benchmarks.round_table"): "prints what these measured",
}
WALKED = {
    *("README.md", "docs/start.md", "docs/comparison.md", "docs/promotion.md", "docs/credit.md", "docs/rewards.md"),
    *("docs/training.md", "docs/serving.md", "docs/ingest.md", "docs/recording.md", "docs/view.md"),
    *("docs/index.md", "docs/hosted-to-local.md"),
}


def declared(page: str, line: str) -> str | None:
    """What is said of a command in the lists above."""
    said = [why for (on, start), why in RUN_BY.items() if on == page and line.startswith(start)]
    return next(iter(said), NOT_RUN.get((page, line)))


def to_run(page: str) -> list[list[str]]:
    """The words of the commands of a page that are to run here, in its order."""
    return [line_to_words(line) for line in shown_commands(page) if declared(page, line) is None]


ALL_PAGES = [path.relative_to(ROOT).as_posix() for path in pages()]


# -- the lists ----------------------------------------------------------------------------------------------------


def test_every_command_of_every_page_is_run_here_or_declared() -> None:
    assert {page for page in ALL_PAGES if to_run(page)} == WALKED


def test_everything_that_is_declared_is_on_its_page() -> None:
    shown = {(page, line) for page in ALL_PAGES for line in shown_commands(page)}
    assert set(NOT_RUN) <= shown
    for on, start in RUN_BY:
        assert any(page == on and line.startswith(start) for page, line in shown), (on, start)


def test_the_test_that_is_named_for_a_command_exists_and_reads_its_page() -> None:
    for (page, _), named in RUN_BY.items():
        file, test = named.split(": ")
        source = source_of_test(file)
        assert f"def {test}(" in source
        assert Path(page).name in source


# -- how a command is run -----------------------------------------------------------------------------------------


def run_here(words: Sequence[str], *more: str) -> int:
    """One of ours, in this process. The exit code."""
    assert words[0] == PROGRAM
    return cli.run([*words[1:], *more])


@pytest.fixture(autouse=True)
def _with_the_programs_of_this_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


def run_in_a_shell(line: str) -> str:
    """A line of another program, as a user types it."""
    done = subprocess.run(["sh", "-c", line], capture_output=True, text=True, check=False, timeout=250)
    assert done.returncode == 0, done.stderr
    return done.stdout


def run_until_it_says(pattern: str, words: Sequence[str], *more: str) -> str:
    """One of ours that runs until Ctrl-C, which it gets as soon as it has said this. What it said."""
    command = [sys.executable, "-m", "marft_bridge", *words[1:], *more]
    with subprocess.Popen(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        assert process.stdout is not None
        said = ""
        for line in process.stdout:
            said += line
            if re.search(pattern, said):
                break
        process.send_signal(signal.SIGINT)
        rest, _ = process.communicate(timeout=60)
    assert process.returncode == 0, said + rest
    return said + rest


# -- the way of a new user ----------------------------------------------------------------------------------------

SIZES = """
[collect]
episodes = 12
[train]
rounds = 2
episodes_per_round = 8
"""


HOME_APP = """
from typing import TypedDict

from langgraph.graph import START, StateGraph
from marft_bridge import ScriptedPolicy


class State(TypedDict, total=False):
    question: str
    reply: str


def answer(state: State) -> State:
    return {"reply": str(ScriptedPolicy(answers={"answer": ["5"]}).invoke(state["question"]).text)}


graph = StateGraph(State).add_node("answer", answer).add_edge(START, "answer").compile()
"""


@contextmanager
def tiny_model_served(model: Path, run: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StudyServer]:
    """A stand-in for `marft-bridge serve` on this run folder, which the commands find."""
    monkeypatch.setenv("MARFT_SERVER_KEY", "")  # put back afterwards
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with running(StudyServer(str(model), 0, "a-key-of-the-test")) as server:
        assert isinstance(server, StudyServer)
        run.mkdir(parents=True)
        try:
            with announced_servers(RunFolder(run), {"": Endpoint(f"{server.url}/v1", "a-key-of-the-test", "base")}):
                yield server
        finally:
            torch.set_num_threads(threads)


def tiny_model(folder: Path) -> Path:
    """A tiny Llama whose tokens are bytes."""
    save_tiny_llama(folder, vocabulary=257)
    (folder / "tokenizer.json").write_text("{}")
    return folder


def config_of_page(page: str) -> str:
    """The first configuration that a page shows."""
    return next(found.text for found in snippets() if found.page == page and found.kind == "toml")


def check_trained(run: Path, nodes: Sequence[str], said: str) -> None:
    """What collect, train and compare leave behind, of the sizes above."""
    with TraceStore.open(run / "store.duckdb") as store:
        counts = dict(store.sql("SELECT run_id, count(*) FROM episodes GROUP BY run_id"))
    assert counts["collect"] == 12
    assert counts["train"] == 16
    assert counts["compare-1"] > 0
    for node in nodes:  # the replay and two rounds
        assert [path.name for path in sorted((run / "adapters" / node).iterdir())] == ["0", "1", "2", "3"]
    report = json.loads((run / "report.json").read_text())
    assert report["metric"] == "reward"  # of a function that gives one number
    assert {variant["name"] for variant in report["variants"]} == {"before", "after"}
    assert f"{run.name}/report.html" in said
    assert (run / "report.html").is_file()


@pytest.mark.slow
def test_the_first_five_minutes_work_as_they_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    page, run = "docs/start.md", Path("runs/my_app")
    for found in snippets():
        if found.page == page and found.kind == "python":
            name, _ = found.text.removeprefix("# ").split("\n", 1)
            Path(name).write_text(found.text)
    assert {path.name for path in tmp_path.iterdir()} == {"my_app.py", "record.py"}
    monkeypatch.setenv("MARFT_CACHE", "cache")
    model = tiny_model(Path("cache") / SMOLLM2_NAME)  # is what `smollm2-135m` finds there
    said: dict[str, str] = {}
    with tiny_model_served(model, run, monkeypatch) as server:
        for words in to_run(page):
            if words[0] == "python":
                said["python"] = run_in_a_shell(" ".join(words))
            elif words[1] == "view":
                said["view"] = run_until_it_says("open http", words, "--no-browser")
            else:
                assert run_here(words) == 0, capsys.readouterr().err
                said[words[1]] = capsys.readouterr().out
            if words[1] == "init":
                assert tomllib.loads(Path("bridge.toml").read_text()) == tomllib.loads(config_of_page(page))
                with Path("bridge.toml").open("a") as file:
                    file.write(SIZES)
        prompts = [message["content"] for body in server.asked for message in body["messages"]]
    assert list(said) == ["python", "traces", "init", "collect", "train", "compare", "view", "export"]
    (printed,) = [found.text for found in snippets() if found.page == page and found.kind == "text"]
    assert said["python"] == printed
    assert [line for line in said["traces"].splitlines() if "planner" in line or "writer" in line]
    assert all("What is" in prompt and "sum" not in prompt for prompt in prompts)  # the graph never sees the answer
    check_trained(run, ("planner", "writer"), said["compare"].replace("\n", ""))
    assert "looking at runs/my_app" in said["view"]
    assert (Path("exported/writer") / "adapter_model.safetensors").is_file()


README_APP = """
from typing import Any, TypedDict

from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, StateGraph


class State(TypedDict, total=False):
    question: str
    plan: str
    answer: str


model = ChatOpenAI(model="hosted", api_key="none", base_url="http://127.0.0.1:9/v1", max_retries=0)


async def planner(state: State) -> State:
    return {"plan": (await model.ainvoke(f"Plan: {state['question']}")).text}


async def writer(state: State) -> State:
    return {"answer": (await model.ainvoke(f"{state['question']} {state['plan']}")).text}


builder = StateGraph(State)
builder.add_sequence([planner, writer])
builder.add_edge(START, "planner")
builder.add_edge("writer", END)
graph = builder.compile()


def reward(task: dict[str, Any], state: dict[str, Any]) -> float:
    return float(state["answer"] == str(task["sum"]))
"""


@pytest.mark.slow
def test_the_commands_of_the_readme_train_an_app_on_its_own_models(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("my_app.py").write_text(README_APP)
    tasks = [{"id": f"{a}+{b}", "question": f"{a} + {b}?", "sum": a + b} for a in range(6) for b in range(6)]
    Path("tasks.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks))
    Path("bridge.toml").write_text(config_of_page("README.md") + SIZES)
    model = tiny_model(Path("models/my-instruct-model"))
    fill(Path("traces.duckdb"), [chain("4be1".ljust(32, "0"), START).spans()])
    with tiny_model_served(model, Path("runs/mine"), monkeypatch) as server:
        for words in to_run("README.md"):
            if words[1] == "view":
                assert "looking at traces.duckdb" in run_until_it_says("open http", words, "--no-browser")
            else:
                assert run_here(words) == 0, capsys.readouterr().err
        assert server.asked
    check_trained(Path("runs/mine"), ("planner", "writer"), capsys.readouterr().out.replace("\n", ""))


def test_the_five_lines_of_the_home_page_record_a_graph_and_show_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("my_app.py").write_text(HOME_APP)
    (lines,) = (found.text for found in snippets() if found.page == "docs/index.md" and found.kind == "python")
    assert len([line for line in lines.splitlines() if line.strip()]) <= 5
    subprocess.run([sys.executable, "-c", lines], check=True)
    (words,) = to_run("docs/index.md")
    assert "looking at traces.duckdb" in run_until_it_says("open http", words, "--no-browser")
    with TraceStore.open(Path("traces.duckdb")) as store:
        store.take_in()
        (episode,) = store.trajectories()
    assert [action.node for action in episode.actions] == ["answer"]


# -- comparing, promoting, taking elsewhere -----------------------------------------------------------------------


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Lab]:
    """A run folder with versions 0 to 5 of both agents, of which the fifth actor is always right; below it, we are."""
    with lab_in(tmp_path) as lab:
        for version in (3, 4, 5):
            add_version(lab, version)
        lab.answer = lambda model, number: (
            "think" if model.startswith("reasoner") else "yes" if model == "actor@5" or number % 3 == 0 else "no"
        )
        monkeypatch.chdir(tmp_path)
        Path("runs").mkdir()
        Path("runs/mine").symlink_to(lab.run)
        Path("bridge.toml").write_text(
            f"""
run = "runs/mine"
rewards = [{{ name = "used", kind = "tokens" }}]
[graph]
app = "{lab.apps}:duo"
nodes = ["reasoner", "actor"]
tasks = "{lab.apps}:tasks"
task_to_input = "{lab.apps}:to_input"
reward = "{lab.apps}:reward"
[model]
path = "{lab.model}"
[serve]
attach = "{lab.ours.url}"
[compare]
tasks = 12
mixed_teams = "off"
kl_actions = 0
"""
        )
        yield lab


def add_version(lab: Lab, version: int) -> None:
    """Adapters of zeros with all that peft writes of one that was trained."""
    registry = AdapterRegistry(lab.run / "adapters", weights_to_sha256(lab.model))
    for node in ("reasoner", "actor"):
        folder = registry.new_folder(node, version)
        write_zero_adapter(folder, lab.model, ("q_proj", "v_proj"))
        file = folder / "adapter_config.json"
        file.write_text(json.dumps({**LoraConfig(r=1).to_dict(), **json.loads(file.read_text())}, default=list))
        registry.register(node, version, version - 1, {})


@pytest.mark.slow
def test_the_comparisons_of_the_page_run(lab: Lab, capsys: pytest.CaptureFixture[str]) -> None:
    teams = []
    for words in to_run("docs/comparison.md"):
        assert run_here(words) == 0, capsys.readouterr().err
        report = json.loads((lab.run / "report.json").read_text())
        teams.append([variant["adapters"]["actor"] for variant in report["variants"]])
    assert teams == [[0, 5], [3, 5], [0, 5], [0, 5], [0, 5]]
    assert "correct>0" in capsys.readouterr().out


@pytest.mark.slow
def test_promotion_works_as_it_is_written(lab: Lab, capsys: pytest.CaptureFixture[str]) -> None:
    promoted = lab.run / "promoted"
    for words in to_run("docs/promotion.md"):
        more: tuple[str, ...] = ()
        if words[1] == "promote" and "--verify" not in words:
            more = ("--yes",)
        if "--rollback" in words:  # to the third, which must be there
            while not (promoted / "3.json").exists():
                assert run_here([PROGRAM, "promote", "--by", "Jane Doe", "--yes"]) == 0
        if words[1] == "serve":
            add_version(lab, 6)  # for the other tenth
            more = ("--port", "0", "--", sys.executable, "-c", "pass")
        assert run_here(words, *more) == 0, capsys.readouterr().err
    assert [json.loads((promoted / f"{n}.json").read_text())["rollback_to"] for n in range(1, 5)] == [None] * 3 + [3]
    assert Path("exported/actor/adapter_model.safetensors").is_file()
    assert "base answers 90 % of keys: reasoner@5, actor@5" in " ".join(capsys.readouterr().out.split())


@pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")  # by the Hub's library, of its client
def test_adapters_are_taken_elsewhere_as_the_page_on_training_says(
    lab: Lab, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    with running_hub() as hub:
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", hub.url)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", True)
        for words in to_run("docs/training.md"):
            assert run_here(words) == 0, capsys.readouterr().err
        assert sorted(hub.repositories["jane/sums-actor"].files) == sorted(
            path.name for path in Path("exported/for-the-hub").iterdir()
        )
    assert Path("exported/actor/adapter_config.json").is_file()
    assert Path("exported/actor-merged/model.safetensors").is_file()


@pytest.mark.slow
def test_credit_and_scoring_again_work_as_they_are_written(lab: Lab, capsys: pytest.CaptureFixture[str]) -> None:
    credit, collect_voices, credit_of_voices, by_forks = to_run("docs/credit.md")
    assert run_here(credit) == 0, capsys.readouterr().err
    carriers = Path("examples/zoo/carriers-voices.toml")
    carriers.parent.mkdir(parents=True)
    shipped = (ROOT / carriers).read_text()
    with running(FakeVllm()) as server:
        attached = re.sub(r"\[serve\][^[]*", f'[serve]\nattach = "{server.url}"\n', shipped)
        carriers.write_text(attached.replace("smollm2-135m", str(lab.model)).replace("episodes = 128", "episodes = 8"))
        assert run_here(collect_voices) == 0, capsys.readouterr().err
        assert run_here(credit_of_voices) == 0, capsys.readouterr().err
    told = capsys.readouterr().out
    assert all(voice in told for voice in ("voice_a", "voice_b"))
    assert run_here([PROGRAM, "collect", "--run", "runs/mine"]) == 0
    assert run_here(by_forks) == 0, capsys.readouterr().err
    assert run_here([PROGRAM, "compare", "--tasks", "2"]) == 0
    (score,) = to_run("docs/rewards.md")
    capsys.readouterr()
    assert run_here(["used" if word == "NAME" else word for word in score]) == 0, capsys.readouterr().err
    assert "used" in capsys.readouterr().out


# -- live traffic, traces of others, a browser --------------------------------------------------------------------


@pytest.mark.slow
def test_live_traffic_is_shared_out_as_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    model, nodes = save_model(Path("model")), ("planner", "writer")
    registry = AdapterRegistry(Path("runs/mine/adapters"), weights_to_sha256(model))
    for node in nodes:
        for version in range(6):
            write_zero_adapter(registry.new_folder(node, version), model, ("q_proj", "v_proj"))
            registry.register(node, version, None, {})
    Path("app.py").write_text('import os\nassert os.environ["MARFT_LIVE_URL"].endswith("/v1")\nprint("asked")\n')
    said = []
    with running(FakeVllm()) as server:
        Path("bridge.toml").write_text(
            f"""
name = "mine"
[graph]
app = "graphs.math_duo:build"
nodes = ["planner", "writer"]
tasks = "graphs.math_duo:tasks"
reward = "graphs.math_duo:reward"
[model]
path = "model"
[serve]
attach = "{server.url}"
"""
        )
        for words in to_run("docs/serving.md"):
            at = words.index("--") if "--" in words else len(words)
            beside = words[at:] or ["--", sys.executable, "-c", "pass"]
            assert run_here([*words[:at], "--port", "0", *beside]) == 0, capsys.readouterr().err
            said.append(" ".join(capsys.readouterr().out.split()))
    assert len(said) == 4
    assert all("live traffic at http://127.0.0.1:" in text for text in said)
    assert "base answers 90 % of keys: planner@0, writer@0" in said[0]
    assert "candidate answers 10 % of keys: planner@5, writer@4" in said[1]
    assert "base answers 90 % of keys: planner@3, writer@3" in said[1]
    assert "what base answers is mirrored to candidate" in said[2]


def trace_to_json(trace: str) -> str:
    """A small trace as OTLP/JSON has it."""
    attributes = lambda said: [{"key": key, "value": {"stringValue": value}} for key, value in said.items()]  # noqa: E731
    spans = [
        {
            "traceId": trace,
            "spanId": span.span_id.hex(),
            "parentSpanId": span.parent_span_id.hex(),
            "name": span.name,
            "startTimeUnixNano": str(span.start_time_unix_nano),
            "endTimeUnixNano": str(span.end_time_unix_nano),
            "attributes": attributes({item.key: item.value.string_value for item in span.attributes}),
        }
        for span in small_trace(trace)
    ]
    return json.dumps({"resourceSpans": [{"scopeSpans": [{"spans": spans}]}]})


def test_traces_of_others_are_taken_in_as_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("traces.json").write_text(trace_to_json("a" * 32))
    sent = request(*small_trace("b" * 32)).SerializeToString()
    Path("more.binpb.gz").write_bytes(gzip.compress(sent))
    Path("page-1.json").write_text((ROOT / "tests/ingest/langfuse_observations.json").read_text())
    observations = json.loads(Path("page-1.json").read_text())["data"]
    score = {"id": "s", "traceId": observations[0]["traceId"], "name": "quality", "value": 1, "dataType": "NUMERIC"}
    score |= {"timestamp": "2026-08-22T10:00:00.000Z", "source": "API"}
    Path("scores.json").write_text(json.dumps({"data": [score], "meta": {}}))
    Path("bridge.toml").write_text('[graph]\napp = "a:b"\nnodes = ["n"]\ntasks = "t.jsonl"\nreward = "a:r"\n')
    for words in to_run("docs/ingest.md"):
        if "--listen" in words:
            said = run_until_it_says("listening on", words, "--port", "0")
            assert "http://127.0.0.1:" in said
        else:
            assert run_here(words) == 0, capsys.readouterr().err
    for path, episodes in (("traces.duckdb", 2), ("langfuse.duckdb", 1), ("runs/try/store.duckdb", 1)):
        with TraceStore.open(Path(path)) as store:
            assert store.counts()["episodes"] == episodes


def test_a_plan_is_made_and_looked_at_again_as_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MARFT_CACHE", "cache")
    Path("cache").mkdir()
    save_chat_model(Path("cache") / SMOLLM2_NAME)  # is what `smollm2-135m` finds there
    Path("runs/mine").mkdir(parents=True)
    TraceStore.open(Path("runs/mine/store.duckdb")).close()
    many_calls(Path("langfuse.duckdb"), {"writer": lambda _: "notes"}, 8, RESPONSE_MODEL="gpt-5-mini")
    Path("prices.toml").write_text(
        re.findall(r"```text\n(.*?)```", (ROOT / "docs/hosted-to-local.md").read_text(), re.DOTALL)[0]
    )
    for words in to_run("docs/hosted-to-local.md"):
        assert run_here(words) == 0, capsys.readouterr().err
    with TraceStore.open(Path("langfuse.duckdb")) as store:
        assert {row.run_id for row in store.predictions()} == {"plan-1", "plan-2"}
        assert store.sql("SELECT model, currency FROM prices") == [("gpt-5-mini", "USD")]


@pytest.mark.slow
def test_an_app_is_recorded_without_a_change_as_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("your_app.py").write_text(
        "import asyncio\n"
        "from graphs import math_duo\n"
        "from marft_bridge import ScriptedPolicy\n"
        "graph = math_duo.build(ScriptedPolicy(script=lambda node, prompt, random: '7'))\n"
        "print(asyncio.run(graph.ainvoke({'question': '3 + 4?'}))['answer'])\n"
    )
    for name in ("TRACES", "METRICS", "LOGS"):  # OpenTelemetry's own exporters: there is nobody to send to
        monkeypatch.setenv(f"OTEL_{name}_EXPORTER", "none")
    (words,) = to_run("docs/recording.md")
    assert run_in_a_shell(" ".join(words)) == "7\n"
    with TraceStore.open(Path("traces.duckdb")) as store:
        store.take_in()
        assert [len(trajectory.actions) for trajectory in store.trajectories()] == [2]


def test_a_run_is_looked_at_in_a_browser_as_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("runs/math_duo").mkdir(parents=True)
    TraceStore.open(Path("runs/math_duo/store.duckdb")).close()
    (words,) = to_run("docs/view.md")
    assert re.search(r"open http://127\.0\.0\.1:\d+/\?token=", run_until_it_says("open http", words, "--no-browser"))
