"""A learner on Ray whose training fails, as a process of its own that lives on, as an actor's does.

    python failing_follower.py PORT

It joins the group of two that is met at that port of loopback. Standard output says "failing" before it fails and then
what `follow` returned; the process ends with its input.
"""

from __future__ import annotations

import sys
from types import ModuleType

from marft_bridge.training.learner_actor import LearnerActor
from trainers.errors import TrainError


def follow() -> None:
    """In place of the follower's, whose imports take seconds."""
    from trainers.learners.calls import Calls

    calls = Calls()
    say("failing")
    raise TrainError(f"out of memory beside {type(calls).__name__}")


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main(port: int) -> None:
    """Follows, and waits for the end of the input."""
    stand_in = ModuleType("trainers.learners.follower")
    stand_in.follow = follow  # type: ignore[attr-defined]
    sys.modules[stand_in.__name__] = stand_in
    actor = LearnerActor(None)
    actor.locate("127.0.0.1")
    assert actor.connect("127.0.0.1", port, 2) is None
    say(str(actor.follow(1, 2)))
    sys.stdin.read()


if __name__ == "__main__":
    main(int(sys.argv[1]))
