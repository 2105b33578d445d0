"""Environments that others play: the host's own episodes with another policy, and three protocols over them."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import re
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import click
import pytest
from aiohttp import ClientSession, CookieJar
from rlhf_environments import Answer, Result, hubs, opened, text_policy, written
from rlhf_environments.gym import GymServer
from rlhf_environments.openenv import OpenEnvServer
from rlhf_environments.play_server import PlayServer
from rlhf_environments.playing import Full
from rlhf_environments.replaying import OVER, Judged
from rlhf_environments.responses import messages_of_output
from rlhf_environments.text_tokens import TextCodec, message_tokens, messages_of

from rlhf_host import Episode, EpisodeFailed, Task, UserError
from rlhf_host.commands import main
from rlhf_host.settings import read_config, write_yaml

AGENTS = Path(__file__).with_name("agents.py")
ROWS = [{"prompt": f"{a}+{a}=", "label": 2 * a} for a in range(4)]


@contextmanager
def environment(folder, agent="Guess", reward=False, more=None, rows=ROWS, **limits):
    data = folder / "sums.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    settings = {"data": {"sources": [{"path": str(data)}]}, **(more or {})}
    if agent:
        settings["agent"] = {"name": f"{AGENTS}:{agent}"}
    if reward:
        settings["reward"] = {"letters": {"name": f"{AGENTS}:letters"}}
    (folder / "settings.yaml").write_text(write_yaml(settings))
    loaded = read_config(folder / "settings.yaml", quickstart=False)
    with opened(loaded.config, loaded.origins, **limits) as found:
        yield found


async def played(environment, answers, **start):
    """The texts that are shown, and the end."""
    play, turn = await environment.start(**start)
    shown = []
    try:
        for answer in answers:
            shown.append([message["content"] for message in turn.new])
            turn = await play.answer(Answer(answer) if isinstance(answer, str) else answer)
        return shown, turn
    finally:
        await play.close()


def test_messages_are_the_same_after_tokens():
    messages = [
        {"role": "system", "content": "<|end|> Ελ 🎲 \x00"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "a", "function": {"name": "f", "arguments": '{"x": "<|said|>"}'}}],
        },
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
    ]
    codec = TextCodec()
    assert messages_of(codec.render(messages)) == messages
    assert codec.tokenizer.decode(codec.render(messages), skip_special_tokens=True) == "<|end|> Ελ 🎲 \x00ab"
    with pytest.raises(EpisodeFailed, match="cannot be written as text"):
        message_tokens({"role": "user", "content": "\ud800"})
    with pytest.raises(EpisodeFailed, match="no text"):
        message_tokens({"role": "user", "content": [{"type": "image"}]})


def test_turns_random_numbers_and_what_ends(tmp_path):
    with environment(tmp_path) as found:
        run, env = found.session.run, found.environment
        assert "sums: 4 tasks" in found.report[0]
        shown, end = run(played(env, ["9", "4"], task=2, seed=5, sample=0))
        assert shown[0] == ["2+2="]
        assert shown[1][0].startswith("no, 0.")
        assert end.metrics == {"guess/tries": 2.0}
        assert (shown, end) == run(played(env, ["9", "4"], task=2, seed=5, sample=0))
        assert end.reward != run(played(env, ["9", "4"], task=2, seed=5, sample=1))[1].reward
        assert end.reward != run(played(env, ["9", "4"], task=2, seed=6, sample=0))[1].reward
        cut = run(played(env, ["9", Answer("4", truncated=True)], task=2, seed=5, sample=0))[1]
        assert (cut.truncated, cut.reward) == (True, end.reward - 0.1)
        for text, why in (("fail", "asked to fail"), ("bug", "a bug")):
            with pytest.raises(EpisodeFailed, match=why):
                run(played(env, [text]))
        for wrong in ({"task": 4}, {"seed": -1}, {"sample": True}):
            with pytest.raises(EpisodeFailed, match=f"{next(iter(wrong))} .*: a whole number from 0"):
                run(env.start(**wrong))
        assert not env.opened


def test_rewards_read_the_texts(tmp_path):
    with environment(tmp_path, agent="", reward=True, rows=[{**row, "level": 1} for row in ROWS]) as found:
        assert found.report[1] == "columns that agents and rewards alone may read: level"
        run, env = found.session.run, found.environment
        assert run(played(env, ["zwölf"], task=1))[1] == Result(5 / 3 + 2 / 7, {"letters": 5 / 3 + 2 / 7}, None, {"turns": 1.0})
        with pytest.raises(EpisodeFailed, match=r"no reward could be given: letters: .*cannot judge that"):
            run(played(env, ["odd"]))


def test_agents_that_run_themselves(tmp_path):
    with environment(tmp_path, agent="Talk", reward=True) as found:
        shown, end = found.session.run(played(found.environment, ["Ann", "2"], task=1))
        assert shown == [["your name?"], ["Ann, 1+1="]]
        assert end.metrics == {"turns": 2.0}
    with (
        environment(tmp_path, agent="Seats", reward=True) as found,
        pytest.raises(EpisodeFailed, match="2 answers that are judged"),
    ):
        found.session.run(played(found.environment, ["a", "b"]))


def test_a_text_policy_is_the_hosts_policy():
    async def ask(question):
        return Answer(f"{len(question.messages)}")

    async def talk():
        policy = text_policy(Episode("e", "g", Task("")), ask)
        reply = await policy.chat([{"role": "user", "content": "a"}])
        await policy.chat([{"role": "user", "content": "a"}, reply.message, {"role": "user", "content": "b"}])
        with pytest.raises(EpisodeFailed, match="tokens of its own"):
            await policy.generate([1, 2, 513])
        return policy.trajectories()

    [row] = asyncio.run(talk())
    assert [segment.kind[0] for segment in row.segments] == [*"paoa"]


def test_concurrent_episodes_have_their_own_state_and_are_bounded(tmp_path):
    with environment(tmp_path, most=50) as found:
        run, env = found.session.run, found.environment

        async def fifty():
            return await asyncio.gather(
                *(played(env, ["x"] * (n % 2) + [str(2 * (n % 4))], task=n % 4, seed=n) for n in range(50))
            )

        assert [end.metrics["guess/tries"] for _, end in run(fifty())] == [1.0 + n % 2 for n in range(50)]

        async def too_many():
            plays = [(await env.start())[0] for _ in range(50)]
            with pytest.raises(Full, match="50 episodes are open"):
                await env.start()
            plays[0].used -= 10000
            await env.start()  # in place of the one that nobody has asked
            assert len(env.opened) == 50

        run(too_many())
    assert not env.opened


def test_what_is_judged_at_the_end_is_replayed(tmp_path):
    def said(*calls):
        function = [{"id": f"c{n}", "function": {"name": "add", "arguments": json.dumps(call)}} for n, call in enumerate(calls)]
        return {"role": "assistant", "content": "", "tool_calls": function}

    async def judge(env, results):
        judged = Judged(*(await env.start(3, 1, 0)))
        told = [await judged.call("add", {"a": a, "b": 1}) for a in (1, 2)]
        messages = [said({"a": 1, "b": 1}, {"a": 2, "b": 1}), *({"role": "tool", "content": text} for text in results)]
        try:
            return told, await judged.replay([*messages, {"role": "assistant", "content": "6"}])
        finally:
            await judged.close()

    with environment(tmp_path) as found:
        told, end = found.session.run(judge(found.environment, ["2", "3"]))
        assert told == ["2", "3"]
        calls = Answer(tool_calls=said({"a": 1, "b": 1}, {"a": 2, "b": 1})["tool_calls"])
        assert end == found.session.run(played(found.environment, [calls, "6"], task=3, seed=1, sample=0))[1]
        with pytest.raises(EpisodeFailed, match="not the same twice"):
            found.session.run(judge(found.environment, ["2", "4"]))

        async def beyond_its_turns():
            judged = Judged(*(await found.environment.start(3, 1, 0)))
            told = await asyncio.gather(*(judged.call("add", {"a": a}) for a in range(4)))
            end = await judged.replay(
                [
                    said(*({"a": a} for a in range(4))),
                    *({"role": "tool", "content": text} for text in told),
                    {"role": "assistant", "content": "6"},
                ]
            )
            await judged.close()
            return told, end.metrics["guess/tries"]

        assert found.session.run(beyond_its_turns()) == (["0", "1", "2", "3"], 2.0)

    with environment(tmp_path, more={"agent": {"name": f"{AGENTS}:Guess", "tries": 1}}, agent="") as found:

        async def late():
            judged = Judged(*(await found.environment.start(3, 1, 0)))
            told = [await judged.call("add", {"a": 1}) for _ in range(2)]
            await judged.close()
            return told

        assert found.session.run(late()) == [OVER, OVER]
        assert not found.environment.opened


def test_openenv(tmp_path):
    async def talk(env):
        server = OpenEnvServer(env, "guess")
        await server.start("127.0.0.1", 0)
        told = []
        async with ClientSession() as http:
            assert (await (await http.get(f"{server.url}/schema")).json())["action"]["required"] == ["message"]
            assert (await http.get(f"{server.url}/ws", headers={"Origin": "http://elsewhere"})).status == 403
            socket = await http.ws_connect(f"{server.url}/ws")

            async def ask(kind, **data):
                await socket.send_json({"type": kind, "data": data})
                answer = await socket.receive_json()
                told.append(answer["data"].get("code", answer["type"]))
                return answer["data"]

            assert "reset first" in (await ask("step", message="1"))["message"]
            assert (await ask("reset", task=2, seed=5, sample=0))["observation"]["text"] == "2+2="
            tools = await ask("mcp", method="tools/list", id=1)
            assert [tool["name"] for tool in tools["result"]["tools"]] == ["add"]
            called = await ask("step", type="call_tool", tool_name="add", arguments={"a": 1, "b": 2})
            assert called["observation"]["result"] == "3"
            end = await ask("step", message="4")
            for data in ({"text": "4"}, {"message": 4}, {}):
                await ask("step", **data)
            await ask("reset", tsk=1)
            await ask("nothing")
            await ask("reset")
            await ask("step", message="fail")
            await ask("reset")
            await socket.close()
            while env.opened:  # who leaves frees what was open
                await asyncio.sleep(0.01)
        await server.close()
        assert told == [
            "VALIDATION_ERROR",
            "observation",
            "mcp",
            *["observation"] * 2,
            *["VALIDATION_ERROR"] * 5,
            "observation",
            "EXECUTION_ERROR",
            "observation",
        ]
        return end

    with environment(tmp_path) as found:
        end = found.session.run(talk(found.environment))
        calls = Answer(tool_calls=[{"function": {"name": "add", "arguments": {"a": 1, "b": 2}}}])
        same = found.session.run(played(found.environment, [calls, "4"], task=2, seed=5, sample=0))[1]
    assert (end["reward"], end["done"]) == (same.reward, True)


def test_nemo_gym(tmp_path):
    async def talk(env):
        server = GymServer(env)
        await server.start("127.0.0.1", 0)

        async def judge(row, *texts):
            async with ClientSession(cookie_jar=CookieJar(unsafe=True)) as http:

                async def post(path, body):
                    answer = await http.post(f"{server.url}/{path}", json=body)
                    return answer.status, await answer.text()

                assert (await post("seed_session", row))[0] == 200
                output = []
                for text in texts[:-1]:
                    status, result = await post("add", {"a": int(text)})
                    assert status == 200
                    output += [
                        {"type": "function_call", "call_id": text, "name": "add", "arguments": json.dumps({"a": int(text)})}
                    ]
                    output += [{"type": "function_call_output", "call_id": text, "output": result}]
                output.append({"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": texts[-1]}]})
                assert (await post("subtract", {}))[0] == 404
                return await post("verify", {**row, "response": {"output": output, "status": "completed"}})

        async with ClientSession() as http:
            rows = [json.loads(line) for line in (await (await http.get(f"{server.url}/rows")).text()).splitlines()]
            assert (await http.post(f"{server.url}/verify", json={})).status == 400
            assert (await http.post(f"{server.url}/seed_session", json={"rlhf_task": 0})).status == 400
        row = {**rows[2], "rlhf_seed": 5, "rlhf_sample": 0}
        answers = [await judge(row, "7", "4"), await judge(row, "9"), await judge(row, "fail")]
        await server.close()
        return rows, answers

    with environment(tmp_path) as found:
        rows, answers = found.session.run(talk(found.environment))
        calls = Answer(tool_calls=[{"function": {"name": "add", "arguments": {"a": 7}}}])
        same = found.session.run(played(found.environment, [calls, "4"], task=2, seed=5, sample=0))[1]
        assert not found.environment.opened
    assert [row["rlhf_task"] for row in rows] == [0, 1, 2, 3]
    assert [status for status, _ in answers] == [200, 422, 422]
    assert json.loads(answers[0][1])["reward"] == same.reward
    assert "goes on after this answer" in answers[1][1]
    assert "asked to fail" in answers[2][1]
    with pytest.raises(ValueError, match="cannot be judged"):
        messages_of_output([{"type": "web_search_call"}])


@asynccontextmanager
async def gym(env):
    """Posts to a resources server, in one session."""
    server = GymServer(env)
    await server.start("127.0.0.1", 0)
    async with ClientSession(cookie_jar=CookieJar(unsafe=True)) as http:

        async def post(path, **body):
            answer = await http.post(f"{server.url}/{path}", json=body)
            return answer.status, await answer.text()

        yield post
    await server.close()


def prompt(text):
    return {"rlhf_task": 1, "responses_create_params": {"input": text}}


def message(text, role="assistant"):
    return {"type": "message", "role": role, "content": text}


REASONING = {"type": "reasoning", "summary": []}
CALL = {"type": "function_call", "call_id": "a", "name": "add", "arguments": "{}"}
RESULT = {"type": "function_call_output", "call_id": "a", "output": "0"}


def test_a_failed_response_has_no_reward(tmp_path):
    failed = {
        "boom": {"status": "failed", "error": {"message": "boom"}, "output": [message("")]},
        "failed (cancelled)": {"status": "cancelled", "output": [message("2")]},
        "ends without a message": {"output": [REASONING]},
        "its output ends": {"output": [CALL, RESULT, REASONING]},
        "no answer to judge": {"output": []},
    }
    judged = [{"output": [REASONING], "status": "incomplete"}, {"output": [message("2"), REASONING]}]

    async def judge(env, response):
        async with gym(env) as post:
            await post("seed_session", **prompt([{"role": "user", "content": "1+1="}]))
            return await post("verify", response=response)

    with environment(tmp_path, agent="", reward=True) as found:
        for told, response in failed.items():
            status, text = found.session.run(judge(found.environment, response))
            assert (status, told in text, '"reward"' in text) == (422, True, False)
        assert [found.session.run(judge(found.environment, response))[0] for response in judged] == [200, 200]


def test_another_prompt_than_the_tasks_is_refused(tmp_path):
    inputs = [
        "1+1=",
        [{"role": "user", "content": [{"type": "input_text", "text": "1+1="}]}],
        "What is the capital of France?",
        [{"role": "user", "content": "2+2="}],
        ["1+1="],
        None,
    ]

    async def seeded(env):
        async with gym(env) as post:
            return [(await post("seed_session", **prompt(shown)))[0] for shown in inputs]

    with environment(tmp_path) as found:
        assert found.session.run(seeded(found.environment)) == [200, 200, 400, 400, 400, 400]


def test_a_trial_is_no_further_episode(tmp_path):
    async def called(env):
        async with gym(env) as post:
            await post("seed_session", **prompt("1+1="))
            return [await post("add", a=2), (await post("verify", response={"output": [message("2")]}))[0]]

    with environment(tmp_path, most=1) as found:
        assert found.session.run(called(found.environment)) == [(200, "2"), 200]
        assert not found.environment.opened


def test_messages_after_the_end_are_refused(tmp_path):
    async def judge(env, *output):
        async with gym(env) as post:
            await post("seed_session", **prompt("1+1="))
            return await post("verify", response={"output": output})

    with environment(tmp_path, agent="", reward=True) as found:
        status, text = found.session.run(judge(found.environment, message("5"), message("no, try", "user"), message("2")))
        assert (status, "message of the user, 'no, try'" in text, '"reward"' in text) == (422, True, False)
        assert found.session.run(judge(found.environment, message("5"), message("no", "user")))[0] == 422
        assert found.session.run(judge(found.environment, message("5"), message("2")))[0] == 200


def test_episodes_over_http_for_what_is_written(tmp_path):
    async def talk(env):
        server = PlayServer(env)
        await server.start("127.0.0.1", 0)

        async with ClientSession(headers={"Authorization": f"Bearer {server.key}"}) as http:

            async def ask(name, **body):
                answer = await http.post(f"{server.url}/{name}", json=body)
                return answer.status, await answer.json()

            assert (await http.post(f"{server.url}/tasks", json={}, headers={"Authorization": "Bearer x"})).status == 401
            assert [row["messages"][0]["content"] for row in (await ask("tasks"))[1]["tasks"]] == [
                row["prompt"] for row in ROWS
            ]
            episode = (await ask("start", task=2, seed=5, sample=0))[1]["episode"]
            first = await ask("replay", episode=episode, messages=[{"role": "assistant", "content": "9"}])
            end = await ask("replay", episode=episode, messages=[{"role": "assistant", "content": "4"}])
            gone = await ask("replay", episode=episode, messages=[])
            failed = await ask("start", task=9)
        await server.close()
        return first, end, gone, failed

    with environment(tmp_path) as found:
        first, end, gone, failed = found.session.run(talk(found.environment))
        same = found.session.run(played(found.environment, ["9", "4"], task=2, seed=5, sample=0))[1]
    assert (first[0], first[1]["done"]) == (200, False)
    assert (end[0], end[1]["reward"]) == (200, same.reward)
    assert (gone[0], gone[1]["error"]["message"][-14:]) == (400, "it is not open")
    assert (failed[0], failed[1]["error"]["kind"]) == (422, "failed")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (
            "--as openen --data x",
            "--as openen is not known: give --as openenv, --as verifiers or --as nemo-gym; did you mean 'openenv'",
        ),
        ("--data x", "--as is missing"),
        ("--as verifiers --data x", "add --output DIR"),
        ("--as openenv --data x -o y", "leave --output out"),
        ("--as nemo-gym --data x", "or --port to serve its protocol here"),
        ("--as nemo-gym --data x -o y --port 1", "--output writes, and --port serves"),
        ("--as openenv --data x --port 70000", "--port 70000: a whole number from 0 to 65535"),
        ("--as verifiers --data x -o .", "it exists already"),
        ("--as verifiers --data x -o . --force", "was not written by rlhf env export"),
        ("single_turn --as openenv --data x --agent single_turn", "both name the agent"),
        ("single_tern --as openenv --data x", "did you mean 'single_turn'"),
        ("--as openenv --reward format", "no data"),
        ("--as openenv --data {data}", "nothing gives a reward"),
        ("--as openenv --data {data} --reward {agents}:letters --data.template none", "the other side renders prompts"),
        ("--as openenv --data {empty} --reward {agents}:letters", "no column for the prompt"),
    ],
)
def test_refused(words, told, tmp_path, capsys):
    (tmp_path / "data.jsonl").write_text(json.dumps(ROWS[0]) + "\n")
    (tmp_path / "empty.jsonl").write_text('{"question_text": "no prompt"}\n')
    places = {"data": tmp_path / "data.jsonl", "empty": tmp_path / "empty.jsonl", "agents": AGENTS}
    with pytest.raises((SystemExit, UserError, click.ClickException)) as raised:
        main.main(["env", "export", *words.format(**places).split()], standalone_mode=False)
    assert told in f"{raised.value} {capsys.readouterr().err}".replace("\n", " ")


def exported(folder, monkeypatch, *words):
    monkeypatch.chdir(folder)
    Path("sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    settings = ("--data", "sums.jsonl", "--agent.tries", "2", "--name", "My-sums")
    main.main(["env", "export", f"{AGENTS}:Guess", *settings, *words], standalone_mode=False)


def check_written(folder, inner):
    settings = (inner / "environment.yaml").read_text()
    assert "tries: '2'" in settings
    assert str(AGENTS.parent) not in settings
    assert {path.name for path in inner.glob("files/*/*")} == {"agents.py", "sums.jsonl"}
    for file in folder.rglob("*.py"):
        compile(file.read_text(), str(file), "exec")
        assert file.name == "agents.py" or not re.search(r"@(name|module|has_tools)@", file.read_text())


def test_a_package_for_verifiers_has_all_it_needs(tmp_path, monkeypatch, capsys):
    exported(tmp_path, monkeypatch, "--as", "verifiers", "-o", "one")
    assert f"copied {tmp_path}/sums.jsonl" in capsys.readouterr().err
    check_written(Path("one"), Path("one/my_sums"))
    assert 'name = "my-sums"' in Path("one/pyproject.toml").read_text()
    assert "HAS_TOOLS = True" in Path("one/my_sums/__init__.py").read_text()


def test_modules_beside_a_copied_file_are_copied_too(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "parts/deep").mkdir(parents=True)
    files = {
        "rw.py": "import json, rw\nfrom helper_q import FACTOR\ndef later():\n    import parts.deep.one\n",
        "helper_q.py": "import more_q\nFACTOR = more_q.FACTOR\n",
        "more_q.py": "import rw, helper_q\nFACTOR = 2\n",
        "parts/deep/one.py": "from .other import json\n",
        "parts/__init__.py": "",
        "other.py": "",
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    copied = {}
    assert written._moved(f"{tmp_path}/rw.py:later", tmp_path / "out", copied) == "files/0/rw.py:later"
    there = {str(path.relative_to(tmp_path / "out/files/0")) for path in (tmp_path / "out").rglob("*.py")}
    assert there == {*files} - {"other.py"}
    assert {*copied} == {f"{tmp_path.resolve()}/{name}" for name in ("rw.py", "helper_q.py", "more_q.py", "parts")}


def test_what_is_written_is_played_by_a_process(tmp_path, monkeypatch):
    exported(tmp_path, monkeypatch, "--as", "nemo-gym", "-o", "two")
    inner = Path("two/resources_servers/my_sums")
    check_written(Path("two"), inner)
    assert len((inner / "data/rows.jsonl").read_text().splitlines()) == 4
    exported(tmp_path, monkeypatch, "--as", "nemo-gym", "-o", "two", "--force")
    Path("sums.jsonl").unlink()
    spec = importlib.util.spec_from_file_location("written_client", inner / "player_client.py")
    client = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(client)
    player = client.Player(inner.resolve())
    try:
        assert [task["index"] for task in player.tasks()] == [0, 1, 2, 3]
        episode = player.ask_now("start", task=2)["episode"]
        assert player.ask_now("replay", episode=episode, messages=[{"role": "assistant", "content": "4"}])["done"]
        with pytest.raises(client.PlayError, match="a whole number"):
            player.ask_now("start", task=9)
    finally:
        player.close()
    (inner / "environment.yaml").write_text("agent: {name: nobody}\ndata: {sources: [{path: files/0/agents.py}]}\n")
    with pytest.raises(client.PlayError, match="RLHF_PYTHON"):
        player.tasks()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("verifiers:will/wordle@0.1", ("--extra-index-url", "https://hub.primeintellect.ai/will/simple/", "wordle==0.1")),
        ("verifiers:wordle", ("wordle",)),
        ("openenv:openenv/echo_env", ("git+https://huggingface.co/spaces/openenv/echo_env",)),
        ("nemo-gym:example_multi_step@0.4.0", ("nemo-gym==0.4.0",)),
    ],
)
def test_names_of_hubs(name, words):
    assert hubs.wanted(name).words == words


NOTHING = ("wordle", "verifier:wordle", "verifiers:--upgrade", "openenv:a/b/c", "nemo-gym:a/b", "verifiers:", "verifiers:a@;x")


@pytest.mark.parametrize("name", NOTHING)
def test_names_of_nothing(name):
    with pytest.raises(UserError, match=r"verifiers:OWNER/NAME|no owner"):
        hubs.wanted(name)


def test_add_shows_what_pip_finds_and_asks(tmp_path, monkeypatch, capsys):
    pip = tmp_path / "python"
    report = json.dumps(
        {"install": [{"metadata": {"name": "wordle", "version": "0.1"}, "download_info": {"url": "file:///w"}}]}
    )
    down = f"if [ -e {tmp_path}/down ]; then echo 'ERROR: no route' >&2; exit 1; fi"
    pip.write_text(f"#!/bin/sh\necho \"$@\" >> {tmp_path}/asked\n{down}\necho '{report}'\n")
    pip.chmod(0o755)
    words = ["env", "add", "verifiers:will/wordle", "--python", str(pip)]
    monkeypatch.setattr("click.termui.visible_prompt_func", lambda text: "n")
    with pytest.raises(click.Abort):
        main.main(words, standalone_mode=False)
    assert "wordle 0.1 from file:///w" in capsys.readouterr().out
    assert (tmp_path / "asked").read_text().count("--dry-run") == 1
    main.main([*words, "--yes"], standalone_mode=False)
    index = "--extra-index-url https://hub.primeintellect.ai/will/simple/"
    assert (tmp_path / "asked").read_text().splitlines()[-1].endswith(f"install --quiet {index} wordle")
    (tmp_path / "down").touch()
    with pytest.raises((SystemExit, UserError, click.ClickException)) as raised:
        main.main(words, standalone_mode=False)
    assert "cannot be reached: ERROR: no route" in f"{raised.value} {capsys.readouterr().err}"
