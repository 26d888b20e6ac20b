"""`marft-bridge traces mark`: an episode and what a person thinks of it -> a team reward of that episode, 1 or 0.

Invariants: the newest mark of an episode counts, and no earlier one is deleted; a mark is by a person, never computed.
"""

from __future__ import annotations

import time
from pathlib import Path

from rich.console import Console

from marft_bridge.common.terminal_text import print_line, value_to_json
from marft_bridge.traces.episode_prefix import prefix_to_episode
from marft_bridge.traces.exports import open_existing_store
from trace_store.records import Reward

MARKED = "marked"
PERSON = "person"
"""The source of such rewards."""


def mark_episode(path: Path, prefix: str, is_good: bool, *, name: str, as_json: bool, console: Console) -> None:
    """Stores the mark under the reward's name, and prints it.

    Raises:
        ConfigError: no episode of the store, or several, begin with `prefix`.
        StoreError: the store cannot be opened for writing.
    """
    with open_existing_store(path) as store:
        store.take_in()
        episode_id = prefix_to_episode(store, prefix, command="traces mark")
        mark = Reward(episode_id, name, float(is_good), source=PERSON, created_ns=time.time_ns())
        store.put_rewards([mark])
    if as_json:
        print_line(console, value_to_json({"episode_id": episode_id, "reward": name, "value": mark.value}))
    else:
        print_line(console, f"episode {episode_id}: {name} {mark.value:g}")
