"""Content-Security-Policy of a page: it allows only the page's own scripts and styles, identified by their hashes."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable


def page_policy(scripts: Iterable[str], styles: Iterable[str], *, asks_server: bool) -> str:
    """Returns the Content-Security-Policy of a page.

    Args:
        scripts: exact text between its tags.
        styles: the same.
        asks_server: True if scripts may ask the server that the page came from.
    """
    allowed = {
        "default-src": ["'none'"],
        "script-src": map(_hash, scripts),
        "style-src": map(_hash, styles),
        "img-src": ["data:"],
        "connect-src": ["'self'" if asks_server else "'none'"],
        "base-uri": ["'none'"],
        "form-action": ["'none'"],
    }
    return "; ".join(f"{name} {' '.join(sources)}" for name, sources in allowed.items())


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
