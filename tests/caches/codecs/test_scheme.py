"""Which heads a scheme suits, and what is refused with which words."""

from __future__ import annotations

import mlx.core as mx
import pytest

from stateroom.caches.codecs.affine import Affine
from stateroom.caches.codecs.dense import Dense
from stateroom.caches.codecs.scheme import CannotQuantise, Name, Scheme, codecs_for
from stateroom.caches.codecs.turbo import Turbo


def test_dense_takes_everything() -> None:
    assert codecs_for(Scheme(), 37, 0, mx.float16) == (Dense(), Dense())


@pytest.mark.parametrize(("width", "group"), [(64, 64), (96, 32), (128, 64), (192, 64), (160, 32), (32, 32)])
@pytest.mark.parametrize(("name", "bits"), [("affine8", 8), ("affine4", 4)])
def test_groups_are_chosen_by_width(name: str, bits: int, width: int, group: int) -> None:
    codecs = codecs_for(Scheme(name), width, 256, mx.bfloat16)  # type: ignore[arg-type]
    assert codecs == (Affine(bits, group, mx.bfloat16), Affine(bits, 64, mx.bfloat16))


def test_a_group_that_was_asked_for_is_taken() -> None:
    codecs = codecs_for(Scheme("affine4", group_size=128), 128, 256, mx.float32)
    assert codecs == (Affine(4, 128, mx.float32), Affine(4, 128, mx.float32))


def test_turbo() -> None:
    assert codecs_for(Scheme("turbo"), 512, 64, mx.float16) == (
        Turbo(8, 512, mx.float16),
        Turbo(3, 64, mx.float16),
    )
    keys, values = codecs_for(Scheme("turbo", key_bits=6, value_bits=1), 128, 256, mx.float32)
    assert (keys.name, values.name) == ("turbo6", "turbo1")


@pytest.mark.parametrize(
    ("scheme", "widths", "words"),
    [
        (Scheme("affine4"), (80, 64), "keys of width 80 can't be affine4; they can be dense"),
        (
            Scheme("affine8", group_size=64),
            (64, 96),
            "values of width 96 can't be affine8 in groups of 64; .* affine8 in groups of 32 or affine4",
        ),
        (
            Scheme("affine4", group_size=128),
            (64, 128),
            "keys of width 64 .* dense, affine8 in groups of 32 or 64, affine4 .* 64 or turbo",
        ),
        (
            Scheme("turbo"),
            (192, 128),
            "keys of width 192 can't be turbo; they can be dense, affine8 in groups",
        ),
        (Scheme("turbo"), (128, 72), "values of width 72 can't be turbo; they can be dense$"),
    ],
)
def test_widths_that_do_not_suit(scheme: Scheme, widths: tuple[int, int], words: str) -> None:
    with pytest.raises(CannotQuantise, match=words):
        codecs_for(scheme, *widths, mx.float32)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"name": "affine3"}, "no scheme is called 'affine3'; there are dense, affine8, affine4 and turbo"),
        ({"name": "affine4", "group_size": 16}, "groups of 16: groups are of 32, 64 and 128"),
        ({"name": "dense", "group_size": 64}, "dense has no groups; affine8 and affine4 have"),
        ({"name": "turbo", "group_size": 64}, "turbo has no groups"),
        ({"name": "affine4", "quantise_after": -1}, "quantise_after is -1"),
        ({"name": "turbo", "key_bits": 9}, "9 bits"),
        ({"name": "turbo", "value_bits": 0}, "0 bits"),
    ],
)
def test_what_is_no_scheme(arguments: dict[str, object], words: str) -> None:
    with pytest.raises(CannotQuantise, match=words):
        Scheme(**arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["affine8", "affine4", "turbo"])
def test_what_is_not_stored_is_dense(name: Name) -> None:
    """Some layers keep keys only, and give values without fields."""
    keys, values = codecs_for(Scheme(name), 64, 0, mx.float32)
    assert values == Dense()
    assert keys != Dense()
