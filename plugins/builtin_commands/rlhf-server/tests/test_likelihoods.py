"""Log-probabilities of prompts and of other likely tokens, several prompts, and seeds: a real model, beside transformers."""

from __future__ import annotations

import httpx
import openai
import pytest
import torch
from rlhf_authoring import write_tiny_model
from rlhf_server.app import PolicyServer
from rlhf_server.likelihoods import by_text
from transformers import AutoModelForCausalLM

import rlhf_host

LONGEST = 60
TEXTS = ["1+1=2", "what is 3?", "7"]
USER = [{"role": "user", "content": "1+1="}]
PART = ["message.output_text.logprobs"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("model"), seed=3)


@pytest.fixture(scope="module")
def served(model):
    """A session, its server, and a client. The run's own temperature must not count."""
    rollout = {"max_new_tokens": 6, "temperature": 0.5, "max_tokens": LONGEST}
    with rlhf_host.session(model=model, rollout=rollout, train={"threads": 1}) as running:
        server = running.run(PolicyServer.start(shared=running.policy, role=running.roles["actor"]))
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key=server.api_key, max_retries=0) as client:
            yield running, server, client
        running.run(server.close())


@pytest.fixture(scope="module")
def told(model):
    """``told(ids)``: transformers' log-probabilities of every place but the first, ``[T - 1, V]``."""
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)

    def of(ids):
        with torch.no_grad():
            return reference(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)

    return of


def assert_as_told(logprobs, top, ids, every, tokenizer, k):
    assert logprobs == pytest.approx(every.gather(-1, torch.tensor(ids)[:, None])[:, 0].tolist(), abs=1e-5)
    for token, likely, row in zip(ids, top, every, strict=True):
        values, best = row.topk(k)
        expected = {tokenizer.decode([one]): value for one, value in zip(best.tolist(), values.tolist(), strict=True)}
        expected.setdefault(tokenizer.decode([token]), float(row[token]))
        assert likely == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("most", [0, 1, 4])
@pytest.mark.parametrize("sent", ["texts", "tokens"])
def test_an_echoed_prompt_has_the_model_s_own_log_probabilities(served, told, sent, most):
    running, _, client = served
    ids = [running.tokenizer.encode(text) for text in TEXTS]
    prompt = TEXTS if sent == "texts" else ids
    answer = client.completions.create(model="policy", prompt=prompt, echo=True, logprobs=3, max_tokens=most, temperature=0)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    for text, prompt_ids, choice in zip(TEXTS, ids, answer.choices, strict=True):
        assert len(choice.token_ids) <= most
        assert choice.text.startswith(text)
        assert choice.prompt_token_ids == prompt_ids
        whole = [*prompt_ids, *choice.token_ids]
        assert choice.logprobs.tokens == [running.tokenizer.decode([token]) for token in whole]
        first, *logprobs = choice.logprobs.token_logprobs
        none, *top = choice.logprobs.top_logprobs
        assert (first, none) == (None, None)
        if len(whole) > 1:
            assert_as_told(logprobs, top, whole[1:], told(whole), running.tokenizer, 3)
    said = sum(len(choice.token_ids) for choice in answer.choices)
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (sum(map(len, ids)), said)


def test_a_greedy_token_has_exactly_the_largest_log_probability(served, told):
    running, _, client = served
    greedy = client.completions.create(model="policy", prompt="1+1=", temperature=0, max_tokens=6, logprobs=1).choices[0]
    assert greedy.logprobs.token_logprobs == [max(likely.values()) for likely in greedy.logprobs.top_logprobs]
    assert max(greedy.logprobs.token_logprobs) < 0, "they are the model's, not those of greedy sampling"
    ids = running.tokenizer.encode("what is 2+2=4?")
    read = client.completions.create(model="policy", prompt=ids, echo=True, logprobs=1, max_tokens=0).choices[0].logprobs
    best = told(ids).argmax(-1).tolist()
    pairs = zip(read.token_logprobs[1:], read.top_logprobs[1:], strict=True)
    assert [own == max(top.values()) for own, top in pairs] == [a == b for a, b in zip(best, ids[1:], strict=True)]


def test_tokens_with_the_same_text_do_not_hide_the_likeliest():
    assert by_text({5: -0.1, 6: -2.0}, 7, -9.0, lambda token: "�") == {"�": -0.1}


def test_chat_and_responses_give_likely_tokens_of_the_model(served, told):
    running, _, client = served
    ask = {"temperature": 0.5, "top_logprobs": 2}
    said = client.chat.completions.create(model="policy", messages=USER, logprobs=True, **ask).choices[0]
    response = client.responses.create(model="policy", input=USER, include=PART, **ask)
    for prompt, ids, content in (
        (said.message.prompt_token_ids, said.message.generation_token_ids, said.logprobs.content),
        (response.prompt_token_ids, response.generation_token_ids, response.output[0].content[0].logprobs),
    ):
        every = told([*prompt, *ids])[-len(ids) :]
        assert [one.logprob for one in content] == pytest.approx(
            [float(row[i]) for row, i in zip(every, ids, strict=True)], abs=1e-5
        )
        for one, row in zip(content, every, strict=True):
            values, best = row.topk(2)
            assert [each.token for each in one.top_logprobs] == [running.tokenizer.decode([token]) for token in best]
            assert [each.logprob for each in one.top_logprobs] == pytest.approx(values.tolist(), abs=1e-5)
    # Without likely tokens, they are those of the distribution that was sampled.
    del ask["top_logprobs"]
    said = client.chat.completions.create(model="policy", messages=USER, logprobs=True, **ask).choices[0]
    assert [one.logprob for one in said.logprobs.content] == said.message.generation_log_probs
    response = client.responses.create(model="policy", input=USER, include=PART, **ask)
    assert [one.logprob for one in response.output[0].content[0].logprobs] == response.generation_log_probs
    plain = client.completions.create(model="policy", prompt="1+1=", logprobs=0, temperature=0).choices[0]
    assert (set(plain.logprobs.token_logprobs), plain.logprobs.top_logprobs) == ({0.0}, None)


def test_choices_of_several_prompts_are_in_their_order(served):
    _, _, client = served
    answer = client.completions.create(model="policy", prompt=["1+1=", "2+2="], n=3, max_tokens=2)
    assert [choice.index for choice in answer.choices] == list(range(6))
    assert len({tuple(choice.prompt_token_ids) for choice in answer.choices[:3]}) == 1
    assert answer.choices[0].prompt_token_ids != answer.choices[3].prompt_token_ids
    assert answer.usage.prompt_tokens == len(answer.choices[0].prompt_token_ids) * 2
    streamed = list(client.completions.create(model="policy", prompt=["1", "2"], echo=True, max_tokens=0, stream=True))
    assert [chunk.choices[0].text for chunk in streamed] == ["1", "2"]


@pytest.mark.parametrize("form", ["chat", "text", "responses"])
def test_a_seed_gives_the_same_answers_again(served, form):
    _, _, client = served

    def ask(seed, **more):
        if form == "chat":
            raw = client.chat.completions.with_raw_response.create(model="policy", messages=USER, seed=seed, **more)
            choices = [choice.message.content for choice in raw.parse().choices]
        elif form == "text":
            raw = client.completions.with_raw_response.create(model="policy", prompt="1+1=", seed=seed, **more)
            choices = [choice.text for choice in raw.parse().choices]
        else:
            more.pop("n", None)
            raw = client.responses.with_raw_response.create(model="policy", input=USER, extra_body={"seed": seed}, **more)
            choices = [raw.parse().output_text]
        assert "x-rlhf-ignored" not in raw.headers
        return choices

    first, again, other = ask(7, temperature=1, n=2), ask(7, temperature=1, n=2), ask(8, temperature=1, n=2)
    assert first == again != other
    assert len(set(first)) == len(first), "each choice is a sample of its own"


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("completions", {"prompt": ["1", ""]}, "prompt[1]"),
        ("completions", {"prompt": [[1], [10**6]]}, "prompt[1]"),
        ("completions", {"prompt": ["1", [1.5]]}, "prompt[1]"),
        ("completions", {"prompt": []}, "prompt"),
        ("completions", {"prompt": ["1"] * 257}, "prompt"),
        ("completions", {"prompt": ["1"] * 100, "n": 3}, "n"),
        ("completions", {"prompt": "1", "logprobs": 21}, "logprobs"),
        ("completions", {"prompt": "1", "logprobs": "all"}, "logprobs"),
        ("completions", {"prompt": "1", "top_logprobs": 2}, "top_logprobs"),
        ("completions", {"prompt": "1", "echo": 1}, "echo"),
        ("completions", {"prompt": "1", "echo": "yes"}, "echo"),
        ("completions", {"prompt": "1", "max_tokens": 0}, "max_tokens"),
        ("completions", {"prompt": "1", "max_tokens": False, "echo": True}, "max_tokens"),
        ("completions", {"prompt": "1", "best_of": 3}, "best_of"),
        ("completions", {"prompt": "1", "suffix": "x"}, "suffix"),
        ("completions", {"prompt": "1", "seed": -1}, "seed"),
        ("completions", {"prompt": "1", "seed": 1.5}, "seed"),
        ("chat/completions", {"messages": USER, "top_logprobs": 2}, "top_logprobs"),
        ("chat/completions", {"messages": USER, "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ("chat/completions", {"messages": USER, "logprobs": 3}, "logprobs"),
        ("chat/completions", {"messages": USER, "echo": True}, "echo"),
        ("responses", {"input": USER, "include": "all"}, "include"),
        ("responses", {"input": USER, "include": ["message.output_text.logprob"]}, "include"),
        ("responses", {"input": USER, "top_logprobs": 21}, "top_logprobs"),
        ("messages", {"messages": USER, "max_tokens": 3, "top_logprobs": 2}, "top_logprobs"),
        ("messages", {"messages": USER, "max_tokens": 3, "echo": True}, "echo"),
        ("tokenize", {"prompt": ["1", "2"]}, "prompt"),
    ],
)
def test_what_is_refused_by_name(served, path, body, param):
    _, server, _ = served
    headers = {"Authorization": f"Bearer {server.api_key}"}
    answer = httpx.post(f"{server.url}/v1/{path}", json=body, headers=headers, timeout=20)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_a_prompt_that_is_too_long_is_not_read(served):
    _, _, client = served
    for most in (0, 1):
        with pytest.raises(openai.BadRequestError, match=f"maximum context length is {LONGEST} tokens") as error:
            client.completions.create(model="policy", prompt=[5] * (LONGEST + 1), echo=True, logprobs=1, max_tokens=most)
        assert error.value.code == "context_length_exceeded"
    whole = client.completions.create(model="policy", prompt=[5] * LONGEST, echo=True, logprobs=1, max_tokens=0)
    assert len(whole.choices[0].logprobs.token_logprobs) == LONGEST


def test_an_episode_answers_several_prompts_and_computes_nothing_else(serve, stage):
    async def test(server, stage):
        session = server.open(stage.policy())
        async with openai.AsyncOpenAI(base_url=session.base_url, api_key="x") as client:
            answer = await client.completions.create(model="m", prompt=["one", "another"], logprobs=1, seed=3)
            for more in ({"echo": True}, {"logprobs": 2}):
                with pytest.raises(openai.BadRequestError, match="rlhf serve"):
                    await client.completions.create(model="m", prompt="one", **more)
        return session, answer

    session, answer = serve(test, stage(lambda ids: f"of {len(ids)}"))
    assert [choice.text for choice in answer.choices] == ["of 3", "of 7"]
    assert [choice.logprobs.token_logprobs[0] for choice in answer.choices] == [-0.5, -0.5]
    assert session.ignored == {"seed": 1}
    assert len(session.policy.trajectories()) == 2
