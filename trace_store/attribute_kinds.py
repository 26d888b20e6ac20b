"""Attribute name -> what its value may hold, which decides who may read it and whether it is written at all.

Invariant: a name that is not in the table counts as content, so an attribute that somebody adds tomorrow is redacted,
and left out when content is not captured, until someone decides otherwise here.
"""

from __future__ import annotations

from enum import Enum

from trace_store import conventions as c


class Kind(Enum):
    """What an attribute may hold."""

    STRUCTURE = "ids, names of nodes and models, edges, numbers: written as they are"
    LABEL = "a short name that people choose: redacted, and kept without content"
    TOKENS = "token ids and their log-probs: dropped with the text that they stand for"
    CONTENT = "what people and models said, and everything unknown: redacted, and left out without content"


_STRUCTURE = (
    c.ERROR_TYPE,
    c.ERROR_CLASSES,
    c.HTTP_STATUS,
    c.TOOL_TYPE,
    c.REQUEST_CHOICES,
    c.REQUEST_STREAM,
    c.OUTPUT_TYPE,
    c.USAGE_CACHE_READ_TOKENS,
    c.USAGE_CACHE_WRITE_TOKENS,
    c.USAGE_REASONING_TOKENS,
    c.SCHEMA,
    c.OPERATION,
    c.TOOL_CALL_ID,
    c.PROVIDER,
    c.RESPONSE_ID,
    c.RESPONSE_MODEL,
    c.FINISH_REASONS,
    c.REQUEST_MODEL,
    c.REQUEST_TEMPERATURE,
    c.REQUEST_TOP_P,
    c.REQUEST_TOP_K,
    c.REQUEST_SEED,
    c.REQUEST_MAX_TOKENS,
    c.USAGE_INPUT_TOKENS,
    c.USAGE_OUTPUT_TOKENS,
    c.RUN_ID,
    c.TASK_ID,
    c.SPLIT,
    c.SAMPLE,
    c.ROUND,
    c.VARIANT,
    c.SEED,
    c.ADAPTERS,
    c.OUTCOME,
    c.SPAN_COUNT,
    c.SUBJECT_ID,
    c.PARENT_EPISODE,
    c.FORK_ACTION,
    c.INPUT_KIND,
    c.BEGINS,
    c.FORKED,
    c.FROM_CHECKPOINT,
    c.CHECKPOINTS,
    c.EDITED,
    c.LINEAGE,
    c.NODE,
    c.STEP,
    c.CHECKPOINT_NS,
    c.TRIGGERED_BY,
    c.SENT_BY,
    c.CALLED_BY,
    c.ROUTES_AFTER,
    c.HANDLES,
    c.SIDE_BY_SIDE,
    c.READS_FROM,
    c.MAY_READ_FROM,
    c.CACHED,
    c.SAW_ANSWERS,
    c.SAW_TOOL_RESULTS,
    c.FORMAT_VALID,
    c.ADAPTER,
    c.ADAPTER_VERSION,
    c.REPLAYED_FROM,
    c.TEACHER_FINISH_REASON,
    c.TEACHER_MODEL,
    c.TEACHER_INPUT_TOKENS,
    c.TEACHER_OUTPUT_TOKENS,
    c.TEACHER_ERROR,
)
_LABELS = (c.AGENT_NAME, c.WORKFLOW_NAME, c.CONVERSATION_ID, c.TOOL_NAME, c.UNTRAINABLE, c.THREAD_ID, c.USER_ID)
_TOKENS = (c.PROMPT_IDS, c.SAMPLED_IDS, c.LOGPROBS)
_CONTENT = (
    c.INPUT_MESSAGES,
    c.OUTPUT_MESSAGES,
    c.REQUEST_STOP,
    c.TOOL_ARGUMENTS,
    c.TOOL_RESULT,
    c.TOOL_DEFINITIONS,
    c.TASK,
    c.TAGS,
    c.METADATA,
    c.INPUT,
    c.INPUT_FORMS,
    c.OUTPUT,
    c.RUN_CONFIG,
    c.TEACHER_MESSAGES,
    c.REQUEST_REST,
    c.ANSWER_REST,
    c.TOOL_OUTPUT,
    c.OUTCOME_REASON,
)

KINDS: dict[str, Kind] = (
    dict.fromkeys(_STRUCTURE, Kind.STRUCTURE)
    | dict.fromkeys(_LABELS, Kind.LABEL)
    | dict.fromkeys(_TOKENS, Kind.TOKENS)
    | dict.fromkeys(_CONTENT, Kind.CONTENT)
)
"""Every attribute name of `conventions`, each decided once."""


def key_to_kind(key: str) -> Kind:
    """What the attribute `key` may hold; an unknown one is content."""
    return KINDS.get(key, Kind.CONTENT)
