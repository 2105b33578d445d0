"""Rows of data sets that have answers, for rlhf-host: how they are read, runs that train on them, and ``rlhf data``."""

from __future__ import annotations

from rlhf_rows.given import GivenRows, read_rows

__all__ = ["GivenRows", "read_rows"]
