"""`[serve]` of bridge.toml: how the base model is served, and how the CPU build of vLLM uses the machine.

Invariant: an option that would have no effect is refused, and so is an argument of vLLM's that we set ourselves. It
does not import vLLM.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from marft_bridge.common.addresses import refuse_server_address

ENGINE_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # of adapters, as vLLM has them
CPU_MODEL_LEN = 4096  # on a CPU: tokens of one call at most, unless max_model_len says more
_APP_LOGPROBS = 20  # top_logprobs of a call at most, by OpenAI's interface; vLLM allows as many unless it is told

# Arguments of vLLM that are set here, and what sets them. A training run relies on those without an option.
_TRAINING = "training relies on its value"
_LINEAGE = "put it into the model's folder, by which episodes know their tokenizer and chat template"
_ADDRESS = "the server is reached under an address of our own"
_OF_FOLDER = "the model is a folder, which has no revisions: name the folder of that one"
_CARDS = "set serve.devices, and serve.tensor_parallel to the cards of one copy"
_SPLIT = "a copy of the model is split in one way only: set serve.tensor_parallel"
_COPIES = "the copies are processes of one server on this machine, planned from serve.devices and serve.tensor_parallel"
_PROCESSES = "one machine runs the server, and its processes follow from serve.devices: leave it out"
_WORKER = "the plan of this machine says where the arithmetic runs: leave it out"
OWN_ARGUMENTS = {
    "--model": "set model.path",
    "--host": _ADDRESS,
    "--port": "set serve.port",
    "--uds": _ADDRESS,
    "--root-path": _ADDRESS,
    "--ssl-keyfile": _ADDRESS,
    "--ssl-certfile": _ADDRESS,
    "--api-key": "the server has a random key",
    "--api-server-count": "adapters are loaded into one server process",
    "-asc": "adapters are loaded into one server process",
    "--headless": _ADDRESS,
    "--config": "a file could set what we set; name its arguments",
    "--dtype": "set serve.dtype",
    "--max-model-len": "set serve.max_model_len",
    "--max-num-seqs": "set serve.max_num_seqs",
    "--tensor-parallel-size": "set serve.tensor_parallel",
    "-tp": "set serve.tensor_parallel",
    "--device-ids": "set serve.devices",
    "--pipeline-parallel-size": _SPLIT,
    "-pp": _SPLIT,
    "--decode-context-parallel-size": _SPLIT,
    "-dcp": _SPLIT,
    "--prefill-context-parallel-size": _SPLIT,
    "-pcp": _SPLIT,
    "--data-parallel-size": _CARDS,
    "-dp": _CARDS,
    "--data-parallel-size-local": _COPIES,
    "-dpl": _COPIES,
    "--data-parallel-rank": _COPIES,
    "-dpn": _COPIES,
    "--data-parallel-start-rank": _COPIES,
    "-dpr": _COPIES,
    "--data-parallel-address": _COPIES,
    "-dpa": _COPIES,
    "--data-parallel-rpc-port": _COPIES,
    "-dpp": _COPIES,
    "--data-parallel-backend": _COPIES,
    "-dpb": _COPIES,
    "--data-parallel-hybrid-lb": _COPIES,
    "-dph": _COPIES,
    "--data-parallel-external-lb": _COPIES,
    "-dpe": _COPIES,
    "--data-parallel-multi-port-external-lb": _COPIES,
    "-dpm": _COPIES,
    "--data-parallel-supervisor-port": _COPIES,
    "--enable-elastic-ep": _COPIES,
    "--elastic-ep-max-dp-size": _COPIES,
    "--nnodes": _PROCESSES,
    "-n": _PROCESSES,
    "--node-rank": _PROCESSES,
    "-r": _PROCESSES,
    "--master-addr": _PROCESSES,
    "--master-port": _PROCESSES,
    "--worker-cls": _WORKER,
    "--worker-extension-cls": _WORKER,
    "--gpu-memory-utilization": "set serve.gpu_memory_utilization",
    "--device-memory-utilization": "set serve.gpu_memory_utilization",
    "--kv-cache-memory-bytes": "set serve.kv_cache_gib",
    "--num-gpu-blocks-override": "set serve.kv_cache_gib",
    "--max-loras": "set serve.max_loras",
    "--max-lora-rank": "set serve.max_lora_rank",
    "--lora-target-modules": "set serve.lora_target_modules",
    "--tool-call-parser": "set serve.tool_call_parser",
    "--enable-auto-tool-choice": "set serve.tool_call_parser",
    "--tokenizer": _LINEAGE,
    "--tokenizer-mode": "the tokenizer is the one in the model's folder, by which episodes know their tokens",
    "--tokenizer-revision": _OF_FOLDER,
    "--revision": _OF_FOLDER,
    "--chat-template": _LINEAGE,
    "--chat-template-content-format": _LINEAGE,
    "--default-chat-template-kwargs": _LINEAGE,
    "--trust-request-chat-template": _LINEAGE,
    "--skip-tokenizer-init": "prompts and answers are texts",
    "--enable-lora": _TRAINING,
    "--max-cpu-loras": _TRAINING,
    "--served-model-name": _TRAINING,
    "--logprobs-mode": _TRAINING,
    "--logits-processors": "log-probs are those of the model alone: sampling is set in [sampling]",
    "--weight-transfer-config": "the base model stays as it is, and adapters are loaded from the run folder",
    "--tokens-only": "the server is asked by chats",
    "--grpc": "the server is asked over HTTP",
    "--generation-config": _TRAINING,
    "--override-generation-config": _TRAINING,
    "--disable-uvicorn-access-log": "it is set already",
    "--disable-log-stats": "it is set already",
    "--enable-sleep-mode": "the server sleeps where it shares its card with the trainer",
    "--middleware": "it is how the server asks for its key",
}


def _backend_to_fault(value: str) -> str | None:
    """mp: the workers are processes of this machine, as vLLM has them for several cards anyway."""
    if value == "mp":
        return None
    return "only mp may be set: one machine runs the server, and its processes follow from serve.devices"


def _logprobs_to_fault(value: str) -> str | None:
    """vLLM refuses a call that asks for more; to allow more costs nothing until a call asks."""
    if value == "-1" or (value.isdecimal() and int(value) >= _APP_LOGPROBS):
        return None
    return (
        f"a call of the app may ask for {_APP_LOGPROBS} tokens a position: set {_APP_LOGPROBS} or more, or -1 for all"
    )


# Arguments of vLLM that may be set to some values: the value -> what is wrong with it.
_BOUNDED_ARGUMENTS: dict[str, Callable[[str], str | None]] = {
    "--distributed-executor-backend": _backend_to_fault,
    "--max-logprobs": _logprobs_to_fault,
}
_OTHER_WHOLE_NAMES = ("-dc",)  # of vLLM's, which a name of ours begins with


def argument_to_flag(argument: str) -> str | None:
    """`--max_model_len=8`, as vLLM takes it -> `--max-model-len`; None for what is no flag, as a value."""
    if not argument.startswith("-") or argument == "-" or argument[1:2].isdigit() or argument[1:2] == ".":
        return None
    name = argument.partition("=")[0].partition(".")[0]
    return name.replace("_", "-") if name.startswith("--") else name


def argument_to_value(arguments: Sequence[str], position: int) -> str:
    """The value of the argument at a position: behind its `=`, or the next text; empty where there is none."""
    _, is_one_word, value = arguments[position].partition("=")
    return value if is_one_word else "".join(arguments[position + 1 : position + 2])


def own_flag(flag: str, own_flags: Collection[str]) -> str | None:
    """The argument among `own_flags` that vLLM would take a flag for: also of its beginning, or of its opposite.

    Its parser is Python's, which takes any beginning of a name that only one has, also of one with a single dash (`-t`
    for `-tp`), and the value behind a name of one letter (`-n2`).
    """
    positive = flag.replace("--no-", "--", 1)
    if positive in own_flags:
        return positive
    if flag in _OTHER_WHOLE_NAMES:
        return None
    return next(
        (own for own in own_flags if own.startswith(positive) or (len(own) == 2 and flag.startswith(own))), None
    )


class CpuOptions(BaseModel):
    """How the CPU build of vLLM uses the machine. What is left out is chosen for the machine."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

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


class ServeOptions(BaseModel):
    """How the model is served. An option that would have no effect is refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    port: int | None = Field(default=None, ge=1, le=65535)
    """Port on 127.0.0.1; None takes a free one."""
    devices: tuple[Annotated[int, Field(ge=0)], ...] | None = Field(default=None, min_length=1)
    """Cards of the server, by number. None: as many as the model needs; not the trainer's, where there are several."""
    tensor_parallel: int | None = Field(default=None, ge=1)
    """Cards that one copy of the model is split over. None: all in `devices`, or as few as hold it. With fewer than
    `devices` has, each group of cards holds a copy."""
    max_model_len: int | None = Field(default=None, ge=16)
    """Tokens of prompt and completion together. None: what the model reads and the KV cache holds; on a CPU 4096 at
    most."""
    max_num_seqs: int = Field(default=64, ge=1)
    """Requests that the engine works on at once."""
    max_loras: int = Field(default=4, ge=1)
    """Adapters in one engine step; requests for more wait."""
    max_lora_rank: int = Field(default=8, ge=1, le=512)
    """Highest rank of an adapter; the engine's next size at or above it is used."""
    lora_target_modules: tuple[str, ...] | None = None
    """Linear layers that adapters may change, named as in an adapter (q_proj, v_proj); None for all.
    The cost of serving adapters grows with this list, not with what an adapter holds."""
    dtype: str = Field(default="auto", pattern="^(auto|bfloat16|float16|float32)$")
    """Of weights and arithmetic. `auto` on a CPU: bfloat16 where it has instructions for it, else float32."""
    kv_cache_gib: float | None = Field(default=None, gt=0)
    """KV cache in GiB, on each card; None is 1 on a CPU, and on a GPU what is left of the server's share."""
    gpu_memory_utilization: float | None = Field(default=None, gt=0, le=1)
    """Share of each of its cards that the server takes. None: 0.92, and less on a card that also trains."""
    cpu: CpuOptions = CpuOptions()
    """How the CPU build of vLLM uses the machine."""
    tool_call_parser: str | None = Field(default=None, pattern="^[a-z0-9_-]+$")
    """How vLLM tells a tool call in the model's text (hermes, llama3_json, ...); None: no tools. A server in `attach`
    has its own."""
    extra_args: tuple[str, ...] = ()
    """Further arguments for vLLM, one text each, as ["--quantization", "fp8"]. What is set here is refused."""
    startup_timeout_s: float = Field(default=300.0, gt=0)
    """Seconds until a server that is not ready counts as failed."""
    restarts: int = Field(default=2, ge=0, le=100)
    """Times in one command that a server which died or hangs is started again, with its adapters; what failed
    meanwhile is repeated."""
    hang_s: float = Field(default=120.0, gt=0)
    """Seconds after which a server hangs: calls wait, none is told anything for half of them, and then one token asked
    for does not come in the other half. At most half of collect.timeout_s."""
    attach: str | None = Field(default=None, pattern="^https?://")
    """Address of a vLLM server that runs already; nothing is started then. With a key, https or loopback."""
    api_key_env: str | None = None
    """Name of the environment variable that holds the key of the server in `attach`."""

    @field_validator("attach")
    @classmethod
    def _attach_is_an_address(cls, attach: str | None) -> str | None:
        if attach is not None:
            refuse_server_address(attach, key=False)
        return attach

    @field_validator("devices")
    @classmethod
    def _no_card_twice(cls, devices: tuple[int, ...] | None) -> tuple[int, ...] | None:
        if devices is not None and len(set(devices)) < len(devices):
            raise ValueError(f"names a card twice: {', '.join(map(str, devices))}")
        return devices

    @field_validator("extra_args")
    @classmethod
    def _own_arguments_stay(cls, extra_args: tuple[str, ...]) -> tuple[str, ...]:
        for position, argument in enumerate(extra_args):
            flag = argument_to_flag(argument)
            if (flag is None and position == 0) or flag == "--":
                raise ValueError(f"{argument!r} is no argument of vLLM: they begin with a dash, and have a name")
            if flag is not None and len(flag.split()) > 1:  # which vLLM would take for the name of a model, and ignore
                raise ValueError(f"{argument!r} is two texts: give the argument and its value one by one")
            if flag is not None and (own := own_flag(flag, OWN_ARGUMENTS)) is not None:
                raise ValueError(f"{argument!r} is not yours to set ({own}): {OWN_ARGUMENTS[own]}")
            if flag is not None and (bounded := own_flag(flag, _BOUNDED_ARGUMENTS)) is not None:
                value = argument_to_value(extra_args, position)
                if (fault := _BOUNDED_ARGUMENTS[bounded](value)) is not None:
                    raise ValueError(f"{bounded} is {value!r}, and {fault}")
        return extra_args

    @model_validator(mode="after")
    def _options_fit_together(self) -> ServeOptions:
        given_options = self.model_fields_set - {"attach", "api_key_env", "lora_target_modules", "hang_s"}
        if self.attach is not None and given_options:
            raise ValueError(f"{', '.join(sorted(given_options))} cannot be set on a server that runs already (attach)")
        if self.attach is None and self.api_key_env is not None:
            raise ValueError("api_key_env applies to attach only; a server that is started here gets a random key")
        if self.attach is not None and self.api_key_env is not None:
            try:
                refuse_server_address(self.attach, key=True)
            except ValueError as error:
                raise ValueError(f"attach: {error}") from None
        if self.kv_cache_gib is not None and self.gpu_memory_utilization is not None:
            raise ValueError("kv_cache_gib and gpu_memory_utilization both size the KV cache; give one")
        if self.tensor_parallel is not None and self.devices is not None and len(self.devices) % self.tensor_parallel:
            raise ValueError(
                f"tensor_parallel {self.tensor_parallel} does not divide the {len(self.devices)} cards in devices: "
                "one copy of the model takes so many, so name a multiple of it"
            )
        return self


class PlacedServeOptions(ServeOptions):
    """Serving options with what was planned for this machine filled in; no file says these."""

    visible_devices: tuple[str, ...] = ()  # the server's cards, as CUDA_VISIBLE_DEVICES calls them
    copies: int = 1  # of the model
    sleeps: bool = False  # while the trainer updates
