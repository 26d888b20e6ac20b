"""Owns: docs/training.md says what the trainer does.

Its TOML is valid, its Python runs and prints what it claims, also in two processes; every option, module and
message that it names is there, and every option and module that is there is named.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import get_args

import pytest
import torch
from support.pages import trainer_options_page
from support.pages.trainer_options_page import options
from support.paths import ROOT
from support.sample_spans import SampleTrace
from support.tiny_policy import AGENTS, both_low, play, save_tiny_llama
from support.trainer_options import trainer_options

from marft_bridge import cli
from marft_bridge.config.bridge import BridgeConfig
from trace_store.journal import Journal
from trace_store.records import Reward, RewardScope
from trace_store.store import TraceStore
from trainers.advantages.estimator import estimators
from trainers.advantages.recurrences import adaptive_lambda
from trainers.config import AdvantageOptions, OfflineOptions, TrainerOptions
from trainers.marft import MarftTrainer

TEXT = (ROOT / "docs/training.md").read_text()
FLOW = (ROOT / "docs/flow.md").read_text()
SOURCE = "".join(path.read_text() for folder in ("trainers", "marft_bridge") for path in (ROOT / folder).rglob("*.py"))


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", TEXT, flags=re.DOTALL)


def rows(heading: str, text: str = TEXT) -> list[list[str]]:
    """The rows of the tables whose headers begin so."""
    tables = re.findall(rf"^\| {re.escape(heading)} \|.*\n\|[-|]+\|\n((?:\|.*\n)+)", text, flags=re.MULTILINE)
    lines = [line for table in tables for line in table.splitlines()]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the page's programs find: two small models, and a store of episodes that the first of them played."""
    folder = tmp_path_factory.mktemp("page")
    save_tiny_llama(folder / "model")
    save_tiny_llama(folder / "larger-model", hidden=64)
    player = MarftTrainer(trainer_options(device="cpu"), folder / "model", AGENTS, seed=0)
    with TraceStore.open(folder / "store.duckdb") as store:
        journal = Journal(store.journal_folder)
        for number, played in enumerate(play(player, 12, torch.Generator().manual_seed(0), both_low)):
            trace = SampleTrace(f"{number + 1:x}")
            before: tuple[str, ...] = ()
            for step, action in enumerate(played.actions):
                node = trace.node(f"{action.node}:1", 10 * step, 10 * step + 9, step=step, after=before)
                trace.call(
                    f"call{step}",
                    node,
                    10 * step + 1,
                    10 * step + 8,
                    PROMPT_IDS=list(action.prompt_ids or ()),
                    SAMPLED_IDS=list(action.sampled_ids or ()),
                    LOGPROBS=list(action.logprobs or ()),
                    USAGE_OUTPUT_TOKENS=1,
                    REQUEST_TEMPERATURE=1.0,
                )
                before = (node,)
            for span in trace.spans(TASK_ID=played.episode.task_id):
                journal.append(span)
            reward = played.team_reward("reward")
            assert reward is not None
            journal.append(Reward(trace.trace_id, "reward", reward, "test", 1))
        journal.close()
        store.take_in()
    return folder


def run(folder: Path, command: list[str]) -> str:
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HOME": str(folder),  # where accelerate would look for a configuration of the user's
    }
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_program_of_the_page_runs_from_top_to_bottom_and_prints_what_it_claims(folder: Path) -> None:
    program = [block for block in blocks("python") if not block.startswith("# ")]
    assert len(program) == 6
    said = run(folder, [sys.executable, "-c", "\n".join(program)])
    (table,) = blocks("text")
    before, table_said, after = said.partition(table)
    assert table_said, said
    assert before == "['actor', 'reasoner'] 12\n"
    # two base models of width 32 and 64; of 9 fresh episodes and a share of 1/4, 9 * (1/4) / (3/4) = 3 are older
    assert after.splitlines() == ["32 64", "3 of 12", "1 round done"]
    assert (folder / "adapters/actor@2/adapter_model.safetensors").is_file()
    assert (folder / "exported/merged/model.safetensors").is_file()


def test_the_table_of_rewards_is_what_was_worked_by_hand() -> None:
    """gamma 0.9, two links from the planner to the writer; 0.5 for what s1 found; 0.3 for the writer's format."""
    (table,) = blocks("text")
    by_hand = {
        "p": [0.9 * 0.9 * 1, 0.9 * 0.9 * -0.2, 0.9 * 0.5, 0.0],
        "s1": [0.9 * 1, 0.9 * -0.2, 0.5, 0.0],
        "s2": [0.9 * 1, 0.9 * -0.2, 0.0, 0.0],
        "w": [1, -0.2, 0.0, 0.3],
    }
    for line in table.splitlines()[1:]:
        name, *figures = line.split()
        assert [float(figure) for figure in figures] == pytest.approx([*by_hand[name], sum(by_hand[name])], abs=5e-4)
    assert len(table.splitlines()) == 1 + len(by_hand)


LAUNCHERS = {
    "torchrun": ("torch.distributed.run", "--master-addr=127.0.0.1", "--master-port={port}"),
    "accelerate": ("accelerate.commands.launch", "--main_process_port={port}"),
}


@pytest.mark.slow
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_the_script_for_several_processes_runs_as_the_page_starts_it(folder: Path, launcher: str) -> None:
    (script,) = [block for block in blocks("python") if block.startswith("# train_two.py\n")]
    (folder / "train_two.py").write_text(script)
    shutil.rmtree(folder / "shared-checkpoint", ignore_errors=True)
    (line,) = [line for block in blocks("sh") for line in block.splitlines() if line.startswith(launcher)]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    _, *arguments = line.removeprefix("accelerate ").split()
    module, *flags = LAUNCHERS[launcher]
    launch = [sys.executable, "-m", module, *(flag.format(port=port) for flag in flags)]
    assert run(folder, [*launch, *arguments]) == "2 processes, 12 episodes\n"
    assert (folder / "shared-checkpoint/trainer.json").is_file()


def test_the_toml_blocks_are_valid_configurations() -> None:
    graph = {"app": "a.py:a", "nodes": ["reasoner", "actor"], "tasks": "t.jsonl", "reward": "a.py:r"}
    found = [BridgeConfig.model_validate({"graph": graph} | tomllib.loads(block)) for block in blocks("toml")]
    assert len(found) == 19
    assert [config.train.trainer.replay.successes for config in found].count(0.3) == 1
    token, _, shaped, *_ = [config.train.trainer for config in found]
    assert [adaptive_lambda(n, token.experimental.adaptive_alpha) for n in (1, 2, 4)] == [0.0, 0.0, 0.5]
    assert [term.level for term in shaped.shaping] == ["episode", "step", "agent"]


def test_the_commands_on_the_page_exist(capsys: pytest.CaptureFixture[str]) -> None:
    lines = [line.split("#")[0].split() for block in blocks("sh") for line in block.splitlines()]
    shown = [words[1:] for words in lines if words[0] == "marft-bridge"]
    assert {words[0] for words in shown} == {"export", "distil", "train", "compare"}
    for command, *words in shown:
        assert cli.run([command, "--help"]) == 0
        helped = capsys.readouterr().out
        assert {word for word in words if word.startswith("--")} <= set(re.findall(r"--\w+", helped)), command


def test_the_page_of_options_shows_those_that_are_declared() -> None:
    written = trainer_options_page.PAGE.read_text()
    assert written == trainer_options_page.page(), "run `make pages`"
    listed = [row[0].strip("`") for row in rows("option | default", written)]
    assert {"objective.clip_low", "agents.<agent>.lr", "shaping[].level", "experimental.schedule.kind"} < set(listed)
    assert sorted(listed) == sorted(options())
    schema = TrainerOptions.model_json_schema()  # pydantic's own walk over the options
    names = {name for part in (schema, *schema["$defs"].values()) for name in part["properties"]}
    assert {part for name in listed for part in re.split(r"[.\[]", name)} - {"", "]", "<agent>"} == names


def test_every_option_that_the_guide_names_is_there_and_every_folder_and_module() -> None:
    known = {part for name in options() for part in re.split(r"[.\[]", name)}
    named = set(
        re.findall(r"`(?:experimental\.|objective\.|offline\.|replay\.|critic\.)?([a-z]+_[a-z_]+)(?: = [^`]+)?`", TEXT)
    )
    elsewhere = {
        "warm_up",
        "draw_replay",
        "draw_successes",
        "factor_mean",
        "kl_after",
        "kl_of_call",
        "step_share",
        "gradient_share",
        "retokenised_share",
        "forced_share",
        "wasted_rollouts",
        "flat_groups",
        "value_weights",
        "stopped_by",
        "distilled_from",  # a tag
        "start_from",
        "max_tokens",  # of a variant of compare
    }
    elsewhere |= {"recorded_first", "recorded_only", "tool_choice", "replayed_from"}  # of train.hosted_answers
    elsewhere |= {"rank_consistency", "dr_mas", "at_grpo", "tree_grpo", "blind_fork", "advantage_alignment", "hrpo"}
    assert named - elsewhere <= known
    for path in re.findall(r"`((?:trainers|examples)/[\w./]*)`", TEXT + FLOW):
        assert (ROOT / path).exists(), path


def test_estimators_modes_and_levels_are_those_of_the_options() -> None:
    assert sorted(row[0].strip("`") for row in rows("`estimator`")) == sorted(estimators())
    assert {row[0].strip("`") for row in rows("`level`")} == set(get_args(RewardScope))
    modes = {row[0].strip("`"): row[2] for row in rows("`offline.mode`")}
    assert set(modes) == set(get_args(OfflineOptions.model_fields["mode"].annotation))
    for mode, needs in modes.items():
        assert needs == ("yes" if OfflineOptions.model_validate({"mode": mode}).needs_behaviour else "no"), mode


def test_defaults_that_depend_on_others_are_those_of_the_options() -> None:
    said = {row[0].strip("`"): row[1] for row in rows("option | left out, it is")}
    assert said["normalize"] == "`agent` for `gae` and `rae`, `none` for the others"
    for name, estimator in estimators().items():
        expected = "agent" if name in ("gae", "rae") else "none"
        assert AdvantageOptions(estimator=name).normalization == estimator.normalization == expected
    assert said["weighting"] == "`episode` for `action`, `token` for `token`"
    assert trainer_options(granularity="action").loss_weighting == "episode"
    assert trainer_options(granularity="token").loss_weighting == "token"
    assert said["group_weight"] == "`step` for `dr_mas`, `trajectory` for `grpo`"
    weights = {name: getattr(each, "default_weight", None) for name, each in estimators().items()}
    assert (weights["dr_mas"], weights["grpo"]) == ("step", "trajectory")


def test_every_message_that_is_explained_can_be_raised() -> None:
    joined = re.sub(r'"\s+f?"', "", SOURCE)  # a message goes over several lines of source
    explained = rows("the message says") + rows("the warning says")
    messages = [message for row in explained for message in re.findall(r"`(.+?)`", row[0])]
    assert len(messages) == 17
    for message in messages:
        assert message in joined, message


def test_the_figures_about_long_answers_are_right() -> None:
    assert "0.99 per token leaves 0.6 % of a reward 512 tokens away" in " ".join(TEXT.split())
    assert round(100 * 0.99**512, 1) == round(100 * 0.95**100, 1) == 0.6
    assert [adaptive_lambda(n, 0.05) for n in (1, 20, 100, 1000)] == pytest.approx([0, 0, 0.8, 0.98])
