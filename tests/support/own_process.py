"""A property of hundreds of drawn programs, in a process of its own.

After hundreds of other tests in one process such a property now and then never came to its end: Hypothesis traces
calls, and a call of a reward had left CPython's mark for an error that is on its way to a thread, under which a traced
call never ends (`marft_bridge.rewards.call_threads`, mended). Here it meets no other test, and where it hangs all the
same, the failure says on which lines.
"""

from __future__ import annotations

import os
import subprocess
import sys

from support.paths import ROOT, TESTS

PATIENCE_S = 540.0


def hold_for_drawn_programs(module: str, *, max_examples: int) -> None:
    """Runs `check` of a test module on drawn programs, under the settings `LAW` of the module.

    Raises:
        AssertionError: it failed, or was not through after nine minutes; what the process wrote, stacks included.
    """
    programs = (
        f"import faulthandler; faulthandler.dump_traceback_later({PATIENCE_S}, exit=True)\n"
        "from hypothesis import given, settings\n"
        f"from {module} import LAW, check\n"
        "from support.random_programs import drawings\n"
        f"settings(LAW, max_examples={max_examples})(given(drawing=drawings())(check))()\n"
    )
    environment = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{TESTS}"}
    tried = subprocess.run([sys.executable, "-c", programs], env=environment, capture_output=True, text=True)
    assert tried.returncode == 0, tried.stderr
