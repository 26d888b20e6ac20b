"""What a block does to a folder -> the states in which a power cut may leave that folder.

The disk promises what POSIX does, and no more: bytes are there once their file was synced, a name once its folder was,
and a move within one folder is one step. Whatever else was done may be there or not, in any order; of bytes that were
added to a file, the first ones, or zeros in their place.

What was done is found by looking at the folder after each call of `os` that changes something, so it does not matter
who wrote: the block itself, or C code between two calls. What DuckDB writes counts as synced when it is seen, because
it syncs its files itself where it commits (`strace` shows it: data, never names). It deletes its log after a last write
to it; the log, which is kept open, shows what that was.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain, combinations
from pathlib import Path
from typing import Any
from unittest import mock

CALLS = (
    *("open", "mkdir", "link", "rename", "replace", "unlink", "remove", "rmdir"),
    *("pwrite", "ftruncate", "truncate", "fsync"),
)
MAX_EXHAUSTIVE = 4  # changes of one folder of which every subset is tried
RANDOM_STATES = 12  # at each moment, besides those that are listed

_OPEN = os.open  # without being watched

Tree = dict[str, bytes | None]
"""Path below the folder -> what the file holds; None for a folder."""
_Change = tuple[tuple[str, int | None], ...]  # name -> node, in one step; None where the name goes


@dataclass(slots=True)
class _File:
    """The bytes that are on the disk for certain, and what they became since."""

    durable: bytes = b""
    later: list[bytes] = field(default_factory=list)

    def states(self) -> list[bytes]:
        """All contents that may be found, the whole last one at the end."""
        states, before = [self.durable], self.durable
        for content in self.later:
            if content.startswith(before):
                added = len(content) - len(before)
                states += [content[: len(before) + cut] for cut in sorted({1, added // 2, added - 1} - {0, added})]
                states.append(before + bytes(added))
            states.append(content)
            before = content
        return list(dict.fromkeys(reversed(states)))[::-1]


@dataclass(slots=True)
class _Folder:
    """The names that are on the disk for certain, and their changes since."""

    durable: dict[str, int] = field(default_factory=dict)
    later: list[_Change] = field(default_factory=list)

    def states(self) -> list[dict[str, int]]:
        """All sets of names that may be found, the newest at the end."""
        count = len(self.later)
        chosen: Iterator[Sequence[int]]
        if count <= MAX_EXHAUSTIVE:
            chosen = chain.from_iterable(combinations(range(count), size) for size in range(count + 1))
        else:
            prefixes = [range(end) for end in range(count)]
            without_one = [[k for k in range(count) if k != left] for left in range(count)]
            chosen = iter([*prefixes, *([k] for k in range(count)), *without_one, range(count)])
        return [self._apply(changes) for changes in chosen]

    def _apply(self, changes: Sequence[int]) -> dict[str, int]:
        names = dict(self.durable)
        for number in changes:
            for name, node in self.later[number]:
                if node is None:
                    names.pop(name, None)
                else:
                    names[name] = node
        return names


class PowerCuts:
    """A recording of one folder, and the states that power cuts leave."""

    def __init__(self, root: Path, self_synced: tuple[str, ...]) -> None:
        self._root, self._self_synced = root, self_synced
        self._open_fds: dict[int, int] = {}  # of files that sync themselves
        self._nodes: dict[int, _File | _Folder] = {}
        self._by_inode: dict[int, int] = {}
        self._contents: dict[int, bytes] = {}  # of files, as they were seen last
        self._names: dict[int, dict[str, int]] = {}  # of folders
        self._acknowledged: list[Hashable] = []
        self._states: dict[tuple[tuple[str, bytes | None], ...], tuple[Hashable, ...]] = {}
        self._rng = random.Random(7)
        self._look()
        for node in self._nodes.values():  # what was there before is on the disk
            if isinstance(node, _File):
                node.durable, node.later = node.later[-1] if node.later else node.durable, []
            else:
                node.durable, node.later = node.states()[-1], []
        self._note_states()

    def acknowledge(self, what: Hashable) -> None:
        """The block was told that this is durable."""
        self._acknowledged.append(what)
        self._note_states()

    def crashes(self) -> Iterator[tuple[Tree, tuple[Hashable, ...]]]:
        """Each state, and all that was acknowledged by the latest moment at which a cut leaves it."""
        for state, acknowledged in self._states.items():
            yield dict(state), acknowledged

    def close(self) -> None:
        """Lets go of the files that were kept open."""
        for fd in self._open_fds.values():
            os.close(fd)
        self._open_fds.clear()

    # -- recording --------------------------------------------------------------------------------------------

    def note_call(self) -> None:
        """Looks at what a call has changed."""
        self._look()
        self._note_states()

    def note_sync(self, inode: int) -> None:
        """What was seen of this file or folder is on the disk."""
        self._look()
        node = self._nodes.get(self._by_inode.get(inode, -1))
        if isinstance(node, _File) and node.later:
            node.durable, node.later = node.later[-1], []
        elif isinstance(node, _Folder):
            node.durable, node.later = node.states()[-1], []
        self._note_states()

    def _look(self) -> None:
        seen_inodes: set[int] = set()
        for number, fd in self._open_fds.items():
            node = self._nodes[number]
            assert isinstance(node, _File)
            node.durable = os.pread(fd, os.fstat(fd).st_size, 0)
        self._look_into(self._root, seen_inodes)
        for inode in set(self._by_inode) - seen_inodes:  # the number may be given to a new file
            del self._by_inode[inode]

    def _look_into(self, path: Path, seen_inodes: set[int]) -> int:
        inode = path.lstat().st_ino
        seen_inodes.add(inode)
        number = self._by_inode.get(inode)
        is_folder = path.is_dir()
        if number is None or isinstance(self._nodes[number], _Folder) != is_folder:
            number = self._by_inode[inode] = len(self._nodes)
            self._nodes[number] = _Folder() if is_folder else _File()
        node = self._nodes[number]
        if isinstance(node, _Folder):
            names = {child.name: self._look_into(child, seen_inodes) for child in sorted(path.iterdir())}
            node.later += _changes(self._names.get(number, {}), names)
            self._names[number] = names
        else:
            if path.name.endswith(self._self_synced):
                if number not in self._open_fds:
                    self._open_fds[number] = _OPEN(path, os.O_RDONLY | os.O_CLOEXEC)
                node.durable = path.read_bytes()
                return number
            content = path.read_bytes()
            if content != self._contents.get(number, b""):
                node.later.append(content)
                self._contents[number] = content
        return number

    # -- states -----------------------------------------------------------------------------------------------

    def _note_states(self) -> None:
        acknowledged = tuple(self._acknowledged)
        options: dict[int, list[Any]] = {number: node.states() for number, node in self._nodes.items()}
        newest, oldest = {n: len(o) - 1 for n, o in options.items()}, dict.fromkeys(options, 0)
        files = [number for number, node in self._nodes.items() if isinstance(node, _File)]
        choices = [newest, oldest, newest | dict.fromkeys(files, 0), oldest | {n: newest[n] for n in files}]
        for number, states in options.items():
            choices += [base | {number: state} for base in (newest, oldest) for state in range(len(states) - 1)]
        undecided = [number for number, states in options.items() if len(states) > 1]
        for _ in range(RANDOM_STATES if len(undecided) > 1 else 0):
            choices.append(newest | {number: self._rng.randrange(len(options[number])) for number in undecided})
        for choice in choices:
            tree: Tree = {}
            self._build(0, "", {number: options[number][state] for number, state in choice.items()}, tree)
            self._states[tuple(sorted(tree.items()))] = acknowledged

    def _build(self, folder: int, prefix: str, chosen: dict[int, Any], tree: Tree) -> None:
        for name, number in chosen[folder].items():
            path = f"{prefix}{name}"
            if isinstance(self._nodes[number], _Folder):
                tree[path] = None
                self._build(number, f"{path}/", chosen, tree)
            else:
                tree[path] = chosen[number]


def _changes(before: dict[str, int], after: dict[str, int]) -> list[_Change]:
    """What happened to the names of a folder: a node that moved is one step, everything else a step of its own."""
    changed = {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}
    removed = {before[name]: name for name in sorted(changed) if name in before and name not in after}
    steps: list[_Change] = []
    moved_from: set[str] = set()
    for name in sorted(changed & after.keys()):
        source = removed.get(after[name])
        if source is not None:
            moved_from.add(source)
            steps.append(((source, None), (name, after[name])))
        else:
            steps.append(((name, after[name]),))
    return steps + [((name, None),) for name in sorted(changed - after.keys() - moved_from)]


@contextmanager
def recorded(root: Path, self_synced: tuple[str, ...] = (".duckdb", ".duckdb.wal")) -> Iterator[PowerCuts]:
    """Records what happens to a folder inside the block; what it holds by then is taken for durable."""
    cuts = PowerCuts(root, self_synced)
    try:
        with mock.patch.multiple(os, **{name: _watched(name, cuts) for name in CALLS}):
            yield cuts
        cuts.note_call()
    finally:
        cuts.close()


def _watched(name: str, cuts: PowerCuts) -> Callable[..., Any]:
    call = getattr(os, name)

    def watched(*arguments: Any, **options: Any) -> Any:
        result = call(*arguments, **options)
        if name == "fsync":
            cuts.note_sync(os.fstat(arguments[0]).st_ino)
        else:
            cuts.note_call()
        return result

    return watched


def restore(tree: Tree, folder: Path) -> None:
    """Makes a folder that holds what a power cut left."""
    folder.mkdir()
    for path, content in sorted(tree.items()):  # a folder comes before what it holds
        if content is None:
            (folder / path).mkdir()
        else:
            (folder / path).write_bytes(content)
