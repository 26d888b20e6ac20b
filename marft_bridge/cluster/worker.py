"""One collector on a cluster: requests in, recorded episodes out, by a journal segment of its own.

The driver asks, again and again, for what is new since the bytes that it has on its disk (`exchange`), and gives new
requests with the question. Invariants: nothing counts as ended before all of its records went out; the worker leaves
nothing behind when it is told to stop. It knows nothing of Ray, which runs it as an actor, or of the store.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console

from marft_bridge.bases import config_to_bases, with_modules
from marft_bridge.cluster.messages import Assignment, Key, Report, agreement, disagreements
from marft_bridge.config import BridgeConfig
from marft_bridge.engine import load_app
from marft_bridge.errors import USER_ERRORS, ClusterError, GraphError, ServingError
from marft_bridge.plan import EpisodeRequest
from marft_bridge.progress import Reporter
from marft_bridge.rollouts import Collector, Job
from marft_bridge.run_folder import RunFolder
from marft_bridge.served_models import ServedModels
from marft_bridge.serving import ServeOptions
from marft_bridge.stage import Stage
from marft_bridge.tally import Tally
from trace_store.journal import SUFFIX

WAIT_S = 0.5  # that an exchange waits for news at most
CHUNK = 4 * 2**20  # bytes of one report, or one line where that is longer


class Worker:
    """A collector that works in a thread of its own while the driver asks."""

    def __init__(self, assignment: Assignment) -> None:
        self._assignment = assignment
        self._scratch = RunFolder(Path(tempfile.mkdtemp(prefix="marft-worker-")))
        self._news = threading.Condition()  # guards what follows
        self._phase, self._losses = "starting", ""
        self._failure: tuple[str, str] | None = None
        self._ended: list[Key] = []
        self._tally = Tally()
        self._inbox: _Inbox | None = None
        self._stopped = False
        self._thread = threading.Thread(target=self._work, name="collector", daemon=True)
        self._thread.start()

    # -- asked by the driver ----------------------------------------------------------------------------------

    def exchange(self, have: int, requests: Sequence[EpisodeRequest]) -> Report:
        """What is new.

        Args:
            have: bytes of this worker's journal that the driver has on its disk.
            requests: to run besides; none before a report said "working".
        """
        if requests:
            assert self._inbox is not None  # it said that it works
            self._inbox.put(requests)
        with self._news:
            self._news.wait_for(lambda: self._ended or self._phase == "ended", WAIT_S)
            ended, self._ended = self._ended, []
            phase, failure, losses = self._phase, self._failure, self._losses
            tally = Tally(began=self._tally.began)
            tally.add(self._tally)
        lines, is_all = self._lines_from(have)
        if not is_all:  # the records of what ended may be among the rest
            with self._news:
                self._ended = ended + self._ended
            ended, phase = [], "working" if phase == "ended" else phase
        place = f"{socket.gethostname()}, process {os.getpid()}"
        return Report(phase, place, lines, have + len(lines), tuple(ended), tally, failure, losses)

    def stop(self) -> None:
        """Gives up what runs, ends the model server if it is this worker's, and removes the worker's files."""
        self._stopped = True
        if self._inbox is not None:
            self._inbox.stop()
        self._thread.join()
        shutil.rmtree(self._scratch.path, ignore_errors=True)

    def _lines_from(self, offset: int) -> tuple[bytes, bool]:
        """Whole lines of the journal from an offset, and whether they are all that is there now.

        They may be ahead of this machine's disk. That is no loss: the driver's counts.
        """
        segment = next(self._scratch.journal.glob(f"*{SUFFIX}"), None)
        if segment is None:
            return b"", True
        with segment.open("rb") as file:
            file.seek(offset)
            read = file.read(CHUNK)
            if b"\n" not in read:
                read += file.readline()
            lines = read[: read.rfind(b"\n") + 1]
            return lines, offset + len(lines) >= os.fstat(file.fileno()).st_size

    # -- in the thread ----------------------------------------------------------------------------------------

    def _work(self) -> None:
        try:
            with self._collector() as (collector, stage):
                with self._news:
                    self._inbox = _Inbox(stage.loop.get_loop(), collector, self._tally)
                    self._phase = "working"
                    self._news.notify_all()
                if not self._stopped:
                    stage.loop.run(self._run(self._inbox, stage))
        except USER_ERRORS as error:
            self._failure = (type(error).__name__, str(error))
        except BaseException as error:  # noqa: BLE001 - the driver raises it
            self._failure = (type(error).__name__, f"{type(error).__name__}: {error}")
        finally:
            with self._news:
                self._phase = "ended"
                self._news.notify_all()

    async def _run(self, inbox: _Inbox, stage: Stage) -> None:
        def note_end(job: Job) -> None:
            with self._news:
                self._ended.append(job[1].key)
                self._losses = stage.losses
                self._news.notify_all()

        in_flight = self._config.ray.in_flight or self._config.collect.in_flight
        running = asyncio.ensure_future(stage.play(inbox, in_flight, note_end))
        stopping = asyncio.ensure_future(inbox.stopped.wait())
        await asyncio.wait({running, stopping}, return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if not running.done():
            running.cancel()
            await asyncio.wait({running})
        elif not running.cancelled():
            running.result()

    @contextmanager
    def _collector(self) -> Iterator[tuple[Collector, Stage]]:
        """The user's app on its served model, as the driver configured it."""
        assignment, silent = self._assignment, Reporter(Console(quiet=True))
        self._config = config = BridgeConfig.model_validate(dict(assignment.config))
        with _there_as_here(assignment.folder):
            app = load_app(config)
            bases = config_to_bases(config, silent.say)
        models = ServedModels(config, bases, self._scratch.adapters)
        if wrong := disagreements(assignment.agreed, agreement(config, models.lineage)):
            raise ClusterError("; ".join(wrong) + "; give every machine of the cluster what this one has")
        versions = dict.fromkeys((*config.graph.nodes, *app.frozen), 0)
        options = [base.serve for base in bases]
        if assignment.endpoint is not None:
            options = [endpoint_to_options(config, assignment.endpoint)]
        with (
            Stage(config, self._scratch, silent) as stage,
            models.served(options, self._scratch.server_log_of, stage.loop, silent),
        ):
            if assignment.endpoint is None:
                models.register_null(versions)
                models.publish(versions)
            else:
                _check_served(models, versions, assignment.endpoint)
            with stage.opened(app, models, models.place) as collector:
                yield collector, stage


class _Inbox:
    """Jobs that are still to come, from another thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop, collector: Collector, tally: Tally) -> None:
        self._loop, self._collector, self._tally = loop, collector, tally
        self._queue: asyncio.Queue[EpisodeRequest] = asyncio.Queue()
        self.stopped = asyncio.Event()

    def put(self, requests: Sequence[EpisodeRequest]) -> None:
        for request in requests:
            self._loop.call_soon_threadsafe(self._queue.put_nowait, request)

    def stop(self) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self.stopped.set)

    def __aiter__(self) -> _Inbox:
        return self

    async def __anext__(self) -> Job:
        return self._collector, await self._queue.get(), self._tally


@contextmanager
def _there_as_here(folder: str | None) -> Iterator[None]:
    """In the folder, whatever is missing on this machine is said to be missing here: the driver has it.

    Args:
        folder: None where Ray has put this process into the folder that was sent.
    """
    try:
        if folder is not None:
            os.chdir(folder)
    except OSError as error:
        raise ClusterError(
            f"cannot work in {folder!r}, the folder of the command: {error.strerror}; have it on this machine under "
            "the same path, or send a folder with ray.working_dir"
        ) from error
    try:
        yield
    except (GraphError, ServingError) as error:
        raise type(error)(
            f"{error} (looked for in {str(Path.cwd())!r}; the command's machine has it: install it on this one, share "
            "the folder, or send one with ray.working_dir)"
        ) from error


def endpoint_to_options(config: BridgeConfig, endpoint: str) -> ServeOptions:
    """How a server that the workers share is attached to."""
    attached = ServeOptions(attach=endpoint, api_key_env=config.ray.api_key_env, hang_s=config.serve.hang_s)
    return with_modules(config, attached.model_copy(update={"lora_target_modules": config.serve.lora_target_modules}))


def _check_served(models: ServedModels, versions: Mapping[str, int], endpoint: str) -> None:
    """The driver has published the adapters: a worker may not see the folder that they are loaded from."""
    served = models.loaded()
    for node, version in versions.items():
        if (name := models.registry.served_name(node, version)) not in served:
            raise ServingError(f"the model server at {endpoint} does not serve {name!r} any more")
