"""Serving options and a machine -> how vLLM runs on its cores: threads, processes, libraries, and how adapters apply.

Options that are not set are chosen here, from the kernel's description of the machine; docs/speed.md has the
measurements behind the choices. Invariant: no choice changes what is sampled by more than rounding. Imports neither
torch nor vLLM.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from marft_bridge.common.errors import ServingError
from marft_bridge.config.serve import CpuOptions

_SYSTEM = Path("/sys/devices/system")
_LIBRARY_FOLDERS = tuple(f"/usr/{name}" for name in ("lib/x86_64-linux-gnu", "lib/aarch64-linux-gnu", "lib64", "lib"))
_ALLOCATORS = ("libtcmalloc_minimal.so.4", "libtcmalloc.so.4")
_BIND_VARIABLE = "VLLM_CPU_OMP_THREADS_BIND"  # vLLM's own choice of cores, one process each


@dataclass(frozen=True, slots=True)
class CpuPlan:
    """How one server runs on the cores of this machine."""

    cores: tuple[int, ...]  # logical CPUs, one thread each
    in_engine: bool  # the worker runs in the engine's process
    grouped_lora: bool  # adapters are added by `grouped_lora`, not by vLLM's own operations
    preload: tuple[str, ...]  # paths of libraries for LD_PRELOAD

    def argv(self) -> list[str]:
        """Arguments to add to the server's command line."""
        argv = []
        if self.in_engine:
            argv += ["--distributed-executor-backend", "marft_bridge.serving.cpu.worker.InEngineExecutor"]
        if self.grouped_lora:
            argv += ["--worker-cls", "marft_bridge.serving.cpu.worker.GroupedLoraWorker"]
        return argv

    def environment(self, inherited: Mapping[str, str]) -> dict[str, str]:
        """Variables to add to the server's environment; `inherited` is that of this process."""
        env = {
            "OMP_NUM_THREADS": str(len(self.cores)),
            # ms that an idle thread spins: the collector and the trainer want these cores.
            "KMP_BLOCKTIME": "1",
            # By default vLLM keeps a core free: on two cores that halves the throughput. A user's own choice stays.
            "VLLM_CPU_NUM_OF_RESERVED_CPU": inherited.get("VLLM_CPU_NUM_OF_RESERVED_CPU", "0"),
            _BIND_VARIABLE: inherited.get(_BIND_VARIABLE, ",".join(map(str, self.cores))),
        }
        libraries = (*self.preload, *filter(None, (inherited.get("LD_PRELOAD"),)))
        return env | ({"LD_PRELOAD": ":".join(libraries)} if libraries else {})

    def __str__(self) -> str:
        process = "in the engine's process" if self.in_engine else "in a process of its own"
        method = "all at once" if self.grouped_lora else "token by token"
        libraries = ", ".join(Path(library).name for library in self.preload) or "nothing"
        threads = f"{len(self.cores)} thread{'s' if len(self.cores) > 1 else ''}"
        return f"{threads} {process}, adapters added {method}, {libraries} preloaded"


def options_to_cpu_plan(options: CpuOptions, system: Path | None = None) -> CpuPlan:
    """The plan for this machine, as the kernel describes it in `system` (/sys/devices/system by default).

    Raises:
        ServingError: the options set more threads than there are CPUs.
    """
    system = system or _SYSTEM
    allowed = os.sched_getaffinity(0)
    cores = _first_cpu_of_cores(allowed, system)
    if options.threads is not None:
        if options.threads > len(allowed):
            raise ServingError(f"serve.cpu.threads is {options.threads}, but there are {len(allowed)} CPUs to use")
        cores = (*cores, *sorted(allowed - set(cores)))[: options.threads]
    in_engine = options.worker == "in_engine"
    if options.worker == "auto":
        in_engine = _BIND_VARIABLE not in os.environ and len(_memory_nodes(allowed, system)) <= 1
    preload = options.preload
    if preload is None:
        preload = _find_libraries(os.environ.get("LD_PRELOAD", ""), Path(sys.prefix) / "lib", _LIBRARY_FOLDERS)
    return CpuPlan(cores, in_engine, options.lora != "vllm", preload=preload)


def _first_cpu_of_cores(allowed: Collection[int], system: Path) -> tuple[int, ...]:
    """One logical CPU of each physical core: two threads on one core share the units that the arithmetic needs."""
    first_cpus: dict[str, int] = {}  # by core
    for cpu in sorted(allowed):
        try:
            core = (system / f"cpu/cpu{cpu}/topology/thread_siblings_list").read_text().strip()
        except OSError:
            core = str(cpu)  # a kernel that does not say
        first_cpus.setdefault(core, cpu)
    return tuple(first_cpus.values())


def _memory_nodes(allowed: Collection[int], system: Path) -> list[str]:
    """The memory nodes that these CPUs belong to; none where the kernel does not say."""
    links = ((node.name, cpu) for cpu in allowed for node in (system / f"cpu/cpu{cpu}").glob("node[0-9]*"))
    return sorted({name for name, _ in links})


def _find_libraries(preloaded: str, environment_lib: Path, folders: Sequence[str]) -> tuple[str, ...]:
    """Intel's OpenMP and an allocator, each where the machine has it and `preloaded` holds none of its kind yet."""
    libraries = []
    openmp = environment_lib / "libiomp5.so"
    if openmp.is_file() and "omp" not in preloaded:
        libraries.append(str(openmp))
    if "malloc" not in preloaded:
        candidates = (Path(folder) / name for name in _ALLOCATORS for folder in folders)
        libraries += [str(candidate) for candidate in candidates if candidate.is_file()][:1]
    return tuple(libraries)
