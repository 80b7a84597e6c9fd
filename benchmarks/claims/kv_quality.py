"""What quantised keys and values cost: how far next-token distributions are from those over dense ones.

KL is KL(dense || scheme) of the prediction after each of 1,000 tokens of English, in nats.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

from benchmarks.measurement import NO_TOKENS, Agreement, Measurement, Tokens
from benchmarks.rig import DEMO, TEXT, Model, Rig

from stateroom.daemon.blas import find_blas, preloaded

KL_MOST = 0.01  # nats, the mean
LEAST_SMALLER = {"affine4": 3.34, "turbo": 2.56}  # than bfloat16; the one is 0.30 of its bytes
SCHEMES = ("affine8", "affine4", "turbo")
SHOWN = {"turbo": "turbo k8v3"}
TOKENS = 1000
TOY = Model(layers=2, width=256)  # heads of 64 fields, which all schemes take
TIMEOUT_S = 600.0


def run(rig: Rig) -> list[Measurement]:
    model = TOY if rig.quick else DEMO
    command = [sys.executable, "-m", "benchmarks.quality", str(rig.path(model)), str(TEXT)]
    done = subprocess.run(
        [*command, str(100 if rig.quick else TOKENS), *SCHEMES],
        env=preloaded(os.environ, find_blas().library),
        stdout=subprocess.PIPE,
        timeout=TIMEOUT_S,
        check=True,
    )
    found = json.loads(done.stdout)
    return [made for scheme in SCHEMES for made in _measurements(scheme, model.name, found[scheme])]


def _measurements(scheme: str, model: str, found: dict[str, Any]) -> list[Measurement]:
    name = f"{SHOWN.get(scheme, scheme)}, {model}"
    kl = sorted(found["kl"])
    note = f"at most {kl[-1]:.3g} nats, of 99 in 100 tokens {kl[len(kl) * 99 // 100]:.3g}"
    return [
        Measurement(
            claim=f"KL against dense, {name}",
            unit="nats",
            ours=(sum(kl) / len(kl),),
            peer_name="dense",
            lower_is_better=True,
            most=KL_MOST if scheme == "affine8" else None,
            tokens=Tokens(Agreement.NONE, (note,)),
        ),
        Measurement(
            claim=f"same likeliest token, {name}",
            unit="%",
            ours=(100 * found["same"],),
            peer=(100.0,),
            peer_name="dense",
            tokens=NO_TOKENS,
        ),
        Measurement(
            claim=f"KV of a token, {name}",
            unit="bytes",
            ours=(found["bytes"],),
            peer=(found["dense_bytes"],),
            peer_name="dense bfloat16",
            lower_is_better=True,
            least_ratio=LEAST_SMALLER.get(scheme),
            tokens=NO_TOKENS,
        ),
    ]
