"""`python -m marft_bridge` is `marft-bridge`.

Python puts the working folder before everything installed. It goes last here: the app's folder may have a `trainers`
of its own, which would then stand in the place of ours.
"""

import sys
from pathlib import Path

if sys.path[:1] == [str(Path.cwd())] and Path(__file__).parents[1] != Path.cwd():
    sys.path.append(sys.path.pop(0))

from marft_bridge.cli import main

main()
