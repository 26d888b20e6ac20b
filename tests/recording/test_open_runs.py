"""Owns: which recorded run a callback belongs under, where no graph runs (`open_runs`); `test_recorder.py` and
`test_threads.py` have the rest, on graphs.

- A run is found by its id from its start to its end, and under no other; nothing is added to a trace that has ended.
- A call that another call makes to answer belongs to the outer one.
"""

from __future__ import annotations

from uuid import uuid4

import pytest

from marft_bridge.recording.episode_context import EpisodeContext
from marft_bridge.recording.open_runs import OpenRuns
from marft_bridge.recording.open_span import open_span
from marft_bridge.recording.trace_state import OpenRun, OpenTrace


def open_run() -> OpenRun:
    trace = OpenTrace(EpisodeContext("run", "task", split="train"))
    return OpenRun(trace, open_span("root", None, {}), True, checkpoint_ns="", is_root=True)


def test_a_run_is_found_by_its_id_until_it_ends() -> None:
    runs, run, run_id = OpenRuns(), open_run(), uuid4()
    runs.add(run_id, run)
    assert runs.get(run_id) is runs.find_parent(run_id) is run
    assert runs.snapshot() == {run_id: run}
    assert (runs.get(None), runs.get(uuid4()), runs.find_parent(uuid4()), runs.node_run()) == (None,) * 4
    assert OpenRuns().find_parent(run_id) is None  # of another recorder
    assert runs.remove(run_id) is run
    assert (runs.remove(run_id), runs.find_parent(run_id), run.trace.runs) == (None, None, {})


def test_a_trace_that_has_ended_takes_no_run() -> None:
    runs, run = OpenRuns(), open_run()
    run.trace.has_ended = True
    with pytest.raises(LookupError):
        runs.add(uuid4(), run)
    assert runs.snapshot() == {}


def test_a_call_inside_a_call_belongs_to_the_outermost_one() -> None:
    runs, call = OpenRuns(), open_run()
    call.is_call = True
    assert runs.find_outer_call(call) is call
    inner = open_run()
    inner.part_of = call
    assert runs.find_outer_call(inner) is call
    assert runs.find_outer_call(open_run()) is None
