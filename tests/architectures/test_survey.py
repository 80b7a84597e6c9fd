"""docs/models.md says what the library does today, and nothing in it is silently wrong."""

from __future__ import annotations

import pytest
from tests.architectures.configs import NAMES, NOT_BUILT, WRONG_IN_MLX_LM
from tests.architectures.survey import EVERY, PAGE, parsed, survey, with_table

ROWS = {row["architecture"]: row for row in parsed(PAGE.read_text())}


@pytest.mark.parametrize("name", EVERY)
def test_the_page_says_what_the_survey_finds(name: str) -> None:
    assert ROWS[name] == survey(name)


def test_the_page_has_a_row_for_each_architecture_and_nothing_wrong() -> None:
    assert list(ROWS) == EVERY
    assert set(EVERY) == set(NAMES) | set(NOT_BUILT)
    assert with_table(PAGE.read_text(), list(ROWS.values())) == PAGE.read_text()
    wrong = {name for name, row in ROWS.items() if any(cell.startswith("wrong") for cell in row.values())}
    assert wrong == set(WRONG_IN_MLX_LM)
