"""A small peer that speaks the protocol over a real ROUTER, for the client's tests.

It serves a toy: a session is a list of bytes, a token is a byte, and a decode continues with the letter
after the last. What it does with an operation can be replaced (`on`), to be late, silent or wrong;
frames it sends may come from any thread.
"""

from __future__ import annotations

import queue
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import msgpack
import zmq

CAPS = {
    "trim": "any",
    "trim_floor": 0,
    "fork": "copy",
    "batch": True,
    "speculative": False,
    "kv": [{"kind": "full", "scheme": "dense", "layers": 2}],
    "bytes_per_token": 128.0,
}
PATIENCE_S = 5.0


class Call:
    """One request, as the peer sees it, and what it answers."""

    def __init__(self, peer: Peer, sender: bytes, wire: dict[str, Any]) -> None:
        self.peer = peer
        self.sender = sender
        self.id: int = wire["id"]
        self.op: str = wire["op"]
        self.args = {name: value for name, value in wire.items() if name not in ("v", "id", "op")}
        self.seq = 0
        self.cancelled = threading.Event()
        self.ended = False

    def reply(self, kind: str, final: bool = False, **fields: Any) -> None:
        self.ended = self.ended or final
        self.raw({"v": 1, "id": self.id, "seq": self.seq, "kind": kind, "final": final, **fields})
        self.seq += 1

    def result(self, **fields: Any) -> None:
        self.reply("result", True, **fields)

    def error(self, code: str, message: str = "No.", **details: Any) -> None:
        body = {"code": code, "message": message, "field": None, "details": details}
        self.reply("error", True, error=body)

    def token(self, token: int) -> None:
        self.reply("token", tokens=[token], text=chr(token))

    def raw(self, message: Any) -> None:
        frame = message if isinstance(message, bytes) else msgpack.packb(message)
        self.peer.send(self.sender, frame)


Handler = Callable[[Call], None]


class Peer:
    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint
        self.on: dict[str, Handler] = {}
        self.calls: list[Call] = []
        self.sessions: dict[str, bytearray] = {}
        self.names: dict[str, str] = {}
        self.trunks: dict[str, tuple[str, bytes]] = {}
        self.snapshots: dict[str, bytes] = {}
        self.arriving: dict[str, bytes] = {}  # of files that are being imported
        self.apps: dict[bytes, str] = {}
        self._changed = threading.Condition()
        self._outgoing: queue.SimpleQueue[tuple[bytes, bytes]] = queue.SimpleQueue()
        self._running = False
        self.start()

    # ---------------------------------------------------- life

    def start(self) -> None:
        bound = threading.Event()
        self._running = True
        self._woken, self._waker = socket.socketpair()
        self._waker.setblocking(False)
        self._thread = threading.Thread(target=self._run, args=(bound,))
        self._thread.start()
        assert bound.wait(PATIENCE_S)

    def stop(self) -> None:
        """Goes away, as a daemon that was killed: what is queued is sent, no more."""
        if self._running:
            self._running = False
            self._wake()
            self._thread.join(PATIENCE_S)
            assert not self._thread.is_alive()
            self._woken.close()
            self._waker.close()

    def send(self, to: bytes, frame: bytes) -> None:
        self._outgoing.put((to, frame))
        self._wake()

    def _wake(self) -> None:
        with suppress(BlockingIOError):  # full: it will look anyway
            self._waker.send(b"\0")

    def _run(self, bound: threading.Event) -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        router = context.socket(zmq.ROUTER)
        router.set(zmq.LINGER, 500)
        router.set(zmq.SNDHWM, 0)  # the toy floods, and loses nothing by itself
        router.bind(self.endpoint)
        bound.set()
        while self._running or not self._outgoing.empty():
            ready = dict(zmq.zmq_poll([(router, zmq.POLLIN), (self._woken.fileno(), zmq.POLLIN)], -1))
            if self._woken.fileno() in ready:
                self._woken.recv(4096)
            if router in ready and self._running:
                sender, frame = router.recv_multipart()
                self._take(Call(self, sender, msgpack.unpackb(frame)))
            while not self._outgoing.empty():
                router.send_multipart(self._outgoing.get())
        router.close()
        context.term()

    def _take(self, call: Call) -> None:
        with self._changed:
            self.calls.append(call)
            self._changed.notify_all()
        self.on.get(call.op, getattr(self, "_" + call.op))(call)

    # ---------------------------------------------------- for tests

    def asked(self, op: str) -> list[Call]:
        return [call for call in list(self.calls) if call.op == op]

    def wait_for(self, op: str, nth: int = 1) -> Call:
        """The nth request of an operation, once it has come."""
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.asked(op)) >= nth, PATIENCE_S), f"no {op} came"
        return self.asked(op)[nth - 1]

    # ---------------------------------------------------- the toy

    def _find(self, call: Call, ref: str | None = None) -> bytearray | None:
        ref = ref or call.args["session"]
        found = self.sessions.get(self.names.get(ref, ref))
        if found is None:
            call.error("not_found", f"There is no session {ref}.")
        return found

    def _receipt(self, reused: int, prefilled: int, trimmed: int = 0) -> dict[str, Any]:
        return {"reused": reused, "source": "session", "prefilled": prefilled, "trimmed": trimmed, "ms": 1.0}

    def _hello(self, call: Call) -> None:
        self.apps[call.sender] = call.args.get("app", "default")
        limits = {"max_message_bytes": 1, "max_sessions": 2, "max_tokens_per_request": 3, "max_batch": 4}
        model = {"id": "toy", "loaded": True, "context": 512, "vocab": 256, "kinds": []}
        app = self.apps[call.sender]
        call.result(server="stateroom", version="0", protocol=[1], app=app, models=[model], limits=limits)

    def _open(self, call: Call) -> None:
        content = bytes(call.args.get("tokens") or call.args.get("text", "").encode())
        session = f"session-{len(self.sessions)}"
        if "name" in call.args:
            if call.args["name"] in self.names:
                return call.error("exists", "The name is taken.")
            self.names[call.args["name"]] = session
        self.sessions[session] = bytearray(content)
        receipt = {"receipt": self._receipt(0, len(content))} if content else {}
        return call.result(session=session, length=len(content), caps=CAPS, **receipt)

    def _prefill(self, call: Call) -> None:
        if (tokens := self._find(call)) is not None:
            before, content = len(tokens), call.args.get("text", "").encode()
            tokens += content
            if call.args.get("progress"):
                call.reply("progress", done=len(content) // 2, total=len(content))
            call.result(length=len(tokens), receipt=self._receipt(before, len(content)))

    def _decode(self, call: Call) -> None:
        if (tokens := self._find(call)) is None:
            return
        drawn = [97 + (tokens[-1] - 96 + i) % 26 for i in range(call.args["max_tokens"])]
        tokens += bytes(drawn)
        for token in drawn if call.args.get("stream", True) else ():
            call.token(token)
        self.end_decode(call, drawn, len(tokens), "length")

    def end_decode(self, call: Call, drawn: list[int], length: int, finish: str) -> None:
        usage = {"decoded": len(drawn), "prefilled": 1, "ms": 1.0}
        text = "".join(map(chr, drawn))
        call.result(finish=finish, tokens=drawn, text=text, length=length, usage=usage)

    def _trim(self, call: Call) -> None:
        if (tokens := self._find(call)) is not None:
            before = len(tokens)
            del tokens[call.args["to"] if "to" in call.args else before - call.args["count"] :]
            call.result(length=len(tokens), receipt=self._receipt(len(tokens), 0, before - len(tokens)))

    def _fork(self, call: Call) -> None:
        trunk = self.trunks.get(call.args.get("trunk", ""))
        if "trunk" in call.args and trunk is None:
            return call.error("not_found", "There is no such trunk.")
        if (tokens := trunk[1] if trunk else self._find(call)) is not None:
            children = [f"child-{len(self.sessions) + i}" for i in range(call.args.get("n", 1))]
            self.sessions.update({child: bytearray(tokens) for child in children})
            call.result(sessions=children, length=len(tokens), shared_bytes=0, copied_bytes=9)

    def _publish(self, call: Call) -> None:
        if (tokens := self._find(call)) is not None:
            trunk = f"trunk-{len(self.trunks)}"
            self.trunks[trunk] = (call.args["as"], bytes(tokens))
            told = {"as": call.args["as"], "length": len(tokens)}
            call.result(trunk=trunk, shared_bytes=5, copied_bytes=0, **told)

    def _unpublish(self, call: Call) -> None:
        found = [trunk for trunk, (name, _) in self.trunks.items() if name == call.args["as"]]
        if not found:
            call.error("not_found", "You have published no such trunk.")
        for trunk in found:
            del self.trunks[trunk]
            call.result(freed_bytes=5)

    def _sync(self, call: Call) -> None:
        if (tokens := self._find(call)) is not None:
            wanted = call.args["text"].encode()
            same = next(
                (i for i, pair in enumerate(zip(tokens, wanted, strict=False)) if pair[0] != pair[1]), None
            )
            kept = min(len(tokens), len(wanted)) if same is None else same
            trimmed = len(tokens) - kept
            tokens[:] = wanted
            call.result(length=len(wanted), receipt=self._receipt(kept, len(wanted) - kept, trimmed))

    def _tokens(self, call: Call) -> None:
        if (tokens := self._find(call)) is not None:
            part = list(tokens[call.args.get("from", 0) : call.args.get("to")])
            call.result(tokens=part, text="".join(map(chr, part)))

    def _score(self, call: Call) -> None:
        content = list(call.args.get("tokens") or call.args["text"].encode())
        call.result(tokens=content, logprobs=[-1.0] * len(content), total=-float(len(content)))

    def _lease(self, call: Call) -> None:
        if self._find(call) is not None:
            call.result(expires_in_s=call.args.get("ttl_s"))

    def _park(self, call: Call) -> None:
        if (tokens := self._find(call)) is not None:
            call.result(tier="disk", length=len(tokens), bytes=2 * len(tokens), freed_bytes=len(tokens))

    def _save(self, call: Call) -> None:
        if (tokens := self._find(call)) is not None:
            name = call.args["snapshot"]
            if name in self.snapshots and not call.args.get("replace"):
                return call.error("exists", "You have a snapshot of that name.")
            self.snapshots[name] = bytes(tokens)
            call.result(snapshot=name, tokens=len(tokens), bytes=2 * len(tokens), checksum="c0ffee")
        return None

    def _kept(self, call: Call) -> bytes | None:
        kept = self.snapshots.get(call.args["snapshot"])
        if kept is None:
            call.error("not_found", "You have no such snapshot.")
        return kept

    def _restore(self, call: Call) -> None:
        if (kept := self._kept(call)) is not None:
            session = f"session-{len(self.sessions)}"
            self.sessions[session] = bytearray(kept)
            receipt = self._receipt(len(kept), 0) | {"source": "snapshot"}
            call.result(session=session, length=len(kept), caps=CAPS, receipt=receipt)

    def _snapshots(self, call: Call) -> None:
        kept = [{"snapshot": name, "length": len(held)} for name, held in self.snapshots.items()]
        call.result(snapshots=kept, used_bytes=99)

    def _forget(self, call: Call) -> None:
        if (kept := self._kept(call)) is not None:
            del self.snapshots[call.args["snapshot"]]
            call.result(freed_bytes=len(kept))

    def _export(self, call: Call) -> None:
        """In pieces of four bytes."""
        if (kept := self._kept(call)) is not None:
            begin = call.args.get("offset", 0)
            end = min(begin + 4, len(kept))
            following = {"next": end} if end < len(kept) else {}
            call.result(data=kept[begin:end], total=len(kept), **following)

    def _import(self, call: Call) -> None:
        name, arrived = call.args["snapshot"], self.arriving.pop(call.args["snapshot"], b"")
        if name in self.snapshots:
            return call.error("exists", "You have a snapshot of that name.")
        assert call.args.get("offset", 0) == len(arrived)
        arrived += call.args["data"]
        if len(arrived) < call.args["total"]:
            self.arriving[name] = arrived
            return call.result(received=len(arrived))
        if b"!" in arrived:
            return call.error("corrupt", "A byte of it isn't as it was written.")
        self.snapshots[name] = arrived
        info = {"snapshot": name, "length": len(arrived)}
        return call.result(received=len(arrived), snapshot=info)

    def _verify(self, call: Call) -> None:
        if "session" in call.args and self._find(call) is None:
            return
        call.result(max_abs_logit_error=0.25, max_abs_logit=9.0, argmax_agree=True, length=3)

    def _info(self, call: Call) -> None:
        if (tokens := self._find(call)) is not None:
            ref = call.args["session"]
            name = ref if ref in self.names else None
            call.result(
                session=self.names.get(ref, ref), name=name, length=len(tokens), **{"class": "background"}
            )

    def _list(self, call: Call) -> None:
        trunks = [{"as": name, "trunk": trunk} for trunk, (name, _) in self.trunks.items()]
        sessions = [{"session": id, "length": len(tokens)} for id, tokens in self.sessions.items()]
        call.result(sessions=sessions, trunks=trunks)

    def _close(self, call: Call) -> None:
        if self._find(call) is not None:
            del self.sessions[self.names.get(call.args["session"], call.args["session"])]
            call.result(freed_bytes=7)

    def _cancel(self, call: Call) -> None:
        for other in self.calls:
            by_id = other.sender == call.sender and other.id == call.args.get("request")
            by_session = other is not call and other.args.get("session") == call.args.get("session", "")
            if not other.ended and (by_id or by_session):
                other.cancelled.set()
                call.result(cancelled=True)
                self.on.get("cancelled", lambda other: None)(other)
                return
        call.result(cancelled=False)

    def _stats(self, call: Call) -> None:
        call.result(counters={"requests": len(self.calls)}, gauges={"rows": 0.0}, models=[])

    def _watch(self, call: Call) -> None:
        call.reply("event", event="opened", session="session-0")

    def _load(self, call: Call) -> None:
        call.result(model={"id": call.args["model"], "loaded": True})

    def _unload(self, call: Call) -> None:
        call.result(model={"id": call.args["model"], "loaded": False})


def wait_until(condition: Callable[[], bool]) -> None:
    """Waits for what another thread or process does."""
    until = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < until, "it did not come about"
        time.sleep(0.005)


def endless(call: Call) -> None:
    """A decode that draws three tokens, and then no more until it is cancelled."""
    for token in b"abc":
        call.token(token)


def end_as_cancelled(call: Call) -> None:
    call.peer.end_decode(call, list(b"abcd"), 9, "cancelled")
