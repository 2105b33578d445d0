"""What killed processes leave in temporary directories is cleared away by the next of their kind; what lives is left alone."""

import os
import time

from rlhf_host.scratch import Scratch, remove_tree


def test_only_what_nobody_holds_is_cleared(tmp_path):
    scratch = Scratch("rlhf-vllm-", tmp_path)
    killed, fresh, another = (tmp_path / name for name in ("rlhf-vllm-killed", "rlhf-vllm-just-made", "rlhf-ray-killed"))
    for directory in (killed, fresh, another):
        directory.mkdir()
        (directory / "bucket.safetensors").write_bytes(b"weights")
    hour_ago = time.time() - 3600
    for directory in (scratch.path, killed, another):
        os.utime(directory, (hour_ago, hour_ago))
    other = Scratch("rlhf-vllm-", tmp_path)
    assert set(tmp_path.iterdir()) == {scratch.path, other.path, fresh, another}
    for one in (scratch, other):
        one.close()
        one.close()
    assert set(tmp_path.iterdir()) == {fresh, another}


def test_a_folder_of_a_thousand_levels_goes_too(tmp_path):
    deep = tmp_path / "deep"
    here = os.open(tmp_path, os.O_RDONLY)
    for name in ["deep", *("d" * 9 for _ in range(3000))]:  # a path longer than the system takes at once
        os.mkdir(name, dir_fd=here)
        inner = os.open(name, os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = inner
    os.close(here)
    with Scratch("rlhf-code-", tmp_path) as scratch:
        deep.rename(scratch / "deep")
    remove_tree(tmp_path / "not there")
    assert list(tmp_path.iterdir()) == []
