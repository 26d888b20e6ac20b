"""Owns: `marft-bridge credit --by forks` forks recorded runs around each call and says what each decides and adds.

- A helper, an idler and a saboteur are told apart, per node and per call, beside leave-one-out where the store has it.
- What is resumed runs nothing twice, and other options are not mixed in; failed forks are counted by reason.
- What cannot be measured, or would change nothing, is refused in one line before a server is asked.
"""

from __future__ import annotations

import io
import json
import random
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from forks.test_recorded_prefix import Team, chain
from rich.console import Console
from support.alive import count_while_streaming
from support.credit_rig import CreditLab
from support.fake_vllm import FakeVllm, running
from support.paths import ROOT

from marft_bridge import cli
from marft_bridge.agent_credit.command import CreditOptions, credit
from marft_bridge.commands.collect import collect
from marft_bridge.common.errors import BridgeError, ConfigError, EpisodesFailedError
from marft_bridge.common.progress import Reporter
from marft_bridge.config.bridge import toml_to_config
from marft_bridge.fork_credit.command import ForkCreditOptions, credit_by_forks
from marft_bridge.fork_credit.measurement import read_forks
from marft_bridge.rollouts.episode_plan import EpisodeRequest, episode_to_key
from marft_bridge.rollouts.run_counts import Tally
from marft_bridge.rollouts.session import Session
from trace_store.records import Trajectory


def chancy_answer(body: dict[str, Any]) -> str:
    """By the seed of the call: the helper mostly hints, the idler prattles and is not read, the harmer poisons."""
    text = body["messages"][-1]["content"]
    who = text.split()[0]
    chance = random.Random(f"{who} {body['seed']}").random()
    if who == "helper":
        return "hint" if chance < 0.9 else "hm"
    if who == "idler":
        return f"word{chance:.3f}"
    if who == "harmer":
        return "poison" if chance < 0.5 else "hm"
    return "right" if chance < (0.9 if "hint" in text and "poison" not in text else 0.1) else "wrong"


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[CreditLab]:
    with running(FakeVllm()) as server:
        lab = CreditLab(tmp_path, server)
        server.answer = chancy_answer
        collect(lab.config(), lab.reporter(), resume=False)
        server.asked.clear()
        yield lab


def run(lab: CreditLab, resume: bool = False, **options: Any) -> list[str]:
    chosen = ForkCreditOptions(**({"substitute": "silent", "min_contribution": 0.2} | options))
    return lab.say(lambda reporter: credit_by_forks(lab.config(), chosen, reporter, resume=resume))


def forks(lab: CreditLab, run_id: str = "credit-forks-1") -> list[Trajectory]:
    with lab.store() as store:
        return list(store.trajectories(run_ids=[run_id], forks=True))


def rows(said: Sequence[str]) -> dict[str, list[str]]:
    table = [[cell.strip() for cell in line.split("│")[1:-1]] for line in said if "│" in line]
    return {row[0]: row[1:] for row in table}


@pytest.mark.slow
def test_a_helper_an_idler_and_a_saboteur_are_told_apart_per_node_and_per_call(
    lab: CreditLab, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["credit", "--config", str(lab.folder / "bridge.toml"), "--by", "forks", "--substitute", "silent"]
    words += ["--forks", "336", "--worth", "0.2"]
    shown = rows(run(lab, forks=336))
    page = (ROOT / "docs/credit.md").read_text().split("```text\n")[2].split("```")[0].strip().splitlines()
    assert rows(page[1:]) == {node: shown[node] for node in ("helper", "idler", "harmer")}
    asked_before = len(lab.server.asked)
    assert cli.run([*words, "--resume", "--json"]) == 0
    assert len(lab.server.asked) == asked_before
    findings = json.loads(capsys.readouterr().out)
    nodes = {each["node"]: each for each in findings["agents"]}
    assert {node: each["finding"] for node, each in nodes.items()} == {
        "helper": "adds", "idler": "lazy", "harmer": "harmful",
    }  # fmt: skip
    assert nodes["harmer"]["difference"]["high"] < 0 < nodes["helper"]["difference"]["low"]
    assert nodes["idler"]["difference"]["mean"] == nodes["idler"]["share"]["mean"] == 0.0
    assert nodes["idler"]["share"]["low"] < 0 < nodes["idler"]["share"]["high"]
    assert nodes["harmer"]["share"]["low"] > 0
    assert (findings["runs"], findings["tasks"], findings["forks"]) == (24, 24, 336)
    calls = {(each["node"], each["number"]): each for each in findings["calls"]}
    assert set(calls) == {("helper", 1), ("idler", 1), ("harmer", 1)}
    alone, together = calls["harmer", 1]["difference"], nodes["harmer"]["difference"]
    assert alone["mean"] == together["mean"]
    assert together["low"] < alone["low"] < alone["high"] < together["high"]
    assert findings["leave_one_out"] is None


def asked(lab: CreditLab) -> Counter[str]:
    return Counter(body["messages"][-1]["content"].split()[0] for body in lab.server.asked)


@pytest.mark.slow
def test_levels_are_shared_and_the_idlers_answer_alone_differs_between_them(lab: CreditLab) -> None:
    """Two runs, one fork of each point: before helper, idler, harmer and solver; and a stand-in for each of three."""
    said = run(lab, forks=14, samples=1)
    stored = forks(lab)
    assert "2 runs of collect, of 2 tasks, drawn by seed 0 whatever they earned; 14 forks, 1 at each point" in said[0]
    assert len(stored) == 14
    assert asked(lab) == {"helper": 2, "idler": 4 + 2, "harmer": 6 + 4, "solver": 8 + 6}
    variants = Counter(each.episode.variant for each in stored)
    assert variants == {None: 8} | {f"without {node} (silent)": 2 for node in ("helper", "idler", "harmer")}
    assert {each.episode.split for each in stored} == {"train"}
    (parent, *_) = {each.episode.parent_episode for each in stored}
    siblings = [each for each in stored if each.episode.parent_episode == parent and each.episode.variant is None]
    sampled = [action for each in siblings for action in each.actions if action.replayed_from is None]
    assert len(sampled) == 4 + 3 + 2 + 1
    assert Counter(node for node, _ in {(action.node, action.seed) for action in sampled}) == dict.fromkeys(
        ("helper", "idler", "harmer", "solver"), 1
    )


@pytest.mark.slow
def test_nobody_needs_to_stand_in_and_leave_one_out_is_shown_where_the_store_has_it(lab: CreditLab) -> None:
    leave_one_out = CreditOptions(substitute="silent", run_of="collect")
    lab.say(lambda reporter: credit(lab.config(), leave_one_out, reporter, False))
    said = run(lab, substitute="none", forks=192, nodes=("idler", "harmer"))
    table = rows(said)
    assert table["harmer"][-2] == "decides"
    assert table["idler"][-2] == "not settled"
    assert re.fullmatch(r"-0\.\d+ -0\.\d+ to -0\.\d+", table["harmer"][-1])
    assert any("leave-one-out (credit-1, silent)" in line for line in said)
    assert not [each for each in forks(lab) if each.episode.variant is not None]
    assert rows(run(lab, substitute="none", forks=96, nodes=("idler",), min_contribution=0.9))["idler"][-2] == "idle"


@pytest.mark.slow
def test_what_was_interrupted_goes_on_and_nothing_runs_twice(lab: CreditLab, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Session.run

    def stopped(session: Session, requests: Sequence[EpisodeRequest], title: str, reward: str, **_: int) -> Tally:
        whole(session, requests[:5], title, reward)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Session, "run", stopped)
        with pytest.raises(KeyboardInterrupt):
            run(lab, forks=28)
    assert len(forks(lab)) == 5
    with pytest.raises(ConfigError, match="credit-forks-1 began with other runs, nodes, forks, stand-in, seed"):
        run(lab, forks=28, substitute="text:x", resume=True)
    said = run(lab, forks=28, resume=True)
    assert Counter(episode_to_key(each.episode) for each in forks(lab)).most_common(1)[0][1] == 1
    assert len(forks(lab)) == 28
    again = len(lab.server.asked)
    assert run(lab, forks=28, resume=True)[1:] == said[1:]
    assert len(lab.server.asked) == again


@pytest.mark.slow
def test_forks_of_an_app_that_draws_ids_do_not_fail(tmp_path: Path) -> None:
    with running(FakeVllm()) as server:
        lab = CreditLab(tmp_path, server)
        app = lab.folder / "app.py"
        drawing = app.read_text().replace("""f"{name} {state['x']}\"""", """f"{name} {state['x']} {uuid.uuid4()}\"""")
        app.write_text("import uuid\n" + drawing)
        server.answer = chancy_answer
        collect(lab.config(), lab.reporter(), resume=False)
        said = run(lab, forks=24, substitute="none")
        assert not [line for line in said if "failed" in line]
        made = forks(lab)
        assert {each.episode.outcome for each in made} == {"terminated"}
        assert any(action.replayed_from for each in made for action in each.actions)


@pytest.mark.slow
def test_failed_forks_are_counted_by_reason_and_are_in_no_figure(lab: CreditLab) -> None:
    """The app changed since: its idler is asked otherwise, so that forks at and after it do not begin as they did."""
    app = (lab.folder / "app.py").read_text()
    (lab.folder / "changed.py").write_text(app.replace('ainvoked("idler")', 'ainvoked("idler now")'))
    lab.config()
    config = (lab.folder / "bridge.toml").read_text().replace("app.py:", "changed.py:")
    (lab.folder / "changed.toml").write_text(config)
    lab.config = lambda: toml_to_config(lab.folder / "changed.toml")  # type: ignore[method-assign, misc, assignment]
    words = 'DivergedError: idler, call 1: message 0 (user) differs at word 1: recorded "'
    said = run(lab, forks=12, nodes=("helper",), substitute="none")
    counts = [int(line.split()[0]) for line in said if f" of 12 forks failed: {words}" in line]
    assert sum(counts) == 6
    assert "6 failed forks are in no figure" in said
    assert rows(said)["helper:1"][1:] == ["", "not measured"]
    text = io.StringIO()
    options = ForkCreditOptions(nodes=("idler",), substitute="none", forks=90)
    with pytest.raises(EpisodesFailedError, match="episodes failed") as failure:
        credit_by_forks(lab.config(), options, Reporter(Console(file=text, width=300)), resume=False)
    assert failure.value.exit_code == 1
    assert rows(text.getvalue().splitlines())["idler:1"][1:] == ["", "not measured"]
    assert words in text.getvalue()


@pytest.mark.slow
def test_what_cannot_be_measured_is_one_line_before_a_server_is_asked(lab: CreditLab) -> None:
    for options, words in (
        ({"substitute": "base"}, "runs at version 0 already.*or --substitute none"),
        ({"nodes": ("nobody",)}, "'nobody' is not in graph.nodes or graph.frozen"),
        ({"run_of": "nothing"}, "there is no run 'nothing'"),
        ({"metric": "nothing"}, "has no training episode with the reward 'nothing'"),
        ({"forks": 3}, "3 forks do not reach two runs, each of which takes 14"),
    ):
        with pytest.raises(BridgeError, match=words):
            run(lab, **options)
    assert lab.server.asked == []
    words = ["credit", "--config", str(lab.folder / "bridge.toml")]
    lab.config()
    for more in (["--by", "forks", "--tasks", "3"], ["--by", "forks", "--method", "shapley"], ["--forks", "9"]):
        assert cli.run([*words, *more]) == 2


def test_forks_are_read_one_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    team = Team(tmp_path, chain, ("a", "b", "c"))
    team.fork("b", samples=6)
    counts = count_while_streaming(monkeypatch)
    with team.rig.store() as store:
        stored = read_forks(store, "fork-1", "reward")
    assert (len(stored.rewards), stored.count) == (6, 6)
    assert len(counts) == 6
    assert max(counts) <= 2  # the one that was given, and the one before it
