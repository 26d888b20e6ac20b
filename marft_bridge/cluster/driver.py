"""Requests -> episodes that workers on a Ray cluster run, filed in the run folder's journal.

Each worker holds a few requests more than it runs, and gets the next ones when the records of those that ended are on
this machine's disk: nobody runs ahead of the disk, and a slow worker keeps little back. Invariants: what a worker that
died had not finished goes to another one, and what it had finished and sent is not run again; a request that keeps
taking workers with it ends the command. It knows nothing of graphs or adapters' files.
"""

from __future__ import annotations

import signal
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

from marft_bridge import errors
from marft_bridge.cluster.filing import Filing
from marft_bridge.cluster.messages import Assignment, Key, Report
from marft_bridge.cluster.options import RayOptions
from marft_bridge.cluster.worker import Worker
from marft_bridge.errors import BridgeError, ClusterError
from marft_bridge.plan import EpisodeRequest
from marft_bridge.tally import Tally

LOST_AT_MOST = 3  # workers that die with one request
_STOP_S = 20.0  # for a worker to end its server and remove its files
_PASSING = ("ServingError", "StoreError")  # of one worker's own server and disk: another one may do better


@dataclass(slots=True)
class _Hand:
    """A worker, as the driver sees it."""

    number: int
    actor: Any
    asked: Any  # the reference of what it was asked last
    hired: float
    name: str
    have: int = 0  # bytes of its journal that are on this machine's disk
    held: dict[Key, EpisodeRequest] = field(default_factory=dict)
    tally: Tally = field(default_factory=Tally)
    met: bool = False  # it has answered: its process is there
    working: bool = False
    late: bool = False
    losses: str = ""


class Driver:
    """Hires workers, hands out requests and files what comes back. Use it for one list of requests.

    Args:
        ray: the module, connected to a cluster.
        in_flight: episodes that one worker runs at the same time.
        assign: a worker's number -> what it is hired for.
        say: one line for the user.
    """

    def __init__(
        self,
        ray: Any,
        options: RayOptions,
        in_flight: int,
        assign: Callable[[int], Assignment],
        filing: Filing,
        say: Callable[[str], None],
    ) -> None:
        self._ray, self._options, self._assign, self._filing, self._say = ray, options, assign, filing, say
        self._held_at_most = in_flight + max(1, in_flight // 4)
        self._actor_of = ray.remote(Worker).options(
            num_cpus=options.cpus_per_worker,
            num_gpus=options.gpus_per_worker,
            max_restarts=0,
            scheduling_strategy="SPREAD",  # Ray's default fills half of one machine before it takes the next
        )
        self._hands: list[_Hand] = []
        self._gone = Tally()  # of workers that died
        self._waiting: deque[EpisodeRequest] = deque()
        self._lost_with: Counter[Key] = Counter()
        self._losses_in_a_row = 0
        self._hired = self.done = 0

    def run(self, requests: Sequence[EpisodeRequest], on_progress: Callable[[int, Tally], None]) -> Tally:
        """Runs all requests, and shows how many are done and what happened so far.

        Raises:
            BridgeError: the app, the configuration or the cluster cannot be used; most episodes fail.
            StoreError: this machine's disk does not take the records.
        """
        self._waiting.extend(requests)
        try:
            for _ in range(min(self._options.workers, len(requests))):
                self._hire()
            with interrupts_noted() as check:
                while self._waiting or any(hand.held for hand in self._hands):
                    self._round()
                    check()
                    on_progress(self.done, self.tally())
        finally:
            self._dismiss_all()
        for hand in self._hands:
            if hand.losses:
                self._say(f"{hand.name}: {hand.losses}")
        return self.tally()

    def tally(self) -> Tally:
        """What happened so far, at all workers."""
        total = Tally(began=self._gone.began)
        for tally in (self._gone, *(hand.tally for hand in self._hands)):
            total.add(tally)
        return total

    def _hire(self) -> None:
        self._hired += 1
        actor = self._actor_of.remote(self._assign(self._hired))
        asked = actor.exchange.remote(0, [])
        self._hands.append(_Hand(self._hired, actor, asked, time.monotonic(), f"worker {self._hired}"))

    def _round(self) -> None:
        """Takes what has come from the workers until now, or waits a second for something."""
        by_ref = {hand.asked: hand for hand in self._hands}
        refs = list(by_ref)
        if self._ray.wait(refs, num_returns=1, timeout=1.0)[0]:
            ready, _ = self._ray.wait(refs, num_returns=len(refs), timeout=0)
        else:
            ready = []
        came = [(by_ref[ref], self._report(by_ref[ref])) for ref in ready]
        for hand, report in came:
            if isinstance(report, Report):
                hand.name = f"worker {hand.number} ({report.place})"
                self._filing.add(report.lines, hand.name)
        self._filing.sync()  # one for all that came
        for hand, report in came:
            if isinstance(report, Report):
                self._settle(hand, report)
            else:
                self._lose(hand, report)
        self._check_starting()

    def _report(self, hand: _Hand) -> Report | str:
        """What a worker answered, or why it never will."""
        known = self._ray.exceptions
        try:
            report: Report = self._ray.get(hand.asked)
        except known.RayActorError as error:
            if error.actor_init_failed:  # it would elsewhere, too
                raise ClusterError(
                    f"{hand.name} could not be made where Ray put it: {_last_line(error)}; every machine of the "
                    "cluster needs marft-bridge and what the app imports, in the Python that Ray was started with"
                ) from error
            return f"died: {_reason(error)}"
        except (known.ObjectLostError, known.NodeDiedError) as error:  # its answer lay on the machine that is gone
            return f"died: {_reason(error)}"
        except known.RayError as error:  # such as a working_dir that cannot be unpacked, or no machine that is fit
            raise ClusterError(f"{hand.name}: {_reason(error)}") from error
        return report

    def _settle(self, hand: _Hand, report: Report) -> None:
        """After its lines are on the disk: counts what ended, and asks on."""
        hand.have, hand.tally, hand.losses, hand.met = report.end, report.tally, report.losses, True
        for key in report.ended:
            if hand.held.pop(key, None) is not None:
                self.done += 1
                self._losses_in_a_row = 0
        if report.phase == "ended":
            self._judge(hand, *(report.failure or ("ClusterError", "stopped by itself")))
            return
        hand.working = report.phase == "working"
        new = []
        while hand.working and self._waiting and len(hand.held) < self._held_at_most:
            request = self._waiting.popleft()
            hand.held[request.key] = request
            new.append(request)
        hand.asked = hand.actor.exchange.remote(hand.have, new)

    def _judge(self, hand: _Hand, kind: str, message: str) -> None:
        """A worker ended with an error: the command's own, or one that another worker may not meet."""
        if hand.working and kind in _PASSING:
            self._lose(hand, f"ended: {message}")
            return
        found = getattr(errors, kind, None)
        known = found if isinstance(found, type) and issubclass(found, BridgeError) else ClusterError
        raise known(f"{hand.name}: {message}")

    def _lose(self, hand: _Hand, why: str) -> None:
        """What the worker had not finished goes to another, in front of what was never begun."""
        self._hands.remove(hand)
        self._gone.add(hand.tally)
        self._kill(hand)
        again = [request for key, request in hand.held.items() if not self._filing.is_done(key)]
        self.done += len(hand.held) - len(again)
        self._lost_with.update(request.key for request in again)
        self._losses_in_a_row += 1
        self._say(f"{hand.name} {why}; {len(again)} unfinished episodes go to another worker")
        if self._losses_in_a_row > self._options.workers + 1:
            raise ClusterError(f"{self._losses_in_a_row} workers were lost with no episode in between; the last {why}")
        for request in again:
            if (lost := self._lost_with[request.key]) > LOST_AT_MOST:
                raise ClusterError(
                    f"task {request.task['id']!r}, sample {request.sample}: {lost} workers were lost while it ran; "
                    f"the last {why}"
                )
        self._waiting.extendleft(reversed(again))
        if self._waiting:
            self._hire()

    def _check_starting(self) -> None:
        """Whoever is too late ends the command, unless others work: a cluster may have lost the place for one."""
        for hand in self._hands:
            if hand.working or hand.late or time.monotonic() - hand.hired <= self._options.start_timeout_s:
                continue
            why = (
                f"{hand.name} could not run episodes after {self._options.start_timeout_s:g} s "
                f"(ray.start_timeout_s); the cluster has {self._resources()}, a worker asks for "
                f"{self._options.cpus_per_worker:g} CPUs and {self._options.gpus_per_worker:g} GPUs"
            )
            if not any(other.working for other in self._hands):
                raise ClusterError(why)
            hand.late = True
            self._say(f"{why}; the others go on without it")

    def _resources(self) -> str:
        free, all_there = self._ray.available_resources(), self._ray.cluster_resources()
        return " and ".join(
            f"{free.get(name, 0):g} of {all_there.get(name, 0):g} {name}s free" for name in ("CPU", "GPU")
        )

    def _dismiss_all(self) -> None:
        stopping = [hand.actor.stop.remote() for hand in self._hands if hand.met]  # others have nothing to tidy up
        if stopping:
            self._ray.wait(stopping, num_returns=len(stopping), timeout=_STOP_S)
        for hand in self._hands:
            self._kill(hand)

    def _kill(self, hand: _Hand) -> None:
        self._ray.kill(hand.actor)  # does nothing to one that is dead


@contextmanager
def interrupts_noted() -> Iterator[Callable[[], None]]:
    """A function that raises KeyboardInterrupt if there was a Ctrl-C inside the block.

    Python drops what is raised inside a destructor, and Ray's references have one: a Ctrl-C there would be lost.
    """
    came = False
    before = signal.getsignal(signal.SIGINT)

    def check() -> None:
        if came:
            raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield check  # no signal comes here, or none is asked for
        return

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal came
        came = True
        before(number, frame)

    signal.signal(signal.SIGINT, note)
    try:
        yield check
    finally:
        signal.signal(signal.SIGINT, before)


def _reason(error: BaseException) -> str:
    """What Ray says, without the numbers by which it knows an actor, which stand in lines that are set in."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip() and not line.startswith("\t")]
    return " ".join(lines)[:300] or type(error).__name__


def _last_line(error: BaseException) -> str:
    """Of a traceback: the error itself."""
    return [line.strip() for line in str(error).splitlines() if line.strip()][-1]
