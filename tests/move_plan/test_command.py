"""Owns: `marft-bridge plan` as a user types it: on stores of all kinds of exports, with a model and without.

- What is not looked at is said; the findings as JSON have what the lines say; text of strangers stays text.
- Predictions are kept in a store that is a file; an export is only read.
- In the light core everything but the model's part is done.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.chat_rig import save_chat_model
from support.commands import write_bridge_toml
from support.fake_vllm import FakeVllm, running
from support.ingest_rig import foreign_requests, framed
from support.paths import ROOT
from support.plan_rig import many_calls, small_store

from marft_bridge import cli
from marft_bridge.common.progress import Reporter
from marft_bridge.config.bridge import BridgeConfig
from marft_bridge.training.train import train
from trace_store.parquet import store_to_parquet
from trace_store.records import Reward
from trace_store.store import TraceStore

HOSTILE = 'a\x1b[31m[red]\n\u202e"x'
LANGFUSE = ROOT / "tests/ingest/langfuse_observations.json"


def planned(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[dict[str, Any], str]:
    """The findings of one plan, and the lines that people see beside them."""
    assert cli.run(["plan", *map(str, words), "--json"]) == 0
    captured = capsys.readouterr()
    findings: dict[str, Any] = json.loads(captured.out)
    return findings, captured.err


def test_a_plan_without_a_model_says_what_it_left_out_and_keeps_its_places(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = small_store(tmp_path / "s.duckdb")
    findings, lines = planned(capsys, path)
    assert (findings["run"], findings["episodes"], findings["rewards"]["reward"]) == ("plan-1", 5, "right")
    assert [node["node"] for node in findings["nodes"]] == ["idle", "router", "writer"]
    router = findings["nodes"][1]
    assert (router["usage"]["calls"], router["answers"]["different"], router["local"]) == (5, 2, None)
    assert router["reward"]["reach"]["mean"] == 1.0
    assert [row["move"] for row in findings["proposal"]] == ["unknown"] * 3
    assert "no local model; name one with --model" in " ".join(findings["missing"])
    assert "cost of calls by m1, m2: no price is known" in " ".join(findings["missing"])
    assert "associations, not causes" in lines
    assert planned(capsys, path)[0]["run"] == "plan-2"
    with TraceStore.open(path) as store:
        assert {(row.run_id, row.node, row.quantity, row.value) for row in store.predictions()} == {
            (plan, node, "place", place)
            for plan in ("plan-1", "plan-2")
            for place, node in enumerate(("idle", "router", "writer"), start=1)
        }


def test_a_model_scores_and_probes_and_prices_are_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = many_calls(tmp_path / "s.duckdb", {"router": lambda _: "left", "said": lambda k: f"notes {k}"}, 30)
    (tmp_path / "prices.toml").write_text('currency = "EUR"\n[[prices]]\nmodel = "m1"\nprompt = 1\nsampled = 2\n')
    model = save_chat_model(tmp_path / "chat")
    findings, _ = planned(capsys, path, "--model", model, "--prices", tmp_path / "prices.toml", "--calls", 24)
    for node in findings["nodes"]:
        local = node["local"]
        assert (local["calls"], local["refused"], local["probe"]["held_calls"]) == (24, {}, 8)
        assert local["base"]["low"] < local["base"]["mean"] < local["base"]["high"]
        assert node["usage"]["costs"] == {"EUR": pytest.approx(30 * 120e-6)}
    assert findings["missing"] == []
    with TraceStore.open(path) as store:
        kept = {(row.node, row.quantity): (row.value, row.low, row.high) for row in store.predictions()}
        assert store.sql("SELECT model, currency, per_million_sampled FROM prices") == [("m1", "EUR", 2.0)]
        assert store.runs()[0].config["plan"] == {"model": ["chat"], "calls": 24, "seed": 0, "reward": "right"}
    probe = findings["nodes"][0]["local"]["probe"]
    assert kept["router", "nats_per_token"] == tuple(probe["after"].values())
    many_calls(tmp_path / "store.duckdb", {"a": lambda _: "x"}, 1)
    calibration, lines = planned(capsys, path, "--calibration", tmp_path)
    assert len(calibration["calibration"]) == len(kept)
    assert calibration["calibration"][0]["happened"] is None
    assert "not yet" in lines


INGESTED: dict[str, Callable[[], bytes]] = {
    **{kind: lambda kind=kind: framed(*foreign_requests(kind)) for kind in ("openinference", "traceloop", "langsmith")},  # type: ignore[misc]
    "langfuse": LANGFUSE.read_bytes,
}


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[] if kind == "langfuse" else [pytest.mark.slow]) for kind in INGESTED]
)
def test_an_ingested_export_gives_a_plan(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "traces").write_bytes(INGESTED[kind]())
    assert cli.run(["ingest", str(tmp_path / "traces"), str(tmp_path / "s.duckdb")]) == 0
    capsys.readouterr()
    findings, _ = planned(capsys, tmp_path / "s.duckdb")
    nodes = {node["node"]: node for node in findings["nodes"]}
    assert len(nodes) > 1
    assert all(node["usage"]["calls"] == node["answers"]["calls"] > 0 for node in nodes.values())
    assert all(node["answers"]["drawn"] for node in nodes.values())
    assert "tool calls" in {node["answers"]["form"] for node in nodes.values()}


def test_hostile_names_and_answers_stay_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = many_calls(tmp_path / "s.duckdb", {HOSTILE: lambda _: HOSTILE}, 2, RESPONSE_MODEL=HOSTILE)
    findings, lines = planned(capsys, path)
    assert findings["nodes"][0]["node"] == findings["proposal"][0]["node"] == HOSTILE
    assert "\x1b" not in lines
    assert "\u202e" not in lines
    assert "\\x1b[31m[red]" in lines, "nor is it markup"
    many_calls(tmp_path / "store.duckdb", {"a": lambda _: "x"}, 1)
    assert planned(capsys, path, "--calibration", tmp_path)[1].count("\x1b") == 0


def test_an_export_is_only_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = small_store(tmp_path / "s.duckdb")
    with TraceStore.open(path) as store:
        store_to_parquet(store, tmp_path / "export")
    findings, _ = planned(capsys, tmp_path / "export")
    assert findings["run"] is None
    assert findings["missing"][-1] == "predictions are not kept: an export is only read"
    assert findings["nodes"] == planned(capsys, path)[0]["nodes"]


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--metric", "other"], "no run of the app has a reward 'other'; there are: right"),
        (["--prices", "nowhere.toml"], "cannot read nowhere.toml"),
        (["--model", "nowhere"], "nowhere"),
        (["--calibration", "x", "--model", "x"], "plan --calibration makes no plan; leave out --model"),
        (["--calibration", "x", "--calls", "48"], "plan --calibration makes no plan; leave out --calls"),
        (["--seed", "3", "--calibration", "x"], "plan --calibration makes no plan; leave out --seed"),
        (["--calibration", "x", "--prices", "p", "--metric", "m"], "leave out --prices and --metric"),
        (["--calibration", "nowhere"], "there is no run folder nowhere; name that of `train` and `compare`"),
    ],
)
def test_what_cannot_be_used_is_one_line_and_nothing_is_kept(
    words: list[str], line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = small_store(tmp_path / "s.duckdb")
    assert cli.run(["plan", str(path), *words]) == 2
    error = capsys.readouterr().err
    assert line in error
    assert error.count("\n") == 1
    with TraceStore.open(path) as store:
        assert store.predictions() == store.runs() == []


def test_a_seed_of_the_environment_does_not_stand_in_the_way_of_a_calibration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MARFT_SEED", "3")
    path = small_store(tmp_path / "store.duckdb")
    assert planned(capsys, path, "--calibration", tmp_path)[0]["calibration"] == []


def test_the_model_of_a_bridge_toml_is_taken_and_none_turns_it_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    model = save_chat_model(tmp_path / "chat")
    (tmp_path / "run").mkdir(mode=0o700)
    many_calls(tmp_path / "run/store.duckdb", {"reasoner": lambda _: "left"}, 8)
    text = write_bridge_toml(tmp_path / "bridge.toml", run="run").read_text()
    own = 'path = "smollm2-135m"\n'
    (tmp_path / "bridge.toml").write_text(text.replace(f"[model]\n{own}", ""))
    assert "no local model" in " ".join(planned(capsys, "run")[0]["missing"])
    (tmp_path / "bridge.toml").write_text(text.replace(own, f'path = "{model}"\n'))
    for words in ([], ["run"], ["--config", "bridge.toml"]):
        assert planned(capsys, *words)[0]["nodes"][0]["local"]["calls"] == 8
    assert planned(capsys, "run", "--model", "none")[0]["nodes"][0]["local"] is None


@pytest.mark.slow
def test_in_the_light_core_all_is_done_but_the_models_part(tmp_path: Path) -> None:
    path = small_store(tmp_path / "s.duckdb")
    script = "import support.light_core, sys; from marft_bridge import cli; sys.exit(cli.run(sys.argv[1:]))"

    def in_light_core(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", script, "plan", str(path), *words],
            env={"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "PATH": "/usr/bin"},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )

    done = in_light_core("--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["nodes"][1]["reward"]["reach"]["mean"] == 1.0
    refused = in_light_core("--model", "smollm2-135m")
    assert refused.returncode == 2
    assert "plan --model needs torch: pip install" in refused.stderr


@pytest.mark.slow
def test_what_training_measures_is_held_against_the_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = many_calls(tmp_path / "s.duckdb", {"reasoner": lambda _: "left", "actor": lambda _: "right"}, 40)
    with TraceStore.open(path) as store:
        store.put_rewards([Reward(row.episode_id, "reward", 1.0, "test", 1) for row in store.episodes()])
        store_to_parquet(store, tmp_path / "exported")
    model = save_chat_model(tmp_path / "chat")
    findings, _ = planned(capsys, path, "--model", model, "--metric", "reward")
    text = write_bridge_toml(tmp_path / "bridge.toml", run=str(tmp_path / "run"), rounds=0).read_text()
    assert "[train]" in text
    with running(FakeVllm()) as server:
        raw = tomllib.loads(text)
        raw["model"] = {"path": str(model)}
        raw["serve"] = {"attach": server.url}
        raw["train"]["traces"] = [str(tmp_path / "exported")]
        raw["train"]["trainer"]["offline"] = {"mode": "filtered", "retokenise": True, "epochs": 4}
        train(BridgeConfig.model_validate(raw), Reporter(), resume=False)
    capsys.readouterr()
    calibration, lines = planned(capsys, path, "--calibration", tmp_path / "run")
    happened = {(row["node"], row["quantity"]): row for row in calibration["calibration"]}
    for node in findings["nodes"]:
        base = happened[node["node"], "nats_per_token_base"]
        assert base["happened"] == pytest.approx(base["predicted"], rel=0.05), "one model, like calls"
        after = happened[node["node"], "nats_per_token"]
        assert after["source"] == f"training of {node['node']}@1"
        assert after["happened"] < base["happened"]
    assert "training of actor@1" in lines


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_real_small_model_predicts_what_is_always_the_same_after_a_probe_and_draws_it_to_the_front(
    smollm2_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One node always says the same, one gives eight digits at random."""
    digits = [f"{(7919 * k) % 9973:04d} {(104729 * k) % 9967:04d}" for k in range(1, 31)]
    answers = {"chance": lambda k: digits[k], "rule": lambda _: "category: invoice, priority: low"}
    path = many_calls(tmp_path / "s.duckdb", answers, 30)
    findings, _ = planned(capsys, path, "--model", smollm2_dir, "--calls", 24)
    probes = {node["node"]: node["local"]["probe"] for node in findings["nodes"]}
    assert probes["rule"]["gain"]["low"] > 0.5
    assert probes["rule"]["after"]["mean"] < probes["chance"]["after"]["mean"]
    assert findings["proposal"][0]["node"] == "rule"
    assert findings["proposal"][0]["move"] != "leave"
