"""The screen as text: always as wide and high as it should be, and it says what it should."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.color import ColorType
from tests.top.scripted import MIB, model, session, snapshot, stats

from stateroom.client.protocol import WAITING, KindCaps, RequestInfo
from stateroom.daemon.top.board import ORDERS, Board, Row, arranged, board
from stateroom.daemon.top.columns import COLUMNS, MARK, columns
from stateroom.daemon.top.frame import KEYS, Status, frame, page, reading, whole
from stateroom.daemon.top.rates import Rates
from stateroom.daemon.top.snapshot import Snapshot
from stateroom.daemon.top.text import shown
from stateroom.daemon.top.view import Act, Mode, View, settled
from stateroom.daemon.top.words import WAITS

NARROW = 80, 24
TABLE, WELL = View(), Status()


def made(snapshot: Snapshot) -> Board:
    return board(snapshot, Rates())


def screen(of: Board, view: View = TABLE, status: Status = WELL, size: tuple[int, int] = NARROW) -> list[str]:
    rows = arranged(of.rows, view.sort, view.reverse, view.filter)
    text = reading(of, view, size[0]) or ()
    view = settled(view, [row.id for row in rows], page(of, size[1]), len(text))
    return [shown(line) for line in frame(of, rows, view, status, *size)]


SESSIONS = (
    session("buffer", length=4_096, shared_bytes=2 * MIB, running="decode", state="running"),
    session(
        "chat-1", owner="agents", session_class="background", tier="disk", disk_bytes=5 * MIB, idle_s=192.0
    ),
    session("chat-2", owner="agents", running="prefill", waiting="memory", state="running", idle_s=0.0),
)
REQUESTS = [
    RequestInfo(
        rid=7, op="decode", client="editor 1.2", session=SESSIONS[0].session, model="tiny",
        done=50, total=200, tokens_per_s=42.5, age_s=3.0,
    ),
    RequestInfo(
        rid=8, op="prefill", session=SESSIONS[2].session, waiting="memory", state="queued", model="tiny",
    ),
    RequestInfo(rid=5, op="open", session=SESSIONS[0].session, state="done", code="ok", ms=81.0, age_s=60.0),
]  # fmt: skip
BOARD = made(snapshot(*SESSIONS, requests=REQUESTS))


def test_a_screen_of_80_by_24() -> None:
    assert screen(BOARD) == [
        "stateroom 0.1.0  up 3h  ipc:///run/stateroom.sock",
        "ENGINE STATE      ROWS  DECODE/S  PREFILL/S  STEP MS  QUEUE",
        "tiny   ready         2         0          0     11.9      1",
        "KV budget [#####=====..........] 10M held, 20M granted of 40M  memory enough",
        "KV ladder device 2 (10M)  disk 1 (5.0M)  tokens only 0 (0 tokens)",
        "3 sessions  5 clients  requests 2 open, 1 queued                        every 1s",
        " SESSION     OWNER     C    LEN  PRIV  SHRD KV ON   TOK/S STATE↓            IDLE",
        ">buffer      editor    i   4096  3.0M  2.0M device   42.5 decode 25%         12s",
        " chat-2      agents    i   1000  3.0M     0 device        waits for memory",
        " chat-1      agents    b   1000  3.0M     0 disk          idle                3m",
        *[""] * 13,
        KEYS,
    ]


def test_a_wide_screen_says_more() -> None:
    wide = screen(BOARD, size=(160, 24))
    headings = "SESSION OWNER C LEN PRIV SHRD KV ON TOK/S STATE↓ IDLE WAITS FOR MODEL DISK AGE ID"
    assert wide[6].split() == headings.split()
    assert "room for its KV in memory" in wide[8]
    assert wide[9].split()[-3:] == ["5.0M", "0s", "chat-1-0"]


def test_the_order_is_marked_in_the_headings() -> None:
    for sort in ORDERS:
        for reverse, arrow in ((False, "↓"), (True, "↑")):
            headings = screen(BOARD, View(sort=sort, reverse=reverse))[6]
            assert headings.count(arrow) == 1
    assert "LEN↑" in screen(BOARD, View(sort="length", reverse=True))[6]


def test_details_have_requests_by_the_numbers_that_trace_takes() -> None:
    lines = screen(BOARD, View(mode=Mode.DETAILS, selected=SESSIONS[0].session))
    assert lines[6] == f"buffer of editor, session {SESSIONS[0].session}"
    at = lines.index("Where a request's time went: stateroom trace REQUEST")
    assert lines[at - 2].split() == ["7", "decode", "running", "50/200", "42.5", "3s", "editor", "1.2"]
    assert lines[at - 1].split() == ["5", "open", "ok", "1m", "81", "ms"]
    waits = screen(BOARD, View(mode=Mode.DETAILS, selected=SESSIONS[2].session))
    assert waits[7] == "state prefill, waits for room for its KV in memory"


def test_details_of_a_session_that_is_gone_say_so() -> None:
    assert "This session is gone." in screen(BOARD, View(mode=Mode.DETAILS, selected="other"))


def test_details_tell_all_that_is_known() -> None:
    told = session(
        "fork", parents=["abcdefghijkl"], trunk="trunkful-of-it", published=["base"], ttl_s=60.0,
        expires_in_s=59.0, quarantined="its logits were not numbers", checkpoints=[3, 5], trim_floor=2,
        live_bytes=MIB, capacity_bytes=3 * MIB, kinds=[KindCaps(kind="full", scheme="affine8", layers=2)],
    )  # fmt: skip
    text = "\n".join(screen(made(snapshot(told)), View(mode=Mode.DETAILS, selected=told.session)))
    for part in ("abcdefgh", "trunkful", "base", "59s", "not numbers", "checkpoints 2", "trims from 2",
                 "1.0M of 3.0M", "KV affine8"):  # fmt: skip
        assert part in text


def test_help_names_every_key_and_reason_on_two_screens_at_most() -> None:
    of = "\n".join(screen(BOARD, View(mode=Mode.HELP), size=(80, 60)))
    for key in ("s  S", "r ", "/ ", "k ", "p ", "x ", "space", "enter", "?", "q "):
        assert key in of
    for short, long in WAITS.values():
        assert short in of
        assert long in of
    for column in COLUMNS:
        if column.rank <= 8:
            assert f"{column.head} " in of.partition("Keys and columns")[2], column.head
    assert "…" not in of
    first, rest = (screen(BOARD, View(mode=Mode.HELP, scroll=scroll)) for scroll in (0, 17))
    assert "\n".join(first[6:-1] + rest[6:-1]).count("gave way") == 1  # on the second


def test_the_foot_asks_and_tells() -> None:
    def foot(view: View, status: Status = WELL) -> str:
        return screen(BOARD, view, status)[-1]

    ask = View(mode=Mode.ASK, asking=Act.CANCEL, selected=SESSIONS[0].session)
    assert foot(ask) == "Cancel what runs in buffer of editor? y or n"
    assert foot(View(mode=Mode.FILTER, filter="age")) == "Filter: age_  enter keeps it, esc drops it"
    assert foot(View(filter="agents")).startswith("2 of 3 have: agents")
    assert foot(View(note="Done.")) == "Done."
    lost = Status("No daemon answers.", 12.0)
    assert foot(View(note="Done."), lost) == "No news for 12s, trying again. No daemon answers."


def test_a_question_is_whole_however_long_the_names() -> None:
    of = made(snapshot(session("n" * 64, owner="o\n漢" * 42)))
    view = View(mode=Mode.ASK, asking=Act.CLOSE, selected=of.rows[0].id)
    asked = screen(of, view)[-1]
    assert asked.startswith("Close for good nnnnnn")
    assert asked.endswith("…o 漢? y or n")
    assert cell_len(asked) <= 80


def test_an_empty_table_says_why() -> None:
    assert " No sessions." in screen(made(snapshot()))
    assert " No session has all these words." in screen(BOARD, View(filter="nobody"))


def test_a_slower_pace_and_a_pause_are_said() -> None:
    slow = made(snapshot(every_s=1.0, sessions_every_s=14.4))
    assert screen(slow)[5].endswith("every 1s, sessions 14s")
    assert screen(BOARD, View(paused=True))[5].endswith("PAUSED")


def test_engines_that_are_not_well_say_why_and_many_are_counted() -> None:
    failed = model("big", "failed") | {"failure": "There is no such file."}
    few = screen(made(snapshot(stats=stats(model(), failed))))
    assert few[3].split(maxsplit=2) == ["big", "failed", "There is no such file."]
    many = made(snapshot(*SESSIONS, stats=stats(*(model(f"model-{number}") for number in range(9)))))
    lines = screen(many)
    assert lines[5] == "and 6 more: see `stateroom stats`"
    assert lines[10].startswith(">")
    none = screen(made(snapshot(stats=replace(stats(), models=[]))))
    assert none[1].startswith("no model is loaded")


def test_short_memory_is_said_in_a_word() -> None:
    for level, word in enumerate(("enough", "short", "critical")):
        assert f"memory {word}" in screen(made(snapshot(stats=stats(memory_pressure=level))))[3]


def test_a_pipe_gets_all_sessions() -> None:
    many = made(snapshot(*(session(f"s{number}") for number in range(200))))
    lines = [shown(line) for line in whole(many, many.rows, 140)]
    assert len(lines) == 7 + 200
    assert not any(line.startswith(">") for line in lines)


def test_columns_fit_and_stay_in_order() -> None:
    all_heads = [column.head for column in COLUMNS]
    before = 0
    for width in range(1, 200):
        chosen = columns(width)
        assert MARK + sum(column.width for column in chosen) + max(len(chosen) - 1, 0) <= width
        heads = [column.head for column in chosen]
        assert heads == [head for head in all_heads if head in heads]
        assert len(chosen) >= before  # a wider screen shows no less
        before = len(chosen)
    assert len(columns(80)) == 10


text = st.text(max_size=40)
sessions = st.lists(
    st.builds(
        lambda name, owner, running, waiting, **more: session("x", **more, name=name or None, owner=owner,
            running=running, waiting=waiting),
        name=text, owner=text, running=st.sampled_from([None, "unpublish", "decode"]),
        waiting=st.sampled_from([None, *WAITING]), session=st.uuids().map(str), length=st.integers(0, 10**9),
        private_bytes=st.integers(0, 2**50), tier=st.sampled_from(["resident", "disk", "tokens", "cloud"]),
        idle_s=st.floats(0, 1e9), quarantined=st.one_of(st.none(), text), model=text,
    ),
    max_size=30,
)  # fmt: skip


@given(
    sessions, st.sampled_from(list(Mode)), st.sampled_from(ORDERS), st.booleans(), text, text,
    st.integers(0, 40), st.tuples(st.integers(1, 180), st.integers(2, 60)), st.integers(0, 6),
)  # fmt: skip
def test_every_screen_is_as_wide_and_high_as_it_should_be(
    found: list[object], mode: Mode, sort: str, reverse: bool, words: str, note: str, scroll: int,
    size: tuple[int, int], engines: int,
) -> None:  # fmt: skip
    of = made(snapshot(*found, stats=stats(*(model(f"m{number}" * 3) for number in range(engines)))))  # type: ignore[arg-type]
    view = View(sort=sort, reverse=reverse, mode=mode, note=note, scroll=scroll, filter=words)
    view = replace(view, asking=Act.CLOSE if mode is Mode.ASK else None)
    rows: list[Row] = arranged(of.rows, sort, reverse, words)
    view = settled(view, [row.id for row in rows], page(of, size[1]))
    lines = frame(of, rows, view, Status(note or None, 3.0), *size)
    assert [sum(cell_len(segment.text) for segment in line) for line in lines] == [size[0]] * size[1]
    for line in lines:
        for segment in line:
            assert "\x1b" not in segment.text
            assert segment.style is not None
            colour = segment.style.color
            assert colour is None or colour.type is ColorType.STANDARD  # the terminal's own
