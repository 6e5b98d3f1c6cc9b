"""Replies are read right however the stream is cut, and nothing else passes for one."""

import socket
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvtiers.tiers.redis_protocol import (
    ProtocolError,
    ReplyError,
    ReplyReader,
    pack,
    pack_around,
)
from redis_server import RedisServer

# Larger than the reader's own buffer, so that both of its ways are taken.
LARGE = 3 * 16 * 1024

integers = st.integers(-(1 << 63), (1 << 63) - 1)
words = st.text(st.characters(codec="ascii", exclude_characters="\r\n"), min_size=1, max_size=40)
values = st.binary(max_size=200) | st.binary(min_size=LARGE, max_size=LARGE + 9)
replies = st.recursive(
    st.none() | integers | values,
    lambda inner: st.lists(inner, max_size=4),
    max_leaves=6,
)


class Stream:
    """Hands out at most so many bytes at a time, and records how many were asked for."""

    def __init__(self, data: bytes, cuts: Iterator[int] | None = None) -> None:
        self.data = memoryview(data)
        self.cuts = cuts
        self.asked: list[int] = []

    def receive(self, target: memoryview) -> int:
        if not self.data:
            raise ConnectionResetError("end of the stream")
        self.asked.append(target.nbytes)
        most = next(self.cuts) if self.cuts is not None else target.nbytes
        count = min(target.nbytes, len(self.data), most)
        target[:count] = self.data[:count]
        self.data = self.data[count:]
        return count


def encoded(reply: object) -> bytes:
    """A reply as a server sends it."""
    if reply is None:
        return b"$-1\r\n"
    if isinstance(reply, int):
        return b":%d\r\n" % reply
    if isinstance(reply, bytes):
        return b"$%d\r\n%b\r\n" % (len(reply), reply)
    assert isinstance(reply, list)
    return b"*%d\r\n" % len(reply) + b"".join(map(encoded, reply))


def cuts(sizes: list[int]) -> Iterator[int]:
    """The sizes, again and again."""
    while True:
        yield from sizes


sizes = st.lists(st.integers(1, 7) | st.integers(1, 40_000), min_size=1, max_size=8)


@given(st.lists(replies, min_size=1, max_size=4), sizes)
@settings(deadline=None)
def test_replies_are_read_however_the_stream_is_cut(sent: list[object], pieces: list[int]) -> None:
    stream = Stream(b"".join(map(encoded, sent)), cuts(pieces))
    reader = ReplyReader(stream.receive)
    assert [reader.read() for _ in sent] == sent
    assert not stream.data


@given(st.binary(min_size=1, max_size=2 * LARGE), st.data(), sizes)
@settings(deadline=None)
def test_a_value_goes_into_its_parts_however_the_stream_is_cut(
    value: bytes, data: st.DataObject, pieces: list[int]
) -> None:
    split = data.draw(st.integers(0, len(value)))
    first, second = bytearray(split), bytearray(len(value) - split)
    stream = Stream(encoded(value) + encoded(7), cuts(pieces))
    reader = ReplyReader(stream.receive)
    assert reader.read_into([memoryview(first), memoryview(second)]) == len(value)
    assert bytes(first + second) == value
    assert reader.read() == 7, "what follows is still in step"


@given(st.binary(max_size=LARGE), st.integers(0, LARGE), sizes)
@settings(deadline=None)
def test_a_value_of_another_size_is_passed_over(
    value: bytes, expected: int, pieces: list[int]
) -> None:
    stream = Stream(encoded(value) + encoded(7), cuts(pieces))
    reader = ReplyReader(stream.receive)
    target = bytearray(expected)
    assert reader.read_into([memoryview(target)]) == len(value)
    assert reader.read() == 7


def test_a_large_payload_is_received_straight_into_its_place() -> None:
    """All of it in one piece where the stream allows: no byte passes through the reader."""
    payload, rest = bytearray(LARGE), bytearray(4096)
    value = bytes(range(256)) * (LARGE // 256) + bytes(4096)
    stream = Stream(encoded(value))
    received: list[memoryview] = []

    def receive(target: memoryview) -> int:
        received.append(target)
        return stream.receive(target)

    ReplyReader(receive).read_into([memoryview(payload), memoryview(rest)])
    assert received[0].nbytes == len(b"$%d\r\n" % len(value)), "the line, and no payload with it"
    assert received[1].obj is payload
    assert received[1].nbytes == LARGE
    assert payload == value[:LARGE]


@given(words, sizes)
def test_an_error_is_returned_among_replies_and_raised_instead_of_a_value(
    text: str, pieces: list[int]
) -> None:
    line = b"-%b\r\n" % text.encode()
    reader = ReplyReader(Stream(line + encoded(1) + line + encoded(2), cuts(pieces)).receive)
    found = reader.read()
    assert isinstance(found, ReplyError)
    assert (str(found), found.code) == (text, text.split(" ")[0])
    assert reader.read() == 1
    with pytest.raises(ReplyError):
        reader.read_into([memoryview(bytearray(100))])
    assert reader.read() == 2


def test_nil_is_no_value() -> None:
    stream = Stream(b"$-1\r\n$-1\r\n*-1\r\n+OK\r\n")
    reader = ReplyReader(stream.receive)
    assert reader.read_into([memoryview(bytearray(100))]) is None
    assert [reader.read() for _ in range(3)] == [None, None, b"OK"]


@pytest.mark.parametrize(
    "stream",
    [
        b"\x15\x03\x03\x00\x02\x02\x46\r\n",  # a TLS alert
        b"HTTP/1.1 400 Bad Request\r\n",
        b"\r\n",
        b"$\r\n",
        b"$x\r\n",
        b"$1_0\r\n",
        b"$ 3\r\nabc\r\n",
        b"$3\r\nabcd\r\n",
        b"$99999999999999999999999\r\n",
        b":\r\n",
        b":-\r\n",
        b"*1000000000\r\n",
        b"*1\r\n" * 20,
        b"+" + b"x" * 20_000,
    ],
)
def test_what_is_no_reply_is_refused(stream: bytes) -> None:
    with pytest.raises(ProtocolError, match="reply"):
        ReplyReader(Stream(stream).receive).read()


def test_a_value_too_long_to_be_one_of_ours_is_refused_where_it_would_be_kept() -> None:
    with pytest.raises(ProtocolError, match="a short one"):
        ReplyReader(Stream(b"$500000000\r\n").receive).read()


@pytest.mark.parametrize("reply", [b":5\r\n", b"+OK\r\n", b"*0\r\n"])
def test_a_reply_of_another_kind_is_no_value(reply: bytes) -> None:
    with pytest.raises(ProtocolError):
        ReplyReader(Stream(reply).receive).read_into([memoryview(bytearray(4))])


@given(st.binary(max_size=300), st.integers(0, 300), sizes)
@settings(deadline=None)
def test_any_bytes_at_all_end_in_a_reply_or_an_error(
    data: bytes, size: int, pieces: list[int]
) -> None:
    for read in (lambda r: r.read(), lambda r: r.read_into([memoryview(bytearray(size))])):
        try:
            read(ReplyReader(Stream(data, cuts(pieces)).receive))
        except (ConnectionError, ReplyError):
            continue


@given(st.lists(st.binary(max_size=50), min_size=1, max_size=5))
def test_a_packed_command_is_the_list_of_its_arguments(arguments: list[bytes]) -> None:
    reader = ReplyReader(Stream(pack(*arguments)).receive)
    assert reader.read() == arguments


@given(st.lists(st.binary(max_size=50), min_size=1), st.binary(), st.lists(st.binary(max_size=50)))
def test_an_argument_may_be_sent_from_elsewhere(
    before: list[bytes], argument: bytes, after: list[bytes]
) -> None:
    head, tail = pack_around(before, len(argument), after)
    assert head + argument + tail == pack(*before, argument, *after)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with RedisServer(tmp_path_factory.mktemp("redis")) as server:
        yield server


def test_a_real_server_understands_and_is_understood(server: RedisServer) -> None:
    """Every kind of reply that our commands get, from the program itself."""
    with socket.create_connection(("127.0.0.1", server.port)) as connection:

        def receive(target: memoryview) -> int:
            return connection.recv_into(target) or pytest.fail("the server hung up")

        reader = ReplyReader(receive)

        def ask(*command: bytes) -> object:
            connection.sendall(pack(*command))
            return reader.read()

        value = bytes(range(256)) * 8192
        head, tail = pack_around([b"SET", b"k:\r\n"], len(value), [b"NX"])
        for expected in (b"OK", None):
            for part in (head, value, tail):
                connection.sendall(part)
            assert reader.read() == expected
        target = bytearray(len(value))
        connection.sendall(pack(b"GET", b"k:\r\n"))
        parts = [memoryview(target)[: 1 << 20], memoryview(target)[1 << 20 :]]
        assert reader.read_into(parts) == len(value)
        assert target == value
        for missing, found in (([b"GET", b"x"], None), ([b"GET", b"k:\r\n"], len(value))):
            connection.sendall(pack(*missing))
            assert reader.read_into([memoryview(bytearray(17))]) == found
        assert ask(b"EXISTS", b"k:\r\n") == 1
        assert ask(b"SCAN", b"0", b"MATCH", b"k:*") == [b"0", [b"k:\r\n"]]
        assert ask(b"LPUSH", b"list", b"a") == 1
        connection.sendall(pack(b"GET", b"list"))
        with pytest.raises(ReplyError, match="WRONGTYPE"):
            reader.read_into([memoryview(bytearray(4))])
        assert isinstance(ask(b"NOSUCH", b"thing"), ReplyError)
        assert ask(b"PING") == b"PONG"
