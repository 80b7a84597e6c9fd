"""The KV schemes that sessions of a loaded model may have: chosen or refused when a session is opened."""

from __future__ import annotations

from dataclasses import dataclass, replace

import mlx.core as mx
from mlx import nn

from stateroom.caches.blueprint import Blueprint
from stateroom.caches.codecs.codec import Codec
from stateroom.caches.codecs.scheme import CannotQuantise, Scheme
from stateroom.caches.probe import branches_agree, groups_agree, rows_agree, slices_decode
from stateroom.caches.session import SessionCache
from stateroom.caches.stored_rows import LayerCodecs
from stateroom.client.errors import Unsupported
from stateroom.client.protocol import KV, Caps, KindCaps


@dataclass(frozen=True, slots=True, eq=False)
class Served:
    """One scheme: how its sessions are made, what they can do, and what they take."""

    blueprint: Blueprint
    dense: Blueprint
    samples: tuple[SessionCache, ...]  # one token as it is stored, and before: sizes are read from them
    caps: Caps

    def empty(self) -> SessionCache:
        """The cache of a session that holds nothing yet."""
        return SessionCache.empty(self.blueprint, self.dense)

    def projected_bytes(self, length: int, at_once: int) -> int:
        """What a session takes, at the most, on its way to so many tokens, `at_once` of them in a forward."""
        stored, *before = self.samples
        most = stored.projected_bytes(length, at_once)
        until = min(length, self.blueprint.scheme.quantise_after)
        for dense in before:  # at the point of conversion, both are there
            both = stored.projected_bytes(until, at_once) if until < length else 0
            most = max(most, dense.projected_bytes(until, at_once) + both)
        return most


class Schemes:
    """The schemes of one model. Each codec is tried, with one token, when it is first asked for.

    Raises `UnknownKind`, when made, if a layer's cache isn't understood.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._blueprint = Blueprint.of(model)
        sample = self._fed(SessionCache.empty(self._blueprint))
        self._geometry = sample.geometry()
        self.batchable = rows_agree(model)
        self.groupable = groups_agree(model)  # in one pass while each is stored apart
        self._shares = branches_agree(model)
        self._tried: set[tuple[Codec, int]] = set()
        self.dense = self._served(self._blueprint, sample)
        # From the first token on; from which length doesn't change what is stored, and has a million values.
        self._served_by: dict[Scheme, Served] = {Scheme(): self.dense}

    def of(self, kv: KV | None) -> Served:
        """Raises `Unsupported` when the model's layers can't be stored like that; the message says why."""
        kv = kv or KV()
        bits = {"key_bits": kv.key_bits, "value_bits": kv.value_bits}
        asked = {name: n for name, n in bits.items() if n is not None}
        if kv.scheme == "dense" and (kv.group_size is not None or kv.quantise_after is not None):
            raise Unsupported("Dense KV has no group_size and no quantise_after.", field="kv")
        if kv.scheme != "turbo" and asked:
            raise Unsupported(f"Only turbo is told {' and '.join(asked)}.", field=f"kv.{next(iter(asked))}")
        try:
            scheme = Scheme(kv.scheme, kv.group_size, kv.quantise_after or 0, **asked)
            at_first = replace(scheme, quantise_after=0)
            if at_first not in self._served_by:
                self._served_by[at_first] = self._quantised(at_first)
        except CannotQuantise as error:
            field = "kv.scheme" if kv.group_size is None else "kv.group_size"
            raise Unsupported(
                f"This model's KV can't be stored as {kv.scheme}: {error}.", field=field
            ) from None
        served = self._served_by[at_first]
        if not scheme.quantise_after:
            return served
        return self._served(replace(served.blueprint, scheme=scheme), *served.samples, *self.dense.samples)

    def _quantised(self, scheme: Scheme) -> Served:
        if not any(layer for layers in self._geometry.values() for layer in layers):
            raise CannotQuantise("its layers keep no keys and values")
        blueprint = self._blueprint.with_scheme(scheme, self._geometry)
        for reach, layers in blueprint.attention.items():
            for codecs, widths in zip(layers, self._geometry[reach], strict=True):
                if widths is not None:
                    self._try(codecs, widths[:2])
        return self._served(blueprint, self._fed(SessionCache.empty(blueprint)))

    def _try(self, codecs: LayerCodecs, widths: tuple[int, int]) -> None:
        """Each codec once: this build of mlx may not decode what it encodes."""
        for codec, width in zip(codecs, widths, strict=True):
            if width and (codec, width) not in self._tried:
                if not slices_decode(codec, width):
                    raise CannotQuantise(f"this build of mlx decodes slices of {codec.name} planes wrongly")
                self._tried.add((codec, width))

    def _fed(self, sample: SessionCache) -> SessionCache:
        mx.eval(sample.forward(self._model, mx.array([[0]], dtype=mx.uint32)), sample.arrays())
        return sample

    def _served(self, blueprint: Blueprint, *samples: SessionCache) -> Served:
        at_will = blueprint.trimmable and not blueprint.scheme.quantise_after
        caps = Caps(
            trim="any" if at_will else "checkpoints",
            trim_floor=0,
            fork="shared" if self._shares else "copy",
            batch=self.batchable or self.groupable,
            speculative=not blueprint.states,
            kv=[KindCaps(kind=k.kind, scheme=k.scheme, layers=k.layers) for k in blueprint.kinds],
            bytes_per_token=samples[0].bytes_per_token,
        )
        return Served(blueprint, self._blueprint, samples, caps)
