"""Owns: what `export` says of an adapter to others, and what `--push` sends.

- adapter_config.json names the base model as others find it: the Hub's name and commit, or a relative path.
- The model card has tasks, training, the comparison's figures with their interval, and how to load it; no text of a
  trace, no path of this machine. What is not recorded is left out.
- Nothing is sent without --push. A new repository is private unless --public is said, a public one is not written to
  without it; without a token, or where the Hub refuses, it is one line.
- What is on the card works: peft loads the folder, and the real vLLM serves it.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import huggingface_hub.constants
import pytest
import torch
import yaml
from peft import PeftModel
from support.hub_cache import NAME, put_in_cache
from support.hub_server import TOKEN, HubServer, Repository, running_hub
from support.paths import ROOT
from support.sample_report import sample_report
from support.tiny_policy import save_tiny_llama
from transformers import AutoModelForCausalLM

from marft_bridge import cli
from marft_bridge.commands.model_card import OPTIONS_OF_TRAINING
from marft_bridge.config.bridge import BridgeConfig, toml_to_config
from marft_bridge.runs.run_folder import RunFolder
from marft_bridge.serving.adapter_registry import AdapterRegistry
from marft_bridge.serving.vllm_arguments import server_environment, vllm_runs_on_cpu
from trainers.common.files import weights_to_sha256
from trainers.scoring.model import PolicyModel

COMMIT = "a" * 40
VERSION = 10
DUO = ROOT / "examples/math_duo/bridge.toml"


def make_run(folder: Path, model: str, directory: Path, **changes: Any) -> list[str]:
    """A run folder with version 10 of the actor, and the configuration that `train` noted; as flags."""
    run = folder / "run"
    config = toml_to_config(DUO, {"model.path": model, "run": str(run)} | changes)
    registry = AdapterRegistry(run / "adapters", weights_to_sha256(directory))
    policy = PolicyModel(directory, ("actor",), config.train.trainer.lora, "cpu", 0)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in policy.parameters("actor").items():
            if "lora_B" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.05)
    policy.save_adapter("actor", registry.new_folder("actor", VERSION))
    registry.register("actor", VERSION, None, metrics={})
    RunFolder(run).record_config("train", config)
    path = folder / "bridge.toml"
    path.write_text(DUO.read_text().replace('path = "smollm2-135m"', f'path = "{model}"'))
    return ["--config", str(path), "--run", str(run)]


@pytest.fixture
def cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The snapshot of a tiny model in a cache of the Hub."""
    folder = save_tiny_llama(tmp_path / "tiny")
    (folder / "tokenizer.json").write_text("{}")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return put_in_cache(tmp_path / "hub", folder, COMMIT)


def write_report(run: Path) -> None:
    text = sample_report().model_dump_json()
    (run / "report.json").write_text(text.replace("planner", "reasoner").replace("executor", "actor"))


def exported(out: Path, *flags: str) -> tuple[str, dict[str, Any]]:
    """The card's text and the adapter's configuration."""
    assert cli.run(["export", "actor", str(out), *flags]) == 0
    return (out / "README.md").read_text(), json.loads((out / "adapter_config.json").read_text())


def front_matter(card: str) -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load(card.split("---\n")[1])
    return content


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert cli.run(["export", *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


# -- the base model's name --------------------------------------------------------------------------------------------


def test_a_base_model_of_the_hub_is_named_with_its_commit(cached: Path, tmp_path: Path) -> None:
    card, config = exported(tmp_path / "out", *make_run(tmp_path, NAME, cached))
    assert (config["base_model_name_or_path"], config["revision"]) == (NAME, COMMIT)
    assert front_matter(card) == {
        "base_model": NAME,
        "base_model_relation": "adapter",
        "library_name": "peft",
        "pipeline_tag": "text-generation",
        "tags": ["langgraph", "lora", "marft", "multi-agent", "reinforcement-learning"],
    }
    loaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(cached), tmp_path / "out")
    assert loaded.active_adapter == "default"


@pytest.mark.parametrize(
    ("model", "flags", "name"),
    [
        (lambda folder: str(folder / "tiny"), [], "tiny"),  # an absolute path: its last part
        (lambda _: "tiny", [], "tiny"),
        (lambda _: "models/../tiny", [], "tiny"),
        (lambda _: "tiny", ["--base-model", "acme/published"], "acme/published"),
        (lambda folder: str(folder / "tiny"), ["--base-model", "models/published/x"], "models/published/x"),
    ],
    ids=["absolute", "relative", "upwards", "hub name", "path of others"],
)
def test_a_base_model_of_this_machine_is_never_named_by_a_private_path(
    model: Callable[[Path], str],
    flags: list[str],
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("models").mkdir()
    directory = save_tiny_llama(tmp_path / "tiny")
    (directory / "tokenizer.json").write_text("{}")
    given = make_run(tmp_path, model(tmp_path), directory)
    card, config = exported(tmp_path / "out", *given, *flags)
    assert config["base_model_name_or_path"] == name
    assert config["revision"] is None
    assert front_matter(card).get("base_model") == (name if name == "acme/published" else None)
    for path in (tmp_path / "out").iterdir():
        assert str(tmp_path).encode() not in path.read_bytes(), path.name
    capsys.readouterr()
    line = refused(capsys, "actor", str(tmp_path / "no"), *given, "--base-model", "/models/x")
    assert "--base-model '/models/x' is a path of this machine" in line


# -- the card ---------------------------------------------------------------------------------------------------------


def test_the_card_has_tasks_training_and_the_comparison_and_nothing_private(cached: Path, tmp_path: Path) -> None:
    private = "/private/jane/clients"
    changes = {
        "graph.tasks": f"{private}/sums.jsonl",
        "graph.reward": f"{private}/app.py:reward",
        "train.rounds": 12,
        "train.episodes_per_round": 8,
        "train.traces": [f"{private}/archive"],
        "train.trainer.advantage.estimator": "grpo",
        "train.samples_per_task": 4,
        "train.trainer.optimizer.lr": 0.0005,
    }
    given = make_run(tmp_path, NAME, cached, **changes)
    write_report(tmp_path / "run")
    card, _ = exported(tmp_path / "out", *given, "--license", "apache-2.0")
    assert front_matter(card)["license"] == "apache-2.0"
    text = " ".join(card.split())
    assert "# `actor` of `math_duo`, version 10" in card
    assert "- tasks: `sums.jsonl`" in card
    assert "- reward: the function `app.py:reward`" in card
    assert "Version 10 was made from stored episodes and 9 rounds of 8 fresh ones, of 12 rounds" in text
    assert "Advantages by `grpo`, one action a call" in text
    assert "| `train.trainer.optimizer.lr` | `0.0005` | `0.001` |" in card
    assert "| `train.rounds` | `12` | `6` |" in card
    contrast = sample_report().contrasts[0]
    low, high = contrast.simultaneous
    row = next(line for line in card.splitlines() if line.startswith("| `trained` | `reward`"))
    assert [cell.strip() for cell in row.split("|")[3:7]] == [
        f"{contrast.mean_a:.3f}",
        f"{contrast.mean_b:.3f}",
        f"{contrast.diff:+.3f}",
        f"{low:+.3f} to {high:+.3f}",
    ]
    assert "`trained` is better than `before`" in text
    assert "- `trained`: the adapters `reasoner@10`, `actor@10`" in card
    for secret in (private, "jane", str(tmp_path), "archive", "State the final answer", "chain_sum-", "The answer is"):
        assert secret not in card, secret


def test_the_card_of_a_public_repository_says_nothing_of_the_machine_and_of_who_trained(
    cached: Path, tmp_path: Path
) -> None:
    mlflow = {"name": "mlflow", "tracking_uri": "https://mlflow.corp.example:5000", "experiment": "quarter"}
    changes = {
        "train.loggers": [mlflow, {"name": "wandb", "mode": "online", "entity": "quiet-team"}],
        "train.start_from": str(tmp_path / "client-run"),
        "train.devices": [3, 5],
        "train.learners": 2,
        "train.trainer.system.threads": 7,
        "train.trainer.system.load_in_4bit": True,
    }
    given = make_run(tmp_path, NAME, cached, **changes)
    notes = tmp_path / "run/bridge.json"  # as a run of before the refusal of passwords has it
    notes.write_text(notes.read_text().replace("https://mlflow", "https://ci-bot:S3cretPw@mlflow"))
    card, _ = exported(tmp_path / "out", *given)
    assert "| `train.trainer.system.load_in_4bit` | `true` | `false` |" in card
    for private in (
        "mlflow",
        "corp",
        "S3cretPw",
        "quiet-team",
        "quarter",
        "client-run",
        "devices",
        "learners",
        "threads",
    ):
        assert private not in card, private


def test_every_option_that_a_card_may_have_exists() -> None:
    for name in OPTIONS_OF_TRAINING:
        options: Any = BridgeConfig
        for part in name.split("."):
            assert part in options.model_fields, name
            options = options.model_fields[part].annotation


def test_what_was_not_recorded_or_is_of_another_version_is_left_out(
    cached: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = make_run(tmp_path, NAME, cached)
    (tmp_path / "run/bridge.json").unlink()
    write_report(tmp_path / "run")
    report = tmp_path / "run/report.json"
    report.write_text(report.read_text().replace('"actor":10', '"actor":9'))  # the comparison was of another version
    card, _ = exported(tmp_path / "first", *given)
    assert re.findall("^## .*", card, flags=re.MULTILINE) == ["## How to load it"]
    report.write_text("{}")
    capsys.readouterr()
    exported(tmp_path / "second", *given)
    assert "report.json is no report of this version" in " ".join(capsys.readouterr().out.split())


def test_names_break_out_of_no_line_of_the_card(cached: Path, tmp_path: Path) -> None:
    given = make_run(tmp_path, NAME, cached, name="a|b`<img>", **{"train.trainer.reward": "x|y\n# no"})
    write_report(tmp_path / "run")
    card, _ = exported(tmp_path / "out", *given)
    assert "<img>" not in card
    assert re.findall("^# .*no.*", card, flags=re.MULTILINE) == []


def test_a_merged_model_has_a_card_too(cached: Path, tmp_path: Path) -> None:
    given = make_run(tmp_path, NAME, cached)
    assert cli.run(["export", "actor", str(tmp_path / "out"), "--merged", *given]) == 0
    card = (tmp_path / "out/README.md").read_text()
    assert front_matter(card)["base_model_relation"] == "finetune"
    assert "AutoModelForCausalLM.from_pretrained('out')" in card


# -- --push -----------------------------------------------------------------------------------------------------------


def push(hub: HubServer, tmp_path: Path, *flags: str, token: str | None = TOKEN) -> subprocess.CompletedProcess[str]:
    """`export --push` in a process of its own, which knows no other hub."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING"))}
    environment = kept | {
        "PYTHONPATH": str(ROOT),
        "HF_ENDPOINT": hub.url,
        "HF_HOME": str(tmp_path / "home"),
        "HF_HUB_CACHE": str(tmp_path / "hub"),
        "HF_HUB_DISABLE_XET": "1",  # its server is another one; weights go by Git LFS
        "HF_HUB_DISABLE_TELEMETRY": "1",
    }
    environment |= {} if token is None else {"HF_TOKEN": token}
    argv = [sys.executable, "-m", "marft_bridge", "export", "actor", str(tmp_path / "out"), *flags]
    return subprocess.run(argv, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=120)


@pytest.mark.slow
def test_a_pushed_folder_is_the_exported_one_and_private_unless_it_is_said(cached: Path, tmp_path: Path) -> None:
    given = make_run(tmp_path, NAME, cached)
    with running_hub() as hub:
        done = push(hub, tmp_path, *given, "--push", "jane/actor")
        assert done.returncode == 0, done.stdout + done.stderr
        repository = hub.repositories["jane/actor"]
        assert repository.private
        assert repository.titles == ["Add actor@10"]
        sent = {name: content for name, content in repository.files.items() if name != ".gitattributes"}
        assert sent == {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
        assert "PeftModel.from_pretrained(base, 'jane/actor')" in sent["README.md"].decode()
        assert f"pushed to {hub.url}/jane/actor" in done.stdout.replace("\n", "")
        assert hub.unanswered == []


@pytest.mark.slow
def test_what_is_public_is_only_written_to_where_that_is_said(cached: Path, tmp_path: Path) -> None:
    given = make_run(tmp_path, NAME, cached)
    with running_hub() as hub:
        hub.repositories["jane/open"] = Repository(private=False)
        done = push(hub, tmp_path, *given, "--push", "jane/open")
        assert done.returncode == 2
        assert "jane/open is public; say --public, or name another" in done.stderr
        assert hub.repositories["jane/open"].files == {}
        (tmp_path / "out").rename(tmp_path / "written")
        done = push(hub, tmp_path, *given, "--push", "jane/new", "--public")
        assert done.returncode == 0, done.stderr
        assert not hub.repositories["jane/new"].private
        assert "adapter_model.safetensors" in hub.repositories["jane/new"].files


@pytest.mark.slow
def test_what_the_hub_refuses_is_one_line(cached: Path, tmp_path: Path) -> None:
    given = make_run(tmp_path, NAME, cached)
    with running_hub() as hub:
        done = push(hub, tmp_path, *given, "--push", "jane/actor", token="hf_wrong")
    (line,) = done.stderr.splitlines()
    assert "did not take jane/actor: " in line
    assert "401" in line
    assert done.returncode == 2
    (tmp_path / "out").rename(tmp_path / "written")
    done = push(hub, tmp_path, *given, "--push", "jane/actor")  # nobody listens there any more
    (line,) = done.stderr.splitlines()
    assert f"{hub.url} did not take jane/actor" in line


def test_without_a_token_nothing_is_written_or_sent(
    cached: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given = make_run(tmp_path, NAME, cached)
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: None)
    out = str(tmp_path / "out")
    line = refused(capsys, "actor", out, *given, "--push", "jane/actor")
    assert line.endswith("no token of the Hugging Face Hub on this machine: run `hf auth login`, or set HF_TOKEN")
    assert "'actor' is no repository; give owner/name" in refused(capsys, "actor", out, *given, "--push", "actor")
    assert "--public has no effect without --push" in refused(capsys, "actor", out, *given, "--public")
    assert not Path(out).exists()


# -- the real engine --------------------------------------------------------------------------------------------------


def fenced(card: str, language: str) -> str:
    return card.split(f"```{language}\n")[1].split("```")[0]


_FIRST_TOKEN = """
import json, torch
from transformers import AutoTokenizer
ids = AutoTokenizer.from_pretrained(base.config._name_or_path, revision=REVISION)(PROMPT, return_tensors="pt")
def first():
    with torch.no_grad():
        logps = model.float().eval()(**ids).logits[0, -1].log_softmax(-1)
    return int(logps.argmax()), float(logps.max())
adapted = first()
with model.disable_adapter():
    print(json.dumps([adapted, first()]))
"""


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_what_the_card_says_loads_in_peft_and_in_the_real_vllm(
    smollm2_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both take the base model by its name on the Hub, and say the same: with the adapter, and without it."""
    name, prompt = "acme/smollm2", "The capital of France is"
    snapshot = put_in_cache(tmp_path / "hub", smollm2_dir, COMMIT, name)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    card, _ = exported(tmp_path / "out", *make_run(tmp_path, name, snapshot))
    environment = server_environment("a key", cpu=vllm_runs_on_cpu()) | {"HF_HUB_CACHE": str(tmp_path / "hub")}
    program = fenced(card, "python") + _FIRST_TOKEN.replace("REVISION", repr(COMMIT)).replace("PROMPT", repr(prompt))
    argv = [sys.executable, "-c", program]
    by_peft = subprocess.run(argv, env=environment, cwd=tmp_path, capture_output=True, text=True, check=True)
    adapted, plain = json.loads(by_peft.stdout.splitlines()[-1])
    assert abs(adapted[1] - plain[1]) > 0.05  # the adapter changes something

    command = shlex.split(fenced(card, "sh"))
    assert command[:3] == ["vllm", "serve", name]
    address = f"127.0.0.1:{free_port()}"
    engine = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", *command[2:]]
    engine += ["--host", "127.0.0.1", "--port", address.rpartition(":")[2], "--dtype", "float32", "--enforce-eager"]
    engine += ["--max-model-len", "256", "--kv-cache-memory-bytes", str(2**28)]
    with (tmp_path / "vllm.log").open("w") as log:
        server = subprocess.Popen(
            engine, env=environment, cwd=tmp_path, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        wait_until_ready(server, f"http://{address}/health", tmp_path / "vllm.log")
        for model, (token, logprob) in (("adapter", adapted), (name, plain)):
            body = {"model": model, "prompt": prompt, "max_tokens": 1, "temperature": 0.0, "logprobs": 0}
            answer = httpx.post(
                f"http://{address}/v1/completions",
                json=body | {"return_token_ids": True},
                headers={"Authorization": "Bearer a key"},
                timeout=120,
            )
            (choice,) = answer.json()["choices"]
            assert choice["token_ids"] == [token], model
            assert choice["logprobs"]["token_logprobs"][0] == pytest.approx(logprob, abs=1e-2), model
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        server.wait(60)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
    return port


def wait_until_ready(server: subprocess.Popen[bytes], address: str, log: Path) -> None:
    deadline = time.monotonic() + 600
    while time.monotonic() < deadline and server.poll() is None:
        try:
            if httpx.get(address, timeout=5).status_code == 200:
                return
        except httpx.HTTPError:
            time.sleep(1)
    pytest.fail(log.read_text()[-3000:])
