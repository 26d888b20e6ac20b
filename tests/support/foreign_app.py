"""A LangGraph app that knows nothing of this project, traced by somebody else's instrumentor. Run as a script:

    python foreign_app.py INSTRUMENTOR MODE RUNS [FILE]

INSTRUMENTOR is openinference, traceloop or langsmith; MODE is sync or async. With FILE, the requests that the OTLP
encoder makes are written to it, one trace after the other, each as four bytes of length and a protobuf message;
without, the OTLP exporter sends them to where the OTEL_EXPORTER_OTLP_* variables say. It prints each run's answer.

The graph: plan (asks for the tool add) -> tools -> left | right, in parallel -> outer, a subgraph with one node polish.
"""

from __future__ import annotations

import asyncio
import operator
import os
import sys
from pathlib import Path
from typing import Annotated, Any, TypedDict

from langchain_core.language_models.fake_chat_models import GenericFakeChatModel
from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.tools import tool
from langgraph.graph import END, START, StateGraph
from langgraph.graph.message import add_messages
from langgraph.prebuilt import ToolNode
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter, SpanExportResult

KEY = "sk-not-a-real-key-0123456789"


class State(TypedDict):
    question: str
    messages: Annotated[list[Any], add_messages]
    notes: Annotated[list[str], operator.add]


class Fake(GenericFakeChatModel):
    """Says what it was told to say, with what a hosted model reports around it."""


def answer(text: str, calls: list[dict[str, Any]] | None = None, finish: str = "stop") -> AIMessage:
    return AIMessage(
        text,
        tool_calls=calls or [],
        response_metadata={
            "finish_reason": finish,
            "model_name": "fake-1",
            "logprobs": {"content": [{"token": "t", "logprob": -0.25}, {"token": "w", "logprob": -0.5}]},
        },
        usage_metadata={"input_tokens": 5, "output_tokens": 2, "total_tokens": 7},
    )


@tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def build() -> Any:
    def model(message: AIMessage) -> Fake:
        return Fake(messages=iter(lambda: message, None))

    asks = answer("", [{"name": "add", "args": {"a": 1, "b": 1}, "id": "call_1", "type": "tool_call"}], "tool_calls")
    plan_model, left_model, right_model, polish_model = map(
        model, (asks, answer("left says two"), answer("right says two"), answer("two"))
    )

    def plan(state: State) -> dict[str, Any]:
        return {"messages": [plan_model.invoke([HumanMessage(state["question"])])]}

    def left(state: State) -> dict[str, Any]:
        return {"notes": [left_model.invoke(state["messages"]).content]}

    def right(state: State) -> dict[str, Any]:
        return {"notes": [right_model.invoke(state["messages"]).content]}

    def polish(state: State) -> dict[str, Any]:
        return {"notes": [polish_model.invoke(" ".join(state["notes"])).content]}

    inner = StateGraph(State)
    inner.add_node("polish", polish)
    inner.add_edge(START, "polish")
    graph = StateGraph(State)
    graph.add_node("plan", plan)
    graph.add_node("tools", ToolNode([add]))
    graph.add_node("left", left)
    graph.add_node("right", right)
    graph.add_node("outer", inner.compile())
    graph.add_edge(START, "plan")
    graph.add_edge("plan", "tools")
    graph.add_edge("tools", "left")
    graph.add_edge("tools", "right")
    graph.add_edge(["left", "right"], "outer")
    graph.add_edge("outer", END)
    return graph.compile()


class ToFile(SpanExporter):
    """What the OTLP exporter would send, into a file."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb")

    def export(self, spans: Any) -> SpanExportResult:
        request = encode_spans(spans).SerializeToString()
        self._file.write(len(request).to_bytes(4, "big") + request)
        self._file.flush()
        return SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        self._file.close()


class AfterTheRun(SimpleSpanProcessor):
    """Keeps ended spans until the run is over, so that a run is one request."""

    def __init__(self, exporter: SpanExporter) -> None:
        super().__init__(exporter)
        self._ended: list[ReadableSpan] = []

    def on_end(self, span: ReadableSpan) -> None:
        self._ended.append(span)

    def send(self) -> bool:
        spans, self._ended = self._ended, []
        return not spans or self.span_exporter.export(spans) is SpanExportResult.SUCCESS


def instrument(name: str, provider: TracerProvider) -> None:
    if name == "openinference":
        from openinference.instrumentation.langchain import LangChainInstrumentor

        LangChainInstrumentor().instrument(tracer_provider=provider)
    elif name == "traceloop":
        from opentelemetry.instrumentation.langchain import LangchainInstrumentor

        LangchainInstrumentor().instrument(tracer_provider=provider)
    else:
        from opentelemetry import trace

        os.environ |= {
            "LANGSMITH_TRACING": "true",
            "LANGSMITH_OTEL_ENABLED": "true",
            "LANGSMITH_OTEL_ONLY": "true",
            "LANGSMITH_API_KEY": KEY,
            "LANGSMITH_ENDPOINT": "http://127.0.0.1:9",
        }
        trace.set_tracer_provider(provider)


def flush(name: str) -> None:
    if name == "langsmith":
        from langchain_core.tracers.langchain import get_client, wait_for_all_tracers

        wait_for_all_tracers()
        get_client().flush()


def main(name: str, mode: str, runs: int, path: Path | None) -> int:
    if path is not None:
        exporter: SpanExporter = ToFile(path)
    else:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

        exporter = OTLPSpanExporter()
    processor = AfterTheRun(exporter)
    provider = TracerProvider(resource=Resource({"service.name": "foreign"}), shutdown_on_exit=False)
    provider.add_span_processor(processor)
    instrument(name, provider)
    app = build()
    sent = True
    for run in range(runs):
        start = {"question": f"1+1? ({run})", "messages": [], "notes": []}
        config: Any = {"configurable": {"thread_id": f"thread-{run}"}, "metadata": {"user_id": "ada"}}
        state = app.invoke(start, config) if mode == "sync" else asyncio.run(app.ainvoke(start, config))
        flush(name)
        sent = processor.send() and sent
        print(state["notes"][-1], flush=True)  # noqa: T201 - what the app says
    exporter.shutdown()
    return 0 if sent else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], int(sys.argv[3]), Path(sys.argv[4]) if len(sys.argv) > 4 else None))
