"""Owns: the memory that training is said to take before it starts, what is free, and the line where that is too little.

- What a pass keeps for backward is what autograd really keeps, counted tensor by tensor; weights and adapters are those
  of the loaded model; a process's peak grows with the micro-batch as planned, with layers computed again and without.
- Free is the least of what the machine and its control groups leave; unknown is unknown.
- More than is free is refused before anything is loaded, with values that do fit; so is a call that is too long for
  what is left, and running out of memory is one line too. Where nothing is known, nothing is refused.
"""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console
from support.saved_storages import saved_storages
from support.tiny_policy import AGENTS, both_low, make_action, make_trajectory, play, save_tiny_llama
from support.trainer_options import trainer_options
from torch import Tensor
from transformers import (
    GPT2Config,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from marft_bridge.common.errors import ConfigError
from marft_bridge.common.progress import Reporter
from marft_bridge.config.bridge import BridgeConfig
from marft_bridge.training.train import train
from trace_store.store import TraceStore
from trainers.adapters.adapter_map import options_to_adapters
from trainers.batch import ActionItem
from trainers.checks import memory_guard
from trainers.checks.memory_guard import MemoryGuard
from trainers.checks.memory_plan import Base, Calls, MemoryPlan, model_to_shape, plan_memory, weights_to_bytes
from trainers.common.byte_text import bytes_to_text
from trainers.common.free_memory import free_bytes, give_back_large_blocks, host_free_bytes, leaves_holes
from trainers.common.workers import Workers
from trainers.config import LoraOptions, TrainerOptions
from trainers.errors import TrainError
from trainers.marft import MarftTrainer
from trainers.policies.policies import Policies
from trainers.scoring.microbatch import items_to_microbatches
from trainers.scoring.model import PolicyModel

MIB, GIB = 2**20, 2**30
CPU = torch.device("cpu")
ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 8, "num_attention_heads": 4,
    "num_key_value_heads": 2, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip

DEEP = SIZES | {"num_hidden_layers": 20}


def save(model_class: type[PreTrainedModel], config: Any, folder: Path) -> Path:
    with torch.random.fork_rng(devices=[]):
        model_class(config).save_pretrained(folder)
    return folder


def plan_of(
    model_dir: Path, options: TrainerOptions, trained: int = 1, holes: bool | None = None, **calls: int
) -> MemoryPlan:
    """`holes` None: as on this machine."""
    shape = model_to_shape(model_dir, options.lora)
    assert shape is not None
    return plan_memory(
        options, [Base(shape, trained)], Calls(**calls), "cpu", leaves_holes() if holes is None else holes
    )


# -- the plan -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "config", "targets"),
    [
        (LlamaForCausalLM, LlamaConfig(**DEEP), ("q_proj", "v_proj")),
        (LlamaForCausalLM, LlamaConfig(**DEEP), ("down_proj",)),
        (LlamaForCausalLM, LlamaConfig(**DEEP, attention_bias=True), ALL),
        (LlamaForCausalLM, LlamaConfig(**DEEP, hidden_act="gelu"), ("o_proj", "up_proj")),
        (Qwen3ForCausalLM, Qwen3Config(**DEEP, head_dim=16), ("q_proj", "v_proj")),
    ],
    ids=["llama", "llama-down", "llama-all", "gelu", "qwen3"],
)
def test_what_a_pass_keeps_is_what_autograd_holds(
    tmp_path: Path, family: type[PreTrainedModel], config: Any, targets: tuple[str, ...]
) -> None:
    """Every tensor that is saved for backward, by its storage, but for weights.

    The first layer keeps nothing before its first adapter, which the plan leaves out of account: it may be higher by
    one layer of the 20.
    """
    lora = LoraOptions(rank=4, target_modules=targets)
    model = PolicyModel(save(family, config, tmp_path), ["a"], lora, "cpu", seed=0)
    assert model.packs
    pick = torch.Generator().manual_seed(0)
    rows = torch.randint(0, 64, (4, 65), generator=pick).tolist()
    items = [ActionItem("a", tuple(row[:-1]), tuple(row[-1:]), None, 1.0) for row in rows]
    (batch,) = items_to_microbatches(items, 4096, None, model.rows_to_groups)
    positions = len({tuple(row[: end + 1]) for row in rows for end in range(64)})
    with saved_storages([*model.peft.parameters()]) as held:
        loss = model.logprobs("a", batch).sum()  # keeps the graph alive, so that no storage is used twice
    assert loss.requires_grad
    planned = plan_of(tmp_path, trainer_options(lora=lora, tokens_per_microbatch=positions), longest=64).activations
    assert 0.99 < planned / sum(held.values()) < 1.06


@pytest.mark.parametrize("tied", [False, True])
def test_weights_and_adapters_are_those_of_the_loaded_model(tmp_path: Path, tied: bool) -> None:
    save(LlamaForCausalLM, LlamaConfig(**SIZES, tie_word_embeddings=tied), tmp_path)
    lora = LoraOptions(rank=4, target_modules=ALL)
    model = PolicyModel(tmp_path, ["a", "b"], lora, "cpu", seed=0)
    adapter = sum(p.numel() for p in model.parameters("a").values())
    base = sum(p.numel() for name, p in model.peft.named_parameters() if "lora_" not in name)
    plan = plan_of(tmp_path, trainer_options(lora=lora), trained=2)
    assert plan.weights == 4 * base
    assert plan.adapters == 2 * 4 * 4 * adapter  # weight, gradient and two moments of four bytes each


def test_a_plan_by_hand(tmp_path: Path) -> None:
    """H 48, I 80, query 48, keys and values 24 each, 8 layers, rank 2 on query and value, 64 tokens at a time."""
    save(LlamaForCausalLM, LlamaConfig(**SIZES), tmp_path)
    options = trainer_options(lora=LoraOptions(rank=2), tokens_per_microbatch=64)
    layer = 2 * (48 + 1) + 48 + 2 * 2 + (48 + 24 + 24 + 48 + 4) + 2 * 80
    plan = plan_of(tmp_path, options, holes=False, observed=1000)
    assert plan.activations == 64 * 4 * (8 * layer + 48 + 1)
    assert plan.features == 2 * 4 * 1000 * 48
    # seven linear layers: query and output 48 x 48, key and value 24 x 48, three of 80 x 48; blocks of 64 with a byte
    numbers = [48 * 48] * 2 + [24 * 48] * 2 + [80 * 48] * 3  # 36, 18 and 60 blocks, whose scales are one block
    saved = 8 * sum(4 * n - n // 2 - n // 64 - 4 for n in numbers)
    in_bits = plan_of(tmp_path, trainer_options(lora=LoraOptions(rank=2), load_in_4bit=True), holes=False)
    assert plan.weights - in_bits.weights == saved
    assert in_bits.activations == plan_of(tmp_path, trainer_options(lora=LoraOptions(rank=2)), holes=False).activations
    shape = model_to_shape(tmp_path, options.lora)
    assert shape is not None
    dealt_out = trainer_options(lora=options.lora, tokens_per_microbatch=64, shard_base=True)
    of_three = plan_memory(dealt_out, [Base(shape, 1)], Calls(observed=1000), "cpu", leaves_holes=False, learners=3)
    assert plan.weights - of_three.weights == 4 * 8 * sum(numbers) * 2 // 3
    assert of_three.scratch - plan.scratch == 3 * 4 * sum(numbers)  # whole layers, of which there are three at most
    with_holes = plan_of(tmp_path, options, holes=True, observed=1000)
    assert with_holes.total == plan.total + plan.activations
    saving = plan_of(
        tmp_path,
        trainer_options(lora=options.lora, tokens_per_microbatch=64, activation_checkpointing=True),
        holes=True,
    )
    assert saving.activations == 64 * 4 * (8 * 48 + layer + 48 + 1)
    assert saving.total - saving.activations == plan.total - plan.activations - plan.features
    seen = 4 * 640 * 640  # who sees whom
    assert plan_of(tmp_path, options, longest=640).activations == 10 * plan.activations + seen  # a pass of its own
    without = trainer_options(estimator="rloo", offline={"mode": "filtered"}, lora=options.lora)  # type: ignore[arg-type]
    assert plan_of(tmp_path, without, observed=1000).features == 0  # no critic


@pytest.mark.parametrize(
    ("size", "text"), [(0, "1 MiB"), (345 * MIB, "345 MiB"), (GIB, "1.0 GiB"), (12 * GIB, "12.0 GiB")]
)
def test_sizes_are_written_for_people(size: int, text: str) -> None:
    assert bytes_to_text(size) == text


def test_an_architecture_of_other_parts_has_no_plan(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(GPT2Config(n_layer=2, n_embd=16, n_head=2).to_dict()))
    assert model_to_shape(tmp_path, LoraOptions()) is None
    (tmp_path / "config.json").write_text('{"model_type": "unheard-of"}')
    assert model_to_shape(tmp_path, LoraOptions()) is None
    assert model_to_shape(tmp_path / "nowhere", LoraOptions()) is None


PEAKS = """
import gc, random, sys
from pathlib import Path
import torch
from trainers.batch import ActionItem
from trainers.config import LoraOptions
from trainers.scoring.microbatch import items_to_microbatches
from trainers.scoring.model import PolicyModel

def peak():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) * 1024

def step(tokens, again):
    model = PolicyModel(Path(sys.argv[1]), ["a"], LoraOptions(), "cpu", 0, again)
    pick = random.Random(0)
    rows = [[pick.randrange(64) for _ in range(257)] for _ in range(tokens // 256)]
    items = [ActionItem("a", tuple(row[:-1]), tuple(row[-1:]), None, 1.0) for row in rows]
    (batch,) = items_to_microbatches(items, tokens, None, model.rows_to_groups)
    model.logprobs("a", batch).sum().backward()
    print(peak())

torch.set_num_threads(1)
for tokens, again in ((512, True), (4096, True), (4096, False)):
    step(tokens, again)
    gc.collect()
"""


@pytest.mark.slow
def test_the_peak_of_a_process_grows_as_planned(tmp_path: Path) -> None:
    """From step to step, so that what imports take cancels; large blocks go back to the system when they are freed."""
    config = LlamaConfig(**SIZES | {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 10})
    save(LlamaForCausalLM, config, tmp_path)
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"}
    run = subprocess.run(
        [sys.executable, "-c", PEAKS, str(tmp_path)], check=True, capture_output=True, text=True, env=environment
    )
    small, large, plain = map(int, run.stdout.split())

    def total(tokens: int, again: bool) -> int:
        options = trainer_options(tokens_per_microbatch=tokens, activation_checkpointing=again)
        return plan_of(tmp_path, options, holes=False, longest=256).total

    more_tokens = total(4096, True) - total(512, True)
    all_layers = total(4096, False) - total(4096, True)
    assert more_tokens > 48 * MIB  # far more than what else a process does meanwhile
    assert all_layers > 128 * MIB
    assert 0.7 < more_tokens / (large - small) < 1.8  # attention is planned for as many rows as may share a beginning
    assert 0.7 < all_layers / (plain - large) < 1.5


# -- what is free -------------------------------------------------------------------------------------------------


def test_a_threshold_of_the_user_is_left_alone_and_leaves_no_holes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MALLOC_MMAP_THRESHOLD_", raising=False)
    assert leaves_holes()
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "1048576")
    assert not leaves_holes()
    monkeypatch.setattr("ctypes.CDLL", lambda _: SimpleNamespace(mallopt=pytest.fail))
    give_back_large_blocks()


def machine(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


MEMINFO = "MemTotal:       8388608 kB\nMemFree:         102400 kB\nMemAvailable:   4194304 kB\n"
# of 4 GiB 2 are taken, and 1 of these is pages of files
HALF_CACHED = {
    "proc/self/cgroup": "0::/\n",
    "sys/fs/cgroup/memory.max": f"{4 * GIB}\n",
    "sys/fs/cgroup/memory.current": f"{2 * GIB}\n",
    "sys/fs/cgroup/memory.stat": f"active_file {GIB // 2}\ninactive_file {GIB // 2}\n",
}


def zoneinfo(*low_bytes: int) -> str:
    """Zones with these low watermarks, as the kernel prints them."""
    page = os.sysconf("SC_PAGE_SIZE")
    return "".join(
        f"Node 0, zone Normal\n  pages free     9999\n        low      {size // page}\n        high     99999\n"
        for size in low_bytes
    )


@pytest.mark.parametrize(
    ("files", "free"),
    [
        ({}, None),
        ({"proc/meminfo": MEMINFO}, 4 * GIB),
        ({"proc/meminfo": "MemTotal: 8388608 kB\n"}, None),
        (  # version 2: the group's own limit is "max", that of the one above is not; pages of files count as free
            {
                "proc/meminfo": MEMINFO,
                "proc/self/cgroup": "0::/user/job\n",
                "sys/fs/cgroup/user/job/memory.max": "max\n",
                "sys/fs/cgroup/user/job/memory.current": f"{GIB}\n",
                "sys/fs/cgroup/user/memory.max": f"{3 * GIB}\n",
                "sys/fs/cgroup/user/memory.current": f"{2 * GIB}\n",
                "sys/fs/cgroup/user/memory.stat": f"anon 5\ninactive_file {GIB // 2}\nactive_file {GIB // 4}\n",
            },
            GIB + GIB // 2 + GIB // 4,
        ),
        (  # version 1, in a container: the path is the host's, and the container's own group is the top
            {
                "proc/meminfo": MEMINFO,
                "proc/self/cgroup": "5:cpu,cpuacct:/docker/x\n4:memory:/docker/x\n0::/\n",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{2 * GIB}\n",
                "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{GIB}\n",
                "sys/fs/cgroup/memory/memory.stat": "active_file 1\ninactive_file 1\n"
                f"total_active_file {GIB // 8}\ntotal_inactive_file {GIB // 4}\n",
            },
            GIB + GIB // 4 + GIB // 8,
        ),
        (  # what the kernel keeps of them is not free: the low watermarks of the zones, 1 / 8 GiB
            {**HALF_CACHED, "proc/zoneinfo": zoneinfo(GIB // 16, GIB // 16)},
            2 * GIB + GIB - GIB // 8,
        ),
        (  # at most half of them
            {**HALF_CACHED, "proc/zoneinfo": zoneinfo(GIB, 3 * GIB)},
            2 * GIB + GIB // 2,
        ),
        (  # version 1 without a limit, and no other word
            {
                "proc/self/cgroup": "4:memory:/\n",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
                "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{GIB}\n",
            },
            None,
        ),
        (  # more is used than allowed
            {
                "proc/self/cgroup": "0::/\n",
                "sys/fs/cgroup/memory.max": f"{GIB}\n",
                "sys/fs/cgroup/memory.current": f"{2 * GIB}\n",
            },
            0,
        ),
    ],
    ids=[
        "nothing",
        "machine",
        "old kernel",
        "version 2",
        "version 1",
        "less what stays",
        "at most half stays",
        "no limit",
        "over the limit",
    ],
)
def test_free_is_the_least_that_the_machine_and_its_groups_leave(
    tmp_path: Path, files: dict[str, str], free: int | None
) -> None:
    assert host_free_bytes(machine(tmp_path, files)) == free


def test_on_this_machine_free_memory_is_read() -> None:
    free = free_bytes(CPU)
    assert free is not None
    assert 0 < free <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


# -- refusals -----------------------------------------------------------------------------------------------------


def guard_of(model_dir: Path, free: int | None, learners: int = 1, **options: Any) -> MemoryGuard:
    chosen = trainer_options(device="cpu", **options)
    return MemoryGuard(chosen, options_to_adapters(chosen, AGENTS, model_dir), CPU, lambda _: free, learners=learners)


def refusal(check: Callable[[], object]) -> str:
    with pytest.raises(TrainError) as caught:
        check()
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(LlamaForCausalLM, LlamaConfig(**SIZES), tmp_path_factory.mktemp("model"))


def test_learners_together_are_told_to_deal_out_a_base_that_none_holds_alone(tmp_path: Path) -> None:
    """Wide layers, so that the base is most of what training takes."""
    wide = save(LlamaForCausalLM, LlamaConfig(**DEEP | {"hidden_size": 256, "intermediate_size": 512}), tmp_path)
    least: dict[str, Any] = {"activation_checkpointing": True, "tokens_per_microbatch": 64}
    room = guard_of(wide, None, learners=4, shard_base=True, **least).plan()
    whole = guard_of(wide, None, learners=4, **least).plan()
    assert room is not None
    assert whole is not None
    assert room.total < whole.total
    said = refusal(guard_of(wide, room.total, learners=4).check)
    assert said.endswith(
        "or set train.trainer.system.shard_base and activation_checkpointing to true, tokens_per_microbatch to 64 "
        "or less"
    )
    assert "shard_base" not in refusal(guard_of(wide, room.total).check)  # one learner has nobody to share with
    guard_of(wide, room.total, learners=4, shard_base=True, **least).check()


def test_what_fits_exactly_is_let_through_and_one_byte_less_is_not(model_dir: Path) -> None:
    needed = plan_of(model_dir, TrainerOptions(), trained=2).total
    guard_of(model_dir, needed).check()
    said = refusal(guard_of(model_dir, needed - 1).check)
    assert said.startswith(f"training needs about {bytes_to_text(needed)} of memory (base model 1 MiB, adapters 1 MiB")
    assert (
        f"and {bytes_to_text(needed - 1)} are there for it: set train.trainer.system.tokens_per_microbatch to " in said
    )


@pytest.mark.parametrize("share", [0.9, 0.5, 0.2])
def test_the_suggested_budget_is_the_largest_that_fits(model_dir: Path, share: float) -> None:
    least, most = (
        plan_of(model_dir, trainer_options(tokens_per_microbatch=budget), trained=2).total for budget in (64, 100_000)
    )
    free = int(least + share * (most - least))
    said = refusal(guard_of(model_dir, free, tokens_per_microbatch=100_000).check)
    suggested = int(said.split("train.trainer.system.tokens_per_microbatch to ")[1].split()[0])
    assert suggested % 64 == 0
    guard_of(model_dir, free, tokens_per_microbatch=suggested).check()
    refusal(guard_of(model_dir, free, tokens_per_microbatch=suggested + 64).check)


def test_checkpointing_is_suggested_where_it_is_enough_and_not_where_it_is_on(model_dir: Path) -> None:
    plain, saving = (
        plan_of(model_dir, trainer_options(tokens_per_microbatch=8192, activation_checkpointing=on), trained=2).total
        for on in (False, True)
    )
    budget = {"tokens_per_microbatch": 8192}
    both = refusal(guard_of(model_dir, saving, **budget).check)
    assert both.endswith(" or less, or train.trainer.system.activation_checkpointing = true")
    guard_of(model_dir, saving, **budget, activation_checkpointing=True).check()
    only = refusal(guard_of(model_dir, saving - MIB, **budget).check)
    assert only.endswith(" or less")
    on = refusal(guard_of(model_dir, saving - MIB, **budget, activation_checkpointing=True).check)
    assert "activation_checkpointing" not in on
    assert saving < plain


def test_both_are_suggested_where_neither_is_enough(model_dir: Path) -> None:
    options = trainer_options(tokens_per_microbatch=64)
    call = [ActionItem("reasoner", (1,) * 4000, (2,), None, 1.0)]
    free = plan_of(
        model_dir,
        trainer_options(lora=options.lora, tokens_per_microbatch=64, activation_checkpointing=True),
        2,
        longest=4000,
        observed=1,
    )
    guard = guard_of(model_dir, free.total, tokens_per_microbatch=64)
    guard.check()
    said = refusal(lambda: guard.expect(call))
    assert said.endswith(
        "set train.trainer.system.activation_checkpointing = true and train.trainer.system.tokens_per_microbatch to 64 "
        "or less"
    )


def test_where_nothing_helps_it_says_so(model_dir: Path) -> None:
    said = refusal(guard_of(model_dir, MIB).check)
    assert said.endswith("are there for it: free memory, take a smaller base model")


def test_where_nothing_is_known_nothing_is_refused(model_dir: Path, tmp_path: Path) -> None:
    guard_of(model_dir, None).check()
    (tmp_path / "config.json").write_text(json.dumps(GPT2Config(n_layer=2, n_embd=16, n_head=2).to_dict()))
    unknown = guard_of(tmp_path, 1)
    unknown.check()
    unknown.expect([ActionItem("reasoner", (1,) * 4000, (2,), None, 1.0)])
    assert unknown.describe() is None


def test_what_is_planned_is_said_in_one_line(model_dir: Path) -> None:
    said = guard_of(model_dir, 5 * GIB, tokens_per_microbatch=512).describe()
    assert said is not None
    total = bytes_to_text(plan_of(model_dir, trainer_options(tokens_per_microbatch=512), trained=2).total)
    assert said.startswith(f"memory: training takes about {total}, 512 tokens at a time (base model ")
    assert said.endswith("; 5.0 GiB are free")
    silent = guard_of(model_dir, None).describe()
    assert silent is not None
    assert silent.endswith(")")


def test_a_trainer_refuses_before_it_loads_anything(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def loaded(*_: Any, **__: Any) -> None:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr("trainers.policies.policies.PolicyModel", loaded)
    monkeypatch.setattr(memory_guard, "free_bytes", lambda _: 10 * MIB)
    said = refusal(lambda: MarftTrainer(trainer_options(device="cpu"), model_dir, AGENTS, 0))
    assert said.startswith("training needs about")


def test_the_train_command_says_the_plan_first_and_refuses_before_a_server_starts(
    tmp_path: Path, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its store is empty, so with memory enough it ends there: no server is ever wanted."""
    (model_dir / "tokenizer.json").write_text("{}")
    (tmp_path / "run").mkdir()
    TraceStore.open(tmp_path / "run" / "store.duckdb").close()
    config = BridgeConfig.model_validate(
        {
            "run": str(tmp_path / "run"),
            "graph": {
                "app": "graphs.math_duo:build",
                "nodes": list(AGENTS),
                "tasks": "graphs.math_duo:tasks",
                "task_to_input": "graphs.math_duo:task_to_input",
                "reward": "graphs.math_duo:reward",
            },
            "model": {"path": str(model_dir)},
        }
    )
    said: list[str] = []
    reporter = Reporter(Console(file=io.StringIO()))
    monkeypatch.setattr(reporter, "say", said.append)
    monkeypatch.setattr(memory_guard, "free_bytes", lambda _: 10 * MIB)
    assert refusal(lambda: train(config, reporter, resume=False)).startswith("training needs about")
    devices = ["devices: model server: CPU", "devices: training: CPU"]
    assert said == devices
    said.clear()
    monkeypatch.setattr(memory_guard, "free_bytes", lambda _: 5 * GIB)
    with pytest.raises(ConfigError, match="holds no collected episode"):
        train(config, reporter, resume=False)
    assert said[:2] == devices
    assert said[2].startswith("memory: training takes about ")
    assert said[2].endswith("; 5.0 GiB are free")


def test_a_trainer_refuses_a_call_that_is_too_long_for_what_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = [GIB]
    monkeypatch.setattr(memory_guard, "free_bytes", lambda _: free[0])
    trainer = MarftTrainer(
        trainer_options(device="cpu", tokens_per_microbatch=64), save_tiny_llama(tmp_path), AGENTS, 0
    )
    trainer.update(play(trainer, 4, torch.Generator().manual_seed(0), both_low))
    free[0] = MIB
    long = make_trajectory([make_action("reasoner", [1] * 120_000, [2, 3], logprobs=(-1.0, -1.0))], 1.0)
    said = refusal(lambda: trainer.update([long]))
    assert said.endswith("free memory, take a smaller base model or shorter calls")


class OneOfFour(Workers):
    """A learner whose memory three others take from, too; they come to every meeting at once."""

    def __init__(self) -> None:
        super().__init__(0, 4, CPU, sharers=4)
        self.meetings = 0

    def wait(self) -> None:
        self.meetings += 1


def test_a_learner_refuses_what_is_refused_for_as_many_as_share_its_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the byte, for calls and for a teacher. All of them look before any takes memory, and after all have."""
    free, workers = [2**50], OneOfFour()
    monkeypatch.setattr(memory_guard, "free_bytes", lambda _: free[0])
    options, model_dir = trainer_options(device="cpu"), save_tiny_llama(tmp_path)
    own = Policies(options, model_dir, AGENTS, seed=0, workers=workers).memory
    assert workers.meetings == 2
    for_all = MemoryGuard.of_agents(options, model_dir, AGENTS, sharers=4, learners=4)
    for_all.check()
    for_all.loaded()
    own.expect([])
    assert workers.meetings == 4  # also where nothing asks for more
    call = [ActionItem("reasoner", (1,) * 30_000, (2,), None, 1.0)]
    longer = MemoryGuard.of_agents(options, model_dir, AGENTS)
    longer.expect(call)
    plan = longer.plan()
    assert plan is not None
    needed = plan.total - plan.loaded
    free[0] = 4 * needed - 1
    assert refusal(lambda: own.expect(call)) == refusal(lambda: for_all.expect(call))
    free[0] = 4 * needed
    own.check()
    for_all.check()
    shape = model_to_shape(model_dir, options.lora)
    assert shape is not None
    free[0] = 4 * weights_to_bytes(shape, "cpu")
    own.check_teacher(model_dir)
    for_all.check_teacher(model_dir)
    free[0] -= 1
    assert refusal(lambda: own.check_teacher(model_dir)) == refusal(lambda: for_all.check_teacher(model_dir))


@pytest.mark.parametrize("on", [False, True])
@pytest.mark.parametrize("phase", ["warm_up", "replay", "update"])
def test_running_out_of_memory_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, phase: str, on: bool
) -> None:
    options = trainer_options(device="cpu", tokens_per_microbatch=512, activation_checkpointing=on)
    trainer = MarftTrainer(options, save_tiny_llama(tmp_path), AGENTS, 0)
    played = play(trainer, 8, torch.Generator().manual_seed(0), both_low)

    def exhausted(*_: Any, **__: Any) -> Tensor:
        return torch.empty(2**50)  # more than any address space has

    monkeypatch.setattr(trainer.policies.model, "_hidden_at", exhausted)
    said = refusal(lambda: getattr(trainer, phase)(played))
    saving = "" if on else " or set train.trainer.system.activation_checkpointing = true"
    assert said == f"training ran out of memory: set train.trainer.system.tokens_per_microbatch to 256{saving}"


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), MemoryError()]
)
def test_so_is_that_of_a_gpu_and_of_python(error: Exception) -> None:
    class Trainer:
        options = trainer_options(tokens_per_microbatch=64, activation_checkpointing=True)

        @memory_guard.failures_told
        def update(self, name: str) -> None:
            assert name == "round"
            raise error

    said = refusal(lambda: Trainer().update("round"))
    assert said == "training ran out of memory: free memory, take a smaller base model or shorter calls"


def test_another_error_stays_what_it_was() -> None:
    class Trainer:
        options = TrainerOptions()

        @memory_guard.failures_told
        def update(self) -> None:
            raise RuntimeError("shapes cannot be multiplied")

    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        Trainer().update()
