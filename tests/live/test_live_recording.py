"""Owns: what is left of live traffic in the store.

- Every answered call is an action with the engine's ids and log-probs, under the adapter that answered.
- Calls of one graph run are one episode; a run ends by silence; calls that name no run are episodes of their own, and
  so are mirrored ones, which point at what they shadow. No such episode says that it is terminated.
- What a later call of a run may have read is an upper bound; the result of a tool call is an exact edge.
- Texts are redacted as `[record]` says; a person's calls can be erased.
- The doctor finds nothing wrong with any of it; a failure to record is counted and harms no answer.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from support.fake_vllm import id_to_logprob, text_to_ids
from support.live_rig import SAY, TEAMS, LiveRig, episodes, live_rig

from marft_bridge.config.record import RecordOptions
from marft_bridge.live import calls
from marft_bridge.live.calls import LiveRequest
from marft_bridge.live.identity import request_to_identity
from marft_bridge.live.split import BASE, CANDIDATE, MIRRORED
from marft_bridge.live.wire import CHAT
from marft_bridge.recording.span_processor import options_to_processor
from trace_store.checkup import store_to_faults
from trace_store.erasure import subject_to_traces
from trace_store.journal import Journal
from trace_store.records import AdapterRow, Trajectory
from trace_store.store import TraceStore

TRACE = "0af7651916cd43dd8448eb211c80319c"
TRACED = {"traceparent": f"00-{TRACE}-b7ad6b7169203331-01"}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}


def recorded(folder: Path) -> list[Trajectory]:
    """All that is in the store, which is sound."""
    found = episodes(folder / "store.duckdb")
    with TraceStore.open(folder / "store.duckdb", read_only=True) as store:
        assert list(store_to_faults(store)) == []
    return found


def drained(rig: LiveRig) -> None:
    rig.wait_for(lambda told: not any(counts["in_flight"] for counts in told["variants"].values()))


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_is_an_action_with_the_engines_own_tokens(stream: bool, tmp_path: Path) -> None:
    with live_rig(tmp_path, (0, 100)) as rig:
        answer = rig.say(
            user="ada",
            temperature=0.5,
            top_p=0.9,
            max_tokens=40,
            seed=3,
            stop="zz",
            headers={"x-marft-session": "morning"},
            stream=stream,
        )
        assert answer.status_code == 200
        drained(rig)
    (found,) = recorded(tmp_path)
    assert answer.headers["x-marft-episode"] == found.episode.episode_id
    episode, (action,) = found.episode, found.actions
    assert (episode.split, episode.variant, episode.run_id) == ("live", CANDIDATE, "live-test")
    assert episode.adapters == {"planner": 3, "writer": 3}
    assert (episode.outcome, episode.reason) == ("truncated", calls.ONE_CALL_REASON)
    assert episode.tags == {"key": "x-marft-session", "session": "morning"}
    assert episode.subject_id == "ada"
    ids = text_to_ids("planner@3 speaks")
    assert action.trainable
    assert action.prompt_ids == tuple(json.dumps(SAY).encode())
    assert action.sampled_ids == tuple(ids)
    assert action.logprobs == tuple(id_to_logprob(token) for token in ids)
    assert (action.node, action.adapter, action.adapter_version) == ("planner", "planner@3", 3)
    assert (action.model, action.completion, action.finish_reason) == ("planner@3", "planner@3 speaks", "stop")
    assert (action.temperature, action.top_p, action.max_tokens, action.seed) == (0.5, 0.9, 40, 3)
    assert (action.prompt_tokens, action.sampled_tokens) == (len(json.dumps(SAY)), len(ids))


def test_what_a_request_does_not_say_is_absent_but_for_the_engines_temperature(tmp_path: Path) -> None:
    with live_rig(tmp_path) as rig:
        rig.say()
    (action,) = recorded(tmp_path)[0].actions
    assert action.temperature == 1.0
    assert (action.top_p, action.top_k, action.max_tokens, action.seed) == (None, None, None, None)


def test_calls_of_one_run_are_one_episode_in_which_later_ones_may_have_read_earlier_ones(tmp_path: Path) -> None:
    with live_rig(tmp_path, (100, 0)) as rig:
        for node in ("planner", "writer", "planner"):
            assert rig.say(node, headers=TRACED).status_code == 200
        rig.say("writer", headers={"traceparent": TRACED["traceparent"].replace("0af7", "1af7")})
    run, other = recorded(tmp_path)
    first, second, third = run.actions
    assert [action.node for action in run.actions] == ["planner", "writer", "planner"]
    assert all(action.trainable for action in run.actions)
    assert run.episode.tags == {"key": "traceparent", "run": TRACE}
    assert (run.episode.outcome, run.episode.reason) == ("truncated", calls.STOPPED_REASON)
    edges = {(edge.src, edge.dst) for edge in run.edges}
    assert {(first.action_id, second.action_id), (second.action_id, third.action_id)} <= edges
    assert {(edge.kind, edge.exact) for edge in run.edges} == {("data", False)}
    assert len(other.actions) == 1


def test_the_result_of_a_tool_call_is_an_exact_edge(tmp_path: Path) -> None:
    with live_rig(tmp_path, (100, 0)) as rig:
        rig.engine.auto_tools = True
        rig.engine.answer = lambda body: [("add", {"x": 1})] if len(body["messages"]) == 1 else "done"
        first = rig.say(headers=TRACED, tools=[TOOL]).json()["choices"][0]["message"]
        result = {"role": "tool", "tool_call_id": first["tool_calls"][0]["id"], "content": "2"}
        asked = {"model": "planner", "messages": [*SAY, first, result], "tools": [TOOL]}
        assert rig.post(json=asked, headers=TRACED).status_code == 200
    (run,) = recorded(tmp_path)
    assert ("tool", True) in {(edge.kind, edge.exact) for edge in run.edges}
    assert list(run.episode.lineage) == ["tools/planner"]


def test_a_run_ends_when_it_has_been_quiet_and_a_later_call_begins_another(tmp_path: Path) -> None:
    with live_rig(tmp_path, (100, 0), quiet_s=0.2) as rig:
        first = rig.say(headers=TRACED).headers["x-marft-episode"]
        deadline = time.monotonic() + 20
        while (again := rig.say(headers=TRACED).headers["x-marft-episode"]) == first:
            assert time.monotonic() < deadline
            time.sleep(1.0)  # longer than the silence and the look at it
    found = recorded(tmp_path)
    assert {first, again} <= {trajectory.episode.episode_id for trajectory in found}
    assert found[0].episode.reason == "no call for 0.2 s: a proxy does not see a run end"
    # The episode ended with its last call, not when somebody noticed.
    assert found[0].episode.ended_ns == max(action.ended_ns for action in found[0].actions)


def test_a_mirrored_call_is_an_episode_of_its_own_that_points_at_what_it_shadows(tmp_path: Path) -> None:
    with live_rig(tmp_path, (100, 0), mirror=True) as rig:
        rig.say("planner", headers=TRACED, temperature=0.3)
        rig.say("writer", headers=TRACED)
        rig.wait_for(lambda told: told["variants"][MIRRORED]["requests"] == 2)
        drained(rig)
    run, *shadows = sorted(recorded(tmp_path), key=lambda found: found.episode.variant != BASE)
    assert [len(shadow.actions) for shadow in shadows] == [1, 1]
    for action, shadow in zip(run.actions, sorted(shadows, key=lambda s: s.actions[0].node), strict=True):
        (mirrored,) = shadow.actions
        assert shadow.episode.variant == MIRRORED
        assert shadow.episode.parent_episode == run.episode.episode_id
        assert shadow.episode.task_id == run.episode.task_id
        assert shadow.episode.tags["mirrors"] == action.action_id
        assert (mirrored.node, mirrored.adapter) == (action.node, f"{action.node}@3")
        assert (mirrored.prompt_ids, mirrored.temperature) == (action.prompt_ids, action.temperature)
        assert mirrored.completion == f"{action.node}@3 speaks"
        assert shadow.edges == ()


def test_samplers_and_frozen_nodes_are_recorded_and_not_trained_on(tmp_path: Path) -> None:
    with live_rig(tmp_path, (100, 0), frozen=("writer",)) as rig:
        rig.say("planner", presence_penalty=0.5)
        rig.say("writer")
        rig.say("planner", n=2)
    reasons = [found.actions[0].untrainable_reason for found in recorded(tmp_path)]
    assert reasons == [
        "sampled with presence_penalty: its log-probs are not the policy's own",
        "node writer is declared frozen",
        "n=2: one call with several answers",
    ]


@pytest.mark.parametrize(
    "odd",
    [
        {"temperature": "hot", "top_k": 1.5, "max_tokens": True, "seed": "x", "stop": {"a": 1}},
        {"messages": "no list"},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "say"}]}, 7, None]},
        {"tools": {"no": "list"}},
        {"metadata": {"session_id": "\ud800"}, "messages": [{"role": "user", "content": "\ud800\x00"}]},
    ],
)
def test_whatever_a_request_holds_its_record_is_sound(odd: dict[str, Any], tmp_path: Path) -> None:
    with live_rig(tmp_path) as rig:
        answer = rig.post(content=json.dumps({"model": "planner", "messages": SAY} | odd).encode())
        assert answer.status_code in (200, 400)
        assert rig.live()["not_recorded"] == {"calls": 0, "spans": 0}
    assert len(recorded(tmp_path)) == 1


def test_texts_are_redacted_and_tokens_that_stand_for_them_go_too(tmp_path: Path) -> None:
    secret = "sk-proj-abcdefghijklmnopqrstuvwxyz0123456789ABCDEFGHIJ"
    with live_rig(tmp_path) as rig:
        rig.engine.answer = lambda body: f"your key is {secret}"
        assert secret in rig.say().text  # the client's own answer is not touched
    (found,) = recorded(tmp_path)
    assert not found.actions[0].trainable
    assert "redacted" in str(found.actions[0].untrainable_reason)
    assert found.actions[0].sampled_ids is None
    assert secret.encode() not in (tmp_path / "store.duckdb").read_bytes()


def test_without_content_only_structure_and_numbers_are_kept(tmp_path: Path) -> None:
    with live_rig(tmp_path, options=RecordOptions(content=False)) as rig:
        rig.say(headers={"x-marft-session": "secret-session"})
    (found,) = recorded(tmp_path)
    assert (found.actions[0].completion, found.actions[0].sampled_ids) == (None, None)
    assert found.actions[0].sampled_tokens == len(text_to_ids("planner@0 speaks"))
    assert b"secret-session" not in (tmp_path / "store.duckdb").read_bytes()


def test_all_that_a_person_said_is_found_by_their_name_shadows_included(tmp_path: Path) -> None:
    with live_rig(tmp_path, (100, 0), mirror=True) as rig:
        rig.say(user="ada")
        rig.say(headers=TRACED)
        rig.say("writer", headers=TRACED, user="ada")  # only the second call of the run says whose it is
        rig.say("writer", headers=TRACED, user="bob")  # another person never shares an episode
        rig.wait_for(lambda told: told["variants"][MIRRORED]["requests"] == 4)
        drained(rig)
    found = recorded(tmp_path)
    ada = {t.episode.episode_id for t in found if t.episode.subject_id == "ada"}
    with TraceStore.open(tmp_path / "store.duckdb") as store:
        chosen = subject_to_traces(store, "ada")
    bob = [t for t in found if t.episode.subject_id == "bob"]
    assert ada <= set(chosen.trace_ids)
    assert not {t.episode.episode_id for t in bob} & set(chosen.trace_ids)
    assert sorted(len(t.actions) for t in found if t.episode.episode_id in chosen.trace_ids) == [1, 1, 1, 1, 2]
    assert [t.actions[0].node for t in bob] == ["writer", "writer"]


def test_too_many_open_runs_end_the_oldest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "MAX_OPEN_RUNS", 2)
    monkeypatch.setattr(calls, "MAX_CALLS", 2)
    with live_rig(tmp_path) as rig:
        for number in range(3):
            rig.say(headers={"x-marft-run": f"run-{number}"})
        for _ in range(3):
            rig.say(headers={"x-marft-run": "endless"})
    reasons = [str(found.episode.reason) for found in recorded(tmp_path)]
    assert reasons.count("more than 2 runs were open") == 2
    assert reasons.count("2 calls named one run") == 1
    assert len(reasons) == 5


def steady_recorder(folder: Path) -> tuple[calls.LiveRecorder, Journal]:
    journal = Journal(folder / "store.duckdb.journal")
    for node, version in TEAMS[BASE].versions.items():
        journal.append(AdapterRow(node, version, None, "somewhere", "a" * 64, "b" * 64, 1))
    processor = options_to_processor(journal, RecordOptions())
    return calls.LiveRecorder(processor, "live-test", "app", 60.0, 1.0, {}, ()), journal


def begin(recorder: calls.LiveRecorder, run: str) -> calls.Call:
    body = {"model": "planner", "messages": SAY}
    identity = request_to_identity({"x-marft-run": run}, body)
    call = recorder.begin(LiveRequest(CHAT, "planner", TEAMS[BASE], body=body, identity=identity))
    assert call is not None
    return call


def test_no_episode_has_more_calls_than_the_limit_under_steady_traffic(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next call always begins before the last one ends, so that the run is never without one."""
    monkeypatch.setattr(calls, "MAX_CALLS", 4)
    recorder, journal = steady_recorder(tmp_path)
    under_way = begin(recorder, "endless")
    for _ in range(9):
        following = begin(recorder, "endless")
        recorder.end(under_way, None, None)
        under_way = following
    recorder.end(under_way, None, None)
    recorder.close()
    journal.close()
    found = recorded(tmp_path)
    assert [len(trajectory.actions) for trajectory in found] == [4, 4, 2]
    assert [str(trajectory.episode.reason) for trajectory in found[:2]] == ["4 calls named one run"] * 2
    assert recorder.failures == 0


def test_the_limit_of_open_runs_holds_though_the_oldest_has_a_call_under_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls, "MAX_OPEN_RUNS", 2)
    recorder, journal = steady_recorder(tmp_path)
    oldest = begin(recorder, "oldest")
    for number in range(5):
        recorder.end(begin(recorder, f"run-{number}"), None, None)
        assert len(recorder._open_runs) <= 2
    assert recorder.find_team("oldest") is not None, "a run with a call under way is never ended"
    recorder.end(oldest, None, None)
    recorder.close()
    journal.close()
    reasons = [str(trajectory.episode.reason) for trajectory in recorded(tmp_path)]
    assert (len(reasons), reasons.count("more than 2 runs were open")) == (6, 4)


def test_a_journal_that_takes_nothing_harms_no_answer_and_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with live_rig(tmp_path) as rig:
        monkeypatch.setattr(Journal, "_write", full)
        assert rig.say().status_code == 200
        assert rig.live()["not_recorded"] == {"calls": 0, "spans": 3}


def test_a_recorder_that_fails_harms_no_answer_and_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(calls, "to_messages", fails)
    with live_rig(tmp_path, mirror=True) as rig:
        assert rig.say().status_code == 200
        assert rig.live()["not_recorded"]["calls"] == 1
