"""README.md: its example runs, its links lead somewhere, the commands it shows exist."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.conftest import StartDaemon
from tests.tiny import write_tiny_model

import stateroom.client
from stateroom.client import Room, Session, TokenStream, errors

ROOT = Path(__file__).resolve().parent.parent.parent
README = (ROOT / "README.md").read_text()
BEFORE = """
buffer = "def area(radius):\\n    return 3.14"
edited_buffer = buffer.replace("3.14", "pi * radius ** 2")
"""
AFTER = """
receipt = base.receipt
print()
print(receipt.reused, receipt.prefilled, receipt.trimmed, base.length, len(drafts))
"""


@pytest.mark.system
def test_the_example_runs_as_it_stands(start_daemon: StartDaemon, tmp_path: Path) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len(example.splitlines()) <= 6
    daemon = start_daemon(model=write_tiny_model(tmp_path / "tiny"))
    done = subprocess.run(
        [sys.executable, "-c", BEFORE + example + AFTER],
        env=daemon.env, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    reused, prefilled, trimmed, length, drafts = map(int, done.stdout.splitlines()[-1].split())
    assert drafts == 4
    assert reused + prefilled == length
    assert reused > prefilled > 0
    assert trimmed > 0


@pytest.mark.system
def test_the_python_pages_examples_run_as_they_stand(start_daemon: StartDaemon, tmp_path: Path) -> None:
    examples = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "python.md").read_text(), re.DOTALL)
    daemon = start_daemon(model=write_tiny_model(tmp_path / "tiny", context=2048))
    told = []
    for example in examples:
        done = subprocess.run(
            [sys.executable, "-c", example], env=daemon.env, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stderr
        told.append(done.stdout)
    decoded, shared, kept = told
    assert re.search(r"(stop|stop_token|length) \d+$", decoded)
    assert re.fullmatch(r"\d{3} fork\n", shared)
    assert kept == "snapshot True\nTrue\n"


def test_the_cache_pages_example_runs_as_it_stands() -> None:
    """In a process of its own, which loads nothing of the daemon or the client."""
    (example,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "caches.md").read_text(), re.DOTALL)
    check = """
import sys
assert not any(name.startswith(("stateroom.daemon", "stateroom.client")) for name in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", example + check], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    first, last = done.stdout.splitlines()
    assert first == "(6, 5)"
    assert last.startswith("(3,) [Kind(kind='full', scheme='affine8', layers=2)]")


def test_the_python_page_names_what_there_is() -> None:
    page = (ROOT / "docs" / "python.md").read_text()
    owners = {"room": Room, "session": Session, "stream": TokenStream}
    for owner, name in re.findall(r"`(room|session|stream)\.(\w+)", page):
        assert hasattr(owners[owner], name), f"{owner}.{name}"
    for name in re.findall(r"`([A-Z]\w+)`", page):
        assert hasattr(stateroom.client, name) or hasattr(errors, name), name


def test_links_lead_somewhere() -> None:
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]:
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_the_commands_shown_exist() -> None:
    command = [sys.executable, "-m", "stateroom.daemon.cli", "--help"]
    known = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    listed = set(re.findall(r"^│ (\w+) ", known, re.MULTILINE))
    shown = set(re.findall(r"^stateroom (\w+)", README, re.MULTILINE)) | set(
        re.findall(r"`stateroom (\w+)", README)
    )
    assert len(shown) >= 4
    assert shown - listed <= {"service"}  # named as missing
    targets = set(re.findall(r"^(\w+):.*## ", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"make (\w+)", README)) <= targets
