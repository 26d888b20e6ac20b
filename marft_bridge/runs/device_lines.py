"""Who has which device, as a command that runs in a folder said it -> for `status`.

What is free tells nothing of it once a command has taken its share, so that nobody can plan it again. Invariant: of a
command that is gone, however it ended, nothing is told.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from marft_bridge.common.errors import StoreError
from marft_bridge.common.files import held_file, read_held
from marft_bridge.runs.run_folder import RunFolder

SERVE, LIVE = "serve", "live"
"""Whose notes these are, beside which other commands work; "" is that of the command that has the folder's lock."""


@contextmanager
def announced_devices(folder: RunFolder, lines: Sequence[str], whose: str = "") -> Iterator[None]:
    """`status` shows these lines until the block ends.

    Args:
        whose: tells apart what runs at the same time; another server of the same command has a name of its own.
    """
    path = folder.devices_note(whose)
    with held_file(path, json.dumps(list(lines)) + "\n") as is_ours:
        try:
            yield
        finally:
            if is_ours():
                path.unlink(missing_ok=True)


def read_devices(folder: RunFolder) -> dict[str, list[str]]:
    """Whose -> the lines, of what runs now; see `announced_devices`."""
    lines_by_name = {}
    prefix, suffix = folder.devices_note("").stem, folder.devices_note("").suffix
    for path in sorted(folder.path.glob(f"{prefix}*{suffix}")):
        with suppress(OSError, StoreError, ValueError):  # gone meanwhile, or not ours
            text = read_held(path)
            content = [] if text is None else json.loads(text)
            if content and isinstance(content, list):
                lines_by_name[path.stem.removeprefix(prefix).removeprefix("-")] = [str(line) for line in content]
    return lines_by_name
