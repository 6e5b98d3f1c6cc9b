"""Redis's wire protocol (RESP2), as far as a tier speaks it: commands out, replies in.

A client library hands a value over as new ``bytes``. For chunks of megabytes, finding
that memory and copying out of it costs more than the transfer: here a value is received
where the caller wants it, and sent from where it lies. redis-py still connects, proves
who we are and keeps the pool; what goes over the socket afterwards is this module's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

# A line, and the values of small replies, pass through this. What is larger is
# received straight into its place.
_BUFFER_BYTES = 16 * 1024
# Beyond what any reply to our commands holds: a stream that is none of Redis's.
_LONGEST_VALUE = 64 << 20
_MOST_ITEMS = 1 << 20
_DEEPEST = 8

_CRLF = b"\r\n"


class AwayError(ConnectionError):
    """Nobody answers, or not in time. It may be otherwise in a moment."""


class MisconfiguredError(ConnectionError):
    """A server answers, and will not have us: wrong password, TLS, or database."""


class ProtocolError(ConnectionError):
    """What the server sends is no reply. The connection is of no use any more."""


class ReplyError(Exception):
    """The server answered a command with an error. The connection is still good.

    Attributes:
        code: its first word, such as ``OOM`` or ``WRONGTYPE``.

    """

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.code = text.partition(" ")[0]


Reply = bytes | int | list["Reply"] | ReplyError | None
"""What ``ReplyReader.read`` returns; ``None`` is Redis's nil."""


def pack(*arguments: bytes) -> bytes:
    """A command, ready to be sent."""
    parts = [b"*%d\r\n" % len(arguments)]
    parts += [b"$%d\r\n%b\r\n" % (len(argument), argument) for argument in arguments]
    return b"".join(parts)


def pack_around(
    before: Sequence[bytes], nbytes: int, after: Sequence[bytes]
) -> tuple[bytes, bytes]:
    """A command with one argument left out: what to send before and after its bytes.

    So that the argument may lie in several buffers, which a library's packer would
    have to join.
    """
    head = b"*%d\r\n" % (len(before) + 1 + len(after))
    head += b"".join(b"$%d\r\n%b\r\n" % (len(part), part) for part in before)
    tail = b"".join(b"$%d\r\n%b\r\n" % (len(part), part) for part in after)
    return head + b"$%d\r\n" % nbytes, _CRLF + tail


class ReplyReader:
    """Reads replies from a stream of bytes, however it is cut.

    Args:
        receive: fills the front of a buffer with at least one byte and returns how
            many; raises at the end of the stream.

    """

    def __init__(self, receive: Callable[[memoryview], int]) -> None:
        self._receive = receive
        self._buffer = bytearray(_BUFFER_BYTES)
        self._view = memoryview(self._buffer)
        self._start = 0
        self._end = 0

    def read(self) -> Reply:
        """The next reply. An error is returned, not raised: it may be one of several.

        Raises:
            ProtocolError: it is no reply.

        """
        return self._read(_DEEPEST)

    def read_into(self, parts: Sequence[memoryview]) -> int | None:
        """The next reply, a value: into ``parts``, one after the other.

        Returns:
            How many bytes the value has, None if there is none. Unless that is the
            size of all parts together, they hold nothing of use.

        Raises:
            ReplyError: the server says so.
            ProtocolError: it is no value, or no reply at all.

        """
        expected = sum(part.nbytes for part in parts)
        # The line before the payload, and not a byte of the payload, which would
        # have to be copied into its place.
        line = self._line(len(b"$%d\r\n" % expected))
        kind, rest = line[:1], line[1:]
        if kind == b"-":
            raise _error(rest)
        if kind != b"$":
            raise _unexpected(line)
        nbytes = _integer(rest)
        if nbytes < 0:
            return None
        if nbytes == expected:
            for part in parts:
                self._fill(part)
        else:
            self._discard(nbytes)
        self._end_of_value()
        return nbytes

    def _read(self, depth: int) -> Reply:
        line = self._line()
        kind, rest = line[:1], line[1:]
        if kind == b"+":
            return rest
        if kind == b"-":
            return _error(rest)
        if kind == b":":
            return _integer(rest)
        if kind == b"$":
            return self._value(_integer(rest))
        if kind == b"*" and depth:
            return self._items(_integer(rest), depth)
        raise _unexpected(line)

    def _value(self, nbytes: int) -> bytes | None:
        if nbytes < 0:
            return None
        if nbytes > _LONGEST_VALUE:
            raise ProtocolError(f"a value of {nbytes} bytes where a short one was expected")
        value = bytearray(nbytes)
        self._fill(memoryview(value))
        self._end_of_value()
        return bytes(value)

    def _items(self, count: int, depth: int) -> list[Reply] | None:
        if count < 0:
            return None
        if count > _MOST_ITEMS:
            raise ProtocolError(f"a reply of {count} items where few were expected")
        return [self._read(depth - 1) for _ in range(count)]

    # Bytes ----------------------------------------------------------------------

    def _line(self, expected: int = 0) -> bytes:
        """The next line without its end, receiving at first no more than ``expected`` bytes."""
        while (end := self._buffer.find(_CRLF, self._start, self._end)) < 0:
            if self._end - self._start == len(self._buffer):
                raise _unexpected(bytes(self._view[:16]))
            missing = expected - (self._end - self._start)
            self._more(missing if missing > 0 else len(self._buffer))
        line = bytes(self._view[self._start : end])
        self._start = end + len(_CRLF)
        return line

    def _more(self, most: int) -> None:
        """Receive up to ``most`` bytes behind those that wait."""
        waiting = self._end - self._start
        if self._start:
            self._view[:waiting] = bytes(self._view[self._start : self._end])
            self._start, self._end = 0, waiting
        self._end += self._receive(self._view[waiting : waiting + most])

    def _fill(self, target: memoryview) -> None:
        """Fill ``target``: with what waits, then straight from the stream."""
        done = self._take(target)
        while done < target.nbytes:
            if target.nbytes - done >= _BUFFER_BYTES:
                done += self._receive(target[done:])
            else:
                self._more(len(self._buffer))
                done += self._take(target[done:])

    def _take(self, target: memoryview) -> int:
        count = min(target.nbytes, self._end - self._start)
        target[:count] = self._view[self._start : self._start + count]
        self._start += count
        return count

    def _discard(self, nbytes: int) -> None:
        while nbytes:
            if self._start == self._end:
                self._more(len(self._buffer))
            count = min(nbytes, self._end - self._start)
            self._start += count
            nbytes -= count

    def _end_of_value(self) -> None:
        end = bytearray(len(_CRLF))
        self._fill(memoryview(end))
        if end != _CRLF:
            raise _unexpected(bytes(end))


def _integer(text: bytes) -> int:
    digits = text[1:] if text[:1] == b"-" else text
    # Not all that ``int`` takes: it would read "1_0" and " 10 ".
    if not digits.isdigit() or len(digits) > 20:
        raise _unexpected(text)
    return int(text)


def _error(text: bytes) -> ReplyError:
    return ReplyError(text.decode(errors="replace"))


def _unexpected(found: bytes) -> ProtocolError:
    return ProtocolError(f"{found[:16]!r} is no reply of a Redis server")
