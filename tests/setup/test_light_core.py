"""Owns: what `pip install marft-bridge` brings without any extra, and what it costs.

- Recording, the store, `traces`, `ingest`, `view` and `init` work where none of the extras' packages is installed.
- A command whose extra is missing ends in one line that names it, before it reads or runs anything.
- Recording imports neither our `trainers` nor the configuration; an app may have `graphs/` and `trainers/` of its own.
- The wheel alone, in a fresh environment of each Python: at most 300 MB, and the app runs as before.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest
from support.ingest_rig import foreign_requests
from support.light_app import write_app
from support.paths import ROOT

MAX_MB = 300
MAX_INSTALL_S = 120  # a minute on a quiet machine


@pytest.fixture
def app(tmp_path: Path) -> Path:
    return write_app(tmp_path / "app")


def run_light(code: str, cwd: Path, *arguments: str, is_app: bool = False) -> subprocess.CompletedProcess[str]:
    """Runs Python code without the packages of the extras; an app's own folder is the first on its path."""
    paths = [*([str(cwd)] if is_app else []), str(ROOT), str(ROOT / "tests")]
    return subprocess.run(
        [sys.executable, "-W", "error", "-P", "-c", f"import support.light_core\n{code}", *arguments],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
    )


COMMAND = """
import sys
from marft_bridge.cli import run
sys.exit(run(sys.argv[1:]))
"""


def command(app: Path, *arguments: str) -> str:
    """The output of a command in the app's folder; it must end well."""
    process = run_light(COMMAND, app, *arguments)
    assert process.returncode == 0, process.stderr
    return process.stdout


RECORD = """
import sys
from marft_bridge import wrap
from graphs.support import build
from trainers.coach import ADVICE

graph = wrap(build(), "traces.duckdb")
assert graph.invoke({"question": "How fast?"})["answer"].startswith(ADVICE)
print(sorted(name for name in sys.modules if name.partition(".")[0] == "trainers"))
print("marft_bridge.config.bridge" in sys.modules)
"""


def test_an_app_with_a_trainers_of_its_own_is_recorded_without_the_extras_and_without_ours(app: Path) -> None:
    process = run_light(RECORD, app, is_app=True)
    assert process.returncode == 0, process.stderr
    assert process.stdout.splitlines() == ["['trainers', 'trainers.coach']", "False"]

    (episode,) = json.loads(command(app, "traces", "list", "--store", "traces.duckdb", "--json"))
    assert "writer" in command(app, "traces", "show", episode["episode_id"], "--store", "traces.duckdb")


@pytest.mark.slow
def test_init_opens_an_app_with_a_trainers_of_its_own_without_the_extras(app: Path) -> None:
    flags = ["--tasks", "tasks.jsonl", "--reward", "graphs.support:reward", "--yes", "--probe"]
    command(app, "init", "graphs.support:build", *flags)
    assert 'nodes = ["writer", "editor"]' in (app / "bridge.toml").read_text()


@pytest.mark.slow
def test_traces_of_others_are_ingested_without_the_extras(tmp_path: Path) -> None:
    (tmp_path / "traces.otlp").write_bytes(foreign_requests("openinference", runs=1)[0])
    command(tmp_path, "ingest", "traces.otlp", "--store", "traces.duckdb")
    assert len(json.loads(command(tmp_path, "traces", "list", "--store", "traces.duckdb", "--json"))) == 1


VIEW = """
from pathlib import Path

import httpx
from marft_bridge.view.pages import Pages
from marft_bridge.view.source import path_to_source
from marft_bridge.view.web import pages_to_server

pages = Pages(path_to_source(Path("traces.duckdb")), None)
with pages_to_server(pages, 0, "token", one_time_token=None) as server:
    with httpx.Client(follow_redirects=True, trust_env=False) as client:
        print(client.get(f"{server.url}/?token=token").raise_for_status().text)
pages.close()
"""


@pytest.mark.slow
def test_the_viewer_shows_a_store_without_the_extras(app: Path) -> None:
    assert run_light(RECORD, app, is_app=True).returncode == 0
    process = run_light(VIEW, app)
    assert process.returncode == 0, process.stderr
    assert "<!doctype html>" in process.stdout
    assert "terminated" in process.stdout


LINES = """
import sys
from pathlib import Path
from marft_bridge.cli import run
for arguments in (["collect"], ["train"], ["compare"], ["credit"], ["serve"], ["promote"], ["export", "actor", "out"]):
    print(arguments[0], run(arguments), file=sys.stderr, flush=True)
from marft_bridge.common.errors import BridgeError
from marft_bridge.rewards.math import check_math
from marft_bridge.tasks.reasoning_gym import require_gym
from marft_bridge.config.bridge import TrainOptions
from marft_bridge.training.loggers.run_loggers import require_loggers
loggers = TrainOptions(loggers=["tensorboard", "wandb", "mlflow", "trackio"]).loggers
needs = [lambda logger=logger: require_loggers([logger]) for logger in loggers]
for feature in (lambda: check_math(None), require_gym, *needs):
    try:
        feature()
    except BridgeError as error:
        print("feature", error, file=sys.stderr)
try:
    from marft_bridge import NodeChat
except ImportError as error:
    print("feature", error, file=sys.stderr)
"""


def test_what_needs_an_extra_says_in_one_line_which(tmp_path: Path) -> None:
    process = run_light(LINES, tmp_path)
    assert process.returncode == 0, process.stderr
    lines = process.stderr.splitlines()
    commands = ("collect", "train", "compare", "credit", "serve", "promote", "export")
    assert lines[: 2 * len(commands)] == [
        line
        for name in commands
        for line in (f"marft-bridge: {name} needs torch: pip install 'marft-bridge[train]'", f"{name} 2")
    ]
    named = [line.rpartition("marft-bridge[")[2].partition("]")[0] for line in lines[2 * len(commands) :]]
    assert named == ["math", "reasoning-gym", "tensorboard", "wandb", "mlflow", "trackio", "train"]


def test_a_module_that_is_missed_late_is_still_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    from marft_bridge.common.extras import missing_module_to_line

    assert missing_module_to_line("torch.nn") == "torch is not installed: pip install 'marft-bridge[train]'"
    assert missing_module_to_line("opentelemetry.exporter.otlp") is not None
    assert missing_module_to_line("numpy") is None  # of the light core: its absence is no user's mistake
    assert "run it under WSL" in str(missing_module_to_line("fcntl"))
    assert "the app has a package 'trainers'" in str(missing_module_to_line("trainers.scoring.model"))


def test_train_refuses_a_folder_that_has_a_trainers_of_its_own(app: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from marft_bridge.common.errors import ConfigError
    from marft_bridge.common.extras import require_trainer

    require_trainer("train")  # here `trainers` is ours
    monkeypatch.chdir(app)
    with pytest.raises(ConfigError, match="train: the app has a package 'trainers'"):
        require_trainer("train")


# -- the wheel in an environment of its own ------------------------------------------------------------------------


def megabytes_of(folder: Path) -> float:
    return sum(path.lstat().st_size for path in folder.rglob("*") if path.is_file()) / 1e6


def build_wheel(folder: Path) -> Path:
    code = "import sys; from setuptools.build_meta import build_wheel; print(build_wheel(sys.argv[1]))"
    source = folder / "source"
    names = ("pyproject.toml", "LICENSE", "README.md", "marft_bridge", "trace_store", "trainers", "graphs")
    source.mkdir()
    for name in names:
        subprocess.run(["cp", "-r", str(ROOT / name), str(source)], check=True)
    subprocess.run([sys.executable, "-c", code, str(folder)], cwd=source, check=True, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    return wheel


def classified_pythons() -> list[str]:
    """The versions of Python that pyproject.toml says we run on."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = [line.rpartition(" :: ")[2] for line in project["classifiers"] if ":: Python :: 3." in line]
    assert project["requires-python"] == f">={names[0]}"
    return names


def interpreter_of(version: str) -> Path | None:
    """An interpreter of this version: this one, one on the PATH, or one of pyenv's. None where the machine has none."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    candidates = [sys.executable, shutil.which(f"python{version}"), *pyenv.glob(f"versions/{version}.*/bin/python")]
    code = "import sys, ensurepip; print('%d.%d' % sys.version_info[:2])"
    for candidate in candidates:
        if candidate is None:
            continue
        process = subprocess.run([candidate, "-c", code], check=False, capture_output=True, text=True)
        if process.stdout.strip() == version:
            return Path(candidate)
    return None


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("version", classified_pythons())
def test_the_wheel_alone_records_an_app_with_graphs_and_trainers_of_its_own_in_300_mb(
    app: Path, tmp_path: Path, version: str
) -> None:
    interpreter = interpreter_of(version)
    if interpreter is None:
        pytest.skip(f"there is no Python {version} here")
    environment = tmp_path / "fresh"
    subprocess.run([interpreter, "-m", "venv", environment], check=True)
    python, bin_folder = environment / "bin" / "python", environment / "bin"
    wheel = build_wheel(tmp_path)
    start = time.monotonic()
    installed = subprocess.run(
        [python, "-m", "pip", "install", "--disable-pip-version-check", "-q", wheel],
        check=False,
        capture_output=True,
        text=True,
    )
    assert installed.returncode == 0, installed.stderr
    install_s = time.monotonic() - start
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}

    def run(*arguments: str | Path, **variables: str) -> str:
        process = subprocess.run(
            arguments, cwd=app, env={**clean, **variables}, check=False, capture_output=True, text=True, timeout=300
        )
        assert process.returncode == 0, process.stderr
        return process.stdout

    assert run(python, "plain.py") == run(python, "wrapped.py", "traces.duckdb")
    assert run(python, "plain.py") == run(
        bin_folder / "opentelemetry-instrument", python, "plain.py", MARFT_STORE=str(app / "otel.duckdb")
    )
    for store in ("traces.duckdb", "otel.duckdb"):
        rows = json.loads(run(bin_folder / "marft-bridge", "traces", "list", "--store", store, "--json"))
        assert len(rows) == 1
        assert run(python, "-m", "marft_bridge", "traces", "show", rows[0]["episode_id"], "--store", store)
    init = ("init", "graphs.support:build", "--tasks", "tasks.jsonl", "--reward", "graphs.support:reward", "--yes")
    run(bin_folder / "marft-bridge", *init)
    run(python, "-m", "marft_bridge", *init, "--force")
    assert not (next(environment.glob("lib/python*/site-packages")) / "graphs").exists()
    size_mb = megabytes_of(environment)
    print(f"Python {version}: {size_mb:.0f} MB, installed in {install_s:.0f} s")  # noqa: T201 - what `pytest -s` shows
    assert size_mb <= MAX_MB
    assert install_s <= MAX_INSTALL_S
