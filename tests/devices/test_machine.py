"""Owns: the driver's answer and CUDA_VISIBLE_DEVICES become the cards that this process may use, in CUDA's order."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from marft_bridge.devices.machine import Machine, read_machine, rows_to_machine, visible_to_environment

MIB = 2**20
# as `nvidia-smi --query-gpu=index,uuid,name,memory.total,memory.free --format=csv,noheader,nounits` prints them
ROWS = """\
0, GPU-aaaa1111-0000, NVIDIA GeForce RTX 4090, 24564, 23012
1, GPU-bbbb2222-0000, NVIDIA H100 80GB HBM3, 81559, 81008
2, GPU-bbbb3333-0000, NVIDIA H100 80GB HBM3, 81559, 500
"""


def names_of(machine: Machine) -> list[str]:
    return [card.visible_name for card in machine.cards]


def test_every_card_is_there_with_its_memory() -> None:
    machine = rows_to_machine(ROWS, {})
    assert [(card.name, card.total // MIB, card.free // MIB) for card in machine.cards] == [
        ("NVIDIA GeForce RTX 4090", 24564, 23012),
        ("NVIDIA H100 80GB HBM3", 81559, 81008),
        ("NVIDIA H100 80GB HBM3", 81559, 500),
    ]
    assert names_of(machine) == ["0", "1", "2"]


@pytest.mark.parametrize(
    ("visible", "totals"),
    [
        ("2,0", [81559, 24564]),  # in this order, which is torch's as well
        ("GPU-aaaa", [24564]),  # CUDA takes the beginning of an id
        ("1,-1,0", [81559]),  # CUDA stops at -1
        ("", []),
        ("GPU-bbbb", []),  # two cards begin so
        ("MIG-4f2c,0", []),  # a part of a card, whose memory the driver does not list
        ("7", []),
    ],
)
def test_only_visible_cards_count_and_keep_the_name_that_the_environment_gives_them(
    visible: str, totals: list[int]
) -> None:
    machine = rows_to_machine(ROWS, {"CUDA_VISIBLE_DEVICES": visible})
    assert [card.total // MIB for card in machine.cards] == totals
    assert names_of(machine) == visible.split(",")[: len(totals)]


def test_memory_that_the_driver_does_not_tell_is_no_card() -> None:
    assert rows_to_machine("0, GPU-1, NVIDIA GB10, [N/A], [N/A]\n", {}) == Machine()
    assert rows_to_machine("", {}) == Machine()


def test_a_server_sees_its_own_cards_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)
    environment = {"CUDA_VISIBLE_DEVICES": "1,2", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    assert visible_to_environment(["1", "2"]) == environment
    assert visible_to_environment([]) == {}


def test_the_driver_is_asked_for_what_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program in the driver's place, which prints the fields that it is asked for."""
    program = tmp_path / "nvidia-smi"
    program.write_text(
        "#!/bin/sh\n"
        "case $1 in --query-gpu=index,uuid,name,memory.total,memory.free) ;; *) exit 1;; esac\n"
        "[ $2 = --format=csv,noheader,nounits ] || exit 1\n"
        f"cat <<'END'\n{ROWS}END\n"
    )
    program.chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    for name in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "environ", os.environ.copy())
    assert names_of(read_machine()) == ["0", "1", "2"]
    assert os.environ["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"  # so that torch counts as the driver does
    program.write_text("#!/bin/sh\necho 'Failed to initialize NVML'\nexit 9\n")
    assert read_machine() == Machine()


def test_a_machine_without_a_driver_has_no_card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert read_machine() == Machine()
