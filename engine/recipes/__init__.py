"""Recipes: each recognises the shape of a computation and says how a target does it best.

One file per kind; the first that matches wins. Some rewrite the graph before it is cut into
kernels: a sum of products becomes an INTRINSIC, computed by instructions that loops can't express,
over operands packed for them. The others plan the loops of a kernel. A recipe never changes what is
computed: every plan equals the plain one, every INTRINSIC its meaning, and that is its test.
"""

from __future__ import annotations

from engine.graph import Node
from engine.ir import Target
from engine.lower import Plan, plain
from engine.recipes import (
    amx,
    attention,
    contraction,
    conv,
    depthwise,
    elementwise,
    few_queries,
    gemm,
    gemv,
    groups,
    implicit,
    product,
    rows,
    staged,
    team,
    tile_dots,
    tiles,
    vnni,
    winograd,
)
from engine.recipes.analysis import analyse
from engine.recipes.settings import Settings
from engine.schedule import Kernel

REWRITES = (
    tile_dots.rewrite,
    vnni.rewrite,
    amx.rewrite,
    gemv.rewrite,
    gemm.rewrite,
    staged.rewrite,
)
RECIPES = (tiles.match, team.match, rows.match, contraction.match, elementwise.match)


def rewrite_product(node: Node, settings: Settings) -> Node | None:
    """A sum of products by an INTRINSIC, None where no recipe has a better way."""
    found = product.find(node)
    if found is None:
        return None
    for recipe in REWRITES:
        for order in (found, found.swapped()):
            result = recipe(order, settings)
            if result is not None:
                return order.restored(result)
    return None


# Each goes through the whole graph: what consists of several products has to come before them,
# and what asks how numbers lie in memory after those that decide it.
PASSES = (
    attention.rewrite,
    few_queries.rewrite,
    conv.rewrite,
    depthwise.rewrite,
    winograd.rewrite,
    implicit.rewrite,
    rewrite_product,
    groups.rewrite,
)


def choose(kernel: Kernel, target: Target) -> tuple[Kernel, Plan]:
    """The kernel (a recipe may reshape its output) and the plan to lower it with."""
    if kernel.rows is not None:
        return kernel, elementwise.scattered(kernel, target)
    found = staged.tiled(kernel, target)
    if found is not None:
        return found
    kernel, facts = elementwise.flattened(kernel)
    facts = facts or analyse(kernel)
    for match in RECIPES:
        plan = match(kernel, facts, target)
        if plan is not None:
            return kernel, plan
    return kernel, plain(kernel)


def switched_on(target: Target) -> tuple[str, ...]:
    """Names, for people, of the recipes that a target lets match, whatever the work is."""
    has = target.features.__ge__
    vectors = target.is_cpu and target.lanes in (4, 8, 16)
    tensor_cores = target.dialect == "cuda" and staged.TENSOR_CORES in target.features
    tests = {
        "packed panels": vectors,
        "few queries": vectors,
        "grouped products": target.is_cpu,
        "winograd": target.is_cpu,
        "vnni": has(vnni.NEEDED),
        "amx": has(amx.NEEDED),
        "amx int8": has(tile_dots.NEEDED),
        "amx attention": has(amx.NEEDED | {"avx512dq"}),
        "teams": target.team > 1,
        "staged products": target.team > 1,
        "tensor cores": tensor_cores,
        "simdgroup matrices": target.dialect == "metal" and has({staged.SIMDGROUPS}),
    }
    return tuple(name for name, is_on in tests.items() if is_on)
