"""Owns: a file that was written atomically is the old one or the new one after a power cut, and the new one once that
was acknowledged."""

from __future__ import annotations

from pathlib import Path

from support.power_cuts import recorded

from marft_bridge.common.files import write_atomically


def test_a_power_cut_leaves_the_old_text_or_the_new_one_and_never_the_old_one_once_that_was_said(
    tmp_path: Path,
) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    (disk / "a.json").write_text("old")
    with recorded(disk) as cuts:
        write_atomically(disk / "a.json", "new and longer")
        cuts.acknowledge("new")
    texts = set()
    for tree, acknowledged in cuts.crashes():
        text = tree["a.json"]
        assert text in (b"old", b"new and longer")
        assert text != b"old" or "new" not in acknowledged
        texts.add(text)
    assert len(texts) == 2
