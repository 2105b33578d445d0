"""The embedded engine for one model, and what the trainer says of its samples."""

import asyncio

import torch

from rlhf_host.engines.plain_path import PlainKernels
from rlhf_host.engines.requests import Request
from rlhf_host.engines.transformers import Transformers
from rlhf_host.protocols import EngineStart
from rlhf_host.runtimes.compute import Inline

PROMPTS = [(3, 5, 7), (4, 9, 8, 3, 11, 20, 7), (3, 4), (5,), (6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16)]


def engine_for(model, tokenizer=None, version=0, **options):
    start = EngineStart(model=model, tokenizer=tokenizer, version=version, compute=Inline(), kernels=PlainKernels())
    return Transformers(Transformers.Options(**options)).start(start)


def sample(engine, requests):
    """All requests at once, as episodes ask."""

    async def ask():
        engine.expect(len(requests))
        return await asyncio.gather(*(engine.generate(one.token_ids, one.sampling, one.key) for one in requests))

    return asyncio.run(ask())


def decoder_of(engine):
    """What decoded the last batch."""
    return type(engine._fresh).__name__


def requests_for(sampling, count=4, prompts=PROMPTS):
    """``count`` samples of every prompt, of different lengths."""
    return [Request(prompt, sampling(i, j), (0, i, j)) for i, prompt in enumerate(prompts) for j in range(count)]


def trainer_logprobs(model, request, generation):
    """A full forward pass over one row, as training does it: no cache, no padding, gradients on."""
    ids = torch.tensor([[*request.token_ids, *generation.token_ids]])
    logits = model(input_ids=ids, use_cache=False).logits.float() / request.sampling.temperature
    drawn = torch.tensor(generation.token_ids)[:, None]
    return logits[0, len(request.token_ids) - 1 : -1].log_softmax(-1).gather(-1, drawn)[:, 0].detach()


def mismatch(model, requests, generations):
    return max(
        float((trainer_logprobs(model, request, generation) - torch.tensor(generation.logprobs)).abs().max())
        for request, generation in zip(requests, generations, strict=True)
    )
