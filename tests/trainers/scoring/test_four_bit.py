"""Owns: a base model in 4 bits, on the real bitsandbytes, which is installed for these tests alone
(requirements/qlora.txt).

- Log-probs, hidden states and gradients are those of plain layers with the dequantised weights, and these are those of
  the paper's table; so is every way to update, with layers computed again and with several learners.
- Embeddings, norms, head and adapters are not quantised; memory is what was planned; a run resumes bit for bit, and its
  adapters are plain ones of the same base.
- A changed scale of a frozen weight is found. What engine and trainer may differ by depends on what corrects for it.
- The Python of docs/gpus.md writes a folder with the weights that the 4 bits stand for.
"""

from __future__ import annotations

import io
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from support.card_rig import FOUR_BIT, config_of
from support.own_environment import make_environment
from support.paths import ROOT
from support.shared_update import UPDATES
from support.tiny_policy import save_tiny_llama

from marft_bridge.common.errors import ConfigError
from marft_bridge.common.progress import Reporter
from marft_bridge.training.train import train
from trainers.config import LoraOptions
from trainers.errors import TrainError
from trainers.scoring.fast_layers import speed_up
from trainers.scoring.four_bit import four_bit_layers, scales
from trainers.scoring.model import PolicyModel

real = [pytest.mark.slow, pytest.mark.timeout(900)]


def test_without_bitsandbytes_one_line_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = r"load_in_4bit needs bitsandbytes: pip install 'marft-bridge\[qlora\]'"
    with pytest.raises(TrainError, match=said):
        PolicyModel(save_tiny_llama(tmp_path), ["a"], LoraOptions(), "cpu", 0, load_in_4bit=True)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=said):  # before a server is started in vain
        train(config_of(tmp_path, FOUR_BIT), Reporter(Console(file=io.StringIO())), resume=False)


def test_a_plain_base_has_no_layer_in_4_bits(tmp_path: Path) -> None:
    model = PolicyModel(save_tiny_llama(tmp_path), ["a"], LoraOptions(), "cpu", 0)
    assert (list(four_bit_layers(model.peft)), scales(model.peft)) == ([], {})


def test_speeding_up_leaves_the_matrices_of_adapters_that_rest_alone() -> None:
    """On a 4-bit layer they are called as modules, and learn once they are active."""
    model = torch.nn.ModuleDict({"base": torch.nn.Linear(4, 4), "lora_A": torch.nn.ModuleDict()})
    model["lora_A"]["resting"] = torch.nn.Linear(4, 2, bias=False)
    layers = torch.nn.ModuleDict({"layer": model}).requires_grad_(False)
    speed_up(layers)
    assert "forward" in model["base"].__dict__
    assert "forward" not in model["lora_A"]["resting"].__dict__


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What support/four_bit_laws.py saw, in an environment with bitsandbytes before the packages of this one."""
    folder = tmp_path_factory.mktemp("qlora")
    python = make_environment(folder, ROOT / "requirements/qlora.txt")
    (folder / "laws").mkdir()
    done = subprocess.run(
        [python, "-W", "ignore", "-m", "support.four_bit_laws", folder / "laws"],
        env=os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=700,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])


class TestOnTheRealLibrary:
    pytestmark = real

    @pytest.mark.parametrize("kind", ["llama with biases", "qwen3"])
    def test_passes_and_gradients_are_those_of_the_dequantised_weights(self, seen: Any, kind: str) -> None:
        found = seen["equals_whole_weights"][kind]
        assert found["packs"]
        assert max(found["gap"], found["gap_computed_again"]) < 1e-5
        assert found["gap_of_plain_base"] > 0.1  # so that the law says something
        assert found["layers"] == 7 * 20
        assert found["kept"] == ["torch.float32"]
        assert found["same_base"]

    def test_the_weights_are_those_of_the_papers_table(self, seen: Any) -> None:
        assert seen["bits_by_hand"] < 1e-6

    def test_rows_that_blocks_cut_are_refused_where_the_library_mixes_their_scales(self, seen: Any) -> None:
        assert "reads 96 numbers, and on the CPU only multiples of 64" in seen["uneven_width"]

    def test_memory_is_what_was_planned(self, seen: Any) -> None:
        assert seen["memory"]["weights"] == pytest.approx(1)
        assert seen["memory"]["activations"] == pytest.approx(1, abs=0.05)
        assert seen["memory"]["of_float32"] < 0.14

    @pytest.mark.parametrize("name", UPDATES)
    def test_every_update_is_that_on_the_dequantised_weights(self, seen: Any, name: str) -> None:
        way = seen["ways"][name]
        assert way["same"], way
        assert way["gap_of_plain_base"] > 100 * way["gap"]

    def test_a_run_resumes_bit_for_bit_and_its_adapters_are_plain_ones(self, seen: Any) -> None:
        assert seen["resume"] == {"resumed": True, "adapter": True, "quantised": []}

    def test_two_learners_compute_the_update_of_one(self, seen: Any) -> None:
        assert seen["processes"]["equal"]
        assert seen["processes"]["gap"] < 1e-5

    def test_a_changed_scale_is_a_changed_weight(self, seen: Any) -> None:
        assert "q_proj.base_layer.absmax' changed while adapters were trained" in seen["changed_scale"]

    def test_a_gap_passes_where_it_is_corrected_for_up_to_the_tolerance(self, seen: Any) -> None:
        engines = seen["engines"]
        assert min(engines["gap"]) > 0.06
        assert engines["corrected"] is None
        assert "more than 0.01: check which model, adapter and template the server serves, or have" in engines["far"]

    def test_a_gap_that_nothing_corrects_for_is_refused_beyond_rounding(self, seen: Any) -> None:
        engines = seen["engines"]
        assert "more than 0.06: set train.trainer.importance.mismatch to 'truncate', or have" in engines["uncorrected"]
        assert "more than 0.01: serve in float32, or set" in engines["engine"]
        assert engines["not quantised"] is None

    def test_an_engine_that_serves_the_dequantised_base_passes_without_a_correction(self, seen: Any) -> None:
        assert (seen["engines"]["same"], seen["engines"]["same, engine"]) == (None, None)

    def test_the_page_writes_a_plain_base_that_4_bits_hold_again(self, seen: Any) -> None:
        """The Python of docs/gpus.md, which `page` of support/four_bit_laws.py runs as it stands."""
        page = seen["page"]
        assert {"config.json", "model.safetensors", "tokenizer.json"} <= set(page["files"])
        assert 4 * page["gap"] < page["gap_of_plain_base"]  # rounding of a tiny random model, in bfloat16
