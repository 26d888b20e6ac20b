"""Reflection after LangGraph's tutorial: a writer and a teacher who take turns on an essay."""

from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.prompts import ChatPromptTemplate, MessagesPlaceholder
from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, MessagesState, StateGraph

llm = ChatOpenAI(model="gpt-4o-mini")


def role(system):
    return ChatPromptTemplate.from_messages([("system", system), MessagesPlaceholder("messages")]) | llm


writer = role("You write essays of one line. Respond to critique with a revised version.")
teacher = role("You are a teacher who grades an essay. Give critique and recommendations.")


async def generation_node(state: MessagesState):
    return {"messages": [await writer.ainvoke({"messages": state["messages"]})]}


async def reflection_node(state: MessagesState):
    # The teacher takes the writer for a student, and so sees the roles the other way round.
    other_role = {"ai": HumanMessage, "human": AIMessage}
    request, *rest = state["messages"]
    translated = [request, *(other_role[message.type](content=message.content) for message in rest)]
    critique = await teacher.ainvoke({"messages": translated})
    return {"messages": [HumanMessage(content=critique.content)]}


def should_continue(state: MessagesState):
    return END if len(state["messages"]) > 4 else "reflect"


builder = StateGraph(MessagesState)
builder.add_node("generate", generation_node)
builder.add_node("reflect", reflection_node)
builder.add_edge(START, "generate")
builder.add_conditional_edges("generate", should_continue, ["reflect", END])
builder.add_edge("reflect", "generate")
graph = builder.compile()

TOPICS = ("owls", "bees", "rain", "tea", "maps", "chess")
tasks = [
    {"id": f"{topic}-{n}", "messages": [("user", f"An essay on {topic} ({n}).")], "topic": topic}
    for topic in TOPICS
    for n in range(2)
]


def reward(task, state):
    return float(task["topic"] in state["messages"][-1].text)
