"""Endpoint, runtime directory and home, from the environment alone."""

import os
from pathlib import Path

import pytest

from stateroom.client import paths
from stateroom.client.errors import BadEndpoint, ClientError

VARIABLES = ("STATEROOM_ENDPOINT", "STATEROOM_RUNTIME_DIR", "XDG_RUNTIME_DIR", "STATEROOM_HOME")


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
