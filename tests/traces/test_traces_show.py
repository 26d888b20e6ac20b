"""Owns: `traces show` draws what an episode holds, truly, and nothing that its text could do to a terminal.

Drawings, matrices and advantages of small episodes are worked out by hand; a run of a real agent shows its tools.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from support.duo_rig import COMMON, TASKS, Rig
from support.edge_rig import calls_tool, says
from support.sample_spans import SampleTrace, chain
from support.traces_rig import store_of, terminal, traces, written

from marft_bridge.recording.recorder import Recorder
from marft_bridge.recording.wrap import wrap
from marft_bridge.rollouts.episode_plan import plan_episodes
from marft_bridge.traces.advantages import trajectory_to_advantages
from marft_bridge.traces.drawing import messages_to_texts
from marft_bridge.traces.show import show
from trace_store.assemble import spans_to_trajectory
from trace_store.journal import Journal
from trace_store.records import OF_LIMIT, Reward, SpanRow, Trajectory
from trace_store.store import TraceStore

STYLE = re.compile(r"\x1b\[[0-9;]*m")  # what rich writes for bold and dim
HOSTILE = "\x1b[31mred\x1b]0;owned\x07 [bold]x[/bold] \r\u202egnp.exe\u2066 \x9b2J\x7f"
VISIBLE = r"\x1b[31mred\x1b]0;owned\x07 [bold]x[/bold] \r\u202egnp.exe\u2066 \x9b2J\x7f"


def three_calls(trace: str = "f" * 32) -> tuple[list[SpanRow], list[Reward]]:
    """a and c beside each other, then b: triggered by a, and perhaps reading what c wrote. c has no log-probs."""
    t = SampleTrace(trace)
    t.call("x", t.node("a:1", 10, 20, step=1), 11, 19, OUTPUT_MESSAGES='[{"content":"one\\ntwo"}]')
    t.call("z", t.node("c:1", 10, 25, step=1), 11, 24, LOGPROBS=None)
    t.call("y", t.node("b:1", 30, 40, step=2, after=("a:1",)), 31, 39, READS_FROM=[], MAY_READ_FROM=["c:1"])
    rewards = [
        Reward(trace, "reward", 0.5, "judge", 1),
        Reward(trace, "style", 0.25, "judge", 1, "step", "x"),
        Reward(trace, "style", 0.75, "judge", 1, "agent", None, "b"),
    ]
    return t.spans(), rewards


@pytest.fixture
def path(tmp_path: Path) -> Path:
    spans, rewards = three_calls()
    return store_of(tmp_path / "s.duckdb", *spans, *rewards)


def test_an_episode_is_drawn_by_superstep_node_and_call(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = traces(capsys, "show", "ffff", "--no-text", "--store", path)
    assert code == 0
    assert (
        out
        == f"""\
episode {"f" * 32}  terminated
task task sample 0  run run  train  3 actions  0.00 s  2023-11-14 22:13 UTC
├── step 1
│   ├── a
│   │   └── #0  unknown model  3+2 tokens  finish stop  0.00 s  trainable
│   │       depends on no other action
│   │       step style 0.25  from judge
│   └── c
│       └── #1  unknown model  3+2 tokens  finish stop  0.00 s  not trainable: no log-probs from the engine
│           depends on no other action
├── step 2
│   └── b
│       └── #2  unknown model  3+2 tokens  finish stop  0.00 s  trainable
│           after #0 a (trigger), #1 c (data?)
├── rewards
│   ├── team reward 0.5  from judge
│   └── agent b style 0.75  from judge
└── advantages without a critic
    ├── reward: GAE along D, V = 0, gamma 1, lambda 0.95: #0 +0.475  #2 +0.5
    ├── reward: GRPO: none, the only sample of its task in this run
    └── reward: RLOO: none, the only sample of its task in this run
"""
    )


def test_the_matrix_marks_kinds_and_bounds(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = traces(capsys, "show", "ffff", "--matrix", "--store", path)
    assert out.splitlines()[:4] == ["#\tnode\t0\t1\t2", "0\ta\t.\t.\t.", "1\tc\t.\t.\t.", "2\tb\tt\td?\t."]


def test_texts_are_shown_unless_told_not_to_and_cut_unless_all_of_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    t = SampleTrace("e" * 32)
    question = json.dumps([{"role": "user", "content": "q" * 399 + "\nrest of it"}])
    t.call("x", t.node("a:1", 10, 20, step=1), 11, 19, INPUT_MESSAGES=question, OUTPUT_MESSAGES='[{"content":"so"}]')
    path = store_of(tmp_path / "s.duckdb", *t.spans())
    _, out, _ = traces(capsys, "show", "e", "--no-text", "--store", path)
    assert "qqq" not in out
    _, out, _ = traces(capsys, "show", "e", "--store", path)
    lines = [line.strip(" │├─└") for line in out.splitlines()]
    at = lines.index("> user: " + "q" * 399)
    assert lines[at + 1 : at + 3] == ["… (410 characters)", "< answer: so"]
    _, out, _ = traces(capsys, "show", "e", "--full", "--store", path)
    lines = [line.strip(" │├─└") for line in out.splitlines()]
    assert lines[lines.index("> user: " + "q" * 399) + 1] == "rest of it"


def test_json_holds_the_trajectory_the_spans_and_the_advantages(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spans, rewards = three_calls()
    trajectory = spans_to_trajectory(spans)
    found = json.loads(traces(capsys, "show", "f" * 32, "--json", "--store", path)[1])
    assert [action["action_id"] for action in found["actions"]] == [action.action_id for action in trajectory.actions]
    assert found["actions"][0]["logprobs"] == [-0.1, -1 / 3]
    assert found["episode"]["round"] is None
    assert {(edge["src"], edge["dst"], edge["kind"], edge["exact"]) for edge in found["edges"]} == {
        ("x", "y", "trigger", True),
        ("z", "y", "data", False),
    }
    assert len(found["rewards"]) == len(rewards)
    assert {span["span_id"] for span in found["spans"]} == {span.span_id for span in spans}
    assert found["advantages"][0]["values"] == {"x": 0.475, "y": 0.5}
    assert found["advantages"][1]["values"] is None


def test_a_real_agent_is_drawn_with_its_tools(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from langchain.agents import create_agent
    from langchain_core.messages import HumanMessage

    def add(x: int) -> str:
        """Adds one."""
        return str(x + 1)

    path = tmp_path / "store.duckdb"
    journal = Journal(path.with_name("store.duckdb.journal"))
    agent = wrap(create_agent(says(calls_tool("add", x=41), "done"), [add]), Recorder(journal))
    agent.invoke({"messages": [HumanMessage("what is next?")]})
    journal.close()
    with TraceStore.open(path) as store:
        store.take_in()
        (episode,) = store.episodes()
    code, out, _ = traces(capsys, "show", episode.episode_id[:10], "--text", "--store", path)
    assert code == 0
    lines = [line.strip(" │├─└") for line in out.splitlines()]
    for before, after in (("step 1", "model"), ("step 2", "tools"), ("step 3", "model")):
        assert lines[lines.index(before) + 1] == after
    (tool,) = [i for i, line in enumerate(lines) if line.startswith("tool add  ")]
    assert lines[tool + 1].startswith("arguments: ")
    assert "41" in lines[tool + 1]
    assert "42" in lines[tool + 2]
    (after,) = [line for line in lines if line.startswith("after #0 model (")]
    assert sorted(after.removesuffix(")").split("(")[1].split()) == ["data", "tool", "trigger"]
    assert "< answer: done" in lines


def test_text_cannot_steer_a_terminal_wherever_it_stands(tmp_path: Path) -> None:
    t = SampleTrace("d" * 32)
    node = t.node(f"{HOSTILE}:1", 10, 20, step=1)
    t.call(
        "x",
        node,
        11,
        19,
        NODE=f"{HOSTILE}",
        INPUT_MESSAGES=json.dumps([{"role": HOSTILE, "content": HOSTILE}]),
        OUTPUT_MESSAGES=json.dumps([{"content": HOSTILE}]),
        RESPONSE_MODEL=HOSTILE,
        FINISH_REASONS=[HOSTILE],
        UNTRAINABLE=HOSTILE,
    )
    t.call("y", node, 12, 13, ok=False)
    spans = t.spans(TASK_ID=HOSTILE, RUN_ID=HOSTILE, OUTCOME="failed", OUTCOME_REASON=HOSTILE, ADAPTERS=None)
    path = store_of(tmp_path / "s.duckdb", *spans, Reward(t.trace_id, HOSTILE, 1.0, HOSTILE, 1))
    for width in (200, 40):
        console = terminal(width=width)
        show(path, "d", console, matrix=False, as_json=False, text_limit=None, gamma=1.0, lam=1.0)
        show(path, "d", console, matrix=True, as_json=False, text_limit=0, gamma=1.0, lam=1.0)
        show(path, "d", console, matrix=False, as_json=True, text_limit=0, gamma=1.0, lam=1.0)
        shown = STYLE.sub("", written(console))
        assert all(letter.isprintable() or letter == "\n" for letter in shown)
    assert shown.count("[bold]x[/bold]") > 2
    console = terminal(width=2000)
    show(path, "d", console, matrix=False, as_json=False, text_limit=None, gamma=1.0, lam=1.0)
    assert STYLE.sub("", written(console)).count(VISIBLE) >= 10


# -- which episode ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prefix", "message"),
    [
        ("a", f"several episodes begin with 'a': {'a' * 31}1, {'a' * 31}2; give more digits"),
        ("b", "no episode begins with 'b'; `traces list` names them"),
        ("c", f"trace {'c' * 32} is no episode: its spans have not all arrived"),
        ("d", f"trace {'d' * 32} is no episode: outcome 'great' is not one of terminated, truncated, failed"),
        ("%", "no episode begins with '%'; `traces list` names them"),
        ("\x1b[2J", "no episode begins with '\\x1b[2J'; `traces list` names them"),
    ],
)
def test_digits_that_name_no_episode_or_several_are_refused(
    tmp_path: Path, prefix: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = store_of(
        tmp_path / "s.duckdb",
        *chain("a" * 31 + "1").spans(),
        *chain("a" * 31 + "2").spans(),
        *chain("c" * 32).spans()[:-1],
        *chain("d" * 32).spans(OUTCOME="great"),
    )
    code, out, err = traces(capsys, "show", prefix, "--store", path)
    assert (code, out, err) == (2, "", f"marft-bridge: traces show: {message}\n")
    assert traces(capsys, "show", "a" * 31 + "1", "--store", path)[0] == 0


# -- advantages -------------------------------------------------------------------------------------------------------


def found_by_label(trajectory: Trajectory, *others: float, gamma: float = 1.0, lam: float = 1.0) -> dict[str, object]:
    own = trajectory.team_reward("reward")
    samples = [(trajectory.episode.episode_id, own), *((f"other{n}", value) for n, value in enumerate(others))]
    group = {"reward": [(key, value) for key, value in samples if value is not None]}
    estimates = trajectory_to_advantages(trajectory, group, gamma, lam)
    return {e.label.split(" ")[0]: e.values if e.values is not None else e.why_not for e in estimates}


def rewarded(value: float, **root: object) -> Trajectory:
    t = chain("a")
    trajectory = spans_to_trajectory(t.spans(**root))
    return replace(trajectory, rewards=(Reward(t.trace_id, "reward", value, "j", 1),))


def test_advantages_are_those_of_the_formulas() -> None:
    # x -> y, R = 2, gamma 0.5, lambda 0.8: A_y = 2, A_x = 0.5 * 0.8 * 2.
    # Rewards 2, 0, 1: mean 1, sample deviation 1; the others' mean 0.5.
    found = found_by_label(rewarded(2.0), 0.0, 1.0, gamma=0.5, lam=0.8)
    assert found["GAE"] == pytest.approx({"x": 0.8, "y": 2.0})
    assert found["GRPO"] == pytest.approx({"x": 1.0, "y": 1.0}, rel=1e-5)
    assert found["RLOO"] == pytest.approx({"x": 1.5, "y": 1.5})


def test_an_advantage_that_is_not_known_says_why() -> None:
    cut = found_by_label(rewarded(2.0, OUTCOME="truncated", OUTCOME_REASON="time"), 1.0)
    assert cut["GAE"] == "the run was cut short: what would have followed is the critic's to say"
    assert cut["RLOO"] == {"x": 1.0, "y": 1.0}
    paid = rewarded(2.0, OUTCOME="truncated", OUTCOME_REASON="longer than 9 s")
    paid = replace(paid, rewards=(replace(paid.rewards[0], source=OF_LIMIT),))
    assert found_by_label(paid, 1.0)["GAE"] == {"x": 2.0, "y": 2.0}  # nothing follows
    failed = found_by_label(rewarded(2.0, OUTCOME="failed", OUTCOME_REASON="boom"), 1.0)
    assert set(failed.values()) == {"the run failed, so it is not trained on"}
    assert set(found_by_label(rewarded(float("nan")), 1.0).values()) == {"the reward is nan"}
    t = SampleTrace()
    t.call("x", t.node("a:1", 10, 20), 11, 19, LOGPROBS=None)
    bare = spans_to_trajectory(t.spans())
    assert trajectory_to_advantages(bare, {}, 1.0, 1.0) == []  # no reward, nothing to share
    none = Trajectory(bare.episode, bare.actions, (), (Reward(t.trace_id, "reward", 1.0, "j", 1),))
    assert set(found_by_label(none, 0.0).values()) == {"no action of it is trainable"}


def test_the_group_is_the_samples_of_the_task_in_the_same_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rig = Rig(tmp_path, lambda node, prompt, random: random.choice(["1", "2", "3"]))
    rig.run(plan_episodes(TASKS[:2], 8, 4, seed=3, **COMMON))
    rig.run(plan_episodes(TASKS[:1], 2, 2, seed=4, **{**COMMON, "run_id": "other"}))
    with rig.store() as store:
        rewards = store.sql(
            "SELECT episode_id, value FROM episodes JOIN episode_reward USING (episode_id)"
            " WHERE run_id = 'run' AND task_id = 't0' AND name = 'correct' ORDER BY ALL"
        )
    assert len(rewards) == 4
    assert len({value for _, value in rewards}) > 1
    episode, value = next(row for row in rewards if row[1] != rewards[0][1])  # not the first of the group
    expected = value - (sum(each for _, each in rewards) - value) / 3
    found = json.loads(traces(capsys, "show", episode, "--json", "--store", rig.path)[1])["advantages"]
    (rloo,) = [e for e in found if e["reward"] == "correct" and e["label"] == "RLOO over 4 samples of the task"]
    assert list(rloo["values"].values()) == pytest.approx([expected, expected])


def test_messages_of_every_recorded_shape_are_read() -> None:
    shapes = [
        {"type": "human", "data": {"content": "hello"}},
        {"role": "user", "parts": [{"type": "text", "content": "hi"}, {"type": "image", "uri": "u"}]},
        {"role": "assistant", "content": "", "tool_calls": [{"name": "add"}]},
        "bare",
    ]
    found = list(messages_to_texts(json.dumps(shapes)))
    assert [role for role, _ in found] == ["human", "user", "assistant", "unknown"]
    assert [text for _, text in found[::3]] == ["hello", "bare"]
    assert found[1][1].startswith("hi\n{")
    assert json.loads(found[2][1]) == [{"name": "add"}]
    assert list(messages_to_texts("not JSON")) == [("unknown", "not JSON")]
    assert list(messages_to_texts(None)) == []


@pytest.mark.parametrize(
    ("flags", "why"), [(["--json", "--text"], "--json prints all"), (["--matrix", "--full"], "no room")]
)
def test_flags_that_contradict_each_other_are_refused(
    path: Path, flags: list[str], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = traces(capsys, "show", "ffff", *flags, "--store", path)
    assert code == 2
    assert why in err
