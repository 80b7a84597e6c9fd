"""The configuration file: what it may say, who overrides it, and what is said of a wrong one."""

from __future__ import annotations

import json
import os
import re
import tomllib
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner, Result

from stateroom.client.errors import BadConfig
from stateroom.daemon import commands, settings
from stateroom.daemon.config import parse_quotas, parse_weights
from stateroom.daemon.exits import CONFIG, Leave
from stateroom.daemon.settings.known import OTHER_VARIABLES
from stateroom.daemon.settings.lines import lines_of
from stateroom.daemon.settings.template import template
from stateroom.daemon.settings.values import TABLES, takes

ROOT = Path(__file__).parent.parent.parent
PAGE = ROOT / "docs" / "configuration.md"

EVERYTHING = """\
model = "demo"
endpoint = "tcp://127.0.0.1:5555"
kv-budget = "8GiB"
disk = 1073741824
rows-max = 4
unload-after = 60
keep = false
log-level = "warning"
app = "mine"

[weight]
editor = 4
"a=b" = 0.5

[quota.editor]
sessions = 9
bytes = "2GiB"

[quota.default]
requests = 100
"""


@pytest.fixture
def file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Where the configuration file would be, in an environment that says nothing else."""
    for name in [name for name in os.environ if name.startswith("STATEROOM_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("STATEROOM_HOME", str(tmp_path))
    monkeypatch.setenv("STATEROOM_RUNTIME_DIR", "/tmp/stateroom-settings")
    return tmp_path / "config.toml"


def write(file: Path, text: str) -> None:
    file.write_text(text)
    file.chmod(0o600)


def config(*arguments: str, **environment: str) -> Result:
    return CliRunner().invoke(commands.app, ["config", *arguments], env=environment)


def shown(*options: str, **environment: str) -> dict[str, Any]:
    """What `config show` tells, by name: value, origin and where."""
    done = config("show", "--json", "--", *options, **environment)
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)["settings"]
    return {each["name"]: (each["value"], each["origin"], each["where"]) for each in told}


# ---------------------------------------------------------------- what the file says


def test_without_a_file_there_is_nothing(file: Path) -> None:
    assert settings.load() == settings.Settings()
    assert settings.problem() is None
    assert settings.config_path() == file


def test_every_kind_of_value_is_taken_as_its_option_takes_it(file: Path) -> None:
    write(file, EVERYTHING)
    found = settings.load()
    assert found.path == file
    assert found.values == {
        "model": ["demo"],
        "endpoint": "tcp://127.0.0.1:5555",
        "kv_budget": "8GiB",
        "disk": "1073741824",
        "rows_max": 4,
        "unload_after": 60.0,
        "keep": False,
        "log_level": "warning",
        "app": "mine",
        "weight": ["editor=4", "a=b=0.5"],
        "quota": ["editor=sessions:9,bytes:2GiB", "default=requests:100"],
    }
    assert parse_weights(found.values["weight"]) == (("editor", 4.0), ("a=b", 0.5))
    assert parse_quotas(found.values["quota"])["editor"].bytes == 2 * 2**30
    assert found.where("rows_max") == f"{file}:5"
    assert found.where("quota") == f"{file}:15"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("\nkv-bugdet = 1", "2: kv-bugdet is no setting; did you mean kv-budget?"),
        ("kv_budget = '1GiB'", "1: kv_budget is no setting; did you mean kv-budget?"),
        ("zzz = 1", "1: zzz is no setting."),
        ("home = '/x'", "1: home can't be set here, for it says where this file is; set $STATEROOM_HOME."),
        ("activated = true", "1: activated is no setting."),
        ("rows-max = 0", "1: rows-max takes a whole number from 1 to 32, not 0."),
        ("rows-max = 2.5", "1: rows-max takes a whole number from 1 to 32, not 2.5."),
        ("rows-max = true", "1: rows-max takes a whole number from 1 to 32, not true."),
        ("rows-max = '4'", '1: rows-max takes a whole number from 1 to 32, not "4".'),
        ("gap-ms = nan", "1: gap-ms takes a number from 1 on, not NaN."),
        ("keep = 'no'", '1: keep takes true or false, not "no".'),
        ("keep = 1", "1: keep takes true or false, not 1."),
        ("log = 'xml'", '1: log takes one of json, console, not "xml".'),
        ("model = [1]", "1: model takes text, or a list of texts, not [1]."),
        ("model = ['demo', './x']", '1: model takes whole paths: "./x" depends on where'),
        ("model = 'x.gguf'", '1: model takes whole paths: "x.gguf" depends'),
        ("app = 1979-05-27", '1: app takes text, not "1979-05-27".'),
        ("kv-budget = 'much'", "1: kv-budget can't be that: 'much' is no size"),
        ("kv-budget = 0", "1: kv-budget can't be that: A size of '0' leaves no room"),
        ("kv-budget = 1.5", '1: kv-budget takes a size like "8GiB", or a number of bytes, not 1.5.'),
        ("endpoint = 'http://x'", "1: endpoint can't be that: 'http://x' is no endpoint"),
        ("weight = ['editor=4']", "1: weight is a table, like [weight] editor = 4;"),
        ("[weight]\n\neditor = 0", "3: weight.editor can't be that: 'editor=0' is no weight"),
        ("[weight]\neditor = '4'", '2: weight.editor takes a number, not "4".'),
        ("[quota.editor]\nsesions = 9", "2: quota.editor.sesions is no limit; did you mean sessions?"),
        ("[quota]\neditor = 9", "2: quota.editor takes a table, like { sessions = 9 }, not 9."),
        ("[quota.editor]", "1: quota.editor takes a table, like { sessions = 9 }, not {}."),
        ("[quota.editor]\nbytes = 'much'", "1: quota.editor can't be that: 'much' is no size"),
        ("[quota.editor]\nsessions = true", "2: quota.editor.sessions takes a number or a size, not true."),
        ("[quota.'a/b']\nsessions = 1", "1: quota.a/b can't be that:"),
    ],
)
def test_what_is_wrong_is_told_with_file_line_and_name(file: Path, text: str, said: str) -> None:
    write(file, text)
    told = settings.problem()
    assert told is not None
    assert told.startswith(f"{file}:{said}")
    assert "\n" not in told
    with pytest.raises(BadConfig, match=re.escape(told)):
        settings.load()


def test_all_that_is_wrong_is_told_by_line(file: Path) -> None:
    write(file, "[weight]\nx = 0\n[quota.y]\nz = 1\n")
    _, problems = settings.examine()
    assert [problem.removeprefix(f"{file}:")[:10] for problem in problems] == ["2: weight.", "4: quota.y"]
    write(file, "rows = 1\nkeep = 1\nmodel = 'x'\n")
    found, problems = settings.examine()
    assert len(problems) == 2
    assert found.values == {"model": ["x"]}


def test_a_long_value_is_told_in_part(file: Path) -> None:
    write(file, f"rows-max = '{'x' * 5000}'")
    assert len(settings.problem() or "") < 300


# ---------------------------------------------------------------- lines

NAMES = st.text("abc-_.\"'é [#=", min_size=1, max_size=6)
VALUES = st.recursive(
    st.integers() | st.booleans() | st.text("ab\n#=[]\"'\\ ", max_size=8),
    lambda inner: st.lists(inner, max_size=3),
    max_leaves=4,
)
TABLES_OF_TABLES = st.dictionaries(
    NAMES, VALUES | st.dictionaries(NAMES, VALUES, min_size=1, max_size=3), min_size=1, max_size=4
)


@given(TABLES_OF_TABLES, st.randoms(use_true_random=False))
def test_each_key_is_found_on_the_line_where_it_was_written(values: dict[str, Any], random: Any) -> None:
    """Written with a TOML writer of the test's own, which knows on which line it is."""
    lines: list[str] = []
    expected: dict[tuple[str, ...], int] = {}

    def entry(place: tuple[str, ...], value: Any) -> None:
        lines.extend(random.choice(([], ["# a = 1"], [""])))
        expected[place] = len(lines) + 1
        lines.extend(f"{json.dumps(place[-1])} = {toml(value)}".split("\n"))

    def toml(value: Any) -> str:
        if isinstance(value, list):
            return "[" + "".join(f"\n  {toml(each)}, # ]\n" for each in value) + "]"
        if (
            isinstance(value, str)
            and "'''" not in value
            and not value.endswith("'")
            and random.random() < 0.5
        ):
            return f"'''\n{value}'''"
        return json.dumps(value)

    flat = {name: value for name, value in values.items() if not isinstance(value, dict)}
    for name, value in flat.items():
        entry((name,), value)
    for name, table in values.items():
        if isinstance(table, dict):
            expected[name,] = len(lines) + 1
            lines.append(f" [{json.dumps(name)}] # [x]")
            for key, value in table.items():
                entry((name, key), value)
    text = "\n".join(lines)
    assert tomllib.loads(text) == values
    assert lines_of(text) == expected


def test_lines_of_dotted_keys_and_nested_tables() -> None:
    text = "a.b = 1\na.c = 2\r\n[x.y]\nz.w = {k = 1}\n[[v]]\nu = 1\n"
    assert lines_of(text) == {
        ("a",): 1, ("a", "b"): 1, ("a", "c"): 2, ("x",): 3, ("x", "y"): 3, ("x", "y", "z"): 4,
        ("x", "y", "z", "w"): 4, ("x", "y", "z", "w", "k"): 4, ("v",): 5, ("v", "u"): 6,
    }  # fmt: skip


# ---------------------------------------------------------------- the commands


def test_show_tells_whence_each_value_comes(file: Path) -> None:
    write(file, EVERYTHING)
    told = shown("--rows-max", "8", "--no-record", STATEROOM_KV_BUDGET="4GiB", STATEROOM_ROWS_MAX="6")
    assert told["rows-max"] == (8, "option", "--rows-max")
    assert told["record"] == (False, "option", "--record")
    assert told["kv-budget"] == ("4GiB", "environment", "STATEROOM_KV_BUDGET")
    assert told["disk"] == ("1073741824", "file", f"{file}:4")
    assert told["weight"] == (["editor=4", "a=b=0.5"], "file", f"{file}:11")
    assert told["gap-ms"] == (None, "default", "default")
    assert told["log"] == ("console", "default", "default")
    assert told["app"] == ("mine", "file", f"{file}:9")
    assert told["home"] == (str(file.parent), "environment", "STATEROOM_HOME")
    assert set(told) == {"home", *settings.known()}


def test_every_setting_can_come_from_each_place(file: Path) -> None:
    """File, then environment over it, for all there are; from the template, so that none is forgotten."""
    write(
        file, re.sub(r"(?m)^# (?=[a-z-]+ = |\[)", "", template()).replace("tcp://0.0.0.0", "tcp://127.0.0.1")
    )
    by_file = shown()
    for name, setting in settings.known().items():
        (value, origin, where) = by_file[name]
        assert origin == "file", name
        assert where.startswith(f"{file}:")
        said = value if isinstance(value, list) else [value]
        text = " ".join(json.dumps(each) if isinstance(each, bool) else str(each) for each in said)
        assert shown(**{setting.variable: text})[name] == (value, "environment", setting.variable)


WORDS = st.sampled_from(
    ["", "8GiB", "0", "demo", "a/b", "info", "json", "tcp://127.0.0.1:1", "ipc:///tmp/s", "x=1"]
)
SIMPLE = st.integers(-2, 70_000) | st.floats(-2, 200) | st.booleans() | WORDS
LIMITS = st.dictionaries(st.sampled_from(["sessions", "bytes", "disk", "requests", "x"]), SIMPLE, max_size=2)
APPS = st.dictionaries(
    st.sampled_from(["editor", "default", "a=b", "a/b", "a,b:c", ""]), SIMPLE | LIMITS, max_size=2
)


@hypothesis.settings(max_examples=60, suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture])
@given(
    st.dictionaries(
        st.sampled_from([*settings.known()]), SIMPLE | st.lists(WORDS, max_size=2) | APPS, max_size=3
    )
)
def test_what_the_file_may_say_is_what_serve_takes(file: Path, values: dict[str, Any]) -> None:
    """Whatever it says is either told with its line, or taken by click as it stands."""

    def toml(value: Any) -> str:
        if isinstance(value, dict):
            return f"{{{', '.join(f'{json.dumps(name)} = {toml(each)}' for name, each in value.items())}}}"
        return f"[{', '.join(map(toml, value))}]" if isinstance(value, list) else json.dumps(value)

    write(file, "".join(f"{name} = {toml(value)}\n" for name, value in values.items()))
    found, problems = settings.examine()
    assert len(found.values) + len(problems) == len(values)
    if not problems:
        told = shown()
        assert {name for name, (_, origin, _) in told.items() if origin == "file"} == set(values)
        parse_weights(told["weight"][0] or [])
        parse_quotas(told["quota"][0] or [])


def test_an_empty_variable_is_none(file: Path) -> None:
    write(file, EVERYTHING)
    assert shown(STATEROOM_KV_BUDGET="", STATEROOM_MODEL="")["kv-budget"][1] == "file"


def test_another_home_has_a_file_of_its_own(file: Path, tmp_path: Path) -> None:
    write(file, EVERYTHING)
    other = tmp_path / "other"
    other.mkdir()
    write(other / "config.toml", "rows-max = 2\n")
    told = shown("--home", str(other))
    assert told["rows-max"] == (2, "file", f"{other}/config.toml:1")
    assert told["model"] == ([], "default", "default")


def test_show_for_people_says_what_holds_by_default(file: Path) -> None:
    write(file, 'kv-budget = "8GiB"\n')
    lines = {line.split()[0]: line for line in config("show").stdout.splitlines()}
    assert re.fullmatch(rf"kv-budget +8GiB +{file}:1 *", lines["kv-budget"])
    assert re.fullmatch(r"disk +32GiB +default *", lines["disk"])
    assert re.fullmatch(r"keep +true +default *", lines["keep"])


def test_init_writes_a_file_that_changes_nothing_and_overwrites_none(file: Path) -> None:
    before = shown()
    assert config("init").exit_code == 0
    assert file.stat().st_mode & 0o777 == 0o600
    assert shown() == before
    write(file, "rows-max = 3\n")
    refused = CliRunner().invoke(commands.app, ["config", "init"])
    assert refused.exit_code != 0
    assert "is there already" in str(refused.exception)
    assert file.read_text() == "rows-max = 3\n"


def test_the_template_holds_every_setting_with_help_and_default(file: Path) -> None:
    text = template()
    flat = " ".join(line.removeprefix("#").strip() for line in text.splitlines())
    for name, setting in settings.known().items():
        assert re.search(rf"(?m)^# (\[{name}[.\]]|{name} = )", text), name
        assert f"{setting.help} Default: {setting.default_words}." in flat
    assert max(map(len, text.splitlines())) < 110
    assert tomllib.loads(text) == {}


def test_check_tells_all_problems_and_notes_strange_variables(file: Path) -> None:
    write(file, "rows = 1\nkeep = 1\n")
    done = config("check")
    assert [line.split()[:2] for line in done.stderr.splitlines()] == [["stateroom:", f"{file}:1:"]]
    assert str(done.exception).startswith(f"{file}:2: keep takes")
    write(file, "rows-max = 2\n")
    done = config("check", STATEROOM_KV_BUGDET="1GiB", STATEROOM_RUNTIME_DIR="/tmp/x")
    assert done.exit_code == 0
    assert done.stdout == f"{file} is well.\n"
    assert done.stderr == "Note: $STATEROOM_KV_BUGDET is no setting; did you mean STATEROOM_KV_BUDGET?\n"
    wrong = {"STATEROOM_ROWS_MAX": "0", "STATEROOM_KV_BUDGET": "much", "STATEROOM_QUOTA": "editor=4"}
    for variable, value in wrong.items():
        done = config("check", **{variable: value})
        assert isinstance(done.exception, Leave)
        assert done.exception.code == CONFIG
        assert done.exception.message.startswith(f"${variable} can't be that: ")
    assert CliRunner().invoke(commands.app, ["serve", "--rows-max", "0"]).exit_code == 2


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('listen = "ipc:///tmp/x.sock"', "--listen takes tcp://"),
        ('endpoint = "inproc://x"', "listens on ipc:// or tcp://"),
        ('endpoint = "ipc://@x"', "open to every user"),
        ('listen = "tcp://127.0.0.1:5555"', "stateroom keys init"),
        ('endpoint = "tcp://0.0.0.0:5555"\ninsecure-loopback = true', "on this machine alone"),
        ('model = "/nowhere/model"', "There is no model at /nowhere/model"),
    ],
)
def test_what_serve_would_refuse_is_not_well(
    file: Path, text: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor is a service installed that could only leave."""
    monkeypatch.setenv("PATH", "/nowhere")
    write(file, text)
    for arguments in (["config", "check"], ["serve"], ["service", "install"]):
        done = CliRunner().invoke(commands.app, arguments)
        assert isinstance(done.exception, Leave), arguments
        assert said in done.exception.message, arguments
        assert done.exception.code == CONFIG
    assert config("show").exit_code == 0


def test_a_home_of_the_environment_is_whole_for_the_daemon_as_for_its_clients(file: Path) -> None:
    """Else each would have one of its own, by where it was started."""
    for arguments in (["config", "show"], ["ps"], ["config", "path"]):
        done = CliRunner().invoke(commands.app, arguments, env={"STATEROOM_HOME": "relative"})
        assert "$STATEROOM_HOME must be an absolute path" in str(done.exception), arguments
    assert shown("--home", "relative")["home"][0] == str(Path("relative").resolve())


def test_an_endpoint_that_is_none_leaves_with_the_code_of_a_configuration(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["stateroom", "ps", "--endpoint", "http://x"])
    assert commands.obeyed() == CONFIG
    assert "'http://x' is no endpoint" in capsys.readouterr().err


def test_options_of_serve_need_nothing_before_them() -> None:
    """And what is wrong with them is told as `serve` tells it."""
    for arguments in (["show", "--rows-max", "3", "--json"], ["show", "--json", "--", "--rows-max", "3"]):
        done = config(*arguments)
        assert {"name": "rows-max", "value": 3, "origin": "option", "where": "--rows-max"} in json.loads(
            done.stdout
        )["settings"]
    for wrong in (["--rows-mx", "3"], ["--rows-max", "99"]):
        done = config("check", *wrong)
        assert done.exit_code == 2
        assert "Usage: stateroom serve" in done.stderr


@pytest.mark.parametrize("text", ["rows = 1\n", "rows-max\n"])
def test_a_wrong_file_stops_what_needs_it_and_nothing_else(
    file: Path, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")  # no service manager: nothing is installed whatever happens
    write(file, text)
    for arguments in (["serve"], ["ps"], ["config", "show"], ["config", "check"], ["service", "install"]):
        done = CliRunner().invoke(commands.app, arguments)
        assert str(file) in str(done.exception), arguments
    for arguments in (["version"], ["serve", "--help"], ["config", "path"], ["model", "list"]):
        assert CliRunner().invoke(commands.app, arguments).exit_code == 0, arguments


def test_every_variable_that_the_sources_name_is_known() -> None:
    known = {setting.variable for setting in settings.known().values()} | set(OTHER_VARIABLES)
    named: set[str] = set()
    for part in ("client", "daemon", "deploy"):
        for path in (ROOT / part).rglob("*.py"):
            named |= set(re.findall(r"(?<![_A-Z])STATEROOM_[A-Z_]*[A-Z]", path.read_text()))
    assert len(named) > 8
    assert named - known == set()


@pytest.mark.parametrize("name", settings.known())
def test_the_page_has_every_setting(name: str) -> None:
    setting = settings.known()[name]
    help_text = setting.help.replace("|", "\\|")
    row = f"| `{name}` | {takes(setting)} | {setting.default_words} | {help_text} |"
    assert row in PAGE.read_text().splitlines()


@pytest.mark.parametrize(
    "block", re.findall(r"```toml\n(.*?)```", (ROOT / "docs/configuration.md").read_text(), re.S)
)
def test_the_examples_of_the_page_are_taken(file: Path, block: str) -> None:
    write(file, block)
    assert settings.problem() is None


def test_tables_are_those_of_the_options_that_name_apps() -> None:
    named = {name for name, setting in settings.known().items() if "APP=" in str(setting.option.metavar)}
    assert named == set(TABLES)
