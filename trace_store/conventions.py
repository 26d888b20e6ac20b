"""Span and attribute names, each spelled once. Nothing else in the project writes one by hand.

`gen_ai.*` follows the OpenTelemetry GenAI conventions, which are still in development: hence our own constants
and `CONVENTION_VERSION` in every row. What the conventions lack (token ids, log-probs, adapter versions,
dependencies) lives under `marft.*`.
"""

from __future__ import annotations

CONVENTION_VERSION = "genai-1.44/marft-2"

# Operations, the values of gen_ai.operation.name.
INVOKE_WORKFLOW = "invoke_workflow"  # one graph run: an episode
INVOKE_AGENT = "invoke_agent"  # one execution of a LangGraph node
CHAT = "chat"  # one LLM call: an action
EXECUTE_TOOL = "execute_tool"  # one tool call: an environment transition

# OpenTelemetry GenAI.
OPERATION = "gen_ai.operation.name"
WORKFLOW_NAME = "gen_ai.workflow.name"
AGENT_NAME = "gen_ai.agent.name"
TOOL_NAME = "gen_ai.tool.name"
TOOL_CALL_ID = "gen_ai.tool.call.id"
TOOL_ARGUMENTS = "gen_ai.tool.call.arguments"
TOOL_RESULT = "gen_ai.tool.call.result"
TOOL_DEFINITIONS = "gen_ai.tool.definitions"  # JSON list of what a call offered; only some recorders write it
PROVIDER = "gen_ai.provider.name"
REQUEST_MODEL = "gen_ai.request.model"
REQUEST_TEMPERATURE = "gen_ai.request.temperature"
REQUEST_TOP_P = "gen_ai.request.top_p"
REQUEST_TOP_K = "gen_ai.request.top_k"
REQUEST_SEED = "gen_ai.request.seed"
REQUEST_MAX_TOKENS = "gen_ai.request.max_tokens"
REQUEST_STOP = "gen_ai.request.stop_sequences"
RESPONSE_ID = "gen_ai.response.id"
RESPONSE_MODEL = "gen_ai.response.model"
FINISH_REASONS = "gen_ai.response.finish_reasons"
INPUT_MESSAGES = "gen_ai.input.messages"
OUTPUT_MESSAGES = "gen_ai.output.messages"
USAGE_INPUT_TOKENS = "gen_ai.usage.input_tokens"
USAGE_OUTPUT_TOKENS = "gen_ai.usage.output_tokens"

# Ours: what the episode was.
RUN_ID = "marft.run.id"
TASK_ID = "marft.task.id"
TASK = "marft.task"  # JSON object
SPLIT = "marft.split"
SAMPLE = "marft.sample"
ROUND = "marft.round"
VARIANT = "marft.variant"
SEED = "marft.seed"
ADAPTERS = "marft.adapters"  # JSON object node -> version
OUTCOME = "marft.outcome"
OUTCOME_REASON = "marft.outcome.reason"
SPAN_COUNT = "marft.span_count"  # on the root: how many spans the episode has, itself included
TAGS = "marft.tags"
SUBJECT_ID = "marft.subject.id"
PARENT_EPISODE = "marft.parent_episode"
THREAD_ID = "marft.thread.id"
USER_ID = "marft.user.id"  # as the app's metadata names them; the subject of an erasure is SUBJECT_ID
METADATA = "marft.metadata"  # JSON object: the metadata that the app gave the run
INPUT = "marft.input"  # JSON: what a live run was given
OUTPUT = "marft.output"  # JSON: what a live run gave back
# How a run on a thread with a checkpointer begins, see records.Episode; and the checkpoints that it wrote, in order.
BEGINS = "marft.langgraph.begins"
FORKED = "marft.langgraph.forked"
FROM_CHECKPOINT = "marft.langgraph.from_checkpoint"
CHECKPOINTS = "marft.langgraph.checkpoints"  # ids, a space between
LINEAGE = "marft.lineage"  # JSON object name -> SHA-256 of what the prompts and samples depend on, see records.Episode

# Ours: LangGraph coordinates, on node spans and the chat spans inside them.
NODE = "marft.node"  # LangGraph node name, subgraph path included, "/" between
STEP = "marft.langgraph.step"
CHECKPOINT_NS = "marft.langgraph.checkpoint_ns"  # identifies the task; a retry or a resume repeats it
TRIGGERED_BY = "marft.langgraph.triggered_by"  # list of checkpoint_ns whose writes triggered this task
SENT_BY = "marft.langgraph.sent_by"  # list of checkpoint_ns that sent this task's input by Send: one, or the candidates
CALLED_BY = "marft.langgraph.called_by"  # checkpoint_ns of the task that called this one as a function
ROUTES_AFTER = "marft.langgraph.routes_after"  # on a router's span: checkpoint_ns of the task after which it routed
HANDLES = "marft.langgraph.handles"  # on an error handler's span: checkpoint_ns of the task whose failure it handles
SIDE_BY_SIDE = "marft.langgraph.side_by_side"  # true: the task ran all of its tools at once
READS_FROM = "marft.langgraph.reads_from"  # list of checkpoint_ns whose values were seen to be read, up to here
MAY_READ_FROM = "marft.langgraph.may_read_from"  # list of checkpoint_ns whose values may have been read, up to here
CACHED = "marft.langgraph.cached"  # true: the task's writes came from a cache or an earlier run, nothing was run
SAW_ANSWERS = "marft.saw_answers"  # list of span ids of calls whose answers are messages of this prompt
FORMAT_VALID = (
    "marft.answer.format_valid"  # whether the answer has the form that the request declared; absent: none was
)
SAW_TOOL_RESULTS = "marft.saw_tool_results"  # list of span ids of calls whose tools' results are in this prompt

# Ours: the exact tokens of an action, from the engine; the three lists packed (see `packed`), or as JSON.
PROMPT_IDS = "marft.prompt_token_ids"
SAMPLED_IDS = "marft.sampled_token_ids"
LOGPROBS = "marft.sampled_logprobs"
ADAPTER = "marft.adapter"  # "node@version"
ADAPTER_VERSION = "marft.adapter.version"
UNTRAINABLE = "marft.untrainable"  # the reason, when the recorder knows one
