"""A process of `train.learners` beside the command's own: it joins the group and follows until the command lets go.

    python -m marft_bridge.training.learner_process MEETING_FOLDER RANK COUNT

Standard output says READY once everything is imported, so that the command never waits for a process that does not
come. Then it waits without a limit until the command calls, which may have a model server to start first: the patience
of a process group begins where all are there. What goes wrong is one line on standard error, which the command keeps in
the run folder's learner-RANK.log.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from marft_bridge.common.errors import USER_ERRORS
from marft_bridge.common.printable import text_to_line

READY = b"ready\n"
LOST = 3  # the exit code where another process had ended; Python's own are 1 and 2
_LOOK_S = 0.1


def main(folder: Path, rank: int, count: int) -> int:
    """Returns the exit code: 0 when the command let go, `LOST` when another process had ended, 1 for other errors."""
    from trainers.errors import LostProcessError
    from trainers.learners.follower import follow
    from trainers.learners.group import join_group, leave_group

    sys.stdout.buffer.write(READY)
    sys.stdout.flush()
    os.dup2(2, 1)  # nobody reads the pipe any more, and a full one would stop this process
    try:
        _wait_for_call(folder)
        join_group(rank, count, meeting_place=meeting_place_in(folder))
        follow()
    except USER_ERRORS as error:
        sys.stderr.write(f"learner {rank}: {text_to_line(str(error))}\n")
        return LOST if isinstance(error, LostProcessError) else 1
    leave_group()
    return 0


def call_in(folder: Path) -> Path:
    """The file by which the command calls those that wait."""
    return folder / "called"


def meeting_place_in(folder: Path) -> str:
    """Where they meet then, for torch."""
    return f"file://{folder / 'group'}"


def _wait_for_call(folder: Path) -> None:
    """Returns once the command has called; where the command goes instead, the guard ends this process."""
    while not call_in(folder).exists():
        time.sleep(_LOOK_S)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])))
