"""Thoughts: the text that a model writes between markers before it answers. Only the text after them is judged."""

from __future__ import annotations

import re
from collections.abc import Sequence

_TAGS = "think|thinking|thought|thoughts|reasoning|reason|scratchpad|reflection|seed:think"
MARKERS = (
    *((f"<{tag}>", f"</{tag}>") for tag in _TAGS.split("|")),
    ("<|begin_of_thought|>", "<|end_of_thought|>"),
    ("<|thinking|>", "<|/thinking|>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("[THINK]", "[/THINK]"),
    ("◁think▷", "◁/think▷"),
    ("<|channel|>analysis", "<|channel|>final<|message|>"),
    ("<|channel>thought", "<channel|>"),
    ("<unused94>", "<unused95>"),
)
_SPOKEN_CHANNELS = re.compile(r"\s*analysis(?=[A-Z\s]).*assistantfinal(.*)", re.DOTALL)
"""The channels of a text from which special tokens were taken."""


class Thoughts:
    """``markers``: pairs that open and close thoughts; none: every text is judged as a whole."""

    def __init__(self, markers: Sequence[tuple[str, str]] = MARKERS):
        self._known = bool(markers)
        opening, closing = ([re.escape(pair[side]) for pair in markers] for side in (0, 1))
        self._open = re.compile("|".join(opening) or "(?!)", re.IGNORECASE)
        self._close = re.compile("|".join(closing) or "(?!)", re.IGNORECASE)
        self._opened = re.compile(rf"(?:{'|'.join(opening) or '(?!)'})\s*\Z", re.IGNORECASE)

    def after(self, text: str) -> str | None:
        """Returns the text after the last thoughts; None if they never close."""
        if "<" not in text and "[" not in text and "◁" not in text:
            spoken = _SPOKEN_CHANNELS.fullmatch(text) if self._known and text.lstrip().startswith("analysis") else None
            return spoken[1] if spoken else text
        for match in self._close.finditer(text):
            text_from = match.end()
            break
        else:
            return None if self._open.search(text) else text
        for match in self._close.finditer(text, text_from):
            text_from = match.end()
        return None if self._open.search(text, text_from) else text[text_from:]

    def closes(self, text: str) -> bool:
        """Returns True if thoughts end in the text."""
        return bool(self._close.search(text))

    def opened_by(self, before: str) -> bool:
        """Returns True if the text before an answer, such as a chat template's, opens thoughts."""
        return bool(self._opened.search(before))
