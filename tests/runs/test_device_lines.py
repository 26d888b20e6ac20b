"""Owns: what a command says of its devices is known while it runs, and of one that is gone nothing is told."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.school_rig import school_in

from marft_bridge.common.files import held_file
from marft_bridge.runs.device_lines import LIVE, SERVE, announced_devices, read_devices
from marft_bridge.runs.run_folder import RunFolder

KILLED = """
import sys, time
from pathlib import Path
from marft_bridge.runs.device_lines import announced_devices
from marft_bridge.runs.run_folder import RunFolder
with announced_devices(RunFolder(Path(sys.argv[1])), ["devices: of the dead"]):
    print("there", flush=True)
    time.sleep(600)
"""


def test_each_command_that_runs_tells_its_own_devices_and_takes_them_back_at_its_end(folder: RunFolder) -> None:
    assert read_devices(folder) == {}
    with announced_devices(folder, ["server: 0"], whose=SERVE), announced_devices(folder, ["server: 1"], whose=LIVE):
        with announced_devices(folder, ["server: 0", "training: 2"]):
            said = {"": ["server: 0", "training: 2"], SERVE: ["server: 0"], LIVE: ["server: 1"]}
            assert read_devices(folder) == said
            assert read_devices(folder) == said, "looking takes nothing away"
        assert read_devices(folder) == {SERVE: ["server: 0"], LIVE: ["server: 1"]}
    assert read_devices(folder) == {}
    assert not list(folder.path.iterdir())


def test_collect_and_train_tell_their_devices_while_they_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[dict[str, list[str]]] = []
    with school_in(tmp_path, monkeypatch) as school:
        answer, folder = school.server.answer, RunFolder(school.run)

        def answer_and_look(body: dict[str, Any]) -> Any:
            told.append(read_devices(folder))
            return answer(body)

        school.server.answer = answer_and_look
        school.collect()
        server = f"devices: model server: at {school.server.url}, which runs already"
        assert told == [{"": [server]}] * len(told)
        assert told
        told.clear()
        assert {server, "devices: training: CPU"} <= set(school.train(without_signal=True).splitlines())
        assert told == [{"": [server, "devices: training: CPU"]}] * len(told)
        assert told
        assert read_devices(folder) == {}


def test_of_a_command_that_was_killed_nothing_is_told_and_the_next_one_leaves_no_file_of_it(folder: RunFolder) -> None:
    argv = [sys.executable, "-c", KILLED, str(folder.path)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "there\n"
        assert read_devices(folder) == {"": ["devices: of the dead"]}
        process.send_signal(signal.SIGKILL)
    assert folder.devices_note("").exists(), "it left its file"
    assert read_devices(folder) == {}
    with folder.lock_for("serve", name="serve.lock"):
        assert folder.devices_note("").exists(), "it may be of a command that runs beside this one"
    with folder.lock_for("compare"):
        assert not folder.devices_note("").exists()


@pytest.mark.parametrize("content", ['{"a": 1}', "1", '"devices"', "[]", "not JSON", ""])
def test_a_held_file_of_that_name_whose_content_is_none_of_ours_is_left_out(folder: RunFolder, content: str) -> None:
    """Its holder lives, so that only what it holds tells."""
    with held_file(folder.devices_note(SERVE), content), announced_devices(folder, ["server: 0"]):
        assert read_devices(folder) == {"": ["server: 0"]}


def test_a_link_to_a_note_is_no_note(folder: RunFolder) -> None:
    with announced_devices(folder, ["server: 0"]):
        folder.devices_note(SERVE).symlink_to(folder.devices_note(""))
        assert read_devices(folder) == {"": ["server: 0"]}
