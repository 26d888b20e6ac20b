"""Serving options and a machine -> how vLLM runs on its cores: threads, processes, libraries, and how adapters apply.

What nobody chose is chosen here, from what the machine says of itself; docs/rollout-speed.md has the measurements
behind the choices. Invariant: no choice changes what is sampled but by roundings. It starts nothing and imports neither
torch nor vLLM.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from marft_bridge.errors import ServingError

_SYSTEM = Path("/sys/devices/system")
_LIBRARY_FOLDERS = tuple(f"/usr/{place}" for place in ("lib/x86_64-linux-gnu", "lib/aarch64-linux-gnu", "lib64", "lib"))
_ALLOCATORS = ("libtcmalloc_minimal.so.4", "libtcmalloc.so.4")
_BOUND = "VLLM_CPU_OMP_THREADS_BIND"  # vLLM's own choice of cores, one process each


class CpuOptions(BaseModel):
    """How the CPU build of vLLM uses the machine. What is left out is chosen for the machine."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    threads: int | None = Field(default=None, ge=1)
    """Threads of the engine's arithmetic; None is one for each physical core that this process may use."""
    worker: Literal["auto", "in_engine", "own_process"] = "auto"
    """Where the arithmetic runs. In a process of its own, the engine's spins on a core while it waits for it. `auto`:
    in the engine's, unless the cores belong to several memory nodes or VLLM_CPU_OMP_THREADS_BIND is set."""
    lora: Literal["auto", "grouped", "vllm"] = "auto"
    """How adapters are added to a layer's output: for all tokens at once (`auto`), or as vLLM does, token by token."""
    preload: tuple[str, ...] | None = None
    """Libraries that the server loads first. None: Intel's OpenMP, which comes with vLLM, and tcmalloc where the
    machine has it, unless LD_PRELOAD names one of their kind."""


@dataclass(frozen=True, slots=True)
class CpuPlan:
    """How one server runs on this machine."""

    cores: tuple[int, ...]
    in_engine: bool
    grouped: bool
    preload: tuple[str, ...]

    def argv(self) -> list[str]:
        """What it adds to the server's command line."""
        argv = []
        if self.in_engine:
            argv += ["--distributed-executor-backend", "marft_bridge.cpu_worker.InEngineExecutor"]
        if self.grouped:
            argv += ["--worker-cls", "marft_bridge.cpu_worker.GroupedLoraWorker"]
        return argv

    def environment(self, inherited: Mapping[str, str]) -> dict[str, str]:
        """What it adds to the server's environment."""
        env = {
            "OMP_NUM_THREADS": str(len(self.cores)),
            # ms that an idle thread spins: the collector and the trainer want these cores.
            "KMP_BLOCKTIME": "1",
            # By default vLLM keeps a core free: on two cores that halves the throughput. A user's own choice stays.
            "VLLM_CPU_NUM_OF_RESERVED_CPU": inherited.get("VLLM_CPU_NUM_OF_RESERVED_CPU", "0"),
            _BOUND: inherited.get(_BOUND, ",".join(map(str, self.cores))),
        }
        loaded = (*self.preload, *filter(None, (inherited.get("LD_PRELOAD"),)))
        return env | ({"LD_PRELOAD": ":".join(loaded)} if loaded else {})

    def __str__(self) -> str:
        where = "in the engine's process" if self.in_engine else "in a process of its own"
        how = "all at once" if self.grouped else "token by token"
        loaded = ", ".join(Path(library).name for library in self.preload) or "nothing"
        threads = f"{len(self.cores)} thread{'s' if len(self.cores) > 1 else ''}"
        return f"{threads} {where}, adapters added {how}, {loaded} preloaded"


def options_to_cpu_plan(options: CpuOptions, system: Path | None = None) -> CpuPlan:
    """The plan for this machine, as the kernel describes it; `system` is where it does.

    Raises:
        ServingError: more threads are asked for than there are CPUs.
    """
    system = system or _SYSTEM
    allowed = os.sched_getaffinity(0)
    cores = _one_per_core(allowed, system)
    if options.threads is not None:
        if options.threads > len(allowed):
            raise ServingError(f"serve.cpu.threads is {options.threads}, but there are {len(allowed)} CPUs to use")
        cores = (*cores, *sorted(allowed - set(cores)))[: options.threads]
    in_engine = options.worker == "in_engine"
    if options.worker == "auto":
        in_engine = _BOUND not in os.environ and len(_nodes_of(allowed, system)) <= 1
    preload = options.preload
    if preload is None:
        preload = _libraries(os.environ.get("LD_PRELOAD", ""), Path(sys.prefix) / "lib", _LIBRARY_FOLDERS)
    return CpuPlan(cores, in_engine, options.lora != "vllm", preload)


def _one_per_core(allowed: Collection[int], system: Path) -> tuple[int, ...]:
    """One logical CPU of each physical core: two threads on one core share the units that the arithmetic needs."""
    first: dict[str, int] = {}
    for cpu in sorted(allowed):
        try:
            core = (system / f"cpu/cpu{cpu}/topology/thread_siblings_list").read_text().strip()
        except OSError:
            core = str(cpu)  # a kernel that does not say
        first.setdefault(core, cpu)
    return tuple(first.values())


def _nodes_of(allowed: Collection[int], system: Path) -> list[str]:
    """The memory nodes that these CPUs belong to; none where the kernel does not say."""
    links = ((node.name, cpu) for cpu in allowed for node in (system / f"cpu/cpu{cpu}").glob("node[0-9]*"))
    return sorted({name for name, _ in links})


def _libraries(preloaded: str, environment: Path, folders: Sequence[str]) -> tuple[str, ...]:
    found = []
    openmp = environment / "libiomp5.so"
    if openmp.is_file() and "omp" not in preloaded:
        found.append(str(openmp))
    if "malloc" not in preloaded:
        places = (Path(folder) / name for name in _ALLOCATORS for folder in folders)
        found += [str(place) for place in places if place.is_file()][:1]
    return tuple(found)
