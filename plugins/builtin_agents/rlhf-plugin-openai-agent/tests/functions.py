"""Functions instead of programs."""

from openai import AsyncOpenAI, OpenAI


async def run(task, base_url, api_key):
    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        messages = [{"role": "user", "content": task["prompt"]}]
        for _ in range(2):
            answer = await client.chat.completions.create(model="policy", messages=messages)
            messages += [
                {"role": "assistant", "content": answer.choices[0].message.content},
                {"role": "user", "content": "1+1="},
            ]
        return 1.0


def plain(task, base_url, api_key):
    with OpenAI(base_url=base_url, api_key=api_key) as client:
        client.chat.completions.create(model="policy", messages=[{"role": "user", "content": task["prompt"]}])
    return {"reward": 1, "score": 1}


def nothing(task, base_url, api_key):
    return plain(task, base_url, api_key) and None
