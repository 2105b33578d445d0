"""Servers, settings and runs that do not fit, refused by name before anything is sampled."""

import json
from types import SimpleNamespace

import pytest
from rlhf_authoring import write_tiny_model
from rlhf_engine_http import Http
from rlhf_engine_http.dialects import DIALECTS

import rlhf_host
from rlhf_host import UserError

from .sglang import Sglang


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"urls": "127.0.0.1:8000"}, "'127.0.0.1:8000' in --engine.urls is no address of a server"),
        ({"urls": "http://127.0.0.1:8000,http://127.0.0.1:8000/v1"}, "is given twice"),
        ({"urls": "http://10.0.0.1:8000"}, "may be on another machine.*--engine.directory DIR"),
        ({"urls": "http://127.0.0.1:8000", "key_env": "OF_NOBODY"}, r"OF_NOBODY \(--engine.key-env\) is not set"),
        ({"urls": "HTTP://LOCALHOST:8000/,http://localhost:8000/v1/"}, "http://localhost:8000 is given twice"),
        ({"urls": "http://127.0.0.1:8000/a b"}, "is no address of a server"),
        ({"urls": "http://127.0.0.1:8000", "transfer": "stream", "directory": "."}, "no server reads --engine.directory"),
    ],
)
def test_settings(options, why):
    with pytest.raises(UserError, match=why):
        Http(Http.Options(**options))


def test_an_address_is_needed_where_it_is_used():
    """Not before: traits can be read without one, as ``rlhf doctor`` does."""
    engine = Http(Http.Options())
    for begin in (lambda: engine.check(None, {}), lambda: engine.start(None)):
        with pytest.raises(UserError, match=r"give an address, as in --engine\.urls http://127\.0\.0\.1:8000"):
            begin()


@pytest.mark.parametrize(
    "options",
    [
        {"urls": "http://somebody:secret@127.0.0.1:8000"},
        {"urls": "http://:secret@127.0.0.1:8000"},
        {"urls": "http://127.0.0.1:8000?key=secret"},
        {"urls": "http://127.0.0.1:8000", "key_env": "sk-secret"},
        {"urls": "http://127.0.0.1:8000", "key_env": "TWO_LINES"},
    ],
)
def test_what_may_be_a_secret_is_in_no_message(options, monkeypatch):
    monkeypatch.setenv("TWO_LINES", "a\nsecret")
    with pytest.raises(UserError, match=r"--engine\.key-env") as raised:
        Http(Http.Options(**options))
    assert "secret" not in str(raised.value)


def test_a_server_that_repeats_the_key(tiny, rig, monkeypatch):
    monkeypatch.setenv("THE_KEY", " memory\n")
    with Sglang(tiny, key="memory") as server:
        engine = rig(server, key_env="THE_KEY")
        server.faults = [lambda answer: 400]
        with pytest.raises(UserError, match=r"answered with status 400: out of \(the key\)$"):
            engine.sample([[5, 6]])


@pytest.mark.parametrize(
    ("url", "port"), [("http://[::1]:8000", 8000), ("https://host", 443), ("http://host/path", 80), ("http://host:7/path", 7)]
)
def test_the_command_that_starts_a_server_has_the_port_of_its_address(url, port):
    for dialect in DIALECTS.values():
        assert f" 'my model' --port {port} " in dialect.command("my model", url)


def test_roles_and_placements_that_would_share_its_servers():
    plugin = Http(Http.Options(urls="http://127.0.0.1:8000"))
    roles = (SimpleNamespace(name="actor", generates=False), SimpleNamespace(name="opponent", generates=True))
    with pytest.raises(UserError, match="the role opponent cannot be sampled from them"):
        plugin.check(SimpleNamespace(needs=SimpleNamespace(roles=roles), placement=()), {"actor": "cpu"})
    for text in ("rollout=2", "actor+rollout=1"):
        start = SimpleNamespace(needs=SimpleNamespace(roles=roles[:1]), placement=(text,))
        with pytest.raises(UserError, match=r"would make several engines for the same servers.* --placement rollout=1:cpu"):
            plugin.check(start, {})
    plugin.check(SimpleNamespace(needs=SimpleNamespace(roles=roles[:1]), placement=("actor=2", "rollout=1:cpu")), {})


def test_nothing_that_answers(rig, nobody):
    with pytest.raises(UserError, match=f"engine http cannot use {nobody}: cannot be reached") as raised:
        rig(nobody)
    for command in ("VLLM_SERVER_DEV_MODE=1 vllm serve", "python -m sglang.launch_server"):
        assert command in str(raised.value)


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"raw": True}, "log-probabilities do not depend on the temperature"),
        ({"seeds": False}, r"a seed does not decide what it draws .*--enable-deterministic-inference"),
        ({"key": "secret"}, "status 401: Unauthorized"),
        ({"facts": {"speculative_algorithm": "EAGLE"}}, "it speculates"),
        ({"facts": {"skip_tokenizer_init": True}}, "it has no tokenizer"),
        ({"facts": {"context_length": None}}, "does not say how long its rows may be"),
    ],
)
def test_servers_that_do_not_fit(tiny, rig, settings, why):
    with Sglang(tiny, **settings) as server, pytest.raises(UserError, match=f"cannot use {server.url}: .*{why}"):
        rig(server)


def test_a_server_without_seeds_where_none_are_asked_for(tiny, rig, monkeypatch):
    monkeypatch.setenv("THE_KEY", "secret")
    with Sglang(tiny, seeds=False, key="secret") as server:
        engine = rig(server, seeds=False, key_env="THE_KEY")
        assert engine.gap(engine.sample()) < 1e-5
        assert engine.sample() != engine.sample()


def test_a_server_of_another_model(tiny, rig, tmp_path):
    other = write_tiny_model(tmp_path / "other", layers=3)
    with Sglang(other) as server, pytest.raises(UserError, match="num_hidden_layers 3, and the run's 2: it is another one"):
        rig(server)


def test_a_server_of_another_protocol(tiny, rig):
    with Sglang(tiny) as server, pytest.raises(UserError, match=f"cannot use {server.url}.*status 404.*VLLM_SERVER_DEV_MODE"):
        rig(server, protocol="vllm")


def test_a_context_that_is_shorter_than_the_models(tiny, rig):
    with Sglang(tiny, facts={"context_length": 20}) as server:
        engine = rig(server)
        assert engine.engine.context_length == 20
        with pytest.raises(UserError, match="a prompt of 20 tokens leaves no room in the engine's 20 positions"):
            engine.sample([[5] * 20])


def test_a_precision_that_is_not_exact(tiny, rig):
    with Sglang(tiny, facts={"dtype": "bfloat16"}) as server:
        assert not rig(server).engine.exact


def test_weights_that_a_server_quantizes_are_named_at_the_start(tiny, rig, caplog):
    with Sglang(tiny, facts={"quantization": "fp8"}) as server:
        assert not rig(server).engine.exact
        assert f"engine http: {server.url} samples from weights that it quantizes (fp8), and others are trained" in caplog.text


def test_a_run_is_refused_before_it_begins(tiny, learner, tmp_path, nobody):
    with pytest.raises(UserError, match=f"cannot use {nobody}"):
        rlhf_host.train(
            algo=learner,
            rewards=lambda text: 0.0,
            model=tiny,
            data=[{"prompt": "1+1="}],
            engine={"name": "http", "urls": nobody},
            rollout={"n": 2, "max_new_tokens": 4},
            train={"steps": 1, "batch_size": 1},
            run_dir=tmp_path / "run",
        )


def test_what_a_server_says_is_shown_in_one_line(rig, tiny):
    with Sglang(tiny) as server:
        engine = rig(server)
        server.faults = [lambda answer: 400]
        with pytest.raises(UserError) as raised:
            engine.sample()
    assert "/generate answered with status 400: out of memory" in str(raised.value)
    assert json.dumps(str(raised.value)).count("\\n") == 0
