"""Files written by ``torch.save``, read as data: no code in them runs."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from rlhf_host.errors import UserError

OTHER = "take another checkpoint of the run, or start a new run"


def load_data(path: Path, kinds: Mapping[str, type]) -> dict[str, Any]:
    """Returns the dict of plain values and tensors in a file, on the CPU.

    Args:
        kinds: keys that it must have, with the types of their values.

    Raises:
        UserError: the file holds anything else, or cannot be read. PyTorch's own message would advise to let it run code.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of pickles that it did not write
            data = torch.load(path, weights_only=True, map_location="cpu")
    except pickle.UnpicklingError as error:
        raise more_than_data(path) from error
    except FileNotFoundError as error:
        raise UserError(f"{path} is missing: {OTHER}") from error
    except Exception as error:  # a damaged file can raise anything
        raise UserError(f"{path} is not a file of tensors that can be read: {OTHER}") from error
    if not isinstance(data, dict) or not all(isinstance(data.get(key), kind) for key, kind in kinds.items()):
        raise UserError(f"{path} was not written by a run (it needs {' and '.join(kinds)}): {OTHER}")
    return data


def more_than_data(path: Path) -> UserError:
    """Returns the message for a pickle with objects, whose construction may run code."""
    return UserError(
        f"{path} holds more than plain values and tensors, so reading it could run code, which is refused: it was not written by"
        f" a run; {OTHER}"
    )
