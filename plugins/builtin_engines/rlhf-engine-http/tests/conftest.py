"""A tiny model, servers of it, and engines that sample from them."""

import asyncio

import pytest
import torch
from rlhf_authoring import write_tiny_model
from rlhf_authoring.learner import Learner
from rlhf_engine_http import Http, fleet
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlhf_host import Sampling
from rlhf_host.distributed import reserved
from rlhf_host.protocols import NO_WEIGHTS, EngineStart

from .sglang import Sglang

PROMPTS = ([5, 6, 7, 8], [9, 10], [5, 6, 7, 8], [11, 12, 13, 14, 15])
PLAIN = Sampling(6)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    for name, value in {"PAUSE_S": 0.01, "LOOK_S": 0.05, "LINE_S": 0.1}.items():
        monkeypatch.setattr(fleet, name, value)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def server(tiny):
    with Sglang(tiny) as server:
        yield server


@pytest.fixture
def nobody():
    """An address at which nothing listens."""
    with reserved("127.0.0.1") as place:
        yield f"http://127.0.0.1:{place.getsockname()[1]}"


class Rig:
    """An engine, and a trainer's model whose weights it gets."""

    def __init__(self, model, *servers, version=0, **options):
        self.model = AutoModelForCausalLM.from_pretrained(model).requires_grad_(False)
        self.folder = model.parent
        plugin = Http(Http.Options(urls=[server if isinstance(server, str) else server.url for server in servers], **options))
        tokenizer = AutoTokenizer.from_pretrained(model)
        self.loop = asyncio.new_event_loop()
        self.engine = plugin.start(EngineStart(model=model, tokenizer=tokenizer, version=version, compute=None, kernels=None))

    def close(self):
        if not self.loop.is_closed():
            self.loop.run_until_complete(self.engine.close())
            self.loop.close()

    def train(self):
        random = torch.Generator().manual_seed(self.engine.version + 1)
        for weight in self.model.parameters():
            weight.data += 0.05 * torch.randn(weight.shape, generator=random)

    def sync(self, version, leave_out=()):
        self.loop.run_until_complete(self._sync(version, leave_out))

    def sync_elsewhere(self, version):
        """As ``sync``, while this thread's own loop is in use."""
        asyncio.run(self._sync(version))

    async def _sync(self, version, leave_out=()):
        weights = [(name, tensor) for name, tensor in self.model.state_dict().items() if name not in leave_out]
        torch.save(weights, file := self.folder / "weights.pt")
        await self.engine.run("rlhf_authoring.contracts.engine:load", file=str(file), version=version, failure="")
        self.engine.set_version(version)

    async def ask(self, prompts=PROMPTS, sampling=PLAIN):
        return await asyncio.gather(
            *(self.engine.generate(ids, sampling, (7, number, 0, 0)) for number, ids in enumerate(prompts))
        )

    def sample(self, *arguments, **settings):
        return self.loop.run_until_complete(self.ask(*arguments, **settings))

    def gap(self, generations, prompts=PROMPTS, temperature=1.0):
        """The largest difference to the log-probabilities of the trainer's model."""
        gaps = []
        for ids, one in zip(prompts, generations, strict=True):
            logits = self.model(input_ids=torch.tensor([[*ids, *one.token_ids]])).logits[0, len(ids) - 1 : -1]
            own = (logits / temperature).log_softmax(-1).gather(1, torch.tensor(one.token_ids)[:, None])[:, 0]
            gaps.append(float((own - torch.tensor(one.logprobs)).abs().max()))
        return max(gaps)


@pytest.fixture
def rig(tiny, tmp_path):
    rigs = []

    def make(*servers, model=tiny, **options):
        rigs.append(made := Rig(model, *servers, **options))
        made.folder = tmp_path
        return made

    yield make
    for one in rigs:
        one.close()


@pytest.fixture
def unsynced(rig):
    return lambda *servers, **options: rig(*servers, version=NO_WEIGHTS, **options)


@pytest.fixture
def learner():
    return Learner()
