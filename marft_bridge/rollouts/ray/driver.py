"""Requests -> episodes that workers on a Ray cluster run, filed in the run folder's journal.

Each worker holds a few requests more than it runs, and gets the next ones when the records of finished episodes are on
this machine's disk: no worker runs ahead of the disk, and a slow one holds few requests back. Invariants: unfinished
requests of a worker that died go to another one, and a request whose records were filed is not run again; a request
with which too many workers die ends the command; a worker has the adapters of a request before it has the request.
"""

from __future__ import annotations

import signal
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType, MappingProxyType, TracebackType
from typing import Any, Self

from marft_bridge.common import errors
from marft_bridge.common.errors import BridgeError, ClusterError
from marft_bridge.config.ray import RayOptions
from marft_bridge.rollouts.episode_plan import EpisodeRequest, Key
from marft_bridge.rollouts.ray.connection import error_to_text, last_line, resources_to_text
from marft_bridge.rollouts.ray.filing import Filing
from marft_bridge.rollouts.ray.messages import AdapterFiles, Assignment, NodeVersion, Report
from marft_bridge.rollouts.ray.worker import Worker
from marft_bridge.rollouts.run_counts import Tally
from trace_store.journal import Journal

MAX_LOSSES_PER_REQUEST = 3  # workers that may die with the same request
_STOP_S = 20.0  # for a worker to end its server and remove its files
_LOCAL_ERRORS = ("ServingError", "StoreError")  # of one worker's own server and disk: another worker may succeed


@dataclass(slots=True)
class _WorkerHandle:
    """The driver's record of one worker."""

    number: int
    actor: Any
    pending_reply: Any  # Ray's reference to the answer of the last `exchange`
    started_s: float  # on the monotonic clock
    name: str
    journal_bytes: int = 0  # bytes of its journal that are on this machine's disk
    requests: dict[Key, EpisodeRequest] = field(default_factory=dict)  # sent to it and not finished
    tally: Tally = field(default_factory=Tally)
    has_answered: bool = False  # its process exists
    is_working: bool = False  # it runs episodes
    is_late: bool = False  # it did not start in time, which was reported
    losses: str = ""
    published: frozenset[NodeVersion] = frozenset()  # what it was told to serve


class Driver:
    """Starts workers, gives them requests and files the records that they send. Use it as a context manager.

    The workers are there from the first list of requests to the end of the block, and between lists do nothing.

    Args:
        ray: the module, connected to a cluster.
        in_flight: episodes that one worker runs at the same time.
        assign: a worker's number, from 1 -> its assignment.
        journal: of the run folder; takes the records.
        notify: takes one line for the user.
    """

    def __init__(
        self,
        ray: Any,
        options: RayOptions,
        in_flight: int,
        assign: Callable[[int], Assignment],
        journal: Journal,
        notify: Callable[[str], None],
    ) -> None:
        self._ray, self._options, self._assign, self._journal, self._notify = ray, options, assign, journal, notify
        self._max_requests = in_flight + max(1, in_flight // 4)  # some more than run, so that no worker idles
        self._actor_class = ray.remote(Worker).options(
            num_cpus=options.cpus_per_worker,
            num_gpus=options.gpus_per_worker,
            max_restarts=0,
            scheduling_strategy="SPREAD",  # Ray's default fills half of one machine before it takes the next
        )
        self._workers: list[_WorkerHandle] = []
        self._lost_tally = Tally()  # of workers that died
        self._finished_before = 0  # of the running list, as of `Tally`
        self._filing: Filing  # of the running list
        self._pending: deque[EpisodeRequest] = deque()
        self._losses_by_request: Counter[Key] = Counter()
        self._consecutive_losses = 0
        self._worker_count = self.done = 0
        self._list_number = -1  # of the running list; the first is 0, which new workers count
        # Replaced as a whole, never changed: `publish` may be called while another thread is in `run`.
        self._adapters: Mapping[NodeVersion, Any] = MappingProxyType({})  # Ray's references to `AdapterFiles`
        self._stopped = threading.Event()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stop_all()

    def publish(self, served: Collection[NodeVersion], read: Callable[[NodeVersion], AdapterFiles]) -> None:
        """Has the workers serve these versions of the trained nodes, and no others; each is told before its next
        requests.

        Args:
            read: of a version that is new; it goes to the object store once, and from there to every worker.
        """
        adapters = self._adapters
        self._adapters = MappingProxyType(
            {key: adapters[key] if key in adapters else self._ray.put(read(key)) for key in served}
        )

    def stop(self) -> None:
        """Ends the `run` of another thread, which raises CancelledError there."""
        self._stopped.set()

    def run(
        self,
        requests: Sequence[EpisodeRequest],
        on_progress: Callable[[int, Tally], None],
        *,
        finished_before: int = 0,
    ) -> Tally:
        """Runs all requests, which are of one run.

        Args:
            on_progress: takes the number of finished requests and the counts so far, after every round.
            finished_before: as of `Tally`. Every worker holds all of them against its own failures.

        Raises:
            BridgeError: the app, the configuration or the cluster cannot be used; most episodes fail.
            StoreError: this machine's disk does not take the records.
        """
        self._pending.extend(requests)
        self._filing, self._lost_tally = Filing(self._journal, requests[0].run_id), Tally()
        self._finished_before = finished_before
        self._losses_by_request.clear()
        self._list_number, self.done = self._list_number + 1, 0
        for worker in self._workers:
            worker.tally = Tally()
        while len(self._workers) < min(self._options.workers, len(requests)):
            self._start_worker()
        with remember_interrupts() as check:
            while self._pending or any(worker.requests for worker in self._workers):
                self._round()
                check()
                if self._stopped.is_set():
                    raise CancelledError
                on_progress(self.done, self.tally())
        for worker in self._workers:
            if worker.losses:
                self._notify(f"{worker.name}: {worker.losses}")
        return self.tally()

    def tally(self) -> Tally:
        """The counts so far, over all workers."""
        total = Tally(started_s=self._lost_tally.started_s, finished_before=self._finished_before)
        for tally in (self._lost_tally, *(worker.tally for worker in self._workers)):
            total.add(tally)
        return total

    def _start_worker(self) -> None:
        self._worker_count += 1
        actor = self._actor_class.remote(self._assign(self._worker_count))
        reply, name = actor.exchange.remote(0, []), f"worker {self._worker_count}"
        self._workers.append(_WorkerHandle(self._worker_count, actor, reply, started_s=time.monotonic(), name=name))

    def _round(self) -> None:
        """Files the reports that have arrived, or waits a second for one."""
        by_ref = {worker.pending_reply: worker for worker in self._workers}
        refs = list(by_ref)
        if self._ray.wait(refs, num_returns=1, timeout=1.0)[0]:
            ready, _ = self._ray.wait(refs, num_returns=len(refs), timeout=0)
        else:
            ready = []
        answers = [(by_ref[ref], self._get_report(by_ref[ref])) for ref in ready]
        for worker, report in answers:
            if isinstance(report, Report):
                worker.name = f"worker {worker.number} ({report.location})"
                self._filing.add(report.lines, worker.name)
        self._filing.sync()  # one sync for all reports; nothing is acknowledged before it
        for worker, report in answers:
            if isinstance(report, Report):
                self._settle(worker, report)
            else:
                self._replace_worker(worker, report)
        self._check_start_time()

    def _get_report(self, worker: _WorkerHandle) -> Report | str:
        """A worker's report, or the reason why there will be none.

        Raises:
            ClusterError: Ray cannot make or reach the worker, for a reason that other workers would meet too.
        """
        ray_errors = self._ray.exceptions
        try:
            report: Report = self._ray.get(worker.pending_reply)
        except ray_errors.RayActorError as error:
            if error.actor_init_failed:  # it would fail on other machines, too
                raise ClusterError(
                    f"{worker.name} could not be made where Ray put it: {last_line(error)}; every machine of the "
                    "cluster needs marft-bridge and what the app imports, in the Python that Ray was started with"
                ) from error
            return f"died: {error_to_text(error)}"
        except (ray_errors.ObjectLostError, ray_errors.NodeDiedError) as error:  # the answer was on a lost machine
            return f"died: {error_to_text(error)}"
        except ray_errors.RayError as error:  # such as a working_dir that cannot be unpacked, or no suitable machine
            raise ClusterError(f"{worker.name}: {error_to_text(error)}") from error
        return report

    def _settle(self, worker: _WorkerHandle, report: Report) -> None:
        """Counts a report's finished requests, once its lines are on the disk, and sends the worker new ones."""
        worker.journal_bytes, worker.losses, worker.has_answered = report.end, report.losses, True
        if report.list_number == self._list_number:  # an idle worker's last answer counts the list before
            worker.tally = report.tally
        for key in report.ended:
            if worker.requests.pop(key, None) is not None:
                self.done += 1
                self._consecutive_losses = 0
        if report.phase == "ended":
            self._end_with_failure(worker, *(report.failure or ("ClusterError", "stopped by itself")))
            return
        worker.is_working = report.phase == "working"
        adapters = self._adapters
        if worker.is_working and worker.published != adapters.keys():
            # Requests wait for its answer: Ray may run a call whose arguments still travel after a later one.
            missing = [reference for key, reference in adapters.items() if key not in worker.published]
            worker.pending_reply = worker.actor.publish.remote(worker.journal_bytes, tuple(adapters), *missing)
            worker.published = frozenset(adapters)
            return
        new = []
        while worker.is_working and self._pending and len(worker.requests) < self._max_requests:
            request = self._pending.popleft()
            worker.requests[request.key] = request
            new.append(request)
        worker.pending_reply = worker.actor.exchange.remote(
            worker.journal_bytes, new, self._list_number, finished_before=self._finished_before
        )

    def _end_with_failure(self, worker: _WorkerHandle, error_name: str, message: str) -> None:
        """Raises the error that a worker ended with, or replaces the worker where another one may not meet it."""
        if worker.is_working and error_name in _LOCAL_ERRORS:
            self._replace_worker(worker, f"ended: {message}")
            return
        named_class: Any = getattr(errors, error_name, None)
        is_bridge_error = isinstance(named_class, type) and issubclass(named_class, BridgeError)
        error_class = named_class if is_bridge_error else ClusterError
        raise error_class(f"{worker.name}: {message}")

    def _replace_worker(self, worker: _WorkerHandle, reason: str) -> None:
        """Removes a worker; its unfinished requests go to another, in front of those that never began."""
        self._workers.remove(worker)
        self._lost_tally.add(worker.tally)
        self._kill(worker)
        unfinished = [request for key, request in worker.requests.items() if not self._filing.is_done(key)]
        self.done += len(worker.requests) - len(unfinished)
        self._losses_by_request.update(request.key for request in unfinished)
        self._consecutive_losses += 1
        self._notify(f"{worker.name} {reason}; {len(unfinished)} unfinished episodes go to another worker")
        if self._consecutive_losses > self._options.workers + 1:
            lost = self._consecutive_losses
            raise ClusterError(f"{lost} workers were lost with no episode in between; the last {reason}")
        for request in unfinished:
            if (lost := self._losses_by_request[request.key]) > MAX_LOSSES_PER_REQUEST:
                raise ClusterError(
                    f"task {request.task['id']!r}, sample {request.sample}: {lost} workers were lost while it ran; "
                    f"the last {reason}"
                )
        self._pending.extendleft(reversed(unfinished))
        if self._pending:
            self._start_worker()

    def _check_start_time(self) -> None:
        """Ends the command when a worker starts too late and none works; where others work, it is only reported, since
        the cluster may have shrunk."""
        for worker in self._workers:
            elapsed_s = time.monotonic() - worker.started_s
            if worker.is_working or worker.is_late or elapsed_s <= self._options.start_timeout_s:
                continue
            message = (
                f"{worker.name} could not run episodes after {self._options.start_timeout_s:g} s "
                f"(ray.start_timeout_s); the cluster has {resources_to_text(self._ray)}, a worker asks for "
                f"{self._options.cpus_per_worker:g} CPUs and {self._options.gpus_per_worker:g} GPUs"
            )
            if not any(worker.is_working for worker in self._workers):
                raise ClusterError(message)
            worker.is_late = True
            self._notify(f"{message}; the others go on without it")

    def _stop_all(self) -> None:
        # A worker that has never answered has nothing to tidy up, and its reference might never be ready.
        stop_refs = [worker.actor.stop.remote() for worker in self._workers if worker.has_answered]
        if stop_refs:
            self._ray.wait(stop_refs, num_returns=len(stop_refs), timeout=_STOP_S)
        for worker in self._workers:
            self._kill(worker)

    def _kill(self, worker: _WorkerHandle) -> None:
        self._ray.kill(worker.actor)  # does nothing to one that is dead


@contextmanager
def remember_interrupts() -> Iterator[Callable[[], None]]:
    """Yields a function that raises KeyboardInterrupt if there was a Ctrl-C inside the block.

    Python drops an exception that is raised inside a destructor, and Ray's references have one: a Ctrl-C there would
    be lost.
    """
    interrupted = False
    previous_handler = signal.getsignal(signal.SIGINT)

    def check() -> None:
        if interrupted:
            raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread() or not callable(previous_handler):
        yield check  # signals reach the main thread only, and the handler may be C code or SIG_IGN
        return

    def remember(number: int, frame: FrameType | None) -> None:
        nonlocal interrupted
        interrupted = True
        previous_handler(number, frame)

    signal.signal(signal.SIGINT, remember)
    try:
        yield check
    finally:
        signal.signal(signal.SIGINT, previous_handler)
