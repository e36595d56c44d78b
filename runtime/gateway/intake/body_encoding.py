"""Decompresses request bodies with `Content-Encoding: gzip` while they arrive."""

import zlib
from collections.abc import Iterator

from ..interfaces import GatewayError

PIECE_BYTES = 256 << 10
"""Most bytes that are decompressed at a time, so that the caller can check its limits between two pieces."""
_GZIP = 31
"""zlib's `wbits` of a gzip header and the largest window."""


class GzipBody:
    """Decompresses the members of one body."""

    def __init__(self) -> None:
        self._member = zlib.decompressobj(_GZIP)

    def pieces(self, data: bytes) -> Iterator[bytes]:
        """Yield the content of the next compressed bytes. Raises GatewayError 400 if they are not gzip."""
        while data:
            if self._member.eof:
                self._member = zlib.decompressobj(_GZIP)
            try:
                piece = self._member.decompress(data, PIECE_BYTES)
            except zlib.error:
                raise GatewayError(
                    400, "the body is not gzip; compress it, or leave out Content-Encoding: gzip"
                ) from None
            data = self._member.unconsumed_tail or self._member.unused_data
            if piece:
                yield piece

    def check_end(self) -> None:
        """Raise GatewayError 400 unless the last member is complete."""
        if not self._member.eof:
            raise GatewayError(400, "the body ends in the middle of its gzip data; send all of it")


def body_decompressor(content_encoding: str) -> GzipBody | None:
    """Return the decompressor for a Content-Encoding header; None if the body is not compressed.

    Raises GatewayError 415 for other encodings than gzip.
    """
    encoding = content_encoding.strip().lower()
    if encoding in ("gzip", "x-gzip"):
        return GzipBody()
    if encoding not in ("", "identity"):
        raise GatewayError(
            415,
            f"Content-Encoding: {encoding[:40]!a} is not supported; send the body with gzip, or without this header",
            headers={"Accept-Encoding": "gzip"},
        )
    return None
