"""Checkpoints: a file that is damaged, forged or no checkpoint is refused in one line; a file that
other versions can load loads here."""

import collections
import json
import math
import os
import pickle
import re
import time
import zipfile

import pytest
import torch
from test_pufferl import Plain, make_trainer, run_epochs

import checkpoints
import configuration
import pufferl
from checkpoints import WHOLE_RUN, CheckpointError, load, save
from configuration import ConfigError
from tools import watch

pytestmark = pytest.mark.usefixtures("one_torch_thread")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The folder of a run of two epochs, with a model of each."""
    trainer = make_trainer(tmp_path_factory.mktemp("runs"), "squared", checkpoint_interval=1,
                           hidden_size=8, num_envs=4,
                           num_threads=1, num_buffers=1, minibatch_size=32)
    run_epochs(trainer, 2)
    trainer.close()
    return trainer.run_folder


@pytest.fixture
def folder(run, tmp_path):
    """A copy of it, to do harm to."""
    copy = tmp_path / run.name
    copy.mkdir()
    for path in run.glob("*.*"):
        (copy / path.name).write_bytes(path.read_bytes())
        os.utime(copy / path.name, (path.stat().st_mtime, path.stat().st_mtime))
    return copy


def evaluate(path, *more):
    options = ["--load-model-path", str(path), "--policy.hidden-size", "8", "--rnn.num-layers", "2",
               "--env.num-envs", "4", "--eval.episodes", "4", *more]
    return watch.evaluate("squared", pufferl.load_config("squared", options))


def fresh_trainer(folder):
    return make_trainer(folder, "squared", hidden_size=8, num_envs=4, num_threads=1, num_buffers=1,
                        minibatch_size=32)


@pytest.fixture(scope="module")
def trainer(tmp_path_factory):
    """One for all refusals, each of which leaves it as it was."""
    made = fresh_trainer(tmp_path_factory.mktemp("fresh"))
    yield made
    made.release()


def refused(trainer, path, message):
    """A resume that is refused, and leaves the trainer as it was."""
    before, names = {n: t.clone() for n, t in trainer.policy.state_dict().items()}, set(vars(trainer))
    with pytest.raises(ConfigError, match=message) as error:
        trainer.load_checkpoint(path)
    assert all(torch.equal(before[name], tensor)
               for name, tensor in trainer.policy.state_dict().items())
    assert (trainer.epoch == 0 and set(vars(trainer)) == names
            and len(str(error.value).splitlines()) == 1)
    assert callable(trainer.train)


# -- damaged
# ----------------------------------------------------------------------------------------------------------


def cut(share):
    def damage(path):
        data = path.read_bytes()
        path.write_bytes(data[: int(len(data) * share)])
        return rf"damaged \(truncated at byte {int(len(data) * share):,}\)"

    return damage


def empty(path):
    path.write_bytes(b"")
    return "it is empty"


def a_folder(path):
    path.unlink()
    path.mkdir()
    return "it is a folder"


def a_pipe(path):
    path.unlink()
    os.mkfifo(path)
    return "it is no file"


def flipped(path):
    with zipfile.ZipFile(path) as entries:
        largest = max(entries.infolist(), key=lambda entry: entry.file_size)
    data = bytearray(path.read_bytes())
    data[largest.header_offset + largest.file_size // 2] ^= 1
    path.write_bytes(data)
    return r"damaged \(data/\d+ does not match its checksum\)"


def text(path):
    path.write_text("hello " * 100)
    return "torch cannot read it: it is no file that torch.save wrote"


class Foreign:
    def __reduce__(self):
        return (os.mkdir, (f"{__file__}.harmed",))


def foreign(path):
    torch.save({"weight": Foreign()}, path)
    return "it holds posix.mkdir, which is neither a tensor nor a plain value"


def a_pickle(path):
    path.write_bytes(pickle.dumps(Foreign()))
    return "torch cannot read it"


def a_module(path):
    torch.save(torch.nn.Linear(2, 2), path)
    return "it holds torch.nn.modules.linear.Linear"


def compressed(path):
    with zipfile.ZipFile(path) as entries:
        parts = {entry.filename: entries.read(entry) for entry in entries.infolist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as entries:
        for name, data in parts.items():
            entries.writestr(name, data)
    return "compressed"


DAMAGES = [cut(0.1), cut(0.5), cut(0.9), empty, a_folder, a_pipe, flipped, text, foreign,
           a_pickle, a_module, compressed]


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda d: getattr(d, "__name__", "cut"))
def test_a_damaged_file_is_one_line_that_names_a_whole_one(folder, trainer, damage):
    model, older, state = folder / "model_squared_000002.pt", folder / "model_squared_000001.pt", "trainer_state.pt"
    for path, time_ago in ((older, 100), (folder / state, 200)):
        os.utime(path, (time.time() - time_ago,) * 2)
    told = damage(model)
    with pytest.raises(ConfigError, match=f"{told}.* or not a checkpoint; the newest whole one is {older}") as error:
        evaluate(folder)
    assert "\n" not in str(error.value)
    told = damage(folder / state)
    refused(trainer, folder,
            rf"{state}: .*{told}.* or not a checkpoint; the newest whole weights are {older}")
    older.unlink()
    with pytest.raises(ConfigError, match="there is no whole one beside it"):
        evaluate(folder)
    assert not os.path.exists(f"{__file__}.harmed")


def test_every_byte_that_is_read_has_a_checksum(folder):
    """A byte that is changed anywhere changes nothing or is refused."""
    path = folder / "model_squared_000002.pt"
    data, whole, found = path.read_bytes(), load(path), 0
    for place in range(0, len(data), max(1, len(data) // 200)):
        path.write_bytes(data[:place] + bytes([data[place] ^ 4]) + data[place + 1 :])
        try:
            weights = load(path)
            assert weights.keys() == whole.keys() and all(torch.equal(weights[n], whole[n])
                                                          for n in whole)
        except CheckpointError:
            found += 1
    assert found > 100


# -- forged
# -----------------------------------------------------------------------------------------------------------


def with_(path, **changes):
    state = torch.load(path, weights_only=True)
    for key, value in changes.items():
        if value is ...:
            del state[key]
        elif isinstance(value, dict) and isinstance(state[key], dict):
            state[key] = {k: v for k, v in {**state[key], **value}.items() if v is not ...}
        else:
            state[key] = value
    torch.save(state, path)



class Loud(dict):
    """In a file it is an OrderedDict with attributes in the place of its methods."""

    def __reduce__(self):
        return collections.OrderedDict, (), {"pop": 3, "items": 4, "keys": 5, "get": 6}, None, iter(self.items())


CHANGES = {
    "epoch is 'ten'": {"epoch": "ten"},
    "it has two epochs, 7 and 2": {"epoch": 7},
    "epoch is -1": {"numbers": {"epoch": -1}},
    "epoch is a huge number": {"numbers": {"epoch": 10**400}},
    "it lacks tensors": {"tensors": ...},
    "it lacks model": {"model": ...},
    "it lacks config": {"config": ...},
    "config is not JSON": {"config": "{"},
    "config lacks train.optimizer": {"config": "[]"},
    "numbers holds 'train', which is none of": {"numbers": {"train": 5}},
    "numbers holds 'vecenv'": {"numbers": {"vecenv": None}},
    "_rate_factor is nan": {"numbers": {"_rate_factor": math.nan}},
    "_rate_factor is 0": {"numbers": {"_rate_factor": 0.0}},
    "best_score is a tensor": {"numbers": {"best_score": torch.zeros(3)}},
    "_recent is 'x' and not two numbers": {"numbers": {"_recent": "x"}},
    "numbers is a list and no dict": {"numbers": [1]},
    "global_step is 1.5": {"global_step": 1.5},
    "uptime is inf": {"uptime": math.inf},
    "others is a dict": {"others": {}},
    "environments is torch.float32": {"environments": torch.zeros(3)},
    "tensors momentum is a list": {"tensors": {"momentum": [1.0]}},
    "momentum are not finite": {"tensors": {"momentum": None}},
    "state/mingru are not finite": {"tensors": {"state/mingru": None}},
    "torch_random is no state of a generator": {"tensors": {"torch_random": torch.zeros(5, dtype=torch.uint8)}},
    "another network.*encoder.bias": {"model": {"encoder.bias": torch.zeros(3)}},
    "encoder.bias is torch.int32 there": {"model": {"encoder.bias": torch.zeros(8, dtype=torch.int32)}},
    "8 of the 8 numbers in encoder.bias are not finite": {"model": {"encoder.bias": torch.full((8,), math.nan)}},
    "adam is 5": {"adam": 5},
}


@pytest.mark.parametrize("message", CHANGES)
def test_a_forged_state_is_refused_and_nothing_is_changed(folder, trainer, message):
    changes = CHANGES[message]
    if "not finite" in message and "tensors" in changes:
        name = next(iter(changes["tensors"]))
        shape = torch.load(folder / "trainer_state.pt", weights_only=True)["tensors"][name].shape
        changes = {"tensors": {name: torch.full(shape, math.inf)}}
    with_(folder / "trainer_state.pt", **changes)
    refused(trainer, folder, message)


def test_attributes_that_a_file_brings_stand_for_nothing(folder):
    """torch's reader of data sets attributes of an OrderedDict and of a tensor."""
    state = torch.load(folder / "trainer_state.pt", weights_only=True)
    bias = torch.nn.Parameter(state["model"]["encoder.bias"].clone())
    bias.isfinite = bias.isnan = 5
    loud = Loud({**state, "model": Loud({**state["model"], "encoder.bias": bias})})
    torch.save(loud, folder / "trainer_state.pt")
    assert torch.load(folder / "trainer_state.pt", weights_only=True).pop == 3
    trainer = fresh_trainer(folder.parent)
    trainer.load_checkpoint(folder)
    assert trainer.epoch == 2 and torch.equal(trainer.policy.encoder.bias,
                                              state["model"]["encoder.bias"])
    run_epochs(trainer, 1)
    trainer.release()


def test_bytes_of_environments_that_are_too_few_begin_new_episodes(folder, capsys):
    state = torch.load(folder / "trainer_state.pt", weights_only=True)
    with_(folder / "trainer_state.pt", environments=state["environments"][:-8].clone())
    trainer = fresh_trainer(folder.parent)
    trainer.load_checkpoint(folder)
    assert ("all environments begin new episodes (this state has" in capsys.readouterr().out
            and trainer.epoch == 2)
    trainer.release()


@pytest.mark.parametrize("optimizer", ["muon", "adam"])
def test_a_missing_state_of_the_optimizer_is_said(tmp_path, capsys, optimizer):
    first = make_trainer(tmp_path, optimizer=optimizer)
    run_epochs(first, 2)
    path = tmp_path / "a.pt"
    first.save_checkpoint(path)
    with_(path, **({"adam": ...} if optimizer == "adam" else {"tensors": {"momentum": ...}}))
    second = make_trainer(tmp_path, optimizer=optimizer)
    second.load_checkpoint(path)
    said = capsys.readouterr().out
    assert ("holds no state of the optimizer, which begins as in a new run" in said
            and "new episodes" not in said)
    run_epochs(second, 1)
    assert second.epoch == 3


@pytest.mark.parametrize("change", ["nan", "shape", "state", "groups", "type"])
def test_a_forged_state_of_adam_is_refused(tmp_path, change):
    first = make_trainer(tmp_path, optimizer="adam")
    run_epochs(first, 1)
    path = tmp_path / "a.pt"
    first.save_checkpoint(path)
    adam = torch.load(path, weights_only=True)["adam"]
    if change == "nan":
        adam["state"][0]["exp_avg"].fill_(math.nan)
    elif change == "shape":
        adam["state"][0]["exp_avg"] = torch.zeros(3)
    elif change == "state":
        del adam["state"]
    elif change == "type":
        adam["state"] = {0: "x"}
    else:
        adam["state"] = {99: {"exp_avg": torch.zeros(3)}}
    with_(path, adam=None)
    with_(path, adam=adam)
    trainer = make_trainer(tmp_path, optimizer="adam")
    with pytest.raises(ConfigError, match="its state of the optimizer is not one"):
        trainer.load_checkpoint(path)
    assert trainer.epoch == 0
    run_epochs(trainer, 1)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_weights_that_are_not_finite_play_nothing(folder, value):
    path = folder / "model_squared_000002.pt"
    weights = torch.load(path, weights_only=True)
    weights["decoder.weight"][0, 0] = value
    torch.save(weights, path)
    with pytest.raises(ConfigError, match=r"1 of the \d+ numbers in decoder.weight are not finite"):
        evaluate(path)


@pytest.mark.parametrize("content",
                         [[1, 2], {}, {"a": "b"}, {1: torch.zeros(2)}, torch.zeros(3), None, "text",
                          {"a": torch.zeros(3, device="meta")},
                          {"a": torch.zeros(3).to_sparse()}],
                         ids=str)
def test_something_else_is_no_checkpoint(tmp_path, content):
    torch.save(content, tmp_path / "a.pt")
    for check in (checkpoints.weights, WHOLE_RUN):
        with pytest.raises(CheckpointError, match="or not a checkpoint"):
            load(tmp_path / "a.pt", check)


def test_a_damaged_config_of_a_run_is_one_line(folder):
    path = folder / "config.json"
    whole = json.loads(path.read_text())
    for broken in ("", "{", "[]", "5", "\x00", "[" * 100_000, json.dumps({**whole, "policy": 5}),
                   json.dumps({**whole, "policy": {"hidden_size": "wide"}}),
                   json.dumps({**whole, "train": {"horizon": [1]}})):
        path.write_text(broken)
        for option in ("--load-model-path", "--resume"):
            with pytest.raises(ConfigError, match=f"{re.escape(str(path))}") as error:
                pufferl.load_config("squared", [option, str(folder)])
            assert len(str(error.value).splitlines()) == 1


def test_a_damaged_policy_that_ships_is_one_line(tmp_path, monkeypatch):
    path = configuration.find_baseline("squared")
    data = path.read_bytes()
    monkeypatch.setattr(configuration, "find_baseline", lambda _: tmp_path / "baseline.safetensors")
    for broken in (b"", data[:7], data[: len(data) // 2], b"\xff" * 100,
                   data[:8] + b"[" + data[9:]):
        (tmp_path / "baseline.safetensors").write_bytes(broken)
        with pytest.raises(ConfigError, match="damaged or not a shipped policy"):
            configuration.read_baseline("squared")


# -- what loads
# -------------------------------------------------------------------------------------------------------


def test_state_dicts_of_others_load(folder, tmp_path):
    """As PufferLib and CleanRL write them, and as older torch did."""
    weights = torch.load(folder / "model_squared_000002.pt", weights_only=True)
    expected = evaluate(folder / "model_squared_000002.pt")["score"].mean
    metadata = collections.OrderedDict(weights)
    metadata._metadata = {"": {"version": 1}}
    others = {"ordered": metadata,
              "parameters": {n: torch.nn.Parameter(t) for n, t in weights.items()},
              "double": {n: t.double() for n, t in weights.items()}}
    for name, content in others.items():
        torch.save(content, tmp_path / f"{name}.pt")
        assert evaluate(tmp_path / f"{name}.pt")["score"].mean == expected, name
    torch.save(weights, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    assert evaluate(tmp_path / "old.pt")["score"].mean == expected
    (tmp_path / "old.pt").write_bytes((tmp_path / "old.pt").read_bytes()[:-100])
    with pytest.raises(ConfigError, match="torch cannot read it"):
        evaluate(tmp_path / "old.pt")
    assert evaluate(folder / "trainer_state.pt")["score"].mean == expected, (
        "the weights of a whole run")


class Masked(Plain):
    """A network with a mask that is kept with its weights."""

    def __init__(self, env):
        super().__init__(env)
        self.register_buffer("mask", torch.full((3, 3), -math.inf).triu(1))


def test_a_mask_may_be_infinite(tmp_path):
    trainer = make_trainer(tmp_path, policy=Masked)
    run_epochs(trainer, 1)
    path = trainer.save_checkpoint(tmp_path / "a.pt")
    again = make_trainer(tmp_path, policy=Masked)
    again.load_checkpoint(path)
    assert again.epoch == 1 and again.policy.mask.isinf().any()
    trainer.policy.mask.fill_(math.nan)
    path = trainer.save_checkpoint(tmp_path / "a.pt")
    with pytest.raises(ConfigError, match="9 of the 9 numbers in mask are not finite"):
        make_trainer(tmp_path, policy=Masked).load_checkpoint(path)


def test_a_write_that_fails_leaves_the_file_before(tmp_path):
    path = tmp_path / "a.pt"
    save({"a": torch.zeros(4)}, path)
    before = path.read_bytes()
    for broken in ({"a": lambda: None}, {"a": open(__file__)}):  # noqa: SIM115 - what cannot be pickled
        with pytest.raises((AttributeError, TypeError, pickle.PicklingError)):
            save(broken, path)
        assert path.read_bytes() == before and [p.name for p in tmp_path.iterdir()] == ["a.pt"]
