"""Small copies of pictures for a page."""

from __future__ import annotations

import base64
import io
from pathlib import Path

SIDE = 320
"""Maximum pixels of a copy's longer side."""
MOST, NUMBER = 4_000_000, 1_000
"""Maximum characters of all copies in a page, and their maximum number."""


class Thumbnails:
    """Copies of pictures, as long as there is room.

    Args:
        share: of the room of a page.
    """

    def __init__(self, share: float = 1.0):
        self._room, self._left = int(MOST * share), int(NUMBER * share)
        self._known: dict[Path, str | None] = {}
        self.left_out = 0
        """Number of pictures that found no room."""

    def uri(self, file: Path) -> str | None:
        """Returns a copy as a data URI; None if the file cannot be read, or there is no more room."""
        if not self._left:
            self.left_out += 1
            return None
        if file not in self._known:
            self._known[file] = _copied(file)
        if (uri := self._known[file]) is not None:
            if len(uri) > self._room:
                self._left, self.left_out = 0, self.left_out + 1
                return None
            self._room, self._left = self._room - len(uri), self._left - 1
        return uri


def _copied(file: Path) -> str | None:
    try:
        from PIL import Image, ImageOps

        with Image.open(file) as image:
            image.draft("RGB", (SIDE, SIDE))
            ImageOps.exif_transpose(image, in_place=True)
            small = image.convert("RGB")
        small.thumbnail((SIDE, SIDE))
        content = io.BytesIO()
        small.save(content, "JPEG", quality=80)
    except Exception:  # gone or damaged, or Pillow is not installed: the page names the file all the same
        return None
    return f"data:image/jpeg;base64,{base64.b64encode(content.getvalue()).decode()}"
