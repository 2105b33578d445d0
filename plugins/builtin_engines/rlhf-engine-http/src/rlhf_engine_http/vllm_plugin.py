"""Tells vLLM, wherever this package is installed beside it, of a backend for weight transfer (``vllm.general_plugins``)."""

from __future__ import annotations

BACKEND = "rlhf_stream"
"""Its name, as in ``vllm serve --weight-transfer-config``."""


def register() -> None:
    """Registers the backend, which is imported when a server chooses it. Called by vLLM in each of its processes."""
    try:
        from vllm.distributed.weight_transfer import WeightTransferEngineFactory
    except ImportError:  # an older vLLM, which has no weight transfer
        return
    with_it = getattr(WeightTransferEngineFactory, "_registry", {})
    if BACKEND not in with_it:
        WeightTransferEngineFactory.register_engine(BACKEND, "rlhf_engine_http.vllm_stream", "StreamEngine")
