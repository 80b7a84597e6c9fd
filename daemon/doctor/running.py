"""A daemon that runs: version, memory, engines, and whether sessions are what their tokens give."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import version

from stateroom.client import Room, connect
from stateroom.client.errors import ClientError, NoDaemon, NotFound, RequestTimeout, StateroomError
from stateroom.client.paths import runtime_dir
from stateroom.client.protocol import VerifyResult
from stateroom.daemon.commands.sessions import verdict
from stateroom.daemon.doctor.check import Check, noted, passed, problem
from stateroom.daemon.doctor.places import endpoint
from stateroom.daemon.doctor.service import waits_for_a_client
from stateroom.daemon.lock import LOCK_NAME, holder

FACTS = ("architecture", "device", "dtype", "blas")  # of a worker, worth a line
HELLO_S = 2.0
LAG_S = 5.0  # what is to be kept is on disk within 1 s
SAMPLE = 3  # sessions that are verified
VERIFY_S = 60.0  # for each of them: they give way to everything else

REPORT = "The daemon's log names it: close it, and report what you know of it."
ANEW = "stateroom service restart (or stateroom stop; stateroom serve): sessions are kept"


def daemon() -> Iterator[Check]:
    """Whether a daemon answers, how its engines are, and whether sessions are what their tokens give."""
    if not_started():
        yield noted("daemon", "none runs; the service manager listens, and the first client starts it")
        return
    try:
        with connect(endpoint(), app="doctor", timeout_s=HELLO_S) as room:
            hello, stats = room.hello(), room.stats()
            verified = list(sample(room))
    except NoDaemon as error:
        # One that holds the lock is there and doesn't answer.
        hangs = holder(runtime_dir() / LOCK_NAME)
        yield (
            noted("daemon", str(error))
            if hangs is None
            else problem(
                "daemon",
                f"process {hangs.pid} is there and doesn't answer",
                f"kill {hangs.pid}; stateroom serve",
            )
        )
        return
    except (ClientError, StateroomError) as error:
        yield problem("daemon", str(error))
        return
    yield age(hello.server, hello.version)
    if "kv_held_bytes" in stats.gauges:  # one of another version may tell other figures
        yield kv(stats.gauges)
    if "journal_pending" in stats.gauges:  # else it was told to keep nothing
        yield journal(stats.gauges)
    for model in stats.models:
        finding = f"{model['id']} is {model['state']}"
        if model["failure"]:
            yield problem("engine", f"{finding}: {model['failure']}", "Mend it, then restart the daemon.")
        else:
            facts = ", ".join(f"{name} {model['facts'][name]}" for name in FACTS if name in model["facts"])
            yield passed("engine", f"{finding}{f' ({facts})' if facts else ''}")
    yield from verified


def not_started() -> bool:
    """Nothing here starts a daemon, not by looking for it either."""
    return holder(runtime_dir() / LOCK_NAME) is None and waits_for_a_client()


def age(server: str, running: str) -> Check:
    """Whether what runs is what is installed: an upgrade changes nothing until the daemon starts again."""
    installed = version("stateroom")
    if running != installed:
        return problem("daemon", f"{server} {running} answers, and {installed} is installed", ANEW)
    return passed("daemon", f"{server} {running} answers")


def kv(gauges: dict[str, float]) -> Check:
    """The KV that sessions may take, what they take, and whether the machine is short of memory."""
    held, granted, total = (
        f"{gauges[name] / 2**30:.1f}" for name in ("kv_held_bytes", "kv_granted_bytes", "kv_budget_bytes")
    )
    finding = f"{held} of {total} GiB of KV held, {granted} granted to engines"
    if not gauges["memory_pressure"]:
        return passed("kv", finding)
    return noted("kv", f"{finding}; the machine is short of memory", "Close other programs.")


def journal(gauges: dict[str, float]) -> Check:
    """Whether what clients were told is on disk, or waits for it."""
    waiting, lag_s = int(gauges["journal_pending"]), gauges["journal_lag_s"]
    if lag_s < LAG_S:
        return passed("journal", "what clients were told is on disk")
    finding = f"{waiting} of its records could not be written for {lag_s:.0f} s"
    return problem("journal", finding, "See `stateroom logs`; if the disk is full, free some.")


def sample(room: Room) -> Iterator[Check]:
    """Verifies some sessions, whosever they are: those that were verified longest ago."""
    found: list[VerifyResult] = []
    resident = int(room.stats().gauges["sessions_resident"])
    try:
        while len(found) < min(SAMPLE, resident):
            found.append(room.verify(timeout_s=VERIFY_S))
    except NotFound:
        pass  # the others have something to do
    except (StateroomError, RequestTimeout) as error:
        yield noted("sessions", f"one could not be verified: {error}")
    for result in found:
        if not result.healthy:
            yield problem("sessions", f"one isn't what its tokens give: {verdict(result)}", REPORT)
    if found and all(result.healthy for result in found):
        yield passed("sessions", f"{len(found)} computed again: the same as stored")
    elif not found:
        yield passed("sessions", f"{resident} have KV on the device{', all in use' if resident else ''}")
