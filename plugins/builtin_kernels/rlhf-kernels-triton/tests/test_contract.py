"""The host's contract, check by check: by the kernels on a GPU, elsewhere by their formulas, because the interpreter is slow."""

import pytest
import torch
from rlhf_authoring import kernels_contract


@pytest.mark.usefixtures("computing" if torch.cuda.is_available() else "stand_in")
class TestContract(kernels_contract("triton")):
    pass
