"""Configuration files that nobody means: each is refused in one sentence, and soon."""

from __future__ import annotations

from pathlib import Path

import pytest

from stateroom.client.errors import BadConfig, BadEndpoint
from stateroom.client.paths import check_endpoint, read_config
from stateroom.daemon import settings
from stateroom.daemon.settings import lines


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "config.toml"
    monkeypatch.setenv("STATEROOM_CONFIG", str(path))
    return path


def write(file: Path, text: str) -> None:
    file.write_bytes(text.encode())
    file.chmod(0o600)


@pytest.mark.parametrize(
    "text",
    [
        "model = " + "[" * 30_000,
        "model = " + "[" * 5_000 + "]" * 5_000,
        "quota = " + "{a=" * 5_000 + "1" + "}" * 5_000,
        "rows-max = " + "9" * 5_000,
    ],
    ids=["open", "lists", "tables", "digits"],
)
def test_what_the_library_chokes_on_is_refused_by_name(file: Path, text: str) -> None:
    write(file, text)
    with pytest.raises(BadConfig, match=str(file)):
        read_config()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("rows-max = 0x" + "f" * 5_000, "rows-max has a number of thousands of digits"),
        ("kv-budget = 0x" + "f" * 5_000, "kv-budget has a number of thousands of digits"),
        ('kv-budget = "' + "9" * 400 + 'GiB"', "1024 TiB at the most"),
        ("kv-budget = 99999999999999999999", "1024 TiB at the most"),
        ("[quota.x]\ndisk = 99999999999999999999", "1024 TiB at the most"),
        ('[quota.x]\nsessions = "3,bytes:4GiB"', "takes a number or a size"),
        ("[weight]\nx = 0x" + "f" * 5_000, "weight has a number of thousands of digits"),
        ("[" + ".".join(["quota", *"a" * 2_000]) + "]", "quota"),
        ('endpoint = "ipc:///run/x\\u0000y"', "control characters"),
        ('endpoint = "ipc:///run/x\\ny"', "control characters"),
    ],
    ids=["number", "size", "float", "uint64", "quota", "two in one", "weight", "header", "nul", "newline"],
)
def test_values_beyond_all_measure_are_refused_by_name(file: Path, text: str, said: str) -> None:
    write(file, text)
    with pytest.raises(BadConfig, match=said):
        settings.load()


def test_an_endpoint_has_no_control_characters() -> None:
    """The kernel ends a path at a NUL: a client would reach another socket than the one that is shown."""
    with pytest.raises(BadEndpoint, match="control characters"):
        check_endpoint("ipc:///run/one\0.sock")


def test_a_mark_of_the_byte_order_is_none_of_the_text(file: Path) -> None:
    write(file, "\ufeffrows-max = 3\r\n")
    assert settings.load().values == {"rows_max": 3}


def test_lines_are_not_looked_for_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a statement of thousands of lines each is tried as its last one."""
    read = 0

    def loads(text: str) -> dict[str, object]:
        nonlocal read
        read += len(text)
        raise ValueError

    monkeypatch.setattr(lines.tomllib, "loads", loads)
    lines.lines_of("model = [\n" + "\n" * 60_000 + "]\n")
    assert read <= lines.PARSED_MAX
