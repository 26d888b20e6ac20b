"""Owns: where a training round's time went, in metrics.jsonl and in the benches that read it; never how long it took.

- A round's line has the seconds of its four parts and of the whole; a part that did not happen is null, and a part of
  another round is not counted.
- Of a bench the parts sum to the round, and a round that is shown is one that was.
- The demo is measured as it is; chains and long calls differ from each other in one thing only.
"""

from __future__ import annotations

import asyncio
import io
import json
import random
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from benchmarks import round_app, round_rig, round_seconds, round_table
from benchmarks.harness import BENCHES, figures_to_file, measurements_to_figure, print_figures
from langchain_core.messages import AIMessage
from rich.console import Console
from support import zoo_rig
from support.paths import ROOT
from support.zoo_rig import ZOO, Trained, train_zoo

from examples.study.results import _update_seconds
from examples.study.run import dict_to_toml
from graphs import math_duo
from marft_bridge.common.progress import Reporter
from marft_bridge.config.bridge import BridgeConfig, toml_to_config
from marft_bridge.training.round_timings import PUBLISH, ROLLOUT, SCORE, RoundClock
from marft_bridge.training.train import train
from trainers.errors import TrainError
from trainers.marft import MarftTrainer

PARTS = ("publish", "rollout", "score", "update")


class Hands:
    """A clock that stands still unless it is moved."""

    def __init__(self) -> None:
        self.at = 100.0

    def __call__(self) -> float:
        return self.at


@pytest.fixture
def hands() -> Hands:
    return Hands()


def test_a_round_lasts_from_its_first_part_to_its_line_and_pieces_of_a_part_add_up(hands: Hands) -> None:
    clock = RoundClock(hands)
    for name, seconds, pause in ((PUBLISH, 1.0, 0.5), (PUBLISH, 2.0, 0.25), (ROLLOUT, 8.0, 16.0), (SCORE, 0.125, 0.0)):
        with clock.part(1, name):
            hands.at += seconds
        hands.at += pause
    took = clock.finish(1, {"score": 4.0, "update": None})
    assert took == {"round": 27.875, "publish": 3.0, "rollout": 8.0, "score": 4.125, "update": None}


def test_a_part_that_did_not_happen_or_failed_is_none_and_rounds_do_not_mix(hands: Hands) -> None:
    clock, nothing = RoundClock(hands), dict.fromkeys(PARTS)
    with clock.part(1, PUBLISH), clock.part(2, ROLLOUT):  # as with rounds that are played ahead
        hands.at += 2.0
    hands.at += 4.0
    with suppress(ZeroDivisionError), clock.part(2, PUBLISH):
        raise ZeroDivisionError
    assert clock.finish(1, {}) == nothing | {"round": 6.0, "publish": 2.0}
    hands.at += 1.0
    assert clock.finish(2, {}) == nothing | {"round": 7.0, "rollout": 2.0}
    with clock.part(1, PUBLISH):
        hands.at += 0.5
    assert clock.finish(1, {}) == nothing | {"round": 0.5, "publish": 0.5}


def test_parts_may_come_from_several_threads(hands: Hands) -> None:
    clock = RoundClock(hands)

    def play(number: int) -> None:
        for _ in range(50):
            with clock.part(number, ROLLOUT):
                pass

    threads = [threading.Thread(target=play, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [clock.finish(number, {})["rollout"] for number in range(8)] == [0.0] * 8


# -- rounds that were run -----------------------------------------------------------------------------------------


def half_right(_node: str, messages: list[dict[str, Any]], chance: random.Random) -> str:
    numbers = [int(word) for word in messages[-1]["content"].replace("?", "").split() if word.isdecimal()]
    return str(sum(numbers[:2])) if chance.random() < 0.5 else "none"


def check_whole(seconds: dict[str, Any]) -> None:
    """All parts happened, one after another."""
    assert tuple(seconds) == ("round", *PARTS)
    assert all(value >= 0 for value in seconds.values())
    assert sum(seconds[part] for part in PARTS) <= seconds["round"]


def said_of_updates(trained: Trained) -> list[str]:
    return [line for line in trained.said.splitlines() if "rounds left" in line]


@pytest.mark.slow
def test_a_round_whose_episodes_were_stored_before_a_resume_has_no_rollout_and_the_next_one_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise TrainError("cut short")

    def in_two_goes(config: BridgeConfig, reporter: Reporter, resume: bool, without_signal: bool) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(MarftTrainer, "update", refuse)
            with pytest.raises(TrainError, match="cut short"):
                train(config, reporter, resume, without_signal=without_signal)
        train(config, reporter, resume=True)

    monkeypatch.setattr(zoo_rig, "train", in_two_goes)
    trained = train_zoo(ZOO / "solo.toml", half_right, tmp_path, episodes=4, changes={"train.loggers": ["tensorboard"]})
    offline, resumed, whole = trained.rounds
    assert [line["round"] for line in trained.rounds] == [0, 1, 2]
    assert "seconds" not in offline
    assert resumed["seconds"]["rollout"] is None
    assert min(resumed["seconds"][part] for part in ("publish", "score", "update")) >= 0
    check_whole(whole["seconds"])
    assert len(said_of_updates(trained)) == 2
    assert scalars(tmp_path / "run/tensorboard") == {"seconds/round": 2, **{f"seconds/{part}": 2 for part in PARTS}} | {
        "seconds/rollout": 1
    }


def scalars(folder: Path) -> dict[str, int]:
    """Tag -> points, of the seconds, as TensorBoard's own reader finds them."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return {tag: len(events.Scalars(tag)) for tag in events.Tags()["scalars"] if tag.startswith("seconds/")}


@pytest.mark.slow
def test_a_round_that_teaches_nothing_has_no_update(tmp_path: Path) -> None:
    changes = {
        "train.samples_per_task": 2,
        "train.trainer.advantage.estimator": "grpo",
        "train.trainer.advantage.skip_flat_groups": True,
        "train.trainer.offline": {"mode": "off"},
    }
    trained = train_zoo(ZOO / "solo.toml", lambda *_: "none", tmp_path, rounds=1, episodes=4, changes=changes)
    seconds = trained.rounds[1]["seconds"]
    assert seconds["update"] is None
    assert min(seconds[part] for part in ("round", "publish", "rollout", "score")) >= 0  # it is seen who answered
    assert "update 0 s" in said_of_updates(trained)[0]


def test_the_page_of_figures_explains_every_part() -> None:
    page = (ROOT / "docs/metrics.md").read_text()
    (explained,) = [block for block in page.split("\n\n") if block.startswith("`seconds` has the parts of the round")]
    assert all(f"`{name}`" in explained for name in ("round", *PARTS))


def test_the_study_counts_score_and_update_and_nothing_where_one_is_missing() -> None:
    seconds = {"round": 9.0, "publish": 1.0, "rollout": 2.0, "score": 1.5, "update": 3.0}
    assert _update_seconds({"round": 1, "seconds": seconds}) == 4.5
    assert _update_seconds({"round": 1, "seconds": seconds | {"score": None, "update": None}}) is None
    assert _update_seconds({"round": 0, "warm_up": {"seconds": 1.0}, "replay": {"seconds": 0.5}}) == 1.5
    assert _update_seconds(None) is None


# -- the benches --------------------------------------------------------------------------------------------------


def line(whole: float, **parts: float | None) -> dict[str, Any]:
    return {"round": 1, "seconds": {"round": whole, **parts}}


def test_what_the_parts_leave_of_a_round_is_other_and_a_round_that_lacks_one_is_refused() -> None:
    parts = round_rig.line_to_parts(line(10.0, publish=0.5, rollout=4.0, score=1.0, update=3.0))
    assert parts == {"publish": 0.5, "rollout": 4.0, "score": 1.0, "update": 3.0, "other": 1.5}
    with pytest.raises(AssertionError, match="round 1 lacks a part"):
        round_rig.line_to_parts(line(10.0, publish=0.5, rollout=None, score=1.0, update=3.0))


def test_a_measurement_is_the_round_of_median_length_with_its_own_parts() -> None:
    rounds = [
        {"rollout": 9.0, "update": 1.0, "other": 2.0},
        {"rollout": 2.0, "update": 5.0, "other": 1.0},  # 8: the median, though not in any one part
        {"rollout": 3.0, "update": 2.0, "other": 0.0},
    ]
    one = round_rig.rounds_to_measurement(rounds, 4, "s/episode")
    assert (one.value, one.unit, one.baseline, one.ratio) == (2.0, "s/episode", 0.5, 4.0)
    assert one.parts == {"rollout": 0.5, "update": 1.25, "other": 0.25}
    assert round_rig.rounds_to_measurement(rounds[:2], 1, "s").value == 8.0  # of two, the shorter


def test_measurements_take_turns_with_the_rounds_after_those_that_warm_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def seven_rounds(_content: object, _folder: Path, rounds: int) -> list[round_rig.Parts]:
        asked.append(rounds)
        return [{"rollout": float(number)} for number in (99, 1, 2, 3, 4, 5, 7)]

    monkeypatch.setattr(round_rig, "content_to_rounds", seven_rounds)
    measured = round_rig.content_to_measurements({}, tmp_path, rounds=6, warm=1, per=1, unit="s")
    assert [one.value for one in measured] == [3.0, 4.0]  # of 1 3 5, and of 2 4 7
    assert asked == [7]


def test_calls_of_another_length_than_the_bench_says_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(round_rig, "content_to_rounds", lambda *_: [{"rollout": 1.0}])
    for found, refused in ((230.0, True), (231.0, False), (281.0, False), (282.0, True)):
        monkeypatch.setattr(round_rig, "mean_length", lambda _, found=found: found)
        measuring = round_rig.content_to_measurements({}, tmp_path, rounds=1, per=1, unit="s", length=256)
        if refused:
            with pytest.raises(AssertionError, match="not 256"):
                next(measuring)
        else:
            assert [one.value for one in measuring] == [1.0]


def test_the_file_holds_the_parts_and_they_sum_to_the_figure(tmp_path: Path) -> None:
    rounds = [{"rollout": 3.0, "update": 1.0}, {"rollout": 5.0, "update": 1.0}]
    measured = [round_rig.rounds_to_measurement([one], 1, "s") for one in rounds]
    figures_to_file([measurements_to_figure("round_seconds", measured)], tmp_path / "latest.json")
    (known,) = json.loads((tmp_path / "latest.json").read_text())
    assert (known["value"], known["parts"]) == (5.0, {"rollout": 4.0, "update": 1.0})
    console = Console(record=True, width=120, file=io.StringIO())
    print_figures(console, {"round_seconds": measured})
    shown = [text.split() for text in console.export_text().replace("│", " ").splitlines()]
    assert [row[:2] for row in shown[3:6]] == [["round_seconds", "5"], ["rollout", "4"], ["update", "1"]]
    assert shown[3][-1] == "2"  # the spread of 4 and 6
    print_figures(console, {"round_seconds": measured[:1]})  # one measurement has none
    assert console.export_text().replace("│", " ").splitlines()[3].split()[-1] == "-"


def flat(content: dict[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in content.items():
        if isinstance(value, dict):
            yield from flat(value, f"{above}{name}.")
        else:
            yield f"{above}{name}", value


def differing(one: dict[str, Any], other: dict[str, Any]) -> set[str]:
    left, right = dict(flat(one)), dict(flat(other))
    return {name for name in left | right if left.get(name) != right.get(name)}


def as_read(content: dict[str, Any], folder: Path) -> dict[str, Any]:
    """What a command makes of a configuration that a bench wrote."""
    path = folder / "bridge.toml"
    path.write_text(dict_to_toml(content))
    return toml_to_config(path).model_dump(mode="json")


def test_the_demo_is_measured_as_it_is(tmp_path: Path) -> None:
    demo = toml_to_config(round_seconds.DEMO).model_dump(mode="json")
    assert (demo["train"]["episodes_per_round"], len(demo["graph"]["nodes"])) == (64, 2)
    assert differing(as_read(round_seconds.demo(), tmp_path), demo) == {"collect.episodes", "train.evaluation_episodes"}


def test_chains_differ_in_the_graph_and_in_the_room_for_its_adapters_only(tmp_path: Path) -> None:
    contents = [as_read(round_seconds.chain(agents), tmp_path) for agents in round_seconds.AGENTS]
    assert [len(content["graph"]["nodes"]) for content in contents] == [2, 4, 8, 12]
    for one, other in pairwise(contents):
        assert differing(one, other) - {"compare.tasks", "compare.samples_per_task"} == {
            *("name", "graph.app", "graph.nodes", "serve.max_loras")
        }


def test_long_calls_differ_in_tasks_room_and_episodes_only_and_no_two_tasks_share_their_text(tmp_path: Path) -> None:
    contents = {
        length: as_read(round_seconds.long_calls(length, tmp_path / f"{length}.jsonl"), tmp_path)
        for length in round_seconds.LENGTHS
    }
    assert list(contents) == [256, 512, 1024, 2048, 4096]
    for one, other in pairwise(contents.values()):
        assert differing(one, other) <= {
            *("graph.tasks", "serve.max_model_len", "collect.episodes", "train.episodes_per_round")
        }
    tasks = [json.loads(text) for text in (tmp_path / "512.jsonl").read_text().splitlines()]
    questions = [task["question"] for task in math_duo.tasks()]
    assert [task["id"] for task in tasks] == [task["id"] for task in math_duo.tasks()]
    texts = [task["question"].removesuffix(f" {asked}") for task, asked in zip(tasks, questions, strict=True)]
    assert {len(text.split()) for text in texts} == {512 - round_seconds.DEMO_TOKENS}
    assert len({" ".join(text.split()[:6]) for text in texts}) == len(texts)


def test_the_chain_of_two_is_the_beginning_of_the_trio() -> None:
    assert [profile.role for profile in round_app.PAIR] == ["reasoner", "actor"]
    assert toml_to_config(ZOO / "trio.toml").graph.nodes[:2] == ("reasoner", "actor")


def test_a_pattern_chooses_benches_and_each_can_run_alone() -> None:
    names = {name for name in BENCHES if name.startswith("round_seconds")}
    assert names == {
        "round_seconds",
        *(f"round_seconds_agents_{n}" for n in (2, 4, 8, 12)),
        *(f"round_seconds_length_{n}" for n in (256, 512, 1024, 2048, 4096)),
    }


def test_lines_differ_in_the_graph_and_in_the_room_for_its_adapters_only(tmp_path: Path) -> None:
    contents = [as_read(round_seconds.line(agents), tmp_path) for agents in round_seconds.AGENTS]
    assert [len(content["graph"]["nodes"]) for content in contents] == [2, 4, 8, 12]
    for one, other in pairwise(contents):
        assert differing(one, other) == {"graph.app", "graph.nodes", "serve.max_loras"}
    in_chains = differing(contents[0], as_read(round_seconds.chain(2), tmp_path))
    assert {name for name in in_chains if name.startswith(("train.", "sampling.", "collect.", "serve."))} == {
        "train.trainer.objective.negative_weight",
        "train.trainer.optimizer.minibatch_actions",
    }


def test_every_agent_of_a_line_reads_as_much_however_many_there_are() -> None:
    """The question and the last word of the one before, at most eight bytes of it; the first reads two zeros there."""
    read: list[str] = []

    class Verbose:
        async def ainvoke(self, messages: list[Any]) -> Any:
            read.append("\n".join(str(message.content) for message in messages))
            return AIMessage(f"I think that it is\nor {len(read) + 10}")

    for agents in round_seconds.AGENTS:
        read.clear()
        build = getattr(round_app, f"build_line_{agents}")
        result = asyncio.run(build(Verbose()).ainvoke({"question": "What is 2 + 2?"}))
        assert len(read) == agents
        assert read[0].endswith("What is 2 + 2?\nThe agent before you: 00\nThe number?")
        assert all(text.endswith("What is 2 + 2?\nThe agent before you: it is\nThe number?") for text in read[1:])
        assert {len(text) - len("00") for text in read[:1]} == {len(text) - len("it is") for text in read[1:]}
        assert result["answer"] == "it is"


def test_half_of_a_line_s_tasks_are_worth_one_whatever_is_said() -> None:
    rewards = [round_app.even_sum(task, {})["reward"] for task in math_duo.tasks()]
    assert (rewards.count(1.0), len(rewards)) == (205, 405)  # of 81 sums of 1 to 9 and 1 to 9, 41 are even


def test_what_agents_cost_is_the_slope_of_a_rounds_seconds_beside_that_of_its_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seconds 3, 12, 48 and 108 are 3 (n / 2)^2; tokens 500 n have a slope of 1."""
    seconds = {2: 3.0, 4: 12.0, 8: 48.0, 12: 108.0}

    def one_round(content: dict[str, Any], folder: Path, rounds: int) -> list[round_rig.Parts]:
        assert (folder.parent, rounds) == (tmp_path, 1)
        whole = seconds[len(content["graph"]["nodes"])]
        return [{"rollout": whole / 3, "update": whole * 2 / 3}]

    monkeypatch.setattr(round_seconds, "bench_model", lambda: tmp_path)
    monkeypatch.setattr(round_seconds, "content_to_rounds", one_round)
    monkeypatch.setattr(round_seconds, "recorded_tokens", lambda folder: 500 * int(folder.name))
    (measured,) = BENCHES["agents_scaling_exponent"](tmp_path)
    assert measured.unit == "exponent"
    assert (measured.value, measured.baseline, measured.ratio) == pytest.approx((2.0, 1.0, 2.0))


def test_what_agents_cost_is_told_of_calls_of_one_length_only() -> None:
    seconds = {2: 1.0, 4: 2.0, 8: 4.0}
    measured = round_seconds.growth_to_measurement(seconds, {2: 100, 4: 200, 8: 400})
    assert (measured.value, measured.baseline) == pytest.approx((1.0, 1.0))
    longer = {2: 100, 4: 220, 8: 484}  # 2.2 times as many for twice the agents: log 2.2 / log 2 is 1.14
    with pytest.raises(AssertionError, match=r"agents\^1.14: calls are not of one length"):
        round_seconds.growth_to_measurement(seconds, longer)


def test_growth_is_the_slope_of_logarithms_and_the_quadratic_share_is_that_of_the_greatest_length() -> None:
    sizes = [2, 4, 8, 12]
    assert round_table.exponent(sizes, [3 * n**1.5 for n in sizes]) == pytest.approx(1.5)
    lengths = [256, 1024, 4096]
    seconds = [2e-3 * n + 1e-6 * n * n for n in lengths]  # at 4096: 8.192 and 16.777
    assert round_table.quadratic_share(lengths, seconds) == pytest.approx(16.777216 / 24.969216)
    assert round_table.quadratic_share(lengths, [5 * n for n in lengths]) == pytest.approx(0, abs=1e-9)


def test_the_table_shows_what_was_measured_and_how_it_grows(tmp_path: Path) -> None:
    path = tmp_path / "latest.json"
    plain = {"name": "train_vs_naive", "value": 4.0, "unit": "tok/s", "baseline": 1.0, "ratio": 4.0}
    rows = [
        {"name": name, "value": 4.0 * size, "unit": unit, "parts": {"rollout": 1.0 * size, "update": 3.0 * size}}
        for name, unit, size in (
            ("round_seconds", "s", 16),
            ("round_seconds_agents_12", "s/episode", 12),
            ("round_seconds_agents_2", "s/episode", 2),
        )
    ]
    path.write_text(json.dumps([plain, *rows]))
    assert list(round_table.file_to_lines(path)) == [
        "| bench | round | rollout | update |",
        "|---|---:|---:|---:|",
        "| `round_seconds`, s | 64 | 16 | 48 |",
        "| `round_seconds_agents_12`, s/episode | 48 | 12 | 36 |",
        "| `round_seconds_agents_2`, s/episode | 8 | 2 | 6 |",
        *(f"- {part}: agents^1.00" for part in ("round", "rollout", "update")),
    ]
    path.write_text(json.dumps([plain]))
    assert list(round_table.file_to_lines(path)) == []


COMMANDS = """#!/bin/sh
# Called as python is, with: -m marft_bridge COMMAND --config FILE
echo "$2 $3 $5" >> "$FOLDER/called"
case $3 in
serve) shift 6; exec "$@" ;;
collect) [ ! -e "$FOLDER/broken" ] || { echo "collect: it is broken"; exit 2; } ;;
train) mkdir "$FOLDER/run"; cp "$FOLDER/recorded" "$FOLDER/run/metrics.jsonl" ;;
esac
"""


def test_a_bench_runs_collect_and_train_beside_one_server_and_reads_what_they_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "python").write_text(COMMANDS)
    (tmp_path / "python").chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("FOLDER", str(tmp_path))
    took = {"publish": 0.5, "rollout": 4.0, "score": 1.0, "update": 3.0}
    lines = [{"round": 0, "warm_up": {}}, line(10.0, **took), {**line(9.0, **took), "round": 2}]
    (tmp_path / "recorded").write_text("".join(json.dumps(each) + "\n" for each in lines))
    rounds = round_rig.content_to_rounds(round_seconds.demo(), tmp_path, 2)
    assert rounds == [{**took, "other": 1.5}, {**took, "other": 0.5}]
    written = tmp_path / "bridge.toml"
    called = (tmp_path / "called").read_text().splitlines()
    assert called == [f"marft_bridge {command} {written}" for command in ("serve", "collect", "train")]
    config = toml_to_config(written)
    assert (config.train.rounds, config.run_folder) == (2, tmp_path / "run")
    (tmp_path / "broken").touch()
    with pytest.raises(AssertionError, match="it is broken"):
        round_rig.content_to_rounds(round_seconds.demo(), tmp_path, 2)
