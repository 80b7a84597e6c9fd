"""Keys as files: what is a key, who is on the list; nothing half-written, replaced or readable by others."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st
from zmq.utils import z85

from stateroom.client.errors import BadKey
from stateroom.client.keyfile import key_for, read
from stateroom.daemon.commands import app as cli
from stateroom.daemon.curve import make_pair
from stateroom.daemon.exits import CONFIG, Leave
from stateroom.daemon.keys import Allowed, Guest, Keys, is_key, read_key_file, zap_answer, zap_key


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    return Keys(tmp_path / "keys")


def run(*arguments: str) -> None:
    cli(list(arguments), standalone_mode=False)


@given(st.binary(min_size=32, max_size=32))
def test_what_zeromq_writes_as_a_key_is_one(raw: bytes) -> None:
    assert is_key(z85.encode(raw).decode())


@pytest.mark.parametrize("text", ["", "x" * 39, "x" * 41, '"' * 40, "#" * 40, "é" * 40, None, 7])
def test_what_zeromq_would_not_take_is_no_key(text: object) -> None:
    assert not is_key(text)


def test_the_daemons_key_is_made_once_and_private(keys: Keys) -> None:
    assert keys.server() is None
    pair = make_pair()
    keys.keep_server(pair)
    assert keys.server() == pair
    assert stat.S_IMODE(keys.folder.stat().st_mode) == 0o700
    assert stat.S_IMODE((keys.folder / "server.json").stat().st_mode) == 0o600
    with pytest.raises(Leave, match="There is a key already"):
        keys.keep_server(make_pair())
    assert keys.server() == pair
    (keys.folder / "server.json").chmod(0o640)
    with pytest.raises(Leave, match="chmod 600"):
        keys.server()


def test_the_list_is_followed_as_it_changes(keys: Keys) -> None:
    """Added, revoked, revoked and added with another key: the list in memory is that on disk."""
    allowed, (first, second) = Allowed(keys), (make_pair().public, make_pair().public)
    allowed.refresh()
    assert allowed.guest(first) is None
    keys.allow("laptop", first)
    allowed.refresh()
    guest = allowed.guest(first)
    assert guest == Guest("laptop", first)
    keys.allow("phone", second)
    allowed.refresh()
    assert allowed.guest(first) is guest
    keys.revoke("laptop")
    keys.revoke("phone")
    keys.allow("laptop", second)
    allowed.refresh()
    assert allowed.guest(first) is None
    assert not allowed.knows(Guest("laptop", first))
    assert allowed.guest(second) == Guest("laptop", second)
    assert keys.clients() == {"laptop": second}


@pytest.mark.parametrize("name", ["", ".", "..", ".hidden", "a/b", "../x", "x" * 65, "a b", "é", "a\n"])
def test_names_are_never_paths(keys: Keys, name: str) -> None:
    for act in (lambda: keys.allow(name, make_pair().public), lambda: keys.revoke(name)):
        with pytest.raises(Leave) as refused:
            act()
        assert refused.value.code == CONFIG
    assert not keys.folder.exists()


def test_what_is_taken_is_refused_and_nothing_changes(keys: Keys) -> None:
    public = make_pair().public
    keys.allow("laptop", public)
    with pytest.raises(Leave, match="There is a client laptop"):
        keys.allow("laptop", make_pair().public)
    with pytest.raises(Leave, match="allowed already, as laptop"):
        keys.allow("other", public)
    with pytest.raises(Leave, match="40 characters"):
        keys.allow("other", "no key")
    with pytest.raises(Leave, match="no client other"):
        keys.revoke("other")
    assert keys.clients() == {"laptop": public}


def test_a_broken_file_lets_nobody_in(keys: Keys) -> None:
    keys.allow("laptop", make_pair().public)
    folder = keys.folder / "allowed"
    (folder / "laptop").write_text("half of a ke")
    (folder / "binary").write_bytes(os.urandom(100))
    (folder / ".new-left").write_text(make_pair().public)
    (folder / "folder").mkdir()
    assert keys.clients() == {}
    allowed = Allowed(keys)
    allowed.refresh()
    assert not allowed.knows(Guest("laptop", "half of a ke"))


def test_one_that_can_not_be_read_keeps_nobody_in_or_out(keys: Keys, monkeypatch: pytest.MonkeyPatch) -> None:
    """It went while the list was read, or its disk failed: the others count, and it is read again."""
    pairs = [make_pair().public for _ in range(3)]
    for name, public in zip(("a", "b", "c"), pairs, strict=True):
        keys.allow(name, public)
    allowed = Allowed(keys)
    allowed.refresh()
    real, broken = Path.open, True

    def opened(path: Path, *given: object, **options: object) -> object:
        if broken and path.name == "a":
            raise PermissionError(13, "no")
        return real(path, *given, **options)  # type: ignore[call-overload]

    monkeypatch.setattr(Path, "open", opened)
    keys.revoke("b")
    allowed.refresh()
    assert [allowed.guest(each) is not None for each in pairs] == [False, False, True]
    broken = False
    allowed.refresh()
    assert [allowed.guest(each) is not None for each in pairs] == [True, False, True]


def test_zap_frames() -> None:
    """Only a CURVE question with a whole key is one; every question has its answer."""
    question = [b"route", b"", b"1.0", b"7", b"domain", b"1.2.3.4", b"", b"CURVE", b"k" * 32]
    assert zap_key(question) == b"k" * 32
    assert zap_answer(question, "user") == [b"route", b"", b"1.0", b"7", b"200", b"OK", b"user", b""]
    assert zap_answer(question, None)[4] == b"400"
    for wrong in (
        [*question[:-1], b"k" * 31],
        [*question[:7], b"PLAIN", b"user", b"word"],
        [*question[:7], b"NULL"],
        [*question, b"more"],
        question[:2],
        [b"route"],
        [b"route", b"", b"2.0", *question[3:]],
    ):
        assert zap_key(wrong) is None
        assert b"400" in zap_answer(wrong, None)


def test_the_commands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A client's file from end to end, made here, or on a machine of its own whose secret stays there."""
    monkeypatch.setenv("STATEROOM_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(Leave, match="keys init"):
        run("keys", "client", "laptop")
    run("keys", "init")
    server = capsys.readouterr().out.strip()
    assert is_key(server)
    run("keys", "client", "laptop")
    key = read(tmp_path / "laptop.key")
    assert key.server == server
    assert key.secret not in repr(key)
    assert zmq.curve_public(key.secret.encode()).decode() == key.public
    with pytest.raises(Leave, match="There is a client laptop"):
        run("keys", "client", "laptop", "--out", "other.key")
    assert not (tmp_path / "other.key").exists()

    monkeypatch.setenv("STATEROOM_HOME", str(tmp_path / "away"))
    run("keys", "client", "phone", "--server", server)
    assert not (tmp_path / "away").exists()
    monkeypatch.setenv("STATEROOM_HOME", str(tmp_path / "home"))
    assert "secret" not in read_key_file(tmp_path / "phone.pub", secret=False)
    run("keys", "allow", "phone.pub")
    capsys.readouterr()
    run("keys", "list")
    listed = capsys.readouterr().out
    assert listed.splitlines() == [f"laptop  {key.public}", f"phone  {read(tmp_path / 'phone.key').public}"]
    assert key.secret not in listed
    run("keys", "revoke", "laptop")
    assert set(Keys(tmp_path / "home" / "keys").clients()) == {"phone"}
    with pytest.raises(Leave, match="is there already"):
        run("keys", "client", "laptop")  # its old file is not overwritten
    (tmp_path / "nonsense").write_text("[]")
    with pytest.raises(Leave, match="no key file"):
        run("keys", "allow", "nonsense")


def test_a_client_takes_its_key_from_a_private_file_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "laptop.key"
    with pytest.raises(BadKey, match="can't be read"):
        read(path)
    for text in ("no json", "[]", '{"stateroom_key": 1}', '{"stateroom_key": 2, "public": "x"}'):
        path.write_text(text)
        path.chmod(0o600)
        with pytest.raises(BadKey, match=r"laptop\.key"):
            read(path)
    path.chmod(0o644)
    with pytest.raises(BadKey, match="chmod 600"):
        read(path)
    monkeypatch.setenv("STATEROOM_KEY_FILE", str(path))
    assert key_for("ipc:///tmp/s", None) is None  # not even looked at
    with pytest.raises(BadKey):
        key_for("tcp://127.0.0.1:1", None)
