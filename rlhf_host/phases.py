"""What is being done while there is nothing else to see: a line each on standard error, so that results can be piped."""

from __future__ import annotations

import sys


def phase(text: str) -> None:
    print(f"{text} ...", file=sys.stderr, flush=True)
