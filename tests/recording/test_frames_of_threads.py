"""Owns: that to look where other threads are never stops the app, whatever collector and threads do meanwhile."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
from collections.abc import Iterator
from types import FrameType

import pytest

from marft_bridge.recording.state_reads import frames_by_thread

# The collector runs all the time and lets other threads run, while threads start without pause.
_BUSY = """
import gc, threading, time
from marft_bridge.recording.state_reads import frames_by_thread

gc.callbacks.append(lambda phase, info: time.sleep(1e-6))
gc.set_threshold(1, 1, 1)
ends_at = time.monotonic() + 3.0

def start_threads():
    while time.monotonic() < ends_at:
        threading.Thread(target=int).start()

def look():
    while time.monotonic() < ends_at:
        frames_by_thread()

threads = [threading.Thread(target=start_threads), *(threading.Thread(target=look) for _ in range(2))]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print("came to its end")
"""


@pytest.fixture(params=[True, False], ids=["collector on", "collector off"])
def was_collecting(request: pytest.FixtureRequest) -> Iterator[bool]:
    """The app's own choice about the collector."""
    before = gc.isenabled()
    (gc.enable if request.param else gc.disable)()
    yield request.param
    (gc.enable if before else gc.disable)()


def test_frames_are_taken_without_the_collector_which_is_then_as_the_app_had_it(
    was_collecting: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[bool] = []
    plain = sys._current_frames

    def watched() -> dict[int, FrameType]:
        seen.append(gc.isenabled())
        return plain()

    monkeypatch.setattr(sys, "_current_frames", watched)
    assert threading.get_ident() in frames_by_thread()
    assert seen == [False]
    assert gc.isenabled() is was_collecting


def test_threads_that_start_while_the_collector_lets_others_run_do_not_stop_it() -> None:
    done = subprocess.run([sys.executable, "-c", _BUSY], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "came to its end\n", done.stderr
