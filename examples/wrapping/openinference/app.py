"""A drafter and a reviewer side by side, joined by an editor; traced with OpenInference, which goes on as it was."""

import sys
from typing import Annotated, TypedDict

from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, StateGraph
from openinference.instrumentation.langchain import LangChainInstrumentor
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor

provider = TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(OTLPSpanExporter()))  # to where OTEL_EXPORTER_OTLP_ENDPOINT says
LangChainInstrumentor().instrument(tracer_provider=provider)

model = ChatOpenAI(model="gpt-4o-mini")


def both(left: list[str], right: list[str]) -> list[str]:
    return left + right


class State(TypedDict, total=False):
    question: str
    notes: Annotated[list[str], both]
    answer: str


def drafter(state: State) -> State:
    return {"notes": [str(model.invoke(f"Work this out: {state['question']}").text)]}


def reviewer(state: State) -> State:
    return {"notes": [str(model.invoke(f"What is easily got wrong here? {state['question']}").text)]}


def editor(state: State) -> State:
    notes = "\n".join(state["notes"])
    return {"answer": str(model.invoke(f"{state['question']}\n{notes}\nAnswer with one number.").text)}


builder = StateGraph(State)
for name, node in (("drafter", drafter), ("reviewer", reviewer), ("editor", editor)):
    builder.add_node(name, node)
builder.add_edge(START, "drafter")
builder.add_edge(START, "reviewer")
builder.add_edge(["drafter", "reviewer"], "editor")
builder.add_edge("editor", END)
graph = builder.compile()

if __name__ == "__main__":
    print(graph.invoke({"question": sys.argv[1]})["answer"])
    provider.shutdown()
