"""Another user of this machine at the sockets: refused, whatever the modes of files say."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from tests.daemon.rig import Rig

NOBODY = 65_534
ANSWERED, REFUSED = "answered", "refused"
FOREIGN = "NOBODY needs a process that may become another user: run as root, as CI does"

# Says hello over a bare DEALER, whose monitor tells how it ends. What it imports is read before it becomes
# another user: an interpreter below /root is nobody's to read.
VISITOR = """
import os
import sys
import zmq
import zmq.utils.monitor
user = int(sys.argv[3])
os.setgroups([])
os.setresgid(user, user, user)
os.setresuid(user, user, user)
context = zmq.Context()
dealer = context.socket(zmq.DEALER)
dealer.set(zmq.LINGER, 0)
dealer.set(zmq.RECONNECT_IVL, 100_000)
monitor = dealer.get_monitor_socket(zmq.EVENT_DISCONNECTED | zmq.EVENT_CONNECT_RETRIED | zmq.EVENT_CLOSED
                                    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL)
dealer.connect(sys.argv[1])
dealer.send(bytes.fromhex(sys.argv[2]))
poller = zmq.Poller()
poller.register(dealer, zmq.POLLIN)
poller.register(monitor, zmq.POLLIN)
ready = dict(poller.poll(20_000))
print("answered" if dealer in ready else "refused" if monitor in ready else "silence")
"""
HELLO = "83a17601a2696401a26f70a568656c6c6f"  # {"v": 1, "id": 1, "op": "hello"}


def visit(endpoint: str, user: int) -> str:
    done = subprocess.run(
        [sys.executable, "-c", VISITOR, endpoint, HELLO, str(user)],
        cwd="/",
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )
    return done.stdout.strip()


@pytest.mark.skipif(os.getuid() != 0, reason=FOREIGN)
def test_another_user_is_refused_though_the_modes_let_him_in(rig: Rig) -> None:
    """B63: directory and sockets opened on purpose, so that it is the filter that refuses."""
    rig.until(lambda broker: any(engine.ready for engine in broker.supervisor.engines))
    rig.folder.chmod(0o755)
    (link,) = rig.folder.glob("engine-*.sock")
    public = rig.folder / "stateroom.sock"
    for path in (public, link):
        path.chmod(0o666)
    assert rig.look(lambda broker: broker.own_user_only)
    assert visit(rig.endpoint, os.getuid()) == ANSWERED
    assert visit(rig.endpoint, NOBODY) == REFUSED
    assert visit(f"ipc://{link}", NOBODY) == REFUSED
    client = rig.client()
    assert client.ask("stats")["gauges"]["engines_ready"] == 1  # its worker is none the worse for it
    client.close()
