"""Owns: after a power cut, the manifest that counts is there, whole, and one that was acknowledged counts; after a
kill, promotion goes on from where the killed command was."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pytest
from support.power_cuts import recorded, restore

from marft_bridge.common.errors import ConfigError
from marft_bridge.promotion.manifest import (
    Manifest,
    PromotedAdapter,
    newest_manifest,
    next_chain_position,
    open_chain,
    verify_chain,
    write_manifest,
)

KEY = b"a key of the suite"


def manifest(number: int, previous: str | None = None) -> Manifest:
    return Manifest(
        number=number,
        previous_sha256=previous,
        candidate="candidate",
        base="base",
        graph="app.py:build",
        model="model",
        base_sha256="b" * 64,
        adapters={"solver": PromotedAdapter(version=number, sha256="a" * 64)},
        tool_surface={},
        tool_surface_differs=False,
        verdict="better",
        gate="better",
        findings=(),
        report_sha256="c" * 64,
        safety=None,
        signed_by="somebody",
        signed_at=datetime(2026, 11, 1, tzinfo=UTC),
    )


def test_a_power_cut_leaves_the_manifest_that_counts_whole(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    with recorded(disk) as cuts:
        for number in (1, 2):
            write_manifest(disk, manifest(number))
            cuts.acknowledge(number)
    counting = set()
    for number, (tree, acknowledged) in enumerate(cuts.crashes()):
        left = tmp_path / f"left {number}"
        restore(tree, left)
        newest = newest_manifest(left, None)  # raises where the manifest that counts is not there or not whole
        count = 0 if newest is None else newest.versions["solver"]
        assert count >= max(acknowledged, default=0)
        counting.add(count)
    assert counting == {0, 1, 2}


def promote(folder: Path, *, key: bytes | None = None, killed: bool = False) -> None:
    """The next promotion; `killed` between its manifest and current.json."""
    current = folder / "promoted/current.json"
    before = current.read_bytes() if current.exists() else None
    unsigned = manifest(*next_chain_position(folder))
    write_manifest(folder, unsigned if key is None else unsigned.signed(key))
    if killed:
        current.unlink()
        if before is not None:
            current.write_bytes(before)


@pytest.mark.parametrize("key", [None, KEY])
@pytest.mark.parametrize("earlier", [0, 1, 2])
def test_the_next_promotion_completes_one_that_was_killed_before_it_counted(
    earlier: int, key: bytes | None, tmp_path: Path
) -> None:
    for _ in range(earlier):
        promote(tmp_path, key=key)
    promote(tmp_path, key=key, killed=True)
    with pytest.raises(ConfigError, match=r"current\.json does not name"):
        verify_chain(tmp_path, key)
    said: list[str] = []
    assert len(open_chain(tmp_path, key, said.append)) == earlier + 1
    (line,) = said
    assert line.startswith(f"promotion {earlier + 1} was signed off by a command that was killed")
    newest = newest_manifest(tmp_path, None)
    assert newest is not None
    assert newest.number == earlier + 1
    said.clear()
    promote(tmp_path, key=key)
    assert len(open_chain(tmp_path, key, said.append)) == len(verify_chain(tmp_path, key)) == earlier + 2
    assert said == []


def test_what_a_kill_does_not_leave_is_not_completed(tmp_path: Path) -> None:
    current = tmp_path / "promoted/current.json"

    def refused(message: str, key: bytes | None) -> None:
        before = current.read_bytes() if current.exists() else None
        with pytest.raises(ConfigError, match=message):
            open_chain(tmp_path, key, lambda _: pytest.fail("nothing was completed"))
        assert (current.read_bytes() if current.exists() else None) == before

    promote(tmp_path, key=KEY)
    first = current.read_bytes()
    promote(tmp_path, key=KEY)
    promote(tmp_path, killed=True)  # without the key
    refused(r"3\.json is not signed", KEY)
    (tmp_path / "promoted/3.json").unlink()
    current.unlink()  # of a chain of two
    refused(r"current\.json does not name", KEY)
    promote(tmp_path, key=KEY)
    current.write_bytes(first)  # of a chain of three, two steps back
    refused(r"current\.json does not name", KEY)


def test_only_names_that_a_promotion_writes_are_manifests(tmp_path: Path) -> None:
    promote(tmp_path)
    for name in ("0", "01", "-1", "1.5", "\N{SUPERSCRIPT TWO}", "\N{ARABIC-INDIC DIGIT TWO}"):
        (tmp_path / "promoted" / f"{name}.json").write_text("{}")
    assert [one.number for one in verify_chain(tmp_path, None)] == [1]
    promote(tmp_path)
    assert [one.number for one in verify_chain(tmp_path, None)] == [1, 2]
    (tmp_path / "promoted" / f"{9**120}.json").write_text("{}")  # no set of so many numbers is made
    with pytest.raises(ConfigError, match=r"3\.json is missing"):
        verify_chain(tmp_path, None)


def test_a_number_that_is_none_is_one_line(tmp_path: Path) -> None:
    promote(tmp_path)
    (tmp_path / "promoted/current.json").write_text('{"number": 1e999, "sha256": ""}')
    with pytest.raises(ConfigError, match=r"current\.json is unreadable"):
        newest_manifest(tmp_path, None)
