"""Owns: a replay's prompts are the same to the token where the tokenizer of the recorded calls is at hand.

- What `collect` recorded of a served model is compared with what the model's directory makes of it today, tools and
  the app's options for the template included; the run folder says which directory it was.
- A changed tokenizer or chat template is a divergence of its own kind, named once; a call whose messages are the same
  and whose token ids are not is named with its message, and with what renders it otherwise.
- In an app's own tests likewise, where the run folder is there or the model is named.
- Weights are not read, torch is not imported; what cannot be rendered as the engine did is said, and is no divergence.
"""

from __future__ import annotations

import dataclasses
import io
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from examples.test_wrapping import EXPECTED, GUIDES, serving
from rich.console import Console
from support.chat_rig import CHATML, save_chat_tokenizer
from support.compare_rig import save_model
from support.paths import ROOT

from marft_bridge import cli
from marft_bridge.commands.collect import collect
from marft_bridge.common.errors import ConfigError
from marft_bridge.common.import_name import load_name
from marft_bridge.common.progress import Reporter
from marft_bridge.config.bridge import toml_to_config
from marft_bridge.config.serve import ServeOptions
from marft_bridge.replay import prompt_ids, prompt_worker, replayed_run
from marft_bridge.replay.command import Outcome
from marft_bridge.replay.divergence import Divergence
from marft_bridge.replay.prompt_ids import config_to_models
from marft_bridge.replay.prompt_worker import chat_to_difference
from marft_bridge.replay.replayed_run import Replayed
from marft_bridge.sandbox.worker_process import WorkerPool
from marft_bridge.serving.prepare_model import holds_tokenizer
from marft_bridge.testing import replay
from trace_store.store import TraceStore

TEMPLATE = (
    "{% if tools %}{{ '<|im_start|>tools\\n' + (tools | tojson) + '<|im_end|>\\n' }}{% endif %}"
    "{% if loud %}{{ '<|im_start|>loud<|im_end|>\\n' }}{% endif %}{% for m in messages %}"
    "{{ '<|im_start|>' + m.role + '\\n' }}{% for t in m.tool_calls or [] %}"
    "{{ t.function.name + (t.function.arguments | tojson) }}{% endfor %}{{ (m.content or '') + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
LOUD = 'ChatOpenAI(model="gpt-4o-mini", temperature=0, extra_body={"chat_template_kwargs": {"loud": True}})'


def load_tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def engine(tokenizer: Any) -> Callable[[dict[str, Any]], list[int]]:
    """What a model server counts of a request: its arguments of tool calls are objects for the template."""

    def prompt_to_ids(body: dict[str, Any]) -> list[int]:
        messages = json.loads(json.dumps(body["messages"]))
        for call in (call for message in messages for call in message.get("tool_calls") or []):
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
        options = {"tools": body.get("tools"), "add_generation_prompt": True, **body.get("chat_template_kwargs", {})}
        text = tokenizer.apply_chat_template(messages, tokenize=False, **options)
        ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    return prompt_to_ids


def split_token(tokenizer: Any, ids: list[int]) -> tuple[int, list[int]]:
    """The first token of a message's content that has several letters, and the ids with its letters in its place."""
    texts = [tokenizer.decode([token]) for token in ids]
    position = next(n for n, text in enumerate(texts) if n >= 3 and text.isalpha() and len(text) > 1)
    letters = [tokenizer(letter, add_special_tokens=False)["input_ids"][0] for letter in texts[position]]
    return position, [*ids[:position], *letters, *ids[position + 1 :]]


def collected(folder: Path, guide: str, spoil: Callable[[dict[str, Any], list[int]], list[int]]) -> Path:
    """A project whose run folder has two episodes of a served model, with the ids that its tokenizer makes.

    Args:
        spoil: a request and its ids -> those that the server tells.
    """
    shutil.copytree(GUIDES, folder / "wrapping", ignore=shutil.ignore_patterns("__pycache__", "runs", "traces.*"))
    project = folder / "wrapping" / guide
    if guide == "chat_openai":
        app = (project / "app.py").read_text()
        (project / "app.py").write_text(app.replace('ChatOpenAI(model="gpt-4o-mini", temperature=0)', LOUD))
    save_model(project / "model")
    save_chat_tokenizer(project / "model", TEMPLATE)
    to_ids = engine(load_tokenizer(project / "model"))
    with pytest.MonkeyPatch.context() as patch, serving(EXPECTED[guide]) as server:
        patch.setenv("OPENAI_API_KEY", "x")
        patch.chdir(project)
        server.prompt_to_ids = lambda body: spoil(body, to_ids(body))
        config = toml_to_config(Path("bridge.toml"), {"collect.episodes": 2, "model.path": "model"})
        config = config.model_copy(update={"serve": ServeOptions(attach=server.url)})
        collect(config, Reporter(Console(file=io.StringIO(), width=200)), resume=False)
    return project


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return collected(tmp_path_factory.mktemp("recorded"), "chat_openai", lambda _, ids: ids)


@pytest.fixture
def project(recorded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy that a test may change, as the working directory."""
    shutil.copytree(recorded.parent, tmp_path / "wrapping")
    monkeypatch.chdir(tmp_path / "wrapping" / recorded.name)
    monkeypatch.setenv("OPENAI_API_KEY", "x")
    return Path.cwd()


def outcomes(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[dict[str, Any]]:
    capsys.readouterr()
    cli.run(["replay", "runs/app", "--json", *arguments])
    episodes: list[dict[str, Any]] = json.loads(capsys.readouterr().out)["episodes"]
    return episodes


def first_id(store: Path) -> str:
    with TraceStore.open(store, read_only=True) as reader:
        return reader.episodes()[0].episode_id


# -- what was collected -----------------------------------------------------------------------------------------------


def test_prompts_of_a_served_model_are_compared_to_the_token_with_its_options_for_the_template(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    episodes = outcomes(capsys)
    assert [(each["state"], each["prompts_compared"], each["note"]) for each in episodes] == [("same", 2, None)] * 2
    assert cli.run(["replay", "runs/app"]) == 0
    line = capsys.readouterr().out.splitlines()[0]
    assert re.search(r": same, 2 calls, 2 prompts to the token, in \d+\.\d\d s of the app's run, recorded in ", line)
    (project / "quiet.py").write_text((project / "app.py").read_text().replace('"loud": True', '"loud": False'))
    divergence = outcomes(capsys, "--app", "quiet.py:graph")[0]["divergence"]
    assert (divergence["kind"], divergence["node"], divergence["call"]) == ("prompt ids", "planner", 1)


@pytest.mark.slow
def test_prompts_with_tools_and_their_results_are_compared_to_the_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "x")
    monkeypatch.chdir(collected(tmp_path, "swarm", lambda _, ids: ids))
    for episode in outcomes(capsys):
        assert (episode["state"], episode["note"]) == ("same", None)
        assert episode["prompts_compared"] == episode["calls"] > 2


@pytest.mark.parametrize("part", ["tokenizer", "template"])
def test_a_changed_tokenizer_or_template_is_a_divergence_of_its_own_named_once(
    part: str, project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = project / "model" / ("tokenizer.json" if part == "tokenizer" else "chat_template.jinja")
    file.write_text(file.read_text() + "\n")
    title = {"tokenizer": "tokenizer", "template": "chat template"}[part]
    for episode in outcomes(capsys):
        divergence = episode["divergence"]
        assert (divergence["kind"], divergence["node"], divergence["call"]) == (part, None, None)
        assert re.fullmatch(
            rf'the {title} in model is not that of the recorded calls: recorded "[0-9a-f]{{12}}", now "[0-9a-f]{{12}}"',
            divergence["sentence"],
        )


def test_what_differs_in_the_messages_is_named_before_what_renders_them(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (project / "model/chat_template.jinja").write_text(CHATML)
    (project / "changed.py").write_text((project / "app.py").read_text().replace("one number", "one figure"))
    assert [each["divergence"]["kind"] for each in outcomes(capsys, "--app", "changed.py:graph")] == ["prompt"] * 2


def test_a_model_that_is_gone_or_whose_tokenizer_cannot_be_read_leaves_messages_compared(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (project / "model/tokenizer_config.json").write_text("{")
    for episode in outcomes(capsys):
        assert (episode["state"], episode["prompts_compared"]) == ("same", 0)
        assert episode["note"].startswith(
            "prompts compared without token ids: model.path: cannot read the tokenizer of model: "
        )
    shutil.rmtree(project / "model")
    assert [(each["state"], each["note"]) for each in outcomes(capsys)] == [("same", None)] * 2


def test_a_call_with_the_same_messages_in_other_tokens_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An engine of another version, say, that splits the writer's question otherwise."""
    tokenizer = load_tokenizer(save_chat_tokenizer(tmp_path / "model", TEMPLATE))
    positions = set()

    def spoil(body: dict[str, Any], ids: list[int]) -> list[int]:
        if "Plan:" not in body["messages"][-1]["content"]:
            return ids
        position, split_ids = split_token(tokenizer, ids)
        positions.add(position)
        return split_ids

    monkeypatch.setenv("OPENAI_API_KEY", "x")
    monkeypatch.chdir(collected(tmp_path, "chat_openai", spoil))
    for episode in outcomes(capsys):
        divergence = episode["divergence"]
        assert (divergence["kind"], divergence["node"], divergence["call"]) == ("prompt ids", "writer", 1)
        assert divergence["text"] == (
            f"the messages are the same, and the tokenizer splits them otherwise, from token {max(positions)} on,"
            " in message 0 (user)"
        )
        assert divergence["recorded"][:1] == divergence["replayed"][:1]  # the same text


# -- an app's own tests -----------------------------------------------------------------------------------------------


def test_an_apps_own_test_compares_to_the_token_where_the_run_folder_is_there_or_the_model_is_named(
    project: Path,
) -> None:
    graph, store = load_name("app.py:graph", "graph.app"), project / "runs/app/store.duckdb"
    episode_id = first_id(store)
    assert replay(graph, episode_id, store="runs/app").prompts_compared == 2
    assert replay(graph, episode_id, store=store).prompts_compared == 2
    shutil.copy(store, project / "alone.duckdb")
    assert replay(graph, episode_id, store="alone.duckdb").prompts_compared == 0
    assert replay(graph, episode_id, store="alone.duckdb", model="model").prompts_compared == 2
    with pytest.raises(ConfigError, match="replay: there is no tokenizer in nowhere; give the directory"):
        replay(graph, episode_id, store="alone.duckdb", model=Path("nowhere"))
    (project / "model/chat_template.jinja").write_text(CHATML)
    for arguments in ({"store": "runs/app"}, {"store": "alone.duckdb", "model": "model"}):
        with pytest.raises(AssertionError, match="the chat template in model is not that of the recorded calls"):
            replay(graph, episode_id, **arguments)


def test_a_run_that_goes_on_with_one_in_other_tokens_is_replayed_all_the_same() -> None:
    def outcome(divergence: Divergence) -> Outcome:
        return Outcome("4be1", "task", Replayed("4be1", divergence, 2, seconds=0.1, recorded_seconds=1.0))

    assert outcome(Divergence("template", None, None, text="another")).fault is None
    assert not outcome(Divergence("template", None, None, text="another")).is_same
    assert outcome(Divergence("result", None, None, text="another")).fault == "did not come out the same: another"


@pytest.mark.slow
def test_neither_weights_nor_torch_are_loaded(project: Path) -> None:
    for weights in (project / "model").glob("*.safetensors"):
        weights.write_bytes(b"not weights")
    script = "\n".join(
        [
            "import sys",
            "from marft_bridge import cli",
            "code = cli.run(['replay', 'runs/app'])",
            "assert not {'torch', 'transformers'} & set(sys.modules)",
            "from marft_bridge.replay import prompt_worker",
            "prompt_worker._load()",
            "prompt_worker._load_tokenizer('model', '')",
            "assert sys.modules['torch'] is None",
            "sys.exit(code)",
        ]
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "OPENAI_API_KEY": "x"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("2 prompts to the token") == 2


# -- one prompt -------------------------------------------------------------------------------------------------------

USER = {"role": "user", "content": "add two"}
SYSTEM = {"role": "system", "content": "right"}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return load_tokenizer(save_chat_tokenizer(tmp_path_factory.mktemp("chat"), TEMPLATE))


def difference(tokenizer: Any, text: str, *messages: dict[str, Any], **more: Any) -> Any:
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    chat = {"messages": messages, "tools": [], "options": {}, "ids": ids, "started_s": 1e9, "is_joined": False, **more}
    return chat_to_difference(tokenizer, chat)


def chatml(*messages: dict[str, Any], end: str = "<|im_start|>assistant\n") -> str:
    return "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages) + end


@pytest.mark.parametrize(
    ("text", "message", "role", "recorded"),
    [
        (chatml(SYSTEM, USER | {"content": "add four"}), 1, "user", " four<|im_end|>"),
        (chatml(SYSTEM | {"content": "left"}, USER), 0, "system", "left<|im_end|>"),
        (chatml(SYSTEM, USER, end="<|im_start|>tool\n"), -1, None, "tool\n"),
        (chatml(SYSTEM, USER, end=""), -1, None, None),
    ],
)
def test_the_first_difference_is_in_the_message_whose_text_differs_or_behind_them(
    tokenizer: Any, text: str, message: int, role: str | None, recorded: str | None
) -> None:
    found = difference(tokenizer, text, SYSTEM, USER)
    assert (found["message"], found["role"], found["is_same_text"]) == (message, role, False)
    assert found["recorded"] is None if recorded is None else found["recorded"].startswith(recorded)


def test_the_same_text_in_other_tokens_is_the_tokenizers(tokenizer: Any) -> None:
    ids = tokenizer(chatml(USER), add_special_tokens=False)["input_ids"]
    position, split_ids = split_token(tokenizer, ids)
    found = difference(tokenizer, "", USER, ids=split_ids)
    assert (found["token"], found["message"], found["is_same_text"]) == (position, 0, True)


def test_a_template_that_writes_the_date_has_that_of_the_recorded_call(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer, "chat_template", "{{ strftime_now('%Y') }}" + TEMPLATE)
    assert difference(tokenizer, "2001" + chatml(USER), USER) is None  # 1e9 s after 1970
    assert difference(tokenizer, "2026" + chatml(USER), USER) is not None


@pytest.mark.parametrize(
    ("hour", "days"),
    [(11, [27, 28, 29]), (0, [27, 28]), (23, [28, 29])],  # 11:00 is 23:00 the day before, and 01:00 the day behind
)
def test_the_date_of_a_server_in_any_time_zone_is_no_difference_and_rendered_only_where_it_is_written(
    hour: int, days: list[int], tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    started_s = datetime(2026, 11, 28, hour, tzinfo=UTC).timestamp()
    monkeypatch.setattr(tokenizer, "chat_template", "{{ strftime_now('%d') }}" + TEMPLATE)
    for day in range(26, 31):
        found = difference(tokenizer, f"{day}{chatml(USER)}", USER, started_s=started_s)
        assert (found is None) == (day in days)
    renders: list[tuple[Any, ...]] = []
    render = prompt_worker._render

    def count_render(*arguments: Any, **options: Any) -> str:
        renders.append(arguments)
        return render(*arguments, **options)

    monkeypatch.setattr(prompt_worker, "_render", count_render)
    assert difference(tokenizer, f"{days[-1]}{chatml(USER)}", USER, started_s=started_s) is None
    assert len(renders) <= 1 + 4 * len(days)
    renders.clear()
    monkeypatch.setattr(tokenizer, "chat_template", TEMPLATE)
    assert difference(tokenizer, "other", USER, started_s=started_s) is not None
    assert len(renders) == 1 + 4 + 1  # itself, its forms, and the message that holds the difference


def test_contents_that_a_server_gave_as_parts_or_left_out_are_no_difference(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    by_parts = TEMPLATE.replace("(m.content or '')", "(m.content if m.content is string else m.content[0].text + '!')")
    monkeypatch.setattr(tokenizer, "chat_template", by_parts)
    assert difference(tokenizer, chatml({"role": "user", "content": "add two!"}), USER) is None
    assert difference(tokenizer, chatml(USER), USER) is None
    may_lack = TEMPLATE.replace("(m.content or '')", "('none' if m.content is none else m.content)")
    monkeypatch.setattr(tokenizer, "chat_template", may_lack)
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add", "arguments": {}}}]}
    assert difference(tokenizer, chatml(USER, {**call, "content": "add{}none"}), USER, call) is None
    assert difference(tokenizer, chatml(USER, {**call, "content": "add{}"}), USER, call) is None


def test_what_the_template_refuses_is_no_difference(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer, "chat_template", "{{ raise_exception('no') }}")
    assert difference(tokenizer, "", USER) == {"refused": "the chat template refuses its messages"}


def test_several_texts_that_a_server_may_join_otherwise_are_no_difference(tokenizer: Any) -> None:
    joined = USER | {"content": "add\ntwo"}
    assert difference(tokenizer, chatml(joined), joined, is_joined=True) is None
    assert "refused" in difference(tokenizer, chatml(USER), joined, is_joined=True)
    assert difference(tokenizer, chatml(USER), joined)["message"] == 0


def test_a_server_that_renders_by_arguments_of_its_own_is_known_by_its_nodes() -> None:
    serve = {"extra_args": ["--default-chat-template-kwargs", '{"enable_thinking": false}']}
    config = {
        "model": {"path": "a"},
        "graph": {"nodes": ["plan", "write"], "frozen": ["judge"]},
        "models": {"small": {"path": "b", "nodes": ["judge"], "serve": serve}},
    }
    models = config_to_models(config)
    assert models is not None
    assert models.directories == {"": Path("a"), "judge": Path("b")}
    assert (models.nodes, models.other_rendering) == ({"plan", "write", "judge"}, {"judge"})
    models = config_to_models({**config, "serve": {"extra_args": ["--chat_template=x.jinja"]}, "models": {}})
    assert models is not None
    assert models.other_rendering == {"plan", "write", "judge"}
    assert config_to_models({"graph": {}}) is None


# -- which model it was -----------------------------------------------------------------------------------------------


def test_the_variants_on_the_models_of_a_configuration_are_those_of_its_plan_or_else_its_declared_ones() -> None:
    tables = [
        {"name": "base"},
        {"name": "same", "model": "a"},
        {"name": "large", "model": "b"},
        {"name": "own", "own_models": True},
    ]
    plan = {"variants": [{"name": "base", "model": None}, {"name": "large", "model": "b"}, {"name": "mixed"}]}

    def variants(config: dict[str, Any]) -> set[str]:
        models = config_to_models({"model": {"path": "a"}, **config})
        assert models is not None
        assert models.variants is not None
        return set(models.variants)

    assert variants({"compare": {"variants": tables}}) == {"base", "same"}
    assert variants({"compare": {"variants": tables}, "plan": plan}) == {"base", "mixed"}
    assert variants({"compare": {"variants": []}}) == {"before", "after"}
    assert variants({"compare": 1, "plan": {"variants": "x"}}) == {"before", "after"}


def test_a_variant_on_another_model_is_noted_and_no_divergence(
    project: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (project / "model/chat_template.jinja").write_text(CHATML)
    monkeypatch.setattr(
        replayed_run, "_compare_prompts", partial(compare_as_variant, replayed_run._compare_prompts, "large")
    )
    for episode in outcomes(capsys):
        assert (episode["state"], episode["prompts_compared"]) == ("same", 0)
        assert episode["note"] == (
            "prompts compared without token ids: variant 'large' may run on another model than those noted"
        )


def compare_as_variant(compare: Callable[..., Replayed], variant: str, run: Any, *rest: Any, **more: Any) -> Replayed:
    """As if the run were one of a comparison."""
    episode = dataclasses.replace(run.trajectory.episode, variant=variant)
    trajectory = dataclasses.replace(run.trajectory, episode=episode)
    return compare(dataclasses.replace(run, trajectory=trajectory), *rest, **more)


def test_a_run_is_held_against_the_model_of_its_own_configuration(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(project / "model", project / "later")
    (project / "later/chat_template.jinja").write_text(CHATML)
    notes = json.loads((project / "runs/app/bridge.json").read_text())
    later = json.loads(json.dumps(notes["collect"]))
    later["config"]["model"]["path"] = "later"
    (project / "runs/app/bridge.json").write_text(json.dumps({"train": later, **notes}))
    assert [(each["state"], each["prompts_compared"]) for each in outcomes(capsys)] == [("same", 2)] * 2
    graph, episode_id = load_name("app.py:graph", "graph.app"), first_id(project / "runs/app/store.duckdb")
    assert replay(graph, episode_id, store="runs/app").prompts_compared == 2


def test_a_folder_that_may_not_be_looked_into_is_noted_and_a_name_that_no_file_system_takes_holds_no_tokenizer(
    project: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not holds_tokenizer(Path("x" * 300))

    def refuse(directory: Path) -> str:
        raise PermissionError(13, "Permission denied", str(directory))

    monkeypatch.setattr(prompt_ids, "_directory_to_stamp", refuse)
    for episode in outcomes(capsys):
        assert (episode["state"], episode["prompts_compared"]) == ("same", 0)
        assert episode["note"] == "prompts compared without token ids: [Errno 13] Permission denied: 'model'"


# -- a folder that anybody may have written ---------------------------------------------------------------------------


def replies(folder: Path, count: int = 1) -> list[Any]:
    """Of the worker, to so many jobs with one prompt."""
    chat = {"messages": [USER], "tools": [], "options": {}, "ids": [1], "started_s": 1e9, "is_joined": False}
    pool = WorkerPool(prompt_ids._WORKER, 1)
    try:
        return [pool.run_job({"model": str(folder), "stamp": "", "chats": [chat]}, 30.0) for _ in range(count)]
    finally:
        pool.close()


def test_a_template_cannot_take_the_hosts_memory(tmp_path: Path) -> None:
    folder = save_chat_tokenizer(tmp_path / "model", "{{ 'a' * 6000000000 }}")
    assert replies(folder) == [{"differences": [{"refused": "the chat template refuses its messages"}]}]


def test_code_of_a_models_folder_is_refused_without_a_question_on_the_pipe_of_the_jobs(tmp_path: Path) -> None:
    folder = save_chat_tokenizer(tmp_path / "model", TEMPLATE)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config |= {"tokenizer_class": "OwnTokenizer", "auto_map": {"AutoTokenizer": ["own.OwnTokenizer", None]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "own.py").write_text("raise SystemExit('code of the folder ran')\n")
    first, second = replies(folder, 2)
    assert "trust_remote_code=True" in first["refused"]
    assert second == first
