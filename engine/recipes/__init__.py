"""Recipes: each recognises the shape of a kernel and plans its loops for a target.

One file per kind; the first that matches wins. A recipe never changes what a kernel computes: every
plan equals the plain one, and that is its test.
"""

from __future__ import annotations

from engine.ir import Target
from engine.lower import Plan, plain
from engine.recipes import contraction, elementwise, rows
from engine.recipes.analysis import analyse
from engine.schedule import Kernel

RECIPES = (rows.match, contraction.match, elementwise.match)


def choose(kernel: Kernel, target: Target) -> tuple[Kernel, Plan]:
    """The kernel (a recipe may reshape its output) and the plan to lower it with."""
    kernel, facts = elementwise.flattened(kernel)
    facts = facts or analyse(kernel)
    for match in RECIPES:
        plan = match(kernel, facts, target)
        if plan is not None:
            return kernel, plan
    return kernel, plain(kernel)
