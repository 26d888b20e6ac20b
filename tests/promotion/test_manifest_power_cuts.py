"""Owns: after a power cut, the manifest that counts is there, whole, and one that was acknowledged counts."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

from support.power_cuts import recorded, restore

from marft_bridge.promotion.manifest import Manifest, PromotedAdapter, promoted_versions, write_manifest


def manifest(number: int) -> Manifest:
    return Manifest(
        number=number,
        previous_sha256=None,
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
        versions = promoted_versions(left)  # raises where the manifest that counts is not there or not whole
        count = 0 if versions is None else versions["solver"]
        assert count >= max(acknowledged, default=0)
        counting.add(count)
    assert counting == {0, 1, 2}
