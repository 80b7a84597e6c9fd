"""Text and tokens: encoding, chat templates, incremental decoding, stop strings. No mlx.

What a list of tokens says is defined once. Most tokenizers spell every token as bytes (`ByteLevel`, or
the SentencePiece kind with byte tokens), so the text is those bytes put together and read as UTF-8, and
can be produced token by token exactly. A tokenizer of another kind is decoded through a short window.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import tokenizers

from stateroom.client.errors import Invalid, Unsupported
from stateroom.client.protocol import Message
from stateroom.daemon.engine.pieces import PROBES, Pieces, pieces_of

UTF8_HELD_MAX = 3  # bytes of an incomplete character; more are never held back
WINDOW_KEEP = 8  # tokens that stay before new ones, for a tokenizer that is decoded through a window
WINDOW_MAX = 32  # tokens after which the window moves on
WINDOW_HELD_MAX = 8  # tokens held back for a character to be completed there; then it is shown as U+FFFD
REPLACEMENT = "\ufffd"

Render = Callable[[list[dict[str, str]], bool], list[int]]


class Tokenizer:
    """A model's tokenizer, whichever library it comes from.

    Attributes:
        eos: tokens that end an answer.
        vocab: how many tokens the tokenizer knows (the model may have more rows).
        prefix: what the tokenizer puts before a text that begins a session (BOS), maybe nothing.
    """

    def __init__(
        self,
        encode: Callable[[str], list[int]],
        decode: Callable[[Sequence[int]], str],
        *,
        pieces: Pieces | None = None,
        prefix: Sequence[int] = (),
        eos: Iterable[int] = (),
        vocab: int,
        render: Render | None = None,
    ) -> None:
        self._encode = encode
        self._decode = decode
        self._render = render
        self._anchor = _anchor(encode)
        self.pieces = pieces
        self.prefix = list(prefix)
        self.eos = frozenset(eos)
        self.vocab = vocab

    @classmethod
    def over(
        cls,
        backend: tokenizers.Tokenizer,
        *,
        prefix: Sequence[int] = (),
        eos: Iterable[int] = (),
        render: Render | None = None,
    ) -> Tokenizer:
        """Over a tokenizer of the `tokenizers` library, which is set never to cut or pad."""
        backend.no_truncation()
        backend.no_padding()
        return cls(
            _encoder(backend),
            _decoder(backend),
            pieces=pieces_of(backend),
            prefix=prefix,
            eos=eos,
            vocab=backend.get_vocab_size(),
            render=render,
        )

    @classmethod
    def wrapping(cls, wrapper: Any, eos: Iterable[int] = ()) -> Tokenizer:
        """Over mlx-lm's `TokenizerWrapper`, fast (Rust) or not."""
        inner = wrapper._tokenizer
        backend = getattr(inner, "backend_tokenizer", None)
        render = _wrapper_render(wrapper) if wrapper.has_chat_template else None
        ends = frozenset(eos) | frozenset(wrapper.eos_token_ids)
        prefix = _prefix_of(inner)
        if isinstance(backend, tokenizers.Tokenizer) and _agrees(inner, backend):
            return cls.over(backend, prefix=prefix, eos=ends, render=render)
        return cls(
            lambda text: list(inner.encode(text, add_special_tokens=False)),
            lambda tokens: inner.decode(
                list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False
            ),
            prefix=prefix,
            eos=ends,
            vocab=len(inner),
            render=render,
        )

    def encode(self, text: str, *, first: bool) -> list[int]:
        """Tokens of a text; special tokens spelled in it are recognised.

        Args:
            first: the text begins its session: the tokenizer's own prefix goes before it. Else the text
                goes on where the session stands, without the space that some tokenizers put first.
        """
        if first:
            return self.prefix + self._encode(text)
        if self._anchor is None or not text:
            return self._encode(text)
        anchor, spelled = self._anchor
        tokens = self._encode(anchor + text)
        return tokens[len(spelled) :] if tokens[: len(spelled)] == spelled else self._encode(text)

    def render(self, messages: Sequence[Message], *, generation_prompt: bool | None = None) -> list[int]:
        """Tokens of a conversation by the model's chat template.

        Args:
            generation_prompt: end with the opening of an answer; None: unless the last message is one.

        Raises:
            Unsupported: the model has no chat template.
            Invalid: the template refuses the messages.
        """
        if self._render is None:
            raise Unsupported("This model has no chat template; give text or tokens.", field="messages")
        if generation_prompt is None:
            generation_prompt = not messages or messages[-1].role != "assistant"
        plain = [{"role": message.role, "content": message.content} for message in messages]
        try:
            return self._render(plain, generation_prompt)
        except Exception as error:  # a template is a program of the model's: anything may come out
            raise Invalid(
                f"The model's chat template refuses these messages: {error or type(error).__name__}",
                field="messages",
            ) from error

    def decode(self, tokens: Sequence[int], *, first: bool = True) -> str:
        """The text of tokens, special tokens shown, spaces as they are.

        Args:
            first: the tokens begin their session; some tokenizers put a space there that isn't shown.
        """
        if self.pieces is None:
            return self._decode(tokens) if tokens else ""
        pieces = self.pieces
        text = b"".join([pieces[token] for token in tokens]).decode("utf-8", "replace")
        return text[1:] if first and pieces.stripped and text.startswith(" ") else text

    def decode_window(self, tokens: Sequence[int]) -> str:
        """What the library itself makes of a few tokens; for tokenizers without pieces."""
        return self._decode(tokens) if tokens else ""


def _encoder(backend: tokenizers.Tokenizer) -> Callable[[str], list[int]]:
    def encode(text: str) -> list[int]:
        tokens: list[int] = backend.encode(text, add_special_tokens=False).ids
        return tokens

    return encode


def _decoder(backend: tokenizers.Tokenizer) -> Callable[[Sequence[int]], str]:
    def decode(tokens: Sequence[int]) -> str:
        text: str = backend.decode(list(tokens), skip_special_tokens=False)
        return text

    return decode


def _anchor(encode: Callable[[str], list[int]]) -> tuple[str, list[int]] | None:
    """For a tokenizer that puts a space before what it is given: text to take that space, and its tokens."""
    pair, single = encode("\na"), encode("\n")
    if pair[: len(single)] == single and pair[len(single) :] != encode("a"):
        return "\n", single
    return None


def _agrees(inner: Any, backend: tokenizers.Tokenizer) -> bool:
    """Whether the Python class adds nothing of its own to the Rust tokenizer below it."""
    backend.no_truncation()
    return all(
        list(inner.encode(probe, add_special_tokens=False))
        == backend.encode(probe, add_special_tokens=False).ids
        for probe in PROBES
    )


def _prefix_of(inner: Any) -> list[int]:
    """What a transformers tokenizer puts before a text when it is asked for special tokens."""
    plain = list(inner.encode("a", add_special_tokens=False))
    full = list(inner.encode("a", add_special_tokens=True))
    for at in range(len(full) - len(plain) + 1):
        if full[at : at + len(plain)] == plain:
            return full[:at]
    return []


def _wrapper_render(wrapper: Any) -> Render:
    def render(messages: list[dict[str, str]], generation_prompt: bool) -> list[int]:
        return list(
            wrapper.apply_chat_template(messages, tokenize=True, add_generation_prompt=generation_prompt)
        )

    return render


# ---------------------------------------------------------------- incremental decoding


class Detokenizer:
    """Turns tokens into text as they come, after a session's earlier tokens.

    The text of the earlier tokens (complete characters only) and all that `add` and `finish` return make
    `decode` of all the tokens. Every return value is whole characters; a character still being completed
    is held back, at most `UTF8_HELD_MAX` bytes (`WINDOW_HELD_MAX` tokens for a windowed tokenizer), after
    which it is shown as U+FFFD. The work per token does not grow with the text.
    """

    def __init__(self, tokenizer: Tokenizer, context: Sequence[int] = ()) -> None:
        if tokenizer.pieces is not None:
            self._reader: _ByteReader | _WindowReader = _ByteReader(tokenizer.pieces, context)
        else:
            self._reader = _WindowReader(tokenizer, context)

    def add(self, token: int) -> str:
        """The text that this token completes, maybe none."""
        return self._reader.add(token)

    def finish(self) -> str:
        """What was held back, as it stands. Nothing may be added afterwards."""
        return self._reader.finish()


class _ByteReader:
    def __init__(self, pieces: Pieces, context: Sequence[int]) -> None:
        self._pieces = pieces
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._strip = pieces.stripped and not context
        # A character that the earlier tokens left incomplete: only their last bytes can matter.
        tail = b""
        for token in reversed(context[-2 * UTF8_HELD_MAX :]):
            tail = pieces[token] + tail
            if len(tail) > UTF8_HELD_MAX:
                break
        self._utf8.decode(tail)

    def add(self, token: int) -> str:
        return self._stripped(self._utf8.decode(self._pieces[token]))

    def finish(self) -> str:
        return self._stripped(self._utf8.decode(b"", True))

    def _stripped(self, text: str) -> str:
        if self._strip and text:
            self._strip = False
            return text[1:] if text.startswith(" ") else text
        return text


class _WindowReader:
    def __init__(self, tokenizer: Tokenizer, context: Sequence[int]) -> None:
        self._decode = tokenizer.decode_window
        self._window = list(context[-WINDOW_KEEP:])
        self._shown = self._decode(self._window).rstrip(REPLACEMENT)  # how much of the window's text is out
        self._held = 0

    def add(self, token: int) -> str:
        self._window.append(token)
        text = self._decode(self._window)
        if text.endswith(REPLACEMENT) and self._held < WINDOW_HELD_MAX:
            self._held += 1
            return ""
        return self._show(text)

    def finish(self) -> str:
        return self._show(self._decode(self._window))

    def _show(self, text: str) -> str:
        self._held = 0
        new = text[len(self._shown) :]
        if len(self._window) >= WINDOW_MAX:
            self._window = self._window[-WINDOW_KEEP:]
            text = self._decode(self._window)
        self._shown = text
        return new


# ---------------------------------------------------------------- stop strings


class StopStrings:
    """Finds the first stop string to be completed in a text that comes in pieces.

    Text that could still become one is held back. How the text is cut into pieces makes no difference.
    Of stop strings completed by the same character the longest counts.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        self._strings = [(string, _borders(string)) for string in strings if string]
        self._matched = [0] * len(self._strings)  # characters of each that the text ends with
        self._held = ""
        self._stopped = False

    def feed(self, text: str) -> tuple[str, bool]:
        """(text that can be shown now, whether a stop string was met). Nothing is shown after one."""
        if self._stopped or not self._strings:
            return ("", True) if self._stopped else (text, False)
        for at, character in enumerate(text):
            found = self._step(character)
            if found:
                seen = self._held + text[: at + 1]
                self._held, self._stopped = "", True
                return seen[: len(seen) - found], True
        seen = self._held + text
        keep = max(self._matched)
        self._held = seen[len(seen) - keep :]
        return seen[: len(seen) - keep], False

    def finish(self) -> str:
        """The text held back, when nothing more comes."""
        held, self._held = self._held, ""
        return held

    def _step(self, character: str) -> int:
        """Knuth, Morris, Pratt 1977, for each string. The length of the longest completed one, or 0."""
        found = 0
        for i, (string, borders) in enumerate(self._strings):
            matched = self._matched[i]
            while matched and string[matched] != character:
                matched = borders[matched - 1]
            matched += string[matched] == character
            self._matched[i] = matched
            if matched == len(string):
                found = max(found, matched)
        return found


def _borders(string: str) -> list[int]:
    """For each prefix the length of its longest proper prefix that is also its suffix."""
    borders = [0] * len(string)
    length = 0
    for i in range(1, len(string)):
        while length and string[i] != string[length]:
            length = borders[length - 1]
        length += string[i] == string[length]
        borders[i] = length
    return borders
