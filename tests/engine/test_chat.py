"""Conversations by messages: each turn appends its difference, whatever happened in between."""

from __future__ import annotations

import pytest
from tests.engine.harness import Bench
from tests.tiny import make_tiny_model

from stateroom.client import protocol as p
from stateroom.daemon.scheduler.pace import Pace


def said(role: str, content: str) -> p.Message:
    return p.Message(role=role, content=content)


@pytest.fixture
def bench() -> Bench:
    return Bench(make_tiny_model("llama"))


def ask(bench: Bench, session: str, content: str) -> p.Body:
    return bench.call(p.Prefill(session=session, messages=[said("user", content)]))


def talk(bench: Bench) -> tuple[str, str, int]:
    """Two turns; gives the session, the first answer, and the length after it."""
    body = bench.call(p.Open(messages=[said("user", "one")]))
    assert isinstance(body, p.OpenResult)
    answer = bench.decode(body.session, 8, stream=False)
    return body.session, answer.text, answer.length


def test_a_turn_appends_its_difference(bench: Bench) -> None:
    session, answer, length = talk(bench)
    body = ask(bench, session, "two")
    assert isinstance(body, p.LengthResult), body
    assert body.receipt.reused == length
    text = bench.loaded.tokenizer.decode(bench.session(session).tokens)
    whole = [said("user", "one"), said("assistant", answer), said("user", "two")]
    wanted = bench.loaded.tokenizer.decode(bench.loaded.tokenizer.render(whole))
    assert text == wanted
    bench.check_law(session)


def test_undo_and_ask_again(bench: Bench) -> None:
    session, _, length = talk(bench)
    ask(bench, session, "two")
    bench.decode(session, 5)
    bench.call(p.Trim(session=session, to=length))
    body = ask(bench, session, "other")
    assert isinstance(body, p.LengthResult), body
    assert body.receipt.reused == length
    assert "two" not in bench.loaded.tokenizer.decode(bench.session(session).tokens)


@pytest.mark.parametrize("how", ["trim", "cancel"])
def test_half_a_message_is_nobodys_answer(bench: Bench, how: str) -> None:
    """What a cut or a cancel left of the user's words is not taken for what the assistant said."""
    session, _, length = talk(bench)
    if how == "trim":
        ask(bench, session, "two")
        bench.call(p.Trim(session=session, count=3))
    else:
        bench.engine.schedule.pace = Pace(idle_ms=0.01)
        rid = bench.start(p.Prefill(session=session, messages=[said("user", "two " * 80)]))
        while bench.session(session).stored < length + 20:
            bench.engine.step()
        bench.cancel(rid)
        body = bench.finish(rid)
        assert isinstance(body, p.LengthResult)
        assert (body.finish, body.length > length) == ("cancelled", True)
    refused = ask(bench, session, "three")
    assert isinstance(refused, p.ErrorBody), bench.loaded.tokenizer.decode(bench.session(session).tokens)
    assert refused.code == "unsupported"
    assert bench.chat[session] == bench.session(session).chat
    bench.call(p.Trim(session=session, to=length))
    assert isinstance(ask(bench, session, "three"), p.LengthResult)


def test_children_go_on_with_the_conversation(bench: Bench) -> None:
    session, _, length = talk(bench)
    forked = bench.call(p.Fork(session=session, n=2))
    assert isinstance(forked, p.ForkResult)
    for child, content in zip(forked.sessions, ("left", "right"), strict=True):
        body = ask(bench, child, content)
        assert isinstance(body, p.LengthResult), body
        assert body.receipt.reused == length
        assert body.receipt.source == "fork"


def test_another_worker_knows_the_conversation(bench: Bench) -> None:
    """What the journal told is enough to go on: tokens and turns."""
    session, _, length = talk(bench)
    other = Bench(bench.loaded)
    other.adopt("back", bench.journal[session], chat=bench.chat[session])
    body = other.call(p.Prefill(session="back", messages=[said("user", "two")]))
    assert isinstance(body, p.LengthResult), body
    here = ask(bench, session, "two")
    assert isinstance(here, p.LengthResult)
    assert body.length == here.length > length
    assert other.session("back").tokens == bench.session(session).tokens
    assert other.chat["back"] == bench.chat[session]


def test_what_is_no_beginning_of_the_conversation_is_refused(bench: Bench) -> None:
    session = bench.open([1, 2, 3])
    body = ask(bench, session, "one")
    assert isinstance(body, p.ErrorBody)
    assert (body.code, body.field) == ("unsupported", "messages")
    assert bench.session(session).tokens == [1, 2, 3]
    synced = bench.call(p.Sync(session=session, messages=[said("user", "one")]))
    assert isinstance(synced, p.LengthResult)
    bench.decode(session, 3)
    assert isinstance(ask(bench, session, "two"), p.LengthResult)
