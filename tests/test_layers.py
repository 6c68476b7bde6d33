"""Imports follow the one dependency rule: zoo -> weights -> engine, and one line inside engine."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
LAYERS = ("engine", "weights", "zoo")  # each may import from its left only

# Each module of engine may import only from its left; `runtime` and `recipes` are packages.
ENGINE_ORDER = (
    "dtype",
    "symbolic",
    "graph",
    "windows",
    "indexing",
    "fusion",
    "schedule",
    "memory",
    "ir",
    "dialects",
    "evaluate",
    "lower",
    "tiles",
    "staged",
    "recipes",
    "tune",
    "clib",
    "spell",
    "render",
    "runtime",
    "prepare",
    "tuning",
    "specialise",
    "realize",
    "tensor",
    "functional",
    "convolution",
    "program",
)


def modules(package: str) -> dict[str, Path]:
    """Dotted name -> file of every module of a package."""
    found = {}
    for path in sorted((ROOT / package).rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


ALL_MODULES = {name: path for package in LAYERS for name, path in modules(package).items()}


def imports_of(source: str, module: str, is_package: bool) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of every import in a source, those inside functions included.

    `from a import b` gives `a.b` where that is a module of ours and `a` otherwise. Imports under
    `if TYPE_CHECKING` count too: a type that points back is a cycle for the reader.
    """
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                up = node.level - 1 if is_package else node.level
                parent = module.split(".")[: len(module.split(".")) - up]
                base = ".".join([*parent, *([base] if base else [])])
            for alias in node.names:
                inner = f"{base}.{alias.name}"
                yield node.lineno, inner if inner in ALL_MODULES else base


def own_imports(module: str) -> list[tuple[int, str]]:
    """(line, name) of the imports of one of our modules that lead to our packages."""
    path = ALL_MODULES[module]
    found = imports_of(path.read_text("utf-8"), module, path.name == "__init__.py")
    return [(line, name) for line, name in found if name.split(".")[0] in LAYERS]


def where(module: str, line: int) -> str:
    return f"{ALL_MODULES[module].relative_to(ROOT)}:{line}"


def test_packages_import_only_downwards() -> None:
    wrong = [
        f"{where(module, line)} imports {name}"
        for module in ALL_MODULES
        for line, name in own_imports(module)
        if LAYERS.index(name.split(".")[0]) > LAYERS.index(module.split(".")[0])
    ]
    assert not wrong, "\n".join(wrong)


def test_engine_and_weights_know_no_tests_or_bench() -> None:
    wrong = [
        f"{where(module, line)} imports {name}"
        for module, path in ALL_MODULES.items()
        for line, name in imports_of(path.read_text("utf-8"), module, path.name == "__init__.py")
        if name.split(".")[0] in {"tests", "bench"}
    ]
    assert not wrong, "\n".join(wrong)


def model_names() -> set[str]:
    """All packages of zoo but the server, which is of all models."""
    return {path.parent.name for path in (ROOT / "zoo").glob("*/__init__.py")} - {"serve"}


def test_no_model_imports_another() -> None:
    models = model_names()
    wrong = []
    for module in ALL_MODULES:
        parts = module.split(".")
        if parts[0] != "zoo" or len(parts) < 2 or parts[1] not in models:
            continue
        for line, name in own_imports(module):
            target = name.split(".")
            if target[0] == "zoo" and len(target) > 1 and target[1] in models - {parts[1]}:
                wrong.append(f"{where(module, line)} imports {name}")
    assert not wrong, "\n".join(wrong)


def test_shared_zoo_files_import_no_model() -> None:
    """`zoo/__init__.py` and `zoo/cli.py` serve every model, so they know none.

    `zoo/__main__.py` and the server choose a model by its name: those two may.
    """
    models = model_names()
    wrong = [
        f"{where(module, line)} imports {name}"
        for module in ("zoo", "zoo.cli")
        if module in ALL_MODULES
        for line, name in own_imports(module)
        if name.split(".")[0] == "zoo" and len(name.split(".")) > 1 and name.split(".")[1] in models
    ]
    assert not wrong, "\n".join(wrong)


def engine_part(name: str) -> str | None:
    """The name in ENGINE_ORDER that a dotted engine module belongs to; None for the package."""
    parts = name.split(".")
    return parts[1] if len(parts) > 1 else None


def test_every_engine_module_has_a_place_in_the_order() -> None:
    unknown = {engine_part(m) for m in modules("engine")} - {None, *ENGINE_ORDER}
    assert not unknown, f"not in ENGINE_ORDER: {sorted(map(str, unknown))}"


def test_engine_modules_import_only_from_their_left() -> None:
    wrong = []
    for module in modules("engine"):
        part = engine_part(module)
        if part is None:
            continue  # engine/__init__.py gathers the public names
        for line, name in own_imports(module):
            if name.split(".")[0] != "engine":
                continue
            target = engine_part(name)
            if target is None:
                wrong.append(f"{where(module, line)} imports the engine package itself")
            elif ENGINE_ORDER.index(target) > ENGINE_ORDER.index(part):
                wrong.append(f"{where(module, line)} imports {name}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("package", ["weights", "zoo"])
def test_no_import_cycle(package: str) -> None:
    """No two modules of a package lead to each other; engine's order says more already."""
    edges = {
        module: {n for _, n in own_imports(module) if n in ALL_MODULES and n != module}
        for module in modules(package)
    }
    done: set[str] = set()

    def visit(module: str, trail: tuple[str, ...]) -> None:
        if module in trail:
            cycle = (*trail[trail.index(module) :], module)
            pytest.fail(" -> ".join(cycle))
        if module in done or module not in edges:
            return
        for target in sorted(edges[module]):
            visit(target, (*trail, module))
        done.add(module)

    for module in edges:
        visit(module, ())


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import engine.tensor", ["engine.tensor"]),
        ("from . import sibling", ["pkg"]),
        ("from .sibling import name", ["pkg.sibling"]),
        ("from ..other import name", ["pkg.other"]),
        ("def f():\n    from zoo.cli import main", ["zoo.cli"]),
        ("import numpy as np", ["numpy"]),
    ],
)
def test_import_reader_sees_each_form(source: str, expected: list[str]) -> None:
    module = "pkg.sub.mod" if "..other" in source else "pkg.mod"
    assert [name for _, name in imports_of(source, module, False)] == expected
