"""One collector on a cluster: requests in, recorded episodes out, through a journal of its own.

The driver calls `exchange` again and again: it passes the offset up to which it has the worker's journal on its disk,
and new requests, and gets the lines from there. Invariants: no request counts as ended before all of its records were
sent; the worker leaves no server and no files behind when it is stopped. Ray runs it as an actor, and is not imported.
What `publish` was told is served when it answers; the driver waits for that.
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

from marft_bridge.common.errors import USER_ERRORS, ClusterError, ConfigError, GraphError, ServingError
from marft_bridge.common.progress import Reporter
from marft_bridge.config.bridge import BridgeConfig
from marft_bridge.config.ray import RayOptions
from marft_bridge.config.serve import ServeOptions
from marft_bridge.devices.card_names import names_to_uuids, same_cards, visible_names
from marft_bridge.rollouts.app import load_app
from marft_bridge.rollouts.collector import Collector, Job
from marft_bridge.rollouts.episode_plan import EpisodeRequest, Key
from marft_bridge.rollouts.graph_stage import Stage, open_stage
from marft_bridge.rollouts.ray.messages import (
    AdapterFiles,
    Assignment,
    NodeVersion,
    Report,
    config_to_digests,
    digest_differences,
)
from marft_bridge.rollouts.run_counts import Tally
from marft_bridge.runs.run_folder import RunFolder
from marft_bridge.serving.base_models import config_to_bases, with_modules
from marft_bridge.serving.model_versions import bases_to_versions
from marft_bridge.serving.placement import Placement
from marft_bridge.serving.served_bases import ServedBases, serve_bases
from marft_bridge.serving.vllm_arguments import vllm_runs_on_cpu
from trace_store.files import open_to_read
from trace_store.journal import finished_lines, folder_to_segments, lock_if_abandoned

WAIT_S = 0.5  # that an exchange waits for a change, at most
CHUNK_BYTES = 4 * 2**20  # bytes of one report, or one line where that is longer


class Worker:
    """A collector in a thread of its own, and the methods that the driver calls."""

    def __init__(self, assignment: Assignment) -> None:
        self._assignment = assignment
        self._config = BridgeConfig.model_validate(dict(assignment.config))
        self._scratch = RunFolder(Path(tempfile.mkdtemp(prefix="marft-worker-")))
        self._changed = threading.Condition()  # guards the attributes below
        self._phase, self._losses = "starting", ""
        self._failure: tuple[str, str] | None = None
        self._ended: list[Key] = []
        self._tally, self._list_number = Tally(), 0
        self._models: ServedBases | None = None
        self._job_queue: _JobQueue | None = None
        self._stopped = False
        self._deleted_bytes = 0  # of the journal's first segments, which the driver has
        self._thread = threading.Thread(target=self._run_thread, name="collector", daemon=True)
        self._thread.start()

    # -- called by the driver ---------------------------------------------------------------------------------

    def exchange(
        self, offset: int, requests: Sequence[EpisodeRequest], list_number: int = 0, *, finished_before: int = 0
    ) -> Report:
        """Takes new requests, and reports what is new.

        Args:
            offset: bytes of this worker's journal that the driver has on its disk.
            requests: to run besides; none before a report said "working".
            list_number: of the list that they are of; a new one is counted anew, and none of another is under way.
            finished_before: of that list, as of `Tally`; read where there are requests.
        """
        with self._changed:
            if list_number != self._list_number:
                self._tally, self._list_number = Tally(), list_number
                if self._job_queue is not None:
                    self._job_queue.tally = self._tally
        if requests:
            assert self._job_queue is not None  # a report said "working"
            self._tally.finished_before = finished_before
            self._job_queue.add(requests)
        with self._changed:
            self._changed.wait_for(lambda: self._ended or self._phase == "ended", WAIT_S)
            ended, self._ended = self._ended, []
            phase, failure, losses = self._phase, self._failure, self._losses
            tally = Tally(started_s=self._tally.started_s)
            tally.add(self._tally)
            list_number = self._list_number
        lines, is_complete = self._lines_from(offset)
        if not is_complete:  # the records of an ended request may be among the lines that are left
            with self._changed:
                self._ended = ended + self._ended
            ended, phase = [], "working" if phase == "ended" else phase
        location = f"{socket.gethostname()}, process {os.getpid()}"
        return Report(
            phase,
            location,
            lines,
            end=offset + len(lines),
            ended=tuple(ended),
            tally=tally,
            list_number=list_number,
            failure=failure,
            losses=losses,
        )

    def publish(self, offset: int, served: Sequence[NodeVersion], *adapters: AdapterFiles) -> Report:
        """Serves these versions of their nodes, and no others, and reports as `exchange`; where that fails the worker
        ends, with the reason.

        Args:
            adapters: those that were not published here before.
        """
        models = self._models
        if models is not None:  # else it has ended, which the report says
            self._serve(models, served, adapters)
        return self.exchange(offset, [], self._list_number)

    def _serve(self, models: ServedBases, served: Sequence[NodeVersion], adapters: Sequence[AdapterFiles]) -> None:
        registry = models.versions.registry
        kept_versions: dict[str, list[int]] = {}
        for node, version in served:
            kept_versions.setdefault(node, []).append(version)
        try:
            models.retire_all_but(kept_versions)
            for node, versions in kept_versions.items():
                for version in set(registry.versions(node)) - {0, *versions}:
                    registry.delete(node, version)
            for adapter in adapters:
                if adapter.version not in registry.versions(adapter.node):  # every version 0 is here
                    registry.adopt(adapter.node, adapter.version, adapter.files)
                models.publish({adapter.node: adapter.version})
        except Exception as error:  # noqa: BLE001 - the driver raises it, or replaces this worker
            name, text = type(error).__name__, str(error)
            with self._changed:
                self._failure = self._failure or (name, text if isinstance(error, USER_ERRORS) else f"{name}: {text}")
            self._end_jobs()

    def stop(self) -> None:
        """Cancels running episodes, ends the model server if it is this worker's, and removes the worker's files."""
        self._end_jobs()
        shutil.rmtree(self._scratch.path, ignore_errors=True)

    def _end_jobs(self) -> None:
        self._stopped = True
        if self._job_queue is not None:
            self._job_queue.stop()
        self._thread.join()

    def _lines_from(self, offset: int) -> tuple[bytes, bool]:
        """Whole lines of the journal from an offset, and whether they are all that it holds now.

        They may not be synced to this machine's disk yet. That does no harm: only the driver's disk counts.
        """
        begin = self._deleted_bytes
        segments = folder_to_segments(self._scratch.journal)
        for segment in segments:
            try:
                opened = open_to_read(segment)
            except FileNotFoundError:  # its first append failed, so its writer removed it
                return b"", False
            with opened as file:
                size = os.fstat(file.fileno()).st_size
                is_last = segment == segments[-1]
                if begin + size <= offset and not is_last:
                    if begin == self._deleted_bytes and lock_if_abandoned(file):  # all of it is on the driver's disk
                        segment.unlink()
                        self._deleted_bytes += size
                    begin += size
                    continue
                file.seek(offset - begin)
                read = file.read(CHUNK_BYTES)
                if b"\n" not in read:
                    read += file.readline()
                lines = finished_lines(read)
                end = offset - begin + len(lines)
                return lines, is_last and end >= os.fstat(file.fileno()).st_size
        return b"", True

    # -- in the thread ----------------------------------------------------------------------------------------

    def _run_thread(self) -> None:
        try:
            with self._open_collector() as (collector, stage):
                with self._changed:
                    self._job_queue = _JobQueue(stage.loop.get_loop(), collector, self._tally)
                    self._phase = "working"
                    self._changed.notify_all()
                if not self._stopped:
                    stage.loop.run(self._run_jobs(self._job_queue, stage))
        except USER_ERRORS as error:
            self._failure = (type(error).__name__, str(error))
        except BaseException as error:  # noqa: BLE001 - the driver raises it
            self._failure = (type(error).__name__, f"{type(error).__name__}: {error}")
        finally:
            with self._changed:
                self._phase, self._models = "ended", None
                self._changed.notify_all()

    async def _run_jobs(self, jobs: _JobQueue, stage: Stage) -> None:
        def note_end(job: Job) -> None:
            with self._changed:
                self._ended.append(job[1].key)
                self._losses = stage.losses
                self._changed.notify_all()

        in_flight = self._config.ray.in_flight or self._config.collect.in_flight
        running = asyncio.ensure_future(stage.run_async(jobs, in_flight, note_end))
        stopping = asyncio.ensure_future(jobs.stopped.wait())
        await asyncio.wait({running, stopping}, return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if not running.done():
            running.cancel()
            await asyncio.wait({running})
        elif not running.cancelled():
            running.result()

    @contextmanager
    def _open_collector(self) -> Iterator[tuple[Collector, Stage]]:
        """A collector of the user's app on its served model, as the driver configured it."""
        assignment, config, quiet_reporter = self._assignment, self._config, Reporter(Console(quiet=True))
        if assignment.endpoint is None:
            refuse_server_without_card(config.ray)
            _refuse_taken_card(assignment.taken_cards)
        with _in_folder(assignment.folder):
            app = load_app(config)
            bases = config_to_bases(config, quiet_reporter.say)
        model_versions = bases_to_versions(bases, self._scratch.adapters, config)
        if differences := digest_differences(assignment.digests, config_to_digests(config, model_versions.lineage)):
            raise ClusterError("; ".join(differences) + "; give every machine of the cluster what this one has")
        versions = dict.fromkeys((*config.graph.nodes, *app.frozen), 0)
        options = [base.serve for base in bases]
        if assignment.endpoint is not None:
            options = [endpoint_to_options(config, assignment.endpoint)]
        with (
            open_stage(config, self._scratch, quiet_reporter) as stage,
            serve_bases(
                config,
                model_versions,
                options,
                log_of=self._scratch.server_log_of,
                loop=stage.loop,
                reporter=quiet_reporter,
                placement=Placement(config, bases, options, trains=False, beside_trainer=False),
            ) as models,
        ):
            if assignment.endpoint is None:
                model_versions.register_zero(versions)
                models.publish(versions)
            else:
                _check_served(models, versions, assignment.endpoint)
            with stage.open_app(app, models, models.judge) as collector:
                self._models = models
                yield collector, stage


class _JobQueue:
    """An endless iterator of jobs, to which another thread adds requests."""

    def __init__(self, loop: asyncio.AbstractEventLoop, collector: Collector, tally: Tally) -> None:
        self._loop, self._collector, self.tally = loop, collector, tally
        self._queue: asyncio.Queue[EpisodeRequest] = asyncio.Queue()
        self.stopped = asyncio.Event()

    def add(self, requests: Sequence[EpisodeRequest]) -> None:
        for request in requests:
            self._loop.call_soon_threadsafe(self._queue.put_nowait, request)

    def stop(self) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self.stopped.set)

    def __aiter__(self) -> _JobQueue:
        return self

    async def __anext__(self) -> Job:
        return self._collector, await self._queue.get(), self.tally


@contextmanager
def _in_folder(folder: str | None) -> Iterator[None]:
    """Works in the folder; an app or a model that is missing there is reported as missing on this machine only.

    Args:
        folder: None where Ray has put this process into the folder that was sent.

    Raises:
        ClusterError: the folder does not exist on this machine.
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


def refuse_server_without_card(options: RayOptions) -> None:
    """Refuses several workers that start a model server on cards, while Ray sets none aside: all would be on one.

    Raises:
        ConfigError: this machine's vLLM computes on cards, and `ray.gpus_per_worker` is 0.
    """
    if options.gpus_per_worker or options.endpoints or options.workers == 1 or vllm_runs_on_cpu():
        return
    raise ConfigError(
        "ray.gpus_per_worker is 0, but each worker starts a model server, whose vLLM is built for cards: all of them "
        "would take the first card. Set it to 1, or to the cards of one server; where this machine is the whole "
        "cluster and trains on a card, leave train.rollouts at 'local'"
    )


def _refuse_taken_card(taken_cards: Sequence[str]) -> None:
    """Refuses a card that Ray gave to this worker, and on which the command computes, of which Ray knows nothing.

    Raises:
        ClusterError: names the card.
    """
    if taken_cards and (shared := same_cards(names_to_uuids(visible_names(os.environ)), taken_cards)):
        raise ClusterError(
            f"this worker was given card {shared[0]}, on which the command trains: start Ray there with a "
            "CUDA_VISIBLE_DEVICES that leaves it out, or with --num-gpus=0"
        )


def endpoint_to_options(config: BridgeConfig, endpoint: str) -> ServeOptions:
    """The options by which a worker attaches to a shared server."""
    attached = ServeOptions(attach=endpoint, api_key_env=config.ray.api_key_env, hang_s=config.serve.hang_s)
    return with_modules(config, attached.model_copy(update={"lora_target_modules": config.serve.lora_target_modules}))


def _check_served(models: ServedBases, versions: Mapping[str, int], endpoint: str) -> None:
    """Refuses a shared server without these adapters. The driver has published them: a worker may not see their folder.

    Raises:
        ServingError: one of them is not loaded.
    """
    served = models.adapter_names()
    for node, version in versions.items():
        if (name := models.versions.registry.served_name(node, version)) not in served:
            raise ServingError(f"the model server at {endpoint} does not serve {name!r} any more")
