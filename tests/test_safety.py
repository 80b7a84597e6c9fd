"""Nothing that comes from outside is run, and no id can be guessed: read from the syntax trees, and drawn."""

from __future__ import annotations

import ast
import re

import pytest
from tests.test_layering import ROOT, imports_of, sources

from stateroom.caches.snapshots.library import ID_BYTES
from stateroom.daemon.catalog import SESSION_ID_BYTES, Catalog

# Each of these makes objects, or runs code, from bytes.
CODE_IN_DATA = re.compile(
    r"(pickle|_pickle|cPickle|cloudpickle|dill|joblib|marshal|shelve|yaml|torch|codeop)(\..*)?"
)
RUNS_TEXT = {"eval", "exec", "compile", "__import__", "execfile"}
METHODS = {"send_pyobj", "recv_pyobj", "send_serialized", "recv_serialized"}  # pyzmq's, over pickle
GUESSABLE = re.compile(r"random(\..*)?|uuid(\..*)?")
ID_BITS_MIN = 128


@pytest.fixture(scope="module")
def trees() -> dict[str, ast.AST]:
    return {path.relative_to(ROOT).as_posix(): ast.parse(path.read_text()) for path in sources()}


def calls_of(trees: dict[str, ast.AST]) -> list[tuple[str, ast.Call]]:
    return [
        (f"{name}:{node.lineno}", node)
        for name, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
    ]


def test_no_object_is_made_of_bytes(trees: dict[str, ast.AST]) -> None:
    """B76: no pickle anywhere, nor what amounts to one."""
    found = [
        f"{name}:{line} imports {module}"
        for name, tree in trees.items()
        for module, _, line in imports_of(tree)
        if CODE_IN_DATA.fullmatch(module)
    ]
    for place, call in calls_of(trees):
        if isinstance(call.func, ast.Attribute) and call.func.attr in METHODS:
            found.append(f"{place} calls {call.func.attr}")
        found += [
            f"{place} says allow_pickle"
            for keyword in call.keywords
            if keyword.arg == "allow_pickle" and ast.unparse(keyword.value) != "False"
        ]
        if isinstance(call.func, ast.Attribute) and ast.unparse(call.func) in ("np.load", "numpy.load"):
            found.append(f"{place} reads numpy's own format")
    assert found == []


def test_no_text_is_run(trees: dict[str, ast.AST]) -> None:
    """B76: neither as Python nor by a shell."""
    found = []
    for place, call in calls_of(trees):
        if isinstance(call.func, ast.Name) and call.func.id in RUNS_TEXT:
            found.append(f"{place} calls {call.func.id}")
        if ast.unparse(call.func) in ("os.system", "os.popen", "subprocess.getoutput"):
            found.append(f"{place} calls a shell")
        found += [
            f"{place} says {keyword.arg}"
            for keyword in call.keywords
            if keyword.arg in ("shell", "trust_remote_code") and ast.unparse(keyword.value) != "False"
        ]
    assert found == []


def test_the_search_finds_what_it_looks_for() -> None:
    """Else the tests above could not fail."""
    bad = (
        "import pickle\nfrom torch import load\nsocket.recv_pyobj()\nnp.load(f, allow_pickle=True)\neval(x)\n"
    )
    tree = {"bad.py": ast.parse(bad + "subprocess.run(x, shell=True)\nimport random\n")}
    for test in (
        test_no_object_is_made_of_bytes,
        test_no_text_is_run,
        test_nothing_secret_is_drawn_by_chance,
    ):
        with pytest.raises(AssertionError):
            test(tree)  # type: ignore[arg-type]


def test_nothing_secret_is_drawn_by_chance(trees: dict[str, ast.AST]) -> None:
    """Ids and keys come from `secrets` and libzmq; `random` follows from what was seen of it."""
    found = [
        f"{name}:{line} imports {module}"
        for name, tree in trees.items()
        if re.match(r"client|daemon|caches/snapshots", name) or name == "bad.py"
        for module, _, line in imports_of(tree)
        if GUESSABLE.fullmatch(module)
    ]
    assert found == []


def test_ids_of_sessions_and_trunks_have_as_many_bits_as_they_say() -> None:
    """Length and alphabet of what is handed out, and that no two begin alike: 144 bits, 128 promised."""
    assert SESSION_ID_BYTES * 8 >= ID_BITS_MIN
    catalog = Catalog(lambda: 0.0)
    ids = [session.id for session in catalog.add("owner", "m", [None] * 4_096, "interactive", None, [])]
    assert {len(known) for known in ids} == {SESSION_ID_BYTES * 8 // 6}
    assert {character for known in ids for character in known} == set(
        "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"
    )
    assert len({known[:10] for known in ids}) == len(ids)  # 60 bits: by chance one time in 10^11
    for place in range(len(ids[0])):
        assert len({known[place] for known in ids}) == 64, f"character {place} is not drawn freely"


def test_ids_of_snapshots_and_carried_files_have_as_many_bits(trees: dict[str, ast.AST]) -> None:
    """Wherever one is drawn it is by `secrets`, of enough bytes."""
    drawn = {
        ast.unparse(call)
        for _, call in calls_of(trees)
        if ast.unparse(call.func) in ("secrets.token_hex", "secrets.token_urlsafe", "secrets.token_bytes")
    }
    of_snapshot, of_file, of_session = (
        f"secrets.{how}"
        for how in ("token_hex(ID_BYTES)", "token_hex(16)", "token_urlsafe(SESSION_ID_BYTES)")
    )
    assert {of_snapshot, of_file, of_session} <= drawn
    assert min(ID_BYTES, 16, SESSION_ID_BYTES) * 8 >= ID_BITS_MIN
