"""Journal lines that workers send -> segments of the run folder's journal, and which requests they finish.

Invariants: a line is filed only whole and undamaged, and only if it is a span or a reward, which is all that a worker
has to say; what was filed and synced is in the store after the next intake, whatever becomes of the worker. It knows
nothing of Ray.
"""

from __future__ import annotations

from marft_bridge.cluster.messages import Key
from marft_bridge.episode import CANCELLED
from marft_bridge.errors import ClusterError
from trace_store import conventions as names
from trace_store.journal import Journal, JournalRecord, record_of
from trace_store.records import Reward, SpanRow


class Filing:
    """One writer's end of the run folder's journal, for the lines of all workers."""

    def __init__(self, journal: Journal, run_id: str) -> None:
        self._journal, self._run_id = journal, run_id
        self._done: set[Key] = set()
        self._ended: dict[str, Key] = {}  # episodes that came to their end and have no reward yet
        self._rewarded: set[str] = set()  # episodes whose reward came before their root span

    def add(self, lines: bytes, sender: str) -> None:
        """Files lines; they are acknowledged by the next `sync`.

        Raises:
            ClusterError: a line is damaged, or holds what no worker records.
            StoreError: the disk does not take them.
        """
        for line in lines.splitlines(keepends=True):
            record = record_of(line)
            if record is None:
                raise ClusterError(f"{sender} sent a damaged line of its journal; check its disk and its memory")
            self._note(record, sender)
        self._journal.append_lines(lines)

    def sync(self) -> None:
        """Acknowledges what was added: it is on the disk. Raises StoreError."""
        self._journal.sync()

    def is_done(self, key: Key) -> bool:
        """Whether the lines so far hold a finished episode of this request, as resuming understands it."""
        return key in self._done

    def _note(self, record: JournalRecord, sender: str) -> None:
        if isinstance(record, Reward):
            if record.scope == "episode":
                self._rewarded.add(record.episode_id)
                self._settle(record.episode_id)
            return
        if not isinstance(record, SpanRow):
            raise ClusterError(f"{sender} sent a {type(record).__name__}; workers send spans and rewards only")
        said = record.attributes
        if record.parent_span_id is not None or said.get(names.OPERATION) != names.INVOKE_WORKFLOW:
            return
        if said.get(names.RUN_ID) != self._run_id:
            raise ClusterError(f"{sender} sent an episode of the run {said.get(names.RUN_ID)!r}, not {self._run_id!r}")
        key = (said[names.TASK_ID], said[names.SAMPLE], said.get(names.VARIANT), said.get(names.ROUND))
        outcome = said.get(names.OUTCOME)
        if outcome == "truncated" and said.get(names.OUTCOME_REASON) != CANCELLED:
            self._done.add(key)
        elif outcome == "terminated":
            self._ended[record.trace_id] = key
            self._settle(record.trace_id)

    def _settle(self, episode_id: str) -> None:
        if episode_id in self._ended and episode_id in self._rewarded:
            self._done.add(self._ended.pop(episode_id))
            self._rewarded.discard(episode_id)
