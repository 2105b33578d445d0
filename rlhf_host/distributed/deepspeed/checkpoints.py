"""DeepSpeed's checkpoints: read as data only, and made fit for another number of ranks."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from rlhf_host.errors import UserError

TAG = "state"
SHAPE = "shape.json"


def read_shape(directory: Path) -> dict[str, Any]:
    try:
        return dict(json.loads((directory / SHAPE).read_text()))
    except FileNotFoundError as error:
        raise UserError(
            f"{directory} was not written by the deepspeed backend: resume with the backend it was started with"
        ) from error


@contextlib.contextmanager
def data_only() -> Iterator[None]:
    """Overrules DeepSpeed, which loads checkpoints in a way that lets them run code, inside the block."""
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    name = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        with torch.serialization.safe_globals([LossScaler, DynamicLossScaler, ZeroStageEnum, fragment_address]):
            yield
    finally:
        os.environ.pop(name) if before is None else os.environ.update({name: before})


def convert(source: Path, target: Path) -> None:
    """Converts to DeepSpeed's universal checkpoint: a file per parameter, for any number of ranks. Stage 3 has its own form."""
    from deepspeed.checkpoint.ds_to_universal import main

    arguments = {"input_folder": str(source), "output_folder": str(target), "strict": True}
    settings = {"num_extract_workers": 1, "num_merge_workers": 1, "keep_temp_folder": False, "inject_missing_state": False}
    with contextlib.redirect_stdout(sys.stderr):
        main(argparse.Namespace(**arguments, **settings))
