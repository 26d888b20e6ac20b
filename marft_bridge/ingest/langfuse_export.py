"""Langfuse's own exports, as parsed JSON -> spans as its SDK would have sent them, and scores.

    GET /api/public/traces/ID          a trace with its observations and scores (server 3)
    GET /api/public/v2/observations    a page of observations (server 4), or of /observations (server 3)
    export button of the web page      a list of traces or observations
    export to blob storage             rows of observations, traces or scores, with the database's names

Records of one trace may come from several files and in several of these forms. Invariants: ids are Langfuse's own
where they have OpenTelemetry's form, else digests of them, the same each time; what was not exported is absent; no
text inside a record decides what the record is.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any

from marft_bridge.ingest import langfuse
from marft_bridge.ingest.errors import IngestError
from marft_bridge.ingest.otlp import WireSpan
from marft_bridge.ingest.reading import as_list, as_text
from trace_store.json_text import read_json

SCOPE = "langfuse-export"
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")

Record = dict[str, Any]  # one object of an export, its own keys in snake_case


@dataclass(frozen=True, slots=True)
class Score:
    """A number that somebody or something gave to a trace or to an observation in it."""

    trace_id: str  # 32 hex digits
    span_id: str | None  # of the observation; None for the trace
    name: str
    value: float
    source: str  # ANNOTATION, API or EVAL
    created_ns: int


@dataclass(slots=True)
class LangfuseRecords:
    """What the files of one ingest hold of Langfuse: records by the trace that they belong to."""

    traces: dict[str, Record] = field(default_factory=dict)  # by Langfuse's id
    observations: dict[str, dict[str, Record]] = field(default_factory=dict)  # trace id -> observation id -> record
    scores: list[Score] = field(default_factory=list)
    unusable_scores: int = 0  # of a session or a dataset, or no number: a category's value is a placeholder

    def add(self, document: Any) -> None:
        """Takes in one JSON value. Raises IngestError for one that is none of Langfuse's records."""
        if isinstance(document, list):
            for item in document:
                self.add(item)
            return
        if not isinstance(document, dict):
            raise IngestError("a JSON value that is no object: neither OTLP traces nor Langfuse's records")
        if isinstance(document.get("data"), list) and "id" not in document:
            self.add(document["data"])  # a page of an API's answer
            return
        record = _to_snake_case(document)
        if "start_time" in record and "trace_id" in record and "type" in record:
            self._add_observation(record)
        elif "data_type" in record and "name" in record:
            self._add_score(record)
        elif "timestamp" in record and "id" in record:
            self._add_trace(record)
        else:
            raise IngestError("a JSON value without resourceSpans: no OTLP traces, and none of Langfuse's records")

    def merge(self, more: LangfuseRecords) -> None:
        """Takes in the records of another file; where both have one, the fuller one stays."""
        for trace_id, record in more.traces.items():
            self._keep_fuller(self.traces, trace_id, record)
        for trace_id, records in more.observations.items():
            for observation_id, record in records.items():
                self._keep_fuller(self.observations.setdefault(trace_id, {}), observation_id, record)
        self.scores.extend(more.scores)
        self.unusable_scores += more.unusable_scores

    def _add_trace(self, record: Record) -> None:
        trace_id = _required_text(record, "id", "a trace")
        for observation in as_list(record.pop("observations", None)):
            if isinstance(observation, dict):  # a list of traces has the ids of observations only
                self.add({"traceId": trace_id} | observation)
        for score in as_list(record.pop("scores", None)):
            if isinstance(score, dict):
                self._add_score({"trace_id": trace_id} | _to_snake_case(score))
        self._keep_fuller(self.traces, trace_id, record)

    def _add_observation(self, record: Record) -> None:
        trace_id = _required_text(record, "trace_id", "an observation")
        observation_id = _required_text(record, "id", "an observation")
        record["parent_observation_id"] = as_text(record.get("parent_observation_id"))
        _to_ns(record["start_time"])  # a file that is wrong anywhere is refused before anything is written
        _to_ns(record.get("end_time") or record["start_time"])
        self._keep_fuller(self.observations.setdefault(trace_id, {}), observation_id, record)

    def _add_score(self, record: Record) -> None:
        value, trace_id = _to_finite(record.get("value")), as_text(record.get("trace_id"))
        name = as_text(record.get("name"))
        if trace_id is None or name is None or value is None or record.get("data_type") not in ("NUMERIC", "BOOLEAN"):
            self.unusable_scores += 1
            return
        observation_id = as_text(record.get("observation_id"))
        self.scores.append(
            Score(
                trace_id=to_hex_id(trace_id, 32),
                span_id=None if observation_id is None else to_hex_id(observation_id, 16),
                name=name,
                value=value,
                source=as_text(record.get("source")) or "unknown",
                created_ns=_to_ns(record.get("timestamp") or record.get("created_at")),
            )
        )

    @staticmethod
    def _keep_fuller(records: dict[str, Record], key: str, record: Record) -> None:
        stored = records.get(key)
        if stored is None or _field_count(record) > _field_count(stored):
            records[key] = record


def records_to_spans(records: LangfuseRecords) -> list[WireSpan]:
    """The spans of every trace that has observations."""
    return [
        span
        for trace_id, observations in records.observations.items()
        for span in _trace_to_spans(trace_id, records.traces.get(trace_id, {}), list(observations.values()))
    ]


def traces_without_observations(records: LangfuseRecords) -> list[str]:
    """The ids, as a store has them, of traces whose observations are in none of the files."""
    return [to_hex_id(trace_id, 32) for trace_id in records.traces if trace_id not in records.observations]


def to_hex_id(text: str, digits: int) -> str:
    """Langfuse's id in OpenTelemetry's form: itself where it is hex of that length, else the digest's first digits."""
    plain = text.replace("-", "").lower()
    if len(plain) == digits and re.fullmatch(r"[0-9a-f]+", plain) and plain.strip("0"):
        return plain
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:digits]


def _trace_to_spans(trace_id: str, trace: Record, observations: list[Record]) -> list[WireSpan]:
    children: dict[str | None, list[Record]] = {}
    for record in observations:
        children.setdefault(record["parent_observation_id"], []).append(record)
    ends_ns = _end_times(observations, children)
    spans = [_observation_to_span(record, ends_ns[str(record["id"])], trace) for record in observations]
    roots = children.get(None, [])
    # The trace itself stands around its observations where no single one of them is the run.
    if len(roots) > 1 or (len(roots) == 1 and str(roots[0]["type"]).upper() in ("GENERATION", "TOOL", "EVENT")):
        container = _trace_to_container(trace_id, trace, spans)
        inner = [replace(s, parent_span_id=container.span_id) if s.parent_span_id is None else s for s in spans]
        spans = [container, *inner]
    return spans


def _end_times(observations: Sequence[Record], children: Mapping[str | None, list[Record]]) -> dict[str, int]:
    """When each observation ended, in ns; of one that never ended, the latest that is known of what lies inside it."""
    ids = {str(record["id"]) for record in observations}
    outside_in = [record for record in observations if record["parent_observation_id"] not in ids]
    for record in outside_in:  # grows while it is walked; a circle of parents is never reached, and no episode
        outside_in.extend(children.get(str(record["id"]), ()))
    ends_ns = {str(record["id"]): _to_ns(record.get("end_time") or record["start_time"]) for record in observations}
    for record in reversed(outside_in):
        if not record.get("end_time"):
            inner_ids = [str(inner["id"]) for inner in children.get(str(record["id"]), ())]
            ends_ns[str(record["id"])] = max([ends_ns[str(record["id"])], *(ends_ns[i] for i in inner_ids)])
    return ends_ns


def _observation_to_span(record: Record, end_ns: int, trace: Record) -> WireSpan:
    parent: str | None = record["parent_observation_id"]
    kind = str(record["type"]).upper()
    level, start_ns = as_text(record.get("level")), _to_ns(record["start_time"])
    attributes = {
        langfuse.TYPE: kind.lower(),
        langfuse.LEVEL: level,
        langfuse.STATUS_MESSAGE: as_text(record.get("status_message")),
        langfuse.INPUT: _to_json_text(record.get("input")),
        langfuse.OUTPUT: _to_json_text(record.get("output")),
        langfuse.MODEL: as_text(record.get("model")) or as_text(record.get("provided_model_name")),
        langfuse.MODEL_PARAMETERS: _to_json_text(record.get("model_parameters")),
        langfuse.USAGE: _to_json_text(record.get("usage_details") or record.get("usage")),
        langfuse.COST: _to_json_text(record.get("cost_details")),
        langfuse.END_ABSENT: True if not record.get("end_time") and kind != "EVENT" else None,
        langfuse.OBSERVATION + "id": str(record["id"]),
        **_metadata_to_attributes(record.get("metadata")),
        **_trace_attributes(record, trace),
    }
    return WireSpan(
        trace_id=to_hex_id(str(record["trace_id"]), 32),
        span_id=to_hex_id(str(record["id"]), 16),
        parent_span_id=None if parent is None else to_hex_id(parent, 16),
        # Marked by the SDK as the app's own root: what is around it was not sent to Langfuse.
        parent_is_remote=parent is not None and record.get("is_root_observation") is True,
        name=as_text(record.get("name")) or kind.lower(),
        start_ns=start_ns,
        end_ns=max(start_ns, end_ns),
        failed=level == "ERROR",
        status_message=as_text(record.get("status_message")),
        exception_type=None,
        scope=SCOPE,
        scope_version="",
        service=None,
        attributes={key: value for key, value in attributes.items() if value is not None},
    )


def _trace_to_container(trace_id: str, trace: Record, spans: list[WireSpan]) -> WireSpan:
    first = min(spans, key=lambda span: span.start_ns)
    attributes = {
        langfuse.TYPE: "span",
        langfuse.INPUT: _to_json_text(trace.get("input")),
        langfuse.OUTPUT: _to_json_text(trace.get("output")),
        **_metadata_to_attributes(trace.get("metadata")),
        **{key: first.attributes.get(key) for key in (langfuse.SESSION, langfuse.USER, langfuse.TRACE_NAME)},
    }
    return WireSpan(
        trace_id=first.trace_id,
        span_id=to_hex_id(f"trace:{trace_id}", 16),
        parent_span_id=None,
        parent_is_remote=False,
        name=str(attributes[langfuse.TRACE_NAME] or "trace"),
        start_ns=first.start_ns,
        end_ns=max(span.end_ns for span in spans),
        failed=False,
        status_message=None,
        exception_type=None,
        scope=SCOPE,
        scope_version="",
        service=None,
        attributes={key: value for key, value in attributes.items() if value is not None},
    )


def _trace_attributes(record: Record, trace: Record) -> dict[str, Any]:
    """What belongs to the whole trace: from its own record, else as the observation repeats it."""
    return {
        langfuse.SESSION: as_text(trace.get("session_id")) or as_text(record.get("session_id")),
        langfuse.USER: as_text(trace.get("user_id")) or as_text(record.get("user_id")),
        langfuse.TRACE_NAME: as_text(trace.get("name")) or as_text(record.get("trace_name")),
    }


def _metadata_to_attributes(metadata: Any) -> dict[str, Any]:
    """Metadata as the SDK writes it: an attribute for each entry. A blob export may hold all of it as one text."""
    if isinstance(metadata, str):
        try:
            metadata = read_json(metadata)
        except ValueError:
            return {langfuse.METADATA: metadata} if metadata else {}
    if not isinstance(metadata, dict):
        return {}
    return {
        f"{langfuse.METADATA}.{key}": value if isinstance(value, (str, int)) else _to_json_text(value)
        for key, value in metadata.items()
    }


def _to_json_text(value: Any) -> Any:
    """A value as the SDK writes it: texts as they are, others as JSON text, nothing for an empty one."""
    if value in (None, "", {}, []):
        return None
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _to_snake_case(record: Record) -> Record:
    """The record with its own keys as the database writes them, whichever way the API did."""
    return {_CAMEL.sub("_", key).lower(): value for key, value in record.items()}


def _field_count(record: Record) -> int:
    return sum(value not in (None, "", {}, []) for value in record.values())


def _required_text(record: Record, key: str, noun: str) -> str:
    text = as_text(record.get(key))
    if text is None:
        raise IngestError(f"{noun} of Langfuse without {key}")
    return text


def _to_finite(value: Any) -> float | None:
    """A number that a store can keep; None for anything else."""
    try:
        return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else None
    except OverflowError:
        return None


def _to_ns(value: Any) -> int:
    """A time as Langfuse's API (ISO 8601) or its database (UTC, no zone) writes it -> Unix time in ns."""
    try:
        moment = datetime.fromisoformat(str(value).strip())
        moment = moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)
        nanoseconds = (moment - _EPOCH) // timedelta(microseconds=1) * 1000
    except (ValueError, OverflowError):
        nanoseconds = 0
    if not 0 < nanoseconds < 2**63:
        raise IngestError(f"a time that cannot be stored: {value!r:.60}")
    return nanoseconds
