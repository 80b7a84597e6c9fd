"""docs/cases.md against the tests: each test it names exists, each case that a test names is on it."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
PAGE = (ROOT / "docs" / "cases.md").read_text()
HARDWARE = (ROOT / "docs" / "hardware-checks.md").read_text()
CASE = re.compile(r"\b([BX]\d{1,2})\b")
NAMED = re.compile(r"`(tests/[\w/]+\.py)(?:::(\w+))?`")
ROWS_MIN = 40


def rows() -> dict[str, str]:
    """The page's table rows by case."""
    found = re.findall(r"^\| ([BX]\d{1,2}) \|(.*)$", PAGE, re.MULTILINE)
    assert len(found) == len(dict(found)), "a case stands on the page twice"
    return dict(found)


def names_in(path: Path) -> set[str]:
    """Test functions and classes of a file; hypothesis' state machines are assigned to names."""
    names = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return names


def cases_in_docstrings(path: Path) -> set[str]:
    """Cases that a test file's docstrings name; test data may hold such words by chance."""
    kinds = ast.Module | ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    told = [
        ast.get_docstring(node) or ""
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, kinds)
    ]
    return set(CASE.findall("\n".join(told)))


def test_every_test_that_is_named_exists() -> None:
    """On this page and on the one of checks for other hardware."""
    references = NAMED.findall(PAGE) + NAMED.findall(HARDWARE)
    assert len(references) > ROWS_MIN
    missing = [
        f"{file}::{name}"
        for file, name in references
        if not (ROOT / file).is_file() or (name and name not in names_in(ROOT / file))
    ]
    assert missing == []


def test_every_case_has_a_test() -> None:
    assert len(rows()) >= ROWS_MIN
    assert [case for case, row in rows().items() if not NAMED.search(row)] == []


def test_every_case_that_a_test_names_is_on_the_page() -> None:
    named = set().union(*(cases_in_docstrings(path) for path in (ROOT / "tests").rglob("test_*.py")))
    assert sorted(named - set(rows())) == []


def test_what_is_not_built_is_not_said_to_be_tested() -> None:
    later = PAGE.partition("## Not built yet")[2]
    ids = set(CASE.findall(later))
    for first, last in re.findall(r"B(\d+)–B(\d+)", later):
        ids |= {f"B{n}" for n in range(int(first), int(last) + 1)}
    assert ids & set(rows()) == set()
