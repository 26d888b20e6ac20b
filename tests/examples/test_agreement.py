"""Owns: examples/hosted_to_local/agreement.py: how a judge's ranking agrees with a reward that is known.

- Counts, share and tau-b are those worked by hand; of one task tau-b is SciPy's, and tasks are not mixed.
- On three graphs of the zoo, runs are collected, ranked and measured; a judge that knows the answers agrees wholly, and
  one that is always wrong not at all. No rubric shows the known answer.
"""

from __future__ import annotations

import io
import json
import random
import re
from math import sqrt
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from scipy.stats import kendalltau
from support import study_server
from support.chat_rig import save_chat_model
from support.fake_judge import FakeJudge, nonce_of
from support.fake_vllm import FakeVllm, running
from support.paths import ROOT

from examples.hosted_to_local import agreement
from examples.hosted_to_local import judged_games as games
from examples.hosted_to_local.agreement import Attempt, Judge, Judging, agreements_to_table, attempts_to_agreement
from graphs import map_reduce, math_duo, safe_conversation
from marft_bridge.common.progress import Reporter
from marft_bridge.config.bridge import toml_to_config
from marft_bridge.rollouts.app import load_app


def attempts(**tasks: list[tuple[float, float | None]]) -> list[Attempt]:
    return [Attempt(task, known, judged) for task, rows in tasks.items() for known, judged in rows]


def test_counts_share_and_tau_are_those_worked_by_hand() -> None:
    """Task a has two pairs alike and a known tie; b a judged tie, two the other way, and three with a gap."""
    a = [(1.0, 0.9), (1.0, 0.6), (0.0, 0.2)]
    b = [(1.0, 0.4), (0.5, 0.4), (0.0, 0.8), (0.2, None)]
    found = attempts_to_agreement(attempts(a=a, b=b, c=[(1.0, 1.0)]))
    assert (found.tasks, found.pairs, found.same, found.other, found.tied, found.without) == (3, 9, 2, 2, 1, 3)
    assert found.tau_b == pytest.approx((2 - 2) / sqrt(5 * 5))
    assert found.share == (0.5, 0.0, 1.0)  # half of them, and the two tasks say the opposite
    assert attempts_to_agreement(attempts(a=a)).tau_b == pytest.approx(2 / sqrt(2 * 3))


def test_of_one_task_tau_b_is_scipys() -> None:
    chance = random.Random(3)
    known = [float(chance.randrange(4)) for _ in range(30)]
    judged = [chance.randrange(6) / 6 + 0.1 * value for value in known]
    found = attempts_to_agreement(attempts(a=list(zip(known, judged, strict=True))))
    assert found.tau_b == pytest.approx(kendalltau(known, judged).statistic)


def test_pairs_of_two_tasks_are_never_compared_and_nothing_is_made_up() -> None:
    found = attempts_to_agreement(attempts(a=[(1.0, 0.9)], b=[(0.0, 0.1)]))
    assert (found.pairs, found.share, found.tau_b) == (0, None, None)
    flat = attempts_to_agreement(attempts(a=[(1.0, 0.5), (0.0, 0.5)]))
    assert (flat.tied, flat.share, flat.tau_b) == (1, None, None)
    alike = attempts_to_agreement(attempts(a=[(1.0, 0.9), (0.0, 0.1)], b=[(1.0, 0.9), (0.0, 0.1)]))
    assert alike.share == (1.0, None, None), "outcomes that are all equal show no spread"
    judging = Judging(counted=2, ties=1, inconsistent=0, unanswered=0, tokens=1234, seconds=5.4)
    table = agreements_to_table({("j", "flat"): (judging, flat), ("j", "alike"): (judging, alike)}).splitlines()
    assert table[2:] == [
        "| j | `flat` | 1 | 1 | 2 | 1 | 0 | 1 | 0 | 0 | 1 | 0 | - | - | 1,234 | 5 |",
        "| j | `alike` | 2 | 2 | 2 | 1 | 0 | 2 | 2 | 0 | 0 | 0 | 1.00 | +1.00 | 1,234 | 5 |",
    ]
    assert {line.count("|") for line in table} == {17}


def test_no_rubric_shows_what_is_known() -> None:
    for graph, config in games.CONFIGS.items():
        task = load_app(toml_to_config(config)).train_tasks[0]
        named = set(re.findall(r"task\.(\w+)", games.RUBRICS[graph]))
        assert named <= set(load_app(toml_to_config(config)).task_to_input(task)), "what the graph itself is given"


# -- the whole way -----------------------------------------------------------------------------------------------------


def answers(body: dict[str, Any]) -> str:
    """A word or a number that is right now and then, by the request's seed."""
    chance = random.Random(f"{body['seed']} {body['messages'][-1]['content']}")
    text = str(body["messages"][-1]["content"])
    if "HELP or DECLINE" in text:
        return chance.choice(["HELP", "DECLINE", "well"])
    if "YES or NO" in text:
        return chance.choice(["YES", "NO: HELP", "NO: DECLINE"])
    numbers = [int(number) for number in re.findall(r"\d+", text)] or [0]
    return str(chance.choice([sum(numbers[:2]), sum(numbers[:2]) + 1, max(numbers)]))


def known_reward(rubric: str, text: str) -> float:
    """What a run earned, from the question in the rubric and what its nodes wrote."""
    last: dict[str, list[str]] = {}
    for line in text.strip().splitlines():
        node, _, said = line.partition(": ")
        last.setdefault(node, []).append(said)
    for graph in (math_duo, map_reduce, safe_conversation):
        for task in graph.tasks():
            if task.get("question", task.get("request")) in rubric.splitlines():
                if graph is math_duo:
                    return math_duo.reward(task, {"answer": last["actor"][-1]})["reward"]
                if graph is safe_conversation:
                    state = {"answer": last["conversation"][-1], "first_answer": last["conversation"][0]}
                    return float(safe_conversation.reward(task, state)["reward"])
                # Workers run side by side: the order of their answers in the text is that of their ends.
                return map_reduce.reward(task, {"answer": last["reducer"][-1], "results": []})["correct"]
    raise AssertionError(rubric)


def judge_of(sign: int) -> FakeJudge:
    def reply(system: str, user: str) -> str:
        rubric = user.partition("<<<1")[0]
        one, other = (known_reward(rubric, text) for text in re.findall(r"<<<\d \w+>>>\n(.*?)\n<<<\d", user, re.S))
        better = "tie" if one == other else "first" if (one - other) * sign > 0 else "second"
        return json.dumps({"nonce": nonce_of(system), "reason": "r", "better": better})

    return FakeJudge(reply)


@pytest.mark.slow
@pytest.mark.parametrize("sign", [1, -1], ids=["knows", "always wrong"])
def test_three_graphs_are_collected_ranked_and_measured(tmp_path: Path, sign: int) -> None:
    model = save_chat_model(tmp_path / "model")
    judge, vllm = judge_of(sign), FakeVllm()
    vllm.answer = answers
    found = {}
    with running(vllm) as server:
        changes = {"serve": {"attach": server.url}, "model.path": str(model), "seed": 5}
        for graph in games.CONFIGS:
            run_folder = games.collect_side(
                graph,
                tmp_path,
                "measured",
                changes=changes,
                attempts=games.Attempts(6, 3),
                reporter=Reporter(Console(file=io.StringIO())),
            )
            found[graph] = agreement.judge_runs(graph, run_folder, Judge(judge.url, "j"), samples=3)
    judge.close()
    for graph, (judging, each) in found.items():
        assert judging.counted == 18
        assert judging.unanswered == judging.inconsistent == 0
        assert agreement.judge_runs(graph, tmp_path / graph, Judge("http://127.0.0.1:9/v1", "j"), samples=3) == (
            judging,
            each,
        ), "what was judged is not judged again"
        assert (each.tasks, each.pairs) == (6, 18), graph
        assert each.same + each.other > 0, graph
        if graph != "map_reduce":  # there the judge reads the reducer only, and partial credit ties
            assert (each.other, each.same)[sign > 0] == each.same + each.other
            assert each.without == 0
            assert each.tau_b == pytest.approx(sign)
    table = agreements_to_table({("j", graph): result for graph, result in found.items()})
    assert table.count("\n") == 4


@pytest.mark.slow
def test_the_command_starts_its_own_server_and_prints_the_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Servers are stand-in processes for vLLM's, and what they say is no verdict. A second judge needs no new run."""
    model = save_chat_model(tmp_path / "model")
    study_server.install(tmp_path / "packages")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'packages'}:{ROOT}:{ROOT / 'tests'}")
    monkeypatch.setattr(games, "small_model", lambda: model)
    monkeypatch.setattr(games, "CONFIGS", {"math_duo": games.CONFIGS["math_duo"]})
    command = ["agreement", str(tmp_path / "out"), "--tasks", "2", "--samples", "3"]
    monkeypatch.setattr("sys.argv", command)
    agreement.main()
    assert "| smollm2-135m | `math_duo` | 2 | 6 | " in capsys.readouterr().out
    monkeypatch.setattr(games, "collect_side", None)  # it would fail
    monkeypatch.setattr("sys.argv", [*command, "--judge", str(model)])
    agreement.main()
    assert "| trained-judge | `math_duo` | 2 | 6 | " in capsys.readouterr().out
