"""Owns: the serving options and the command line made from them; starting, watching and ending the server, so that
nothing is left running; what is said when that fails; attaching; and, with the real engine, that tokens, log-probs
and adapters are what training takes them for."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import httpx
import pytest
from pydantic import ValidationError
from support.fake_vllm import FakeVllm, running
from support.lora_files import write_adapter

from marft_bridge.common.errors import ServingError
from marft_bridge.config.serve import OWN_ARGUMENTS, CpuOptions, PlacedServeOptions, ServeOptions
from marft_bridge.serving import process_guard as server_guard
from marft_bridge.serving import vllm_process as server_process
from marft_bridge.serving import vllm_server as serving
from marft_bridge.serving.adapter_registry import AdapterRegistry, publish, retire
from marft_bridge.serving.vllm_arguments import server_argv, server_environment
from marft_bridge.serving.vllm_client import EngineClient
from marft_bridge.serving.vllm_log import last_lines, startup_phase
from marft_bridge.serving.vllm_server import Endpoint, ModelServer

if TYPE_CHECKING:
    from conftest import RunningServer


# Options and command line


def value_after(argv: list[str], flag: str) -> str:
    return argv[argv.index(flag) + 1]


def test_options_that_would_have_no_effect_are_refused() -> None:
    for wrong, named in (
        ({"attach": "http://127.0.0.1:8000", "max_loras": 2}, "max_loras cannot be set"),
        ({"attach": "http://127.0.0.1:8000", "restarts": 1}, "restarts cannot be set"),
        ({"api_key_env": "KEY"}, "applies to attach only"),
        ({"kv_cache_gib": 1.0, "gpu_memory_utilization": 0.5}, "give one"),
        ({"attach": "127.0.0.1:8000"}, "attach"),
        ({"attach": "http://127.0.0.1:80a"}, "is not an address like http"),
        ({"attach": "http://gpu7:8000", "api_key_env": "KEY"}, "attach: .*a key does not go to another machine"),
        ({"attach": "http://[::1"}, "is not an address like http"),
        ({"threads": 2}, "threads"),
        ({"devices": [0, 1, 0]}, "names a card twice"),
        ({"devices": []}, "devices"),
        ({"devices": [0, 1, 2], "tensor_parallel": 2}, "tensor_parallel 2 does not divide the 3 cards"),
        ({"attach": "http://127.0.0.1:8000", "devices": [0]}, "devices cannot be set"),
        ({"attach": "http://127.0.0.1:8000", "cpu": {"threads": 2}}, "cpu cannot be set"),
    ):
        with pytest.raises(ValidationError, match=named):
            ServeOptions(**wrong)  # type: ignore[arg-type]


def test_the_server_listens_on_this_machine_only_and_samples_from_what_it_reports() -> None:
    argv = server_argv(ServeOptions(), Path("model"), 4321, cpu=True)
    assert value_after(argv, "--host") == "127.0.0.1"
    assert value_after(argv, "--port") == "4321"
    assert value_after(argv, "--logprobs-mode") == "processed_logprobs"
    assert value_after(argv, "--generation-config") == "vllm"  # no top_p or penalty from the model directory
    assert value_after(argv, "--kv-cache-memory-bytes") == str(2**30)
    assert "--enforce-eager" in argv
    assert "--trust-remote-code" not in argv


def test_a_prompt_is_never_prefilled_in_parts_on_a_cpu() -> None:
    """A seeded request that is ends the CPU engine ("CPU Generator does not use offset")."""
    argv = server_argv(ServeOptions(max_model_len=6000), Path("model"), 4321, cpu=True)
    assert "--no-enable-chunked-prefill" in argv
    assert int(value_after(argv, "--max-num-batched-tokens")) >= 6000


def test_a_gpu_keeps_its_own_defaults() -> None:
    argv = server_argv(ServeOptions(gpu_memory_utilization=0.4), Path("model"), 1, cpu=False)
    assert value_after(argv, "--dtype") == "auto"
    assert value_after(argv, "--gpu-memory-utilization") == "0.4"
    assert not {"--enforce-eager", "--kv-cache-memory-bytes"} & set(argv)


def test_options_of_the_cpu_build_are_refused_on_another(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("gpu_memory_utilization", "devices", "tensor_parallel"):
        value: Any = [0] if name == "devices" else 1
        with pytest.raises(ServingError, match=rf"{name} has no effect on the CPU build of vLLM"):
            start(ServeOptions.model_validate({name: value}), model_dir)
    monkeypatch.setattr(serving, "vllm_runs_on_cpu", lambda: False)
    with pytest.raises(ServingError, match=r"serve\.cpu has no effect on the CUDA build of vLLM"):
        start(ServeOptions(cpu=CpuOptions(threads=1)), model_dir)


def test_a_call_may_be_as_long_as_the_model_reads_and_the_cache_holds(tmp_path: Path) -> None:
    """On a CPU up to 4096 tokens, which is what one step takes anyway, so that nothing else grows."""
    sizes = {"num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 576}

    def length(context: int | None, **options: Any) -> tuple[int, int]:
        config = sizes if context is None else sizes | {"max_position_embeddings": context}
        (tmp_path / "config.json").write_text(json.dumps(config))
        argv = server_argv(ServeOptions(dtype="float32", **options), tmp_path, 1, cpu=True)
        return int(value_after(argv, "--max-model-len")), int(value_after(argv, "--max-num-batched-tokens"))

    assert length(8192) == (4096, 4096)
    assert length(2048) == (2048, 4096)
    # a token: 30 layers x 2 x 3 heads x 64 x 4 bytes = 45 KiB, of which 0.05 GiB hold 1165
    assert length(8192, kv_cache_gib=0.05) == (1165, 4096)
    assert length(8192, max_model_len=6000) == (6000, 6000)
    assert length(None) == (1024, 4096)


OPTIONS_OF_ALL_ARGUMENTS: dict[str, Any] = {
    "tool_call_parser": "hermes",
    "lora_target_modules": ("q_proj",),
    "kv_cache_gib": 1.0,
    "tensor_parallel": 2,
    "max_model_len": 512,
}


def all_argv(cpu: bool) -> list[str]:
    """A command line with everything that we ever set."""
    options = PlacedServeOptions.model_validate(OPTIONS_OF_ALL_ARGUMENTS | {"copies": 2, "sleeps": True})
    return server_argv(options, Path("model"), 1, cpu=cpu) + server_argv(
        ServeOptions(gpu_memory_utilization=0.5), Path("model"), 1, cpu=False
    )


def test_an_argument_that_is_set_here_is_refused_however_it_is_written() -> None:
    flags = {word for word in all_argv(cpu=False) if word.startswith("--")}
    assert len(flags) > 20
    for flag in flags:
        for written in (
            flag,
            f"{flag}=1",
            flag.replace("-", "_").replace("__", "--", 1),
            flag[:-1],
            f"--no-{flag[2:]}",
        ):
            with pytest.raises(ValidationError, match=r"extra_args\n.*is not yours to set"):
                ServeOptions(extra_args=(written,))
    for short in ("-tp", "-dp=2", "-t", "-t=2", "-d"):
        with pytest.raises(ValidationError, match="set serve"):
            ServeOptions(extra_args=(short, "2"))
    for short in ("-as", "-n2", "-r"):
        with pytest.raises(ValidationError, match="is not yours to set"):
            ServeOptions(extra_args=(short, "2"))
    with pytest.raises(ValidationError, match=r"'--max_model_len=9' is not yours .*: set serve\.max_model_len"):
        ServeOptions(extra_args=("--quantization", "fp8", "--max_model_len=9"))
    for word in ("fp8", "--", "-"):
        with pytest.raises(ValidationError, match=f"'{word}' is no argument of vLLM"):
            ServeOptions(extra_args=(word,))
    with pytest.raises(ValidationError, match="'--quantization fp8' is two texts: give the argument and its value one"):
        ServeOptions(extra_args=("--quantization fp8",))


@pytest.mark.parametrize(
    ("argument", "instead"),
    [
        ("--device-ids", "serve.devices"),
        ("--pipeline-parallel-size", "serve.tensor_parallel"),
        ("-pp", "serve.tensor_parallel"),
        ("--decode-context-parallel-size", "serve.tensor_parallel"),
        ("-dpl", "serve.devices and serve.tensor_parallel"),
        ("--data-parallel-size-local", "serve.devices and serve.tensor_parallel"),
        ("--nnodes", "serve.devices"),
        ("--worker-cls", "the plan of this machine"),
        ("--num-gpu-blocks-override", "serve.kv_cache_gib"),
        ("--logits-processors", "[sampling]"),
        ("--logprobs-mode", "training relies on its value"),
        ("--tokens-only", "the server is asked by chats"),
        ("--weight-transfer-config", "adapters are loaded from the run folder"),
    ],
)
def test_what_would_choose_cards_or_processes_behind_the_plan_or_change_what_is_sampled_is_refused(
    argument: str, instead: str
) -> None:
    with pytest.raises(ValidationError, match=rf"'{argument}' is not yours to set .*{re.escape(instead)}"):
        ServeOptions(extra_args=("--quantization", "fp8", argument, "2"))


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("--distributed-executor-backend", "mp"), None),
        (("--distributed_executor_backend=mp",), None),
        (("--max-logprobs", "20"), None),
        (("--max_logprobs=64",), None),
        (("--max-logprobs", "-1"), None),
        (
            ("--distributed-executor-backend", "ray"),
            "--distributed-executor-backend is 'ray', and only mp may be set: one",
        ),
        (("--distributed-exec=mine.Executor",), "--distributed-executor-backend is 'mine.Executor', and only mp may"),
        (
            ("--max-logprobs", "19"),
            "--max-logprobs is '19', and a call of the app may ask for 20 tokens a position: set 20",
        ),
        (("--max-logp=0",), "--max-logprobs is '0', and "),  # a beginning counts as the name
        (("--max-logprobs", "64", "--max-logprobs", "5"), "--max-logprobs is '5', and "),  # vLLM takes the last one
        (("--max-logprobs",), "--max-logprobs is '', and "),
    ],
)
def test_of_an_argument_that_harms_by_its_value_the_values_that_do_not_reach_vllm(
    arguments: tuple[str, ...], problem: str | None
) -> None:
    if problem is not None:
        with pytest.raises(ValidationError, match=re.escape(problem)):
            ServeOptions(extra_args=arguments)
        return
    argv = server_argv(ServeOptions(extra_args=arguments), Path("model"), 1, cpu=False)
    assert argv[-len(arguments) :] == [*arguments]


@pytest.mark.parametrize(
    "flag", ["--tokenizer", "--tokenizer_mode=slow", "--chat-template", "--default-chat-template-kwargs.thinking=false"]
)
def test_tokenizer_and_template_are_those_of_the_model_s_folder(flag: str) -> None:
    """The lineage of episodes is read there: told to vLLM alone, it would go unnoticed."""
    with pytest.raises(ValidationError, match=r"is not yours to set .*: .*folder"):
        ServeOptions(extra_args=(flag, "mine"))


def test_other_arguments_reach_vllm_and_one_that_a_cpu_needs_is_refused_there() -> None:
    extra_args = ("--quantization", "fp8", "--compilation-config.mode", "0", "--seed", "-1", "-dc", "{}")
    assert server_argv(ServeOptions(extra_args=extra_args), Path("model"), 1, cpu=False)[-8:] == [*extra_args]
    for flag in ("--enforce-eager", "--no-enforce-eager", "--block_size=16"):
        options = ServeOptions(extra_args=(flag,))
        assert server_argv(options, Path("model"), 1, cpu=False)[-1] == flag
        with pytest.raises(ServingError, match=r"serve\.extra_args: .* is set here already"):
            server_argv(options, Path("model"), 1, cpu=True)


@pytest.mark.slow
def test_vllm_itself_knows_every_argument_and_no_other_name_of_one_gets_through() -> None:
    script = (
        "import json; from vllm.entrypoints.launchers.cli_args import make_arg_parser\n"
        "from vllm.utils.argparse_utils import FlexibleArgumentParser\n"
        "print(json.dumps([a.option_strings for a in make_arg_parser(FlexibleArgumentParser())._actions]))"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=300)
    names = json.loads(run.stdout.splitlines()[-1])
    known = {name for group in names for name in group}
    flags = {word for word in all_argv(cpu=True) if word.startswith("--")}
    assert flags <= known
    for group in names:
        if set(group) & OWN_ARGUMENTS.keys():
            for name in group:
                with pytest.raises(ValidationError, match="is not yours to set"):
                    ServeOptions(extra_args=(name,))
        elif not set(group) & {"--distributed-executor-backend", "--max-logprobs"}:  # these go by their value
            for name in group:  # the user's to set, though one of ours may begin with it
                ServeOptions(extra_args=(name,))
    written = {name[:size] for name in known for size in range(2, len(name))} - known - {"--"}
    for word in written:  # as vLLM's parser, which is Python's, reads beginnings
        meant = {id(group): group for group in names if any(name.startswith(word) for name in group)}
        (group,) = meant.values() if len(meant) == 1 else [[]]
        if set(group) & OWN_ARGUMENTS.keys():
            with pytest.raises(ValidationError, match="is not yours to set"):
                ServeOptions(extra_args=(word,))


@pytest.mark.parametrize(("asked", "engine"), [(1, 1), (4, 8), (8, 8), (9, 16), (300, 320), (512, 512)])
def test_a_rank_is_rounded_up_to_one_that_the_engine_has(asked: int, engine: int) -> None:
    argv = server_argv(ServeOptions(max_lora_rank=asked), Path("model"), 1, cpu=True)
    assert value_after(argv, "--max-lora-rank") == str(engine)


def test_the_key_is_in_the_environment_only_and_not_shown() -> None:
    assert server_environment("s3cret", cpu=True)["VLLM_API_KEY"] == "s3cret"
    assert "s3cret" not in repr(Endpoint("http://127.0.0.1:1/v1", "s3cret", "base"))


def test_the_server_s_environment_is_offline_and_uses_every_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "40")
    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", "1")
    monkeypatch.delenv("VLLM_CPU_OMP_THREADS_BIND", raising=False)
    env = server_environment("k", cpu=True)
    assert (env["HF_HUB_OFFLINE"], env["TRANSFORMERS_OFFLINE"], env["VLLM_NO_USAGE_STATS"]) == ("1", "1", "1")
    assert {int(core) for core in env["VLLM_CPU_OMP_THREADS_BIND"].split(",")} == os.sched_getaffinity(0)
    assert "VLLM_CPU_KVCACHE_SPACE" not in env  # would overrule kv_cache_gib
    assert "VLLM_SERVER_DEV_MODE" not in env  # would add routes that run any method of the engine


# The log

CRASH = """\
(APIServer pid=1) INFO 11-21 15:50:47 [model.py:733] Resolved architecture: LlamaForCausalLM
Loading safetensors checkpoint shards: 100% Completed | 1/1 [00:00<00:00,  1.01it/s]
(APIServer pid=1) INFO 11-21 15:50:48 [launcher.py:195] Route: /ping, Methods: POST
(EngineCore pid=2) ERROR 11-21 15:51:08 [core.py:1] Traceback (most recent call last):
(EngineCore pid=2) ERROR 11-21 15:51:08 [core.py:1]   File "core.py", line 1, in run
(EngineCore pid=2) ERROR 11-21 15:51:08 [core.py:1]     raise ValueError(message)
(EngineCore pid=2) ERROR 11-21 15:51:08 [core.py:1] ValueError: not enough memory for the KV cache

Traceback (most recent call last):
  File "api_server.py", line 3, in <module>
RuntimeError: Engine core initialization failed.
"""


def test_the_last_lines_keep_the_cause_and_drop_the_stack(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text(CRASH)
    assert last_lines(log) == [
        "Resolved architecture: LlamaForCausalLM",
        "ValueError: not enough memory for the KV cache",
        "Traceback (most recent call last):",
        "RuntimeError: Engine core initialization failed.",
    ]
    assert last_lines(log, 1) == ["RuntimeError: Engine core initialization failed."]
    assert last_lines(tmp_path / "none") == []


def test_the_phase_is_the_latest_that_the_log_speaks_of() -> None:
    assert startup_phase("") is None
    log = "... Initializing a V1 LLM engine (v0.32.0)\n... Starting to load model m...\n"
    assert startup_phase(log) == "loading weights"


# The guard

FAMILY = """
import os, pathlib, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", {child!r}])
pathlib.Path(sys.argv[1]).write_text(f"{{os.getpid()}} {{child.pid}}")
time.sleep(600)
"""
PATIENT = "import time; time.sleep(600)"
STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"


def lives(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def eventually(true: Callable[[], bool], seconds: float = 15.0) -> bool:
    deadline = time.monotonic() + seconds
    while not true():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def pids_in(file: Path) -> list[int]:
    assert eventually(lambda: file.exists() and len(file.read_text().split()) == 2)
    return [int(word) for word in file.read_text().split()]


def guarded(*argv: str) -> list[str]:
    return [sys.executable, "-I", "-S", str(server_guard.__file__), "--", *argv]


def test_a_killed_parent_leaves_nothing_running(tmp_path: Path) -> None:
    command = guarded(sys.executable, "-c", FAMILY.format(child=PATIENT), str(tmp_path / "pids"))
    holder = f"import subprocess, time; subprocess.Popen({command!r}, stdin=subprocess.PIPE); time.sleep(600)"
    parent = subprocess.Popen([sys.executable, "-c", holder])
    family = pids_in(tmp_path / "pids")
    assert all(map(lives, family))
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    assert eventually(lambda: not any(map(lives, family)))


def test_a_killed_guard_ends_what_it_guards(tmp_path: Path) -> None:
    command = guarded(sys.executable, "-c", FAMILY.format(child=PATIENT), str(tmp_path / "pids"))
    with subprocess.Popen(command, stdin=subprocess.PIPE) as guard:
        child, grandchild = pids_in(tmp_path / "pids")
        guard.kill()
        guard.wait()
        assert eventually(lambda: not lives(child))
        os.kill(grandchild, signal.SIGKILL)  # vLLM ends its own processes when it is told to end; this child does not


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_signal_ends_the_whole_group(tmp_path: Path, number: signal.Signals) -> None:
    command = guarded(sys.executable, "-c", FAMILY.format(child=PATIENT), str(tmp_path / "pids"))
    with subprocess.Popen(command, stdin=subprocess.PIPE) as guard:
        family = pids_in(tmp_path / "pids")
        guard.send_signal(number)
        assert guard.wait(15) == 128 + signal.SIGTERM
        assert not any(map(lives, family))


@pytest.mark.slow
def test_what_ignores_the_polite_signal_is_killed(tmp_path: Path) -> None:
    script = FAMILY.format(child=STUBBORN)
    with subprocess.Popen([sys.executable, "-c", script, str(tmp_path / "pids")], start_new_session=True) as child:
        family = pids_in(tmp_path / "pids")
        time.sleep(0.3)  # until the grandchild has set its handler
        server_guard.end_group(child, grace_s=0.3)
        assert eventually(lambda: not any(map(lives, family)), 2.0)


@pytest.mark.slow
def test_what_a_dying_server_leaves_behind_is_ended_and_its_code_is_passed_on(tmp_path: Path) -> None:
    script = FAMILY.format(child=PATIENT).replace("time.sleep(600)\n", "sys.exit(7)\n")
    with subprocess.Popen(
        guarded(sys.executable, "-c", script, str(tmp_path / "pids")), stdin=subprocess.PIPE
    ) as guard:
        family = pids_in(tmp_path / "pids")
        assert guard.wait(15) == 7
        assert not any(map(lives, family))


# Starting


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "llama"}')
    (folder / "tokenizer.json").touch()
    (folder / "model.safetensors").touch()
    return folder


def start(options: ServeOptions, model_dir: Path, **more: Any) -> ModelServer:
    return ModelServer.start(options, model_dir, adapters=model_dir.parent / "adapters", log=log_of(model_dir), **more)


def log_of(model_dir: Path) -> Path:
    return model_dir.parent / "run" / "vllm.log"


def runs_instead_of_vllm(script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_process, "server_argv", lambda *args, **_: [sys.executable, "-c", script, str(args[2])])


def test_a_port_that_is_taken_is_named_before_anything_starts(model_dir: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ServingError, match=rf"port {port} on 127\.0\.0\.1 cannot be used .*set another port"):
            start(ServeOptions(port=port), model_dir)
    assert not log_of(model_dir).exists()


def test_a_directory_that_is_no_model_is_refused_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(ServingError, match=r"has no config\.json"):
        start(ServeOptions(), tmp_path)
    assert not log_of(tmp_path).exists()


def test_a_server_that_dies_while_starting_shows_its_last_lines(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs_instead_of_vllm("raise SystemExit('no room for the weights')", monkeypatch)
    with pytest.raises(ServingError, match=r"ended with exit code 1; (.|\n)*no room for the weights"):
        start(ServeOptions(), model_dir)
    assert log_of(model_dir).stat().st_mode & 0o777 == 0o600


def test_a_server_that_is_never_ready_is_ended_in_time(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = "import os, time; print('pid', os.getpid(), flush=True); time.sleep(600)"
    runs_instead_of_vllm(script, monkeypatch)
    with pytest.raises(ServingError, match=r"not ready after 1 s \(startup_timeout_s\)"):
        start(ServeOptions(startup_timeout_s=1.0), model_dir)
    assert not lives(int(log_of(model_dir).read_text().split("\npid ")[1].split()[0]))


SERVES = """
import http.server, os, sys
print("Starting to load model", os.getpid(), flush=True)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        right = self.headers["Authorization"] == "Bearer " + os.environ["VLLM_API_KEY"]
        self.send_response(200 if right or self.path == "/health" else 401)
        self.end_headers()
        self.wfile.write(b'{"data": []}')
    def do_DELETE(self):
        os._exit(3)
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def test_a_started_server_is_reached_with_its_key_and_ended_with_the_block(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs_instead_of_vllm(SERVES, monkeypatch)
    told: list[str] = []
    log = log_of(model_dir)
    with start(ServeOptions(), model_dir, on_progress=told.append) as server:
        endpoint = server.endpoint
        assert server.adapter_names() == []
        url, headers = f"{endpoint.base_url}/models", {"Authorization": f"Bearer {endpoint.api_key}"}
        assert httpx.get(url, headers=headers, trust_env=False).status_code == 200
        assert httpx.get(url, trust_env=False).status_code == 401
        pid = int(log.read_text().split("load model ")[1].split()[0])
        assert endpoint.api_key.encode() not in Path(f"/proc/{pid}/cmdline").read_bytes()
    assert not lives(pid)
    assert told[-1].startswith("ready, ")
    assert re.match(r"marft-bridge: vLLM on the CPU: \d+ threads? in ", log.read_text())  # how it runs, before its own
    assert endpoint.api_key not in log.read_text()
    with pytest.raises(ServingError, match="not running"):
        server.adapter_names()


def test_a_server_that_dies_later_is_noticed_with_its_last_lines(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs_instead_of_vllm(SERVES, monkeypatch)
    with start(ServeOptions(), model_dir) as server:
        endpoint = server.endpoint
        server.check()
        with pytest.raises(httpx.HTTPError):
            httpx.delete(endpoint.base_url, trust_env=False)
        with pytest.raises(ServingError, match=r"exit code 3; (.|\n)*Starting to load model"):
            eventually(lambda: server.check() is not None)


# Attaching


def attach(url: str, tmp_path: Path, **options: Any) -> ModelServer:
    options = ServeOptions(attach=url, **options)
    return ModelServer.start(options, tmp_path / "model", adapters=tmp_path, log=tmp_path / "log")


def test_a_running_server_is_attached_to_with_the_key_from_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_KEY", "abc")
    with running(FakeVllm("abc")) as fake, attach(f"{fake.url}/v1", tmp_path, api_key_env="MY_KEY") as server:
        assert server.endpoint == Endpoint(f"{fake.url}/v1", "abc", "base")
        assert server.adapter_names() == []
        assert httpx.get(f"{fake.url}/health", trust_env=False).status_code == 200


def test_a_key_that_is_missing_or_wrong_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MY_KEY", raising=False)
    with running(FakeVllm("abc")) as fake:
        with pytest.raises(ServingError, match=r"'MY_KEY'.* is not set"):
            attach(fake.url, tmp_path, api_key_env="MY_KEY")
        with pytest.raises(ServingError, match="refuses the API key"):
            attach(fake.url, tmp_path)
        for key in ("ab\nc", "cl\u00e9"):
            monkeypatch.setenv("MY_KEY", key)
            with pytest.raises(ServingError, match=r"serve\.attach: .*'MY_KEY' \(api_key_env\) holds no key: "):
                attach(fake.url, tmp_path, api_key_env="MY_KEY")
    with pytest.raises(ServingError, match=r"model server http://127\.0\.0\.1:80a: no address"):
        EngineClient("http://127.0.0.1:80a", None)


def test_a_key_is_read_without_the_line_break_that_a_file_put_behind_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_KEY", "abc\r\n")
    with running(FakeVllm("abc")) as fake, attach(fake.url, tmp_path, api_key_env="MY_KEY") as server:
        assert server.endpoint.api_key == "abc"


class Moody(BaseHTTPRequestHandler):
    """/health as it is told: seconds to wait, or None to hang up."""

    moods: ClassVar[list[float | None]] = []

    def do_GET(self) -> None:
        mood = self.moods.pop(0) if self.moods else 0.0
        if mood is None:
            return
        time.sleep(mood)
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *args: Any) -> None:
        """Quiet."""


def test_an_attached_server_has_gone_away_only_when_it_does_not_answer_for_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "_AWAY_S", 4.0)
    with ThreadingHTTPServer(("127.0.0.1", 0), Moody) as page:
        thread = threading.Thread(target=page.serve_forever)
        thread.start()
        url = f"http://127.0.0.1:{page.server_port}"
        options, endpoint = ServeOptions(attach=url), Endpoint(f"{url}/v1", "none", "base")
        client = EngineClient(url, None)
        server = ModelServer(
            options, tmp_path, adapters=tmp_path, log=tmp_path / "log", client=client, endpoint=endpoint, process=None
        )
        try:
            Moody.moods = [2.3, None]  # a stall of its event loop, then a connection that it drops
            server.check()
            assert Moody.moods == []
        finally:
            page.shutdown()
            thread.join()
    monkeypatch.setattr(serving, "_AWAY_S", 0.5)
    with server, pytest.raises(ServingError) as caught:
        server.check()
    assert str(caught.value) == (
        f"the model server does not answer any more: {url}; "
        "start it again, then this command (with --resume where it has that)"
    )


def test_a_server_that_cannot_be_trained_against_is_refused_when_attaching(tmp_path: Path) -> None:
    with running(FakeVllm(lora_routes=False)) as fake, pytest.raises(ServingError, match="cannot load adapters"):
        attach(fake.url, tmp_path)
    with running(FakeVllm(processed=False)) as fake, pytest.raises(ServingError, match="processed_logprobs"):
        attach(fake.url, tmp_path)
    with pytest.raises(ServingError, match="no vLLM server answers"):
        attach(fake.url, tmp_path)


@pytest.mark.parametrize(
    ("models", "completion"),
    [
        ("<html>an app</html>", "{}"),
        ("[]", "{}"),
        ("{}", "{}"),
        ("[" * 3_000, "{}"),
        ('{"data": [{"id": "base"}]}', '{"choices": ' + "[" * 3_000),
        ('{"data": [1]}', "{}"),
        ('{"data": [{}]}', "{}"),
        ('{"data": [{"id": "base"}]}', "<html>an app</html>"),
        ('{"data": [{"id": "base"}]}', '{"choices": []}'),
        ('{"data": [{"id": "base"}]}', '{"choices": [{"logprobs": {"top_logprobs": [{"a": "x", "b": "y"}]}}]}'),
    ],
)
def test_something_that_answers_but_is_no_model_server_is_refused_in_one_line(
    models: str, completion: str, tmp_path: Path
) -> None:
    class Page(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            content = (completion if self.path == "/v1/completions" else models).encode()
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def do_POST(self) -> None:
            self.do_GET()

        def log_message(self, *args: Any) -> None:
            """Quiet."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Page) as page:
        thread = threading.Thread(target=page.serve_forever)
        thread.start()
        try:
            with pytest.raises(ServingError) as caught:
                attach(f"http://127.0.0.1:{page.server_port}", tmp_path)
        finally:
            page.shutdown()
            thread.join()
    assert "did not answer as vLLM does, but with " in str(caught.value)
    assert "\n" not in str(caught.value)


# The real engine

QKV = {"q_proj": (576, 576), "v_proj": (192, 576)}
LAYERS = {f"layers.{layer}.self_attn.{name}": shape for layer in range(30) for name, shape in QKV.items()}


def chat(served: RunningServer, model: str, temperature: float) -> dict[str, Any]:
    body = {
        "model": model,
        "messages": [{"role": "user", "content": "What is 2 + 3?"}],
        "temperature": temperature,
        "seed": 1,
        "max_tokens": 32,
        "logprobs": True,
        "return_token_ids": True,
    }
    headers = {"Authorization": f"Bearer {served.endpoint.api_key}"}
    url = f"{served.endpoint.base_url}/chat/completions"
    answer = httpx.post(url, json=body, headers=headers, timeout=120, trust_env=False)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def logprobs_of(answer: dict[str, Any]) -> list[float]:
    return [token["logprob"] for token in answer["choices"][0]["logprobs"]["content"]]


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_of_the_engine_are_those_of_the_tempered_distribution(
    vllm_server: RunningServer, temperature: float
) -> None:
    """Against transformers in float32: log softmax(logits / T) at each sampled token, which bfloat16 blurs a little."""
    import torch
    from transformers import AutoModelForCausalLM

    answer = chat(vllm_server, "base", temperature)
    prompt, sampled = answer["prompt_token_ids"], answer["choices"][0]["token_ids"]
    engine = torch.tensor(logprobs_of(answer))  # [tokens]
    assert len(sampled) == len(engine) > 0
    model = AutoModelForCausalLM.from_pretrained(vllm_server.model_dir, dtype=torch.float32)
    with torch.no_grad():
        logits = model(torch.tensor([prompt + sampled])).logits[0, len(prompt) - 1 : -1]  # [tokens, vocabulary]
    expected = torch.log_softmax(logits / temperature, -1).gather(1, torch.tensor(sampled)[:, None])[:, 0]
    assert (engine - expected).abs().mean() < 0.08


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_published_adapter_is_served_beside_the_base_model_and_retired(vllm_server: RunningServer) -> None:
    registry = AdapterRegistry(vllm_server.adapter_root, "b" * 64)
    for version, scale in ((1, 0.0), (2, 0.2)):
        write_adapter(registry.new_folder("serving-test/node", version), LAYERS, scale=scale, seed=version)
        registry.register("serving-test/node", version, version - 1 or None, {})
    null, loud = (publish(vllm_server.server, registry, "serving-test/node", version) for version in (1, 2))
    assert {null, loud} <= set(vllm_server.server.adapter_names())
    base = logprobs_of(chat(vllm_server, "base", 0.0))
    # B = 0 leaves the model as it is; B != 0 does not. First token only: later ones depend on those before.
    assert logprobs_of(chat(vllm_server, null, 0.0))[0] == pytest.approx(base[0], abs=0.05)
    assert abs(logprobs_of(chat(vllm_server, loud, 0.0))[0] - base[0]) > 0.1
    assert chat(vllm_server, loud, 0.0)["model"] == loud
    for version in (1, 2):
        retire(vllm_server.server, "serving-test/node", version)
    assert not {null, loud} & set(vllm_server.server.adapter_names())


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_engine_s_refusal_of_an_adapter_is_one_clear_line(vllm_server: RunningServer) -> None:
    folder = write_adapter(vllm_server.adapter_root / "serving-test-rank", LAYERS, rank=16)
    with pytest.raises(ServingError, match=r"LoRA rank 16 is greater than max_lora_rank 8") as caught:
        vllm_server.server.load_adapter("serving-test-rank@1", folder)
    assert "\n" not in str(caught.value)
    with pytest.raises(ServingError, match="does not exist"):
        vllm_server.server.load_adapter("serving-test-none@1", vllm_server.adapter_root / "none")


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_an_engine_started_here_passes_the_checks_of_attaching(
    vllm_server: RunningServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_KEY", vllm_server.endpoint.api_key)
    with attach(vllm_server.endpoint.base_url, tmp_path, api_key_env="MY_KEY") as second:
        assert second.endpoint == vllm_server.endpoint
    vllm_server.server.check()  # detaching ended nothing
