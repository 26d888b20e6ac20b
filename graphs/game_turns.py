"""One game as pure functions -> a graph of two agents that play it in turns: a writer with a tool, and a planner.

After PettingLLMs, the environments of AT-GRPO ("Stronger-MAS: Multi-Agent Reinforcement Learning for Collaborative
LLMs", arXiv 2510.11062). Theirs: in every turn a tool agent writes a program, which is run, and a planning agent reads
what came out, decides, and acts on the environment; at most four or five turns; what the program proposed is tried on a
copy of the state, which is the tool agent's own reward. An agent's reward is its own plus the team's. Ours: by default
the program is one line in the game's own words and the tool plays it on a copy and says what became of it, since a
small model writes no search; with `run_program` it is Python, as theirs is. What the last turn did is told as words.

Invariants: an answer that is no move costs, and so does a move that is refused; neither ends a run but by the step that
a refused move takes as any other does. A run ends when the game is solved, when it has no step left, or after the turns
of its task. A position is plain JSON and never changed.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Awaitable, Callable, Hashable, Iterable, Iterator
from typing import Annotated, Any, Literal, NamedTuple, TypedDict

from langchain_core.runnables import Runnable
from langgraph.graph import END, START, StateGraph
from langgraph.graph.state import CompiledStateGraph

from graphs.few_shot import FewShotPrompt

NO_ANSWER = -2.0
"""An agent's own reward where nothing in its answer is a move: theirs for both agents."""
UNREADABLE = -1.0
"""The team's reward for a turn without a move: their environment's for an action of a wrong format."""
MAX_PRINTED_CHARACTERS = 400
"""Characters of a Python program and of what it printed that the planner is shown, each."""

_FENCED = re.compile(r"```(?:[A-Za-z0-9_+.-]*[ ]*\n|python\b)?(.*?)(?:```|\Z)", re.DOTALL)

Position = dict[str, Any]
RunProgram = Callable[[str], Awaitable[str]]
"""Python source -> what it printed; the caller confines it."""


class Played(NamedTuple):
    """What became of an answer."""

    position: Position
    reward: float
    """What the environment pays for it."""
    bad_moves: int
    """Moves that were refused; 1 where there was none to read."""
    readable: bool
    """Whether there was a move in the answer."""
    note: str
    """What happened, in a few words for the agents."""
    solved: bool
    over: bool
    """Whether no step is left."""


class Agent(NamedTuple):
    """One agent of a game: its node, its prompt, and what a question ends with."""

    node: str
    prompt: FewShotPrompt
    question: str


class Game(NamedTuple):
    """The rules, and who plays."""

    name: str
    describe: Callable[[Position], str]
    play: Callable[[Position, str], Played]
    """(position, an agent's text) -> the position after it; the same for the tool's copy and for the environment."""
    writer: Agent
    planner: Agent
    programmer: FewShotPrompt
    """The writer's prompt where its program is Python."""


class TurnScore(TypedDict):
    """What one turn paid the team, and the planner for itself."""

    team: float
    planner: float
    bad_moves: int
    solved: bool


class GameState(TypedDict, total=False):
    """The state that the nodes share. `trials` holds what the writer's own answers would have paid, turn by turn.

    No node reads them: the environment goes by the planner's answer alone, and D shows that.
    """

    position: Position
    turn_limit: int
    feedback: str
    proposal: str
    trials: Annotated[list[float], operator.add]
    answer: str
    turns: Annotated[list[TurnScore], operator.add]


def game_to_graph(
    game: Game, model: Runnable[Any, Any], run_program: RunProgram | None = None
) -> CompiledStateGraph[Any, Any, Any, Any]:
    """The compiled loop, in which both agents call `model`.

    Args:
        game: its rules and its agents.
        model: a chat model for both agents, perhaps with options bound to it.
        run_program: runs Python that the writer wrote; without it the writer's text is a line of the game itself.
    """
    writer_prompt = game.writer.prompt if run_program is None else game.programmer
    writer_question = game.writer.question if run_program is None else "Code?"

    async def writer(state: GameState) -> GameState:
        situation = situation_to_text(game, state["position"], state["feedback"])
        reply = await model.ainvoke(writer_prompt.messages(f"{situation}\n{writer_question}"))
        program = str(reply.text)
        moves = program if run_program is None else await run_program(text_to_code(program))
        trial = game.play(state["position"], moves)
        report = played_to_report(trial)
        if run_program is not None:
            report = f"Code: {_shorten(text_to_code(program))}\nPrinted: {_shorten(moves)}\n{report}"
        return {"proposal": report, "trials": [trial.reward if trial.readable else NO_ANSWER]}

    async def planner(state: GameState) -> GameState:
        situation = situation_to_text(game, state["position"], state["feedback"])
        question = f"{situation}\n{state['proposal']}\n{game.planner.question}"
        reply = await model.ainvoke(game.planner.prompt.messages(question))
        return {"answer": str(reply.text)}

    def environment(state: GameState) -> GameState:
        played = game.play(state["position"], state["answer"])
        score: TurnScore = {
            "team": played.reward,
            "planner": played.reward if played.readable else NO_ANSWER,
            "bad_moves": played.bad_moves,
            "solved": played.solved,
        }
        # `over` is kept in the position: a state has to say by itself how it goes on.
        position = {**played.position, "over": played.over}
        return {"position": position, "feedback": played.note, "turns": [score]}

    def route_after_environment(state: GameState) -> Literal["again", "__end__"]:
        turns = state["turns"]
        done = turns[-1]["solved"] or state["position"]["over"] or len(turns) == state["turn_limit"]
        return "__end__" if done else "again"

    graph = StateGraph(GameState)
    graph.add_node(game.writer.node, writer)
    graph.add_node(game.planner.node, planner)
    graph.add_node("environment", environment)
    graph.add_edge(START, game.writer.node)
    graph.add_edge(game.writer.node, game.planner.node)
    graph.add_edge(game.planner.node, "environment")
    graph.add_conditional_edges("environment", route_after_environment, {"again": game.writer.node, "__end__": END})
    return graph.compile(name=game.name)


def situation_to_text(game: Game, position: Position, feedback: str) -> str:
    """What both agents are shown: the position, and after the first turn what the last one did."""
    return game.describe(position) + (f"\nLast turn: {feedback}" if feedback else "")


def played_to_report(played: Played) -> str:
    """What the planner is told of the writer's proposal."""
    return f"Tool: {played.note}"


def task_to_state(position: Position, turn_limit: int) -> GameState:
    """The input of a run that begins at `position`."""
    return {"position": position, "turn_limit": turn_limit, "feedback": ""}


def turns_to_rewards(game: Game, result: dict[str, Any], run: Any) -> dict[str, Any]:
    """Rewards of one episode, from its final state and its record.

    `correct` is 1 where the game was solved. `reward` is the team's: what the environment paid for the planner's
    answers, over all turns. `local` is a step reward, one for each call: what the environment pays for that agent's own
    answer, on a copy of the state for the writer, NO_ANSWER where it has no move. It is absent where the record does
    not have exactly one call of each agent for each turn. `turns` and `bad_moves` are counts.
    """
    turns, trials = result["turns"], result["trials"]
    actions = run.game().actions
    writer_calls = [action.action_id for action in actions if action.node == game.writer.node]
    planner_calls = [action.action_id for action in actions if action.node == game.planner.node]
    complete = len(writer_calls) == len(planner_calls) == len(turns)
    local = {}
    if complete:
        local = {f"step:{call}": trial for call, trial in zip(writer_calls, trials, strict=True)}
        local |= {f"step:{call}": turn["planner"] for call, turn in zip(planner_calls, turns, strict=True)}
    return {
        "correct": float(turns[-1]["solved"]),
        "reward": sum(turn["team"] for turn in turns),
        "turns": float(len(turns)),
        "bad_moves": float(sum(turn["bad_moves"] for turn in turns)),
        "local": local if complete else None,
    }


def text_to_answer(text: str) -> str:
    """The part of a text that is the answer: after the last `####` or in the last <answer>, else its first line."""
    if "####" in text:
        text = text.rsplit("####", 1)[1]
    elif "<answer>" in text:
        text = text.rsplit("<answer>", 1)[1].split("</answer>")[0]
    lines = (line.strip() for line in text.splitlines())
    return next((line for line in lines if line and not line.startswith("```")), "")


def text_to_code(text: str) -> str:
    """What stands between the last two fences (```), whatever language they name, or behind one that is not closed;
    else the text itself."""
    blocks = [block.strip() for block in _FENCED.findall(text) if block.strip()]
    return blocks[-1] if blocks else text


def _shorten(text: str) -> str:
    if len(text) <= MAX_PRINTED_CHARACTERS:
        return text
    half = MAX_PRINTED_CHARACTERS // 2
    return f"{text[:half]} ... {text[-half:]}"


def distinct_tasks(
    made: Iterable[dict[str, Any]], content: Callable[[dict[str, Any]], Hashable]
) -> Iterator[dict[str, Any]]:
    """The tasks but for those whose content, which is what a model sees of one, an earlier task had."""
    known: set[Hashable] = set()
    for task in made:
        if (seen := content(task)) not in known:
            known.add(seen)
            yield task
