"""What broker and worker say to each other, at sizes that no client may send."""

from __future__ import annotations

from dataclasses import replace

from stateroom.client.limits import MESSAGE_BYTES_MAX
from stateroom.client.protocol import LeaseResult, ModelInfo, TokensResult, Verify
from stateroom.daemon.link import (
    Adopt,
    Answer,
    Budget,
    CancelCommand,
    Command,
    Discard,
    Failed,
    Journal,
    Journals,
    Kept,
    Part,
    Pulse,
    Ready,
    Shelved,
    Short,
    Stop,
    Within,
    decode_from_worker,
    decode_to_worker,
    encode_from_worker,
    encode_to_worker,
)


def test_answers_and_adoptions_may_be_larger_than_any_request() -> None:
    """One that could not be read would cost the worker its life, and other sessions their requests."""
    answer = Answer(7, TokensResult(tokens=[1, 2, 3], text="x" * (MESSAGE_BYTES_MAX + 1)))
    assert decode_from_worker(encode_from_worker(answer)) == answer
    adopt = Adopt(8, "session", [70_000] * (MESSAGE_BYTES_MAX // 5 + 1))
    assert decode_to_worker(encode_to_worker(adopt)) == adopt


def test_what_changed_without_a_request_arrives_whole() -> None:
    parts = [Part(1, 7, True)]
    changes = [Journal("a", 5, [], private_bytes=9, live_bytes=4, parts=parts, trim_floor=5, checkpoints=[2])]
    assert decode_from_worker(encode_from_worker(Journals(changes))) == Journals(changes)


def test_every_message_between_broker_and_worker_survives_with_nothing_and_with_everything_in_it() -> None:
    """A word that is left out because it is None is None again, with a default or without."""
    automatic = Kept("id", "owner", "session", None, 3, 9, 1)
    named = replace(automatic, name="one")
    model = ModelInfo(id="m", loaded=True)
    for message in (
        Ready(model, {}),
        Ready(model, {"device": "cpu"}, [automatic, named], ["broken"]),
        Shelved([automatic], ["gone"]),
        Shelved(),
        Within(7),
        Short(8),
        Failed("why", permanent=True),
        Pulse({"kv_bytes": 1.5}),
        Answer(1, LeaseResult()),
        Answer(2, LeaseResult(expires_in_s=2.5), Journal("a", 0, [1], snapshot=""), [Journal("b", 0, [])]),
    ):
        assert decode_from_worker(encode_from_worker(message)) == message
    for order in (
        Stop(),
        Stop(2.5),
        Discard(["a"]),
        Budget(9),
        CancelCommand(3),
        Adopt(4, "a", [1], snapshot="s"),
        Command(5, Verify(), "a", snapshot="s", base=0),
        Command(6, Verify(session="a"), "a", ["b"], "owner"),
    ):
        assert decode_to_worker(encode_to_worker(order)) == order


def test_snapshots_arrive_with_and_without_a_name() -> None:
    kept = [Kept("a", "owner", "session", name, 5, 70, 3) for name in (None, "plan")]
    for message in (Shelved(kept, ["b"]), Ready(ModelInfo(id="m", loaded=True), {}, kept, ["c"])):
        assert decode_from_worker(encode_from_worker(message)) == message
