"""The example programs run from beginning to end, on a tiny model."""

import os
import subprocess
import sys
from pathlib import Path

CHAIN = Path(__file__).parents[1] / "examples" / "chain.py"


def test_the_chain_from_supervised_fine_tuning_to_ppo_and_dpo(tiny_model, tmp_path):
    command = [sys.executable, str(CHAIN), "--short", "--threads", "1", "--model", str(tiny_model), "--output", "runs"]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    table = done.stdout.splitlines()[-5:]
    assert [line.split(" s  ")[0].rsplit(maxsplit=1)[0] for line in table] == ["as it came", "sft", "rm", "ppo", "dpo"]
    assert "pairs in order: before 0.000  after " in table[2]
    assert {path.name for path in (tmp_path / "runs").iterdir()} == {"sft", "rm", "ppo", "dpo"}
