"""Owns: how the CPU engine uses a machine is chosen from what the machine says, each choice can be overruled, and the
server's command line, environment and log say what was chosen."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from pydantic import ValidationError

from marft_bridge.common.errors import ServingError
from marft_bridge.config.serve import CpuOptions, ServeOptions
from marft_bridge.serving.cpu import plan as cpu_plan
from marft_bridge.serving.cpu.plan import options_to_cpu_plan
from marft_bridge.serving.vllm_arguments import server_argv, server_environment

BOUND = "VLLM_CPU_OMP_THREADS_BIND"


@pytest.fixture(autouse=True)
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Four CPUs on two cores of one memory node; no library but those that a test puts there."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "venv"))
    monkeypatch.setattr(cpu_plan, "_LIBRARY_FOLDERS", (str(tmp_path / "lib"),))
    for name in (BOUND, "LD_PRELOAD", "VLLM_CPU_NUM_OF_RESERVED_CPU"):
        monkeypatch.delenv(name, raising=False)
    system = tmp_path / "system"
    for cpu, siblings in enumerate(("0,2", "1,3", "0,2", "1,3")):
        topology = system / f"cpu/cpu{cpu}/topology"
        topology.mkdir(parents=True)
        (topology / "thread_siblings_list").write_text(siblings + "\n")
        (topology.parent / "node0").mkdir()
    monkeypatch.setattr(cpu_plan, "_SYSTEM", system)
    return system


def put(path: Path) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"")
    return str(path)


def test_a_thread_runs_on_each_physical_core_that_may_be_used(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert options_to_cpu_plan(CpuOptions(), machine).cores == (0, 1)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {1, 2, 3})
    assert options_to_cpu_plan(CpuOptions(), machine).cores == (1, 2)
    silent = machine / "a kernel that says nothing"
    assert options_to_cpu_plan(CpuOptions(), silent).cores == (1, 2, 3)


def test_threads_can_be_set_up_to_what_there_is(machine: Path) -> None:
    cores = [options_to_cpu_plan(CpuOptions(threads=count), machine).cores for count in (1, 2, 3, 4)]
    assert cores == [(0,), (0, 1), (0, 1, 2), (0, 1, 2, 3)]
    with pytest.raises(ServingError, match=r"serve\.cpu\.threads is 5, but there are 4 CPUs"):
        options_to_cpu_plan(CpuOptions(threads=5), machine)
    with pytest.raises(ValidationError, match="threads"):
        CpuOptions(threads=0)


def test_the_worker_is_in_the_engine_but_on_several_memory_nodes_or_where_threads_are_bound(
    machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def in_engine(**options: str) -> bool:
        return options_to_cpu_plan(CpuOptions(**options), machine).in_engine  # type: ignore[arg-type]

    assert in_engine()
    assert not in_engine(worker="own_process")
    monkeypatch.setenv(BOUND, "0-1")
    assert not in_engine()
    assert in_engine(worker="in_engine")
    monkeypatch.delenv(BOUND)
    (machine / "cpu/cpu3/node0").rmdir()
    (machine / "cpu/cpu3/node1").mkdir()
    assert not in_engine()


def test_openmp_and_an_allocator_are_preloaded_where_they_are_and_nothing_of_their_kind_is(
    machine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert options_to_cpu_plan(CpuOptions(), machine).preload == ()
    openmp, malloc = put(tmp_path / "venv/lib/libiomp5.so"), put(tmp_path / "lib/libtcmalloc_minimal.so.4")
    assert options_to_cpu_plan(CpuOptions(), machine).preload == (openmp, malloc)
    assert options_to_cpu_plan(CpuOptions(preload=()), machine).preload == ()
    assert options_to_cpu_plan(CpuOptions(preload=("mine.so",)), machine).preload == ("mine.so",)
    monkeypatch.setenv("LD_PRELOAD", "libgomp.so.1")
    plan = options_to_cpu_plan(CpuOptions(), machine)
    assert plan.preload == (malloc,)
    assert plan.environment(os.environ)["LD_PRELOAD"] == f"{malloc}:libgomp.so.1"
    monkeypatch.setenv("LD_PRELOAD", "libjemalloc.so.2")
    assert options_to_cpu_plan(CpuOptions(), machine).preload == (openmp,)


def test_the_command_line_and_the_environment_follow_the_plan(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tuned = server_argv(ServeOptions(), Path("model"), 1, cpu=True)
    assert tuned[tuned.index("--worker-cls") + 1] == "marft_bridge.serving.cpu.worker.GroupedLoraWorker"
    assert (
        tuned[tuned.index("--distributed-executor-backend") + 1] == "marft_bridge.serving.cpu.worker.InEngineExecutor"
    )
    options = CpuOptions(worker="own_process", lora="vllm", threads=1)
    plain = server_argv(ServeOptions(cpu=options), Path("model"), 1, cpu=True)
    assert not {"--worker-cls", "--distributed-executor-backend"} & set(plain)
    assert not {"--worker-cls", "--distributed-executor-backend"} & set(
        server_argv(ServeOptions(), Path("m"), 1, False)
    )
    assert server_environment("key", cpu=True)["OMP_NUM_THREADS"] == "2"
    env = server_environment("key", True, options)
    assert (env["OMP_NUM_THREADS"], env[BOUND], env["VLLM_CPU_NUM_OF_RESERVED_CPU"]) == ("1", "0", "0")
    monkeypatch.setenv(BOUND, "2-3")  # a person's own choice stays
    monkeypatch.setenv("VLLM_CPU_NUM_OF_RESERVED_CPU", "1")
    env = server_environment("key", True, options)
    assert (env[BOUND], env["VLLM_CPU_NUM_OF_RESERVED_CPU"]) == ("2-3", "1")


def test_a_plan_says_in_one_line_what_was_chosen(machine: Path, tmp_path: Path) -> None:
    put(tmp_path / "venv/lib/libiomp5.so")
    assert str(options_to_cpu_plan(CpuOptions(), machine)) == (
        "2 threads in the engine's process, adapters added all at once, libiomp5.so preloaded"
    )
    options = CpuOptions(threads=1, worker="own_process", lora="vllm", preload=())
    assert str(options_to_cpu_plan(options, machine)) == (
        "1 thread in a process of its own, adapters added token by token, nothing preloaded"
    )
