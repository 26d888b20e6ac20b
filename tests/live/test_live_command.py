"""Owns: `marft-bridge serve --split` as a user starts it, in a process of its own, and what `status` says of it.

- Both teams are loaded before the first request; a command beside it is told where and with which key; what was
  recorded is in a sound store when it ends.
- Ctrl-C leaves nothing listening; salt and key stay, so that a restart assigns the same keys to the same teams.
- What cannot be served is one line before anything listens; without vLLM's web libraries too.
- On the real engine: the log-probs that are recorded are those of the adapter that answered.
"""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from conftest import RunningServer
from safetensors.numpy import save_file
from support.commands import start_command
from support.fake_judge import fair, judging
from support.fake_vllm import FakeVllm, running
from support.live_rig import SAY, episodes
from support.lora_files import write_adapter

from marft_bridge.cli import run
from marft_bridge.live.split import BASE, CANDIDATE, MIRRORED, Split, key_to_variant, read_or_make_live_file
from marft_bridge.promotion.manifest import Manifest, PromotedAdapter, write_manifest
from marft_bridge.serving.adapter_registry import AdapterRegistry
from trace_store.checkup import store_to_faults
from trace_store.store import TraceStore
from trainers.common.files import weights_to_sha256

NODES = ("planner", "writer")
LAYERS = {"layers.0.self_attn.q_proj": (4, 4), "layers.0.self_attn.v_proj": (4, 4)}
KEY = "engine-key-0123456789"

# An app in miniature, as the command beside the proxy.
APP = """
import os, sys
import openai

client = openai.OpenAI(base_url=os.environ["MARFT_LIVE_URL"], api_key=os.environ["MARFT_LIVE_KEY"], max_retries=0)
for user in sys.argv[1:]:
    for node in ("planner", "writer"):
        answer = client.chat.completions.create(
            model=node, messages=[{"role": "user", "content": "say it"}], user=user, temperature=1.0
        )
        print("answered", user, answer.choices[0].message.content)
"""


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeVllm]:
    monkeypatch.setenv("ENGINE_KEY", KEY)
    with running(FakeVllm(KEY)) as fake:
        yield fake


@pytest.fixture
def config(tmp_path: Path, engine: FakeVllm) -> Path:
    """A configuration on the fake engine, and a run folder with versions 1 and 2 of both nodes."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text('{"model_type": "llama"}')
    (model / "tokenizer.json").write_text("{}")
    weights = {f"model.{name}.weight": np.zeros(shape, np.float32) for name, shape in LAYERS.items()}
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    registry = AdapterRegistry(tmp_path / "run/adapters", weights_to_sha256(model))
    for node in NODES:
        for version in (1, 2):
            write_adapter(registry.new_folder(node, version), LAYERS)
            registry.register(node, version, None, {})
    path = tmp_path / "bridge.toml"
    path.write_text(
        f"""
[graph]
app = "graphs.math_duo:build"
nodes = {json.dumps(NODES)}
tasks = "graphs.math_duo:tasks"
reward = "graphs.math_duo:reward"
[model]
path = {json.dumps(str(model))}
[train.trainer.lora]
target_modules = ["q_proj", "v_proj"]
[serve]
attach = {json.dumps(engine.url)}
api_key_env = "ENGINE_KEY"
"""
    )
    return path


def users_of_both_teams(run_folder: Path, count: int) -> list[str]:
    """As many users as asked for, half of each team: the salt of a run is random, and eight users may all be of one."""
    salt = read_or_make_live_file(run_folder / "live.json").salt
    by_variant: dict[str, list[str]] = {BASE: [], CANDIDATE: []}
    for number in range(1000):
        by_variant[key_to_variant(salt, f"user-{number}", Split(50, 50))].append(f"user-{number}")
    return [user for users in by_variant.values() for user in users[: count // 2]]


def serve(config: Path, *flags: str) -> tuple[int, str]:
    process = start_command("serve", config, config.parent / "run", "--port", "0", *flags)
    said, _ = process.communicate(timeout=120)
    return process.returncode, said


@pytest.mark.slow
def test_a_command_beside_it_is_answered_by_both_teams_and_recorded(config: Path, engine: FakeVllm) -> None:
    app = config.with_name("app.py")
    app.write_text(APP)
    users = users_of_both_teams(config.parent / "run", 12)
    flags = ("--split", "50/50", "--base", "1", "--candidate", "planner=2,writer=newest", "--mirror")
    code, said = serve(config, *flags, "--", sys.executable, str(app), *users)
    assert code == 0, said
    assert set(engine.adapters) == {f"{node}@{version}" for node in NODES for version in (1, 2)}
    kept = read_or_make_live_file(config.parent / "run/live.json")
    for user in users:
        version = 1 if key_to_variant(kept.salt, user, Split(50, 50)) == BASE else 2
        for node in NODES:
            assert f"answered {user} {node}@{version} speaks" in said
    assert "base answers 50 % of keys: planner@1, writer@1" in said
    assert kept.api_key not in said
    assert kept.base_url is None
    store = config.parent / "run/store.duckdb"
    found = episodes(store)
    answered = [t for t in found if t.episode.variant != MIRRORED]
    assert len(answered) == 24
    assert {t.episode.subject_id for t in answered} == set(users)
    assert all(action.trainable for t in found for action in t.actions)
    assert {"base", "tokenizer"} <= set(found[0].episode.lineage)
    with TraceStore.open(store, read_only=True) as opened:
        assert list(store_to_faults(opened)) == []
        (command,) = opened.runs()
    assert command.command == "serve"
    assert command.config["teams"][CANDIDATE] == {"planner": 2, "writer": 2}


def begun(process: subprocess.Popen[str]) -> tuple[str, str]:
    """Address and everything that was said until it listened."""
    assert process.stdout is not None
    said = ""
    for line in process.stdout:
        said += line
        if "live traffic at" in line:
            return line.split("live traffic at ")[1].split(",")[0], said
    raise AssertionError(said)


@pytest.mark.slow
def test_ctrl_c_leaves_nothing_listening_and_a_restart_assigns_the_same(
    config: Path, engine: FakeVllm, capsys: pytest.CaptureFixture[str]
) -> None:
    run_folder = config.parent / "run"
    flags = ("--config", str(config), "--run", str(run_folder))
    users, rounds = users_of_both_teams(run_folder, 10), []
    for _ in range(2):
        process = start_command("serve", config, run_folder, "--split", "50/50", "--port", "0")
        try:
            address, said = begun(process)
            assert "base answers 50 % of keys: planner@0, writer@0" in said
            kept = read_or_make_live_file(run_folder / "live.json")
            assert kept.base_url == address
            headers = {"Authorization": f"Bearer {kept.api_key}"}
            variants = []
            with httpx.Client(base_url=address, headers=headers, trust_env=False, timeout=30) as client:
                for user in users:
                    answer = client.post("/chat/completions", json={"model": "writer", "messages": SAY, "user": user})
                    variants.append(answer.headers["x-marft-variant"])
            rounds.append(variants)
            assert run(["status", *flags]) == 0
            told = capsys.readouterr().out
            assert f"live traffic at {address}: split 50/50" in told
            assert f"{BASE}: {variants.count(BASE)} requests, 0 errors" in told
            assert f"{CANDIDATE}: {variants.count(CANDIDATE)} requests, 0 errors" in told
        finally:
            process.send_signal(signal.SIGINT)
            process.communicate(timeout=60)
        assert process.returncode == 0
        with socket.socket() as probe:
            assert probe.connect_ex(("127.0.0.1", int(address.split(":")[2].split("/")[0]))) != 0
    assert rounds[0] == rounds[1]
    assert set(rounds[0]) == {BASE, CANDIDATE}
    assert run(["status", *flags]) == 0
    told = capsys.readouterr().out
    assert "live traffic" not in told
    # In the store they are counted per variant as well, one line for each start.
    for variant in (BASE, CANDIDATE):
        assert told.count(f" {variant}: {rounds[0].count(variant)} episodes truncated") == 2


@pytest.mark.slow
def test_a_key_of_ones_own_lets_the_app_in_and_is_kept_nowhere(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("APP_KEY", "the-key-of-our-app-42")
    app = config.with_name("app.py")
    app.write_text(APP)
    code, said = serve(config, "--split", "90/10", "--key-env", "APP_KEY", "--", sys.executable, str(app), "ada")
    assert code == 0, said
    assert "answered ada" in said
    for path in (config.parent / "run").rglob("*"):
        assert not path.is_file() or b"the-key-of-our-app-42" not in path.read_bytes()


@pytest.mark.slow
def test_what_was_promoted_serves_alone_with_a_hosted_model_behind_it(
    config: Path, engine: FakeVllm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PROVIDER_KEY", "key-of-the-provider")
    app = config.with_name("app.py")
    app.write_text(APP)
    engine.fail_next = 1
    with running(FakeVllm("key-of-the-provider")) as hosted:
        hosted.adapters = {"hosted-large": "a model of its own"}
        fallback = (
            f'models = {{ planner = "hosted-large" }}\nbase_url = "{hosted.url}/v1"\napi_key_env = "PROVIDER_KEY"'
        )
        config.write_text(f"{config.read_text()}[fallback]\n{fallback}\n")
        flags = ("--split", "100/0", "--base", "1", "--candidate", "1")
        code, said = serve(config, *flags, "--", sys.executable, str(app), "ada")
    assert code == 0, said
    assert "falling back, after 30 s, a failure or a broken format: planner to hosted-large" in said
    assert "answered ada hosted-large speaks" in said
    assert "answered ada writer@1 speaks" in said
    (run,) = TraceStore.open(config.parent / "run/store.duckdb", read_only=True).runs()
    assert run.config["fallback"] == {"planner": "hosted-large"}


def promotion_of_planner(config: Path, **changes: Any) -> Manifest:
    """Planner 2 as it is registered, with the writer hosted; `changes` are fields of the manifest."""
    base_sha256 = weights_to_sha256(config.with_name("model"))
    row = AdapterRegistry(config.parent / "run/adapters", base_sha256).get("planner", 2)
    content = {
        "number": 1,
        "previous_sha256": None,
        "candidate": "planner local",
        "base": "hosted",
        "graph": "graphs.math_duo:build",
        "model": "model",
        "base_sha256": base_sha256,
        "adapters": {"planner": PromotedAdapter(version=2, sha256=row.sha256)},
        "hosted": ("writer",),
        "tool_surface": {},
        "tool_surface_differs": False,
        "verdict": "good enough",
        "gate": "efficient and non-inferior",
        "findings": (),
        "report_sha256": "c" * 64,
        "safety": None,
        "signed_by": "Jane Doe",
        "signed_at": datetime.now(UTC),
    }
    return Manifest.model_validate(content | changes)


@pytest.mark.slow
def test_what_was_promoted_in_part_is_served_alone_with_a_judge_and_a_hosted_model_behind_it(
    config: Path, engine: FakeVllm
) -> None:
    run_folder = config.parent / "run"
    write_manifest(run_folder, promotion_of_planner(config))
    app = config.with_name("app.py")
    app.write_text(APP.replace('("planner", "writer")', '("planner",)'))
    with running(FakeVllm()) as hosted, judging() as judges:
        hosted.adapters = {"hosted-large": "a model of its own"}
        judge = judges(fair(3))
        tables = f"""
[fallback]
base_url = "{hosted.url}/v1"
models = {{ planner = "hosted-large" }}
[fallback.judge]
base_url = "{judge.url}"
model = "j"
rubrics = {{ planner = "Is it said?" }}
below = 5
"""
        config.write_text(config.read_text() + tables)
        flags = ("--split", "100/0", "--candidate", "promoted")
        code, said = serve(config, *flags, "--", sys.executable, str(app), "ada")
    assert code == 0, said
    assert set(engine.adapters) == {"planner@2"}
    assert "not served here, hosted by what was promoted: writer" in said
    assert "falling back on a score below 5 by the judge j too: planner; without a score the hosted answer" in said
    assert "answered ada hosted-large speaks" in said
    assert len(judge.asked) == 1
    (run_row,) = TraceStore.open(run_folder / "store.duckdb", read_only=True).runs()
    assert run_row.config["teams"]["base"] == {"planner": 2}
    assert run_row.config["fallback_judge"]["below"] == 5


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--split", "90/20"), "give the shares of base and candidate in percent"),
        (("--split", "90/10", "--candidate", "7"), "node 'planner' has no adapter v7; published: v0, v1, v2"),
        (("--split", "90/10", "--base", "2"), "base and candidate are the same team"),
        (("--split", "90/10", "--base", "promoted"), "nothing was promoted in this run folder"),
        (("--split", "90/10", "--key-env", "NO_SUCH_KEY"), "NO_SUCH_KEY holds no key of 16 or more"),
        (("--base", "1"), "--base, --port without --split or --mirror"),
        (("--split", "90/10", "--", "no-such-program"), "cannot run 'no-such-program'"),
    ],
)
def test_what_cannot_be_served_is_one_line(
    flags: tuple[str, ...], message: str, config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["serve", "--config", str(config), "--run", str(config.parent / "run"), "--port", "0", *flags]
    assert run(arguments) == 2
    assert message in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("sha256", "signing_key", "message"),
    [
        ("a" * 64, KEY, "adapter v2 of node 'planner' is not the one that promotion 1 signed off: other weights"),
        (None, "a key of somebody else", "1.json was changed, or signed with another key; see `marft-bridge promote"),
        (None, None, "1.json is not signed; see `marft-bridge promote --verify`"),
    ],
)
@pytest.mark.parametrize("base", [(), ("--base", "promoted")])
def test_what_was_not_signed_off_is_not_served(
    base: tuple[str, ...],
    sha256: str | None,
    signing_key: str | None,
    message: str,
    config: Path,
    engine: FakeVllm,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("PROMOTION_KEY", KEY)
    config.write_text(config.read_text() + '[promote]\nkey_env = "PROMOTION_KEY"\n')
    changes = {} if sha256 is None else {"adapters": {"planner": PromotedAdapter(version=2, sha256=sha256)}}
    manifest = promotion_of_planner(config, **changes)
    write_manifest(config.parent / "run", manifest if signing_key is None else manifest.signed(signing_key.encode()))
    flags = ("--split", "90/10", *base, "--candidate", "1", "--port", "0")
    assert run(["serve", "--config", str(config), "--run", str(config.parent / "run"), *flags]) == 2
    assert message in " ".join(capsys.readouterr().err.split())
    assert not engine.adapters


@pytest.mark.slow
def test_an_engine_that_dies_ends_the_command(config: Path, engine: FakeVllm) -> None:
    process = start_command("serve", config, config.parent / "run", "--split", "90/10", "--port", "0")
    try:
        begun(process)
        engine.shutdown()
        engine.server_close()
        said, _ = process.communicate(timeout=60)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == 2
    assert "does not answer any more" in said


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_on_the_real_engine_what_is_recorded_is_the_answering_adapters(
    vllm_server: RunningServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Version 1 changes nothing, version 2 does; transformers scores each call again, with the adapter it claims."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    node, layers = "live-test", {f"layers.{n}.self_attn.q_proj": (576, 576) for n in range(30)}
    registry = AdapterRegistry(vllm_server.adapter_root, weights_to_sha256(vllm_server.model_dir))
    for version, scale in ((1, 0.0), (2, 0.2)):
        write_adapter(registry.new_folder(node, version), layers, scale=scale, seed=version)
        registry.register(node, version, None, {})
    run_folder = vllm_server.adapter_root.parent  # a link to the adapters of another folder would be refused
    path = tmp_path / "bridge.toml"
    path.write_text(
        f"""
[graph]
app = "graphs.math_duo:build"
nodes = ["{node}"]
tasks = "graphs.math_duo:tasks"
reward = "graphs.math_duo:reward"
[model]
path = {json.dumps(str(vllm_server.model_dir))}
[train.trainer.lora]
target_modules = ["q_proj", "v_proj"]
[serve]
attach = {json.dumps(vllm_server.endpoint.base_url)}
api_key_env = "ENGINE_KEY"
"""
    )
    monkeypatch.setenv("ENGINE_KEY", vllm_server.endpoint.api_key)
    app = tmp_path / "app.py"
    app.write_text(
        APP.replace('("planner", "writer")', f'("{node}",)').replace(
            "temperature=1.0", "max_tokens=12, temperature=1.0"
        )
    )
    flags = ("--split", "50/50", "--base", "1", "--candidate", "2", "--mirror", "--port", "0")
    users = users_of_both_teams(run_folder, 8)
    process = start_command("serve", path, run_folder, *flags, "--", sys.executable, str(app), *users)
    said, _ = process.communicate(timeout=600)
    assert process.returncode == 0, said
    found = episodes(run_folder / "store.duckdb")
    assert {t.episode.variant for t in found} >= {BASE, CANDIDATE}
    base = AutoModelForCausalLM.from_pretrained(vllm_server.model_dir, dtype=torch.float32)
    model = PeftModel.from_pretrained(base, str(vllm_server.adapter_root / node / "2"))
    # A mirrored call that is still under way when the app ends is given up, and is a row that says so.
    finished = [t for t in found if t.episode.reason != "Cancelled: the proxy stopped"]
    assert all("(mirror)" in (t.episode.variant or "") for t in found if t not in finished)
    assert {t.episode.variant for t in finished} >= {BASE, CANDIDATE, f"{CANDIDATE} (mirror)"}
    for trajectory in finished:
        (action,) = trajectory.actions
        assert action.trainable, action.untrainable_reason
        assert action.prompt_ids is not None
        assert action.sampled_ids is not None
        version = 1 if trajectory.episode.variant == BASE else 2
        assert action.adapter == f"{node}@{version}"
        ids = torch.tensor([[*action.prompt_ids, *action.sampled_ids]])  # [1, tokens]
        expected = {}
        with torch.no_grad():
            for candidate in (1, 2):
                if candidate == 1:
                    with model.disable_adapter():
                        logits = model(ids).logits[0, len(action.prompt_ids) - 1 : -1]  # [sampled, vocabulary]
                else:
                    logits = model(ids).logits[0, len(action.prompt_ids) - 1 : -1]
                sampled = torch.tensor(action.sampled_ids)[:, None]
                expected[candidate] = torch.log_softmax(logits, -1).gather(1, sampled)[:, 0]
        engine = torch.tensor(action.logprobs)
        gaps = {candidate: float((engine - scores).abs().mean()) for candidate, scores in expected.items()}
        assert gaps[version] < 1e-3
        assert gaps[3 - version] > 10 * gaps[version]
