"""What killed processes leave in temporary directories is cleared away by the next of their kind; what lives is left alone."""

import os
import time

from rlhf_host.scratch import Scratch


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
