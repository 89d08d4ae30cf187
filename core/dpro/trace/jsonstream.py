"""Lenient, incremental reading of JSON trace files: one record at a time, in bounded memory.

Knows JSON and gzip, not what a trace means. Chrome-style files are an object with one long
``traceEvents`` list, or that bare list (which some writers never close). Files cut in the middle
and records that do not parse are survived: what was lost is counted and its byte offset kept. The time
spent on what does not parse is bounded by the size of the file; one that is broken throughout is given up.
Numbers with a fraction or exponent come back as ``str``, so that no digit of a time stamp is lost
on the way (a float of 1.6e15 µs has no nanoseconds left).
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from dpro.errors import TraceError

_CHUNK_BYTES = 1 << 20
#: A record is parsed only with this much text after its start (or the end of the file), so that a
#: failure almost always means "broken", not "not read yet".
_AHEAD_BYTES = 1 << 16
#: No single record is larger; a broken one this long ends the reading.
_MAX_RECORD_BYTES = 1 << 25
#: Once a record failed, the next ones are tried on this much text first: the error of a failure counts the
#: lines before it, which in all of the buffer takes longer than the parsing.
_WARY_BYTES = 1 << 14
#: Failures may cost this many characters of parsing, and twice as many as the file had so far.
_WASTE_BYTES = 1 << 24
#: What a failure costs at least, and one by nesting too deep, in the same unit (measured, CPython 3.11).
_FAILURE_BYTES = 1 << 8
_NESTING_BYTES = 1 << 16
_GZIP_MAGIC = b"\x1f\x8b"
#: Where the next record may start after a broken one (keys that open a Chrome trace event).
_RECORD_START = re.compile(r'\{\s*"(?:ph|name|cat|pid|tid|ts|args)"\s*:')
_SPACE = re.compile(r"[\s,\x00]*")


@dataclass
class Losses:
    """What could not be read; offsets are bytes in the (uncompressed) text."""

    corrupt_records: int = 0
    corrupt_offsets: list[int] = field(default_factory=list)  # the first few
    truncated_at: int | None = None
    given_up_at: int | None = None

    def warnings(self) -> list[str]:
        out = []
        if self.corrupt_records:
            where = ", ".join(map(str, self.corrupt_offsets))
            out.append(f"{self.corrupt_records} corrupt record(s) skipped, at byte offset {where}")
        if self.truncated_at is not None:
            out.append(f"file ends early, at byte {self.truncated_at}: read up to there")
        if self.given_up_at is not None:
            out.append(f"too broken from byte {self.given_up_at} on: read up to there")
        return out


class TraceFile:
    """One pass over a trace file.

    Iterate :meth:`records` to its end; then ``header`` holds every other top-level key and
    ``losses`` what was lost. Text is decoded as latin-1 (offsets stay bytes); :func:`text` makes
    UTF-8 of it where a name needs that.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.header: dict[str, Any] = {}
        self.losses = Losses()
        self._decoder = json.JSONDecoder(strict=False, parse_float=str)
        self._text = ""
        self._at = 0  # index into _text
        self._base = 0  # byte offset of _text[0]
        self._ended = False
        self._wasted = 0  # characters parsed in vain, see _WASTE_BYTES

    def records(self) -> Iterator[dict[str, Any]]:
        """Yield every record of the event list that is a JSON object.

        Raises:
            TraceError: missing, unreadable, empty, or not a JSON trace at all.
        """
        try:
            with self.path.open("rb") as file:
                self._chunks = _chunks(file)
                yield from self._parse()
        except IsADirectoryError as error:
            raise TraceError(self.path, "is a directory") from error
        except FileNotFoundError as error:
            raise TraceError(self.path, "no such file") from error
        except OSError as error:
            raise TraceError(self.path, f"cannot be read ({error.strerror or error})") from error

    # -- the buffer --------------------------------------------------------------------------

    def _fill(self, ahead: int) -> bool:
        """Have ``ahead`` characters after the cursor, or everything; True if that added text."""
        before = len(self._text) - self._at
        if before >= ahead or self._ended:
            return False
        parts = [self._text[self._at :]]
        self._base += self._at
        self._at = 0
        have = before
        while have < max(ahead, _CHUNK_BYTES) and not self._ended:
            chunk = next(self._chunks, None)
            if chunk is None:
                self._ended = True
                break
            parts.append(chunk.decode("latin-1"))
            have += len(chunk)
        self._text = "".join(parts)
        return have > before

    def _skip_space(self) -> str:
        """Move to the next character that matters and return it ("" at the end)."""
        while True:
            self._fill(_AHEAD_BYTES)
            match = _SPACE.match(self._text, self._at)
            assert match is not None
            self._at = match.end()
            if self._at < len(self._text):
                return self._text[self._at]
            if self._ended:
                return ""

    def _value(self) -> Any:
        """Decode the JSON value at the cursor, reading on as long as that helps."""
        ahead = _AHEAD_BYTES
        while True:
            self._fill(ahead)
            try:
                value, self._at = self._decoder.raw_decode(self._text, self._at)
                return value
            except (ValueError, RecursionError) as error:
                ahead *= 4
                if self._ended or ahead > _MAX_RECORD_BYTES:
                    raise ValueError(str(error)) from error

    # -- the grammar ---------------------------------------------------------------------------

    def _parse(self) -> Iterator[dict[str, Any]]:
        self._fill(_AHEAD_BYTES)
        if not self._text:
            raise TraceError(self.path, "empty file")
        if self._text.startswith("\xef\xbb\xbf"):  # UTF-8 byte order mark
            self._at = 3
        first = self._skip_space()
        if first == "[":
            self._at += 1
            yield from self._events()
            return
        if first != "{":
            raise TraceError(self.path, "not a JSON trace")
        self._at += 1
        found = False
        while True:
            mark = self._skip_space()
            if mark == "}":
                break
            try:
                key = self._value()
                if self._skip_space() != ":" or not isinstance(key, str):
                    raise ValueError("no key")
                self._at += 1
                if self._skip_space() == "[" and key == "traceEvents":
                    found = True
                    self._at += 1
                    yield from self._events()
                    if self.losses.given_up_at is not None:
                        break
                else:
                    self.header[key] = self._value()
            except ValueError:
                # After the events only a remark is lost; before them the file is not what it says.
                self.losses.truncated_at = self._base + (len(self._text) if self._ended else self._at)
                break
        if not found:
            cut = self.losses.truncated_at
            broken = f"not a JSON trace (broken before any event, byte {cut})"
            raise TraceError(self.path, "no traceEvents in it" if cut is None else broken)

    def _events(self) -> Iterator[dict[str, Any]]:
        """The records of one list, cursor just after its ``[``."""
        while True:
            mark = self._skip_space()
            if mark == "]":
                self._at += 1
                return
            if mark == "":
                self.losses.truncated_at = self._base + len(self._text)
                return
            try:
                record = self._record()
            except (ValueError, RecursionError):
                if self._wasted > _WASTE_BYTES + 2 * (self._base + self._at):
                    self.losses.given_up_at = self._base + self._at
                    return
                if not self._recover():
                    return
                continue
            if isinstance(record, dict):
                yield record

    def _record(self) -> Any:
        """Decode the value at the cursor; a failure is charged to ``_wasted`` and leaves the cursor."""
        decode, text, at = self._decoder.raw_decode, self._text, self._at
        if self._wasted:
            piece = text[at : at + _WARY_BYTES]
            try:
                value, used = decode(piece)
                if used < len(piece):  # else a number may go on after it
                    self._at = at + used
                    return value
            except RecursionError:
                self._wasted += _NESTING_BYTES
                raise
            except json.JSONDecodeError as error:
                # Right before its end, or in a string, it may be only the piece that is broken.
                cut = error.pos > len(piece) - 16 or error.msg.startswith("Unterminated")
                if not cut:
                    self._wasted += _FAILURE_BYTES + error.pos
                    raise
        try:
            value, self._at = decode(text, at)
            return value
        except RecursionError:
            self._wasted += _NESTING_BYTES
            raise
        except json.JSONDecodeError as error:
            end = len(text) if error.msg.startswith("Unterminated") else error.pos
            self._wasted += _FAILURE_BYTES + end - at
            raise
        except ValueError:  # a number of more digits than Python reads
            self._wasted += _FAILURE_BYTES + _WARY_BYTES
            raise

    def _recover(self) -> bool:
        """Move past a record that does not parse; False where the readable part of the file ends."""
        start = self._base + self._at
        while True:
            match = _RECORD_START.search(self._text, self._at + 1)
            if match is not None:
                self._at = match.start()
                self.losses.corrupt_records += 1
                if len(self.losses.corrupt_offsets) < 5:
                    self.losses.corrupt_offsets.append(start)
                return True
            if self._ended or len(self._text) - self._at > _MAX_RECORD_BYTES:
                self.losses.truncated_at = start
                return False
            if self._fill(4 * max(len(self._text) - self._at, _AHEAD_BYTES)) and self._whole():
                return True

    def _whole(self) -> bool:
        """Does the record at the cursor parse now that more is read?"""
        try:
            self._decoder.raw_decode(self._text, self._at)
        except (ValueError, RecursionError):
            return False
        return True


def _chunks(file: BinaryIO) -> Iterator[bytes]:
    """Uncompressed chunks; a damaged or cut gzip stream just ends where it can no longer be read."""
    head = file.read(_CHUNK_BYTES)
    if not head.startswith(_GZIP_MAGIC):
        while head:
            yield head
            head = file.read(_CHUNK_BYTES)
        return
    inflate = zlib.decompressobj(wbits=31)
    while head:
        try:
            out = inflate.decompress(head, _CHUNK_BYTES)
        except zlib.error:
            return
        if out:
            yield out
        if inflate.eof:  # a gzip file may hold several members
            head = inflate.unused_data or file.read(_CHUNK_BYTES)
            inflate = zlib.decompressobj(wbits=31)
        else:
            head = inflate.unconsumed_tail or file.read(_CHUNK_BYTES)
    yield inflate.flush()


def text(value: str) -> str:
    """UTF-8 of a string that was decoded as latin-1; unchanged where it is not."""
    if value.isascii():
        return value
    try:
        return value.encode("latin-1").decode("utf-8", "replace")
    except UnicodeEncodeError:  # it came from a \\u escape: already right
        return value
