"""Figures and reasons keep to their columns, whatever they are."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from stateroom.client.protocol import WAITING
from stateroom.daemon.top.columns import COLUMNS
from stateroom.daemon.top.words import WAITS, clean, count_of, fit, interval, rate, short_wait, size, span

numbers = st.floats(min_value=-1, max_value=1e20, allow_nan=False)
STATE_WIDTH = next(column.width for column in COLUMNS if column.head == "STATE")


@given(numbers)
def test_every_figure_fits_its_column(number: float) -> None:
    assert len(size(number)) <= 5
    assert len(count_of(number)) <= 6
    assert len(rate(number)) <= 5
    assert len(span(number)) <= 4


@given(st.integers(0, 10**15), st.integers(0, 10**15))
def test_what_is_more_is_never_written_as_less(one: int, other: int) -> None:
    less, more = sorted((one, other))

    def bytes_of(text: str) -> float:
        return float(text.rstrip("BKMGTP")) * 1024 ** "BKMGTP".index(text[-1]) if text != "0" else 0.0

    assert bytes_of(size(less)) <= bytes_of(size(more))


@pytest.mark.parametrize(
    ("nbytes", "said"),
    [
        (0, "0"),
        (512, "512B"),
        (1_536, "1.5K"),
        (640 * 2**20, "640M"),
        (12 * 2**30, "12G"),
        (1_023 * 2**20, "1.0G"),
    ],
)
def test_sizes(nbytes: int, said: str) -> None:
    assert size(nbytes) == said


@pytest.mark.parametrize(
    ("seconds", "said"), [(0, "0s"), (59.9, "59s"), (60, "1m"), (11_520, "3h"), (2e7, "231d"), (1e12, "999d")]
)
def test_spans(seconds: float, said: str) -> None:
    assert span(seconds) == said


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(0.3, "0.3s"), (1.0, "1s"), (1.04, "1s"), (9.96, "10s"), (13.6, "14s"), (3600, "1h")],
)
def test_intervals(seconds: float, said: str) -> None:
    assert interval(seconds) == said


def test_every_reason_to_wait_has_words_that_fit() -> None:
    assert tuple(WAITS) == WAITING
    assert max(len(short_wait(reason)) for reason in WAITING) <= STATE_WIDTH
    widest = next(column.width for column in COLUMNS if column.head == "WAITS FOR")
    assert max(len(long) for _, long in WAITS.values()) <= widest


def test_a_reason_that_a_newer_daemon_knows_is_shown_as_it_is() -> None:
    assert short_wait("tide") == "waits: tide"


@given(st.text(), st.integers(0, 40), st.booleans(), st.integers(0, 5))
def test_a_fitted_text_has_exactly_its_cells(text: str, width: int, right: bool, tail: int) -> None:
    assert cell_len(fit(clean(text), width, right=right, tail=tail)) == width


def test_a_long_name_keeps_its_end() -> None:
    assert fit("suggestion-12", 11, tail=3) == "suggest…-12"
    assert fit("suggestion-12", 11) == "suggestion…"


def test_names_cannot_drive_the_terminal() -> None:
    assert clean("a\x1b[2Jb\nc\x9bd") == "a�[2Jb c�d"
