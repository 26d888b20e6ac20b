"""A child learner, or one of torchrun's, with little patience, and nothing to learn.

python -m support.impatient_learner MEETING_FOLDER RANK COUNT
python -m support.impatient_learner                             with torchrun's variables in the environment
"""

from __future__ import annotations

import sys
from datetime import timedelta
from pathlib import Path
from types import ModuleType

from marft_bridge.training import learner_process
from marft_bridge.training.torchrun_learners import follow_torchrun
from trainers.learners import group

PATIENCE_S = 10.0

if __name__ == "__main__":
    group._PATIENCE = timedelta(seconds=PATIENCE_S)
    stand_in = ModuleType("trainers.learners.follower")
    stand_in.follow = lambda: None  # type: ignore[attr-defined]
    sys.modules[stand_in.__name__] = stand_in  # the follower's own imports take seconds
    if len(sys.argv) > 1:
        sys.exit(learner_process.main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])))
    follow_torchrun()
