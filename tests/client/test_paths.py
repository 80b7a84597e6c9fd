"""Endpoint, runtime directory and home, from the environment and the configuration file."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from stateroom.client import paths
from stateroom.client.errors import BadConfig, BadEndpoint, ClientError

VARIABLES = (
    "STATEROOM_ENDPOINT",
    "STATEROOM_RUNTIME_DIR",
    "XDG_RUNTIME_DIR",
    "STATEROOM_HOME",
    "STATEROOM_CONFIG",
)


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for variable in VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("HOME", "/home/ada")
    return monkeypatch


def test_defaults_are_below_the_home(environment: pytest.MonkeyPatch) -> None:
    assert paths.home_dir() == Path("/home/ada/.stateroom")
    assert paths.runtime_dir() == Path("/home/ada/.stateroom/run")
    assert paths.default_endpoint() == "ipc:///home/ada/.stateroom/run/stateroom.sock"


def test_each_variable_overrides_the_ones_after_it(environment: pytest.MonkeyPatch) -> None:
    environment.setenv("XDG_RUNTIME_DIR", "/run/user/7")
    assert paths.default_endpoint() == "ipc:///run/user/7/stateroom/stateroom.sock"
    environment.setenv("STATEROOM_RUNTIME_DIR", "~/run")
    assert paths.default_endpoint() == "ipc:///home/ada/run/stateroom.sock"
    environment.setenv("STATEROOM_ENDPOINT", "tcp://127.0.0.1:5555")
    assert paths.default_endpoint() == "tcp://127.0.0.1:5555"
    environment.setenv("STATEROOM_HOME", "/srv/stateroom")
    assert paths.home_dir() == Path("/srv/stateroom")
    assert paths.runtime_dir() == Path("/home/ada/run")


def test_an_empty_variable_counts_as_unset(environment: pytest.MonkeyPatch) -> None:
    for variable in VARIABLES:
        environment.setenv(variable, "")
    assert paths.default_endpoint() == "ipc:///home/ada/.stateroom/run/stateroom.sock"
    assert paths.home_dir() == Path("/home/ada/.stateroom")


@pytest.mark.parametrize("variable", ["STATEROOM_RUNTIME_DIR", "STATEROOM_HOME"])
def test_a_relative_directory_is_refused_by_the_name_of_its_variable(
    environment: pytest.MonkeyPatch, variable: str
) -> None:
    environment.setenv(variable, "run")
    with pytest.raises(BadEndpoint, match=rf"\${variable} must be an absolute path"):
        (paths.home_dir if variable == "STATEROOM_HOME" else paths.runtime_dir)()


@pytest.mark.parametrize("letter", ["a", "é", "船"])
def test_ipc_paths_are_measured_in_bytes_and_the_limit_is_exact(letter: str) -> None:
    """B64: a path of few characters may have too many bytes."""
    width = len(letter.encode())
    fits = (
        "/"
        + "x" * ((paths.IPC_PATH_BYTES_MAX - 1) % width)
        + letter * ((paths.IPC_PATH_BYTES_MAX - 1) // width)
    )
    assert len(os.fsencode(fits)) == paths.IPC_PATH_BYTES_MAX
    paths.check_endpoint("ipc://" + fits)
    with pytest.raises(BadEndpoint) as caught:
        paths.check_endpoint("ipc://" + fits + "y")
    message = str(caught.value)
    assert fits + "y" in message
    assert f"{paths.IPC_PATH_BYTES_MAX + 1} bytes" in message
    assert f"takes {paths.IPC_PATH_BYTES_MAX} at most" in message
    assert "STATEROOM_RUNTIME_DIR" in message
    assert isinstance(caught.value, ClientError | ValueError)


def test_a_long_home_is_refused_where_the_default_is_computed(environment: pytest.MonkeyPatch) -> None:
    """B64: long HOME, as with macOS's temporary directories."""
    environment.setenv("HOME", "/var/folders/" + "z" * 90)
    with pytest.raises(BadEndpoint, match="STATEROOM_RUNTIME_DIR"):
        paths.default_endpoint()


def test_the_limit_is_what_the_kernel_takes(tmp_path: Path) -> None:
    """B64: `IPC_PATH_BYTES_MAX` against a real bind, one byte over and exactly."""
    import socket

    def bind(size: int) -> None:
        name = "s" * (size - len(os.fsencode(tmp_path)) - 1)
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(tmp_path / name))

    if len(os.fsencode(tmp_path)) > paths.IPC_PATH_BYTES_MAX - 2:
        pytest.skip("the temporary directory itself is too long")
    bind(paths.IPC_PATH_BYTES_MAX)
    with pytest.raises(OSError, match="too long"):
        bind(paths.IPC_PATH_BYTES_MAX + 1)


@pytest.mark.parametrize(
    "endpoint", ["", "stateroom.sock", "/run/stateroom.sock", "http://localhost", "ipc://"]
)
def test_what_is_no_endpoint_is_refused(endpoint: str) -> None:
    with pytest.raises(BadEndpoint):
        paths.check_endpoint(endpoint)


def test_socket_file_of_an_endpoint() -> None:
    assert paths.ipc_path("ipc:///run/s.sock") == Path("/run/s.sock")
    assert paths.ipc_path("ipc://@abstract") is None
    assert paths.ipc_path("tcp://127.0.0.1:1") is None


# ---------------------------------------------------------------- the configuration file


@pytest.fixture
def file(environment: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Where the configuration file would be; there is none yet."""
    environment.setenv("STATEROOM_HOME", str(tmp_path))
    return tmp_path / "config.toml"


def write(file: Path, text: str | bytes, mode: int = 0o600) -> None:
    file.write_bytes(text.encode() if isinstance(text, str) else text)
    file.chmod(mode)


def test_the_file_names_the_endpoint_and_the_environment_overrides_it(
    environment: pytest.MonkeyPatch, file: Path
) -> None:
    assert paths.config_path() == file
    assert paths.read_config() is None
    write(file, 'endpoint = "tcp://127.0.0.1:7777"\nunknown-to-clients = 3\n')
    assert paths.default_endpoint() == "tcp://127.0.0.1:7777"
    environment.setenv("STATEROOM_ENDPOINT", "tcp://127.0.0.1:5555")
    assert paths.default_endpoint() == "tcp://127.0.0.1:5555"


def test_a_file_without_endpoint_changes_nothing(file: Path) -> None:
    write(file, "rows-max = 4\n")
    assert paths.default_endpoint() == "ipc:///home/ada/.stateroom/run/stateroom.sock"


def test_another_file_may_be_named_and_then_it_must_be_there(
    environment: pytest.MonkeyPatch, file: Path, tmp_path: Path
) -> None:
    write(file, 'endpoint = "tcp://127.0.0.1:1"\n')
    other = tmp_path / "other.toml"
    environment.setenv("STATEROOM_CONFIG", str(other))
    with pytest.raises(BadConfig, match=rf"no file at {other}, which \$STATEROOM_CONFIG names"):
        paths.default_endpoint()
    write(other, 'endpoint = "tcp://127.0.0.1:2"\n')
    assert paths.default_endpoint() == "tcp://127.0.0.1:2"
    environment.setenv("STATEROOM_CONFIG", os.devnull)
    assert paths.default_endpoint() == "ipc:///home/ada/.stateroom/run/stateroom.sock"
    environment.setenv("STATEROOM_CONFIG", "other.toml")
    with pytest.raises(BadEndpoint, match="STATEROOM_CONFIG must be an absolute path"):
        paths.default_endpoint()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("endpoint = 4\n", "endpoint takes text, not 4"),
        ("endpoint\n", "is no TOML: .*line 1"),
        ('a = 1\na = "2"\n', "is no TOML"),
        (b'endpoint = "\xff"\n', "not in UTF-8: .* at byte 12"),
        (b"#" * (paths.CONFIG_BYTES_MAX + 1), "bytes; 65536 are taken at most"),
    ],
)
def test_a_file_that_can_not_be_read_is_said_in_a_line(file: Path, text: str | bytes, said: str) -> None:
    write(file, text)
    with pytest.raises(BadConfig, match=said) as caught:
        paths.default_endpoint()
    assert str(file) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert isinstance(caught.value, ClientError)


@pytest.mark.parametrize("mode", [0o620, 0o602, 0o666])
def test_a_file_that_others_may_write_is_refused(file: Path, mode: int) -> None:
    """It says to whom prompts are sent, and what the daemon runs."""
    write(file, 'endpoint = "tcp://127.0.0.1:1"\n', mode)
    with pytest.raises(BadConfig, match=f"chmod go-w {file}"):
        paths.default_endpoint()
    file.chmod(0o644)
    assert paths.default_endpoint() == "tcp://127.0.0.1:1"


def test_a_file_that_anybody_can_replace_is_refused(file: Path, tmp_path: Path) -> None:
    write(file, 'endpoint = "tcp://127.0.0.1:1"\n')
    tmp_path.chmod(0o777)
    with pytest.raises(BadConfig, match=f"chmod o-w {tmp_path}"):
        paths.default_endpoint()
    tmp_path.chmod(0o1777)
    assert paths.default_endpoint() == "tcp://127.0.0.1:1"


def test_a_folder_in_its_place_is_said(file: Path) -> None:
    file.mkdir()
    with pytest.raises(BadConfig, match="is no file"):
        paths.default_endpoint()


def test_without_a_home_there_is_no_file(environment: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    environment.setattr(paths, "home_dir", homeless)
    environment.setenv("STATEROOM_RUNTIME_DIR", "/run/stateroom")
    assert paths.default_endpoint() == "ipc:///run/stateroom/stateroom.sock"


def test_who_has_no_file_loads_no_reader_of_it(file: Path) -> None:
    asks = "import sys, stateroom.client.paths as p; p.default_endpoint(); print('tomllib' in sys.modules)"

    def loaded() -> str:
        command = [sys.executable, "-c", asks]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout.strip()

    assert loaded() == "False"
    write(file, "rows-max = 4\n")
    assert loaded() == "True"
