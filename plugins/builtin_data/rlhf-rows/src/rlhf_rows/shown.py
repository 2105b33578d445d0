"""A row of tokens as a person reads it: its text, with the trained tokens marked."""

from __future__ import annotations

from typing import Any

from rlhf_host.commands import visible
from rlhf_rows.spans import Marker
from rlhf_rows.units import Row

_SHOWN = 160  # characters of each part


def shown(row: Row, tokenizer: Any, marker: Marker) -> str:
    """Returns the row with its trained tokens in ⟦⟧, and a note on how the last of them ends it."""
    text, place = _words(tokenizer, row.prompt_ids), 0
    for begin, end in row.trained:
        text += f"{_words(tokenizer, row.completion_ids[place:begin])}⟦{_words(tokenizer, row.completion_ids[begin:end])}⟧"
        place = end
    last = _words(tokenizer, row.completion_ids[place - 1 : place])
    stops = row.completion_ids[place - 1] == marker.end or last in marker.stops
    ending = f"turn ends with `{last}` (trained)" if stops else f"the last trained token, `{last}`, is no stop token"
    return f"{text} — {ending}"


def _words(tokenizer: Any, ids: Any) -> str:
    text = visible(str(tokenizer.decode(list(ids), skip_special_tokens=False)))
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN // 2]} … {text[-_SHOWN // 2 :]}"
