"""A machine and its control groups, or a GPU -> how many bytes this process may still take; and freed ones given back.

Invariant: what cannot be read is None, never a guess. It knows nothing of models or options.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

_PAGE = os.sysconf("SC_PAGE_SIZE")
_NO_LIMIT = 2**60  # version 1 writes a number near 2^63 where there is no limit
_LARGE = 2**20  # bytes of a block that gets pages of its own
_MMAP_THRESHOLD = -3  # glibc's number for it
_THRESHOLD_VARIABLE = "MALLOC_MMAP_THRESHOLD_"
_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_active_file", "total_inactive_file"))
_V2 = ("memory.max", "memory.current", ("active_file", "inactive_file"))


def free_bytes(device: torch.device) -> int | None:
    """What this process may still allocate there; None where that is not told."""
    if device.type == "cuda":
        kept_by_torch = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + kept_by_torch
    return host_free_bytes()


def host_free_bytes(root: Path = Path("/")) -> int | None:
    """The least of what the kernel says is available and of what each control group above this process leaves.

    Args:
        root: where the kernel's file systems are found.
    """
    return min((*_available(root), *_rooms(root)), default=None)


def leaves_holes() -> bool:
    """Whether large blocks that this process frees stay with it, as glibc has it unless it is told a threshold.

    Holes of a size that nothing fits then take about as much as what is in use.
    """
    return _THRESHOLD_VARIABLE not in os.environ


def give_back_card_memory() -> None:
    """Gives the driver what torch has freed and keeps for itself, so that another process on the card can have it."""
    torch.cuda.empty_cache()  # does nothing where there is no card


def give_back_large_blocks() -> None:
    """From now on every large block that this process frees goes back to the machine.

    Each has its pages filled anew then, which takes time. A threshold in the environment stays what the user made it,
    and allocators other than glibc's stay as they are.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None and leaves_holes():
        mallopt(_MMAP_THRESHOLD, _LARGE)


def _available(root: Path) -> Iterator[int]:
    for line in _lines(root / "proc/meminfo"):
        name, _, rest = line.partition(":")
        if name == "MemAvailable":
            yield int(rest.split()[0]) * 1024


def _rooms(root: Path) -> Iterator[int]:
    """What each control group that this process is in, and each above it, leaves; those without a limit say nothing."""
    mounted, watermark = root / "sys/fs/cgroup", _low_watermark(root)
    for line in _lines(root / "proc/self/cgroup"):
        number, controllers, path = line.split(":", 2)
        if number == "0" and not controllers:
            top, names = mounted, _V2
        elif "memory" in controllers.split(","):
            top, names = mounted / "memory", _V1
        else:
            continue
        folder = top / path.strip().lstrip("/")
        # in a container the path may be that of the host, of which only the top is seen here
        for group in (folder, *folder.parents):
            yield from _room(group, *names, watermark=watermark)
            if group == top:
                break


def _room(group: Path, limit: str, usage: str, file_pages: Sequence[str], *, watermark: int) -> Iterator[int]:
    allowed, used = (_number(group / name) for name in (limit, usage))
    if allowed is None or used is None or allowed >= _NO_LIMIT:
        return
    # Pages of files are given back before anybody is killed, those in use too. Some of them stay, or the machine would
    # only read them again: as many as the kernel leaves out of MemAvailable, and at most half.
    counts = (line.split() for line in _lines(group / "memory.stat"))
    cached = sum(int(words[1]) for words in counts if len(words) == 2 and words[0] in file_pages)
    yield max(0, allowed - used + cached - min(cached // 2, watermark))


def _low_watermark(root: Path) -> int:
    """Bytes below which the kernel starts to take pages back; 0 where it does not tell."""
    lines = (line.split() for line in _lines(root / "proc/zoneinfo"))
    return _PAGE * sum(int(words[1]) for words in lines if len(words) == 2 and words[0] == "low")


def _number(path: Path) -> int | None:
    text = "".join(_lines(path)).strip()
    return int(text) if text.isdecimal() else None  # version 2 says "max" where there is no limit


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
