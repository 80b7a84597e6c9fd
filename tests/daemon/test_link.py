"""What broker and worker say to each other, at sizes that no client may send."""

from __future__ import annotations

from stateroom.client.limits import MESSAGE_BYTES_MAX
from stateroom.client.protocol import TokensResult
from stateroom.daemon.link import (
    Adopt,
    Answer,
    Journal,
    Journals,
    Part,
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
