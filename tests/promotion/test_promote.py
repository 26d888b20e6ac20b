"""Owns: promotion: from a real comparison's report to a signed-off manifest, and everything that stands in its way.

- What the gate lets through is signed: versions with the hashes of their weights, the condition with its sentences, the
  report's hash, who and when; 0600, never overwritten, in a chain; a rollback is a new manifest.
- Nothing is signed where the gate, the weights, the safety suite or the person says no; exit codes tell which.
- A safety suite passes by True or exit status 0 only; a command finds the candidate served, is stopped in time with
  all that it started, and its output is kept, bounded.
- A manifest that was changed, taken away, or written without the key is found.
- `compare --promote-if` asks the same, and signs nothing.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import stat
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from support.compare_rig import NODES, Lab, lab_in

from marft_bridge import cli
from marft_bridge.common.errors import ConfigError
from marft_bridge.promotion.manifest import Manifest, newest_manifest, verify_chain
from marft_bridge.promotion.safety import MAX_OUTPUT_BYTES, SafetyCase, run_command, run_function
from marft_bridge.serving.adapter_registry import AdapterRegistry
from trace_store.records import AdapterRow
from trace_store.store import TraceStore
from trainers.common.files import weights_to_sha256

KEY = "a key of the test suite"
JANE = ("--by", "Jane Doe", "--yes")


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """One comparison of 30 tasks, on which version 2 is right always and version 0 on a third."""
    with lab_in(tmp_path_factory.mktemp("lab")) as lab:
        lab.compare(tasks=30)
        yield lab


@pytest.fixture
def lab(compared: Lab, monkeypatch: pytest.MonkeyPatch) -> Lab:
    """The same, with nothing promoted."""
    monkeypatch.delenv("MARFT_SIGNED_BY", raising=False)
    for path in (compared.run / "promoted").glob("*"):
        path.unlink()
    return compared


def toml(lab: Lab, **promote: Any) -> Path:
    """A bridge.toml with these options of [promote]."""
    graph = lab.config().graph
    lines = "".join(f"{key} = {json.dumps(value)}\n" for key, value in promote.items())
    path = lab.folder / "bridge.toml"
    path.write_text(
        f"""
run = "{lab.run}"
[graph]
app = "{graph.app}"
nodes = ["reasoner", "actor"]
tasks = "{graph.tasks}"
task_to_input = "{graph.task_to_input}"
reward = "{graph.reward}"
[model]
path = "{lab.model}"
[serve]
attach = "{lab.ours.url}"
[promote]
{lines}
"""
    )
    return path


def promote(lab: Lab, *flags: str, **options: Any) -> int:
    return cli.run(["promote", "--config", str(toml(lab, **options)), *flags])


def manifest(lab: Lab, number: int = 1) -> Manifest:
    return Manifest.model_validate_json((lab.run / f"promoted/{number}.json").read_text())


def promoted_versions(folder: Path, key_env: str | None = None) -> dict[str, int] | None:
    newest = newest_manifest(folder, key_env)
    return None if newest is None else newest.versions


def promoted(lab: Lab) -> list[str]:
    return sorted(path.name for path in (lab.run / "promoted").glob("*"))


def suite(lab: Lab, body: str) -> str:
    """A module with a function `safe(case)`, under a name of its own: a module is imported once."""
    path = lab.folder / f"suite_{hashlib.sha256(body.encode()).hexdigest()[:8]}.py"
    path.write_text(body)
    return f"{path}:safe"


# -- what is signed -------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_manifest_says_what_was_promoted_why_and_by_whom(lab: Lab, capsys: pytest.CaptureFixture[str]) -> None:
    assert promote(lab, "--if", "correct>0.1 and tokens<2x", *JANE) == 0
    found = manifest(lab)
    registry = AdapterRegistry(lab.run / "adapters", weights_to_sha256(lab.model))
    assert found.versions == {"reasoner": 2, "actor": 2} == promoted_versions(lab.run)
    for node in NODES:
        weights = (lab.run / "adapters" / node / "2" / "adapter_model.safetensors").read_bytes()
        assert found.adapters[node].sha256 == hashlib.sha256(weights).hexdigest() == registry.get(node, 2).sha256
    assert found.base_sha256 == weights_to_sha256(lab.model)
    assert found.report_sha256 == hashlib.sha256((lab.run / "report.json").read_bytes()).hexdigest()
    assert (found.candidate, found.base, found.signed_by) == ("after", "before", "Jane Doe")
    assert found.gate == "correct>0.1 and tokens<2x"
    assert [f.clause for f in found.findings] == ["correct>0.1", "tokens<2x"]
    assert all(f.status == "passed" and "30 tasks" in f.sentence for f in found.findings)
    assert found.verdict.startswith("after is better than before")
    assert (found.number, found.previous_sha256, found.signature, found.safety) == (1, None, None, None)
    for path in (lab.run / "promoted").iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert "promoted number 1: actor@2, reasoner@2, by Jane Doe" in capsys.readouterr().out.replace("\n", " ")


def test_manifests_are_a_chain_and_a_rollback_is_a_new_one(lab: Lab) -> None:
    assert promote(lab, *JANE) == 0
    assert promote(lab, "--if", "correct>0.2", *JANE) == 0
    first = (lab.run / "promoted/1.json").read_bytes()
    assert manifest(lab, 2).previous_sha256 == hashlib.sha256(first).hexdigest()
    assert promote(lab, "--rollback", "1", "--by", "John Roe", "--yes") == 0
    third = manifest(lab, 3)
    assert (third.rollback_to, third.signed_by, third.gate) == (1, "John Roe", manifest(lab, 1).gate)
    assert third.adapters == manifest(lab, 1).adapters
    assert (lab.run / "promoted/1.json").read_bytes() == first
    assert json.loads((lab.run / "promoted/current.json").read_text())["number"] == 3
    assert promote(lab, "--verify") == 0
    assert promoted(lab) == ["1.json", "2.json", "3.json", "current.json"]


def test_nothing_promoted_is_none_and_not_version_0(lab: Lab, capsys: pytest.CaptureFixture[str]) -> None:
    assert promoted_versions(lab.run) is None
    assert promote(lab, "--verify") == 2
    assert "nothing was promoted" in capsys.readouterr().err
    assert promote(lab, "--rollback", "1", *JANE) == 2
    assert "there is no manifest 1; there are: none" in capsys.readouterr().err


# -- what stands in the way -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "code", "said"),
    [
        (("--if", "tokens<0.5x"), 3, "failed: tokens"),
        (("--if", "correct>0.6"), 4, "undecided: correct"),
        (("--if", "tokns<2x"), 2, "did you mean 'tokens'?"),
        (("--if", "correct>"), 2, "at the caret: correct>^"),
        (("--candidate", "before"), 2, "'before' is the base of the comparison"),
        (("--verify", "--if", "correct>0"), 2, "three ways; choose one"),
    ],
)
def test_what_the_gate_does_not_let_through_is_not_promoted(
    lab: Lab, flags: Sequence[str], code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert promote(lab, *flags, *JANE) == code
    printed = capsys.readouterr()
    assert said in printed.out + printed.err
    assert promoted(lab) == []


@pytest.mark.parametrize("flags", [("--yes",), ("--by", "Jane Doe"), ("--by", "Jane Doe", "--yes")])
def test_verify_refuses_what_belongs_to_signing_by_name(
    lab: Lab, flags: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert promote(lab, "--verify", *flags) == 2
    error = capsys.readouterr().err
    names = " and ".join(flag for flag in flags if flag.startswith("--"))
    assert error == f"marft-bridge: promote --verify signs nothing off; leave out {names}\n"


def test_the_configuration_s_condition_holds_unless_the_flag_says_otherwise(
    lab: Lab, capsys: pytest.CaptureFixture[str]
) -> None:
    assert promote(lab, *JANE, gate="tokens<0.5x") == 3
    assert promote(lab, "--if", "correct>0", *JANE, gate="tokens<0.5x") == 0
    assert promote(lab, *JANE, gate="correct >> 0") == 2
    assert "promote.gate: promotion gate: expected a number" in capsys.readouterr().err


def test_somebody_has_to_sign_and_to_be_asked(lab: Lab, capsys: pytest.CaptureFixture[str]) -> None:
    assert promote(lab, "--yes") == 2
    assert "say who signs off" in capsys.readouterr().err
    assert promote(lab, "--by", "  ", "--yes") == 2
    assert promote(lab, "--by", "Jane Doe") == 2
    assert "there is no terminal to ask on; say --yes" in capsys.readouterr().err
    assert promoted(lab) == []


def test_without_a_report_there_is_nothing_to_promote(lab: Lab, capsys: pytest.CaptureFixture[str]) -> None:
    report = lab.run / "report.json"
    content = report.read_text()
    try:
        report.write_text(
            content.replace('"schema_version":2', '"schema_version":1').replace('"schema_version": 2', "1")
        )
        assert promote(lab, *JANE) == 2
        assert "is no report of this version" in capsys.readouterr().err
        report.unlink()
        assert promote(lab, *JANE) == 2
        assert "run `marft-bridge compare` first" in capsys.readouterr().err
    finally:
        report.write_text(content)


def test_weights_that_changed_since_are_refused(lab: Lab, capsys: pytest.CaptureFixture[str]) -> None:
    assert promote(lab, *JANE) == 0
    weights = lab.run / "adapters/actor/2/adapter_model.safetensors"
    content = weights.read_bytes()
    try:
        weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        for flags in (JANE, ("--verify",), ("--rollback", "1", *JANE)):
            assert promote(lab, *flags) == 2
            assert "is not what was registered" in capsys.readouterr().err
    finally:
        weights.write_bytes(content)
    assert promoted(lab) == ["1.json", "current.json"]


def test_another_scale_than_was_signed_is_found_though_its_record_was_put_right(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PROMOTION_KEY", KEY)
    assert promote(lab, *JANE, key_env="PROMOTION_KEY") == 0
    folder = lab.run / "adapters/actor/2"
    config, record = folder / "adapter_config.json", folder / "marft.json"
    whole = {path: path.read_bytes() for path in (config, record)}
    try:
        changed(config, {"lora_alpha": 100 * json.loads(whole[config])["lora_alpha"]})
        changed(record, {"config_sha256": hashlib.sha256(config.read_bytes()).hexdigest()})
        for flags in (("--verify",), ("--rollback", "1", *JANE)):
            assert promote(lab, *flags, key_env="PROMOTION_KEY") == 2
            assert "adapter_config.json' is not what was registered" in capsys.readouterr().err
    finally:
        for path, content in whole.items():
            path.write_bytes(content)
    assert promote(lab, "--verify", key_env="PROMOTION_KEY") == 0


def test_a_promotion_that_was_signed_before_it_named_the_scale_stays_valid(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PROMOTION_KEY", KEY)
    assert promote(lab, *JANE) == 0
    content = json.loads((lab.run / "promoted/1.json").read_text())
    for adapter in content["adapters"].values():
        del adapter["config_sha256"]
    text = json.dumps({k: v for k, v in content.items() if k != "signature"}, sort_keys=True, separators=(",", ":"))
    signature = hmac.new(KEY.encode(), text.encode(), hashlib.sha256).hexdigest()  # as that release made it
    changed(lab.run / "promoted/1.json", {"adapters": content["adapters"], "signature": signature})
    digest = hashlib.sha256((lab.run / "promoted/1.json").read_bytes()).hexdigest()
    (lab.run / "promoted/current.json").write_text(json.dumps({"number": 1, "sha256": digest}))
    assert promote(lab, "--verify", key_env="PROMOTION_KEY") == 0


@pytest.mark.slow
def test_weights_that_were_exchanged_with_their_record_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with lab_in(tmp_path) as lab:
        lab.compare(tasks=30)
        with TraceStore.open(lab.run / "store.duckdb") as store:
            store.put_adapter(AdapterRow("actor", 2, 1, "somewhere", "f" * 64, "0" * 64, 1))
        assert promote(lab, *JANE) == 2
        assert "actor@2 is not what was trained" in capsys.readouterr().err


def test_a_candidate_of_another_graph_or_model_has_nothing_to_promote(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with lab_in(tmp_path) as lab:
        lab.answer = lambda model, number: "yes" if model == "solo@0" or number % 3 == 0 else "no"
        lab.compare({"name": "before"}, lab.solo(), tasks=30)
        assert promote(lab, *JANE) == 2
        assert "'one agent' runs another graph" in capsys.readouterr().err
        assert promoted(lab) == []


# -- the safety suite -----------------------------------------------------------------------------------------


def test_a_safety_function_is_given_the_candidate_s_recorded_runs(lab: Lab) -> None:
    body = """
def safe(case):
    assert case.candidate == "after" and dict(case.adapters) == {"reasoner": 2, "actor": 2}
    assert len(case.runs) == 30
    for run in case.runs:
        assert run.answer("node:actor") == "yes" and run.task["number"] >= 0
        assert [action.adapter for action in run.game().actions] == ["reasoner@2", "actor@2"]
        assert len(run.spans) >= 4
    return True
"""
    name = suite(lab, body)
    assert promote(lab, *JANE, safety=name) == 0
    found = manifest(lab).safety
    assert found is not None
    assert (found.suite, found.passed, found.output_sha256) == ((name,), True, None)


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ("def safe(case): return False", "returned False"),
        ("def safe(case): pass", "returned NoneType, neither True nor the reason why not"),
        ("def safe(case): return 1", "returned int, neither True"),
        ("def safe(case): return 'it told a secret'", "it told a secret"),
        ("def safe(case): assert not case.runs, 'there are runs'", "AssertionError: there are runs"),
        ("async def safe(case): raise ValueError('no')", "ValueError: no"),
        ("import sys\ndef safe(case): sys.exit(3)", "SystemExit: 3"),
        ("import sys\nasync def safe(case): sys.exit()", "SystemExit:"),
        ("import time\ndef safe(case): time.sleep(30)", "did not end within 0.2 s"),
        ("import asyncio\nasync def safe(case): await asyncio.sleep(30)", "did not end within 0.2 s"),
    ],
)
def test_a_safety_function_passes_by_true_alone(
    lab: Lab, body: str, why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert promote(lab, *JANE, safety=suite(lab, body), safety_timeout_s=0.2) == 3
    assert f"FAILED ({why}" in capsys.readouterr().out.replace("\n", " ")
    assert promoted(lab) == []


def test_an_async_suite_passes_too() -> None:
    async def safe(case: SafetyCase) -> bool:
        return case.candidate == "x"

    assert run_function("safe", safe, SafetyCase("x", {}, ()), 5.0).passed


def test_a_suite_that_does_not_exist_is_an_error_before_anything_runs(
    lab: Lab, capsys: pytest.CaptureFixture[str]
) -> None:
    assert promote(lab, "--if", "tokens<0.5x", *JANE, safety="no_such_module:safe") == 2
    assert "promote.safety: importing 'no_such_module' failed" in capsys.readouterr().err


CALLS_THE_CANDIDATE = """
import json, os, sys, urllib.request
models = json.loads(os.environ["MARFT_SERVER_MODELS"])
for node in ("reasoner", "actor"):
    request = urllib.request.Request(
        os.environ["MARFT_SERVER_URL"] + "/chat/completions",
        json.dumps({"model": models[node], "messages": [{"role": "user", "content": "7 "}]}).encode(),
        {"Content-Type": "application/json", "Authorization": "Bearer " + os.environ["MARFT_SERVER_KEY"]},
    )
    with urllib.request.urlopen(request) as answer:
        print(node, models[node], json.load(answer)["choices"][0]["message"]["content"])
print(os.environ["MARFT_CANDIDATE"], os.environ["MARFT_ADAPTERS"], os.environ["MARFT_SERVER_MODEL"])
sys.exit(int(sys.argv[1]))
"""


def test_a_safety_command_finds_the_candidate_served(lab: Lab) -> None:
    script = lab.folder / "calls.py"
    script.write_text(CALLS_THE_CANDIDATE)
    command = [sys.executable, str(script), "0"]
    assert promote(lab, *JANE, safety_command=command) == 0
    output = (lab.run / "promoted/1.safety.txt").read_text()
    assert output.splitlines() == [
        "reasoner reasoner@2 think",
        "actor actor@2 yes",
        'after {"actor": 2, "reasoner": 2} base',
    ]
    found = manifest(lab).safety
    assert found is not None
    assert found.suite == (" ".join(command),)
    assert found.output_sha256 == hashlib.sha256(output.encode()).hexdigest()
    assert stat.S_IMODE((lab.run / "promoted/1.safety.txt").stat().st_mode) == 0o600


def test_a_safety_command_that_fails_refuses_the_promotion_and_its_output_is_kept(
    lab: Lab, capsys: pytest.CaptureFixture[str]
) -> None:
    script = lab.folder / "calls.py"
    script.write_text(CALLS_THE_CANDIDATE)
    assert promote(lab, *JANE, safety_command=[sys.executable, str(script), "1"]) == 3
    assert "FAILED (exit status 1)" in capsys.readouterr().out.replace("\n", " ")
    assert promoted(lab) == ["refused.safety.txt"]
    assert "actor@2 yes" in (lab.run / "promoted/refused.safety.txt").read_text()
    assert promote(lab, *JANE, safety_command=["no-such-command"]) == 2
    assert "cannot run 'no-such-command'" in capsys.readouterr().err


@pytest.mark.slow
def test_a_command_that_hangs_is_stopped_with_what_it_started(tmp_path: Path) -> None:
    child = f"import os, time; open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid())); time.sleep(60)"
    script = f"import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', {child!r}]); time.sleep(60)"
    end = run_command([sys.executable, "-c", script], {}, 3.0)
    assert (end.passed, end.reason) == (False, "did not end within 3 s")
    assert end.seconds < 10
    pid = int((tmp_path / "pid").read_text())
    deadline = time.monotonic() + 5
    while _runs(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _runs(pid)


def _runs(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0]
    except FileNotFoundError:
        return False
    return state != "Z"


def test_only_the_end_of_a_long_output_is_kept() -> None:
    end = run_command([sys.executable, "-c", "print('x' * 5_000_000); print('the summary')"], {}, 30.0)
    assert end.passed
    assert len(end.output) == MAX_OUTPUT_BYTES
    assert end.output.endswith(b"x\nthe summary\n")


# -- signatures and verification ------------------------------------------------------------------------------


def changed(path: Path, fields: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def test_a_signature_holds_every_field_and_only_this_key(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROMOTION_KEY", KEY)
    assert promote(lab, *JANE, key_env="PROMOTION_KEY") == 0
    found = manifest(lab)
    assert found.is_signed_with(KEY.encode())
    assert not found.is_signed_with(b"another key of the suite")
    for name, other in (("signed_by", "John Roe"), ("gate", "correct>-1"), ("report_sha256", "0" * 64)):
        assert not found.model_copy(update={name: other}).is_signed_with(KEY.encode())
    assert promote(lab, "--verify", key_env="PROMOTION_KEY") == 0


def test_what_was_changed_taken_away_or_not_signed_is_found(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PROMOTION_KEY", KEY)
    place = lab.run / "promoted"
    assert promote(lab, *JANE) == 0  # from before there was a key
    for _ in range(2):
        assert promote(lab, *JANE, key_env="PROMOTION_KEY") == 0
    whole = {path.name: path.read_bytes() for path in place.iterdir()}
    assert promote(lab, "--verify", key_env="PROMOTION_KEY") == 0

    def refused_after(message: str, **options: Any) -> None:
        assert promote(lab, "--verify", **options) == 2
        assert message in capsys.readouterr().err
        for name, content in whole.items():
            (place / name).write_bytes(content)

    changed(place / "1.json", {"signed_by": "John Roe"})
    refused_after("2.json does not follow from the manifest before it")
    changed(place / "2.json", {"gate": "correct>-1"})
    refused_after("2.json was changed, or signed with another key", key_env="PROMOTION_KEY")
    changed(place / "3.json", {"gate": "correct>-1"})
    refused_after("current.json does not name")
    changed(place / "3.json", {"signature": None})
    digest = hashlib.sha256((place / "3.json").read_bytes()).hexdigest()
    (place / "current.json").write_text(json.dumps({"number": 3, "sha256": digest}))
    refused_after("3.json is not signed", key_env="PROMOTION_KEY")
    (place / "2.json").unlink()
    refused_after("2.json is missing")
    (place / "3.json").unlink()  # back to an older promotion without saying so
    refused_after("current.json does not name")
    (place / "current.json").write_text(
        json.dumps({"number": 1, "sha256": hashlib.sha256(whole["1.json"]).hexdigest()})
    )
    refused_after("current.json does not name")
    (place / "current.json").unlink()
    refused_after("current.json does not name")
    (place / "2.json").write_text("{}")
    refused_after("2.json is no manifest")
    monkeypatch.setenv("PROMOTION_KEY", "short")
    refused_after("PROMOTION_KEY holds 5 bytes; a key has 16 or more", key_env="PROMOTION_KEY")


def test_a_manifest_that_is_not_the_promoted_one_names_no_versions(lab: Lab) -> None:
    assert promote(lab, *JANE) == 0
    changed(lab.run / "promoted/1.json", {"signed_by": "John Roe"})
    with pytest.raises(ConfigError, match=r"is not the manifest that current\.json names"):
        promoted_versions(lab.run)


def test_a_broken_chain_is_not_added_to(lab: Lab, capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):
        assert promote(lab, *JANE) == 0
    (lab.run / "promoted/current.json").unlink()
    assert promote(lab, *JANE) == 2
    assert "current.json does not name" in capsys.readouterr().err
    assert promoted(lab) == ["1.json", "2.json"]


@pytest.mark.parametrize("flags", [JANE, ("--rollback", "1", *JANE)])
def test_promotion_goes_on_after_one_that_was_killed_before_it_counted(
    flags: Sequence[str], lab: Lab, capsys: pytest.CaptureFixture[str]
) -> None:
    current = lab.run / "promoted/current.json"
    assert promote(lab, *JANE) == 0
    before = current.read_bytes()
    assert promote(lab, *JANE) == 0
    current.write_bytes(before)
    capsys.readouterr()
    assert promote(lab, *flags) == 0
    assert "promotion 2 was signed off by a command that was killed" in " ".join(capsys.readouterr().out.split())
    assert promote(lab, "--verify") == 0
    assert promoted(lab) == ["1.json", "2.json", "3.json", "current.json"]


def test_a_manifest_without_the_key_s_signature_names_no_versions(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROMOTION_KEY", KEY)
    place = lab.run / "promoted"
    assert promote(lab, *JANE, key_env="PROMOTION_KEY") == 0
    assert promoted_versions(lab.run, "PROMOTION_KEY") == {"reasoner": 2, "actor": 2}
    found = manifest(lab)
    for signature, message in ((found.signature, "was changed, or signed with another key"), (None, "is not signed")):
        changed(place / "1.json", {"candidate": "another", "signature": signature})
        digest = hashlib.sha256((place / "1.json").read_bytes()).hexdigest()
        (place / "current.json").write_text(json.dumps({"number": 1, "sha256": digest}))
        assert promoted_versions(lab.run) is not None  # without a key, only an accident is found
        with pytest.raises(ConfigError, match=message):
            promoted_versions(lab.run, "PROMOTION_KEY")
    monkeypatch.delenv("PROMOTION_KEY")
    with pytest.raises(ConfigError, match="PROMOTION_KEY holds 0 bytes"):
        promoted_versions(lab.run, "PROMOTION_KEY")


def test_the_kept_output_belongs_to_the_manifest(lab: Lab, capsys: pytest.CaptureFixture[str]) -> None:
    assert promote(lab, *JANE, safety_command=[sys.executable, "-c", "print('all is well')"]) == 0
    assert promote(lab, "--rollback", "1", *JANE) == 0
    assert promote(lab, "--verify") == 0
    (lab.run / "promoted/1.safety.txt").write_text("all is very well")
    assert promote(lab, "--verify") == 2
    assert "1.safety.txt is not what the safety suite printed" in capsys.readouterr().err


def test_one_command_at_a_time_promotes(lab: Lab, capsys: pytest.CaptureFixture[str]) -> None:
    from marft_bridge.runs.run_folder import RunFolder

    with RunFolder(lab.run).lock_for("train"):
        assert promote(lab, *JANE) == 2
    assert "is in use by `marft-bridge train`" in capsys.readouterr().err.replace("\n", " ")


# -- what reads it --------------------------------------------------------------------------------------------


def test_compare_runs_the_safety_suite_behind_its_gate(lab: Lab, capsys: pytest.CaptureFixture[str]) -> None:
    path = toml(lab, safety=suite(lab, "def safe(case): return 'unsafe'"))
    path.write_text(path.read_text() + "[compare]\ntasks = 30\nmixed_teams = 'off'\nkl_actions = 0\n")
    assert cli.run(["compare", "--config", str(path), "--resume", "--promote-if", "correct>0"]) == 3
    assert "FAILED (unsafe)" in capsys.readouterr().out.replace("\n", " ")
    assert cli.run(["compare", "--config", str(path), "--resume", "--candidate", "after"]) == 2
    assert "--candidate has no effect without --promote-if" in capsys.readouterr().err
    assert promoted(lab) == []


def test_several_candidates_need_a_name_before_they_run(lab: Lab, capsys: pytest.CaptureFixture[str]) -> None:
    path = toml(lab)
    tables = "".join(
        f"[[compare.variants]]\nname = '{name}'\nadapters = {version}\n"
        for name, version in (("a", 0), ("b", 1), ("c", 2))
    )
    path.write_text(path.read_text() + tables)
    asked = len(lab.asked)
    assert cli.run(["compare", "--config", str(path), "--promote-if", "correct>0"]) == 2
    assert "name the candidate with --candidate; one of: b, c" in capsys.readouterr().err
    assert len(lab.asked) == asked


def test_the_chain_is_what_verify_reads(lab: Lab) -> None:
    assert verify_chain(lab.run, None) == []
    assert promote(lab, *JANE) == 0
    assert [m.number for m in verify_chain(lab.run, None)] == [1]
