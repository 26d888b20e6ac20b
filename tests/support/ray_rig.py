"""A Ray cluster that somebody else started: several nodes on loopback, in a process of its own.

The nodes share this machine, but each has what a machine of a cluster has: a raylet, worker processes below it, and
CPUs that Ray counts. As a program it obeys lines on standard input, and ends with that input; `cluster_in` starts it.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

LOOPBACK = "127.0.0.1"
CPUS = 2  # of one node, where a test does not say otherwise
# Ray would replace the address of loopback by the machine's own. A cluster with a token lets in who has it.
SURROUNDINGS = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN": "a-token-of-the-tests-0123456789abcdef",
}


class SomebodysCluster:
    """What its owner can see, and do to it."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.address: str
        self.raylets: list[int]  # process ids, the head's first
        self._hear()

    def have_nodes(self, count: int) -> None:
        """Adds nodes, or takes the newest ones away without a warning, as a power cut does."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{count}\n")
        self._process.stdin.flush()
        self._hear()

    def _hear(self) -> None:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"the cluster ended with {self._process.wait(60)}"
        self.address, self.raylets = json.loads(line)


@contextmanager
def cluster_in(folder: Path, environment: Mapping[str, str], cpus: int = CPUS) -> Iterator[SomebodysCluster]:
    """A cluster of one node whose processes work in `folder` and have these variables, until the block ends."""
    place = tempfile.mkdtemp(prefix="ray")  # short: Ray's sockets lie in it
    command = [sys.executable, __file__, str(cpus)]
    with (folder / "ray.log").open("w") as log:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env={**os.environ, **environment, **SURROUNDINGS, "RAY_TMPDIR": place},
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
        )
    try:
        yield SomebodysCluster(process)
    finally:
        try:
            process.communicate(timeout=120)  # closes its input
        finally:
            process.kill()
            process.wait()
            shutil.rmtree(place, ignore_errors=True)


def _main() -> None:
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # Ray prints
    import psutil
    from ray.cluster_utils import Cluster

    cluster = Cluster()
    nodes = []

    def add() -> None:
        nodes.append(
            cluster.add_node(
                num_cpus=int(sys.argv[1]),
                node_ip_address=LOOPBACK,
                object_store_memory=80 * 2**20,
                include_dashboard=False,
                dashboard_agent_listen_port=0,
            )
        )

    def tell() -> None:
        raylets = [node.all_processes["raylet"][0].process.pid for node in nodes]
        replies.write(json.dumps([cluster.address, raylets]) + "\n")
        replies.flush()

    add()
    tell()
    for line in sys.stdin:
        while len(nodes) < int(line):
            add()
        while len(nodes) > int(line):
            lost = nodes.pop()
            processes = psutil.Process(lost.all_processes["raylet"][0].process.pid).children(recursive=True)
            cluster.remove_node(lost, allow_graceful=False)
            for process in processes:  # they would go on for a moment, as those of a machine without power do not
                with suppress(psutil.NoSuchProcess):
                    process.kill()
            psutil.wait_procs(processes, 60)
        tell()
    cluster.shutdown()


if __name__ == "__main__":
    _main()
