"""Processes that were started together -> one process group.

Sums go through gloo between CPUs and through NCCL between GPUs; calls always through gloo. Invariant: both keep to the
loopback interface, whatever the machine's own name leads to.
"""

from __future__ import annotations

import os
import socket
from datetime import timedelta

import torch
import torch.distributed as dist

from trainers.common.workers import Workers, meeting

_PATIENCE = timedelta(minutes=10)  # with the others, where all of them compute and none waits for a rollout
_INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def join_group(rank: int, count: int, *, meeting_place: str) -> None:
    """Joins the process group; returns once all are there.

    Args:
        meeting_place: for torch: `env://` where torchrun tells it, `file://PATH` of a file that is not there yet.

    Raises:
        LostProcessError: the others did not come.
    """
    loopback = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), None)
    for variable in _INTERFACES:
        if loopback is not None:
            os.environ.setdefault(variable, loopback)
    # else NCCL's own watchdog ends this process, without a word to the user, where another one has ended
    os.environ.setdefault("TORCH_NCCL_BLOCKING_WAIT", "1")
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    with meeting():
        dist.init_process_group(backend, init_method=meeting_place, rank=rank, world_size=count, timeout=_PATIENCE)


def workers_on(device: str) -> Workers:
    """This process among those of the group that it has joined, computing on `device`."""
    return Workers(dist.get_rank(), dist.get_world_size(), torch.device(device))


def leave_group() -> None:
    """Leaves the process group, if one was joined."""
    if dist.is_initialized():
        dist.destroy_process_group()
