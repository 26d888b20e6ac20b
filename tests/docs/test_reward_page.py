"""Owns: the configuration that docs/rewards.md shows.

- Every kind has a row, an example or a paragraph.
- Every TOML block of the page loads as a part of a bridge.toml.
- The example of math, code and judge gives the values that stand below it.
"""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import pytest
from support.fake_vllm import FakeVllm, running
from support.paths import ROOT

from marft_bridge.config.bridge import BridgeConfig, toml_to_config
from marft_bridge.rewards import registry
from marft_bridge.rewards.contract import ModelAddress, RewardEnvironment, RunView
from marft_bridge.rewards.math import close_workers
from marft_bridge.rewards.scoring import Scorer

DOCS = ROOT / "docs"
PAGES = {name: (DOCS / name).read_text() for name in ("rewards.md",)}
BLOCK = re.compile(r"(?:<!-- (\w+) -->\n)?```toml\n(.*?)```", re.DOTALL)
SHOWN = [
    pytest.param(block, id=f"{name}:{place}")
    for name, page in PAGES.items()
    for place, (_, block) in enumerate(BLOCK.findall(page))
]
GRAPH = '[graph]\napp = "a:b"\nnodes = ["planner", "worker"]\ntasks = "t.jsonl"\n'


def load(block: str, folder: Path) -> BridgeConfig:
    """The block in a bridge.toml; a function gives the `reward` that is trained on if it has none."""
    function = "" if 'name = "reward"' in block else 'reward = "a:r"\n'
    (folder / "bridge.toml").write_text(GRAPH + function + '[compare]\nmetric = "reward"\n' + block)
    return toml_to_config(folder / "bridge.toml")


@pytest.mark.parametrize("block", SHOWN)
def test_every_configuration_that_is_shown_is_valid(block: str, tmp_path: Path) -> None:
    config = load(block, tmp_path)
    shown = re.findall(r"^\[\[([\w.]+)\]\]", block, re.MULTILINE)
    assert shown
    assert len(config.rewards) == shown.count("rewards")
    assert len(config.train.trainer.shaping) == shown.count("train.trainer.shaping")


def test_no_block_of_a_page_is_missed() -> None:
    for page in PAGES.values():
        assert len(BLOCK.findall(page)) == page.count("```toml") > 0


def test_every_kind_of_reward_has_a_row_an_example_or_a_paragraph() -> None:
    kinds = {kind.options.model_fields["kind"].default for kind in registry._KINDS.values()}
    shown = re.findall(r'^(?:\| `|kind = "|`)(\w+)[`"]', PAGES["rewards.md"], re.MULTILINE)
    assert kinds - set(shown) == set()


def judge(body: dict[str, Any]) -> str:
    """Seven points for an answer to the question that the page shows."""
    system, user = (str(message["content"]) for message in body["messages"])
    nonce = re.search(r'"nonce": "(\w+)"', system)
    assert nonce is not None
    assert "Can a pupil follow how 2x = 1 is solved?" in user
    return json.dumps({"nonce": nonce[1], "reason": "each step is there", "score": 7})


def test_the_example_of_math_code_and_judge_has_the_values_below_it(tmp_path: Path) -> None:
    ((_, block), *_) = (found for found in BLOCK.findall(PAGES["rewards.md"]) if found[0] == "checked")
    written = dict(re.findall(r"^\| `(right|tests|clear)` \| ([\d.]+) \|", PAGES["rewards.md"], re.MULTILINE))
    told = PAGES["rewards.md"].split("For the task ")[1].split(":\n")[0].replace("\n", " ")
    task, result = ({**quoted(part)} for part in told.split("and a run that ends with"))
    assert (set(task), set(result)) == ({"question", "gold", "tests"}, {"answer", "program"})
    with running(FakeVllm()) as server:
        server.answer = judge
        place = RewardEnvironment(tmp_path, ModelAddress(f"{server.url}/v1", "base", "k"))
        try:
            run = RunView({"id": "t"} | task, result, environment=place)
            score = asyncio.run(Scorer(load(block, tmp_path).rewards).run_to_score(run))
        finally:
            close_workers()
    assert score.absent == {}
    assert score.team == pytest.approx({name: float(value) for name, value in written.items()})
    assert set(written) == {"right", "tests", "clear"}


def quoted(text: str) -> dict[str, Any]:
    """Fields as the page writes them: `name = value`, a value as in TOML's basic or JSON's forms, backslashes as is."""
    pairs = re.findall(r"`(\w+) = (.*?)`", text)
    return {name: json.loads(value.replace("\\", "\\\\")) for name, value in pairs}
