"""The apps of the suite, each with what a provider answers it, who acts, and D as it follows from the app's text.

In an edge `a>b` is exact and `a?b` a bound from above; an agent that acts more than once is numbered. The tables were
worked out from the apps alone; tests/apps/test_suite.py compares them with the record, docs/compatibility.md has them.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from langgraph.types import Command
from support.fake_vllm import Answer

FOLDER = Path(__file__).parent
RECORDED = """
from marft_bridge import wrap
graph = wrap(graph, "traces.duckdb")
"""
"""What is added at the end of an app to record it."""
RECORDING_LINES = len(RECORDED.split("\n")) - 2
Body = dict[str, Any]
Edges = dict[str, str]


@dataclass(frozen=True, slots=True)
class SuiteApp:
    """One app of the suite."""

    after: str  # whose pattern it is
    answer: Callable[[Body], Answer]  # what the provider says to a request
    edges: Edges  # of its first run
    result: str  # a text that the final state of its first run holds; "" where it stops before its end
    package: str | None = (
        None  # that it is built with, besides LangChain and LangGraph; None: the pattern is written out
    )
    agents: Sequence[str] = ()  # that act in the first run, one for each call
    silent_agents: Sequence[str] = ()  # that `init` sees besides, and that do not act on the first task
    later_inputs: Sequence[Any] = ()  # of more runs on the same thread
    later_edges: Sequence[Edges] = ()
    links: Sequence[str] = ()  # what the later runs are to the one before
    context: dict[str, Any] | None = None  # that its runs need
    default_context: dict[str, Any] | None = None  # that `init` finds itself
    outcome: str = "terminated"  # of a run that nobody answers
    bounds_why: str = ""  # why its bounds are bounds
    notes: str = ""  # what else a user should know

    def edges_by_exactness(self, mark: str) -> dict[str, int]:
        """Kind -> number of the edges of all runs that are exact (`>`) or bounds (`?`)."""
        counts: dict[str, int] = {}
        for edges in (self.edges, *self.later_edges):
            for kind, text in edges.items():
                number = sum(mark in edge for edge in text.split())
                if number:
                    counts[kind] = counts.get(kind, 0) + number
        return counts


def said(body: Body) -> str:
    """Everything in a prompt, as one text."""
    return json.dumps(body["messages"])


def last(body: Body) -> str:
    """The last message."""
    return str(body["messages"][-1]["content"])


def tool_results(body: Body) -> int:
    """How many results of tools the prompt shows."""
    return sum(message["role"] == "tool" for message in body["messages"])


def supervisor(body: Body) -> Answer:
    if "You look facts up" in said(body):
        names = ["Acme", "Globex"]
        return "Acme has 1200, Globex 800." if "Acme: 1200" in said(body) else [("headcounts", {"companies": names})]
    if "You do sums" in said(body):
        return "That is 2000." if '"2000"' in said(body) else [("add", {"a": 1200, "b": 800})]
    if "That is 2000" in said(body):
        return "2000 people."
    expert = "math_expert" if "Acme has 1200" in said(body) else "research_expert"
    return [(f"transfer_to_{expert}", {})]


def swarm(body: Body) -> Answer:
    if "You are Bob" in said(body):
        return [("transfer_to_alice", {})] if "Thanks" in last(body) else "Arr, 7!"
    if "Thanks" in said(body):
        return "You are welcome."
    return [("transfer_to_bob", {})] if tool_results(body) else [("add", {"a": 0, "b": 7})]


def deep_agent(body: Body) -> Answer:
    if "You research one topic" in said(body):
        return "A bee visits many flowers." if tool_results(body) else [("search_library", {"topic": "bee"})]
    if "You criticise" in said(body):
        return "Too short."
    if "You check whether" in said(body):
        return "It is true."
    if not tool_results(body):
        return [("task", {"description": "Research the bee.", "subagent_type": "research-agent"})]
    if tool_results(body) == 1:
        return [
            ("task", {"description": "Criticise: a bee visits many flowers.", "subagent_type": "critique-agent"}),
            ("task", {"description": "Check: a bee visits many flowers.", "subagent_type": "fact-checker"}),
        ]
    return "A bee visits 1500 flowers a day."


def agents_as_tools(body: Body) -> Answer:
    if "You keep the calendar" in said(body):
        event = [("create_calendar_event", {"title": "design", "day": "Monday"})]
        return "It is in the calendar." if tool_results(body) else event
    if "You write emails" in said(body):
        return "The email is sent." if tool_results(body) else [("send_email", {"to": "design", "subject": "Monday"})]
    if tool_results(body):
        return "You meet on Monday."
    return [("schedule_event", {"request": "design on Monday"}), ("manage_email", {"request": "remind design"})]


def react_template(body: Body) -> Answer:
    return "Paris." if tool_results(body) else [("search", {"country": "France"})]


def adaptive_rag(body: Body) -> Answer:
    if "You route a question" in said(body):
        return '{"datasource": "vectorstore"}'
    if "whether a document is relevant" in said(body):
        return json.dumps({"binary_score": "yes" if "hunts" in last(body) else "no"})
    if "whether an answer is grounded" in said(body):
        return json.dumps({"binary_score": "no" if "by day" in last(body) else "yes"})
    if "whether an answer resolves" in said(body):
        return '{"binary_score": "yes"}'
    _drafts[last(body)] += 1  # the second draft of a question is asked for in the same words
    return "It hunts by day." if _drafts[last(body)] % 2 else "It hunts at night."


_drafts: Counter[str] = Counter()


def plan_and_execute(body: Body) -> Answer:
    if "Make a plan" in said(body):
        return '{"steps": ["find it", "say it"]}'
    if "Update the plan" in said(body):
        done = "said 5" in said(body)
        return json.dumps({"response": "5, five" if done else "", "steps": [] if done else ["say it"]})
    if "step: say it" in said(body):
        return "said 5"
    return "found 5" if tool_results(body) else [("add", {"a": 0, "b": 5})]


def reflection(body: Body) -> Answer:
    turn = len(body["messages"]) - 1
    return f"more of it ({turn})" if "You are a teacher" in said(body) else f"owls, version {turn}"


def map_reduce(body: Body) -> Answer:
    if "List three subjects" in said(body):
        return '{"subjects": ["owls", "bees", "cats"]}'
    if "Which joke" in said(body):
        return '{"id": 1}'
    return json.dumps({"joke": f"Ha, {last(body).removeprefix('Tell a joke about ')}"})


def hierarchical_teams(body: Body) -> Answer:
    if "You supervise the teams" in said(body):
        teams = [name for name in ("research_team", "writing_team") if f'"name": "{name}"' not in said(body)]
        return json.dumps({"next": (*teams, "FINISH")[0]})
    if "You supervise the research team" in said(body):
        return json.dumps({"next": "FINISH" if '"name": "search"' in said(body) else "search"})
    if "You supervise the writing team" in said(body):
        return json.dumps({"next": "FINISH" if '"name": "doc_writer"' in said(body) else "doc_writer"})
    if "You search." in said(body):
        return "owls are known" if tool_results(body) else [("search", {"topic": "owls"})]
    return "owls, written" if tool_results(body) else [("write_document", {"text": "owls"})]


def memory_store(body: Body) -> Answer:
    if "What do I like" in last(body):
        return "Tea, Ada." if "Ada likes tea" in said(body) else "I do not know."
    return "Hello Ada." if tool_results(body) else [("upsert_memory", {"content": "Ada likes tea", "context": "hello"})]


def human_review(body: Body) -> Answer:
    if "Criticise this draft" in said(body):
        return "It is long." if "thank you so much" in said(body) else "It is fine."
    return "thank you" if "shorter" in said(body) else "thank you so much"


def joke_workflow(body: Body) -> Answer:
    return f"{last(body)[:10]} joke"


def code_assistant(body: Body) -> Answer:
    return json.dumps({"prefix": "The sum", "expression": "0 + 2" if "failed" in said(body) else "0 +"})


# Handoffs are tool calls, which all later prompts show; of an expert only its last message goes back to the others.
_SUPERVISED = (
    *("supervisor/agent1>research_expert1 supervisor/agent1>research_expert2 supervisor/agent1>supervisor/agent2",),
    *("supervisor/agent1>math_expert1 supervisor/agent1>math_expert2 supervisor/agent1>supervisor/agent3",),
    *("supervisor/agent2>math_expert1 supervisor/agent2>math_expert2 supervisor/agent2>supervisor/agent3",),
    *("research_expert1>research_expert2 math_expert1>math_expert2",),
)
_ALICE = "Alice1>Alice2 Alice1>Bob Alice2>Bob"

SUITE = {
    "supervisor": SuiteApp(
        "README of langgraph-supervisor",
        supervisor,
        package="langgraph-supervisor",
        agents=[*["supervisor/agent"] * 3, *["research_expert"] * 2, *["math_expert"] * 2],
        edges={
            "trigger": "supervisor/agent1>research_expert1 research_expert1>research_expert2 "
            "research_expert2>supervisor/agent2 supervisor/agent2>math_expert1 math_expert1>math_expert2 "
            "math_expert2>supervisor/agent3",
            "tool": " ".join(_SUPERVISED),
            "data": f"{' '.join(_SUPERVISED)} research_expert2>supervisor/agent2 research_expert2>math_expert1 "
            "research_expert2>math_expert2 research_expert2>supervisor/agent3 math_expert2>supervisor/agent3",
        },
        result="2000 people.",
    ),
    "swarm": SuiteApp(
        "README of langgraph-swarm",
        swarm,
        package="langgraph-swarm",
        agents=["Alice", "Alice", "Bob"],
        edges={"trigger": "Alice1>Alice2 Alice2>Bob", "data": _ALICE, "tool": _ALICE},
        result="Arr, 7!",
        # The thread goes on with Bob; what was said in the first run is no action of the second.
        later_inputs=[{"messages": [("user", "Thanks.")]}],
        later_edges=[dict.fromkeys(("trigger", "data", "tool"), "Bob>Alice")],
        links=["turn"],
    ),
    "deep_agent": SuiteApp(
        "README of deepagents",
        deep_agent,
        package="deepagents",
        agents=[*["model"] * 3, *["research-agent"] * 2, "critique-agent", "fact-checker"],
        silent_agents=["general-purpose"],
        edges={
            "send": "model1>research-agent1 model2>critique-agent model2>fact-checker",
            "trigger": "research-agent1>research-agent2 research-agent2>model2 critique-agent>model3 "
            "fact-checker>model3",
            "tool": "research-agent1>research-agent2 model1>model2 model1>model3 model2>model3",
            # The tool makes each sub-agent's input of the packet that it was sent.
            "data": "research-agent1>research-agent2 model1>model2 model1>model3 model2>model3 "
            "research-agent2>model2 research-agent2>model3 critique-agent>model3 fact-checker>model3 "
            "model1?research-agent1 model1?research-agent2 model2?critique-agent model2?fact-checker",
        },
        result="1500 flowers",
        bounds_why="the tool `task` makes the input of a sub-agent itself, of what it was sent",
    ),
    "agents_as_tools": SuiteApp(
        "LangChain's guide to sub-agents as tools",
        agents_as_tools,
        agents=[*["supervisor"] * 2, *["calendar_agent"] * 2, *["email_agent"] * 2],
        edges={
            "send": "supervisor1>calendar_agent1 supervisor1>email_agent1",
            "trigger": "calendar_agent1>calendar_agent2 calendar_agent2>supervisor2 email_agent1>email_agent2 "
            "email_agent2>supervisor2",
            "tool": "calendar_agent1>calendar_agent2 email_agent1>email_agent2 supervisor1>supervisor2",
            "data": "calendar_agent1>calendar_agent2 email_agent1>email_agent2 supervisor1>supervisor2 "
            "calendar_agent2>supervisor2 email_agent2>supervisor2 supervisor1?calendar_agent1 "
            "supervisor1?calendar_agent2 supervisor1?email_agent1 supervisor1?email_agent2",
        },
        result="You meet on Monday.",
        bounds_why="a tool makes the input of its agent itself, of what it was sent",
        notes="the agents declare names, else both are `tools/model` and `init` says so",
    ),
    "react_template": SuiteApp(
        "LangChain's template react-agent",
        react_template,
        agents=["call_model"] * 2,
        edges=dict.fromkeys(("trigger", "data", "tool"), "call_model1>call_model2"),
        result="Paris.",
        context={"model": "openai/gpt-4o-mini"},
    ),
    "adaptive_rag": SuiteApp(
        "LangGraph's tutorial on adaptive RAG",
        adaptive_rag,
        agents=["__start__:router", *["grade_documents"] * 2, *["generate"] * 2, *["generate:router"] * 3],
        silent_agents=["transform_query"],
        edges={
            # retrieve asks nobody: what it wrote is made of what made it run. The router chose, not its node.
            "trigger": "__start__:router>grade_documents1 grade_documents2>generate1 generate1>generate:router1 "
            "generate:router1>generate2 generate2>generate:router2",
            # Each node writes question and documents again, so that the last of them is the writer of all there is.
            "data": "__start__:router>grade_documents1 __start__:router>grade_documents2 "
            "grade_documents1?grade_documents2 grade_documents2>generate1 generate1?generate:router1 "
            "generate1>generate2 generate2?generate:router2 generate2?generate:router3 "
            "generate:router2?generate:router3",
        },
        result="It hunts at night.",
        bounds_why="a router may read all of the state; two calls of one node, one after the other",
    ),
    "plan_and_execute": SuiteApp(
        "LangGraph's tutorial on plan-and-execute",
        plan_and_execute,
        agents=["planner", *["agent/model"] * 3, *["replan"] * 2],
        edges={
            "trigger": "planner>agent/model1 agent/model1>agent/model2 agent/model2>replan1 replan1>agent/model3 "
            "agent/model3>replan2",
            "tool": "agent/model1>agent/model2",
            # The node asks the agent in words of its own, made from the plan; the replanner is given the whole state.
            "data": "planner?agent/model1 planner?agent/model2 agent/model1>agent/model2 agent/model2?replan1 "
            "planner?replan1 replan1?agent/model3 agent/model2?replan2 agent/model3?replan2 replan1?replan2",
        },
        result="5, five",
        bounds_why="a node asks its agent in words of its own; the replanner is given the whole state",
    ),
    "reflection": SuiteApp(
        "LangGraph's tutorial on reflection",
        reflection,
        agents=[*["generate"] * 3, *["reflect"] * 2],
        edges={
            "trigger": "generate1>reflect1 reflect1>generate2 generate2>reflect2 reflect2>generate3",
            "data": "generate1>reflect1 generate1>generate2 reflect1>generate2 generate1>reflect2 reflect1>reflect2 "
            "generate2>reflect2 generate1>generate3 reflect1>generate3 generate2>generate3 reflect2>generate3",
        },
        result="owls, version 5",
    ),
    "map_reduce": SuiteApp(
        "LangGraph's guide to map-reduce with Send",
        map_reduce,
        agents=["generate_topics", *["generate_joke"] * 3, "best_joke"],
        edges={
            "send": "generate_topics>generate_joke1 generate_topics>generate_joke2 generate_topics>generate_joke3",
            **dict.fromkeys(
                ("trigger", "data"), "generate_joke1>best_joke generate_joke2>best_joke generate_joke3>best_joke"
            ),
        },
        result="Ha, bees.",
    ),
    "hierarchical_teams": SuiteApp(
        "LangGraph's tutorial on hierarchical teams, three deep",
        hierarchical_teams,
        agents=[
            *["supervisor"] * 3,
            *["research_team/supervisor"] * 2,
            *["research_team/search/model"] * 2,
            *["writing_team/supervisor"] * 2,
            *["writing_team/doc_writer/model"] * 2,
        ],
        silent_agents=["research_team/web_scraper/model"],
        edges={
            "trigger": "supervisor1>research_team/supervisor1 research_team/supervisor1>research_team/search/model1 "
            "research_team/search/model1>research_team/search/model2 "
            "research_team/search/model2>research_team/supervisor2 research_team/supervisor2>supervisor2 "
            "supervisor2>writing_team/supervisor1 writing_team/supervisor1>writing_team/doc_writer/model1 "
            "writing_team/doc_writer/model1>writing_team/doc_writer/model2 "
            "writing_team/doc_writer/model2>writing_team/supervisor2 writing_team/supervisor2>supervisor3",
            "tool": "research_team/search/model1>research_team/search/model2 "
            "writing_team/doc_writer/model1>writing_team/doc_writer/model2",
            # A supervisor writes only `next`, which nobody reads. What a team says is that of its last action.
            "data": "research_team/search/model1>research_team/search/model2 "
            "research_team/search/model2>research_team/supervisor2 research_team/supervisor2>supervisor2 "
            "research_team/supervisor2?writing_team/supervisor1 "
            "research_team/supervisor2?writing_team/doc_writer/model1 "
            "research_team/supervisor2?writing_team/doc_writer/model2 "
            "research_team/supervisor2?writing_team/supervisor2 "
            "writing_team/doc_writer/model1>writing_team/doc_writer/model2 "
            "writing_team/doc_writer/model2>writing_team/supervisor2 research_team/supervisor2>supervisor3 "
            "writing_team/supervisor2>supervisor3",
        },
        result="owls, written",
        bounds_why="a node makes the input of its team itself",
    ),
    "memory_store": SuiteApp(
        "LangChain's template memory-agent",
        memory_store,
        agents=["call_model"] * 2,
        edges=dict.fromkeys(("trigger", "data", "tool"), "call_model1>call_model2"),
        result="Hello Ada.",
        default_context={},
        # What the first run remembered reaches the second through the store, which no edge shows.
        later_inputs=[{"messages": [("user", "What do I like?")]}],
        later_edges=[{}],
        notes="what travels through the store has no edge",
    ),
    "human_review": SuiteApp(
        "LangGraph's guide to a human in the loop",
        human_review,
        agents=["write", "criticise"],
        edges=dict.fromkeys(("trigger", "data"), "write>criticise"),
        result="",
        later_inputs=[Command(resume="shorter")],
        # The draft that the feedback is on was written in the run before, which is no part of this episode.
        later_edges=[dict.fromkeys(("trigger", "data"), "write>criticise")],
        links=["resume"],
        outcome="truncated",
        notes="nobody answers in `collect`: its episodes are truncated and have no reward",
    ),
    "joke_workflow": SuiteApp(
        "LangGraph's guide to the functional API",
        joke_workflow,
        agents=["graph/generate_joke", "graph/improve_joke", "graph/polish_joke"],
        # What a task is given is an exact edge. That the first joke decides on the third goes by way of the second.
        edges={"data": "graph/generate_joke>graph/improve_joke graph/improve_joke>graph/polish_joke"},
        result="Add a surp joke",
    ),
    "code_assistant": SuiteApp(
        "LangGraph's tutorial on a code assistant",
        code_assistant,
        agents=["generate"] * 2,
        edges=dict.fromkeys(("trigger", "data"), "generate1>generate2"),  # the check in between asks nobody
        result="0 + 2",
    ),
}
"""Every app by the name of its file."""
