"""The parts of a plan: names, and what each is."""

from __future__ import annotations

GB = 1e9

PARTS = {
    "weights": "of trained and frozen roles",
    "gradients": "with the buffers in which they are reduced",
    "optimizer": "moments, and weights in float32 where those of passes are not",
    "gathered": "weights that are whole during a pass, and autocast's copies",
    "activations": "what a pass keeps for its backward pass",
    "logits": "a chunk of them, and the gradient of the head",
    "engine": "weights of an engine",
    "cache": "keys and values of answers",
    "sync": "buckets of weights on their way to engines",
}
"""Parts of what a device holds: of the roles, then of engines; at last buckets of weights on their way."""

GPU_NAMES = ("A100", "H100", "H200", "B200", "L40S", "RTX4090")
"""GPUs whose data sheets are here (``gpu_time.GPUS``)."""
