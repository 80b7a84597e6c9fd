"""The limits of protocol 1, and the words in which a message's annotations state its ranges."""

from dataclasses import dataclass

PROTOCOL_VERSION = 1
SUPPORTED_VERSIONS = (1,)

# Limits. Each is the most that is accepted, not a default; `hello` reports those a client needs.
MESSAGE_BYTES_MAX = 16 * 1024 * 1024  # one frame; a million token ids are 5 MB
DEPTH_MAX = 32  # nesting of a message; ours need 5
TOKENS_PER_REQUEST_MAX = 1_000_000  # above the context of every model served
REQUEST_PARTS_MAX = TOKENS_PER_REQUEST_MAX + 65_536  # items of all its lists and maps; unpacking stops there
CONTAINER_PARTS = 32  # a list or map costs as much as so many items; the largest request has 10,000
REQUEST_NAMES_MAX = 1_024  # entries of one map of a request; ours have 16 at most
TEXT_BYTES_MAX = 8 * 1024 * 1024  # of one text or all contents of the messages of a request
MESSAGES_MAX = 10_000  # chat messages of a request
FORKS_MAX = 64  # children of one fork
TRUNKS_MAX = 1_024  # published, of one daemon
SNAPSHOTS_MAX = 16_384  # on disk, of one daemon
CHUNK_BYTES_MAX = 4 * 1024 * 1024  # of a carried snapshot, in one message
CARRIED_BYTES_MAX = 2**40  # of one carried snapshot
SESSIONS_MAX = 16_384  # of one daemon; a parked session costs a few hundred bytes there
BATCH_MAX = 32  # rows decoding in one forward pass
NAME_MAX = 64
APP_MAX = 128
STOP_STRINGS_MAX = 16
STOP_STRING_MAX = 256  # characters; this much text may be held back
STOP_TOKENS_MAX = 64
LOGIT_BIAS_MAX = 1_024
LOGPROBS_MAX = 20
REPETITION_WINDOW_MAX = 4_096
DRAFT_MAX = 64
TTL_S_MAX = 365 * 24 * 3600.0
UINT64_MAX = 2**64 - 1
INT64_MAX = 2**63 - 1
INT64_MIN = -(2**63)
REQUESTS_PER_CLIENT_MAX = 256  # open at once on one connection
REQUESTS_QUEUED_MAX = 1_024  # open at once in the daemon
OUTBOX_MESSAGES_MAX = 1_024  # replies waiting for one client that does not read

NAME_PATTERN = rf"[A-Za-z0-9._-]{{1,{NAME_MAX}}}"
NAME_WORDS = f"1 to {NAME_MAX} characters, of ASCII letters, digits, dots, underscores and hyphens"


@dataclass(frozen=True)
class Range:
    """A number's closed range; `above` excludes the lower end."""

    least: float | None = None
    most: float | None = None
    above: float | None = None


@dataclass(frozen=True)
class Size:
    """The number of items of a list or characters of a string."""

    least: int = 0
    most: int = 0


@dataclass(frozen=True)
class Pattern:
    """A regular expression that the whole string must match; in words it is what a string "should have"."""

    regex: str
    words: str
