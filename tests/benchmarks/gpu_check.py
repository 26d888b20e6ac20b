"""`python -m benchmarks.gpu_check`: the trainer on this machine's card -> runs/gpu-check/report.json and report.md.

Needs torch, transformers, peft and what `trainers` imports; no network, no vLLM, no model: random Llama-shaped bases
are made on the spot. In this order, each stage on its own, until the time is over:

    attention  of packed rows by one kernel and by gathering, in bfloat16: how far from gathering in float32, how fast?
    ways       every way to update, on the card and on the CPU, both in float32: the same adapters?
    resume     a trainer that was saved and loaded on the card goes on bit for bit
    dealt out  a base whose layers come together by messages (FSDP2) against a plain one, in a group of one process
    4-bit      a base in 4 bits against plain layers with the dequantised weights, and its memory and speed
    SIZE       of each base: memory as planned and as taken, tokens a second, useful operations a second against a
               large bfloat16 product of the same run, and the kernels that the rest of the time goes to

Invariant: a stage that fails or for which no time is left says so in the report, and the others run. With `--device cpu
--sizes tiny` it is the same program in small, which a test runs. What a CPU cannot tell is null, never 0.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

import torch
from support.shared_update import UPDATES, leaves, updates
from support.tiny_policy import AGENTS, both_low, play, save_tiny_llama
from support.trainer_options import trainer_options
from torch import Tensor
from torch.autograd import DeviceType
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from benchmarks.flop_count import model_to_shape, rows_to_flops
from trainers import checkpoint
from trainers.batch import ActionItem
from trainers.checks.memory_guard import MemoryGuard
from trainers.common.workers import Workers
from trainers.config import LoraOptions
from trainers.learners.group import join_group, leave_group
from trainers.marft import MarftTrainer
from trainers.objective.adapter_round import AdapterRound
from trainers.objective.improve import improve
from trainers.policies.adapter_learner import AdapterLearner
from trainers.scoring import model as scoring_model
from trainers.scoring.microbatch import items_to_microbatches
from trainers.scoring.model import PolicyModel
from trainers.scoring.packed import GATHERED, ON_TREE
from trainers.scoring.prefix_tree import Layout, rows_to_layout
from trainers.scoring.trial import relative_gap

GIB = 2**30
NO_BITSANDBYTES = "bitsandbytes is not there"
SOUND = ("seen", NO_BITSANDBYTES)
GOAL = 0.4  # of the card's own bfloat16 product, at 1.7B and 7B
STEPS = 3
SHOWN = 16  # operations of a profile
PASSES = 2  # of a step
HEADS = ((32, 32, 64), (9, 3, 64), (32, 8, 128))  # of queries, of keys and values, and entries of each
ROUNDING = 2e-2  # of bfloat16 in attention and its gradients, relative; a wrong mask is off by far more
TOLERANCE = {"atol": 1e-4, "rtol": 1e-3}  # as between the CPU and the second device of tests/trainers/test_devices.py


@dataclass(frozen=True, slots=True)
class Size:
    """A random base, and the tokens of one pass."""

    layers: int
    width: int
    inner: int
    heads: int
    kv_heads: int
    vocabulary: int
    tokens: int
    saving: bool = False  # activation checkpointing
    call: int = 256  # tokens
    sampled: int = 64  # those of them that are


SIZES = {
    "tiny": Size(2, 64, 128, heads=4, kv_heads=2, vocabulary=64, tokens=512),
    "0.1B": Size(30, 576, 1536, heads=9, kv_heads=3, vocabulary=49152, tokens=8192),
    "1.7B": Size(24, 2048, 8192, heads=32, kv_heads=32, vocabulary=49152, tokens=8192),
    "1.7B-saving": Size(24, 2048, 8192, heads=32, kv_heads=32, vocabulary=49152, tokens=8192, saving=True),
    "1.7B-long": Size(24, 2048, 8192, heads=32, kv_heads=32, vocabulary=49152, tokens=8192, call=2048, sampled=512),
    "7B": Size(32, 4096, 11008, heads=32, kv_heads=32, vocabulary=32000, tokens=4096),
}


@dataclass
class Report:
    """What was seen, by stage; written anew after each."""

    folder: Path
    device: str
    deadline: float
    stages: dict[str, dict[str, Any]] = field(default_factory=dict)
    machine: dict[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        self.machine = machine_facts(self.device)

    def run(self, name: str, stage: Callable[[], dict[str, Any]]) -> None:
        """Runs a stage, whatever becomes of it, and writes the report."""
        began = time.monotonic()
        if began > self.deadline:
            seen: dict[str, Any] = {"state": "no time was left"}
        else:
            try:
                seen = {"state": "seen", **stage()}
            except Exception:  # noqa: BLE001 - it belongs into the report, and the next stage runs
                seen = {"state": "failed", "error": traceback.format_exc()}
        self.stages[name] = seen | {"seconds": round(time.monotonic() - began, 1)}
        self.write()

    def write(self) -> None:
        """report.json and report.md."""
        self.folder.mkdir(parents=True, exist_ok=True)
        content = {"machine": self.machine, "stages": self.stages}
        (self.folder / "report.json").write_text(json.dumps(content, indent=1) + "\n")
        (self.folder / "report.md").write_text(report_to_page(content))


def machine_facts(device: str) -> dict[str, Any]:
    """What the figures belong to."""
    facts: dict[str, Any] = {
        "torch": torch.__version__,
        "device": device,
        "name": None,
        "memory_gib": None,
        "taken_gib": None,
    }
    if device == "cuda":
        card = torch.cuda.get_device_properties(0)
        free, total = torch.cuda.mem_get_info()
        facts |= {"name": card.name, "memory_gib": round(total / GIB, 1), "cuda": torch.version.cuda}
        facts |= {"taken_gib": round((total - free) / GIB, 2)}  # before the first stage: by others, and for a context
    return facts


# -- is it right? -------------------------------------------------------------------------------------------------


def compare_ways(folder: Path, device: str) -> dict[str, Any]:
    """The largest gap between the CPU's adapters and the card's, by way to update."""
    save_tiny_llama(folder / "teacher", seed=7)
    model = str(save_tiny_llama(folder / "tiny"))
    fixed = {"tokens_per_microbatch": 64, "lr": 0.005, "kl_stop": None}

    def run_on(target: str) -> dict[str, Any]:
        options = {name: (what, 7, fixed | {"device": target} | own) for name, (what, own) in UPDATES.items()}
        with mock.patch.object(scoring_model, "base_dtype", return_value=torch.float32):
            return updates(Workers.alone(), {"model": model, "options": options})

    expected, computed = run_on("cpu"), run_on(device)
    ways = {}
    for name in UPDATES:
        pairs = [
            (torch.tensor(found), torch.tensor(wanted))
            for part in ("values", "critics")
            for found, wanted in zip(computed[name][part], expected[name][part], strict=True)
        ]
        figures, wanted_figures = leaves(computed[name]["metrics"]), leaves(expected[name]["metrics"])
        ways[name] = {
            "gap": max(float((found - wanted).abs().max()) for found, wanted in pairs),
            "same": all(torch.allclose(found, wanted, **TOLERANCE) for found, wanted in pairs)
            and figures.keys() == wanted_figures.keys()
            and computed[name]["order"] == expected[name]["order"],
        }
    return {"ways": ways, "passed": all(way["same"] for way in ways.values())}


def check_resume(folder: Path, device: str) -> dict[str, Any]:
    """Whether a trainer that was saved and loaded goes on as the one that was not."""
    model = save_tiny_llama(folder / "resumed")

    def trainer(target: str, seed: int = 0) -> MarftTrainer:
        return MarftTrainer(trainer_options(device=target, lr=0.02, engine_tolerance=9.0), model, AGENTS, seed)

    games = [play(trainer("cpu"), 8, torch.Generator().manual_seed(seed), both_low) for seed in range(2)]
    original, loaded = trainer(device), trainer(device, seed=99)
    original.update(games[0])
    checkpoint.save(original, folder / "checkpoint")
    checkpoint.load(loaded, folder / "checkpoint")
    for one in (original, loaded):
        one.update(games[1])
    pairs = [
        (a, b)
        for agent in AGENTS
        for a, b in zip(
            original.policies.parameters(agent).values(), loaded.policies.parameters(agent).values(), strict=True
        )
    ]
    return {"passed": all(torch.equal(a, b) for a, b in pairs)}


def compare_attention(device: str) -> dict[str, Any]:
    """The relative gap of one kernel and of gathering to float32, forward and backward, and the time of each."""
    found: dict[str, Any] = {}
    calls = 20 if device == "cuda" else 2  # of each kind; a processor is slow at this
    tokens = torch.randint(1000, (20_000,), generator=torch.Generator().manual_seed(0)).tolist()
    shared, alone = tuple(tokens[:700]), [tuple(tokens[1000 + 300 * k : 1300 + 300 * k]) for k in range(2 * calls)]
    layout = rows_to_layout([*(shared + row[:200] for row in alone[:calls]), *alone[calls:]], torch.device(device))
    for heads, kv_heads, entries in HEADS:
        for window in (None, 250) if kv_heads == heads else (None,):
            shapes = [(heads, entries), (kv_heads, entries), (kv_heads, entries), (heads, entries)]
            generator = torch.Generator().manual_seed(1)
            drawn = [torch.randn(1, h, len(layout.ids_N), d, generator=generator).to(device) for h, d in shapes]
            exact = _attention_and_slopes(GATHERED, drawn, layout, window)()
            seen: dict[str, Any] = {}
            for packing in (ON_TREE, GATHERED) if device == "cuda" else (GATHERED,):
                attend = _attention_and_slopes(packing, [part.to(torch.bfloat16) for part in drawn], layout, window)
                pairs = zip(attend(), exact, strict=True)
                gap = max(relative_gap(mine, theirs) for mine, theirs in pairs)
                seen[packing] = {"gap": gap, "milliseconds": round(1e3 * median_seconds(attend, device), 3)}
            found[f"{heads}/{kv_heads} of {entries}, window {window}"] = seen
    gaps = [packing["gap"] for seen in found.values() for packing in seen.values()]
    return {"positions": len(layout.ids_N), "heads": found, "passed": max(gaps) <= ROUNDING}


def _attention_and_slopes(
    packing: str, drawn: Sequence[Tensor], layout: Layout, window: int | None
) -> Callable[[], list[Tensor]]:
    attention = ALL_ATTENTION_FUNCTIONS[packing]
    parts = [part.clone().requires_grad_() for part in drawn[:3]]

    def attend() -> list[Tensor]:
        output, _ = attention(None, *parts, None, sliding_window=window, packed_layout=layout)
        return [output.detach(), *torch.autograd.grad(output, parts, drawn[3].transpose(1, 2))]

    return attend


# -- how much, and how fast? --------------------------------------------------------------------------------------


def measure_size(folder: Path, name: str, device: str, load_in_4bit: bool = False) -> dict[str, Any]:
    """One optimiser step on a random base of this size: memory, speed, and where the time goes."""
    size = SIZES[name]
    model_dir = save_random_base(folder / name, size, device)
    options = trainer_options(
        device=device,
        proximal="engine",
        mismatch="none",
        minibatch_actions=10_000,
        tokens_per_microbatch=size.tokens,
        activation_checkpointing=size.saving,
        load_in_4bit=load_in_4bit,
    )
    guard = MemoryGuard.of_agents(options, model_dir, ["agent"])
    used_before = _forget_peak(device)
    model = PolicyModel(model_dir, ["agent"], options.lora, device, 0, size.saving, load_in_4bit)
    learner = AdapterLearner(model, "agent", 0.0, options=options, workers=Workers.alone())
    items = random_calls(size, model.vocabulary)
    guard.expect(items)
    data = AdapterRound(
        items=items,
        episode_A=list(range(len(items))),
        old_T=learner.logprobs(items),
        reference_T=None,
        advantage_U=[torch.tensor([(-1.0) ** i * (1 + i % 3)], device=device) for i in range(len(items))],
        factor_A=torch.ones(len(items), device=device),
        positive_A=torch.zeros(len(items), device=device),
    )

    def step() -> None:
        improve(learner, data, torch.Generator().manual_seed(0), tick=lambda _: None)

    seconds = median_seconds(step, device)
    shape, flops, tokens = model_to_shape(model), 0, 0
    for batch in learner.microbatches(items):
        batch_items = [items[i] for i in batch.items]
        rows = [item.prompt_ids + item.sampled_ids[:-1] for item in batch_items]
        flops += rows_to_flops(shape, rows, sum(len(item.sampled_ids) for item in batch_items))
        tokens += sum(map(len, rows))
    limit, plan = matmul_flops_per_s(device), guard.plan()
    assert plan is not None
    profile, computing = profile_step(step, device)
    return {
        "attention": model.packing,
        "planned_gib": round((plan.total - plan.features) / GIB, 3),
        **_peaks(device, used_before),
        "tokens_per_s": round(tokens / seconds, 1),
        "tflops": flops / seconds / 1e12,
        "matmul_tflops": limit / 1e12,
        "share": flops / seconds / limit,
        "passed": flops / seconds / limit >= GOAL if name in ("1.7B", "7B") else None,
        "busy": None if computing is None else computing / seconds,
        "profile": profile,
    }


def check_sharded(folder: Path, device: str) -> dict[str, Any]:
    """Whether a base that is dealt out has the bits of a plain one, as far as one card can tell: over one process."""
    base = save_random_base(folder / "dealt out", SIZES["tiny" if device == "cpu" else "0.1B"], device)
    join_group(0, 1, meeting_place=f"file://{folder / 'meeting'}")
    try:
        computed, expected = (
            _pass_of(PolicyModel(base, ["agent"], LoraOptions(), device, 0, is_sharded=is_sharded))
            for is_sharded in (True, False)
        )
    finally:
        leave_group()
    return {"passed": all(map(torch.equal, computed, expected))}


def check_four_bit(folder: Path, device: str, name: str) -> dict[str, Any]:
    """A base in 4 bits: the log-probs and gradients of its dequantised weights? And `measure_size` of one that large.

    Judged in float32, where only the order of sums differs; what bfloat16 makes of it is told beside it.
    """
    if find_spec("bitsandbytes") is None:
        return {"state": NO_BITSANDBYTES}
    from support.four_bit_base import save_dequantised

    judged = save_random_base(folder / "4-bit", SIZES["tiny" if device == "cpu" else "0.1B"], device)
    gaps = {}
    for dtype in (torch.float32, torch.bfloat16):
        dequantised, _ = save_dequantised(judged, folder / f"4-bit {dtype}", device, dtype)
        with mock.patch.object(scoring_model, "base_dtype", return_value=dtype):
            computed, expected = (
                _pass_of(PolicyModel(path, ["agent"], LoraOptions(), device, 0, load_in_4bit=in_bits))
                for path, in_bits in ((judged, True), (dequantised, False))
            )
        gaps[dtype] = max(relative_gap(a, b) for a, b in zip(computed, expected, strict=True))
    gc.collect()  # layers hold themselves by the passes that they were given, and the next base is weighed alone
    return measure_size(folder, name, device, load_in_4bit=True) | {
        "gap": gaps[torch.float32],
        "gap_bfloat16": gaps[torch.bfloat16],
        "passed": gaps[torch.float32] < 1e-3,
    }


def _pass_of(model: PolicyModel) -> list[torch.Tensor]:
    """Log-probs and gradients of an adapter that is not 0."""
    generator = torch.Generator().manual_seed(1)
    parameters = model.parameters("agent").values()
    with torch.no_grad():
        for parameter in parameters:
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.02)
    (batch, *_) = items_to_microbatches(random_calls(SIZES["tiny"], model.vocabulary), 512, None, model.rows_to_groups)
    logprobs = model.logprobs("agent", batch)
    return [logprobs.detach(), *torch.autograd.grad(logprobs.sum(), list(parameters))]


def random_calls(size: Size, vocabulary: int) -> list[ActionItem]:
    """As many calls as fill `PASSES` passes; the model sees all but the last token of each, and no two share any."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(vocabulary, (PASSES * size.tokens // size.call, size.call + 1), generator=generator).tolist()
    return [ActionItem("agent", tuple(row[: -size.sampled]), tuple(row[-size.sampled :]), None, 0.7) for row in rows]


def median_seconds(work: Callable[[], object], device: str) -> float:
    """Of several runs, after one that compiles and allocates."""
    work()
    times = []
    for _ in range(STEPS):
        _wait(device)
        began = time.perf_counter()
        work()
        _wait(device)
        times.append(time.perf_counter() - began)
    return median(times)


def save_random_base(folder: Path, size: Size, device: str) -> Path:
    """A Llama-shaped base with random weights, made where it is fast."""
    config = LlamaConfig(
        vocab_size=size.vocabulary,
        hidden_size=size.width,
        intermediate_size=size.inner,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads,
        max_position_embeddings=8192,
        bos_token_id=None,
        eos_token_id=None,
    )
    with torch.random.fork_rng(), torch.device(device):
        torch.manual_seed(0)
        LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


def matmul_flops_per_s(device: str) -> float:
    """What a large product of this device reaches, in the type that the base is computed in."""
    side, dtype = (8192, torch.bfloat16) if device == "cuda" else (512, torch.float32)
    left, right = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
    times = []
    for _ in range(10):
        _wait(device)
        began = time.perf_counter()
        left @ right
        _wait(device)
        times.append(time.perf_counter() - began)
    return float(2 * side**3 / median(times[2:]))


def profile_step(step: Callable[[], None], device: str) -> tuple[list[dict[str, Any]], float | None]:
    """The operations that take most of a step, with their share of it: kernels of a card, operators of a CPU.

    And the seconds in which the card computed, None on a CPU; the rest of a step it waited for the processor.
    """
    os.environ.setdefault("TEARDOWN_CUPTI", "1")  # else each launch of the stages that follow is watched, and slower
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profiler:
        step()
    kind = "self_device_time_total" if device == "cuda" else "self_cpu_time_total"
    wanted = DeviceType.CUDA if device == "cuda" else DeviceType.CPU  # an operator's time is that of its kernels again
    rows = [row for row in profiler.key_averages() if row.device_type == wanted]
    rows.sort(key=lambda row: -getattr(row, kind))
    total = sum(getattr(row, kind) for row in rows) or 1
    shown = [
        {"operation": row.key[:100], "share": getattr(row, kind) / total, "calls": row.count} for row in rows[:SHOWN]
    ]
    return shown, total / 1e6 if device == "cuda" else None  # of microseconds


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def _forget_peak(device: str) -> int | None:
    """Bytes of the card that are taken already, context included; its peak counts from here."""
    if device != "cuda":
        return None
    gc.collect()  # the model of the stage before
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    free, total = torch.cuda.mem_get_info()
    return total - free


def _peaks(device: str, used_before: int | None) -> dict[str, float | None]:
    """What torch allocated at most, and what the driver sees taken now that nothing was given back."""
    if used_before is None:
        return {"allocated_gib": None, "driver_gib": None}
    free, total = torch.cuda.mem_get_info()
    taken = total - free - used_before
    return {
        "allocated_gib": round(torch.cuda.max_memory_allocated() / GIB, 3),
        "driver_gib": round(taken / GIB, 3),
    }


# -- the page -----------------------------------------------------------------------------------------------------


def report_to_page(content: dict[str, Any]) -> str:
    """The report for people."""
    machine, stages = content["machine"], content["stages"]
    name = machine["name"] or "CPU"
    lines = [f"# GPU check: {name}", "", f"torch {machine['torch']}, {machine['memory_gib'] or '-'} GiB.", ""]
    lines += ["| stage | state | passed | seconds |", "|---|---|---|---|"]
    for stage, seen in stages.items():
        lines.append(f"| {stage} | {seen['state']} | {_yes(seen.get('passed'))} | {seen['seconds']} |")
    measured = {stage: seen for stage, seen in stages.items() if "tokens_per_s" in seen}
    if measured:
        lines += ["", "| base | planned GiB | allocated | driver | tokens/s | TFLOP/s | of its product | card busy |"]
        lines.append("|---|---|---|---|---|---|---|---|")
    for stage, seen in measured.items():
        memory = " | ".join(f"{seen[key] or '-'}" for key in ("planned_gib", "allocated_gib", "driver_gib"))
        busy = "-" if seen["busy"] is None else f"{seen['busy']:.2f}"
        speed = f"{seen['tokens_per_s']} | {seen['tflops']:.3g} | {seen['share']:.2f} | {busy}"
        lines.append(f"| {stage} | {memory} | {speed} |")
    if "heads" in stages.get("attention", {}):
        lines += [
            "",
            "| attention, forward and backward | " + " | ".join(f"{p} ms, gap" for p in (ON_TREE, GATHERED)) + " |",
        ]
        lines.append("|---|---|---|")
        for heads, ways in stages["attention"]["heads"].items():
            cells = [
                f"{ways[p]['milliseconds']}, {ways[p]['gap']:.1e}" if p in ways else "-" for p in (ON_TREE, GATHERED)
            ]
            lines.append(f"| {heads} | {' | '.join(cells)} |")
    for stage, seen in measured.items():
        lines += ["", f"Where a step of {stage} goes:", ""]
        lines += [f"- {row['share']:.1%} {row['operation']} ({row['calls']} times)" for row in seen["profile"]]
    for stage, seen in stages.items():
        if "error" in seen:
            lines += ["", f"{stage} failed:", "", "```text", seen["error"].rstrip(), "```"]
    return "\n".join(lines) + "\n"


def _yes(passed: bool | None) -> str:
    return "-" if passed is None else "yes" if passed else "no"


def main(arguments: list[str]) -> int:
    """Runs all stages; the exit code is 1 where one failed or did not pass."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_check", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--sizes", nargs="*", choices=SIZES, default=["0.1B", "1.7B", "1.7B-saving", "1.7B-long", "7B"])
    parser.add_argument("--minutes", type=float, default=7.0, help="after which no stage is begun")
    parser.add_argument("--out", type=Path, default=Path("runs/gpu-check"))
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        sys.stderr.write("gpu-check: torch sees no CUDA device; --device cpu --sizes tiny tries the program itself\n")
        return 2
    report = Report(options.out, options.device, time.monotonic() + 60 * options.minutes)
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as folder:
        report.run("attention", partial(compare_attention, options.device))
        report.run("ways", partial(compare_ways, Path(folder), options.device))
        report.run("resume", partial(check_resume, Path(folder), options.device))
        report.run("dealt out", partial(check_sharded, Path(folder), options.device))
        in_bits = "1.7B" if options.device == "cuda" else "tiny"
        report.run("4-bit", partial(check_four_bit, Path(folder), options.device, in_bits))
        for name in options.sizes:
            report.run(name, partial(measure_size, Path(folder), name, options.device))
            if options.device == "cuda":
                torch.cuda.empty_cache()
    sys.stdout.write((options.out / "report.md").read_text())
    bad = [s for s in report.stages.values() if s["state"] not in SOUND or s.get("passed") is False]
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
