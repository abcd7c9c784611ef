"""Formats of the wire, byte by byte, without a server."""

from __future__ import annotations

import json
import struct
from typing import Any

import pytest

from palisade._pages import PageReader, is_binary
from palisade._wire import EnvelopeReader, EventReader, Frame, WebSocketCodec, seal
from palisade.errors import (
    Conflict,
    LimitReached,
    NotFound,
    PalisadeError,
    StreamInterrupted,
    TimedOut,
    Unauthorized,
    from_refusal,
    from_response,
)
from palisade.results import ServerEvent

NEEDS_NO_SERVER = True


def test_events_survive_every_cut() -> None:
    sent = 'id: 7\r\nevent: stdout\ndata: {"a"\ndata: :1}\n\n: sign of life\n\ndata: ä\n\n'.encode()
    for size in range(1, len(sent)):
        reader = EventReader()
        pieces = [sent[start : start + size] for start in range(0, len(sent), size)]
        events = [event for piece in pieces for event in reader.feed(piece)]
        assert events == [ServerEvent("stdout", '{"a"\n:1}', "7"), ServerEvent("message", "ä", "7")]


def test_envelopes_survive_every_cut_and_end_with_the_error() -> None:
    end = json.dumps({"error": {"code": "deadline_exceeded", "message": "too long"}}).encode()
    sent = seal({"n": 1}) + seal({}) + b"\2" + struct.pack(">I", len(end)) + end
    for size in range(1, len(sent)):
        reader, messages = EnvelopeReader(), []
        with pytest.raises(TimedOut, match="too long"):
            for start in range(0, len(sent), size):
                messages += list(reader.feed(sent[start : start + size]))
        assert messages == [{"n": 1}, {}] or size > 14
        assert reader.ended


def test_a_message_has_a_limit() -> None:
    with pytest.raises(StreamInterrupted, match="64 MiB"):
        list(EnvelopeReader().feed(b"\0\xff\xff\xff\xff"))
    with pytest.raises(StreamInterrupted, match="64 MiB"):
        list(WebSocketCodec().feed(b"\x82\x7f" + struct.pack(">Q", 1 << 40)))


@pytest.mark.parametrize("length", [0, 1, 125, 126, 65535, 65536])
def test_frames_of_every_length_are_masked_and_read_again(length: int) -> None:
    data = bytes(number % 251 for number in range(length))
    sent = WebSocketCodec().binary(data)
    assert sent[1] & 0x80, "a client masks what it sends"
    # The server sends frames without a mask.
    size = {126: 4, 127: 10}.get(sent[1] & 0x7F, 2)
    mask, body = sent[size : size + 4], sent[size + 4 :]
    plain = bytes(byte ^ mask[index % 4] for index, byte in enumerate(body))
    assert plain == data
    head = bytes([sent[0], sent[1] & 0x7F]) + sent[2:size]
    codec = WebSocketCodec()
    middle = len(head + plain) // 2
    assert list(codec.feed((head + plain)[:middle])) + list(codec.feed((head + plain)[middle:])) == [
        Frame("binary", data)
    ]


def test_a_message_in_pieces_with_a_ping_between_is_one() -> None:
    sent = b"\x01\x02he" + b"\x89\x01!" + b"\x80\x03llo" + b"\x88\x02\x03\xe8"
    frames = list(WebSocketCodec().feed(sent))
    assert frames == [Frame("ping", b"!"), Frame("text", b"hello"), Frame("close", b"\x03\xe8")]


def test_an_accept_that_answers_another_request_is_refused() -> None:
    codec = WebSocketCodec()
    assert not codec.is_accepted_by(None) and not codec.is_accepted_by("s3pPLMBiTxaQ9kYGzzhZRbK+xOo=")


@pytest.mark.parametrize(
    ("refusal", "status", "expected"),
    [
        ({"kind": "not_found", "message": "m", "hints": ["h"], "status": 404}, 404, NotFound),
        ({"kind": "denied", "message": "m", "hints": ["h"], "status": 401}, 401, Unauthorized),
        ({"code": "already_exists", "message": "m", "hints": ["h"]}, 409, Conflict),
        ({"code": 429, "message": "m", "hints": ["h"]}, 429, LimitReached),
        ({"kind": "unheard_of", "message": "m", "hints": ["h"]}, 418, PalisadeError),
    ],
)
def test_refusals_keep_message_hint_and_kind(
    refusal: dict[str, Any], status: int, expected: type[PalisadeError]
) -> None:
    error = from_refusal(refusal, status)
    assert type(error) is expected
    assert str(error) == "m\n  hint: h"


@pytest.mark.parametrize("body", [b"", b"<html>", b"[]", b'{"message": 3, "hints": 4}'[:20], b"null"])
def test_an_answer_that_is_no_refusal_is_an_error_all_the_same(body: bytes) -> None:
    error = from_response(502, body, "soon")
    assert "502" in str(error) and error.retry_after is None
    assert from_response(429, b"{}", "1.5").retry_after == 1.5


def test_a_page_is_the_same_for_every_cut() -> None:
    text = "one\r\ntwo ä\nthree\rfour"
    data = text.encode()
    for size in range(1, len(data) + 1):
        page = PageReader(1, 2, len(data), 1000, "!")
        for start in range(0, len(data), size):
            page.feed(data[start : start + size])
        page.end()
        assert (page.content, page.total_lines, page.end_line, page.next_offset) == ("two ä\nthree", 4, 3, 3)


def test_a_page_that_is_too_long_says_so_and_goes_on() -> None:
    page = PageReader(0, 10, 100, 9, "!")
    page.feed(b"abc\ndefghijkl\nm\n")
    page.end()
    assert (page.content, page.end_line, page.next_offset) == ("abc\ndefg!", 1, 1)
    page = PageReader(0, 10, 100, 5, "!")
    page.feed(b"abcdefgh\nm\n")
    page.end()
    assert (page.content, page.end_line, page.next_offset) == ("abcd!", 1, 1)


def test_a_character_that_is_cut_makes_no_text_binary() -> None:
    assert not is_binary(("a" * 8191 + "ä").encode())
    assert is_binary(b"\xff\xfe") and not is_binary(b"")
