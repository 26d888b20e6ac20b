"""Owns: `promote --efficient`: from a report of hosted, mixed and local teams to a promotion node by node.

- The cheapest efficient team that the report shows non-inferior is signed: which nodes are local, at which version, and
  which stay hosted; `serve` then serves the local ones alone.
- A node that no configuration names is hosted by name, in report and manifest, with who answered it and what it cost.
- A named team has to be efficient and shown non-inferior as well; a condition holds besides.
- A report without costs or a margin, of another configuration or older than a later comparison, and weights that
  changed are refused in one line.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from support.compare_rig import PRICES, Lab, lab_in

from marft_bridge import cli
from marft_bridge.common.errors import ConfigError
from marft_bridge.comparison.records import Report
from marft_bridge.comparison.views import describe_variant
from marft_bridge.live.command import LiveTraffic
from marft_bridge.live.flags import LiveOptions
from marft_bridge.live.split import Split
from marft_bridge.promotion.efficient import find_efficient
from marft_bridge.promotion.manifest import Manifest
from marft_bridge.runs.run_folder import RunFolder
from marft_bridge.serving.model_versions import config_to_versions
from trace_store.records import RunRow
from trace_store.store import TraceStore

JANE = ("--by", "Jane Doe", "--yes")
APP = """

def own():
    model = ChatOpenAI(model="hosted", base_url="HOSTED/v1", api_key="k", max_retries=0)
    return chain(model, "reasoner", "actor", "closer")
"""


def answer(body: Mapping[str, Any]) -> str:
    """The local reasoner misleads whoever comes after it, on two tasks of three. The closer is in no configuration."""
    number, _, log = str(body["messages"][-1]["content"]).partition(" ")
    if not log:
        return "muddle" if body["model"] == "reasoner@2" and int(number) % 3 else "think"
    return "no" if log.startswith("muddle") else "yes"


def toml(lab: Lab, **options: Any) -> Path:
    """A hosted app, and the teams that may take over; options are keys of [compare]."""
    app = options.pop("app", f"{lab.apps}:own")
    compare = {"tasks": 40, "kl_actions": 0, "mixed_teams": "off", "non_inferior": 0.2}
    compare |= {"prices": str(lab.folder / "prices.toml")} | options
    lines = "".join(f"{key} = {json.dumps(value)}\n" for key, value in compare.items() if value is not None)
    path = lab.folder / "bridge.toml"
    path.write_text(
        f"""
run = "{lab.run}"
[graph]
app = "{app}"
nodes = ["reasoner", "actor"]
tasks = "{lab.apps}:tasks"
task_to_input = "{lab.apps}:to_input"
reward = "{lab.apps}:reward"
[model]
path = "{lab.model}"
[serve]
attach = "{lab.ours.url}"
[compare]
{lines}
[[compare.variants]]
name = "hosted"
own_models = true
[[compare.variants]]
name = "local"
adapters = 2
[[compare.variants]]
name = "actor local"
app = "{app}"
nodes = ["actor"]
adapters = {{ actor = 2 }}
"""
    )
    return path


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with lab_in(tmp_path_factory.mktemp("lab")) as lab:
        lab.apps.write_text(lab.apps.read_text() + APP.replace("HOSTED", lab.hosted.url))
        lab.ours.answer = lab.hosted.answer = answer
        (lab.folder / "prices.toml").write_text(PRICES)
        assert cli.run(["compare", "--config", str(toml(lab))]) == 0
        yield lab


@pytest.fixture
def lab(compared: Lab, monkeypatch: pytest.MonkeyPatch) -> Lab:
    """The same, with nothing promoted."""
    monkeypatch.delenv("MARFT_SIGNED_BY", raising=False)
    for path in (compared.run / "promoted").glob("*"):
        path.unlink()
    return compared


def promote(lab: Lab, *flags: str, **options: Any) -> int:
    return cli.run(["promote", "--config", str(toml(lab, **options)), *flags])


def report_of(lab: Lab) -> Report:
    return Report.model_validate_json((lab.run / "report.json").read_text())


def test_the_cheapest_efficient_team_that_is_non_inferior_is_signed_node_by_node(
    lab: Lab, capsys: pytest.CaptureFixture[str]
) -> None:
    report = report_of(lab)
    outcomes = {row.variant: row.margin_outcome for row in report.contrasts}
    assert outcomes == {"local": "worse by more than the margin", "actor local": "non-inferior"}
    assert {choice.team for choice in report.choices if choice.efficient} == {"local", "actor local"}
    assert [variant.hosted for variant in report.variants] == [
        ("reasoner", "actor", "closer"),
        ("closer",),
        ("reasoner", "closer"),
    ]
    assert describe_variant(report.variants[2]) == "actor@2 · hosted: reasoner, closer"

    assert promote(lab, "--efficient", *JANE) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "reasoner: hosted, as the app calls it actor: local, actor@2 closer: hosted, as the app calls it" in printed
    assert "promoted number 1: actor@2, hosted: reasoner, closer, by Jane Doe" in printed
    manifest = Manifest.model_validate_json((lab.run / "promoted/1.json").read_text())
    assert (manifest.candidate, manifest.base, manifest.versions, manifest.hosted) == (
        "actor local",
        "hosted",
        {"actor": 2},
        ("reasoner", "closer"),
    )
    assert manifest.gate == "efficient and non-inferior"
    (finding,) = manifest.findings
    assert "margin 0.2: non-inferior; a run costs " in finding.sentence
    assert "hosted" not in json.loads(manifest.model_copy(update={"hosted": ()}).model_dump_json())  # as signed before
    assert promote(lab, "--verify") == 0


def test_the_report_says_of_every_node_who_answered_and_what_that_cost(lab: Lab) -> None:
    report = report_of(lab)
    answered = {node: {name: side.answered_by for name, side in sides.items()} for node, sides in report.nodes.items()}
    assert answered == {
        "reasoner": {"hosted": {"hosted": 40}, "local": {"reasoner@2": 40}, "actor local": {"hosted": 40}},
        "actor": {"hosted": {"hosted": 40}, "local": {"actor@2": 40}, "actor local": {"actor@2": 40}},
        "closer": {name: {"hosted": 40} for name in ("hosted", "local", "actor local")},
    }
    for choice in report.choices:  # a run's cost is that of its nodes
        costs = [sides[choice.team].cost_mean for sides in report.nodes.values()]
        assert sum(cost for cost in costs if cost is not None) == pytest.approx(choice.cost.mean)
    closer = (lab.run / "report.md").read_text().partition("### `closer`")[2]
    assert "| answered by | `hosted`: 40 calls | `hosted`: 40 calls | `hosted`: 40 calls |" in closer
    assert "<code>reasoner@2</code></span><span>40 calls" in (lab.run / "report.html").read_text()


def test_what_was_promoted_is_served_without_the_hosted_nodes(lab: Lab) -> None:
    assert promote(lab, "--efficient", *JANE) == 0
    config = lab.config()
    options = LiveOptions(Split(100, 0), None, "promoted", mirror=False, port=0, key_env=None, quiet_s=60.0)
    versions = config_to_versions(config, lab.run / "adapters", print)
    traffic = LiveTraffic(config, RunFolder(lab.run), versions, options)
    assert {name: team.versions for name, team in traffic.teams.items()} == {
        "base": {"actor": 2},
        "candidate": {"actor": 2},
    }


@pytest.mark.parametrize(
    ("flags", "options", "code", "said"),
    [
        (("--candidate", "local"), {}, 3, "worse by more than the margin"),
        (("--candidate", "hosted"), {}, 2, "'hosted' is not one of the efficient teams of report.json: local, actor"),
        (("--if", "correct>0"), {}, 4, "undecided: correct"),
        (("--if", "cost<0.9x"), {}, 0, "passed: cost"),
        (("--verify",), {}, 2, "three ways; choose one"),
        ((), {"app": "elsewhere.py:own"}, 2, "report.json was made with graph.app = "),
    ],
)
def test_a_named_team_a_condition_and_another_configuration(
    lab: Lab,
    flags: Sequence[str],
    options: Mapping[str, Any],
    code: int,
    said: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert promote(lab, "--efficient", *flags, *JANE, **options) == code
    printed = capsys.readouterr()
    assert said in " ".join((printed.out + printed.err).split())
    assert (lab.run / "promoted/1.json").exists() == (code == 0)


@pytest.mark.parametrize("flags", [("--efficient",), ("--candidate", "actor local", "--if", "correct>=base")])
def test_a_report_that_is_older_than_a_comparison_begun_since_is_refused(
    lab: Lab, flags: Sequence[str], capsys: pytest.CaptureFixture[str]
) -> None:
    later_ns = int(report_of(lab).created.timestamp() * 1e9) + 1
    with TraceStore.open(lab.run / "store.duckdb") as store:
        store.put_run(RunRow("compare-2", "compare", later_ns, config={}, version="1"))
    try:
        assert promote(lab, *flags, *JANE) == 2
        assert "report.json is older than the comparison compare-2" in " ".join(capsys.readouterr().err.split())
    finally:
        with TraceStore.open(lab.run / "store.duckdb") as store:
            store.sql("DELETE FROM runs WHERE run_id = 'compare-2'")


def test_an_adapter_that_changed_since_is_refused(lab: Lab, capsys: pytest.CaptureFixture[str]) -> None:
    weights = lab.run / "adapters/actor/2/adapter_model.safetensors"
    content = weights.read_bytes()
    try:
        weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        assert promote(lab, "--efficient", *JANE) == 2
        assert "is not what was registered" in capsys.readouterr().err
    finally:
        weights.write_bytes(content)
    assert not (lab.run / "promoted/1.json").exists()


def changed(report: Report, **changes: Any) -> Report:
    return report.model_copy(update=changes)


def test_a_report_that_cannot_be_chosen_from_is_refused_in_one_line(lab: Lab) -> None:
    report = report_of(lab)
    without_margin = [row.model_copy(update={"non_inferiority": None}) for row in report.contrasts]
    only_base = [choice.model_copy(update={"efficient": choice.team == "hosted"}) for choice in report.choices]
    mixed = [choice.model_copy(update={"team": "hosted+actor"}) for choice in report.choices if choice.efficient]
    for told, name, message in (
        (changed(report, choices=()), None, "says nothing of costs; set compare.prices"),
        (changed(report, contrasts=tuple(without_margin)), None, "names no margin; compare again with --non-inferior"),
        (changed(report, choices=tuple(only_base)), None, "no team of report.json is efficient but the base 'hosted'"),
        (changed(report, choices=tuple(mixed)), "hosted+actor", "'hosted\\+actor' is a mixed team"),
    ):
        with pytest.raises(ConfigError, match=message) as raised:
            find_efficient(told, name)
        assert "\n" not in str(raised.value)


def test_without_one_that_is_shown_the_cheapest_is_held_against_its_verdict(
    lab: Lab, capsys: pytest.CaptureFixture[str]
) -> None:
    report = report_of(lab)
    only_local = tuple(choice.model_copy(update={"efficient": choice.team == "local"}) for choice in report.choices)
    assert find_efficient(changed(report, choices=only_local), None).name == "local"
    path = lab.run / "report.json"
    content = path.read_text()
    try:
        path.write_text(changed(report, choices=only_local).model_dump_json())
        assert promote(lab, "--efficient", *JANE) == 3
        assert "failed: correct" in capsys.readouterr().out
    finally:
        path.write_text(content)
