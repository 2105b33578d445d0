"""The contract of engines, against a server that speaks SGLang's protocol."""

import pytest
from rlhf_authoring import engine_contract, write_tiny_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlhf_host.distributed import reserved

from .sglang import Sglang

PLACE = reserved("127.0.0.1")


@pytest.fixture(scope="module", autouse=True)
def contract_server(tmp_path_factory):
    """Serves the contract's model, in which no token ends a completion."""
    path = write_tiny_model(tmp_path_factory.mktemp("contract") / "tiny", hidden=128, seed=1)
    model = AutoModelForCausalLM.from_pretrained(path)
    model.config.eos_token_id = model.generation_config.eos_token_id = None
    model.save_pretrained(path)
    AutoTokenizer.from_pretrained(path, eos_token=None).save_pretrained(path)
    with Sglang(path, place=PLACE) as server:
        yield server


TestContract = engine_contract("http", options={"urls": f"http://127.0.0.1:{PLACE.getsockname()[1]}"})
