"""What a page allows its browser: its own scripts and styles, told by their hashes, and nothing from elsewhere."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable


def page_policy(scripts: Iterable[str], styles: Iterable[str], *, asks_server: bool) -> str:
    """The Content-Security-Policy of a page.

    Args:
        scripts: what stands between its tags, character by character.
        styles: the same; an empty one is allowed too, as plotly makes one and adds its rules by script.
        asks_server: whether scripts may ask the server that the page came from.
    """
    allowed = {
        "default-src": ["'none'"],
        "script-src": map(_hash, scripts),
        "style-src": map(_hash, [*styles, ""]),
        "img-src": ["data:", "blob:"],  # plots that are saved as pictures
        "connect-src": ["'self'" if asks_server else "'none'"],
        "base-uri": ["'none'"],
        "form-action": ["'none'"],
    }
    return "; ".join(f"{name} {' '.join(sources)}" for name, sources in allowed.items())


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
