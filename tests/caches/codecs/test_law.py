"""What packed rows rely on: a token's planes are its own, zeros are zeros, and nothing wrong turns right."""

from __future__ import annotations

from itertools import pairwise

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.caches.codecs.kinds import DTYPES, KINDS, Kind, codec_of, fields, octets

from stateroom.caches.codecs.codec import Codec

kinds = st.sampled_from(KINDS)
dtypes = st.sampled_from(DTYPES)


def encoded(codec: Codec, given: mx.array) -> list[np.ndarray]:
    planes = codec.encode(given)
    assert len(planes) == codec.planes
    assert {plane.shape[:3] for plane in planes} == {given.shape[:3]}
    return [octets(plane) for plane in planes]


@settings(max_examples=80, deadline=None)
@given(data=st.data(), kind=kinds, dtype=dtypes)
def test_any_chunking_gives_the_same_bytes(data: st.DataObject, kind: Kind, dtype: mx.Dtype) -> None:
    """Tokens, rows and heads alone, and in an order of memory that models give them."""
    rows, heads, count = (
        data.draw(st.sampled_from(sizes)) for sizes in ([1, 2, 3], [1, 3, 5], [1, 2, 7, 31])
    )
    codec, given_ = codec_of(kind, dtype), fields((rows, heads, count, kind[1]), dtype)
    whole = encoded(codec, given_)
    cuts = sorted(data.draw(st.lists(st.integers(0, count), max_size=4)))
    edges = [0, *cuts, count]
    parts = [encoded(codec, given_[:, :, a:b]) for a, b in pairwise(edges) if a < b]
    for plane, pieces in zip(whole, zip(*parts, strict=True), strict=True):
        np.testing.assert_array_equal(np.concatenate(pieces, axis=2), plane)

    row, head, token = (data.draw(st.integers(0, size - 1)) for size in (rows, heads, count))
    one = encoded(codec, given_[row : row + 1, head : head + 1, token : token + 1])
    for plane, alone in zip(whole, one, strict=True):
        np.testing.assert_array_equal(alone[0, 0, 0], plane[row, head, token])

    by_token = mx.contiguous(given_.swapaxes(1, 2)).swapaxes(1, 2)
    for plane, other in zip(whole, encoded(codec, by_token), strict=True):
        np.testing.assert_array_equal(other, plane)


@settings(max_examples=40, deadline=None)
@given(kind=kinds, dtype=dtypes, start=st.integers(0, 6), end=st.integers(7, 13), pad=st.integers(1, 5))
def test_planes_are_cut_and_padded(kind: Kind, dtype: mx.Dtype, start: int, end: int, pad: int) -> None:
    """What is decoded is that of the tokens that are left, and zeros in front."""
    codec, given_ = codec_of(kind, dtype), fields((2, 3, 13, kind[1]), dtype)
    planes = codec.encode(given_)
    cut = [mx.pad(plane[1:, :, start:end], [(0, 0), (0, 0), (pad, 0), (0, 0)]) for plane in planes]
    found = codec.decode(cut)
    assert found.dtype == dtype
    assert found.shape == (1, 3, pad + end - start, kind[1])
    assert not mx.any(found[:, :, :pad]).item()
    whole = codec.decode(planes)
    np.testing.assert_array_equal(octets(found[:, :, pad:]), octets(whole[1:, :, start:end]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_zero_stays_zero(kind: Kind, dtype: mx.Dtype) -> None:
    codec = codec_of(kind, dtype)
    nothing = mx.zeros((1, 2, 3, kind[1]), dtype)
    assert not mx.any(codec.decode(codec.encode(nothing))).item()
    assert not mx.any(codec.decode([mx.zeros_like(plane) for plane in codec.encode(nothing)])).item()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("spoiled", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_spoiled_stays_spoiled(kind: Kind, spoiled: float, dtype: mx.Dtype) -> None:
    """The field itself, so that a session is seen to be lost; and no other token."""
    codec, sound = codec_of(kind, dtype), fields((1, 2, 3, kind[1]), dtype)
    at = mx.zeros(sound.shape, mx.bool_)
    at[0, 1, 2, 7] = True
    found = codec.decode(codec.encode(mx.where(at, mx.array(spoiled, dtype), sound)))
    assert not mx.isfinite(found[0, 1, 2, 7]).item()
    others = ~mx.any(at, axis=-1, keepdims=True)
    clean = codec.decode(codec.encode(sound))
    assert mx.array_equal(mx.where(others, found, 0), mx.where(others, clean, 0))


def test_signatures() -> None:
    """Equal codecs are equal; any parameter tells two apart."""
    made = [codec_of(kind, dtype) for kind in KINDS for dtype in DTYPES]
    again = [codec_of(kind, dtype) for kind in KINDS for dtype in DTYPES]
    assert made == again
    assert len(set(made)) == len(DTYPES) * (len(KINDS) - 1) + 1  # dense takes any dtype
    assert {codec.name for codec in made} == {name for name, _ in KINDS}
