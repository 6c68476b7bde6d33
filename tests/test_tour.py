"""docs/engine.md shows what the engine really does: its examples are run as one doctest."""

from __future__ import annotations

import doctest
from pathlib import Path

import numpy as np
import pytest

TOUR = Path(__file__).resolve().parent.parent / "docs" / "engine.md"


def python_only(markdown: str) -> str:
    """The ```python blocks, every other line empty, so that line numbers stay the page's."""
    out = []
    inside = False
    for line in markdown.splitlines():
        fence = line.lstrip().startswith("```")
        out.append("" if fence or not inside else line)
        if fence:
            inside = not inside and line.strip() == "```python"
    return "\n".join(out) + "\n"


def failures(text: str, name: str) -> tuple[int, str]:
    """(examples run, what differed) of a page's examples, in one namespace from top to bottom."""
    test = doctest.DocTestParser().get_doctest(python_only(text), {}, name, name, 0)
    runner = doctest.DocTestRunner(
        verbose=False, optionflags=doctest.REPORT_NDIFF | doctest.NORMALIZE_WHITESPACE
    )
    report: list[str] = []
    with np.printoptions():  # what the page sets must not reach other tests
        runner.run(test, out=report.append)
    return len(test.examples), "".join(report)


def test_the_tour_shows_what_the_engine_does() -> None:
    page = TOUR.read_text("utf-8")
    count, differed = failures(page, TOUR.name)
    assert "+SKIP" not in page
    assert count > 0, f"{TOUR} has no examples"
    if differed:
        pytest.fail(differed, pytrace=False)


def test_the_examples_of_a_page_are_found_and_compared() -> None:
    other = "```\n>>> 1 / 0\n```\n"  # a block in no language isn't run
    page = f"text\n```python\n>>> a = 2\n```\n{other}```python\n>>> a + 1\n4\n```\n"
    count, differed = failures(page, "page.md")
    assert count == 2
    assert "line 9," in differed
    assert "- 4" in differed
    assert "+ 3" in differed
