"""What killed vLLM engines leave in memory is cleared away by the next one; what lives is left alone."""

import os
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from rlhf_host.engines import vllm_startup
from rlhf_host.engines.vllm_engine import VLLMEngine


def test_only_what_nobody_holds_is_cleared(tmp_path, monkeypatch):
    monkeypatch.setattr(vllm_startup.os, "access", lambda *_: False)
    monkeypatch.setattr(vllm_startup.tempfile, "gettempdir", lambda: str(tmp_path))
    scratch = vllm_startup.Scratch()
    killed, fresh = tmp_path / "rlhf-vllm-killed", tmp_path / "rlhf-vllm-just-made"
    for directory in (killed, fresh):
        directory.mkdir()
        (directory / "bucket.safetensors").write_bytes(b"weights")
    hour_ago = time.time() - 3600
    for directory in (Path(scratch.path), killed):
        os.utime(directory, (hour_ago, hour_ago))
    other = vllm_startup.Scratch()
    names = [Path(one.path).name for one in (scratch, other)]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*names, fresh.name])
    for one in (scratch, other):
        one.close()
        one.close()
    assert [path.name for path in tmp_path.iterdir()] == [fresh.name]


@pytest.mark.parametrize(
    ("core_died", "failure", "closed", "dead"),
    [
        (True, None, False, True),
        (False, None, False, False),
        (False, RuntimeError("a step failed"), False, True),
        (True, None, True, False),
    ],
)
def test_an_engine_tells_that_its_core_died(core_died, failure, closed, dead):
    engine = object.__new__(VLLMEngine)
    engine.multiprocess, engine._failure, engine._closed = True, failure, closed
    engine.llm = SimpleNamespace(engine_core=SimpleNamespace(resources=SimpleNamespace(engine_dead=core_died)))
    assert engine.dead is dead
