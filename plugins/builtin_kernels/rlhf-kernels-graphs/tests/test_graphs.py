"""Steps that are captured once for each size of the cache give what whole rows give; what no graph could hold is refused."""

import contextlib

import pytest
import torch
from rlhf_kernels_graphs import capture, decoder
from rlhf_kernels_graphs.decoder import GraphDecoder

from rlhf_host.comparison import decoder_problem

from . import recorded

FAMILIES = ["llama", "qwen2", "mistral", "gemma3", "gpt2"]


def whole(model, ids):
    """``[length, V]`` by one pass over a row."""
    return model(torch.tensor([ids]), use_cache=False).logits[0]


def token(row, place):
    return (7 * row + 5 * place + 3) % 40


@pytest.fixture
def small(monkeypatch):
    """Sizes that change soon."""
    monkeypatch.setattr(decoder, "ROOM", 8)
    monkeypatch.setattr(decoder, "ROWS", 2)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("kind", FAMILIES)
def test_rows_that_leave_come_in_and_grow_are_whole_rows(kind, build, kernels, use):
    """Every row at its own length; a graph for each size, replayed for all other steps."""
    model = build(kind)
    with torch.inference_mode():
        made = kernels.twin(model, use())
        made.refresh()
        prompts = [[3, 5, 7], [4, 9, 8, 3, 11, 20, 7], [9]]
        rows = [[*prompts[owner]] for owner in (0, 0, 1, 2, 2)]
        logits = made.prefill(prompts)[torch.tensor([0, 0, 1, 2, 2])]
        made.start(torch.tensor([0, 0, 1, 2, 2]), 50)
        for place in range(30):
            for row, one in zip(rows, logits, strict=True):
                expected = whole(model, row)[-1]
                torch.testing.assert_close(one, expected, rtol=0, atol=1e-5 * float(expected.abs().max()))
            if place == 20:
                made.keep(torch.tensor([1, 3]))
                rows = [rows[1], rows[3]]
            drawn = [token(len(row), place) for row in rows]
            logits = made.step(torch.tensor(drawn))
            for row, one in zip(rows, drawn, strict=True):
                row.append(one)
            if place == 9:
                others = [[6, 6], [8] * 12]
                logits[torch.tensor([0, 2, 3])] = made.refill(others, torch.tensor([1, 1, 0]), torch.tensor([0, 2, 3]))
                rows[0], rows[2], rows[3] = [8] * 12, [8] * 12, [6, 6]
        assert [(graph.replays > 0) for graph in recorded.GRAPHS] == [True] * len(recorded.GRAPHS)
        assert len(recorded.GRAPHS) < 7 < sum(graph.replays for graph in recorded.GRAPHS) == 30
        made.end()
        assert (made._cache, made._replay) == (None, None)


@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
def test_new_weights_are_seen_after_refresh_and_weights_that_moved_are_captured_anew(autocast, build, kernels, use):
    model = build("llama")
    made = kernels.twin(model, use(autocast=autocast))
    assert decoder_problem(made, model, use(autocast=autocast), 32) is None
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(1.1)
    assert decoder_problem(made, model, use(autocast=autocast), 32) is None
    before = len(recorded.GRAPHS)
    for weight in model.parameters():
        weight.data = weight.data.clone().mul_(-1)
    assert decoder_problem(made, model, use(autocast=autocast), 32) is None
    assert len(recorded.GRAPHS) > before


def test_under_autocast_a_step_casts_no_weight(build, kernels, use):
    made = kernels.twin(build("llama"), use(autocast=torch.bfloat16))
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        made.prefill([[3, 5]])
        made.start(torch.tensor([0]), 4)
        made.step(torch.tensor([4]))
    (graph,) = recorded.GRAPHS
    weights = {weight.data_ptr() for weight in made._weights if weight.dim() == 2}
    casts = [args[0].data_ptr() for func, args, _, _ in graph.operations if func.overloadpacket.__name__ in ("to", "_to_copy")]
    assert casts
    assert not weights & {*casts}
    assert made._cache.layers_held[0][0].dtype == torch.bfloat16


@pytest.mark.usefixtures("small")
def test_a_row_that_broke_does_not_spoil_the_one_that_takes_its_place(build, kernels, use):
    model = build("llama")
    with torch.inference_mode():
        made = kernels.twin(model, use())
        made.prefill([[3, 5, 7]])
        made.start(torch.tensor([0, 0]), 20)
        for place in range(3):
            made.step(torch.tensor([place + 3, 4]))
        for keys, values in made._cache.layers_held.values():
            keys[0, :, 4:], values[0, :, 4:] = torch.nan, torch.nan
        logits = made.refill([[9]], torch.tensor([0]), torch.tensor([0]))
        assert torch.isfinite(logits).all()
        assert torch.allclose(made.step(torch.tensor([8, 5]))[0], whole(model, [9, 8])[-1], atol=1e-4)


def test_what_a_graph_cannot_hold_is_refused(build, kernels, use):
    def why(model, **changes):
        return kernels.unsuited(model, use(**changes))

    assert why(build("llama")) is None
    assert why(build("llama"), purpose="train") == "they only sample"
    assert why(build("llama"), device=torch.device("meta")) == "CUDA graphs need CUDA"
    assert why(build("mixtral")) == "which experts compute depends on the token"
    assert why(build("llama", attn_implementation="eager")) == "attention is eager, not sdpa"
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    assert why(build("llama", rope_parameters=rope)) == "its rotary positions follow the length of a text"
    model = build("llama")
    model.config.layer_types = ["full_attention", "linear_attention"]
    assert why(model) == "it has layers of the kind linear_attention"
    model = build("llama")
    model.get_input_embeddings().register_forward_hook(lambda module, args, out: out.requires_grad_(True))
    assert why(model) is None, "gradient checkpointing leaves it"
    model.model.layers[1].mlp.register_forward_hook(print)
    assert why(model) == "layers.1.mlp has hooks, which no graph would call"
    model = build("llama")
    model.model.layers[0].mlp.up_proj.weight = torch.nn.Parameter(torch.zeros(4, dtype=torch.uint8), requires_grad=False)
    assert why(model) == "its weights are quantized"


def test_the_stand_in_replays_what_is_on_the_device_alone_and_refuses_what_waits():
    """As a CUDA graph would: without it, the tests above could not fail."""
    numbers, counted = torch.zeros(2), [0]

    def work():
        counted[0] += 1
        numbers.add_(torch.ones(2) * counted[0])

    with torch.inference_mode():
        replay = recorded.record(work)
        replay()
        replay()
        assert numbers.tolist() == [3.0, 3.0]
        with pytest.raises(RuntimeError, match="cannot wait for the device"):
            recorded.record(lambda: numbers.add_(float(numbers.sum())))
        with pytest.raises(RuntimeError, match="cannot wait for the device"):
            recorded.record(lambda: numbers.add_(torch.tensor([1.0, 2.0])))


def test_positions_that_only_python_knows_are_noticed(build, kernels, use, monkeypatch):
    """A planted defect: a replay would not advance them."""

    def step(self):
        self._positions = self._positions + 0
        inner(self)

    inner = GraphDecoder._step
    monkeypatch.setattr(GraphDecoder, "_step", step)
    model = build("llama")
    assert "differ" in str(decoder_problem(kernels.twin(model, use()), model, use(), 32))


def test_capture_on_cuda_replays_a_graph_of_its_own(monkeypatch):
    """The branch that only a GPU takes, with the stand-in in the place of torch's graphs."""
    modes = []

    class Graph(recorded.Recorded):
        pass

    @contextlib.contextmanager
    def graph(captured, capture_error_mode):
        modes.append(capture_error_mode)
        with captured:
            yield

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", graph)
    numbers = torch.zeros(2)
    with torch.inference_mode():
        replay = capture.cuda_graph(lambda: numbers.add_(1))
        replay()
    assert (numbers.tolist(), modes) == ([2.0, 2.0], ["thread_local"])
