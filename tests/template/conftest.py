"""Projects written by ``rlhf plugins new``."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlhf_host.cli.plugins_new import KINDS


@pytest.fixture(params=KINDS)
def kind(request) -> str:
    return request.param


@pytest.fixture
def new(rlhf_here, tmp_path):
    """``new(kind, name, *flags)``: the project's folder."""

    def write(kind: str, name: str, *flags: str) -> Path:
        done = rlhf_here("plugins", "new", kind, name, "--output", tmp_path / "made", *flags)
        assert done.exit_code == 0, done.output
        return tmp_path / "made" / f"rlhf-plugin-{name.replace('_', '-')}"

    return write
