"""Span and attribute names, each spelled once. Nothing else in the project writes one by hand.

`gen_ai.*` follows the OpenTelemetry GenAI conventions, release 0.1.0, which are still in development: hence our own
constants and `CONVENTION_VERSION` in every row. What the conventions lack (token ids, log-probs, adapter versions,
dependencies) lives under `marft.*`. Names that a release has dropped stay here as long as rows may hold them.
"""

from __future__ import annotations

_RULE = "marft-2"  # of D: how the attributes under `marft.langgraph` are to be read
CONVENTION_VERSION = f"genai-0.1.0/{_RULE}"
FORMER_VERSIONS = "genai-1.44/"  # how the versions of rows from before release 0.1.0 begin
SCHEMA_URL = "https://opentelemetry.io/schemas/gen-ai/0.1.0"  # of the spans
RESOURCE_SCHEMA_URL = "https://opentelemetry.io/schemas/1.45.0"  # of the resource: the release that 0.1.0 builds on

# Operations, the values of gen_ai.operation.name.
INVOKE_WORKFLOW = "invoke_workflow"  # one graph run: an episode
INVOKE_AGENT = "invoke_agent"  # one execution of a LangGraph node
CHAT = "chat"  # one LLM call: an action
EXECUTE_TOOL = "execute_tool"  # one tool call: an environment transition

# OpenTelemetry, not of GenAI alone.
ERROR_TYPE = "error.type"  # class of the exception that ended a span

# OpenTelemetry GenAI.
OPERATION = "gen_ai.operation.name"
AGENT_NAME = "gen_ai.agent.name"  # of a node's agent; on the root, of the graph
WORKFLOW_NAME = "gen_ai.workflow.name"  # the root's name in rows from before release 0.1.0
CONVERSATION_ID = "gen_ai.conversation.id"  # the app's thread id, on every span of a run on a thread
TOOL_TYPE = "gen_ai.tool.type"
TOOL_NAME = "gen_ai.tool.name"
TOOL_CALL_ID = "gen_ai.tool.call.id"
TOOL_ARGUMENTS = "gen_ai.tool.call.arguments"
TOOL_RESULT = "gen_ai.tool.call.result"
TOOL_DEFINITIONS = "gen_ai.tool.definitions"  # JSON list of what a call offered
PROVIDER = "gen_ai.provider.name"
REQUEST_MODEL = "gen_ai.request.model"
REQUEST_TEMPERATURE = "gen_ai.request.temperature"
REQUEST_TOP_P = "gen_ai.request.top_p"
REQUEST_TOP_K = "gen_ai.request.top_k"
REQUEST_SEED = "gen_ai.request.seed"
REQUEST_MAX_TOKENS = "gen_ai.request.max_tokens"
REQUEST_CHOICES = "gen_ai.request.choice.count"  # only where it is not 1
REQUEST_STREAM = "gen_ai.request.stream"  # only where it is true
REQUEST_STOP = "gen_ai.request.stop_sequences"
RESPONSE_ID = "gen_ai.response.id"
RESPONSE_MODEL = "gen_ai.response.model"
FINISH_REASONS = "gen_ai.response.finish_reasons"
OUTPUT_TYPE = "gen_ai.output.type"  # json where the request declared a form for the answer
INPUT_MESSAGES = "gen_ai.input.messages"
OUTPUT_MESSAGES = "gen_ai.output.messages"
USAGE_INPUT_TOKENS = "gen_ai.usage.input_tokens"
USAGE_OUTPUT_TOKENS = "gen_ai.usage.output_tokens"
USAGE_CACHE_READ_TOKENS = "gen_ai.usage.cache_read.input_tokens"  # of the input tokens
USAGE_CACHE_WRITE_TOKENS = "gen_ai.usage.cache_write.input_tokens"  # of the input tokens
USAGE_REASONING_TOKENS = "gen_ai.usage.reasoning.output_tokens"  # of the output tokens

# Ours: what the episode was.
SCHEMA = "marft.schema_url"  # on the root: `SCHEMA_URL`, which a journal has no field for
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
FORK_ACTION = "marft.fork_action"  # span id of the call of the parent episode from which this one was run anew
THREAD_ID = "marft.thread.id"
USER_ID = "marft.user.id"  # as the app's metadata names them; the subject of an erasure is SUBJECT_ID
METADATA = "marft.metadata"  # JSON object: the metadata that the app gave the run
INPUT = "marft.input"  # JSON: what the graph was given; absent where that is the task itself
INPUT_KIND = "marft.input.kind"  # command where the input was a Command of LangGraph's; absent otherwise
INPUT_FORMS = "marft.input.forms"  # JSON: what JSON has no form for in it, see recording.value_forms; absent: nothing
OUTPUT = "marft.output"  # JSON: what it gave back
RUN_CONFIG = "marft.run_config"  # JSON object: how the run was started besides its input, see recording.run_facts
# How a run on a thread with a checkpointer begins, see records.Episode; and the checkpoints that it wrote, in order.
BEGINS = "marft.langgraph.begins"
FORKED = "marft.langgraph.forked"
FROM_CHECKPOINT = "marft.langgraph.from_checkpoint"
CHECKPOINTS = "marft.langgraph.checkpoints"  # ids, a space between
EDITED = "marft.langgraph.edited"  # true: `update_state` changed the thread before the run; absent otherwise
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
REPLAYED_FROM = "marft.replayed_from"  # span id of the recorded call whose answer was given again

# Ours: what the node's own model answered to the same call, where it was asked as a teacher (DAgger).
TEACHER_MESSAGES = "marft.teacher.output.messages"  # its answer, as OUTPUT_MESSAGES has the served model's
TEACHER_FINISH_REASON = "marft.teacher.finish_reason"
TEACHER_MODEL = "marft.teacher.model"
TEACHER_INPUT_TOKENS = "marft.teacher.usage.input_tokens"
TEACHER_OUTPUT_TOKENS = "marft.teacher.usage.output_tokens"
TEACHER_ERROR = "marft.teacher.error"  # class of the error that it failed with

# Ours: what a replay needs of a request, an answer or a tool's result and the conventions have no place for.
# Absent: nothing.
REQUEST_REST = "marft.request.rest"  # JSON object: tool_choice, response_format and chat_template_kwargs, those it has
ANSWER_REST = "marft.answer.rest"  # JSON object: what the message has beside its parts, see recording.span_attributes
# JSON list of `module:qualname`: the class of an error that is none of Python's own, and those above it.
ERROR_CLASSES = "marft.error.classes"
HTTP_STATUS = "http.response.status_code"  # of the answer that an error carries
TOOL_OUTPUT = "marft.tool.output"  # JSON object: what a tool gave back that is no text, see recording.tool_output


def follows_todays_rule(convention: str) -> bool:
    """Whether D follows from a row of this `convention` by today's rule. A "+" is followed by whose rows were read."""
    return convention.partition("/")[2].partition("+")[0] == _RULE
