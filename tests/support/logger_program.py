"""A training run's loggers without a training run: a program of its own, in an environment that has their packages.

    logger_program.py log RUN_FOLDER LOGGERS_JSON IS_RESUMED STEP ...
    logger_program.py read RUN_FOLDER NAME
    logger_program.py reach

`log` tells the loggers of the steps' figures and prints what went wrong, `read` what the logger's own library finds:
each prints JSON, with the packets and connections that found no way out of this machine so far.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from marft_bridge.config.bridge import toml_to_config
from marft_bridge.runs.run_folder import RunFolder
from marft_bridge.training.loggers.run_loggers import open_loggers
from support.paths import ROOT

FIGURES = {"agents": {"team/reasoner": {"approx_kl": None, "tokens": 12}}}


def lines(steps: list[int]) -> list[dict[str, Any]]:
    return [{"round": step, "phase": "online", "critic": {"value_loss": step / 4}, **FIGURES} for step in steps]


def log(run: Path, loggers: str, is_resumed: str, *steps: str) -> list[str]:
    config = toml_to_config(ROOT / "examples/math_duo/bridge.toml", {"train.loggers": json.loads(loggers)})
    complaints: list[str] = []
    folder = RunFolder(run)
    folder.create()
    with open_loggers(config, folder, is_resumed == "yes", say=complaints.append) as opened:
        for count in range(1, len(steps) + 1):  # as rounds come
            opened.log(lines([int(step) for step in steps[:count]]))
    folder.refuse_unsafe()
    return complaints


def unreachable() -> int:
    """How often something of this network namespace found no route: 0 where nothing but loopback was tried."""
    headers, values = [
        line.split() for line in Path("/proc/net/snmp").read_text().splitlines() if line.startswith("Ip:")
    ]
    version_6 = [line.split() for line in Path("/proc/net/snmp6").read_text().splitlines()]
    return int(values[headers.index("OutNoRoutes")]) + int(dict(version_6)["Ip6OutNoRoutes"])


def reach() -> None:
    """Tries to leave the machine: by address, and by name."""
    for attempt in (
        lambda: socket.create_connection(("192.0.2.1", 443), 2),
        lambda: socket.getaddrinfo("www.example.org", 443),
    ):
        with suppress(OSError):
            attempt()


# -- what each library finds ------------------------------------------------------------------------------------------


def read_wandb(run: Path) -> dict[str, Any]:
    """Every offline folder of the run, in order; W&B's own files have LevelDB's log format around its records."""
    from wandb.proto import wandb_internal_pb2

    steps: list[list[float]] = []
    ids, options = set(), {}
    for path in sorted(run.glob("loggers/wandb/wandb/offline-run-*/run-*.wandb")):
        for content in leveldb_records(path.read_bytes()[7:], start=7):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(content)
            if record.HasField("run"):
                ids.add(record.run.run_id)
                options |= {item.key: json.loads(item.value_json) for item in record.run.config.update}
            if record.HasField("history"):
                items = {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}
                if "critic/value_loss" in items:
                    steps.append([record.history.step.num, float(items["critic/value_loss"])])
    return {"runs": len(ids), "steps": steps, "seed": options.get("seed")}


def leveldb_records(content: bytes, start: int) -> Iterator[bytes]:
    """Blocks of 32 KiB with pieces of records: checksum, length, and whether it is whole, first, middle or last."""
    position, pieces = start, b""
    while position - start + 7 <= len(content):
        room = 32_768 - position % 32_768
        if room < 7:
            position += room
            continue
        header = content[position - start : position - start + 7]
        length, kind = int.from_bytes(header[4:6], "little"), header[6]
        pieces += content[position - start + 7 : position - start + 7 + length]
        position += 7 + length
        if kind in (1, 4):
            yield pieces
            pieces = b""


def read_mlflow(run: Path) -> dict[str, Any]:
    os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{run / 'loggers/mlflow/mlflow.db'}")
    (experiment,) = [each for each in client.search_experiments() if each.name == "math_duo"]
    runs = client.search_runs([experiment.experiment_id])
    history = client.get_metric_history(runs[0].info.run_id, "critic/value_loss")
    steps = sorted([point.step, point.value] for point in history)
    assert runs[0].info.status == "FINISHED", runs[0].info
    return {"runs": len(runs), "steps": steps, "seed": int(runs[0].data.params["seed"])}


def read_trackio(run: Path) -> dict[str, Any]:
    os.environ["TRACKIO_DIR"] = str(run / "loggers/trackio")
    import trackio
    from trackio.sqlite_storage import SQLiteStorage

    runs = list(trackio.Api().runs("math_duo"))
    rows = SQLiteStorage.get_logs("math_duo", runs[0].name)
    return {
        "runs": len(runs),
        "steps": [[row["step"], row["critic/value_loss"]] for row in rows],
        "seed": runs[0].config["seed"],
    }


def read_tensorboard(run: Path) -> dict[str, Any]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    steps = [[point.step, point.value] for point in events.Scalars("critic/value_loss")]
    return {"runs": 1, "steps": steps, "seed": 0}


READERS: dict[str, Callable[[Path], dict[str, Any]]] = {
    "mlflow": read_mlflow,
    "tensorboard": read_tensorboard,
    "trackio": read_trackio,
    "wandb": read_wandb,
}


def main(command: str, *arguments: str) -> None:
    result: Any = None
    match command:
        case "log":
            result = log(Path(arguments[0]), *arguments[1:])
        case "read":
            result = READERS[arguments[1]](Path(arguments[0]))
        case "reach":
            reach()
    sys.stdout.write(json.dumps({"result": result, "unreachable": unreachable()}) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
