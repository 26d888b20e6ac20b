"""Owns: the doctor finds each way in which a store can be wrong, as exactly that, and nothing in a sound one.

A real store of recorded runs is broken by one statement in plain DuckDB; what the doctor must say is written by hand.
"""

# ruff: noqa: S608 - statements are put together from constants and from ids that the store made
from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.duo_rig import COMMON, TASKS, Rig
from support.sample_spans import SampleTrace, chain
from support.traces_rig import damage, sound_store, store_of, traces

from marft_bridge.rollouts.episode_plan import plan_episodes
from trace_store import assemble, checkup
from trace_store import conventions as c
from trace_store.assemble import spans_to_trajectory
from trace_store.doctor import Fault, conversation_to_faults
from trace_store.journal import Journal
from trace_store.records import Edge, Reward
from trace_store.store import TraceStore

FIRST = "(SELECT episode_id FROM episodes ORDER BY task_id LIMIT 1)"
OF_ACTOR = f"episode_id = {FIRST} AND node = 'actor'"
OF_REASONER = f"episode_id = {FIRST} AND node = 'reasoner'"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return sound_store(tmp_path)


def faults(path: Path) -> list[Fault]:
    with TraceStore.open(path, read_only=True) as store:
        return list(checkup.store_to_faults(store))


def first_episode(path: Path) -> tuple[str, str, str]:
    """The episode that the statements break, its reasoner's action and its actor's."""
    with TraceStore.open(path, read_only=True) as store:
        ((episode, reasoner, actor),) = store.sql(
            "SELECT episode_id, max(action_id) FILTER (node = 'reasoner'), max(action_id) FILTER (node = 'actor')"
            f" FROM actions WHERE episode_id = {FIRST} GROUP BY ALL"
        )
    return episode, reasoner, actor


def test_a_store_of_recorded_runs_is_sound(path: Path) -> None:
    assert faults(path) == []


@pytest.mark.parametrize(
    ("law", "statement", "message"),
    [
        ("agent", f"UPDATE actions SET node = '' WHERE {OF_REASONER}", "action R: is trainable, yet has no agent"),
        (
            "agent",
            f"UPDATE actions SET untrainable_reason = 'tired' WHERE {OF_REASONER}",
            "action R: is trainable, yet says why not: tired",
        ),
        (
            "agent",
            f"UPDATE actions SET trainable = false WHERE {OF_REASONER}",
            "action R: is not trainable, yet does not say why",
        ),
        (
            "order",
            f'UPDATE actions SET "index" = 2 WHERE {OF_ACTOR}',
            "the actions are not numbered from 0 without a gap: 0, 2",
        ),
        (
            "edges",
            f"UPDATE edges SET dst = 'gone' WHERE episode_id = {FIRST} AND kind = 'data'",
            "data edge R -> gone: gone is no action of this episode",
        ),
        (
            "edges",
            f"UPDATE edges SET kind = 'guess' WHERE episode_id = {FIRST} AND kind = 'data'",
            "guess edge R -> A: no such kind",
        ),
        (
            "tokens",
            f"UPDATE actions SET logprobs = logprobs[2:] WHERE {OF_ACTOR}",
            "action A: has 2 sampled ids and 1 log-probs",
        ),
        (
            "tokens",
            f"UPDATE actions SET logprobs = ['nan'::DOUBLE, -1.0] WHERE {OF_ACTOR}",
            "action A: has the log-prob nan, which is no finite logarithm of a probability",
        ),
        (
            "tokens",
            f"UPDATE actions SET logprobs = ['-inf'::DOUBLE, -1.0] WHERE {OF_ACTOR}",
            "action A: has the log-prob -inf, which is no finite logarithm of a probability",
        ),
        (
            "tokens",
            f"UPDATE actions SET logprobs = [-1.0, 0.5] WHERE {OF_ACTOR}",
            "action A: has the log-prob 0.5, which is no finite logarithm of a probability",
        ),
        (
            "tokens",
            f"UPDATE actions SET prompt_ids = NULL WHERE {OF_ACTOR}",
            "action A: is trainable, yet lacks prompt ids, sampled ids or log-probs",
        ),
        (
            "tokens",
            f"UPDATE actions SET logprobs = [NULL, -1.0] WHERE {OF_ACTOR}",
            "action A: has a NULL among its ids or log-probs",
        ),
        (
            "rows",
            f"UPDATE spans SET attributes = '[]' WHERE trace_id = {FIRST} AND name = 'invoke_agent actor'",
            "1 spans have attributes that are no JSON object",
        ),
        (
            "rows",
            f"UPDATE episodes SET adapters = '[3]' WHERE episode_id = {FIRST}",
            "its adapters, task or tags are no JSON object",
        ),
        ("tokens", f"UPDATE actions SET sampled_ids = [5, -1] WHERE {OF_ACTOR}", "action A: has the token id -1"),
        (
            "outcome",
            f"UPDATE episodes SET outcome = 'truncated' WHERE episode_id = {FIRST}",
            "truncated without a reason",
        ),
        ("outcome", f"UPDATE episodes SET outcome = 'failed' WHERE episode_id = {FIRST}", "failed without a reason"),
        ("outcome", f"UPDATE episodes SET outcome = 'done' WHERE episode_id = {FIRST}", "'done' is no outcome"),
        (
            "outcome",
            f"UPDATE episodes SET reason = 'time limit' WHERE episode_id = {FIRST}",
            "terminated, yet it says why it was cut short: time limit",
        ),
        (
            "adapters",
            f"UPDATE actions SET adapter_version = 2 WHERE {OF_ACTOR}",
            "action A: ran adapter 'actor@3', yet its version is 2",
        ),
        (
            "adapters",
            f"""UPDATE episodes SET adapters = '{{"actor": 4}}' WHERE episode_id = {FIRST}""",
            "action A: ran version 3 of actor, the episode says 4",
        ),
        (
            "rewards",
            f"UPDATE rewards SET value = 'inf' WHERE episode_id = {FIRST} AND name = 'correct'",
            "reward 'correct' is inf",
        ),
        (
            "rewards",
            f"UPDATE rewards SET scope = 'step' WHERE episode_id = {FIRST} AND name = 'correct'",
            "reward 'correct' is for the action None, which is not in this episode",
        ),
        (
            "rewards",
            f"UPDATE rewards SET scope = 'agent', node = 'critic' WHERE episode_id = {FIRST} AND name = 'correct'",
            "reward 'correct' is for the agent 'critic', which did not act in this episode",
        ),
        (
            "rewards",
            f"UPDATE rewards SET node = 'actor' WHERE episode_id = {FIRST} AND name = 'correct'",
            "reward 'correct' is the team's, yet names an action or an agent",
        ),
        (
            "rewards",
            "INSERT INTO rewards SELECT episode_id, 'reward', 0.25, 'judge', 1, 'agent', NULL, node FROM actions"
            f" WHERE episode_id = {FIRST}",
            "reward 'reward': those of each agent sum to 0.5, the team's is 1",
        ),
        (
            "rewards",
            "INSERT INTO rewards SELECT episode_id, 'reward', 0.75, 'judge', 1, 'step', action_id, NULL FROM actions"
            f" WHERE episode_id = {FIRST}",
            "reward 'reward': those of each step sum to 1.5, the team's is 1",
        ),
        (
            "rows",
            f"INSERT INTO rewards SELECT * FROM rewards WHERE episode_id = {FIRST} AND name = 'correct'",
            "reward correct is stored 2 times",
        ),
        (
            "rows",
            f"INSERT INTO actions SELECT * FROM actions WHERE {OF_ACTOR}",
            "action A is stored 2 times",
        ),
        (
            "rows",
            f"INSERT INTO edges SELECT * FROM edges WHERE episode_id = {FIRST} AND kind = 'data'",
            "edge data R -> A is stored 2 times",
        ),
        (
            "rows",
            f"UPDATE actions SET episode_started_ns = 1 WHERE {OF_ACTOR}",
            "1 actions have another start of the episode than the episode, so that reading misses them",
        ),
        (
            "rows",
            f"UPDATE edges SET episode_started_ns = 1 WHERE episode_id = {FIRST}",
            "2 edges have another start of the episode than the episode, so that reading misses them",
        ),
        (
            "rows",
            f"INSERT INTO refusals VALUES ({FIRST}, 'no root', 1)",
            "it is an episode and a refused trace: no root",
        ),
        (
            "spans",
            f"DELETE FROM spans WHERE trace_id = {FIRST} AND name = 'invoke_agent reasoner'",
            "4 spans are stored, the episode says 5",
        ),
        (
            "assembly",
            f"DELETE FROM edges WHERE episode_id = {FIRST} AND kind = 'data'",
            "differs from what its spans give: data edge R -> A is not stored",
        ),
        (
            "assembly",
            f"UPDATE edges SET exact = false WHERE episode_id = {FIRST} AND kind = 'data'",
            "differs from what its spans give: data edge R -> A (a bound) should not be stored; data edge R -> A is not"
            " stored",
        ),
        (
            "assembly",
            f"UPDATE actions SET finish_reason = 'length', temperature = 0.0 WHERE {OF_ACTOR}",
            "differs from what its spans give: action A: temperature; action A: finish_reason",
        ),
        (
            "assembly",
            f"UPDATE episodes SET seed = NULL WHERE episode_id = {FIRST}",
            "differs from what its spans give: episode: seed",
        ),
        (
            "assembly",
            f"UPDATE spans SET parent_span_id = 'gone' WHERE trace_id = {FIRST} AND name = 'invoke_agent actor'",
            "its spans make no episode: the parent gone of span S is not in the trace",
        ),
    ],
)
def test_a_broken_law_is_found_as_exactly_that(path: Path, law: str, statement: str, message: str) -> None:
    episode, reasoner, actor = first_episode(path)
    damage(path, statement)
    all_faults = faults(path)
    assert len(all_faults) == 1, all_faults
    fault = all_faults[0]
    assert (fault.law, fault.level, fault.episode_id) == (law, "error", episode)
    with TraceStore.open(path, read_only=True) as store:
        ((span,),) = store.sql(
            "SELECT span_id FROM spans WHERE trace_id = ? AND name = 'invoke_agent actor'", (episode,)
        )
    assert fault.message.replace(reasoner, "R").replace(actor, "A").replace(span, "S") == message


def test_rewards_that_cancel_in_infinity_are_faults_and_no_crash(path: Path) -> None:
    episode, _, _ = first_episode(path)
    damage(
        path,
        "INSERT INTO rewards"
        " SELECT episode_id, 'reward', CASE WHEN node = 'actor' THEN '-inf' ELSE 'inf' END::DOUBLE,"
        f" 'judge', 1, 'agent', NULL, node FROM actions WHERE episode_id = '{episode}'",
    )
    assert sorted(fault.message for fault in faults(path)) == ["reward 'reward' is -inf", "reward 'reward' is inf"]


def test_another_dependency_function_is_a_warning_where_an_older_rule_derived_it(tmp_path: Path) -> None:
    old = [replace(span, convention="genai-1.44/marft-1") for span in chain("d").spans(ADAPTERS=None, SPLIT="live")]
    path = store_of(tmp_path / "s.duckdb", *old)
    assert faults(path) == []
    damage(path, "DELETE FROM edges")
    (fault,) = faults(path)
    assert (fault.law, fault.level) == ("assembly", "warning")
    assert fault.message == (
        "D was derived by an older rule and differs from what its spans give: trigger edge x -> y is not stored"
    )
    damage(path, "UPDATE actions SET seed = 3")  # no rule for D explains that
    assert [fault.level for fault in faults(path)] == ["error"]


def test_a_dependency_that_goes_back_is_found_with_the_cycle_that_it_closes(path: Path) -> None:
    _, reasoner, actor = first_episode(path)
    damage(
        path,
        f"UPDATE edges SET src = '{actor}', dst = '{reasoner}' WHERE episode_id = {FIRST} AND kind = 'data'",
    )
    messages = [(fault.law, fault.message) for fault in faults(path)]
    assert messages == [
        ("edges", f"data edge {actor} -> {reasoner} does not point forward in the order of the actions"),
        ("edges", f"the dependencies of action {min(actor, reasoner)} form a cycle"),
    ]


def test_rows_without_their_episode_are_found_in_every_table(path: Path) -> None:
    episode, *_ = first_episode(path)
    damage(path, f"DELETE FROM episodes WHERE episode_id = '{episode}'")
    assert [(fault.law, fault.message) for fault in faults(path) if fault.episode_id == episode] == [
        ("rows", "2 actions of an episode that is not stored"),
        ("rows", "2 edges of an episode that is not stored"),
        ("spans", "all its spans are there, but it was not assembled"),
    ]
    damage(path, f"DELETE FROM spans WHERE trace_id = '{episode}'")
    (late,) = [fault for fault in faults(path) if "rewards" in fault.message]
    assert (late.level, late.episode_id) == ("warning", episode)
    assert late.message == "2 rewards of a trace that is not stored"


def test_a_refused_trace_that_makes_an_episode_is_found(path: Path) -> None:
    episode, *_ = first_episode(path)
    damage(
        path,
        *(f"DELETE FROM {table} WHERE episode_id = '{episode}'" for table in ("actions", "edges", "episodes")),
        f"INSERT INTO refusals VALUES ('{episode}', 'it looked wrong', 1)",
    )
    assert faults(path) == [Fault("spans", "it was refused, but its spans make an episode", episode)]


def test_a_trace_that_waits_or_was_refused_with_reason_is_no_fault(path: Path) -> None:
    waiting, refused = chain("d").spans()[:-1], chain("e").spans(OUTCOME="great")
    store_of(path, *waiting, *refused)
    with TraceStore.open(path, read_only=True) as store:
        counts = store.counts()
    assert (counts["waiting"], counts["refusals"]) == (1, 1)
    assert faults(path) == []


def test_a_trace_that_breaks_the_assembly_itself_is_told_and_stops_no_check(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = assemble.executions_to_edges
    unknown = ("e" * 32, first_episode(path)[0])

    def derive(episode_id: str, *rest: Any) -> list[Edge]:
        if episode_id in unknown:
            raise KeyError(episode_id)
        return whole(episode_id, *rest)

    monkeypatch.setattr(assemble, "executions_to_edges", derive)
    store_of(path, *chain("e" * 32).spans())
    with TraceStore.open(path, read_only=True) as store:
        ((reason,),) = store.sql("SELECT reason FROM refusals")
    assert reason == f"cannot be assembled: KeyError: '{unknown[0]}'"
    (fault,) = faults(path)
    assert fault == Fault(
        "assembly", f"its spans make no episode: cannot be assembled: KeyError: '{unknown[1]}'", unknown[1]
    )
    damage(path, "DELETE FROM refusals")
    assert reason in traces(capsys, "list", "--waiting", "--store", path)[1]


def test_adapters_that_acted_or_were_built_on_are_in_the_store(path: Path) -> None:
    damage(path, "DELETE FROM adapters WHERE version = 3")
    assert faults(path) == [Fault("adapters", "3 actions ran adapter actor@3, which is not in `adapters`")]
    damage(path, "INSERT INTO adapter_episodes VALUES ('actor', 4, 'e1'), ('actor', 4, 'e2'), ('actor', 2, 'e3')")
    message = "2 episodes are said to have trained adapter actor@4, which is not in `adapters`"
    assert faults(path)[1:] == [Fault("adapters", message)]
    damage(path, "DELETE FROM adapters WHERE version = 1")
    assert faults(path)[2] == Fault(
        "adapters", "adapter actor@2 was trained from version 1, which is not in `adapters`"
    )


def test_the_run_of_an_episode_is_known_unless_nobody_asked_for_it(path: Path) -> None:
    damage(path, "DELETE FROM runs")
    expected = Fault("rows", "3 episodes of the run run, which is not in `runs`", None, "warning")
    assert faults(path) == [expected]
    store_of(path, *chain("d").spans(SPLIT="live"))
    assert faults(path) == [expected]


# -- conversations ----------------------------------------------------------------------------------------------------


def conversation(second_prompt: list[int], **changed: object) -> list[Fault]:
    """Two calls of one agent, the second of which has the first one's answer among its messages."""
    t = SampleTrace()
    t.call("x", t.node("a:1", 10, 20, step=1), 11, 19, PROMPT_IDS=[1, 2, 3], SAMPLED_IDS=[4, 5])
    changes = {"PROMPT_IDS": second_prompt, "SAW_ANSWERS": ["x"], **changed}
    t.call("y", t.node("a:2", 30, 40, step=2, after=("a:1",)), 31, 39, **changes)
    spans = t.spans(ADAPTERS=None)
    trajectory = spans_to_trajectory(spans)
    return list(conversation_to_faults(trajectory, checkup.spans_to_saw_answers(spans)))


def test_a_continued_conversation_begins_with_the_tokens_that_the_model_saw_and_sampled() -> None:
    assert conversation([1, 2, 3, 4, 5, 6, 7]) == []
    assert conversation([9, 9], SAW_ANSWERS=None) == []  # another conversation
    (in_answer,) = conversation([1, 2, 3, 4, 6, 7])
    assert in_answer.level == "warning"
    assert in_answer.message == "action y continues x, but their token ids part at 4 of 5, in its answer"
    (in_prompt,) = conversation([1, 7, 3, 4, 5])
    assert in_prompt.message == "action y continues x, but their token ids part at 1 of 5, in its prompt"
    (short,) = conversation([1, 2, 3, 4])
    assert short.message == "action y continues x, but their token ids part at 4 of 5, in its answer"


def test_another_agents_answer_in_a_prompt_continues_no_conversation() -> None:
    t = SampleTrace()
    t.call("x", t.node("a:1", 10, 20, step=1), 11, 19)
    t.call("y", t.node("b:1", 30, 40, step=2, after=("a:1",)), 31, 39, PROMPT_IDS=[9, 9], SAW_ANSWERS=["x"])
    spans = t.spans(ADAPTERS=None)
    assert list(conversation_to_faults(spans_to_trajectory(spans), checkup.spans_to_saw_answers(spans))) == []


def test_text_that_was_tokenised_again_is_a_warning_and_no_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    t = SampleTrace()
    t.call("x", t.node("a:1", 10, 20, step=1), 11, 19)
    t.call("y", t.node("a:2", 30, 40, step=2, after=("a:1",)), 31, 39, SAW_ANSWERS=["x"])
    path = store_of(tmp_path / "s.duckdb", *t.spans(ADAPTERS=None, SPLIT="live"))
    code, out, _ = traces(capsys, "doctor", "--store", path)
    assert code == 0
    assert out.splitlines()[0].startswith("warning  conversation  episode 0")
    assert out.splitlines()[-1] == "1 episodes checked: 0 errors, 1 warnings"


# -- the file and the journal -----------------------------------------------------------------------------------------


def test_what_the_store_has_not_taken_in_is_told(path: Path) -> None:
    with TraceStore.open(path, read_only=True) as store:
        folder = store.journal_folder
    segments = set(folder.glob("*.segment"))
    journal = Journal(folder)
    journal.append(Reward(first_episode(path)[0], "late", 1.0, "judge", 7))
    journal.sync()
    (segment,) = set(folder.glob("*.segment")) - segments
    message = f"1 records of {segment.name} are not taken in yet; the next command that writes does so"
    assert faults(path) == [Fault("journal", message, None, "warning")]
    journal.close()
    with segment.open("ab") as file:
        file.write(b"deadbeef {\n")
    assert [fault.message for fault in faults(path)] == [
        message,
        f"{segment.name} has 1 damaged lines: a crash, or a line that is being written",
    ]
    with TraceStore.open(path) as store:
        assert store.take_in().torn == 1
    assert faults(path) == [
        Fault("journal", f"1 damaged lines of {segment.name} were dropped when it was taken in", None, "warning")
    ]


def test_files_that_others_may_read_are_found(path: Path) -> None:
    path.chmod(0o640)
    folder = path.with_name(path.name + ".journal")
    folder.mkdir(0o755)
    assert faults(path) == [
        Fault("files", f"{path} is open to others (0640); chmod 600 it"),
        Fault("files", f"{folder} is open to others (0755); chmod 700 it"),
    ]


def test_tables_and_views_that_are_not_as_declared_are_found(path: Path) -> None:
    damage(path, "DROP VIEW episode_summary")
    assert faults(path) == [Fault("schema", "there is no view episode_summary")]
    damage(path, "ALTER TABLE runs ADD COLUMN mood VARCHAR", "DROP TABLE refusals CASCADE")
    assert faults(path) == [  # and nothing else can be asked
        Fault("schema", "table runs has other columns than it should: mood"),
        Fault("schema", "there is no table refusals"),
    ]


# -- the command ------------------------------------------------------------------------------------------------------


def test_the_command_names_each_fault_and_ends_with_1(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert traces(capsys, "doctor", "--store", path)[:2] == (0, "3 episodes checked: 0 errors, 0 warnings\n")
    episode, reasoner, _ = first_episode(path)
    damage(path, f"UPDATE actions SET node = '' WHERE {OF_REASONER}")
    code, out, _ = traces(capsys, "doctor", "--store", path)
    assert code == 1
    assert out.splitlines() == [
        f"error  agent  episode {episode}: action {reasoner}: is trainable, yet has no agent",
        "3 episodes checked: 1 errors, 0 warnings",
    ]
    code, out, _ = traces(capsys, "doctor", "--json", "--store", path)
    assert code == 1
    assert json.loads(out) == {
        "episodes": 3,
        "counts": [{"level": "error", "law": "agent", "number": 1}],
        "faults": [
            {
                "law": "agent",
                "message": f"action {reasoner}: is trainable, yet has no agent",
                "episode_id": episode,
                "level": "error",
            }
        ],
    }


def test_of_many_faults_some_are_printed_and_all_are_counted(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    damage(path, "UPDATE actions SET node = '' WHERE node = 'reasoner'")
    code, out, _ = traces(capsys, "doctor", "--limit", "1", "--store", path)
    assert code == 1
    assert out.splitlines()[1:] == [
        "error  agent: 2 more; --limit 0 lists them",
        "3 episodes checked: 3 errors, 0 warnings",
    ]
    assert len(traces(capsys, "doctor", "--limit", "0", "--store", path)[1].splitlines()) == 4


def test_every_episode_is_checked_whatever_the_size_of_a_page(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    damage(path, "UPDATE episodes SET seed = NULL")
    all_faults = faults(path)
    monkeypatch.setattr(checkup, "_PAGE", 1)
    assert len(all_faults) == 3
    assert faults(path) == all_faults


@pytest.mark.parametrize(("outcome", "delay_s"), [("failed", 0.0), ("truncated", 0.6)])
def test_runs_that_end_early_are_sound(tmp_path: Path, outcome: str, delay_s: float) -> None:
    def fails(node: str, prompt: str, _random: object) -> str:
        raise RuntimeError("no answer")

    rig = Rig(tmp_path, fails, delay_s=delay_s, timeout_s=0.2)
    rig.run(plan_episodes(TASKS[:1], 1, 1, seed=1, **{**COMMON, "split": "live"}))
    with rig.store() as store:
        assert store.sql("SELECT outcome FROM episodes") == [(outcome,)]
    assert faults(rig.path) == []


def test_names_of_the_saw_answers_attribute_come_from_the_spans() -> None:
    span = chain().spans()[1]
    assert checkup.spans_to_saw_answers([span]) == {span.span_id: ()}
    span.attributes[c.SAW_ANSWERS] = ["z"]
    assert checkup.spans_to_saw_answers([span]) == {span.span_id: ("z",)}
