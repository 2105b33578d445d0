"""Texts of saved rows with their pictures in place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlhf_host import UserError
from rlhf_host.runs import around_pictures
from rlhf_runs.thumbnails import Thumbnails

FOLDER = "pictures"
DAMAGED = (AttributeError, IndexError, KeyError, TypeError, ValueError)
"""Errors of a row that is not as it was written."""


class Pictured:
    """Texts and pictures of rows, as lists ``seen`` of both for a page. Where the places of pictures are not known, they come
    first.

    Args:
        directory: that of the rows.
        tokenizer: that of the rows' tokens; ``None``: it is not available.
    """

    def __init__(self, directory: Path, tokenizer: Any, thumbnails: Thumbnails):
        self._directory, self._tokenizer, self._thumbnails = directory, tokenizer, thumbnails

    def prompt(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the prompt of a row; nothing if it has no pictures."""
        try:
            if row.get("segments"):
                return self.segment(row["segments"][0], str(row.get("prompt")), 0)
            return {} if "full_text" in row else self._before(row, str(row.get("prompt")))
        except DAMAGED:
            return {}

    def turns(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Returns all turns of a row without tokens; nothing if it has one, or no pictures."""
        try:
            return self._before(row, str(row["full_text"])) if "full_text" in row and not row.get("segments") else {}
        except DAMAGED:
            return {}

    def segment(self, segment: Mapping[str, Any], text: str, before: int) -> dict[str, Any]:
        """Returns a segment; nothing if it has no pictures.

        Args:
            before: pictures of the row before it.
        """
        if not (images := segment.get("images")):
            return {}
        pictures = self._pictures(images, before)
        try:
            texts = self._texts(segment["token_ids"], [(image["width"], image["height"]) for image in images])
        except UserError:
            self._tokenizer = None  # without its processor, which would be looked for again and again
            return {"seen": [*pictures, text]}
        return {"seen": [part for pair in zip(texts, [*pictures, None], strict=True) for part in pair if part]}

    def _before(self, row: Mapping[str, Any], text: str) -> dict[str, Any]:
        return {"seen": [*self._pictures(row["images"], 0), text]} if row.get("images") else {}

    def _texts(self, token_ids: Sequence[int], sizes: Sequence[tuple[int, int]]) -> list[str]:
        if self._tokenizer is None:
            raise UserError("the tokenizer is not available")
        parts = around_pictures(self._tokenizer, token_ids, sizes)
        return [self._tokenizer.decode(part, skip_special_tokens=True) for part in parts]

    def _pictures(self, images: Sequence[Mapping[str, Any]], before: int) -> list[dict[str, Any]]:
        return [self._picture(image, number) for number, image in enumerate(images, start=before + 1)]

    def _picture(self, image: Mapping[str, Any], number: int) -> dict[str, Any]:
        # Whatever a row says, only its own folder's pictures are shown.
        file = self._directory / FOLDER / Path(str(image["file"])).name
        known = {"picture": number, "width": image["width"], "height": image["height"], "file": str(file)}
        uri = self._thumbnails.uri(file)
        return known if uri is None else known | {"uri": uri}
