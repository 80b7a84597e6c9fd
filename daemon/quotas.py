"""What each app may have at once: sessions, KV, snapshots, open requests. Pure; its sums are kept.

An **account** is what stands before the first `/` of an owner: a local program's app, or the name of a key,
whatever apps its client says it is. Quotas keep apps that mean well from taking all there is; a local program
can name itself anew, so they are no defence against one that doesn't (docs/security.md).

They are looked at when a request is admitted. KV grows afterwards, so it may pass its quota by what was under
way; trunks that sessions of an account share count once in it, and in full in each account that holds them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from stateroom.client.errors import Capacity
from stateroom.client.limits import REQUESTS_QUEUED_MAX, SESSIONS_MAX
from stateroom.client.protocol import Decode, InputRequest, Request, Restore
from stateroom.daemon.link import Part
from stateroom.daemon.parts import Parts

RETRY_AFTER_S = 1.0
DECODE_TOKENS = 256  # of a decode, looked at beforehand; as the KV budget does
DEFAULT_NAME = "default"  # in `--quota default=…`: of whoever has none of its own


@dataclass(frozen=True, slots=True)
class Quota:
    """The most that an account may have at once; None: as much as there is."""

    sessions: int | None = SESSIONS_MAX // 2  # published trunks, too
    bytes: int | None = None  # of KV in memory
    disk: int | None = None  # of snapshots that were asked for
    requests: int | None = REQUESTS_QUEUED_MAX // 2  # that may wait: what is answered at once doesn't count


WHAT = {
    "sessions": ("sessions", "close some"),
    "bytes": ("bytes of KV", "close, trim or park sessions"),
    "disk": ("bytes of snapshots", "forget some"),
    "requests": ("open requests", "await some"),
}


@dataclass(slots=True, eq=False)
class _Account:
    quota: Quota
    sessions: int = 0
    own_bytes: int = 0
    disk: int = 0
    requests: int = 0
    parts: Parts = field(default_factory=Parts)

    @property
    def bytes(self) -> int:
        return self.own_bytes + self.parts.private_bytes + self.parts.shared_bytes

    @property
    def unused(self) -> bool:
        return not (self.sessions or self.own_bytes or self.disk or self.requests or len(self.parts))


class Quotas:
    """`given`: quotas by account; `"default"` is that of all others."""

    def __init__(self, given: Mapping[str, Quota] | None = None) -> None:
        self._given = dict(given or {})
        self._default = self._given.pop(DEFAULT_NAME, Quota())
        self._accounts: dict[str, _Account] = {}

    def __len__(self) -> int:
        """Accounts that have something."""
        return len(self._accounts)

    def held(self, owner: str, what: str) -> int:
        """What the owner's account has now: `sessions`, `bytes`, `disk` or `requests`."""
        known = self._accounts.get(account_of(owner))
        return 0 if known is None else getattr(known, what)

    def check(self, owner: str, what: str, more: int = 1) -> None:
        """Sees whether there is room for so much more.

        Raises:
            Capacity: there isn't; its details name the quota.
        """
        name = account_of(owner)
        limit: int | None = getattr(self._given.get(name, self._default), what)
        held = self.held(owner, what)
        if limit is not None and held + more > limit:
            thing, advice = WHAT[what]
            raise Capacity(
                f"{name!r} may have {limit} {thing}; it has {held} and needs {more} more: {advice}.",
                quota=what,
                limit=limit,
                held=held,
                retry_after_s=RETRY_AFTER_S,
            )

    # ------------------------------------------------------------ what changes

    def add(self, owner: str, what: str, change: int) -> None:
        """`sessions`, `own_bytes`, `disk` or `requests` of an owner became more, or less."""
        if not change:
            return
        account = self._account(owner)
        now = getattr(account, what) + change
        assert now >= 0, f"{what} of an account below nothing"
        setattr(account, what, now)
        self._tidy(owner, account)

    def hold(self, owner: str, generation: int, before: Sequence[Part], after: Sequence[Part]) -> None:
        """A session of the owner has these parts now, and had those; `generation`: of their worker."""
        if before or after:
            account = self._account(owner)
            account.parts.replace(generation, before, after)
            self._tidy(owner, account)

    def _account(self, owner: str) -> _Account:
        name = account_of(owner)
        if name not in self._accounts:
            self._accounts[name] = _Account(self._given.get(name, self._default))
        return self._accounts[name]

    def _tidy(self, owner: str, account: _Account) -> None:
        if account.unused:  # names are the clients' choice: there is no end of them
            del self._accounts[account_of(owner)]


def account_of(owner: str) -> str:
    return owner.partition("/")[0]


def surely_computes(request: Request, length: int) -> int | None:
    """Tokens that a request will at least add to a session of so many; None: it doesn't add KV at all.

    What text becomes isn't known here: it counts as one token.
    """
    if isinstance(request, Decode):
        return min(request.max_tokens, DECODE_TOKENS)
    if isinstance(request, Restore):
        return 1
    if isinstance(request, InputRequest):
        if request.tokens is not None:
            kept = length if request.op == "sync" else 0
            return max(len(request.tokens) - kept, 0) or None
        return 1 if request.text or request.messages else None
    return None
