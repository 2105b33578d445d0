"""Plants known defects in a copy of this tree, one at a time: do the tests of ``make test`` beside the code notice?

python scripts/plant_defects.py                   # all of defects.toml: half an hour
python scripts/plant_defects.py --only kl gae     # those with such a word in their name or file
python scripts/plant_defects.py --list

A defect is a text of a file and what is written in its place. Its tests are those beside the file (``NEAR``), each group below a
minute on a quiet machine; they run until the first failure. Prints a table. The exit code is 1 where a defect goes unnoticed, tests
fail without one, or a text is not in its file any more.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TABLE = Path(__file__).with_name("defects.toml")
_RANKS = "plugins/builtin_backends/rlhf-backend-fsdp/tests/test_ranks.py::test_"
NEAR = {
    "plugins/builtin_backends/rlhf-backend-fsdp/src/rlhf_backend_fsdp/experts": (
        "plugins/builtin_backends/rlhf-backend-fsdp/tests/test_exchange.py"
    ),
    "plugins/builtin_engines/rlhf-engine-http": " ".join(
        f"plugins/builtin_engines/rlhf-engine-http/tests/test_{name}.py" for name in ("servers", "membership")
    ),
    "plugins/builtin_algos/rlhf-plugin-distill": "plugins/builtin_algos/rlhf-plugin-distill/tests/test_other_vocabulary.py",
    "rlhf_host/distributed/bits": "tests/distributed/sync/test_bits.py",
    "rlhf_host/records/token_sets": "tests/records/test_token_sets.py tests/training/test_truncated_sampling.py",
    "plugins/builtin_backends/rlhf-backend-fsdp": " ".join(
        _RANKS + name
        for name in (
            "ranks_with_uneven_rows_keep_the_contract[the_gradient_is_torchs-fsdp-2]",
            "ranks_with_uneven_rows_keep_the_contract[optimizer_state_survives_a_checkpoint-fsdp-1]",
            "what_is_trained_in_part_or_computed_again_steps_as_torch_does[lora]",
            "a_resumed_run_is_value_for_value_the_one_that_never_stopped",
        )
    ),
    "plugins/builtin_algos/rlhf-plugin-group-methods": " ".join(
        f"plugins/builtin_algos/rlhf-plugin-group-methods/tests/test_{name}.py" for name in ("advantages", "losses", "otb")
    ),
    "rlhf_host/backends/optimizers": "tests/backends/test_optimizers.py tests/backends/test_steps.py",
    "rlhf_host/backends": "tests/backends/test_steps.py",
    "plugins/builtin_data/rlhf-rows/src/rlhf_rows/batches": "tests/training/test_rows.py",
    "rlhf_host/models/masters": "tests/backends/test_masters.py",
    "plugins/builtin_data/rlhf-rows/src/rlhf_rows/spans": (
        "plugins/builtin_data/rlhf-rows/tests/test_spans.py plugins/builtin_data/rlhf-rows/tests/test_openings.py"
    ),
    "plugins/builtin_data/rlhf-rows/src/rlhf_rows/thoughts": "plugins/builtin_data/rlhf-rows/tests/test_thoughts.py",
    "rlhf_host/data/stream": "tests/data/test_stream.py",
    "rlhf_host/distributed/deepspeed": "tests/backends/test_steps.py",
    "rlhf_host/distributed/ray/engine_pool": "tests/distributed/ray/test_engine_pool.py",
    "rlhf_host/distributed/ray": "tests/distributed/ray/test_batch_shards.py",
    "plugins/builtin_kernels/rlhf-kernels-graphs": "plugins/builtin_kernels/rlhf-kernels-graphs/tests/test_graphs.py",
    "rlhf_host/engines/embedded": " ".join(
        f"tests/engines/test_{name}.py" for name in ("looks", "transformers_engine", "embedded_weights")
    ),
    "rlhf_host/engines/sampling": "tests/engines/test_sampling.py tests/test_gpu_roofline.py",
    "rlhf_host/extensions": "tests/extensions/test_kl.py",
    "rlhf_host/functional/kl": "tests/functional/test_kl.py",
    "rlhf_host/functional/policy": "tests/functional/test_policy.py",
    "plugins/builtin_data/rlhf-rows/src/rlhf_rows/losses": "plugins/builtin_data/rlhf-rows/tests/test_losses.py",
    "rlhf_host/functional/returns": "tests/functional/test_returns.py",
    "rlhf_host/functional/statistics": "tests/functional/test_statistics.py",
    "rlhf_host/models/adapter_dropout": "tests/training/test_adapter_dropout.py",
    "rlhf_host/models/adapters": "tests/models/test_adapters.py",
    "rlhf_host/models/attention": "tests/test_gpu_roofline.py",
    "rlhf_host/models/carried": "tests/models/test_carried.py",
    "rlhf_host/models/logprobs": "tests/models/test_logprobs.py",
    "rlhf_host/models/passes": "tests/models/test_passes.py",
    "rlhf_host/models/preparation": "tests/models/test_loading.py tests/models/test_passes.py",
    "plugins/builtin_commands/rlhf-plan": "plugins/builtin_commands/rlhf-plan/tests/test_recomputation.py",
    "rlhf_host/records/tensors": "tests/training/test_rewritten_prompts.py",
    "rlhf_host/rollouts/admission": "tests/rollouts/test_admission.py",
    "rlhf_host/rollouts/experience": (
        "tests/rollouts/test_experience.py tests/rollouts/test_collect.py tests/rollouts/test_broken_plugins.py"
    ),
    "rlhf_host/rollouts/summary": "tests/training/test_evaluate.py tests/training/test_steps.py",
    "rlhf_host/training/auxiliary_rows": "tests/training/test_auxiliary_rows.py",
    "rlhf_host/training/soft_updates": "plugins/builtin_algos/rlhf-plugin-averages/tests/test_averages.py",
    "rlhf_host/training/worker": (
        "tests/training/test_steps.py tests/training/test_reduction.py tests/training/test_worker.py"
        " tests/training/test_adapter_dropout.py"
    ),
    "rlhf_host/training": "tests/training/test_steps.py tests/training/test_reduction.py tests/training/test_worker.py",
}
"""Beginning of a path → the fast tests in the folder of that code. Those of another package in ``plugins`` are its own, but for
the contract's."""
LIMIT_S = 600


FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["torch", "transformers", "pytest", "hypothesis"])  # most of the time that a test run takes


def run(root: str, sources: list[str], near: list[str], output: str) -> None:
    """Be pytest over these tests, in a process of its own."""
    os.chdir(root)
    sys.path[:0] = sources
    os.environ |= {"PYTHONPATH": os.pathsep.join(sources), "PYTHONDONTWRITEBYTECODE": "1", "HF_HUB_OFFLINE": "1"}
    sys.dont_write_bytecode = True
    with open(output, "w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    import pytest

    sys.exit(int(pytest.main(["-q", "-x", "-m", "not slow", "-p", "no:cacheprovider", *near])))


@dataclass(frozen=True)
class Defect:
    name: str
    file: str
    old: str
    new: str

    @property
    def near(self) -> str:
        own = "/".join([*self.file.split("/")[:3], "tests"]) + " --ignore-glob=*/test_contract.py"
        return next((tests for begin, tests in NEAR.items() if self.file.startswith(begin)), own)


class Copy:
    """A copy of the tree to plant in."""

    def __init__(self, root: Path):
        self.root = root
        listed = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True, check=True
        )
        for name in listed.stdout.decode().split("\0"):
            if name and (ROOT / name).is_file():
                (root / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, root / name)
        self.sources = [str(root), *map(str, sorted(root.glob("plugins/*/*/src")))]

    def test(self, near: str) -> tuple[int, str]:
        """Run tests to the first failure: pytest's exit code, and which test that was or what pytest said last."""
        output = self.root / "output.txt"
        process = FORKS.Process(target=run, args=(str(self.root), self.sources, near.split(), str(output)))
        process.start()
        process.join(LIMIT_S)
        if process.exitcode is None:
            process.kill()
            process.join()
            return -1, f"more than {LIMIT_S} s"
        said = output.read_text()
        failed = re.search(r"^(?:FAILED|ERROR) (\S+)", said, re.M)
        return process.exitcode, failed[1] if failed else said.strip().rpartition("\n")[2]

    def plant(self, defect: Defect) -> tuple[int, str]:
        """The same with the defect."""
        file = self.root / defect.file
        whole = file.read_text()
        if whole.count(defect.old) != 1:
            return -1, f"the old text is {whole.count(defect.old)} times in {defect.file}"
        file.write_text(whole.replace(defect.old, defect.new))
        try:
            return self.test(defect.near)
        finally:
            file.write_text(whole)


def known(words: Iterable[str]) -> list[Defect]:
    rows = [Defect(name, **row) for name, row in tomllib.loads(TABLE.read_text()).items()]
    words = list(words)
    return [row for row in rows if not words or any(word in f"{row.name} {row.file}" for word in words)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[], metavar="WORD")
    parser.add_argument("--list", action="store_true")
    asked = parser.parse_args()
    defects = known(asked.only)
    if asked.list:
        print(*(f"{defect.name}  ({defect.file})" for defect in defects), sep="\n")
        return
    wrong = 0
    with tempfile.TemporaryDirectory(prefix="planted-") as folder:
        copy = Copy(Path(folder))
        for near in dict.fromkeys(defect.near for defect in defects):
            started = time.monotonic()
            code, said = copy.test(near)
            wrong += code != 0
            print(
                f"| none | {'passed' if code == 0 else 'FAILED'} | {near}: {said} | {time.monotonic() - started:.0f} s |",
                flush=True,
            )
        for defect in defects:
            started = time.monotonic()
            code, said = copy.plant(defect)
            wrong += code != 1
            verdict = {0: "UNNOTICED", 1: "noticed"}.get(code, "ERROR")
            print(f"| {defect.name} | {verdict} | {said} | {time.monotonic() - started:.0f} s |", flush=True)
    print(f"{len(defects)} defects, {wrong} not as they should be")
    sys.exit(wrong > 0)


if __name__ == "__main__":
    main()
