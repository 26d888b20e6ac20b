"""A LangGraph app that is traced in every way that its environment knows, run by a command of ours or under `wrap`.

    python traced_app.py wrap|collect CONFIGURATION COLLECTOR

Where the variable TRACED_APP_COLLECTOR names a collector, importing the app sets its tracers up: a Ray worker only
imports it.

LangSmith is on by the LANGSMITH_* variables; OpenTelemetry goes over OTLP to COLLECTOR, from a provider of the app's
own, and from those of OpenInference's and Traceloop's instrumentors. The word of each way is in what it sends.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from langchain_core.tracers.context import tracing_v2_enabled
from langchain_core.tracers.langchain import LangChainTracer
from langchain_openai import ChatOpenAI
from langgraph.graph import START, MessagesState, StateGraph
from langsmith import Client, traceable, tracing_context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.instrumentation.langchain import LangchainInstrumentor
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor

WORDS = {
    "langsmith": (b"by environment", b"by decorator", b"by callback", b"by context", b"by hand"),
    "otlp": (b"by own span", b"by openinference", b"by traceloop"),
}
"""What each tracer of the app says in its own way, in the names of its runs and spans."""

COLLECTOR_VARIABLE = "TRACED_APP_COLLECTOR"

tasks = [{"id": n, "messages": [("user", f"question {n}")]} for n in range(4)]
own_tracer: Any = None


def reward(task: Any, state: Any) -> float:
    return 1.0


@traceable(name="by decorator")
def decorated(text: str) -> str:
    return text.upper()


def say(state: MessagesState) -> dict[str, Any]:
    model = ChatOpenAI(model="base", base_url="http://127.0.0.1:9/v1", api_key="k", max_retries=0)
    with own_tracer.start_as_current_span("by own span") as span:
        span.set_attribute("prompt", decorated(state["messages"][-1].text))
        assert span.is_recording()
        assert span.get_span_context().is_valid
    model.with_config(run_name="by callback").invoke("x", {"callbacks": [LangChainTracer()]})
    with tracing_v2_enabled():
        model.with_config(run_name="by context").invoke("y")
    with tracing_context(enabled=True):
        Client().create_run("by hand", {"text": "z"}, "chain")
    return {"messages": [model.with_config(run_name="by environment").invoke(state["messages"])]}


graph = StateGraph(MessagesState)
graph.add_node("say", say)
graph.add_edge(START, "say")
app = graph.compile()


def provider_to(collector: str, word: str) -> TracerProvider:
    from opentelemetry.sdk.resources import Resource

    provider = TracerProvider(resource=Resource({"service.name": word}))
    provider.add_span_processor(SimpleSpanProcessor(OTLPSpanExporter(f"{collector}/v1/traces")))
    return provider


def trace_app(collector: str) -> None:
    """What the app itself, or who starts it, sets up before any run."""
    from openinference.instrumentation.langchain import LangChainInstrumentor

    global own_tracer
    own_tracer = provider_to(collector, "by own provider").get_tracer("app")
    LangChainInstrumentor().instrument(tracer_provider=provider_to(collector, "by openinference"))
    LangchainInstrumentor().instrument(tracer_provider=provider_to(collector, "by traceloop"))


if __name__ != "__main__" and COLLECTOR_VARIABLE in os.environ:
    trace_app(os.environ[COLLECTOR_VARIABLE])


def main() -> None:
    mode, configuration, collector = sys.argv[1:]
    import traced_app  # as `graph.app` names it

    if COLLECTOR_VARIABLE not in os.environ:
        traced_app.trace_app(collector)
    if mode == "wrap":
        import marft_bridge
        from marft_bridge.model_calls.scripted_model import ScriptedPolicy

        traced_app.ChatOpenAI = lambda **_: ScriptedPolicy(script=lambda *_: "fine")
        marft_bridge.wrap(traced_app.app, Path("wrapped.duckdb")).invoke({"messages": [("user", "question")]})
    else:
        from marft_bridge import cli

        assert cli.run(["collect", "--config", configuration]) == 0
    Client().flush()


if __name__ == "__main__":
    main()
