"""The time of a run beside what was predicted: a file that a package such as ``rlhf-plan`` leaves in the run directory."""

from __future__ import annotations

import json

from rlhf_host import RunDirectory

FILE = "plan.json"


def time_lines(run: RunDirectory) -> list[str]:
    """Returns its lines; none where no package left any, or where the file is damaged."""
    try:
        lines = json.loads((run.path / FILE).read_text("utf-8"))["lines"]
    except (OSError, ValueError, KeyError, TypeError):
        return []
    return [line for line in lines if isinstance(line, str)] if isinstance(lines, list) else []
