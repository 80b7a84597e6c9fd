"""A worker without a model, to provoke what a real one does rarely: death, silence, refusal, floods.

It speaks `daemon/link.py` as a real worker does. `--model` is its script: `key=value` pairs split by commas.
    step_s        pause between two tokens of a decode (default 0.002)
    chunk_s       pause between two chunks of a prefill of CHUNK tokens (default 0.002)
    load_s        pause before `Ready` (default 0)
    fail          `Failed` for good instead of `Ready`; `fail=soon` for one that may pass
    say           writes a line, a log entry and a line too long to stderr
    text          length of the text of each token (default 1)
    verify        the error that a `verify` finds, or `slow`: it finds nothing until it is cancelled
    kv            bytes of KV that it holds, less where its budget says so (default 0)
    weights       bytes of its weights (default 0)
    save_s        pause before a save, park, restore or import (default 0)
    after_save    `die`: it is killed when a save is on disk and not answered; once
    mute          it tells nothing of what it remembers
    waits         what each of its requests waits for, as its pulses say, with 7 of 9 tokens done
Token ids that are orders, when a prefill meets them:
    DIE           the process is killed
    HANG          it does nothing more, not even pulse
    BABBLE        it sends a frame that makes no sense
    STRANGE       it would not take over a session that has this
    MORE          it asks for a budget larger by MORE_BYTES
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, cast

import zmq

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.daemon.scripted_disk import Disk

from stateroom.caches.snapshots.refusals import Corrupt, Mismatch, Missing
from stateroom.client.errors import StateroomError, Unsupported
from stateroom.client.protocol import (
    Body,
    Caps,
    Close,
    CloseResult,
    Decode,
    DecodeResult,
    ErrorBody,
    Fork,
    ForkResult,
    Import,
    ImportResult,
    KindCaps,
    LengthResult,
    ModelInfo,
    Open,
    OpenResult,
    Park,
    ParkResult,
    Prefill,
    Progress,
    Publish,
    PublishResult,
    ReadTokens,
    Receipt,
    Restore,
    Save,
    SaveResult,
    Score,
    ScoreResult,
    SnapshotInfo,
    Sync,
    TokenEvent,
    TokensResult,
    Trim,
    Unpublish,
    Usage,
    Verify,
    VerifyResult,
    Waiting,
)
from stateroom.daemon.link import (
    Adopt,
    Answer,
    Budget,
    CancelCommand,
    Command,
    Discard,
    Doing,
    Failed,
    Journal,
    Journals,
    Mark,
    Pulse,
    Ready,
    Recall,
    Recorded,
    Shelved,
    Short,
    Stop,
    Within,
    decode_to_worker,
    encode_from_worker,
)

DIE, HANG, BABBLE, MORE = 666_001, 666_002, 666_003, 666_004
STRANGE = 666_009
MORE_BYTES = 10_000_000
CHUNK = 64
CONTEXT = 100_000
KINDS = [KindCaps(kind="full", scheme="dense", layers=2)]
CAPS = Caps(
    trim="any", trim_floor=0, fork="copy", batch=True, speculative=False, kv=KINDS, bytes_per_token=10
)  # fmt: skip


class Worker:
    def __init__(self, endpoint: str, model_id: str, script: dict[str, str], state: str | None) -> None:
        self.socket = zmq.Context().socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 500)
        self.socket.connect(endpoint)
        self.model_id, self.script = model_id, script
        self.sessions: dict[str, list[int]] = {}
        self.adopted = 0
        self.jobs: deque[tuple[int, Iterator[None]]] = deque()
        self.cancelled: set[int] = set()
        self.stopping = False
        self.pulse_s = 0.0
        self.budget = 0
        self.disk = None if state is None else Disk(state, model_id)
        self.snapshots: dict[str, str] = {}  # the automatic one of each session

    def pause(self, name: str, default: float) -> float:
        return float(self.script.get(name, default))

    def send(self, message: object) -> None:
        self.socket.send(encode_from_worker(message))  # type: ignore[arg-type]

    def answer(self, rid: int, body: Body, session: str | None = None, keep: int = 0) -> None:
        journal = None
        if session is not None and session in self.sessions:
            tokens = self.sessions[session]
            nbytes = 10 * len(tokens)
            journal = Journal(session, keep, tokens[keep:], private_bytes=nbytes, live_bytes=nbytes)
        self.send(Answer(rid, body, journal))

    def run(self) -> int:
        if "say" in self.script:
            sys.stderr.write('plain words\n{"event": "an entry"}\n' + "x" * 20_000)
            sys.stderr.flush()
        time.sleep(self.pause("load_s", 0.0))
        if "fail" in self.script:
            self.send(Failed("the script says so", permanent=self.script["fail"] != "soon"))
            return 1
        model = ModelInfo(id=self.model_id, loaded=True, context=CONTEXT, vocab=1000)
        facts = {"device": "none", "weight_bytes": int(self.script.get("weights", 0))}
        kept = [] if self.disk is None else self.disk.kept()
        self.send(Ready(model, facts, kept, [] if self.disk is None else list(self.disk.library.broken)))
        poller = zmq.Poller()
        poller.register(self.socket, zmq.POLLIN)
        poller.register(sys.stdin.fileno(), zmq.POLLIN)
        while not (self.stopping and not self.jobs):
            ready = dict(poller.poll(0 if self.jobs else 200))
            if sys.stdin.fileno() in ready and not os.read(sys.stdin.fileno(), 1):
                return 0  # the broker is gone
            while self.socket.EVENTS & zmq.POLLIN:
                self.take(decode_to_worker(self.socket.recv()))
            for _ in range(len(self.jobs)):
                rid, job = self.jobs.popleft()
                try:
                    next(job)
                    self.jobs.append((rid, job))
                except StopIteration:
                    self.cancelled.discard(rid)
            if time.monotonic() - self.pulse_s > 1.0:
                self.pulse()
        return 0

    def pulse(self) -> None:
        self.pulse_s = time.monotonic()
        gauges = {"sessions": len(self.sessions), "adopted": self.adopted, "kv_budget_bytes": self.budget}
        gauges["kv_bytes"] = min(int(self.script.get("kv", 0)), self.budget)
        waiting = cast("Waiting | None", self.script.get("waits"))
        doing = [] if waiting is None else [Doing(rid, waiting, 7, 9) for rid, _ in self.jobs]
        self.send(Pulse(gauges, doing))

    def take(self, message: object) -> None:
        if isinstance(message, Command):
            on_disk = isinstance(message.request, Save | Park | Restore | Import)
            job = self.disk_job(message) if on_disk else self.job(message)
            if isinstance(message.request, ReadTokens | Close | Unpublish):
                next(job, None)  # at once, as the engine does: a read comes before the close sent after it
            else:
                self.jobs.append((message.rid, job))
        elif isinstance(message, Adopt):
            if STRANGE in message.tokens:
                error = ErrorBody(code="invalid", message="A token is none of the model's.", field="tokens")
                self.answer(message.rid, error)
                return
            self.adopted += 1
            self.sessions[message.session] = list(message.tokens)
            receipt = Receipt(reused=0, why="adopted")
            self.answer(message.rid, LengthResult(length=len(message.tokens), receipt=receipt))
        elif isinstance(message, Recall):
            if "mute" not in self.script:
                now_ms = time.monotonic() * 1000.0
                self.send(Recorded(message.rid, [Mark("turn", now_ms, 0.0, {"rid": message.rid})]))
        elif isinstance(message, Discard):
            self.discard(message.snapshots)
        elif isinstance(message, CancelCommand):
            self.cancelled.add(message.rid)
        elif isinstance(message, Budget):
            self.budget = message.nbytes
            self.send(Within(message.nbytes))
            self.pulse()
        elif isinstance(message, Stop):
            self.stopping = True
            self.cancelled.update(rid for rid, _ in self.jobs)

    def finish(self, rid: int) -> Literal["done", "cancelled"]:
        return "cancelled" if rid in self.cancelled else "done"

    def fill(self, rid: int, session: str, tokens: list[int], progress: bool) -> Iterator[None]:
        for start in range(0, len(tokens), CHUNK):
            chunk = tokens[start : start + CHUNK]
            if DIE in chunk:
                os.kill(os.getpid(), signal.SIGKILL)
            if HANG in chunk:
                time.sleep(600)
            if BABBLE in chunk:
                self.socket.send(b"\x81\xa4link\xa5hello")
            if MORE in chunk:
                self.send(Short(MORE_BYTES))
            if rid in self.cancelled:
                return
            time.sleep(self.pause("chunk_s", 0.002))
            self.sessions[session].extend(chunk)
            if progress:
                done = min(start + CHUNK, len(tokens))
                self.answer(
                    rid,
                    Progress(done=done, total=len(tokens)),
                    session,
                    len(self.sessions[session]) - len(chunk),
                )
            yield

    def job(self, command: Command) -> Iterator[None]:
        rid, request, session = command.rid, command.request, command.session
        assert session is not None
        if isinstance(request, Open):
            self.sessions[session] = []
            yield from self.fill(rid, session, request.tokens or [], False)
            length = len(self.sessions[session])
            finish = self.finish(rid)
            self.answer(
                rid,
                OpenResult(
                    session=session,
                    length=length,
                    caps=CAPS,
                    receipt=Receipt(prefilled=length),
                    finish=finish,
                ),
                session,
            )
            return
        if session not in self.sessions:
            self.answer(rid, ErrorBody(code="internal", message="the worker was not told of this session"))
            return
        tokens = self.sessions[session]
        before = len(tokens)
        if isinstance(request, Prefill | Sync):
            wanted = request.tokens or []
            kept = before
            if isinstance(request, Sync):
                kept = next(
                    (i for i, (a, b) in enumerate(zip(tokens, wanted, strict=False)) if a != b),
                    min(before, len(wanted)),
                )
                del tokens[kept:]
                wanted = wanted[kept:]
            yield from self.fill(rid, session, wanted, isinstance(request, Prefill) and request.progress)
            finish = self.finish(rid)
            receipt = Receipt(
                reused=kept,
                source="session" if kept else "none",
                prefilled=len(tokens) - kept,
                trimmed=before - kept,
            )
            self.answer(rid, LengthResult(length=len(tokens), receipt=receipt, finish=finish), session, kept)
        elif isinstance(request, Decode):
            yield from self.decode(rid, session, request, before if command.base is None else command.base)
        elif isinstance(request, Trim):
            del tokens[request.to if request.to is not None else before - (request.count or 0) :]
            self.answer(
                rid,
                LengthResult(length=len(tokens), receipt=Receipt(trimmed=before - len(tokens))),
                session,
                len(tokens),
            )
        elif isinstance(request, Publish):
            (trunk,) = command.children
            self.sessions[trunk] = list(tokens)
            published = PublishResult(
                trunk=trunk, name=request.name, length=before, shared_bytes=0, copied_bytes=0
            )
            self.answer(rid, published)
        elif isinstance(request, Fork):
            for child in command.children:
                self.sessions[child] = list(tokens)
            self.answer(
                rid, ForkResult(sessions=command.children, length=before, shared_bytes=0, copied_bytes=0)
            )
        elif isinstance(request, Verify):
            slow = self.script.get("verify") == "slow"
            while slow and rid not in self.cancelled:
                yield
            error = 0.0 if slow else self.pause("verify", 0.0)
            verified = VerifyResult(
                max_abs_logit_error=error,
                max_abs_logit=1.0,
                argmax_agree=True,
                length=before,
                bound=0.1,
                finish=self.finish(rid),
            )
            self.answer(rid, verified)
        elif isinstance(request, ReadTokens):
            self.answer(rid, TokensResult(tokens=tokens[request.start or 0 : request.to], text=""))
        elif isinstance(request, Score):
            self.answer(rid, ScoreResult(tokens=request.tokens or [], logprobs=[-1.0], total=-1.0))
        elif isinstance(request, Close | Unpublish):
            del self.sessions[session]
            if session in self.snapshots:
                self.discard([self.snapshots.pop(session)])
            self.answer(rid, CloseResult(freed_bytes=10 * before))

    def discard(self, snapshots: list[str]) -> None:
        assert self.disk is not None
        self.disk.discard(snapshots)
        self.send(Shelved(gone=snapshots))

    def disk_job(self, command: Command) -> Iterator[None]:
        rid, request = command.rid, command.request
        until_s = time.monotonic() + self.pause("save_s", 0.0)
        while time.monotonic() < until_s:
            yield
        try:
            self.on_disk(command)
        except (StateroomError, Corrupt, Missing, Mismatch) as error:
            code: Any = getattr(error, "code", type(error).__name__.lower().replace("missing", "not_found"))
            self.answer(rid, ErrorBody(code=code, message=f"{request.op}: {error}"))

    def on_disk(self, command: Command) -> None:
        rid, request, disk, session = command.rid, command.request, self.disk, command.session or ""
        if disk is None:
            raise Unsupported("nothing is kept here")
        if isinstance(request, Import):
            kept = disk.take_in(command.snapshot or "", command.owner, request.snapshot)
            self.send(Shelved([kept]))
            info = SnapshotInfo(snapshot=request.snapshot, length=kept.length, bytes=kept.nbytes)
            self.answer(rid, ImportResult(received=request.total, snapshot=info))
        elif isinstance(request, Restore):
            self.sessions[session] = disk.read(command.snapshot or "")
            length = len(self.sessions[session])
            receipt = Receipt(reused=length, source="snapshot")
            self.answer(rid, OpenResult(session=session, length=length, caps=CAPS, receipt=receipt), session)
        elif isinstance(request, Save):
            tokens = self.sessions[session]
            kept, gone = disk.write(tokens, command.owner, session, request.snapshot, command.snapshot)
            self.die_once()
            self.send(Shelved([kept], gone))
            self.answer(
                rid, SaveResult(snapshot=request.snapshot, tokens=len(tokens), bytes=kept.nbytes, checksum="")
            )
        elif isinstance(request, Park):
            tokens = self.sessions[session]
            kept, gone = disk.write(tokens, command.owner, session, None, self.snapshots.get(session))
            self.snapshots[session] = kept.id
            self.send(Shelved([kept], gone))
            result = ParkResult(
                tier="disk", length=len(tokens), bytes=kept.nbytes, freed_bytes=10 * len(tokens)
            )
            journal = Journal(session, len(tokens), [], resident=False, snapshot=kept.id)
            self.send(Answer(rid, result, journal))

    def die_once(self) -> None:
        assert self.disk is not None
        mark = self.disk.library.folder / "died"
        if self.script.get("after_save") == "die" and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    def decode(self, rid: int, session: str, request: Decode, base: int) -> Iterator[None]:
        tokens = self.sessions[session]
        made = tokens[base:]  # what a worker before this one drew
        text = "x" * int(self.script.get("text", 1))
        finish: Literal["length", "cancelled"] = "length"
        while len(made) < request.max_tokens:
            if rid in self.cancelled:
                finish = "cancelled"
                break
            time.sleep(self.pause("step_s", 0.002))
            token = len(tokens) % 1000
            tokens.append(token)
            made.append(token)
            if request.stream:
                self.answer(rid, TokenEvent(tokens=[token], text=text), session, len(tokens) - 1)
            else:
                journal = Journal(session, len(tokens) - 1, [token], private_bytes=10 * len(tokens))
                self.send(Journals([journal]))
            yield
        usage = Usage(decoded=len(made), prefilled=1)
        result = DecodeResult(
            finish=finish, tokens=made, text=text * len(made), length=len(tokens), usage=usage
        )
        keep = len(tokens) if request.stream else base
        self.answer(rid, result, session, keep)


def main() -> int:
    parser = argparse.ArgumentParser()
    for name in ("--endpoint", "--model", "--model-id", "--state", "--kv-budget", "--log", "--log-level"):
        parser.add_argument(name)
    parser.add_argument("--no-record", action="store_true")
    arguments = parser.parse_args()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    script = dict(pair.partition("=")[::2] for pair in arguments.model.split(",") if pair)
    return Worker(arguments.endpoint, arguments.model_id, script, arguments.state).run()


if __name__ == "__main__":
    sys.exit(main())
