"""Encoding, templates, incremental decoding, stop strings; byte-level and SentencePiece-like tokenizers."""

from __future__ import annotations

import itertools
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.tiny import BOS, ENDS, tiny_backend, tiny_tokenizer
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from stateroom.client.errors import Invalid, Unsupported
from stateroom.client.protocol import Message
from stateroom.daemon.engine.template import ChatTemplate
from stateroom.daemon.engine.text import (
    UTF8_HELD_MAX,
    WINDOW_HELD_MAX,
    Detokenizer,
    StopStrings,
    Tokenizer,
)

SAMPLES = (
    "",
    "Hello there, the world.",
    " leading and  double  spaces ",
    "naïve café — “quoted” … ½ × µ",
    "日本語のテキスト と العربية עברית हिन्दी",
    "🎉👩‍👩‍👧‍👦🏳️‍🌈 e\u0301 \u200d zero width",
    "def f(x):\n\treturn x ** 2  # 1234567890\r\n\n\n",
    "\x00\x01\x7f control \u2028 and \ufffd itself",
)


def sentencepiece_backend(decoder: str) -> Backend:
    """BPE over characters with a space put first, `▁` for spaces, and byte tokens for what it lacks."""
    characters = [chr(code) for code in range(33, 127)] + ["▁", "é", "日"]
    merges = [("▁", "t"), ("h", "e"), ("▁t", "he"), ("▁", "▁")]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *characters]
    tokens += ["".join(pair) for pair in merges]
    backend = Backend(
        models.BPE(
            {token: i for i, token in enumerate(tokens)},
            merges,
            byte_fallback=True,
            fuse_unk=True,
            unk_token="<unk>",
        )
    )
    if decoder == "replace":  # Llama 2's tokenizer.json
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        backend.decoder = decoders.Sequence(
            [
                decoders.Replace("▁", " "),
                decoders.ByteFallback(),
                decoders.Fuse(),
                decoders.Strip(" ", 1, 0),
            ]
        )
    else:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=False)
        backend.decoder = decoders.Sequence(
            [decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="always", split=False)]
        )
    backend.add_special_tokens([AddedToken(token, special=True) for token in ("<unk>", "<s>", "</s>")])
    return backend


def windowed() -> Tokenizer:
    """A tokenizer that doesn't say how it spells its tokens."""
    backend = tiny_backend()

    def encode(text: str) -> list[int]:
        return list(backend.encode(text, add_special_tokens=False).ids)

    def decode(tokens: object) -> str:
        return str(backend.decode(list(tokens), skip_special_tokens=False))  # type: ignore[call-overload]

    return Tokenizer(encode, decode, vocab=backend.get_vocab_size())


TOKENIZERS = {
    "bytes": tiny_tokenizer(),
    "replace": Tokenizer.over(sentencepiece_backend("replace"), prefix=[1]),
    "metaspace": Tokenizer.over(sentencepiece_backend("metaspace")),
    "windowed": windowed(),
}
each_tokenizer = pytest.mark.parametrize("kind", TOKENIZERS)


def stream(tokenizer: Tokenizer, tokens: list[int], context: list[int]) -> list[str]:
    detokenizer = Detokenizer(tokenizer, context)
    pieces = [detokenizer.add(token) for token in tokens]
    return [*pieces, detokenizer.finish()]


# ---------------------------------------------------------------- whole texts


def test_each_kind_is_recognised() -> None:
    assert {kind: tokenizer.pieces is not None for kind, tokenizer in TOKENIZERS.items()} == {
        "bytes": True,
        "replace": True,
        "metaspace": True,
        "windowed": False,
    }
    assert not TOKENIZERS["bytes"].pieces.stripped
    assert TOKENIZERS["replace"].pieces.stripped
    assert TOKENIZERS["metaspace"].pieces.stripped


@each_tokenizer
@pytest.mark.parametrize("text", SAMPLES)
def test_text_survives_encoding(kind: str, text: str) -> None:
    tokenizer = TOKENIZERS[kind]
    tokens = tokenizer.encode(text, first=True)
    if kind == "metaspace":
        text = text.removeprefix(" ")  # it puts no space before one, and yet takes one off: its own rule
    assert tokenizer.decode(tokens[len(tokenizer.prefix) :]) == text


@pytest.mark.parametrize("kind", ["bytes", "replace", "metaspace"])
@given(text=st.text(max_size=40))
@settings(max_examples=60, deadline=None)
def test_decode_is_the_librarys(kind: str, text: str) -> None:
    """On whole characters our spelling of tokens and the library's decoder agree."""
    tokenizer = TOKENIZERS[kind]
    tokens = tokenizer.encode(text, first=True)
    assert tokenizer.decode(tokens) == tokenizer.decode_window(tokens)


@pytest.mark.parametrize("kind", ["bytes", "replace", "metaspace"])
@pytest.mark.parametrize("text", ["word", " word", "  two", "\nline", "日本", "the", ""])
def test_a_continuation_gets_no_space_of_its_own(kind: str, text: str) -> None:
    tokenizer = TOKENIZERS[kind]
    head = tokenizer.encode("some", first=True)
    tail = tokenizer.encode(text, first=False)
    assert tokenizer.decode(head + tail) == tokenizer.decode(head) + text
    assert tokenizer.decode(tail, first=False) == text


def test_prefix_goes_only_before_the_first_text() -> None:
    tokenizer = tiny_tokenizer(bos=True)
    bos = tiny_backend().token_to_id(BOS)
    assert tokenizer.encode("a", first=True) == [bos, *tokenizer.encode("a", first=False)]
    assert tokenizer.encode("", first=True) == [bos]
    assert tokenizer.encode("", first=False) == []


def test_special_tokens_in_text_are_recognised() -> None:
    tokenizer = tiny_tokenizer()
    end = tiny_backend().token_to_id(ENDS)
    tokens = tokenizer.encode(f"a{ENDS}b", first=True)
    assert tokens.count(end) == 1
    assert len(tokens) == 3
    assert tokenizer.decode(tokens) == f"a{ENDS}b"


def test_tokens_past_the_vocabulary_have_no_text() -> None:
    tokenizer = tiny_tokenizer()
    assert tokenizer.vocab < 300
    assert tokenizer.decode([299, *tokenizer.encode("x", first=True), 298]) == "x"
    assert stream(tokenizer, [299, 298], []) == ["", "", ""]


def test_only_hexadecimal_byte_tokens_are_bytes() -> None:
    backend = sentencepiece_backend("replace")
    backend.add_tokens([AddedToken("<0xZZ>", normalized=False)])
    tokenizer = Tokenizer.over(backend)
    assert tokenizer.decode([backend.token_to_id("<0x41>"), backend.token_to_id("<0xZZ>")]) == "A<0xZZ>"


def test_truncation_in_the_file_is_ignored() -> None:
    backend = tiny_backend()
    backend.enable_truncation(4)
    backend.enable_padding(length=8)
    tokenizer = Tokenizer.over(backend)
    for text in ("abcdefghij", "a"):
        assert len(tokenizer.encode(text, first=True)) == len(text)


def test_added_tokens_are_spelled_as_they_are() -> None:
    """Their letters stand for themselves, not for bytes as in the vocabulary."""
    backend = tiny_backend()
    backend.add_tokens([AddedToken("<é>", normalized=False)])
    tokenizer = Tokenizer.over(backend)
    tokens = tokenizer.encode("a<é>é", first=True)
    assert len(tokens) == 4
    assert tokenizer.decode(tokens) == "a<é>é"


# ---------------------------------------------------------------- templates


def test_messages_are_rendered_by_the_template() -> None:
    tokenizer = tiny_tokenizer()
    asked = [Message(role="user", content="hé")]
    text = tokenizer.decode(tokenizer.render(asked))
    assert text == "<|im_start|>user\nhé<|im_end|>\n<|im_start|>assistant\n"
    answered = [*asked, Message(role="assistant", content="ho")]
    text = tokenizer.decode(tokenizer.render(answered))
    assert text.endswith("<|im_start|>assistant\nho<|im_end|>\n")
    assert tokenizer.render(answered, generation_prompt=True) != tokenizer.render(answered)


def test_a_template_that_refuses_names_the_messages() -> None:
    backend = tiny_backend()
    template = ChatTemplate("{{ raise_exception('roles must alternate') }}", {})

    def render(messages: list[dict[str, str]], generation_prompt: bool) -> list[int]:
        return list(backend.encode(template.render(messages, generation_prompt)).ids)

    with pytest.raises(Invalid, match="roles must alternate") as caught:
        Tokenizer.over(backend, render=render).render([Message(role="user", content="x")])
    assert caught.value.field == "messages"


def test_without_a_template_messages_are_unsupported() -> None:
    with pytest.raises(Unsupported):
        Tokenizer.over(tiny_backend()).render([Message(role="user", content="x")])


def test_templates_find_what_they_expect() -> None:
    source = (
        "{%- for message in messages -%}\n"
        "    {%- if message.role == 'skip' %}{% continue %}{% endif -%}\n"
        "    {{ message.content | tojson }}\n"
        "{% endfor -%}\n"
        "{{ bos_token }}{{ strftime_now('%Y') }}"
    )
    messages = [{"role": "skip", "content": "no"}, {"role": "user", "content": "<é>"}]
    assert ChatTemplate(source, {"bos_token": "<b>"}).render(messages, False) == (
        f'"<é>"\n<b>{time.strftime("%Y")}'
    )


def test_a_template_cannot_reach_out() -> None:
    with pytest.raises(Exception, match="unsafe"):
        ChatTemplate("{{ messages.__class__.__mro__ }}", {}).render([], False)


# ---------------------------------------------------------------- incremental decoding


@each_tokenizer
@given(text=st.text(max_size=60), cut=st.integers(0, 60))
@settings(max_examples=80, deadline=None)
def test_streamed_text_is_the_whole_text(kind: str, text: str, cut: int) -> None:
    """Whatever of the tokens is context: its complete text and the streamed pieces make the whole."""
    tokenizer = TOKENIZERS[kind]
    tokens = tokenizer.encode(text, first=True)
    context, rest = tokens[:cut], tokens[cut:]
    before = "".join(stream(tokenizer, context, [])[:-1])
    pieces = stream(tokenizer, rest, context)
    assert before + "".join(pieces) == tokenizer.decode(tokens)
    for piece in pieces:
        piece.encode("utf-8")
        if "\ufffd" not in text:
            assert "\ufffd" not in piece


@given(tokens=st.lists(st.integers(0, 255), max_size=40))
@settings(max_examples=150, deadline=None)
def test_any_bytes_make_valid_text(tokens: list[int]) -> None:
    """Random bytes: every event is valid, and together they are what decode says."""
    tokenizer = TOKENIZERS["bytes"]
    pieces = stream(tokenizer, tokens, [])
    assert "".join(pieces) == tokenizer.decode(tokens)
    for piece in pieces:
        piece.encode("utf-8")


@given(tokens=st.lists(st.integers(0, 300), max_size=40))
@settings(max_examples=150, deadline=None)
def test_byte_tokens_make_valid_text(tokens: list[int]) -> None:
    tokenizer = TOKENIZERS["replace"]
    assert "".join(stream(tokenizer, tokens, [])) == tokenizer.decode(tokens)


def test_a_character_is_held_until_it_is_complete() -> None:
    tokenizer = TOKENIZERS["bytes"]
    tokens = tokenizer.encode("a🎉b", first=True)
    assert len(tokens) == 6
    assert stream(tokenizer, tokens, []) == ["a", "", "", "", "🎉", "b", ""]
    assert stream(tokenizer, tokens[:3], []) == ["a", "", "", "\ufffd"]


def test_an_invalid_byte_is_shown_at_once() -> None:
    """0xFF begins no character, so there is nothing to wait for."""
    assert stream(TOKENIZERS["bytes"], [0xFF, 0x41], [])[0] == "\ufffd"


def test_no_more_than_a_character_is_held_back() -> None:
    tokenizer = TOKENIZERS["bytes"]
    pieces = stream(tokenizer, [0xF0, 0x9F, 0x8E] * 5, [])
    held = 0
    for piece in pieces[:-1]:
        held = 0 if piece else held + 1
        assert held <= UTF8_HELD_MAX


def test_a_window_gives_up_on_what_never_completes() -> None:
    """The bound for tokenizers decoded through a window."""
    pieces = stream(TOKENIZERS["windowed"], [0x80] * 100, [])
    held = 0
    for piece in pieces[:-1]:
        held = 0 if piece else held + 1
        assert held <= WINDOW_HELD_MAX
    assert "".join(pieces) == "\ufffd" * 100


def test_a_split_character_is_completed_after_the_context() -> None:
    for kind in ("bytes", "windowed"):
        tokenizer = TOKENIZERS[kind]
        tokens = tokenizer.encode("日", first=True)
        assert "".join(stream(tokenizer, tokens[1:], tokens[:1])) == "日"


@pytest.mark.parametrize("kind", ["replace", "metaspace"])
def test_the_first_space_is_kept_after_a_context(kind: str) -> None:
    tokenizer = TOKENIZERS[kind]
    tokens = tokenizer.encode("the the", first=True)[len(tokenizer.prefix) :]
    assert tokens[0] == tokens[1]
    assert "".join(stream(tokenizer, tokens, [])) == "the the"
    assert "".join(stream(tokenizer, tokens[1:], tokens[:1])) == " the"


@each_tokenizer
def test_the_work_per_token_does_not_grow(kind: str) -> None:
    tokenizer = TOKENIZERS[kind]
    tokens = tokenizer.encode("the world in a nutshell, naïve 日本 ", first=True) * 200
    detokenizer = Detokenizer(tokenizer, [])
    times = []
    for token in tokens:
        begin = time.thread_time()  # not what other processes take
        detokenizer.add(token)
        times.append(time.thread_time() - begin)
    tenth = len(times) // 10
    first, last = sorted(times[:tenth])[tenth // 2], sorted(times[-tenth:])[tenth // 2]
    assert last < 4 * first + 5e-6  # were the text read anew for each, it would be ten times as much


# ---------------------------------------------------------------- stop strings


def naive(text: str, stops: list[str]) -> tuple[str, bool]:
    """The first end of any stop string, by trying every prefix of the text."""
    for end in range(1, len(text) + 1):
        lengths = [len(stop) for stop in stops if text[:end].endswith(stop)]
        if lengths:
            return text[: end - max(lengths)], True
    return text, False


def run_stops(chunks: list[str], stops: list[str]) -> tuple[str, bool, list[str]]:
    finder = StopStrings(stops)
    shown = []
    for chunk in chunks:
        text, stopped = finder.feed(chunk)
        shown.append(text)
        if stopped:
            return "".join(shown), True, shown
    shown.append(finder.finish())
    return "".join(shown), False, shown


def split(text: str, cuts: list[int]) -> list[str]:
    edges = [0, *sorted({cut for cut in cuts if cut <= len(text)}), len(text)]
    return [text[a:b] for a, b in itertools.pairwise(edges)]


@given(
    text=st.text(alphabet="abc\n", max_size=30),
    stops=st.lists(st.text(alphabet="abc\n", min_size=1, max_size=5), max_size=4),
    cuts=st.lists(st.integers(0, 30), max_size=10),
)
@settings(max_examples=400, deadline=None)
def test_stop_strings_against_naive_search(text: str, stops: list[str], cuts: list[int]) -> None:
    shown, stopped, _ = run_stops(split(text, cuts), stops)
    assert (shown, stopped) == naive(text, stops)


@given(
    text=st.text(alphabet="ab", max_size=30),
    stops=st.lists(st.text(alphabet="ab", min_size=1, max_size=4), min_size=1, max_size=3),
)
@settings(max_examples=200, deadline=None)
def test_no_beginning_of_a_stop_string_is_shown_too_early(text: str, stops: list[str]) -> None:
    """At every moment, what is shown is a prefix of what will have been shown, whatever follows."""
    finder = StopStrings(stops)
    shown = ""
    for at, character in enumerate(text):
        piece, stopped = finder.feed(character)
        shown += piece
        for continuation in ("", *stops, *(stop[1:] for stop in stops)):
            assert naive(text[: at + 1] + continuation, stops)[0].startswith(shown)
        if stopped:
            break


def test_the_stop_string_and_what_follows_never_appear() -> None:
    assert run_stops(["Hel", "lo\nU", "ser: hi"], ["\nUser:"])[:2] == ("Hello", True)
    assert run_stops(["Hello\nUs", "eful"], ["\nUser:"])[:2] == ("Hello\nUseful", False)
    # A longer one that began earlier loses to the one completed first; of two completed at once it wins.
    assert run_stops(["xabcd"], ["abcd", "bc"])[:2] == ("xa", True)
    assert run_stops(["xabcd"], ["bcd", "abcd"])[:2] == ("x", True)


def test_nothing_after_the_stop() -> None:
    finder = StopStrings(["ab"])
    assert finder.feed("xaby") == ("x", True)
    assert finder.feed("more") == ("", True)
    assert finder.finish() == ""


def test_only_what_could_become_a_stop_string_is_held() -> None:
    finder = StopStrings(["\n\n"])
    assert finder.feed("one\n") == ("one", False)
    assert finder.feed("two") == ("\ntwo", False)
    assert finder.feed("\n") == ("", False)
    assert finder.finish() == "\n"


def test_without_stop_strings_text_passes() -> None:
    finder = StopStrings([])
    assert finder.feed("any") == ("any", False)
    assert finder.finish() == ""
