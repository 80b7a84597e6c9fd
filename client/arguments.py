"""From what a Python caller likes to write to requests. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, TypedDict

from stateroom.client.errors import Invalid
from stateroom.client.protocol import Decode, Grammar, Message, Sampling, Speculate

# Messages as dataclasses or as the usual maps: {"role": "user", "content": "…"}.
Chat = Sequence[Message | Mapping[str, str]]


class Inputs(TypedDict, total=False):
    """What goes into a session; one of these at most."""

    text: str | None
    tokens: Iterable[int] | None  # ids; an array (numpy, mlx) will do
    messages: Chat | None


class SamplingOptions(TypedDict, total=False):
    """The fields of `Sampling`, as keyword arguments."""

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    repetition_window: int
    frequency_penalty: float
    presence_penalty: float
    logit_bias: Mapping[int, float] | Iterable[tuple[int, float]] | None
    seed: int | None


class DecodeOptions(SamplingOptions, total=False):
    """The keyword arguments of `decode`; `sampling`, or single options of it, make it other than greedy."""

    sampling: Sampling | None
    stop: str | Sequence[str] | None  # end before any of these; they are not part of the text
    stop_tokens: Iterable[int] | None
    ignore_eos: bool
    logprobs: int | None  # log-probabilities of the tokens drawn and of this many others
    stream: bool  # False: no tokens before the result
    speculate: Speculate | None
    grammar: Grammar | None


_SAMPLING = frozenset(f.name for f in fields(Sampling))


def inputs_of(given: Inputs) -> dict[str, Any]:
    """The inputs as a request takes them.

    Raises:
        Invalid: an input of the wrong shape.
    """
    made: dict[str, Any] = dict(given)
    if "tokens" in made:
        made["tokens"] = token_ids(made["tokens"], "tokens")
    if "messages" in made:
        made["messages"] = _messages(made["messages"])
    return made


def decode_request(session: str, max_tokens: int, options: DecodeOptions) -> Decode:
    """The request of a `decode`.

    Raises:
        Invalid: an option of the wrong shape. (An unknown option is a TypeError, as with any Python call.)
    """
    made: dict[str, Any] = {name: value for name, value in options.items() if name not in _SAMPLING}
    drawn: dict[str, Any] = {name: value for name, value in options.items() if name in _SAMPLING}
    if drawn.get("logit_bias") is not None:
        drawn["logit_bias"] = _pairs(drawn["logit_bias"])
    if drawn:
        made["sampling"] = replace(made.get("sampling") or Sampling(), **drawn)
    if made.get("stop") is not None:
        made["stop"] = [made["stop"]] if isinstance(made["stop"], str) else list(made["stop"])
    if "stop_tokens" in made:
        made["stop_tokens"] = token_ids(made["stop_tokens"], "stop_tokens")
    return Decode(session=session, max_tokens=max_tokens, **made)


def children_of(n: int | None, names: Sequence[str] | None) -> dict[str, Any]:
    """How many children a fork makes, and their names."""
    count = n if n is not None else 1 if names is None else len(names)
    return {"n": count, "names": None if names is None else list(names)}


def token_ids(tokens: Any, field: str) -> list[int] | None:
    """Token ids as a plain list; an array is read through its `tolist`.

    Raises:
        Invalid: they are not a list, or an array of one axis.
    """
    if tokens is None:
        return None
    listed = tokens.tolist() if hasattr(tokens, "tolist") else tokens
    if isinstance(listed, str | bytes) or not isinstance(listed, Iterable):
        raise Invalid(f"The argument `{field}` should be a list of token ids.", field=field)
    return list(listed)


def _messages(messages: Any) -> list[Message] | None:
    if messages is None:
        return None
    made = []
    for index, message in enumerate(messages):
        if isinstance(message, Mapping) and set(message) == {"role", "content"}:
            made.append(Message(role=message["role"], content=message["content"]))
        elif isinstance(message, Message):
            made.append(message)
        else:
            raise Invalid("A message has a role and a content, no more.", field=f"messages.{index}")
    return made


def _pairs(bias: Any) -> list[tuple[int, float]]:
    try:
        return [(token, weight) for token, weight in (bias.items() if isinstance(bias, Mapping) else bias)]
    except (TypeError, ValueError) as error:
        wrong = "The argument `sampling.logit_bias` should be a map, or pairs, of token ids and biases."
        raise Invalid(wrong, field="sampling.logit_bias") from error
