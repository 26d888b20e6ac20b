"""NVIDIA's driver and CUDA_VISIBLE_DEVICES -> the cards that this process may use, in CUDA's order.

Asked with `nvidia-smi`: torch would keep a context on every card that it looks at. Where that lists none, a process of
its own asks torch, and gives the context back as it ends.

Invariants: what cannot be read is no card, never a guess, and it is said; the position of a card is its number in
torch, and the driver's order is CUDA's. It knows nothing of models.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from trainers.common.card_order import DRIVER_ORDER, ORDER_VARIABLE, count_cards_as_driver

_QUERY = "index,uuid,name,memory.total,memory.free,mig.mode.current"
_TIMEOUT_S = 30.0  # a driver that has to start takes some seconds
_TORCH_TIMEOUT_S = 120.0  # from a cold disk
_VISIBLE = "CUDA_VISIBLE_DEVICES"
_PART = "MIG-"  # so begins the name of a part of a card
_TORCH_PROGRAM = """\
import json, torch
cards = []
for i in range(torch.cuda.device_count()):
    free, total = torch.cuda.mem_get_info(i)
    cards.append([torch.cuda.get_device_name(i), total, free])
print(json.dumps(cards))
"""


@dataclass(frozen=True, slots=True)
class Card:
    """One GPU, in bytes."""

    name: str
    total: int
    free: int
    visible_name: str  # what a server's CUDA_VISIBLE_DEVICES calls it: the driver's id of it where that is known
    other_names: tuple[str, ...] = ()  # what others may call it: its number, the beginning of its id


@dataclass(frozen=True, slots=True)
class Machine:
    """The cards that this process may use; the position of a card is its number in options and in torch."""

    cards: tuple[Card, ...] = ()
    host_free: int | None = None  # bytes of main memory that processes may still take; None where that is not told
    notes: tuple[str, ...] = ()  # what is to be said of cards that are left out, or counted otherwise


@dataclass(frozen=True, slots=True)
class _Row:
    """What the driver says of one card."""

    index: str
    uuid: str
    card: Card | None
    fault: str = ""  # why there is no card


def read_machine() -> Machine:
    """The cards of this machine. CUDA counts them as the driver does from here on, and those that are left out not."""
    text = ask_driver(_QUERY)
    machine = Machine() if text is None else rows_to_machine(text, os.environ)
    count_cards_as_driver(overrule=True)
    if text is not None and machine.cards and len(machine.cards) < len(_visible_rows(text, os.environ)):
        os.environ[_VISIBLE] = ",".join(card.visible_name for card in machine.cards)
    return with_host_memory(machine)


def ask_torch() -> Machine:
    """The cards that torch sees: for where the driver lists none, as a part of a card (MIG) or in a container.

    Only for a command that uses a card anyway, since for a moment it takes some of its memory.
    """
    if not has_driver():
        return Machine()
    count_cards_as_driver(overrule=True)
    try:
        answer = subprocess.run(
            [sys.executable, "-c", _TORCH_PROGRAM],
            env=os.environ,
            capture_output=True,
            text=True,
            timeout=_TORCH_TIMEOUT_S,
            check=True,
        )
        rows = json.loads(answer.stdout.splitlines()[-1])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return Machine()
    names = _visible_names(os.environ) or [str(number) for number in range(len(rows))]
    cards = tuple(
        Card(name, total, free, visible_name=visible_name)
        for (name, total, free), visible_name in zip(rows, names, strict=False)
    )
    return with_host_memory(Machine(cards))


def has_driver() -> bool:
    """Whether the driver's library is here, without which torch sees no card and need not be asked."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def with_host_memory(machine: Machine) -> Machine:
    """The same, with what is free of main memory; without a card nobody asks for it."""
    if not machine.cards:
        return machine
    from trainers.common.free_memory import host_free_bytes  # late: it imports torch, which takes seconds

    return replace(machine, host_free=host_free_bytes())


def rows_to_machine(text: str, environment: Mapping[str, str]) -> Machine:
    """Answers of `nvidia-smi`, one card a line -> the cards that the environment leaves visible, in its order.

    No cards where CUDA_VISIBLE_DEVICES names a part of one (MIG), or one twice; those from a name on that the driver
    did not list are not visible either. A card that is divided into parts, or whose memory is not told, is left out.
    """
    rows = _visible_rows(text, environment)
    notes = [f"card {row.index} of nvidia-smi is left out: {row.fault}" for row in rows if row.card is None]
    if (order := environment.get(ORDER_VARIABLE, DRIVER_ORDER)) != DRIVER_ORDER:
        notes.insert(0, f"cards are counted as nvidia-smi does, and not by {ORDER_VARIABLE} = {order}")
    return Machine(tuple(row.card for row in rows if row.card is not None), notes=tuple(notes))


def visible_to_environment(visible_names: Sequence[str]) -> dict[str, str]:
    """What a process that may use these cards only has in its environment; nothing for no names."""
    return {_VISIBLE: ",".join(visible_names), ORDER_VARIABLE: DRIVER_ORDER} if visible_names else {}


def _visible_names(environment: Mapping[str, str]) -> list[str] | None:
    """What CUDA_VISIBLE_DEVICES names; None where it is not set."""
    visible = environment.get(_VISIBLE)
    return None if visible is None else [name.strip() for name in visible.split(",")]


def _visible_rows(text: str, environment: Mapping[str, str]) -> list[_Row]:
    """The cards that CUDA may count, with those that are left out here."""
    rows = [row for line in text.splitlines() if (row := _line_to_row(line)) is not None]
    names = _visible_names(environment)
    return rows if names is None else _pick_rows(rows, names)


def _line_to_row(line: str) -> _Row | None:
    """None for a line that is about no card."""
    fields = line.strip().split(", ")
    if len(fields) < 2 or not fields[0].isdecimal():
        return None
    index, uuid, *rest = fields
    try:
        name, total_mib, free_mib, parts = rest
        card = Card(name, int(total_mib) << 20, int(free_mib) << 20, visible_name=uuid, other_names=(index,))
    except ValueError:
        return _Row(index, uuid, None, fault="the driver does not tell its memory")
    if name.startswith("["):
        return _Row(index, uuid, None, fault=f"the driver says {name} in place of its name")
    if parts == "Enabled":
        return _Row(
            index, uuid, None, fault=f"it is divided into parts (MIG); name one of them in {_VISIBLE} to use it"
        )
    return _Row(index, uuid, card)


def _pick_rows(rows: Sequence[_Row], names: Sequence[str]) -> list[_Row]:
    """The rows that CUDA would show to a process whose CUDA_VISIBLE_DEVICES names these."""
    picked: list[_Row] = []
    for name in names:
        if name.startswith(_PART):
            return []
        matches = [row for row in rows if name == row.index or (name.startswith("GPU-") and row.uuid.startswith(name))]
        if len(matches) != 1:  # also "-1"; CUDA ignores what follows
            break
        row = matches[0]
        if row.uuid in [other.uuid for other in picked]:
            return []
        if row.card is not None:
            row = replace(row, card=replace(row.card, other_names=(row.index, name)))
        picked.append(row)
    return picked


def ask_driver(query: str) -> str | None:
    """What the driver tells of each card, a line each without units; None where there is none.

    Args:
        query: the fields, as `nvidia-smi --query-gpu` names them.
    """
    command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout
