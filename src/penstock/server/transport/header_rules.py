"""What is wrong in a request's header though a parser takes it: whatever two readers could read in two ways.

Sources: RFC 9110, section 5.3 (fields with one value); RFC 9112, sections 3.2 (Host, absolute form), 6.1 (no codings in
HTTP/1.0) and 6.3 (conflicting lengths).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

from penstock.server.errors import WireError

ONCE = (b"host", b"authorization", b"x-api-key", b"content-type", b"content-encoding", b"origin", b"sec-fetch-site",
        b"x-request-id", b"x-request-timeout")  # fmt: skip
"""Fields that hold one value and decide something here, or at whoever stands in front."""


def wrong_header(version: str, url: bytes, headers: Sequence[tuple[bytes, bytes]]) -> WireError | None:
    """Why a request is not read any further; None if it is. Names in `headers` are in lower case."""
    if version not in ("1.1", "1.0"):
        return WireError(505, "this is neither version 1.1 of HTTP nor 1.0")
    lengths = [value for name, value in headers if name == b"content-length"]
    codings = [value for name, value in headers if name == b"transfer-encoding"]
    if len(lengths) > 1 or (lengths and codings) or len(codings) > 1:
        return WireError(400, "the header gives the length of the body more than once")
    if codings and version == "1.0":
        return WireError(400, "Transfer-Encoding does not exist in HTTP/1.0")
    if codings and codings[0].strip().lower() != b"chunked":
        return WireError(501, "the only Transfer-Encoding is chunked")
    times = Counter(name for name, _ in headers)
    for name in ONCE:
        if times[name] > 1:
            return WireError(400, f"the header has the field {name.decode()} more than once")
    host = next((value.strip().lower() for name, value in headers if name == b"host"), None)
    if host is None and version == "1.1":
        return WireError(400, "the header does not name the host (Host)")
    if url[:1] not in (b"/", b"*") and _authority(url) != host:
        return WireError(400, "the request line and the field Host name different hosts")
    for name, value in headers:
        if name == b"content-encoding" and value.strip().lower() not in (b"", b"identity"):
            return WireError(415, "compressed request bodies are not taken; send it without Content-Encoding")
    return None


def _authority(url: bytes) -> bytes | None:
    """Of a request target in absolute form; None if that is no address of HTTP."""
    found = re.match(rb"https?://([^/?#]*)", url, re.IGNORECASE)
    return found[1].lower() if found else None
