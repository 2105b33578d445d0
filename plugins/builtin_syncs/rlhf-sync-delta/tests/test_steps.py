"""Steps of a trainer in this process: what is written, what engines get, and what is refused."""

from __future__ import annotations

import asyncio
import copy
import os

import numpy as np
import pytest
import torch
from rlhf_authoring import ModuleEngine, module_source
from rlhf_sync_delta import Delta
from rlhf_sync_delta.files import DELTA, WHOLE, files_of, path_of, read, rebuild, steps_of
from rlhf_sync_delta.states import changed, with_changes
from safetensors.torch import save_file
from torch import nn

from rlhf_host import RunError, UserError
from rlhf_host.protocols import SyncTarget, WeightSyncStart


class Model(nn.Module):
    """Tied weights, a buffer, a scalar, and several types."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(300, 8), nn.Linear(8, 300, bias=False)
        self.head.weight = self.embed.weight
        self.norm, self.twin = (nn.Parameter(torch.ones(8)) for _ in range(2))
        self.short = nn.Parameter(torch.randn(40, 30, dtype=torch.bfloat16))
        self.register_buffer("count", torch.tensor(0))


class Run:
    """A sync and its engine, as a run has them."""

    def __init__(self, directory, model, engines=1, **options):
        self.directory, self.model = directory, model
        self.sync = Delta(Delta.Options(directory=directory, **options)).start(WeightSyncStart(run_dir=None))
        self.source = module_source(model)
        self.engines = [ModuleEngine(copy.deepcopy(model)) for _ in range(engines)]
        self.connect()

    def connect(self):
        targets = [SyncTarget(f"engine-{number}", engine) for number, engine in enumerate(self.engines)]
        asyncio.run(self.sync.connect(targets))

    def send(self, step):
        asyncio.run(self.sync.send(self.source, step))

    def kinds(self):
        return [(step, kind) for step, kind, _ in files_of(self.directory)]


def weights(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def equal(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def train(model, share=0.01):
    """Changes a share of the values of each weight."""
    with torch.no_grad():
        for weight in (model.embed.weight, model.short, model.norm):
            mask = torch.rand(weight.shape) < share
            weight[mask] = torch.randn(weight.shape).to(weight.dtype)[mask]
        model.count += 1


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(3)


@pytest.mark.parametrize("compress", ["zlib", "none"])
def test_each_of_fifty_steps_is_rebuilt_with_its_hash_and_engines_have_it(tmp_path, compress):
    run, states = Run(tmp_path, Model(), compress=compress, whole_every=20), []
    for step in range(51):
        run.send(step)
        states.append(weights(run.model))
        assert equal(run.engines[0].model.state_dict(), states[-1])
        assert run.engines[0].version == step
        train(run.model, share=0.3 if step == 30 else 0.01)
    assert steps_of(tmp_path) == list(range(51))
    assert [step for step, kind in run.kinds() if kind == WHOLE] == [0, 20, 40]
    hashes = set()
    for step, state in enumerate(states):
        built = rebuild(tmp_path, step)
        assert equal(built.tensors, state)
        assert built.hash == read(path_of(tmp_path, step, DELTA if step else WHOLE)).hash
        hashes.add(built.hash)
    assert len(hashes) == 51


def test_a_step_has_the_bytes_of_what_changed(tmp_path):
    run = Run(tmp_path, Model(), compress="none")
    run.send(0)
    with torch.no_grad():
        run.model.embed.weight[7, 3] = 5.0
        run.model.short[:] += 1
    run.send(1)
    record = read(path_of(tmp_path, 1, DELTA))
    entries = {entry["name"]: entry for entry in record.header["entries"]}
    assert {name: entry["kind"] for name, entry in entries.items()} == {
        "embed.weight": "sparse",
        "head.weight": "same",
        "short": "whole",
    }
    assert (entries["embed.weight"]["count"], entries["embed.weight"]["gaps"]) == (1, "uint8")
    assert len(record.payload) == 1 + 4 + 2 * 1200


def test_only_bits_count(tmp_path):
    """NaN is not equal to itself, and 0 is equal to -0."""
    run = Run(tmp_path, Model())
    with torch.no_grad():
        run.model.short[0, :3] = torch.tensor([0.0, float("nan"), 1.0])
    run.send(0)
    run.send(1)
    assert read(path_of(tmp_path, 1, DELTA)).header["entries"] == []
    with torch.no_grad():
        run.model.short[0, 0] = -0.0
    run.send(2)
    assert rebuild(tmp_path, 2).tensors["short"][0, 0].signbit()
    assert not rebuild(tmp_path, 1).tensors["short"][0, 0].signbit()
    assert run.engines[0].model.short[0, 0].signbit()


@pytest.mark.parametrize(("length", "kind"), [(200, "uint8"), (60_000, "uint16"), (70_000, "uint32")])
def test_gaps_have_the_smallest_type(length, kind):
    before = np.zeros(length, np.int16)
    after = before.copy()
    after[-1] = 7
    gaps, values = changed(before, after)
    assert (str(gaps.dtype), values.tolist()) == (kind, [7])
    assert np.array_equal(with_changes(before, gaps, values), after)


def test_what_changed_more_than_the_break_even_goes_whole():
    before = np.zeros(90, np.int16)
    after = before.copy()
    after[::2] = 1  # 45 changes of 1 + 2 bytes: 135 of 180
    assert changed(before, after) is not None
    after[: 2 * 15] = 1  # 60 of them: 180
    assert changed(before, after) is None


def test_the_type_of_the_engines_is_sent_and_kept(tmp_path):
    """Small steps of a model in 32 bits leave most of its 16 bits as they are."""
    model = nn.Linear(200, 200)
    run = Run(tmp_path, model, dtype="bfloat16")
    run.send(0)
    before = weights(model)
    with torch.no_grad():
        model.weight += 1e-5
    run.send(1)
    built = rebuild(tmp_path, 1)
    assert torch.equal(built.tensors["weight"], model.weight.to(torch.bfloat16))
    assert torch.equal(run.engines[0].model.weight, model.weight.to(torch.bfloat16).float())
    moved = (before["weight"].to(torch.bfloat16) != built.tensors["weight"]).float().mean()
    assert 0 < moved < 0.2
    size = [path_of(tmp_path, *name).stat().st_size for name in ((0, WHOLE), (1, DELTA))]
    assert size[1] < 0.3 * size[0]


def test_what_engines_keep_decides_where_nothing_else_does(tmp_path, monkeypatch):
    model = nn.Linear(20, 20)
    run = Run(tmp_path, model)
    monkeypatch.setattr(type(run.engines[0]._loader), "weight_types", ("bfloat16", ("bias",)))
    run.send(0)
    assert {name: tensor.dtype for name, tensor in rebuild(tmp_path, 0).tensors.items()} == {
        "weight": torch.bfloat16,
        "bias": torch.float32,
    }


def test_a_model_that_is_equal_is_referred_to(tmp_path):
    model, folder = Model(), tmp_path / "model"
    folder.mkdir()
    own = {name: tensor for name, tensor in model.state_dict().items() if name != "head.weight"}
    save_file(own, folder / "model.safetensors")
    run = Run(tmp_path / "deltas", model)
    run.sync._model = lambda: str(folder)
    run.send(0)
    train(model)
    run.send(1)
    assert path_of(tmp_path / "deltas", 0, WHOLE).stat().st_size < 2500
    assert equal(rebuild(tmp_path / "deltas", 1).tensors, model.state_dict())
    save_file({**own, "norm": own["norm"] + 1}, folder / "model.safetensors")
    with pytest.raises(UserError, match=r"step-000000.whole is damaged: norm does not have the hash .* was .*model changed\?"):
        rebuild(tmp_path / "deltas", 1)
    (folder / "model.safetensors").unlink()
    with pytest.raises(UserError, match=r"step-000000.whole refers to .*model.safetensors, which cannot be read"):
        rebuild(tmp_path / "deltas", 1)


@pytest.mark.parametrize("keep", [True, False])
def test_an_engine_that_is_started_again_gets_whole_weights(tmp_path, keep):
    run = Run(tmp_path, Model(), engines=2, keep=keep)
    for step in range(4):
        run.send(step)
        train(run.model)
    run.engines[1] = ModuleEngine(Model())
    run.connect()
    run.send(3 if keep else 4)
    if not keep:
        train(run.model)
        run.send(5)
        assert run.kinds() == [(5, DELTA)]
    state = rebuild(tmp_path, 3).tensors if keep else run.model.state_dict()
    assert all(equal(engine.model.state_dict(), state) for engine in run.engines)


def test_a_replaced_engine_gets_the_same_version_without_kept_steps(tmp_path):
    run = Run(tmp_path, Model(), engines=2, keep=False)
    for step in range(3):
        train(run.model)
        run.send(step)
    run.engines[0] = ModuleEngine(Model())
    run.connect()
    run.send(2)
    assert equal(run.engines[0].model.state_dict(), run.model.state_dict())
    train(run.model)
    run.send(3)
    assert all(equal(engine.model.state_dict(), run.model.state_dict()) for engine in run.engines)


def test_a_resumed_run_writes_the_steps_after_it_again(tmp_path):
    run = Run(tmp_path, Model())
    states = []
    for step in range(4):
        run.send(step)
        states.append(weights(run.model))
        train(run.model)
    old = rebuild(tmp_path, 3)
    (tmp_path / ".step-000004.delta.partial").write_bytes(b"half")
    run.model.load_state_dict(states[2])
    stamp = os.stat(path_of(tmp_path, 2, DELTA)).st_mtime_ns
    again = Run(tmp_path, run.model)
    again.send(2)
    assert again.kinds() == [(0, WHOLE), (1, DELTA), (2, DELTA)]
    assert os.stat(path_of(tmp_path, 2, DELTA)).st_mtime_ns == stamp
    assert not list(tmp_path.glob(".*"))
    train(run.model, share=0.02)
    again.send(3)
    assert rebuild(tmp_path, 3).hash != old.hash
    assert equal(rebuild(tmp_path, 3).tensors, run.model.state_dict())
    assert equal(again.engines[0].model.state_dict(), run.model.state_dict())


def test_a_resumed_run_with_other_weights_begins_with_whole_ones(tmp_path):
    run = Run(tmp_path, Model())
    for step in range(3):
        run.send(step)
        train(run.model)
    Run(tmp_path, run.model).send(2)
    assert run.kinds() == [(0, WHOLE), (1, DELTA), (2, WHOLE)]
    assert equal(rebuild(tmp_path, 2).tensors, run.model.state_dict())


def damage(path):
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def test_a_damaged_or_missing_file_is_refused_by_name(tmp_path):
    run = Run(tmp_path, Model(), whole_every=4)
    for step in range(6):
        run.send(step)
        train(run.model)
    damage(path_of(tmp_path, 2, DELTA))
    for step in (2, 3):
        with pytest.raises(UserError, match=r"step-000002.delta is damaged: it is not as it was written"):
            rebuild(tmp_path, step)
    assert [rebuild(tmp_path, step).step for step in (1, 4, 5)] == [1, 4, 5]
    path_of(tmp_path, 2, DELTA).unlink()
    with pytest.raises(UserError, match=r"step-000002.delta is missing"):
        rebuild(tmp_path, 3)
    assert steps_of(tmp_path) == [0, 1, 4, 5]


def test_a_file_of_another_run_is_refused_by_name(tmp_path):
    for name in ("one", "other"):
        run = Run(tmp_path / name, Model())
        for step in range(3):
            run.send(step)
            train(run.model)
    path_of(tmp_path / "other", 2, DELTA).replace(path_of(tmp_path / "one", 2, DELTA))
    with pytest.raises(UserError, match=r"step-000002.delta does not fit the step before"):
        rebuild(tmp_path / "one", 2)


def test_an_engine_that_reads_a_damaged_file_has_no_version(tmp_path, monkeypatch):
    run = Run(tmp_path, Model())
    run.send(0)
    from rlhf_sync_delta import trainer

    write = trainer.write_file

    def harmful(path, *rest):
        size = write(path, *rest)
        damage(path)
        return size

    monkeypatch.setattr(trainer, "write_file", harmful)
    with pytest.raises(RunError, match=r"weight sync delta: version 1 failed: engine engine-0: .*000001.delta is damaged"):
        run.send(1)
    assert run.engines[0].version == 0


def test_a_directory_of_another_run_is_refused(tmp_path):
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
    model, shared = Model(), tmp_path / "shared"

    def begin(name):
        sync = Delta(Delta.Options(directory=shared)).start(WeightSyncStart(run_dir=tmp_path / name))
        asyncio.run(sync.connect([SyncTarget("engine", ModuleEngine(copy.deepcopy(model)))]))
        asyncio.run(sync.send(module_source(model), 0))

    begin("one")
    with pytest.raises(RunError, match=r"has the steps of .*one: give this run another --sync.directory"):
        begin("other")
    begin("one")


def test_the_trainers_own_module_is_kept_and_not_sent(tmp_path):
    model = Model()
    engine = ModuleEngine(model)
    sync = Delta(Delta.Options(directory=tmp_path)).start(WeightSyncStart(run_dir=None))
    asyncio.run(sync.connect([SyncTarget("local", engine, in_place=True)]))
    source, states = module_source(model), []
    for step in range(3):
        asyncio.run(sync.send(source, step))
        states.append(weights(model))
        assert engine.version == step
        train(model)
    assert all(equal(rebuild(tmp_path, step).tensors, state) for step, state in enumerate(states))


def test_what_would_do_nothing_is_refused():
    engine = ModuleEngine(Model())
    sync = Delta(Delta.Options(keep=False)).start(WeightSyncStart(run_dir=None))
    with pytest.raises(UserError, match=r"sync.keep false weight sync delta would do nothing: leave --sync out"):
        asyncio.run(sync.connect([SyncTarget("local", engine, in_place=True)]))
    with pytest.raises(UserError, match=r"has no directory: set --sync.directory"):
        asyncio.run(Delta(Delta.Options()).start(WeightSyncStart(run_dir=None)).connect([SyncTarget("one", engine)]))
