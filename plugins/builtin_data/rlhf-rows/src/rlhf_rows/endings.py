"""Ends of turns that rows bring along, because a chat template has rendered them already."""

from __future__ import annotations

from rlhf_host import UserError

FOREIGN_ENDS = (
    "<|im_end|>", "<|eot_id|>", "<|end_of_text|>", "<|endoftext|>", "<end_of_turn>", "<|end|>", "</s>", "<｜end▁of▁sentence｜>",
)  # fmt: skip
"""Ends of turns that they write."""


def without_end(text: str, ends: tuple[str, ...]) -> tuple[str, str]:
    """Returns a text without the end of its turn and the space after it, and this end; empty: it has none.

    Raises ``UserError`` for the end of another model.
    """
    kept, end = text, ""
    while (stripped := kept.rstrip()).endswith(ends):
        end = max((end for end in ends if stripped.endswith(end)), key=len)
        kept = stripped.removesuffix(end)
    if ends and not end and stripped.endswith(FOREIGN_ENDS):
        foreign = next(each for each in FOREIGN_ENDS if stripped.endswith(each))
        raise UserError(
            f"a text ends with {foreign!r}, and here turns end with {' or '.join(map(repr, ends))}: take it out of the row"
        )
    return kept, end
