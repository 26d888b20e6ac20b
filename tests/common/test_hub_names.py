"""Owns: names of the Hugging Face Hub.

- A name, with a branch, a commit or nothing, is the snapshot that the real library finds in the cache, wherever the
  environment says that the cache is; a directory of that name goes first.
- What is not there is one line with the command that fetches it; nothing is downloaded and nobody is asked.
- A record has the commit that a name stood for. Without the library the line names the extra.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import huggingface_hub.constants
import pytest
from support.compare_rig import save_model
from support.hub_cache import NAME, put_in_cache
from support.paths import ROOT

from marft_bridge.common.errors import ConfigError
from marft_bridge.common.hub_names import (
    HubName,
    directory_to_hub_name,
    model_to_directory,
    model_to_pinned,
    text_to_hub_name,
)

OLD, NEW = "a" * 40, "b" * 40


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache with two snapshots of one model: that of `main`, and an older one that `v1` is."""
    folder = tmp_path / "hub"
    put_in_cache(folder, save_model(tmp_path / "old", 1.0), OLD, branch="v1")
    put_in_cache(folder, save_model(tmp_path / "new", 2.0), NEW)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(folder))
    monkeypatch.setattr(socket.socket, "connect", lambda *_: pytest.fail("a connection was made"))
    monkeypatch.chdir(tmp_path)
    return folder


@pytest.mark.parametrize(
    ("text", "commit"), [(NAME, NEW), (f"{NAME}@main", NEW), (f"{NAME}@v1", OLD), (f"{NAME}@{OLD}", OLD)]
)
def test_a_name_is_its_snapshot_in_the_cache(cache: Path, text: str, commit: str) -> None:
    directory = model_to_directory(text)
    assert directory == cache / "models--acme--tiny-llama/snapshots" / commit
    assert (directory / "config.json").is_file()
    assert model_to_pinned(text) == f"{NAME}@{commit}"
    assert directory_to_hub_name(directory) == HubName(NAME, commit)


@pytest.mark.parametrize(
    ("text", "command"),
    [
        ("acme/unknown", "hf download acme/unknown"),
        (f"{NAME}@v2", f"hf download {NAME} --revision v2"),
        (f"{NAME}@{'c' * 40}", f"hf download {NAME} --revision {'c' * 40}"),
        ("acme/two--dashes", "hf download acme/two--dashes"),
    ],
)
def test_what_is_not_in_the_cache_is_one_line_with_the_command_that_fetches_it(
    cache: Path, text: str, command: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        model_to_directory(text)
    line = f"{text!r} is neither a directory here nor in the Hugging Face cache {cache}: {command}"
    assert str(refused.value) == line
    assert model_to_pinned(text) == text


@pytest.mark.parametrize("text", ["smollm2-135m", "/models/x", "./models/x", "models/x/", "a/b/c", "..", "a/b@"])
def test_what_has_another_form_is_a_path(text: str) -> None:
    assert text_to_hub_name(text) is None
    assert model_to_directory(text) == Path(text)
    assert model_to_pinned(text) == text


def test_a_directory_of_that_name_goes_first(cache: Path) -> None:
    save_model(Path(NAME))
    assert model_to_directory(NAME) == Path(NAME)
    assert model_to_pinned(NAME) == NAME
    assert directory_to_hub_name(Path(NAME).resolve()) is None


_PRINT = "from marft_bridge.common.hub_names import model_to_directory; print(model_to_directory('acme/tiny-llama'))"


@pytest.mark.parametrize("variable", ["HF_HOME", "HF_HUB_CACHE"])
def test_the_cache_is_where_the_environment_says(cache: Path, tmp_path: Path, variable: str) -> None:
    place = {"HF_HOME": tmp_path, "HF_HUB_CACHE": cache}[variable]
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    environment = kept | {variable: str(place), "PYTHONPATH": str(ROOT)}
    answer = subprocess.run([sys.executable, "-c", _PRINT], env=environment, capture_output=True, text=True, check=True)
    assert json.dumps(answer.stdout.strip()) == json.dumps(str(cache / f"models--acme--tiny-llama/snapshots/{NEW}"))


def test_without_the_library_the_line_names_the_extra(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    program = "import support.light_core\n" + _PRINT
    answer = subprocess.run(
        [sys.executable, "-c", program], env=environment, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    line = (
        "'acme/tiny-llama' is no directory here, and a name of the Hugging Face Hub needs huggingface_hub: "
        "pip install 'marft-bridge[train]'"
    )
    assert answer.stderr.strip().endswith(line)
