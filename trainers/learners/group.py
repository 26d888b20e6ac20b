"""Processes that were started together -> one process group.

Sums go through gloo between CPUs and through NCCL between GPUs; calls always through gloo. Invariant: both keep to the
loopback interface, whatever the machine's own name leads to, or to that of the address at which all of them meet.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.rendezvous import rendezvous

from trainers.common.workers import Workers, meeting

if TYPE_CHECKING:  # `torch.distributed` has it, and does not say so to type checkers
    from torch._C._distributed_c10d import TCPStore

_PATIENCE = timedelta(minutes=10)  # with the others, where all of them compute and none waits for a rollout
_CONNECT_PATIENCE = timedelta(seconds=60)  # with the address of the first process
_TORCHRUN_PATIENCE = timedelta(days=14)  # with the first process of torchrun, which ends all where that one ends
_FIRST_IS_HERE = "marft/first"  # a key in torchrun's store
_INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
_SIOCGIFADDR = 0x8915  # Linux's request for the IPv4 address of an interface


def join_group(rank: int, count: int, *, meeting_place: str) -> None:
    """Joins the process group of this machine; returns once all are there.

    Args:
        meeting_place: for torch: `file://PATH` of a file that is not there yet.

    Raises:
        LostProcessError: the others did not come.
    """
    _use_loopback()
    _join(rank, count, init_method=meeting_place)


def join_torchrun_group(rank: int, count: int) -> None:
    """Joins the process group of torchrun's processes, all on this machine; returns once all are there.

    The first one comes when it likes: it looks at models and stores before, for as long as that takes.

    Raises:
        LostProcessError: the others did not come.
    """
    _use_loopback()
    patience = _PATIENCE if rank == 0 else _TORCHRUN_PATIENCE
    with meeting():
        meet: Any = rendezvous  # which torch leaves without types
        store, _, _ = next(meet("env://", rank, count, timeout=patience))
        if rank == 0:
            store.set(_FIRST_IS_HERE, b"1")
        else:
            store.wait([_FIRST_IS_HERE], patience)
    store.set_timeout(_PATIENCE)
    _join(rank, count, store=store)


def listen_at(host: str, count: int) -> TCPStore:
    """Where the first process of a group over several machines is met: a free port (`.port`) of one of its addresses.

    torch would listen on every interface of the machine; with a socket of ours it listens at that address only.

    Raises:
        OSError: the address is not this machine's.
    """
    family = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][0]
    with socket.socket(family, socket.SOCK_STREAM) as bound:
        bound.bind((host, 0))
        port = bound.getsockname()[1]
        store: TCPStore = dist.TCPStore(  # type: ignore[attr-defined]
            host,
            port,
            count,
            is_master=True,
            timeout=_PATIENCE,
            wait_for_workers=False,
            master_listen_fd=bound.detach(),
        )
    return store


def connect_to(host: str, port: int, count: int) -> TCPStore:
    """The other end of `listen_at`, in every other process.

    Raises:
        LostProcessError: nobody answers there.
    """
    with meeting():
        store: TCPStore = dist.TCPStore(  # type: ignore[attr-defined]
            host, port, count, is_master=False, timeout=_CONNECT_PATIENCE, wait_for_workers=False
        )
    store.set_timeout(_PATIENCE)
    return store


def join_group_at(rank: int, count: int, *, store: TCPStore, own_host: str) -> None:
    """Joins the process group over several machines; returns once all are there.

    Args:
        store: from `listen_at` or `connect_to`.
        own_host: this machine's address among the others.

    Raises:
        LostProcessError: the others did not come.
    """
    _use_interface(interface_of(own_host))
    _join(rank, count, store=store)


def interface_of(host: str) -> str | None:
    """The network interface that has an IPv4 address; None where none has it, or it is no such address."""
    try:
        address = socket.inet_aton(socket.gethostbyname(host))
    except OSError:
        return None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:  # it has no address
                continue
            if answer[20:24] == address:
                return name
    return None


def _use_loopback() -> None:
    _use_interface(next((name for _, name in socket.if_nameindex() if name.startswith("lo")), None))


def _use_interface(name: str | None) -> None:
    for variable in _INTERFACES:
        if name is not None:
            os.environ.setdefault(variable, name)


def _join(rank: int, count: int, **meeting_place: Any) -> None:
    # else NCCL's own watchdog ends this process, without a word to the user, where another one has ended
    os.environ.setdefault("TORCH_NCCL_BLOCKING_WAIT", "1")
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    with meeting():
        dist.init_process_group(backend, rank=rank, world_size=count, timeout=_PATIENCE, **meeting_place)


def workers_on(device: str, sharers: Sequence[int]) -> Workers:
    """This process among those of the group that it has joined, computing on `device`.

    Args:
        sharers: by rank, how many processes of the group share the machine that each is on.
    """
    rank = dist.get_rank()
    return Workers(rank, dist.get_world_size(), torch.device(device), sharers=sharers[rank])


def leave_group() -> None:
    """Leaves the process group, if one was joined."""
    if dist.is_initialized():
        dist.destroy_process_group()


def break_off_group() -> None:
    """Closes the connections to the others, whatever is still under way, so that none of them waits for this process.

    `leave_group` may wait for them by NCCL. Does nothing where no group was joined, or it was left.
    """
    if dist.is_initialized():
        with suppress(Exception):  # a private name, called on the way out: the learner's own error is what counts
            distributed_c10d._abort_process_group()  # torch's public calls may wait for the others, too
