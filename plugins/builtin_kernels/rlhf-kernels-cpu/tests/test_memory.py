"""Freed memory stays with the process."""

import os
import subprocess
import sys

import pytest

PROGRAM = """
import resource, sys
import torch
from rlhf_kernels_cpu.memory import keep_freed_memory

torch.set_num_threads(1)
kept = keep_freed_memory() if sys.argv[1] == "keep" else None

def step(megabytes):
    held = [torch.ones(megabytes << 18) for _ in range(64 // megabytes)]

most = 0
for megabytes in (1, 2, 4, 8, 16):
    for _ in range(3):
        step(megabytes)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(4):
        step(megabytes)
    most = max(most, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
print(kept, most)
"""


def faults(mode, **environment):
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_TUNABLES"))}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, mode], env={**kept, **environment}, capture_output=True, text=True, check=True
    )
    answer, count = done.stdout.split()
    return answer, int(count)


@pytest.mark.skipif(sys.platform != "linux" or not os.confstr("CS_GNU_LIBC_VERSION"), reason="needs glibc")
def test_tensors_of_later_steps_reuse_the_pages_of_earlier_ones():
    pages = 4 * 64 * 256
    for _ in range(3):  # without it, some processes are lucky too: their heap ends in something that stays
        answer, kept = faults("keep")
        assert answer == "True"
        assert kept < pages / 10


def test_who_has_set_the_allocator_up_keeps_that():
    assert faults("keep", MALLOC_TRIM_THRESHOLD_="1000000")[0] == "False"
