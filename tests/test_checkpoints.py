"""Files that are damaged, forged or of other programs are refused, or load."""

import collections
import json
import os
import pickle
import re
import shutil
import time

import pytest
import torch
from trainers import make_trainer, run_epochs

import configuration
import pufferl
from errors import ConfigError
from runs import load, save
from tools import watch

pytestmark = pytest.mark.usefixtures("one_torch_thread")
STATE, MODEL = "trainer_state.pt", "model_squared_000002.pt"


def fresh_trainer(folder, **settings):
    return make_trainer(folder, "squared", hidden_size=8, num_envs=4, num_threads=1, num_buffers=1,
                        minibatch_size=32, **settings)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The folder of a run of two epochs, with a model of each."""
    trainer = fresh_trainer(tmp_path_factory.mktemp("runs"), checkpoint_interval=1)
    run_epochs(trainer, 2)
    trainer.close()
    return trainer.run_folder


@pytest.fixture
def folder(run, tmp_path):
    """A copy of it, to damage."""
    return shutil.copytree(run, tmp_path / run.name)


@pytest.fixture(scope="module")
def trainer(tmp_path_factory):
    """One for all refusals, each of which leaves it as it was."""
    trainer = fresh_trainer(tmp_path_factory.mktemp("fresh"))
    yield trainer
    trainer.release()


def evaluate(path, *more):
    options = ["--load-model-path", str(path), "--policy.hidden-size", "8", "--rnn.num-layers", "2",
               "--env.num-envs", "4", "--eval.episodes", "4", *more]
    return watch.evaluate("squared", pufferl.load_config("squared", options))


def refused(trainer, path, message):
    """A resume that is refused, and leaves the trainer as it was."""
    before = trainer.arena.flat("weights").clone()
    names = set(vars(trainer))
    with pytest.raises(ConfigError, match=message) as error:
        trainer.load_checkpoint(path)
    assert "\n" not in str(error.value)
    assert trainer.epoch == 0 and set(vars(trainer)) == names
    assert torch.equal(before, trainer.arena.flat("weights"))


# -- damaged


class Foreign:
    def __reduce__(self):
        return (os.mkdir, (f"{__file__}.harmed",))


def cut(path):
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])


def make_folder(path):
    path.unlink()
    path.mkdir()


def make_pipe(path):
    path.unlink()
    os.mkfifo(path)


DAMAGES = {  # a word of the reason, and the damage
    "truncated": ("truncated", cut), "empty": ("truncated", lambda path: path.write_bytes(b"")),
    "a folder": ("folder", make_folder), "a pipe": ("file", make_pipe),
    "foreign": (r"posix\.mkdir", lambda path: torch.save({"weight": Foreign()}, path)),
    "a pickle": ("torch", lambda path: path.write_bytes(pickle.dumps(Foreign()))),
    "a tensor": ("Tensor", lambda path: torch.save(torch.zeros(3), path)),
}


@pytest.mark.parametrize(("reason", "damage"), DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_file_is_one_line_that_names_a_whole_one(folder, trainer, reason, damage):
    model, older, state = folder / MODEL, folder / "model_squared_000001.pt", folder / STATE
    for path, age in ((older, 100), (state, 200)):
        os.utime(path, (time.time() - age,) * 2)
    damage(model)
    with pytest.raises(ConfigError, match=rf"{reason}.* {older}\.$") as error:
        evaluate(folder)
    assert "\n" not in str(error.value)
    damage(state)
    refused(trainer, folder, rf"{STATE}.*{reason}.* {older}\b")
    older.unlink()
    with pytest.raises(ConfigError, match=f"{MODEL}.*{reason}") as error:
        evaluate(folder)
    assert str(error.value).count(".pt") == 1, "none is whole"
    assert not os.path.exists(f"{__file__}.harmed")


def test_every_byte_that_is_read_has_a_checksum(folder):
    """A byte that is changed anywhere changes nothing or is refused."""
    path = folder / MODEL
    data, whole, refusals = path.read_bytes(), load(path), 0
    for place in range(0, len(data), max(1, len(data) // 200)):
        path.write_bytes(data[:place] + bytes([data[place] ^ 4]) + data[place + 1 :])
        try:
            weights = load(path)
        except ConfigError:
            refusals += 1
        else:
            assert weights.keys() == whole.keys()
            assert all(torch.equal(weights[name], whole[name]) for name in whole)
    assert refusals > 100


# -- of something else


def edit(path, **changes):
    """Save a state with other entries; `...` removes one."""
    state = torch.load(path, weights_only=True)
    for key, value in changes.items():
        if isinstance(value, dict) and isinstance(state.get(key), dict):
            value = {k: v for k, v in {**state[key], **value}.items() if v is not ...}
        state[key] = value
    torch.save({key: value for key, value in state.items() if value is not ...}, path)


CHANGES = [
    ("epoch", {"epoch": "ten"}), ("epoch", {"numbers": {"epoch": ...}}),
    ("tensors", {"tensors": ...}), ("model", {"model": ...}), ("config", {"config": ...}),
    ("Expecting", {"config": "{"}),
    ("best_score", {"numbers": {"best_score": torch.zeros(3)}}),
    ("others", {"others": {}}), ("environments", {"environments": 5}),
    ("tensors.*momentum", {"tensors": {"momentum": [1.0]}}),
    (r"encoder\.bias", {"model": {"encoder.bias": torch.zeros(3)}}),
    (r"encoder\.bias.*integers", {"model": {"encoder.bias": torch.zeros(8, dtype=torch.int32)}}),
]


@pytest.mark.parametrize(("name", "changes"), CHANGES)
def test_another_state_is_refused_and_nothing_is_changed(folder, trainer, name, changes):
    edit(folder / STATE, **changes)
    refused(trainer, folder, f"{STATE}.*{name}")


@pytest.mark.parametrize("optimizer", ["muon", "adam"])
def test_what_a_state_lacks_begins_anew(tmp_path, capsys, optimizer):
    """Bytes of environments, an optimizer's momenta, and a tensor of another dtype."""
    first, second = (fresh_trainer(tmp_path, optimizer=optimizer) for _ in range(2))
    run_epochs(first, 2)
    path = tmp_path / "a.pt"
    first.save_checkpoint(path)
    state = torch.load(path, weights_only=True)
    environments, random = state["environments"], state["tensors"]["torch_random"]
    for word, changes in (("optimizer", {"adam": ...} if optimizer == "adam" else {"tensors": {"momentum": ...}}),
                          ("episodes", {"environments": environments[:-8].clone()}),
                          ("episodes", {"tensors": {"torch_random": random.to(torch.int32)}})):
        first.save_checkpoint(path)
        edit(path, **changes)
        capsys.readouterr()
        second.load_checkpoint(path)
        printed = capsys.readouterr().out
        assert (f"{path} holds no" in printed) == (word == "optimizer")
        assert ("environments begin" in printed) == (word == "episodes") and second.epoch == 2
    run_epochs(second, 1)


def test_damaged_settings_of_a_run_are_one_line(folder):
    path = folder / "config.json"
    whole = json.loads(path.read_text())
    for changes, options in ((None, ("--load-model-path", "--resume")),
                             ({"policy": 5}, ("--load-model-path", "--resume")),
                             ({"policy": {"hidden_size": "wide"}}, ("--load-model-path", "--resume")),
                             ({"train": {"horizon": [1]}}, ("--resume",))):  # weights come without it
        path.write_text("[" * 100_000 if changes is None else json.dumps({**whole, **changes}))
        for option in options:
            with pytest.raises(ConfigError, match=re.escape(str(path))) as error:
                pufferl.load_config("squared", [option, str(folder)])
            assert "\n" not in str(error.value)


def test_a_damaged_policy_that_ships_is_named(tmp_path, monkeypatch):
    data, path = configuration.find_baseline("squared").read_bytes(), tmp_path / "baseline.safetensors"
    monkeypatch.setattr(configuration, "find_baseline", lambda _: path)
    for broken in (data[:7], data[: len(data) // 2], b"\xff" * 100, data[:8] + b"[" + data[9:]):
        path.write_bytes(broken)
        with pytest.raises(ConfigError, match=r"baseline\.safetensors"):
            pufferl.load_config("squared", ["--baseline"])


# -- what loads


def test_state_dicts_of_others_load(folder, tmp_path):
    """As PufferLib and CleanRL write them, and as older torch did."""
    weights = torch.load(folder / MODEL, weights_only=True)
    expected = evaluate(folder / MODEL)["score"].mean
    ordered = collections.OrderedDict(weights)
    ordered._metadata = {"": {"version": 1}}
    others = (ordered, {name: tensor.double() for name, tensor in weights.items()},
              {name: torch.nn.Parameter(tensor) for name, tensor in weights.items()})
    old = tmp_path / "old.pt"
    for content in others:
        torch.save(content, old)
        assert evaluate(old)["score"].mean == expected
    torch.save(weights, old, _use_new_zipfile_serialization=False)
    assert evaluate(old)["score"].mean == expected
    old.write_bytes(old.read_bytes()[:-100])
    with pytest.raises(ConfigError, match=r"old\.pt"):
        evaluate(old)
    assert evaluate(folder / STATE)["score"].mean == expected, "the weights of a whole run"


def test_a_write_that_fails_leaves_the_file_before(tmp_path):
    path = tmp_path / "a.pt"
    save({"a": torch.zeros(4)}, path)
    before = path.read_bytes()
    with pytest.raises((AttributeError, pickle.PicklingError)):
        save({"a": lambda: None}, path)
    assert path.read_bytes() == before and [p.name for p in tmp_path.iterdir()] == ["a.pt"]
