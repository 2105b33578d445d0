"""What killed vLLM engines leave in memory is cleared away by the next one; what lives is left alone."""

import os
import time
from pathlib import Path

import pytest

from rlhf_host.engines import vllm


def test_only_what_nobody_holds_is_cleared(tmp_path, monkeypatch):
    monkeypatch.setattr(vllm.os, "access", lambda *_: False)
    monkeypatch.setattr(vllm.tempfile, "gettempdir", lambda: str(tmp_path))
    mine, lock = vllm._scratch_directory()
    killed, fresh = tmp_path / "rlhf-vllm-killed", tmp_path / "rlhf-vllm-just-made"
    for directory in (killed, fresh):
        directory.mkdir()
        (directory / "bucket.safetensors").write_bytes(b"weights")
    hour_ago = time.time() - 3600
    for directory in (Path(mine), killed):
        os.utime(directory, (hour_ago, hour_ago))
    other, other_lock = vllm._scratch_directory()
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([Path(mine).name, Path(other).name, fresh.name])
    for opened in (lock, other_lock):
        os.close(opened)


@pytest.mark.parametrize(("dead", "closed"), [(True, False), (False, False), (True, True)])
def test_an_engine_tells_that_its_core_died(dead, closed):
    engine = object.__new__(vllm.VLLMEngine)
    assert not engine_is_dead(engine, closed)
    engine.llm = type("LLM", (), {"engine_core": type("Core", (), {"resources": type("R", (), {"engine_dead": dead})()})()})()
    assert engine_is_dead(engine, closed) is (dead and not closed)


def engine_is_dead(engine, closed):
    engine._closed = closed
    return engine.dead
