"""Owns: the driver's answer and CUDA_VISIBLE_DEVICES become the cards that this process may use, in CUDA's order.

What the driver does not list is asked of torch, by a process of its own.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from support.paths import ROOT

from marft_bridge.devices import machine as machine_module
from marft_bridge.devices.machine import Machine, ask_torch, read_machine, rows_to_machine, visible_to_environment
from trainers.common.card_order import card_order, count_cards_as_driver

MIB = 2**20
# as `nvidia-smi --query-gpu=index,uuid,name,memory.total,memory.free,mig.mode.current --format=csv,noheader,nounits`
# prints them
ROWS = """\
0, GPU-aaaa1111-0000, NVIDIA GeForce RTX 4090, 24564, 23012, [N/A]
1, GPU-bbbb2222-0000, NVIDIA H100 80GB HBM3, 81559, 81008, Disabled
2, GPU-bbbb3333-0000, NVIDIA H100 80GB HBM3, 81559, 500, Disabled
"""
IDS = ["GPU-aaaa1111-0000", "GPU-bbbb2222-0000", "GPU-bbbb3333-0000"]
DIVIDED = "3, GPU-cccc, NVIDIA A100-SXM4-40GB, 40960, 40000, Enabled\n"
UNTOLD = "3, GPU-cccc, NVIDIA GB10, [N/A], [N/A], [N/A]\n"
LOST = "3, GPU-cccc, [GPU is lost], 15360, 15000, [GPU is lost]\n"


def put_in_place_of_the_driver(program: Path, monkeypatch: pytest.MonkeyPatch, *, rows: str) -> None:
    """A program that prints the fields that it is asked for, and an environment that may be changed."""
    program.write_text(
        "#!/bin/sh\n"
        "case $1 in --query-gpu=index,uuid,name,memory.total,memory.free,mig.mode.current) ;; *) exit 1;; esac\n"
        "[ $2 = --format=csv,noheader,nounits ] || exit 1\n"
        f"cat <<'END'\n{rows}END\n"
    )
    program.chmod(0o700)
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
    for name in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "environ", os.environ.copy())


def names_of(machine: Machine) -> list[str]:
    return [card.visible_name for card in machine.cards]


def test_every_card_is_there_with_its_memory() -> None:
    machine = rows_to_machine(ROWS, {})
    assert [(card.name, card.total // MIB, card.free // MIB) for card in machine.cards] == [
        ("NVIDIA GeForce RTX 4090", 24564, 23012),
        ("NVIDIA H100 80GB HBM3", 81559, 81008),
        ("NVIDIA H100 80GB HBM3", 81559, 500),
    ]
    assert names_of(machine) == IDS  # by which a server's process finds it however that counts
    assert [card.other_names for card in machine.cards] == [("0",), ("1",), ("2",)]
    assert machine.notes == ()


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
        ("0,7,1", [24564]),  # what follows a card that is not there is not visible
        ("0,,1", [24564]),
        ("1,1", []),
        ("1,0,GPU-bbbb2", []),  # the same one again
        (" 1 ,0", [81559, 24564]),
        ("NoDevFiles", []),
    ],
)
def test_only_visible_cards_count_as_cuda_counts_them(visible: str, totals: list[int]) -> None:
    machine = rows_to_machine(ROWS, {"CUDA_VISIBLE_DEVICES": visible})
    assert [card.total // MIB for card in machine.cards] == totals
    named = [name.strip() for name in visible.split(",")]
    assert [card.other_names[-1] for card in machine.cards] == named[: len(totals)]


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (DIVIDED, "it is divided into parts (MIG); name one of them in CUDA_VISIBLE_DEVICES to use it"),
        (UNTOLD, "the driver does not tell its memory"),
        (LOST, "the driver says [GPU is lost] in place of its name"),
    ],
    ids=["divided", "untold", "lost"],
)
def test_a_card_that_cannot_be_planned_is_left_out_and_the_others_are_there(row: str, said: str) -> None:
    for text in (ROWS + row, row + ROWS):
        machine = rows_to_machine(text, {})
        assert names_of(machine) == IDS
        assert machine.notes == (f"card 3 of nvidia-smi is left out: {said}",)
    assert rows_to_machine(ROWS + row, {"CUDA_VISIBLE_DEVICES": "0,1"}).notes == ()
    alone = rows_to_machine(row, {})
    assert (alone.cards, len(alone.notes)) == ((), 1)
    assert rows_to_machine("", {}) == Machine()


def test_torch_counts_only_the_cards_that_are_planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else `cuda:0` would be the divided card, and the first one here `cuda:1`."""
    put_in_place_of_the_driver(tmp_path / "nvidia-smi", monkeypatch, rows=DIVIDED + ROWS)
    assert names_of(read_machine()) == IDS
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ",".join(IDS)
    assert names_of(read_machine()) == IDS


def test_an_order_other_than_the_drivers_is_overruled_and_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_in_place_of_the_driver(tmp_path / "nvidia-smi", monkeypatch, rows=ROWS)
    os.environ["CUDA_DEVICE_ORDER"] = "FASTEST_FIRST"
    assert read_machine().notes == (
        "cards are counted as nvidia-smi does, and not by CUDA_DEVICE_ORDER = FASTEST_FIRST",
    )
    assert os.environ["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    os.environ["CUDA_DEVICE_ORDER"] = "FASTEST_FIRST"
    assert visible_to_environment(["1"])["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"


@pytest.mark.parametrize(
    ("visible", "names"),
    [(None, ["0", "1"]), ("MIG-4f2c", ["MIG-4f2c"]), ("3,5,9", ["3", "5"])],
    ids=["all", "a part of a card", "two of three are there"],
)
def test_torch_tells_what_the_driver_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, visible: str | None, names: list[str]
) -> None:
    """Asked in a process of its own, with a module in torch's place."""
    (tmp_path / "torch.py").write_text(
        "class cuda:\n"
        f"    device_count = lambda: {len(names)}\n"
        "    mem_get_info = lambda i: (1000 - i, 2000)\n"
        "    get_device_name = lambda i: f'H100 MIG {i}'\n"
        "print('a warning')\n"
    )
    put_in_place_of_the_driver(tmp_path / "nvidia-smi", monkeypatch, rows="")
    os.environ["PYTHONPATH"] = str(tmp_path)
    if visible is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = visible
    monkeypatch.setattr(machine_module, "has_driver", lambda: False)
    assert ask_torch() == Machine()
    monkeypatch.setattr(machine_module, "has_driver", lambda: True)
    machine = ask_torch()
    assert [(card.name, card.total, card.free, card.visible_name) for card in machine.cards] == [
        (f"H100 MIG {number}", 2000, 1000 - number, name) for number, name in enumerate(names)
    ]
    assert machine.host_free is not None
    (tmp_path / "torch.py").write_text("raise RuntimeError('CUDA error')\n")
    assert ask_torch() == Machine()


def test_a_server_sees_its_own_cards_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)
    environment = {"CUDA_VISIBLE_DEVICES": "1,2", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    assert visible_to_environment(["1", "2"]) == environment
    assert visible_to_environment([]) == {}


def test_the_driver_is_asked_for_what_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvidia-smi"
    put_in_place_of_the_driver(program, monkeypatch, rows=ROWS)
    machine = read_machine()
    assert names_of(machine) == IDS
    assert machine.host_free is not None
    assert "CUDA_VISIBLE_DEVICES" not in os.environ  # torch sees the same ones
    assert os.environ["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"  # so that torch counts as the driver does
    program.write_text("#!/bin/sh\necho 'Failed to initialize NVML'\nexit 9\n")
    assert read_machine() == Machine()


def test_a_machine_without_a_driver_has_no_card_and_torch_is_to_count_as_a_driver_would(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", os.environ | {"PATH": str(tmp_path), "CUDA_DEVICE_ORDER": "FASTEST_FIRST"})
    assert read_machine() == Machine()
    assert card_order() == "PCI_BUS_ID"


def test_where_ray_numbers_the_cards_its_order_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "FASTEST_FIRST")
    count_cards_as_driver()
    assert card_order() == "FASTEST_FIRST"


def test_one_module_knows_how_the_order_is_set() -> None:
    sources = [path for package in ("marft_bridge", "trainers") for path in (ROOT / package).rglob("*.py")]
    naming = [path.name for path in sources if '"CUDA_DEVICE_ORDER"' in path.read_text()]
    assert naming == ["card_order.py"]
