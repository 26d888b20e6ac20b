"""The four games with a writer whose tool is Python, as published: a program of the model -> what it printed.

The programs run in the sandbox of the bridge, which `graphs/` does not know. Invariant: a program that fails, runs too
long or prints too much is no fault of the run: what it printed until then is its answer.
"""

from __future__ import annotations

import asyncio
from typing import Any

from langchain_core.language_models import BaseChatModel
from langgraph.graph.state import CompiledStateGraph

from graphs import countdown as countdown_game
from graphs import plan_path as plan_path_game
from graphs import sokoban as sokoban_game
from graphs import sudoku as sudoku_game
from graphs.game_turns import Game, game_to_graph
from marft_bridge.sandbox.programs import Limits, run_in_sandbox

LIMITS = Limits(wall_s=20.0, cpu_s=20)
"""Theirs: 20 seconds."""


WITHOUT_THINKING = {"chat_template_kwargs": {"enable_thinking": False}}
"""Theirs, for Qwen3; the template of a model that does not know the word ignores it."""


async def run_program(source: str) -> str:
    """What a program printed; where it printed nothing, the last line of its error."""
    end = await asyncio.to_thread(run_in_sandbox, source, limits=LIMITS)
    return end.stdout.strip() or end.last_error_line


def _with_python(game: Game, model: BaseChatModel) -> CompiledStateGraph[Any, Any, Any, Any]:
    return game_to_graph(game, model.bind(extra_body=WITHOUT_THINKING), run_program)


def plan_path(model: BaseChatModel) -> CompiledStateGraph[Any, Any, Any, Any]:
    """Plan-Path, whose tool writer writes Python."""
    return _with_python(plan_path_game.GAME, model)


def sudoku(model: BaseChatModel) -> CompiledStateGraph[Any, Any, Any, Any]:
    """Sudoku, whose tool writer writes Python."""
    return _with_python(sudoku_game.GAME, model)


def sokoban(model: BaseChatModel) -> CompiledStateGraph[Any, Any, Any, Any]:
    """Sokoban, whose tool writer writes Python."""
    return _with_python(sokoban_game.GAME, model)


def countdown(model: BaseChatModel) -> CompiledStateGraph[Any, Any, Any, Any]:
    """Countdown, whose proposer writes Python."""
    return _with_python(countdown_game.GAME, model)
