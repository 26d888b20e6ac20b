"""Owns: after a power cut, a version that is registered has the files that were registered, and one that was
acknowledged is registered."""

from __future__ import annotations

from pathlib import Path

from support.power_cuts import recorded, restore

from marft_bridge.serving.adapter_checks import WEIGHTS_FILE, folder_to_hashes
from marft_bridge.serving.adapter_registry import AdapterRegistry


def test_a_power_cut_leaves_no_registered_version_without_its_files(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    with recorded(disk) as cuts:
        registry = AdapterRegistry(disk / "run" / "adapters", "b" * 64)
        for version in (1, 2):
            folder = registry.new_folder("solver", version)
            (folder / WEIGHTS_FILE).write_bytes(b"weights of %d" % version)
            (folder / "adapter_config.json").write_text("{}")
            registry.register("solver", version, None, {})
            cuts.acknowledge(version)
    counts = set()
    for number, (tree, acknowledged) in enumerate(cuts.crashes()):
        left = tmp_path / f"left {number}"
        restore(tree, left)
        registry = AdapterRegistry(left / "run" / "adapters", "b" * 64)
        versions = registry.versions("solver")
        assert set(acknowledged) <= set(versions)
        for version in versions:
            folder = left / "run" / "adapters" / "solver" / str(version)
            hashes = folder_to_hashes(folder)
            assert {name: hashes[name] for name in registry.hashes("solver", version)} == registry.hashes(
                "solver", version
            )
        counts.add(len(versions))
    assert counts == {0, 1, 2}
