"""Rooms of threads whose daemon comes and goes, and what threads and processes do to each other."""

from __future__ import annotations

import gc
import os
import threading
import time

import pytest
from tests.client.peer import PATIENCE_S, Peer, end_as_cancelled, endless, wait_until
from tests.measured import best

from stateroom.client import Room, blocking, connect
from stateroom.client.errors import (
    Capacity,
    ClientError,
    Disconnected,
    NoDaemon,
    ShuttingDown,
    WrongProcess,
)
from stateroom.client.limits import REQUESTS_PER_CLIENT_MAX
from stateroom.client.protocol import Prefill, Stats, Watch

# ---------------------------------------------------------------- the daemon comes and goes


def test_a_lost_daemon_fails_open_requests_at_once_and_the_room_connects_anew(
    client_room: Room, client_peer: Peer
) -> None:
    client_peer.on["decode"] = endless
    stream = client_room.open(text="a").decode(9)
    next(stream)
    started = time.monotonic()
    client_peer.stop()
    with pytest.raises(Disconnected, match="went away"):
        stream.wait()
    assert time.monotonic() - started < 5.0  # not the stream's own patience, which is minutes
    assert stream.text == "abc"
    old_ids = {call.id for call in client_peer.calls}
    client_peer.calls.clear()
    client_peer.start()
    assert client_room.stats().counters == {"requests": 2}
    assert [call.op for call in client_peer.calls] == ["hello", "stats"]
    assert client_peer.calls[0].args["app"] == "tests"
    assert not old_ids & {call.id for call in client_peer.calls}


def test_what_the_daemon_said_before_it_left_still_counts(client_room: Room, client_peer: Peer) -> None:
    client_peer.on["decode"] = lambda call: None
    stream = client_room.open(text="a").decode(9)
    call = client_peer.wait_for("decode")
    call.token(98)
    call.error("shutting_down", "The daemon stops.")
    client_peer.stop()
    with pytest.raises(ShuttingDown, match="The daemon stops"):
        stream.wait()
    assert stream.text == "b"


def test_requests_of_a_room_whose_daemon_stays_away_fail_in_time(client_peer: Peer) -> None:
    with connect(client_peer.endpoint, timeout_s=0.3) as room:
        session = room.open(text="a")
        client_peer.stop()
        failures: list[BaseException] = []

        def ask() -> None:
            try:
                room.stats()
            except ClientError as error:
                failures.append(error)

        def take(count: int) -> float:
            started = time.monotonic()
            threads = [threading.Thread(target=ask) for _ in range(count)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            return time.monotonic() - started

        alone_s = take(1) + take(1)  # the first may only find out that it has gone
        assert best(lambda: take(6), 3 * alone_s) < 3 * alone_s  # one after the other they'd take six times
        assert {type(failure) for failure in failures} <= {NoDaemon, Disconnected}
        client_peer.start()
        with pytest.raises(Disconnected), session:  # whose end does not ask a daemon that wasn't there
            raise Disconnected("Gone.")
        room.stats()
        assert client_peer.asked("close") == []


def test_a_daemon_that_does_not_read_is_given_up(client_peer: Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocking, "FRAMES_MAX", 1)
    with connect(client_peer.endpoint) as room:
        release = threading.Event()
        client_peer.on["stats"] = lambda call: release.wait(PATIENCE_S) and None
        stuck = room.start(Stats())
        client_peer.wait_for("stats")
        large = Prefill(session="s", text="x" * 2_000_000)
        inboxes = [room.start(large) for _ in range(40)]
        try:
            with pytest.raises(Disconnected, match="unread"):
                inboxes[-1].take()
            with pytest.raises(Disconnected):
                stuck.take()
        finally:
            release.set()


# ---------------------------------------------------------------- threads and processes


def test_many_threads_share_a_room(client_room: Room) -> None:
    wrong: list[object] = []

    def work(letter: str) -> None:
        try:
            with client_room.open(text=letter) as session:
                for n in range(1, 25):
                    stream = session.decode(3)
                    texts = [token.text for token in stream]
                    if "".join(texts) != stream.result.text or session.length != 1 + 3 * n:
                        wrong.append((letter, texts, session))
                    if session.tokens(0, 1).text != letter:
                        wrong.append((letter, session))
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(letter,)) for letter in "abcdefgh"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert wrong == []


def test_no_more_requests_than_the_limit(client_room: Room) -> None:
    inboxes = [client_room.start(Watch()) for _ in range(REQUESTS_PER_CLIENT_MAX)]
    with pytest.raises(Capacity):
        client_room.stats()
    inboxes[0].cancel()
    assert len(inboxes) == REQUESTS_PER_CLIENT_MAX


def test_closing_a_room_ends_what_other_threads_wait_for(client_room: Room, endless_peer: Peer) -> None:
    stream = client_room.open(text="a").decode(9)
    errors: list[BaseException] = []

    def read() -> None:
        try:
            stream.wait()
        except ClientError as error:
            errors.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    wait_until(lambda: stream.text == "abc")
    client_room.close()
    reader.join(PATIENCE_S)
    assert [type(error) for error in errors] == [Disconnected]
    client_room.close()
    assert client_room.closed
    with pytest.raises(Disconnected, match="closed"):
        client_room.stats()
    stream.close()
    stream.cancel()


def test_a_room_that_is_dropped_ends_its_thread(client_peer: Peer) -> None:
    def threads() -> int:
        return sum(thread.name == "stateroom-client" for thread in threading.enumerate())

    before = threads()
    room = connect(client_peer.endpoint)
    assert threads() == before + 1
    del room
    gc.collect()
    wait_until(lambda: threads() == before)


def test_two_readers_of_one_ending_both_get_it(client_room: Room, endless_peer: Peer) -> None:
    """A stream that one thread left, and two others wait for at once."""
    session = client_room.open(text="a")
    endless_peer.on["cancelled"] = lambda call: None
    stream = session.decode(9)
    next(stream)
    stream.cancel()
    lengths: list[int] = []
    threads = [threading.Thread(target=lambda: lengths.append(session.trim(to=0).length)) for _ in range(2)]
    for thread in threads:
        thread.start()
    time.sleep(0.1)
    end_as_cancelled(endless_peer.asked("decode")[0])
    for thread in threads:
        thread.join(PATIENCE_S)
    assert lengths == [0, 0]


def test_a_forked_child_gets_an_error_instead_of_the_parents_socket(client_room: Room) -> None:
    """B57: a ZeroMQ context doesn't survive a fork."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            client_room.stats()
            os.write(writer, b"no error")
        except WrongProcess as error:
            os.write(writer, str(error).encode())
        except BaseException as error:
            os.write(writer, repr(error).encode())
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    said = os.read(reader, 4096).decode()
    os.close(reader)
    os.close(writer)
    assert "opened before a fork" in said
    assert client_room.stats()
