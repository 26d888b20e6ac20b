"""Journal lines that workers send -> segments of the run folder's journal, and the requests that they finish.

Invariants: a line is filed only whole and undamaged, and only if it is a span or a reward, the two kinds that a worker
records; lines that were filed and synced are in the store after the next intake, even if the worker dies.
"""

from __future__ import annotations

from marft_bridge.common.errors import ClusterError
from marft_bridge.recording.episode_context import CANCELLED
from marft_bridge.rollouts.episode_plan import ForkPoint, Key
from trace_store import conventions as names
from trace_store.journal import ForeignLine, Journal, JournalRecord, RewardGroup, record_of, record_to_rewards
from trace_store.records import Reward, SpanRow


class Filing:
    """Writes the lines of all workers to the run folder's journal, and tracks which requests are done."""

    def __init__(self, journal: Journal, run_id: str) -> None:
        self._journal, self._run_id = journal, run_id
        self._done: set[Key] = set()
        self._ended: dict[str, Key] = {}  # episodes that came to their end and have no reward yet
        self._rewarded: set[str] = set()  # episodes whose reward came before their root span

    def add(self, lines: bytes, sender: str) -> None:
        """Files lines; they are acknowledged by the next `sync`.

        Raises:
            ClusterError: a line is damaged, or holds a record that is not a worker's.
            StoreError: the disk does not take them.
        """
        for line in lines.splitlines(keepends=True):
            record = record_of(line)
            if record is None:
                raise ClusterError(f"{sender} sent a damaged line of its journal; check its disk and its memory")
            if isinstance(record, ForeignLine):
                raise ClusterError(
                    f"{sender} sent a line that this version does not know ({record.reason}); install the same"
                    " marft-bridge on all machines"
                )
            self._track(record, sender)
        self._journal.append_lines(lines)

    def sync(self) -> None:
        """Acknowledges the added lines: they are on the disk. Raises StoreError."""
        self._journal.sync()

    def is_done(self, key: Key) -> bool:
        """Whether the lines so far hold a finished episode of this request, by the rule of `unfinished_requests`."""
        return key in self._done

    def _track(self, record: JournalRecord, sender: str) -> None:
        if isinstance(record, Reward | RewardGroup):
            for episode_id in {each.episode_id for each in record_to_rewards(record) if each.scope == "episode"}:
                self._rewarded.add(episode_id)
                self._mark_if_rewarded(episode_id)
            return
        if not isinstance(record, SpanRow):
            raise ClusterError(f"{sender} sent a {type(record).__name__}; workers send spans and rewards only")
        attributes = record.attributes
        if record.parent_span_id is not None or attributes.get(names.OPERATION) != names.INVOKE_WORKFLOW:
            return
        if attributes.get(names.RUN_ID) != self._run_id:
            raise ClusterError(
                f"{sender} sent an episode of the run {attributes.get(names.RUN_ID)!r}, not {self._run_id!r}"
            )
        parent, fork_action = attributes.get(names.PARENT_EPISODE), attributes.get(names.FORK_ACTION)
        key: Key = (
            attributes[names.TASK_ID],
            attributes[names.SAMPLE],
            attributes.get(names.VARIANT),
            attributes.get(names.ROUND),
            None if parent is None or fork_action is None else ForkPoint(parent, fork_action),
        )
        outcome = attributes.get(names.OUTCOME)
        if outcome == "truncated" and attributes.get(names.OUTCOME_REASON) != CANCELLED:
            self._done.add(key)
            self._rewarded.discard(record.trace_id)  # that of its limit, which comes first
        elif outcome == "terminated":
            self._ended[record.trace_id] = key
            self._mark_if_rewarded(record.trace_id)

    def _mark_if_rewarded(self, episode_id: str) -> None:
        if episode_id in self._ended and episode_id in self._rewarded:
            self._done.add(self._ended.pop(episode_id))
            self._rewarded.discard(episode_id)
