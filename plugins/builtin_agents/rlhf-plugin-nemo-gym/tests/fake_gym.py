#!/usr/bin/env python
"""NeMo Gym 0.4.0 in little: head, agent, model, tools and verifier, with the hops, bodies and retries of the real servers.

As ``gym env start SETTING...``. A row's ``fault`` says what goes wrong; so does the variable FAKE_GYM for the start.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import re
import sys
from pathlib import Path

import aiohttp
from aiohttp import web

RETRIED, ENDLESS = (429, 500, 502, 503, 504, 520), (429, 502, 503, 504, 520)
TOKENS = ("prompt_token_ids", "generation_token_ids", "generation_log_probs")
NO_METADATA = {"responses_create_params", "fault"}


class Fake:
    def __init__(self, settings):
        self.settings = settings
        self.urls = {}

    async def start(self):
        head = re.search(r"host: (\S+), port: (\d+)", self.settings["head_server"])
        routes = {
            "head": [("GET", "/server_instances", self.instances), ("GET", "/global_config_dict_yaml", self.config)],
            "tools": [("POST", p, h) for p, h in (("/seed_session", self.seed), ("/add", self.add), ("/verify", self.verify))],
            "policy_model": [("POST", "/v1/responses", self.model)],
            "calculator": [("POST", "/run", self.run), ("POST", "/v1/responses", self.responses)],
        }
        self.http = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(), cookie_jar=aiohttp.DummyCookieJar())
        self.runners = {}
        for name, paths in routes.items():
            app = web.Application(client_max_size=1 << 26)
            for method, path, handler in paths:
                app.router.add_route(method, path, handler)
            runner = self.runners[name] = web.AppRunner(app, access_log=None)
            await runner.setup()
            site = web.TCPSite(runner, head[1], int(head[2]) if name == "head" else 0, shutdown_timeout=0.1)
            await site.start()
            self.urls[name] = f"http://127.0.0.1:{runner.addresses[0][1]}"

    async def instances(self, request):
        kinds = {"tools": "resources_servers", "policy_model": "responses_api_models", "calculator": "responses_api_agents"}
        return web.json_response(
            [{"process_name": name, "server_type": kind, "name": "x", "url": self.urls[name]} for name, kind in kinds.items()]
        )

    async def config(self, request):
        bound = [f", max_steps: {value}" for name, value in self.settings.items() if name.endswith("max_steps")]
        agent = f"calculator: {{responses_api_agents: {{simple_agent: {{entrypoint: app.py{''.join(bound)}}}}}}}"
        return web.json_response(f"policy_base_url: {self.settings['policy_base_url']}\n{agent}\n")

    # --- the agent --------------------------------------------------------------------------------

    async def run(self, request):
        row = await request.json()
        match row.get("fault"):
            case "422" | "429" as status:
                return web.json_response({"detail": "not today"}, status=int(status))
            case "reset":
                request.transport.abort()
            case "slow":
                await asyncio.sleep(60)
            case "not_json":
                return web.Response(text="Internal Server Error")
            case "dies" if not Path(row["mark"]).exists():
                Path(row["mark"]).touch()
                os._exit(3)
            case "always_dies":
                os._exit(3)
            case "model_dies" if not Path(row["mark"]).exists():
                Path(row["mark"]).touch()
                await self.runners["policy_model"].cleanup()
        async with self.http.post(f"{self.urls['tools']}/seed_session", json=row) as seeded:
            if not seeded.ok:
                return self.inner(await seeded.text())
            cookies = seeded.cookies
        params = {**row["responses_create_params"], "_fault": row.get("fault")}
        async with self.http.post(f"{self.urls['calculator']}/v1/responses", json=params, cookies=cookies) as answered:
            if not answered.ok:
                return self.inner(await answered.text())
            response = await answered.json()
        async with self.http.post(f"{self.urls['tools']}/verify", json={**row, "response": response}) as verified:
            return self.inner(await verified.text()) if not verified.ok else web.json_response(await verified.json())

    def inner(self, text):
        return web.json_response(f"Hit an exception calling an inner server: {text}", status=500)

    async def responses(self, request):
        body = await request.json()
        fault, output, steps = body.pop("_fault"), [], 0
        if fault == "drops_metadata":
            del body["metadata"]
        items = body["input"] if isinstance(body["input"], list) else [{"role": "user", "content": body["input"]}]
        while fault != "no_calls" and steps < 16:
            steps += 1
            asked = {**body, "input": items + output, "_fault": fault}
            for _ in range(2 if fault == "hidden" else 1):
                async with self.http.post(f"{self.urls['policy_model']}/v1/responses", json=asked) as answered:
                    if not answered.ok:
                        return self.inner(await answered.text())
                    response = await answered.json()
            output += response["output"]
            calls = [item for item in response["output"] if item["type"] == "function_call"]
            if response["incomplete_details"] or not calls:
                break
            for call in calls:
                url = f"{self.urls['tools']}/{call['name']}"
                async with self.http.post(url, json=json.loads(call["arguments"])) as tool:  # errors are results too
                    result = {"type": "function_call_output", "call_id": call["call_id"], "output": await tool.text()}
                output.append(result)
        return web.json_response({"output": output, "metadata": body.get("metadata")})

    # --- the model server -------------------------------------------------------------------------

    async def model(self, request):
        body = await request.json()
        fault = body.pop("_fault")
        messages = []
        for item in body.pop("input"):
            tokens = {name: item[name] for name in TOKENS if name in item}
            if item.get("type") == "function_call":
                call = {"name": item["name"], "arguments": item["arguments"]}
                calls = [{"id": item["call_id"], "type": "function", "function": call}]
                if messages[-1]["role"] == "assistant":
                    messages[-1].setdefault("tool_calls", []).extend(calls)
                    messages[-1] |= tokens
                else:
                    messages.append({"role": "assistant", "content": None, "tool_calls": calls} | tokens)
            elif item.get("type") == "function_call_output":
                messages.append({"role": "tool", "content": item["output"], "tool_call_id": item["call_id"]})
            else:
                content = item["content"]
                text = content if isinstance(content, str) else "".join(part["text"] for part in content)
                messages.append({"role": item["role"], "content": text} | tokens)
        tools = [{"type": "function", "function": {k: v for k, v in t.items() if k != "type"}} for t in body.pop("tools", [])]
        chat = {**body, "messages": messages, "model": "policy"} | ({"tools": tools} if tools else {})
        chat |= {"logprobs": True, "top_logprobs": 0, "return_tokens_as_token_ids": True}
        status, told = await self.ask_policy(chat)
        if status == 400 and "context length" in json.dumps(told):
            choice = {"finish_reason": "length", "message": {"role": "assistant", "content": None}}
        elif status != 200:
            return self.inner(json.dumps(told))
        else:
            choice = told["choices"][0]
        message = choice["message"]
        if fault == "wrong_tokens":
            message["generation_token_ids"][-1] += 1
        output = []
        if message.get("content") or not message.get("tool_calls"):
            part = {"type": "output_text", "text": message.get("content") or "", "annotations": []}
            output.append({"type": "message", "role": "assistant", "content": [part]})
        for call in message.get("tool_calls") or []:
            output.append({"type": "function_call", "call_id": call["id"], **call["function"]})
        if fault != "no_ids":
            output[-1] |= {name: message[name] for name in TOKENS if name in message}
        incomplete = {"reason": "max_output_tokens"} if choice["finish_reason"] == "length" else None
        return web.json_response({"output": output, "incomplete_details": incomplete})

    async def ask_policy(self, chat):
        tries = most = 3
        while True:
            try:
                url, key = f"{self.settings['policy_base_url']}/chat/completions", {"Authorization": "Bearer none"}
                async with self.http.post(url, json=chat, headers=key) as answer:
                    tries -= answer.status not in ENDLESS
                    if answer.status not in RETRIED or tries <= 0:
                        return answer.status, await answer.json()
            except aiohttp.ClientOSError:  # Gym tries these for ever, too
                assert most
            await asyncio.sleep(0.05)

    # --- the tools --------------------------------------------------------------------------------

    async def seed(self, request):
        row = await request.json()
        answer = web.json_response({}, status=500 if row.get("fault") == "seed_500" else 200)
        answer.set_cookie("session", "s")
        return answer

    async def add(self, request):
        body = await request.json()
        if not all(isinstance(body.get(name), int) for name in "ab"):
            return web.json_response({"detail": "a and b are integers"}, status=422)
        return web.json_response({"sum": body["a"] + body["b"]})

    async def verify(self, request):
        body = await request.json()
        texts = [item["content"][0]["text"] for item in body["response"]["output"] if item["type"] == "message"]
        right = bool(texts) and str(body["expected"]) in texts[-1]
        reward = {"no_reward": None, "nan": math.nan}.get(body.get("fault"), float(right))
        if body.get("fault") == "verify_500":
            return web.json_response("KeyError('expected')", status=500)
        return web.json_response({**body, "reward": reward, "accuracy": right, "turns": len(texts), "note": "a text"})


async def main(words):
    settings = dict(word.lstrip("+").partition("=")[::2] for word in words[2:])
    print("settings", json.dumps(settings), flush=True)
    print("environment", *sorted(os.environ), flush=True)
    fault = os.environ.get("FAKE_GYM", "")
    if fault == "broken":
        sys.exit("ModuleNotFoundError: No module named 'tools'")
    if fault == "silent":
        await asyncio.sleep(600)
    await Fake(settings).start()
    if fault == "leaves":
        await asyncio.create_subprocess_exec("sleep", "77.5", start_new_session=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1:]))
