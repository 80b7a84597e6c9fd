"""From a request's input (tokens, text or messages) to the tokens a session shall hold.

Everything is checked here, before a tensor is built: an id past the vocabulary segfaults mlx.
"""

from __future__ import annotations

from stateroom.client.errors import Invalid, TooLong, Unsupported
from stateroom.client.protocol import InputRequest, Message
from stateroom.daemon.engine.model import LoadedModel
from stateroom.daemon.engine.session import Session

TRIED_CHARACTERS = 16  # per token of the context; prose has about 4
CUT_TOKENS = 8  # by which a cut in the middle of a word may change the count


def check_tokens(tokens: list[int], vocab: int) -> None:
    """Raises Invalid when an id is outside the model's vocabulary."""
    if tokens and max(tokens) >= vocab:
        worst = max(tokens)
        raise Invalid(f"Token id {worst} is outside the vocabulary (0 to {vocab - 1}).", field="tokens")


def check_length(length: int, context: int) -> None:
    """Raises TooLong when a session of `length` tokens would pass the model's context."""
    if length > context:
        raise TooLong(
            f"The session would have {length} tokens; the model's context holds {context}.",
            limit=context,
            length=length,
        )


def check_size(loaded: LoadedModel, held: int, request: InputRequest) -> None:
    """Raises TooLong by the beginning of a text that is far too long, before all of it is cut into tokens.

    Streams wait while a text is tokenised, so that must not take longer the longer a hopeless text is.
    """
    text = request.text or "".join(message.content for message in request.messages or [])
    tried = TRIED_CHARACTERS * loaded.context
    if len(text) > tried:
        beginning = loaded.tokenizer.encode(text[:tried], first=False)
        check_length(held + len(beginning) - CUT_TOKENS, loaded.context)


def has_input(request: InputRequest) -> bool:
    return request.tokens is not None or request.text is not None or request.messages is not None


def whole(loaded: LoadedModel, request: InputRequest) -> list[int]:
    """The input as the whole content of a session."""
    check_size(loaded, 0, request)
    if request.tokens is not None:
        tokens = list(request.tokens)
    elif request.text is not None:
        tokens = loaded.tokenizer.encode(request.text, first=True)
    elif request.messages:
        tokens = loaded.tokenizer.render(request.messages)
    else:
        tokens = []
    check_tokens(tokens, loaded.vocab)
    return tokens


def appended(loaded: LoadedModel, session: Session, request: InputRequest) -> tuple[list[int], list[Message]]:
    """The tokens to append for this input, and the chat messages they stand for."""
    check_size(loaded, session.length, request)
    if request.messages is None:
        if request.text is not None:
            tokens = loaded.tokenizer.encode(request.text, first=not session.tokens)
        else:
            tokens = list(request.tokens or [])
        check_tokens(tokens, loaded.vocab)
        return tokens, []
    if not request.messages:
        return [], []
    told = [message for turn in session.chat for message in turn.messages]
    answer = _answer(loaded, session)
    added = [*answer, *request.messages]
    rendered = loaded.tokenizer.render(told + added)
    check_tokens(rendered, loaded.vocab)
    held = session.tokens
    if rendered[: len(held)] == held:
        return rendered[len(held) :], added
    # The model may have drawn its answer in other pieces than the tokenizer would cut: compare the texts.
    text, held_text = loaded.tokenizer.decode(rendered), loaded.tokenizer.decode(held)
    if not text.startswith(held_text):
        raise Unsupported(
            "The session's content is not the beginning of this conversation; "
            "use sync with all its messages instead.",
            field="messages",
        )
    return loaded.tokenizer.encode(text[len(held_text) :], first=False), added


def _answer(loaded: LoadedModel, session: Session) -> list[Message]:
    """What was decoded since the last chat turn, as the assistant's message."""
    if not session.chat:
        return []
    last = session.chat[-1]
    tail = session.tokens[last.end :]
    if not tail or not last.messages or last.messages[-1].role == "assistant":
        return []
    while tail and tail[-1] in loaded.eos:
        tail.pop()
    return [Message(role="assistant", content=loaded.tokenizer.decode(tail, first=False))]
