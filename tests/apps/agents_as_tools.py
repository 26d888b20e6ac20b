"""An assistant whose tools are two agents, as LangChain recommends a supervisor: each agent behind a tool."""

from langchain.agents import create_agent
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

model = ChatOpenAI(model="gpt-4o-mini")


@tool
def create_calendar_event(title: str, day: str) -> str:
    """Puts an event into the calendar."""
    return f"{title} is in the calendar on {day}"


@tool
def send_email(to: str, subject: str) -> str:
    """Sends an email."""
    return f"sent {subject!r} to {to}"


calendar_agent = create_agent(
    model, [create_calendar_event], system_prompt="You keep the calendar.", name="calendar_agent"
)
email_agent = create_agent(model, [send_email], system_prompt="You write emails.", name="email_agent")


@tool
def schedule_event(request: str) -> str:
    """Schedules what is asked for in plain words."""
    result = calendar_agent.invoke({"messages": [{"role": "user", "content": request}]})
    return result["messages"][-1].text


@tool
def manage_email(request: str) -> str:
    """Sends the emails that are asked for in plain words."""
    result = email_agent.invoke({"messages": [{"role": "user", "content": request}]})
    return result["messages"][-1].text


graph = create_agent(
    model,
    [schedule_event, manage_email],
    system_prompt="You are a personal assistant. Break the request down and coordinate the results.",
    name="supervisor",
)

DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday")
tasks = [
    {
        "id": f"{day}-{team}",
        "messages": [{"role": "user", "content": f"Meet the {team} team on {day}, and remind them by email."}],
        "day": day,
    }
    for day in DAYS
    for team in ("design", "sales")
]


def reward(task, state):
    return float(task["day"] in state["messages"][-1].text)
