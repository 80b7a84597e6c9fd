"""docs/protocol.md against the code: its tables name every operation, argument, field, code and limit.

And no other. The page is the contract for clients in other languages, so types, ranges and defaults are
compared as well, and its example is run.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import types
import typing
from dataclasses import MISSING, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any

import pytest
from tests.client.peer import Peer

from stateroom.client import limits
from stateroom.client.limits import Pattern, Range, Size
from stateroom.client.protocol import (
    ERROR_CODES,
    KV,
    OPERATIONS,
    Caps,
    ErrorBody,
    ErrorCode,
    Event,
    Grammar,
    InfoResult,
    KindCaps,
    Message,
    ModelInfo,
    Progress,
    Receipt,
    RequestInfo,
    Sampling,
    ServerLimits,
    SessionInfo,
    SnapshotInfo,
    Span,
    Speculate,
    Text,
    TokenEvent,
    TokenId,
    TokenLogprob,
    TrunkInfo,
    Usage,
)
from stateroom.client.wire import field_types, wire_names
from stateroom.daemon.families import GAUGES
from stateroom.daemon.metrics import REASONS, Metrics

PAGE = Path(__file__).parents[2] / "docs" / "protocol.md"

# Parts of requests and of replies, by the heading of their table.
ASKED = {"message": Message, "kv": KV, "sampling": Sampling, "speculate": Speculate, "grammar": Grammar}
TOLD = {
    "receipt": Receipt,
    "usage": Usage,
    "logprob": TokenLogprob,
    "caps": Caps,
    "kind": KindCaps,
    "model": ModelInfo,
    "limits": ServerLimits,
    "session": SessionInfo,
    "request": RequestInfo,
    "span": Span,
    "trunk": TrunkInfo,
    "snapshot": SnapshotInfo,
}
REPLIES = {"token": TokenEvent, "progress": Progress, "event": Event, "error": ErrorBody}
NAMES: dict[Any, str] = {part: name for name, part in (ASKED | TOLD).items()}
WORDS = {TokenId: "token id", Text: "text", ErrorCode: "[code](#errors)"}
NO_LIMITS = {
    "PROTOCOL_VERSION",
    "UINT64_MAX",
    "INT64_MAX",
    "INT64_MIN",
}  # of integers, not of the protocol's things


# ---------------------------------------------------------------- what the page says


@dataclass(frozen=True)
class Table:
    head: list[str]
    rows: dict[str, list[str]]  # by the name in the first cell, which is unquoted


def tables_of(text: str) -> dict[str, list[Table]]:
    """The tables below each heading."""
    found: dict[str, list[Table]] = {}
    heading, lines = "", re.sub(r"```.*?```", "", text, flags=re.DOTALL).splitlines()
    for at, line in enumerate(lines):
        if match := re.match(r"#+ (.+)", line):
            heading = match[1]
            found[heading] = []
        elif re.match(r"\|[-| ]+\|$", line):
            rows: dict[str, list[str]] = {}
            for row in lines[at + 1 :]:
                if not row.startswith("|"):
                    break
                name, *rest = cells(row)
                assert re.fullmatch(r"`[^`]+`", name), f"{name} below {heading} should be `quoted`"
                assert name not in rows, f"{name} stands twice below {heading}"
                rows[name.strip("`")] = rest
            found[heading].append(Table(cells(lines[at - 1]), rows))
    return found


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


@pytest.fixture(scope="module")
def protocol_tables() -> dict[str, list[Table]]:
    return tables_of(PAGE.read_text())


# ---------------------------------------------------------------- what the code says


def described(annotation: Any) -> str:
    """An annotation in the page's words."""
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if annotation in WORDS:
        return WORDS[annotation]
    if origin is Annotated:
        return _within(args[0], args[1])
    if origin in (typing.Union, types.UnionType):
        return " or ".join(described(arg) for arg in args if arg is not type(None))
    if origin is typing.Literal:
        return " or ".join(f'`"{arg}"`' if isinstance(arg, str) else str(arg) for arg in args)
    if origin is list:
        item = described(args[0])
        return f"list of ({item})" if ", " in item else f"list of {item}"
    if origin is tuple:
        return f"pair of {described(args[0])} and {described(args[1])}"
    if is_dataclass(annotation):
        return f"[{NAMES[annotation]}](#{NAMES[annotation]})"
    return {int: "int", float: "float", str: "str", bool: "bool", bytes: "bin"}.get(annotation, "map")


def _within(kind: Any, mark: object) -> str:
    if isinstance(mark, Pattern):
        return f"str of the form `{mark.regex}`"
    if isinstance(mark, Range):
        if mark.above is not None:
            return f"{described(kind)}, above {_number(mark.above)} to {_number(mark.most)}"
        return f"{described(kind)}, {_number(mark.least)} to {_number(mark.most)}"
    assert isinstance(mark, Size)
    what = {str: "characters", bytes: "bytes"}.get(kind, "of them")
    return f"{described(kind)}, {mark.least:,} to {mark.most:,} {what}"


def _number(value: float | None) -> str:
    assert value is not None
    return f"{int(value):,}" if value == int(value) else f"{value:g}"


def arguments(message: type[Any]) -> dict[str, list[str]]:
    """Wire name → [type, default]."""
    annotations, names = field_types(message), wire_names(message)
    kinds = {f.name: described(annotations[f.name]) for f in fields(message)}
    if message is Sampling:
        kinds["top_k"] = _within(int, typing.get_args(TokenId)[1])  # of the same range, and no token id
    return {names[f.name]: [kinds[f.name], _default(f.default)] for f in fields(message)}


def _default(value: Any) -> str:
    if value is MISSING:
        return "required"
    return "–" if value is None else f"`{_literal(value)}`"


def _literal(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f'"{value}"' if isinstance(value, str) else f"{value:g}"


def told(message: type[Any]) -> dict[str, list[str]]:
    """Wire name → [type, whether it is always there]. What is None is left out of a reply."""
    annotations, names = field_types(message), wire_names(message)
    absent = "may be null" if message is ErrorBody else "may be absent"
    there = {f.name: absent if f.default is None else "always" for f in fields(message)}
    return {names[f.name]: [described(annotations[f.name]), there[f.name]] for f in fields(message)}


def checked(table: Table, expected: dict[str, list[str]]) -> None:
    assert list(table.rows) == list(expected)
    for name, (kind, default) in expected.items():
        assert table.rows[name][:2] == [kind, default], name
        assert table.rows[name][2] or table.head[3:] == [], f"{name} lacks its meaning"


# ---------------------------------------------------------------- the two agree


def test_every_operation_has_its_section_and_no_other(protocol_tables: dict[str, list[Table]]) -> None:
    quoted = [heading.strip("`") for heading in protocol_tables if heading.startswith("`")]
    assert quoted == list(OPERATIONS)


@pytest.mark.parametrize("op", OPERATIONS)
def test_arguments_and_results(protocol_tables: dict[str, list[Table]], op: str) -> None:
    tables = protocol_tables[f"`{op}`"]
    wanted = arguments(OPERATIONS[op].request)
    asked = [table for table in tables if table.head[0] == "argument"]
    assert len(asked) == (1 if wanted else 0)
    if wanted:
        checked(asked[0], wanted)
    results = [table for table in tables if table.head[0] == "result"]
    if OPERATIONS[op].result is InfoResult:
        assert results == []  # it is a `session`, which has its own table
    else:
        (result,) = results
        checked(result, told(OPERATIONS[op].result))
    assert len(tables) == len(asked) + len(results)


@pytest.mark.parametrize("part", ASKED)
def test_parts_of_requests(protocol_tables: dict[str, list[Table]], part: str) -> None:
    (table,) = protocol_tables[part]
    checked(table, arguments(ASKED[part]))


@pytest.mark.parametrize("part", TOLD | REPLIES)
def test_parts_of_replies(protocol_tables: dict[str, list[Table]], part: str) -> None:
    (table,) = protocol_tables[part]
    checked(table, told((TOLD | REPLIES)[part]))


def test_every_error_code(protocol_tables: dict[str, list[Table]]) -> None:
    (table,) = protocol_tables["Errors"]
    assert list(table.rows) == list(ERROR_CODES)
    assert all(all(row) for row in table.rows.values())


def test_every_limit_and_its_value(protocol_tables: dict[str, list[Table]]) -> None:
    (table,) = protocol_tables["All limits"]
    known = {
        name.lower(): _number(value)
        for name, value in vars(limits).items()
        if name.isupper() and isinstance(value, int | float) and name not in NO_LIMITS
    }
    assert {name: row[0] for name, row in table.rows.items()} == known


def test_every_counter_is_named() -> None:
    stats = PAGE.read_text().partition("## `stats`")[2].partition("\n## ")[0]
    split = [name.partition(".") for name in Metrics().counters()]
    names = {f"`{kind}.<" if rest else f"`{kind}`" for kind, _, rest in split}
    assert {name for name in names if name not in stats} == set()
    assert {name for name in GAUGES if f"`{name}`" not in stats} == set()
    assert {reason for reason in REASONS if f"`{reason}`" not in stats} == set()


def test_every_link_within_the_page_leads_somewhere(protocol_tables: dict[str, list[Table]]) -> None:
    anchors = {re.sub(r"[^a-z0-9 _-]", "", heading.lower()).replace(" ", "-") for heading in protocol_tables}
    assert set(re.findall(r"\]\(#([^)]+)\)", PAGE.read_text())) <= anchors


def test_the_example_runs(tmp_path: Path) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    peer = Peer(f"ipc://{tmp_path}/s")
    try:
        environment = os.environ | {"STATEROOM_ENDPOINT": peer.endpoint}
        said = subprocess.check_output(
            [sys.executable, "-c", example], env=environment, text=True, timeout=20
        )
    finally:
        peer.stop()
    assert said == "fghijklmnopqrstuvwxy"


def test_a_wrong_page_would_be_noticed() -> None:
    """The reading of tables itself: a row more, a row less and another type all show."""
    good = Table(["argument", "type", "default", "meaning"], {"session": ["str", "required", "Which."]})
    expected = {"session": ["str", "required"]}
    checked(good, expected)
    for rows in ({}, {"session": ["int", "required", "Which."]}, good.rows | {"new": ["str", "–", "What."]}):
        with pytest.raises(AssertionError):
            checked(Table(good.head, rows), expected)
