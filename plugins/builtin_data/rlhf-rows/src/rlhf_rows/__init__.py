"""Rows of data sets that have answers, for rlhf-host: how they are read, runs that train on them, and ``rlhf data``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlhf_host.internals import lazily

if TYPE_CHECKING:
    from rlhf_rows.given import GivenRows as GivenRows
    from rlhf_rows.given import read_rows as read_rows
    from rlhf_rows.other_tokens import Answer as Answer
    from rlhf_rows.other_tokens import OtherTokens as OtherTokens

__getattr__, __dir__, __all__ = lazily(__name__)
