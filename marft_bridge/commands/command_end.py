"""How a command ends -> its exit code, and the line on stderr that says why, and what to do.

A user error is one line and exit code 2, or the error's own; so is what the system refuses to do with a place of the
user's, and a library that is not installed. Ctrl-C is 130; SIGTERM and a closed terminal end a command as it does.
Invariant: anything else is a bug and shows a traceback.
"""

from __future__ import annotations

import errno
import shlex
import signal
from collections.abc import Callable, Sequence

from rich.console import Console

from marft_bridge.common.errors import USER_ERRORS, BridgeError
from marft_bridge.common.extras import missing_module_to_line
from marft_bridge.common.terminal_text import text_to_lines

INTERRUPTED = 130
RESUMABLE = ("collect", "train", "compare", "credit", "fork")
"""The commands that have --resume."""
_NOT_ALLOWED = "let its owner run this, or name another place"
_NO_ROOM = "make room there, or name another place"
FILE_PROBLEMS = {
    errno.EACCES: _NOT_ALLOWED,
    errno.EPERM: _NOT_ALLOWED,
    errno.ENOTDIR: "a part of the path is a file; name another place",
    errno.EISDIR: "name a file",
    errno.EROFS: "name a place that can be written",
    errno.ENOSPC: _NO_ROOM,
    errno.EDQUOT: _NO_ROOM,
    errno.ENAMETOOLONG: "name a shorter path",
}
"""Numbers of system errors that a place of the user's brings about -> what to do."""
_OF_OPEN_FILES = (errno.EACCES, errno.EPERM, errno.ENOSPC, errno.EDQUOT)  # these may come without the file's name


def run_to_exit_code(command: Callable[[], object], arguments: Sequence[str]) -> int:
    """Runs a command, and says on stderr how it ended where it did not end well.

    Args:
        arguments: the words of the command line, from which the one that goes on with an interrupted run is made.
    """
    stderr = Console(stderr=True, highlight=False)
    try:
        command()
    except (*USER_ERRORS, OSError, ModuleNotFoundError) as error:
        line = _error_to_line(error)
        if line is None:
            raise
        stderr.print(f"marft-bridge: {line}", markup=False, style="red", soft_wrap=True)
        return error.exit_code if isinstance(error, BridgeError) else 2
    except SystemExit as system_exit:
        if system_exit.code == INTERRUPTED:
            hint = f"; go on with: {_resume_command(arguments)}" if arguments[0] in RESUMABLE else ""
            stderr.print(f"stopped; what was finished is kept{hint}", markup=False, soft_wrap=True)
        return system_exit.code if isinstance(system_exit.code, int) else 0
    return 0


def _error_to_line(error: Exception) -> str | None:
    """What to tell the user, as a rule in one line; None for an error that is a bug."""
    if isinstance(error, USER_ERRORS):
        return "\n".join(text_to_lines(str(error)))
    if isinstance(error, OSError):
        return _file_error_to_line(error)
    return missing_module_to_line(error.name) if isinstance(error, ModuleNotFoundError) else None


def _file_error_to_line(error: OSError) -> str | None:
    """What the system refuses to do with a file, and what to do; None for an error that is not about a place."""
    remedy = FILE_PROBLEMS.get(error.errno or 0)
    if remedy is None or (error.filename is None and error.errno not in _OF_OPEN_FILES):
        return None
    place = text_to_lines(str(error.filename or "a file"))[0]
    return f"{place}: {error.strerror}; {remedy}"


def _resume_command(arguments: Sequence[str]) -> str:
    """What a shell takes for the same arguments with --resume."""
    words = [word for word in arguments if word != "--resume"]
    at = words.index("--") if "--" in words else len(words)  # what stands behind it is no option
    return shlex.join(["marft-bridge", *words[:at], "--resume", *words[at:]])


def end_by_signals_as_by_interrupt() -> None:
    """Makes SIGTERM and a closed terminal end this process as cleanly as Ctrl-C.

    And all of them where a shell put the command in the background, ignoring SIGINT.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # which nohup sets
        signal.signal(signal.SIGHUP, _end_after_hangup)


def _end_after_hangup(*_: object) -> None:
    """Ends as Ctrl-C does. A terminal that closes says so more than once, by its shell and by itself."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.raise_signal(signal.SIGINT)
