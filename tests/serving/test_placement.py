"""Owns: who takes which card and how much of it, on machines that are described here, since none is at hand.

- A table of cards and models, from config.json to vLLM's command line, with sizes that are worked by hand.
- Cards of unlike size are planned whatever their order; only what fits on none of them is refused.
- Without a card everything is as it was; a server that runs already takes no card of ours.
"""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from support.card_rig import (
    FOUR_BIT,
    FOUR_BIT_SERVER,
    MACHINES,
    MIB,
    SAVING,
    SIDE_BY_SIDE,
    config_of,
    machine_of,
    place,
    pretend_cuda,
    write_model,
)

from marft_bridge.commands.status import status
from marft_bridge.common.errors import ServingError
from marft_bridge.common.progress import Reporter
from marft_bridge.config.serve import PlacedServeOptions, ServeOptions
from marft_bridge.devices.machine import Machine, rows_to_machine
from marft_bridge.devices.plan import EnginePlan
from marft_bridge.runs.device_lines import LIVE, announced_devices
from marft_bridge.runs.run_folder import RunFolder
from marft_bridge.serving import placement as placement_module
from marft_bridge.serving import served_bases, vllm_server
from marft_bridge.serving.base_models import BaseModelSpec, with_modules
from marft_bridge.serving.placement import Placement
from marft_bridge.serving.vllm_arguments import server_argv, server_environment


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    return partial(write_model, tmp_path_factory.mktemp("models"))


@pytest.fixture(autouse=True)
def with_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_cuda(monkeypatch)


def argv_of(placement: Placement, model: Path) -> dict[str, str]:
    """What the plan decides of the command line."""
    (options,) = placement.serve_options()
    words = server_argv(options, model, 1, cpu=False)
    flags = (
        *("--max-model-len", "--gpu-memory-utilization", "--kv-cache-memory-bytes"),
        *("--tensor-parallel-size", "--data-parallel-size"),
    )
    chosen = {flag: words[words.index(flag) + 1] for flag in flags if flag in words}
    return chosen | ({"--enable-sleep-mode": ""} if "--enable-sleep-mode" in words else {})


LENGTH, SHARE, SLEEP = "--max-model-len", "--gpu-memory-utilization", "--enable-sleep-mode"
SPLIT, COPIES = "--tensor-parallel-size", "--data-parallel-size"

# One row by hand, 1.7B on one card of 16 GB: 16376 MiB, of which 0.92 count: 15065.
#   parameters   24 x (4 x 2048 x 2048 + 3 x 2048 x 8192 + 2 x 2048) + 49152 x 2048 + 2048 = 1,711,376,384: 3264 MiB
#   one adapter  24 layers x rank 8 x ((2048 + 2048) for q_proj + (2048 + 2048) for v_proj) = 1,572,864 numbers
#   trainer      3264 + 2 adapters x 16 bytes x 1,572,864 (48) + 128 = 3440 between updates, and 512 of context
#   server       15065 - 3952 = 11113 are there. Weights 3264; 4 adapters x 2 bytes x 1,572,864 = 12;
#                the rest: 2048 tokens x 2 bytes x (4 x 2048 + 3 x 8192) = 128, logits 64 x 49152 x 12 bytes = 36,
#                graphs 1024, context 512: 1700. Left for the cache: 11113 - 3264 - 12 - 1700 = 6137
#   a token      24 layers x 2 x 32 heads x 64 x 2 bytes = 192 KiB: 32,733 tokens, of which a call may have 8192
#   share        (3264 + 12 + 1700 + 6137) / 16376 = 0.678
# An update of it, 2048 positions at a time, which the row with rollouts beside updates keeps free:
#   a position   24 x (2 bytes x (2 x 2049 normed + 2048 read + 16 low + 4 x 2048 for attention + 2 x 8192 gate and up)
#                + 4 bytes x 32 heads) + 2 x 2049 = 1,482,594 bytes: 2896 MiB of 2048
#   scratch      attention's paths: 2048 x 4 x 2048 + 4 x (8 x 2048 x 4096 + 2 x 2048 x 2048) = 318,767,104: 304
#   in all       3440 + 512 + 2896 + 304 = 7152, so that 22598 - 7152 - 3264 - 18 - 1700 = 10464 are left for the cache
ROWS: list[tuple[str, str, dict[str, Any], dict[str, str], tuple[int, ...], int, tuple[int, int, int, int]]] = [
    # machine, model, options, command line with the longest call as planned, cards of server and trainer,
    # MiB: weights, adapters, rest, cache
    ("1 x 8", "0.1B", {}, {LENGTH: "8192", SHARE: "0.808", SLEEP: ""}, (0,), 0, (257, 4, 1599, 4763)),
    ("1 x 8", "0.5B", {}, {LENGTH: "32768", SHARE: "0.724", SLEEP: ""}, (0,), 0, (942, 4, 1718, 3269)),
    ("1 x 16", "0.5B", {}, {LENGTH: "32768", SHARE: "0.822", SLEEP: ""}, (0,), 0, (942, 4, 1718, 10802)),
    ("1 x 16", "1.7B", {}, {LENGTH: "8192", SHARE: "0.678", SLEEP: ""}, (0,), 0, (3264, 12, 1700, 6138)),
    ("1 x 24", "1.7B", {}, {LENGTH: "8192", SHARE: "0.759", SLEEP: ""}, (0,), 0, (3264, 12, 1700, 13670)),
    ("1 x 80", "0.1B", {}, {LENGTH: "8192", SHARE: "0.908", SLEEP: ""}, (0,), 0, (257, 4, 1680, 72184)),
    ("1 x 80", "8B", {}, {LENGTH: "131072", SHARE: "0.723", SLEEP: ""}, (0,), 0, (15317, 26, 2558, 41073)),
    ("2 x 24", "0.5B", {}, {LENGTH: "32768", SHARE: "0.919"}, (0,), 1, (942, 4, 1718, 19934)),
    ("2 x 24", "1.7B", {}, {LENGTH: "8192", SHARE: "0.919"}, (0,), 1, (3264, 12, 1700, 17623)),
    # 128 KiB a token: the card holds 43,155 of the 131,072 that the model reads
    ("2 x 24", "8B", SAVING, {LENGTH: "43152", SHARE: "0.919"}, (0,), 1, (15317, 26, 1862, 5394)),
    ("4 x 80", "8B", {}, {LENGTH: "131072", SHARE: "0.919"}, (0,), 1, (15317, 26, 2558, 57134)),
    ("4 x 80", "32B", SAVING, {LENGTH: "32768", SHARE: "0.919"}, (0,), 1, (62492, 64, 3263, 9215)),
    (
        *("8 x 80", "8B", {"serve.devices": [0, 1, 2, 3, 4, 5, 6], "serve.tensor_parallel": 1}),
        {LENGTH: "131072", SHARE: "0.919", COPIES: "7"},
        *((0, 1, 2, 3, 4, 5, 6), 7, (15317, 26, 2558, 57134)),
    ),
    (
        *("8 x 80", "8B", {"serve.devices": [2, 3], "train.devices": [0]}),
        # half the weights on each, and 1 GiB for the link; half of a token's 128 KiB
        {LENGTH: "131072", SHARE: "0.919", SPLIT: "2"},
        *((2, 3), 0, (7659, 26, 3246, 64103)),
    ),
    # rollouts while the trainer updates: nobody sleeps, and the trainer's whole update is kept free
    (
        *("1 x 24", "1.7B", SIDE_BY_SIDE),
        {LENGTH: "8192", SHARE: "0.628"},
        *((0,), 0, (3264, 18, 1700, 10465)),
    ),
    # 4 bits, 8B on 24 GB: 22598 MiB. Linear layers hold 32 x (2 x 4096 x 4096 + 2 x 1024 x 4096 + 3 x 14336 x 4096)
    # = 6,979,321,856 numbers of 8,030,261,248: the others 2004 MiB, these x (1/2 + 1/64 + 4/16384) = 3434: 5438.
    #   server   the rest as above (1862), and gate and up as one weight made whole: 2 x 2 x 14336 x 4096 bytes = 224
    #   trainer  5438 + 2 adapters x 16 bytes x 3,407,872 (104) + 128 = 5670, and 512 of context
    #   cache    22598 - 5670 - 512 - 5438 - 26 - 2086 = 8866
    (
        *("1 x 24", "8B", FOUR_BIT | FOUR_BIT_SERVER),
        {LENGTH: "70928", SHARE: "0.668", SLEEP: ""},
        *((0,), 0, (5438, 26, 2086, 8867)),
    ),
    ("2 x 24", "8B", FOUR_BIT, {LENGTH: "43152", SHARE: "0.919"}, (0,), 1, (15317, 26, 1862, 5394)),
    ("8 x 80", "70B", FOUR_BIT | SAVING, {LENGTH: "24224", SHARE: "0.919", SPLIT: "2"}, (0, 1), 2,
     (67286, 125, 3838, 3786)),
    # unlike cards: whatever their order, the server has the larger one. The trainer's update takes 7152 MiB with its
    # context, and 0.92 of 8188 are 7533; of a card of 4 GB it has nothing, so that both are on the other one.
    ("24 + 8", "1.7B", {}, {LENGTH: "8192", SHARE: "0.919"}, (0,), 1, (3264, 12, 1700, 17623)),
    ("8 + 24", "1.7B", {}, {LENGTH: "8192", SHARE: "0.919"}, (1,), 0, (3264, 12, 1700, 17623)),
    ("24 + 4", "1.7B", {}, {LENGTH: "8192", SHARE: "0.759", SLEEP: ""}, (0,), 0, (3264, 12, 1700, 13670)),
    ("4 + 24", "1.7B", {}, {LENGTH: "8192", SHARE: "0.759", SLEEP: ""}, (1,), 1, (3264, 12, 1700, 13670)),
    # 45208 - 15317 - 26 - 1862 = 28003
    ("16 + 48", "8B", FOUR_BIT, {LENGTH: "131072", SHARE: "0.919"}, (1,), 0, (15317, 26, 1862, 28003)),
    ("4 + 24 + 24", "1.7B", {}, {LENGTH: "8192", SHARE: "0.919"}, (1,), 2, (3264, 12, 1700, 17623)),
    # given by hand
    ("1 x 24", "1.7B", {"serve.gpu_memory_utilization": 0.5}, {LENGTH: "8192", SHARE: "0.5", SLEEP: ""}, (0,), 0,
     (3264, 12, 1700, 7306)),
    ("1 x 24", "1.7B", {"serve.kv_cache_gib": 2.0, "serve.max_model_len": 4096},
     {LENGTH: "4096", SHARE: "0.285", "--kv-cache-memory-bytes": str(2**31), SLEEP: ""}, (0,), 0,
     (3264, 12, 1700, 2048)),
]  # fmt: skip


@pytest.mark.parametrize(
    ("machine", "model", "options", "argv", "devices", "trainer", "mib"),
    ROWS,
    ids=[f"{row[1]} on {row[0]}{', ' if row[2] else ''}{', '.join(row[2])}" for row in ROWS],
)
def test_cards_command_line_and_memory_are_those_worked_by_hand(
    model_dir: Callable[[str], Path],
    machine: str,
    model: str,
    options: dict[str, Any],
    argv: dict[str, str],
    devices: tuple[int, ...],
    trainer: int,
    mib: tuple[int, int, int, int],
) -> None:
    placement = place(machine_of(machine), model_dir(model), options)
    (engine,) = placement.plan.engines
    assert engine is not None
    assert (engine.devices, placement.plan.learners) == (devices, (trainer,))
    share = engine.share
    assert share is not None
    taken = (share.weights, share.adapters, share.rest, share.cache)
    assert [size / MIB for size in taken] == pytest.approx(mib, abs=2)
    assert f"{engine.longest_call}" == argv[LENGTH]
    if "serve.max_model_len" not in options:
        argv = argv | {LENGTH: "auto"}  # where vLLM's own measure has the last word
    assert argv_of(placement, model_dir(model)) == argv
    (placed,) = placement.serve_options()
    assert isinstance(placed, PlacedServeOptions)
    env = server_environment("key", cpu=False, visible_devices=placed.visible_devices)
    assert (env["CUDA_VISIBLE_DEVICES"], env["CUDA_DEVICE_ORDER"]) == (",".join(map(str, devices)), "PCI_BUS_ID")
    wanted = "auto" if len(MACHINES[machine]) == 1 else f"cuda:{trainer}"
    assert placement.trainer_options().system.device == wanted


@pytest.mark.parametrize("machine", ["1 x 24", "2 x 24"])
def test_a_placed_server_starts_and_only_what_was_given_is_refused(
    model_dir: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, machine: str
) -> None:
    """A default is no option that was set: `serve.cpu` is refused where there is a card, but only if it was given."""
    monkeypatch.setattr(vllm_server, "vllm_runs_on_cpu", lambda: False)
    monkeypatch.setattr(vllm_server, "check_model_dir", lambda folder: folder)
    model = model_dir("1.7B")

    def start(options: dict[str, Any]) -> None:
        (placed,) = place(machine_of(machine), model, options).serve_options()
        assert isinstance(placed, PlacedServeOptions)
        assert placed.devices is not None
        vllm_server._new_process(placed, model, tmp_path / "vllm.log")

    start({})
    start({"serve.max_loras": 5})
    with pytest.raises(ServingError, match=r"serve\.cpu has no effect on the CUDA build of vLLM; leave it out"):
        start({"serve.cpu.threads": 2})


def test_without_a_card_nothing_is_planned(model_dir: Callable[[str], Path]) -> None:
    placement = place(machine_of("none"), model_dir("0.1B"), {"serve.max_loras": 5})
    (options,) = placement.serve_options()
    assert type(options) is ServeOptions
    assert options.max_loras == 5
    assert (placement.trainer_options().system.device, placement.plan.learners) == ("auto", ())


def test_a_server_that_runs_already_takes_no_card_and_the_trainer_the_emptiest(
    model_dir: Callable[[str], Path],
) -> None:
    machine = machine_of("2 x 24", free_mib={0: 2000})  # the server's memory
    placement = place(machine, model_dir("1.7B"), {"serve.attach": "http://127.0.0.1:8000"})
    assert placement.plan.engines == (None,)
    assert placement.trainer_options().system.device == "cuda:1"
    assert placement.lines() == [
        "devices: model server: at http://127.0.0.1:8000, which runs already",
        "devices: training: card 1 (GPU, 24.0 GiB)",
    ]


def test_a_card_that_somebody_else_uses_is_taken_last(model_dir: Callable[[str], Path]) -> None:
    placement = place(machine_of("4 x 80", free_mib={0: 9000}), model_dir("8B"))
    (engine,) = placement.plan.engines
    assert engine is not None
    assert (engine.devices, placement.plan.learners) == ((1,), (2,))


def test_what_others_hold_of_the_only_card_is_not_given_away(model_dir: Callable[[str], Path]) -> None:
    (engine,) = place(machine_of("1 x 24", free_mib={0: 16000}), model_dir("1.7B")).plan.engines
    assert engine is not None
    assert engine.share is not None
    # 16000 instead of 22598 MiB, less the trainer's 3952
    assert engine.share.total / MIB == pytest.approx(16000 - 3952, abs=2)


def test_who_has_which_device_is_said_with_its_share(model_dir: Callable[[str], Path]) -> None:
    assert place(machine_of("1 x 16"), model_dir("1.7B")).lines() == [
        "devices: model server: card 0 (GPU, 16.0 GiB), 0.678 of it (weights 3.2 GiB, adapters 12 MiB, "
        "the rest 1.7 GiB, KV cache 6.0 GiB for 32,733 tokens), calls of up to 8,192 tokens, "
        "asleep while the trainer updates",
        "devices: training: card 0 (GPU, 16.0 GiB)",
    ]


def test_a_command_that_does_not_train_goes_without_the_trainers_share_where_there_is_no_room(
    model_dir: Callable[[str], Path],
) -> None:
    (engine,) = place(machine_of("1 x 24"), model_dir("8B"), trains=False).plan.engines
    assert engine is not None
    assert (engine.utilization, engine.longest_call, engine.sleeps) == (0.919, 43152, False)
    roomy = [place(machine_of("1 x 24"), model_dir("1.7B"), trains=trains).plan for trains in (True, False)]
    assert roomy[0] == roomy[1]  # so that collect takes the calls that train will


def test_a_server_on_another_machine_than_the_trainer_has_the_whole_card(model_dir: Callable[[str], Path]) -> None:
    plan = place(machine_of("1 x 24"), model_dir("8B"), {"train.devices": [5]}, trains=False, beside_trainer=False).plan
    (engine,) = plan.engines
    assert engine is not None
    assert (engine.utilization, engine.sleeps, plan.learners) == (0.919, False, ())


def test_servers_of_serve_never_sleep(model_dir: Callable[[str], Path]) -> None:
    """Another command's trainer cannot wake them, so its whole update is kept free."""
    (engine,) = place(machine_of("1 x 24"), model_dir("1.7B"), trains=False, takes_turns=False).plan.engines
    assert engine is not None
    assert (engine.sleeps, engine.utilization) == (False, 0.628)


@pytest.mark.parametrize(
    ("machine", "model", "options", "server", "learners"),
    [
        ("4 x 80", "8B", {"train.learners": 3}, (0,), (1, 2, 3)),
        ("4 x 80", "8B", {"train.learners": 2}, (0,), (1, 2)),  # the server needs one, so one is left over
        ("4 x 80", "8B", {"train.learners": 2, "serve.tensor_parallel": 2}, (0, 1), (2, 3)),
        ("4 x 80", "8B", {"train.learners": 2, "train.devices": [3, 0]}, (1,), (3, 0)),
        (
            "8 x 80",
            "8B",
            {"train.learners": 8, "train.devices": list(range(8)), "serve.devices": [0]},
            (0,),
            tuple(range(8)),
        ),
    ],
    ids=["the rest", "fewer than there are", "beside two", "by name", "beside each other"],
)
def test_every_learner_has_a_card_of_its_own(
    model_dir: Callable[[str], Path],
    machine: str,
    model: str,
    options: dict[str, Any],
    server: tuple[int, ...],
    learners: tuple[int, ...],
) -> None:
    placement = place(machine_of(machine), model_dir(model), options)
    (engine,) = placement.plan.engines
    assert engine is not None
    assert (engine.devices, placement.plan.learners) == (server, learners)
    assert placement.learner_devices() == [f"cuda:{number}" for number in learners]
    assert placement.trainer_options().system.device == f"cuda:{learners[0]}"
    assert engine.sleeps == bool({*server} & {*learners})
    cards = ", ".join(map(str, learners))
    assert placement.lines()[-1] == f"devices: training: cards {cards} (GPU, 79.6 GiB), a learner on each"


@pytest.mark.parametrize(
    ("machine", "model", "options", "server", "learners"),
    [
        ("4 x 80", "8B", {"serve.tensor_parallel": 4}, (0, 1, 2, 3), (0,)),
        ("2 x 24", "0.5B", {"train.learners": 2}, (0,), (0, 1)),
        ("4 + 24", "1.7B", {"train.devices": [1]}, (1,), (1,)),
        # 32 heads on one card of 24 GB with 16.2 GiB of trainer: half of the model on the other one as well
        (
            "2 x 24",
            "8B",
            SAVING | {"serve.tensor_parallel": 2, "train.trainer.system.load_in_4bit": True},
            (0, 1),
            (0,),
        ),
    ],
    ids=["a split over all", "as many learners as cards", "beside the named one", "a split beside 4 bits"],
)
def test_where_there_are_no_cards_for_both_they_share_the_largest(
    model_dir: Callable[[str], Path],
    machine: str,
    model: str,
    options: dict[str, Any],
    server: tuple[int, ...],
    learners: tuple[int, ...],
) -> None:
    plan = place(machine_of(machine), model_dir(model), options).plan
    (engine,) = plan.engines
    assert engine is not None
    assert (engine.devices, plan.learners, engine.sleeps) == (server, learners, True)


def test_a_server_sleeps_only_where_main_memory_holds_its_weights_and_adapters(
    model_dir: Callable[[str], Path],
) -> None:
    def place_with(host_mib: int | None, machine: str = "1 x 24", **more: Any) -> EnginePlan | None:
        described = machine_of(machine)
        host_free = None if host_mib is None else host_mib * MIB
        return place(replace(described, host_free=host_free), model_dir("1.7B"), **more).plan.engines[0]

    # 3264 + 12 MiB
    with pytest.raises(
        ServingError,
        match=r"^the model server of serve sleeps while the trainer updates, and what it holds then takes 3\.2 GiB of "
        r"main memory, of which 3\.0 GiB are free: free some, take a smaller base model, or give trainer and server",
    ):
        place_with(3072)
    for host_mib in (3300, None):
        assert (engine := place_with(host_mib)) is not None
        assert engine.sleeps
    for asleep_nowhere in (place_with(0, "2 x 24"), place_with(0, trains=False)):
        assert asleep_nowhere is not None
        assert not asleep_nowhere.sleeps


def test_a_card_that_the_driver_does_not_list_is_planned_as_torch_tells_it(
    model_dir: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A part of a card (MIG) by its name, a container without nvidia-smi; torch is not asked where no card is used."""
    monkeypatch.setattr(placement_module, "read_machine", lambda: Machine(notes=("card 0 is left out",)))
    listed = machine_of("1 x 24")
    asked: list[int] = []

    def ask_torch() -> Machine:
        asked.append(1)
        return listed

    monkeypatch.setattr(placement_module, "ask_torch", ask_torch)

    def read_and_place(**options: Any) -> Placement:
        config = config_of(model_dir("1.7B"), options)
        bases = [BaseModelSpec("", model_dir("1.7B"), with_modules(config, config.serve), nodes=config.graph.nodes)]
        return Placement(config, bases, [base.serve for base in bases], trains=True)

    placement = read_and_place()
    assert placement.plan == place(listed, model_dir("1.7B")).plan
    assert placement.lines()[-1] == "devices: training: card 0 (GPU, 24.0 GiB)"
    assert len(asked) == 1
    attached = {"serve.attach": "http://127.0.0.1:8000", "train.trainer.system.device": "cpu"}
    assert read_and_place(**attached).lines()[0] == "devices: card 0 is left out"
    assert len(asked) == 1


def test_on_a_card_that_nobody_lists_the_server_needs_a_share(
    model_dir: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(placement_module, "has_driver", lambda: True)
    with pytest.raises(
        ServingError,
        match=r"on a card that the driver does not list, .* the model server of serve: set serve\.gpu_memory_util",
    ):
        place(machine_of("none"), model_dir("0.1B"))
    by_hand = place(machine_of("none"), model_dir("0.1B"), {"serve.gpu_memory_utilization": 0.4})
    assert by_hand.lines()[-1] == "devices: training: a card, as torch chooses"
    assert argv_of(by_hand, model_dir("0.1B"))[SHARE] == "0.4"
    on_cpu = place(machine_of("none"), model_dir("0.1B"), {"train.trainer.system.device": "cpu"})
    assert on_cpu.lines()[-1] == "devices: training: CPU"
    place(machine_of("none"), model_dir("0.1B"), trains=False)


@pytest.mark.parametrize(
    ("arguments", "method"),
    [
        (["--quantization", "fp8"], "fp8"),
        (["--quantiz", "bitsandbytes", "--load-format", "bitsandbytes"], "bitsandbytes"),  # as argparse takes it
        (["--quant=fp8"], "fp8"),
        (["-q", "fp8"], "fp8"),
        (["-q=fp8"], "fp8"),
        (["-qfp8"], "fp8"),
        (["--quantization", "fp8", "-q", "awq"], "awq"),  # the last one counts
        (["--quantization-config", "{}"], None),
        (["--seed", "-1"], None),
        ([], None),
    ],
)
def test_the_method_of_quantisation_is_the_one_that_vllm_takes(arguments: list[str], method: str | None) -> None:
    assert placement_module.quantization_of(arguments) == method


def test_a_server_is_given_its_card_by_its_id_and_others_learn_every_name_of_it(
    model_dir: Callable[[str], Path],
) -> None:
    """A number means another card where CUDA counts the fastest first, and Ray gives out numbers."""
    rows = "0, GPU-aaaa, L4, 24564, 24164, [N/A]\n1, GPU-bbbb, L4, 24564, 24164, [N/A]\n"
    placement = place(rows_to_machine(rows, {"CUDA_VISIBLE_DEVICES": "1,GPU-aa"}), model_dir("1.7B"))
    (placed,) = placement.serve_options()
    assert isinstance(placed, PlacedServeOptions)
    assert placed.visible_devices == ("GPU-bbbb",)
    assert placement.taken_cards() == {"GPU-bbbb", "1", "GPU-aaaa", "0", "GPU-aa"}


def test_learners_without_a_card_share_the_processors(
    model_dir: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"train.learners": 2, "train.trainer.system.device": "cpu"}
    placement = place(machine_of("2 x 24"), model_dir("0.1B"), options)
    assert (placement.learner_devices(), placement.plan.learners) == (["cpu", "cpu"], ())
    several = place(machine_of("none"), model_dir("0.1B"), {"train.learners": 2})
    with pytest.raises(ServingError, match=r"train\.learners is 2, but the driver lists no card that each could have"):
        several.learner_devices()
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert several.learner_devices() == ["cpu", "cpu"]


def test_a_model_whose_layers_are_not_known_shares_a_card_only_by_hand(
    tmp_path: Path, model_dir: Callable[[str], Path]
) -> None:
    config = json.loads((model_dir("1.7B") / "config.json").read_text()) | {"quantization_config": {"bits": 4}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ServingError, match=r"is not known: give the server its share with serve\.gpu"):
        place(machine_of("1 x 24"), tmp_path)
    by_hand = place(machine_of("1 x 24"), tmp_path, {"serve.gpu_memory_utilization": 0.5})
    assert argv_of(by_hand, tmp_path) == {LENGTH: "auto", SHARE: "0.5", SLEEP: ""}
    with pytest.raises(
        ServingError, match=r"gpu_memory_utilization 0\.9 is .* beside training with .*: set it to 0\.\d+"
    ):
        place(machine_of("1 x 24"), tmp_path, {"serve.gpu_memory_utilization": 0.9})
    with pytest.raises(ServingError, match=r"with serve\.gpu_memory_utilization, in place of kv_cache_gib$"):
        place(machine_of("1 x 24"), tmp_path, {"serve.kv_cache_gib": 4.0})
    assert argv_of(place(machine_of("2 x 24"), tmp_path), tmp_path) == {
        LENGTH: "auto"
    }  # a card of its own: vLLM's defaults


def test_two_base_models_take_cards_of_their_own_and_share_one_only_by_hand(model_dir: Callable[[str], Path]) -> None:
    tables = {"models": {"big": {"path": str(model_dir("1.7B")), "nodes": ["writer"]}}}

    def place_both(machine: str, **changes: Any) -> Placement:
        config = config_of(model_dir("0.5B"), tables | changes)
        other = config.models["big"]
        bases = [
            BaseModelSpec("", model_dir("0.5B"), with_modules(config, config.serve), nodes=("planner",)),
            BaseModelSpec("big", model_dir("1.7B"), with_modules(config, other.serve), nodes=other.nodes),
        ]
        return Placement(config, bases, [b.serve for b in bases], trains=True, machine=machine_of(machine))

    plan = place_both("4 x 80").plan
    assert [engine and engine.devices for engine in plan.engines] == [(0,), (1,)]
    assert plan.learners == (2,)
    with pytest.raises(ServingError, match=r"several model servers share card 0: .* serve\.gpu_memory_utilization"):
        place_both("1 x 80")
    tables["models"]["big"]["serve"] = {"gpu_memory_utilization": 0.4}
    shared = place_both("1 x 80", **{"serve.gpu_memory_utilization": 0.3}).plan
    assert [engine and engine.utilization for engine in shared.engines] == [0.3, 0.4]
    with pytest.raises(ServingError, match=r"gpu_memory_utilization 0\.6 is .* set it to 0\.5\d or less"):
        place_both("1 x 80", **{"serve.gpu_memory_utilization": 0.6})


def test_a_server_of_unknown_size_that_has_cards_of_its_own_needs_no_share(
    model_dir: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM takes what it wants of a card of its own; only on a card that it shares must a share be named."""
    monkeypatch.setattr(served_bases, "vllm_runs_on_cpu", lambda: False)
    quantised = tmp_path / "quantised"
    shutil.copytree(model_dir("1.7B"), quantised)
    file = quantised / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": {"quant_method": "fp8"}}))
    config = config_of(model_dir("1.7B"), {"models": {"big": {"path": str(quantised), "nodes": ["writer"]}}})
    bases = [
        BaseModelSpec("", model_dir("1.7B"), with_modules(config, config.serve), nodes=("planner",)),
        BaseModelSpec("big", quantised, with_modules(config, config.models["big"].serve), nodes=("writer",)),
    ]
    placement = Placement(config, bases, [b.serve for b in bases], trains=False, machine=machine_of("4 x 80"))
    options = placement.serve_options()
    assert [serve.gpu_memory_utilization is None for serve in options] == [False, True]
    served_bases.refuse_whole_gpus(bases, options)
    attached = ServeOptions(attach="http://127.0.0.1:8000")  # takes no card of ours
    served_bases.refuse_whole_gpus(bases, [attached, options[1]])
    on_one_card = [options[0].model_copy(update={"visible_devices": ("1", "0")}), options[1]]
    for sharing in (on_one_card, [ServeOptions(), options[1]], [ServeOptions(), ServeOptions()]):
        with pytest.raises(ServingError, match=r"2 model servers share the GPU: .* share with .*serve\.gpu_mem"):
            served_bases.refuse_whole_gpus(bases, sharing)


def test_a_teacher_that_scores_has_its_room_beside_the_trainer(model_dir: Callable[[str], Path]) -> None:
    teacher = model_dir("8B")
    for name in ("tokenizer.json", "model.safetensors"):
        (teacher / name).touch()
    options = {"train.teacher_rounds": 1, "train.teacher": str(teacher)}
    for machine in ("1 x 24", "2 x 24"):
        assert place(machine_of(machine), model_dir("0.5B"), options).plan.learners
    assert place(machine_of("1 x 16"), model_dir("0.5B")).plan.learners == (0,)
    # 8,030 million weights in bfloat16, with the student and what a pass takes
    with pytest.raises(
        ServingError, match=r"needs about 16\.1 GiB of .* sleeping model server: name a smaller train\.tea"
    ):
        place(machine_of("1 x 16"), model_dir("0.5B"), options)


def test_status_says_who_would_have_which_device_or_why_nobody(
    tmp_path: Path, model_dir: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(placement_module, "read_machine", lambda: machine_of("2 x 24"))
    model = write_model(tmp_path, "1.7B")
    for name in ("tokenizer.json", "model.safetensors"):
        (model / name).touch()
    (tmp_path / "run").mkdir()

    def lines(**options: Any) -> list[str]:
        text = io.StringIO()
        config = config_of(model, {"run": str(tmp_path / "run"), **options})
        status(config, Reporter(Console(file=text, width=1000)))
        return [line.strip() for line in text.getvalue().splitlines() if "devices" in line]

    server, training = lines()
    would = "devices that `train` would have now: "
    assert server.startswith(f"{would}model server: card 0 (GPU, 24.0 GiB), 0.919 of it (weights 3.2 GiB")
    assert training == f"{would}training: card 1 (GPU, 24.0 GiB)"
    (refusal,) = lines(**{"serve.devices": [7]})
    assert refusal.startswith(
        "devices: `train` would be refused now: serve.devices names card 7, but there are cards 0"
    )

    # What runs has taken its share: a plan of what is left would say something else, or that nothing fits.
    folder = RunFolder(tmp_path / "run")
    with announced_devices(folder, ["devices: model server: card 1", "devices: training: card 0"]):
        assert lines() == ["devices: model server: card 1", "devices: training: card 0"]
    with announced_devices(folder, ["devices: model server: card 1"], whose=LIVE):  # `train` may begin beside it
        assert lines() == ["devices: model server: card 1", server, training]
    assert lines() == [server, training]
