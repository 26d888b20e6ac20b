"""The four games with a writer whose tool is Python, as published: a program of the model -> what it printed.

The programs run in the sandbox of the bridge, which `graphs/` does not know. Invariant: a program that fails, runs too
long or prints too much is no fault of the run: what it printed until then is its answer.
"""

from __future__ import annotations

import asyncio
from typing import Any

from langchain_core.language_models import BaseChatModel
from langgraph.graph.state import CompiledStateGraph

import graphs.countdown
import graphs.plan_path
import graphs.sokoban
import graphs.sudoku
from marft_bridge.sandbox.programs import Limits, run_in_sandbox

LIMITS = Limits(wall_s=20.0, cpu_s=20)
"""Theirs: 20 seconds."""


async def run_program(source: str) -> str:
    """What a program printed; where it printed nothing, the last line of its error."""
    end = await asyncio.to_thread(run_in_sandbox, source, limits=LIMITS)
    return end.stdout.strip() or end.last_error_line


def plan_path(model: BaseChatModel) -> CompiledStateGraph[Any, Any, Any, Any]:
    """Plan-Path, whose tool writer writes Python."""
    return graphs.plan_path.build(model, run_program)


def sudoku(model: BaseChatModel) -> CompiledStateGraph[Any, Any, Any, Any]:
    """Sudoku, whose tool writer writes Python."""
    return graphs.sudoku.build(model, run_program)


def sokoban(model: BaseChatModel) -> CompiledStateGraph[Any, Any, Any, Any]:
    """Sokoban, whose tool writer writes Python."""
    return graphs.sokoban.build(model, run_program)


def countdown(model: BaseChatModel) -> CompiledStateGraph[Any, Any, Any, Any]:
    """Countdown, whose proposer writes Python."""
    return graphs.countdown.build(model, run_program)
