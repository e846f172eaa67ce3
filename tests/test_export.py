"""tools/export.py, ocean/policy.h, ocean/main.c and the page: the same numbers and the
same games as in Python."""

import base64
import contextlib
import ctypes
import io
import itertools
import re
import shutil
import subprocess
import sys
import threading
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import gymnasium
import numpy as np
import pytest
import torch
from conftest import find_chromium
from gymnasium import spaces
from PIL import Image

import emulation
import kernels
import models
import ocean
import pufferl
import vector
from flat_spaces import encode_text
from tools import export

ROOT = Path(__file__).resolve().parent.parent
CC = next(filter(None, map(shutil.which, ("gcc", "clang", "cc"))), None)
pytestmark = pytest.mark.usefixtures("one_torch_thread")

OBSERVATIONS = {
    "float32": spaces.Box(-1, 1, (7,), np.float32),
    "float64": spaces.Box(-1, 1, (3, 2), np.float64),
    "uint8": spaces.Box(0, 5, (11, 11), np.uint8),
    "int8": spaces.Box(-5, 5, (9,), np.int8),
    "int16": spaces.Box(-3, 3, (8,), np.int16),
    "uint16": spaces.Box(0, 3, (16,), np.uint16),
    "int32": spaces.Box(-3, 3, (5,), np.int32),
    "uint32": spaces.Box(0, 3, (5,), np.uint32),
    "int64": spaces.Box(-3, 3, (5,), np.int64),
}
ACTIONS = {
    "discrete": spaces.Discrete(5),
    "multi-discrete": spaces.MultiDiscrete([3, 1, 4]),
    "continuous": spaces.Box(-1, 1, (2,), np.float32),
    "squashed": spaces.Box(np.array([-1, 0], np.float32), np.array([1, 5], np.float32)),
}


def make_policy(observation="float32", action="discrete", kind="default", hidden=16, layers=1):
    """An untrained policy whose outputs are far enough from zero to tell right from wrong."""
    torch.manual_seed(0)
    env = SimpleNamespace(single_observation_space=OBSERVATIONS[observation],
                          single_action_space=ACTIONS[action])
    if kind == "default":
        policy = models.MinGRUPolicy(env, hidden, layers)
    else:
        policy = models.FeedForward(env, hidden)
        if kind in ("lstm", "gru"):
            wrapper = models.LSTMWrapper if kind == "lstm" else models.GRUWrapper
            policy = wrapper(env, policy, hidden_size=hidden, num_layers=layers)
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if "bias" in name or "log_std" in name:
                parameter.uniform_(-0.5, 0.5)
            elif "decoder" in name:
                parameter.uniform_(-0.3, 0.3)
    if action == "squashed":
        models.squash(policy, env.single_action_space)
    return policy, env


# --------------------------------------------------------------------------------------------------
# policy.h

DRIVER = r"""
#include "policy.h"
const char* run(const float* file, int64_t count, const char* observations, const uint8_t* resets, const uint8_t* masks,
                int64_t steps, uint64_t seed, uint32_t agent, int deterministic, float* outputs, char* actions) {
    Policy policy;
    const char* problem = policy_read(&policy, file, (size_t)count);
    if (problem) return problem;
    static const int bytes[POLICY_TYPES] = {4, 8, 1, 1, 2, 2, 4, 4, 8, 8};
    float* state = policy_new_state(&policy, 1);
    for (int64_t t = 0; t < steps; t++) {
        policy_forward(&policy, observations + t * policy.inputs * bytes[policy.type], resets[t], state);
        memcpy(outputs + t * policy.width, policy.outputs, (size_t)policy.width * sizeof(float));
        const uint8_t* mask = masks ? masks + t * (policy.width - 1) : NULL;
        char* action = actions + t * 4 * (policy.heads + policy.dims);
        policy_act(&policy, mask, seed, agent, (uint64_t)t, deterministic, action);
    }
    free(state);
    policy_free(&policy);
    return NULL;
}
const char* load(const char* path, int32_t* inputs) {
    Policy policy;
    const char* problem = policy_load(&policy, path);
    *inputs = policy.inputs;
    policy_free(&policy);
    return problem;
}
"""


@pytest.fixture(scope="module")
def driver(tmp_path_factory):
    if CC is None:
        pytest.skip("there is no C compiler")
    folder = tmp_path_factory.mktemp("driver")
    (folder / "driver.c").write_text(DRIVER)
    subprocess.run([CC, "-std=c11", "-O2", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-I", str(ocean.FOLDER),
                    str(folder / "driver.c"), "-o", str(folder / "driver.so"), "-lm"], check=True)
    library = ctypes.CDLL(str(folder / "driver.so"))
    library.run.restype = library.load.restype = ctypes.c_char_p
    return library


def run_c(driver, flat, observations, resets, width, actions, *, masks=None, seed=0, agent=0,
          deterministic=False):
    """outputs (steps, width) and the filled actions of one agent through policy.h."""
    outputs = np.full((len(observations), width), np.nan, np.float32)
    address = [None if array is None else array.ctypes.data_as(ctypes.c_void_p)
               for array in (flat, observations, resets, masks, outputs, actions)]
    problem = driver.run(address[0], ctypes.c_int64(len(flat)), *address[1:4],
                         ctypes.c_int64(len(observations)),
                         ctypes.c_uint64(seed), ctypes.c_uint32(agent), int(deterministic),
                         *address[4:])
    assert problem is None, problem
    return outputs, actions


def plain(policy, observations, resets):
    """outputs (steps, A + 1) of one agent by the plain torch form of the network."""
    with torch.no_grad():
        x = policy.encoder(torch.from_numpy(observations).reshape(len(observations), 1, -1).float())
        resets, valid = torch.from_numpy(resets)[:, None], torch.ones(len(resets), 1)
        for layer in policy.rnn.layers:
            x, _ = models.mingru_layer(x, layer(x), torch.zeros(1, policy.hidden_size),
                                       resets, valid)
        return policy.decoder(x)[:, 0].numpy()


def random_run(space, steps=1000):
    rng = np.random.default_rng(0)
    if space.dtype.kind == "f":
        observations = rng.uniform(-1, 1, (steps, *space.shape)).astype(space.dtype)
    else:
        observations = rng.integers(int(space.low.min()), int(space.high.max()) + 1,
                                    (steps, *space.shape), space.dtype)
    resets = (rng.random(steps) < 0.03).astype(np.uint8)
    resets[0] = 1
    return observations, resets


@pytest.mark.parametrize("observation,action,hidden,layers", [
    ("float32", "discrete", 64, 2), ("uint8", "multi-discrete", 128, 1),
    ("float64", "continuous", 33, 3),
    ("int8", "discrete", 1, 1), ("int16", "continuous", 7, 2), ("uint16", "discrete", 8, 1),
    ("int32", "multi-discrete", 20, 1), ("uint32", "discrete", 12, 1), ("int64", "discrete", 24, 5),
    ("float32", "squashed", 8, 2)])
def test_c_network_equals_the_plain_one(driver, observation, action, hidden, layers):
    policy, env = make_policy(observation, action, hidden=hidden, layers=layers)
    observations, resets = random_run(env.single_observation_space)
    flat = export.flat_policy(policy, env)
    width = policy.decoder.out_features
    outputs, _ = run_c(driver, flat, observations, resets, width, np.empty((1000, width), np.int32))
    expected = plain(policy, observations, resets)
    assert np.abs(expected).max() > 0.05
    np.testing.assert_allclose(outputs, expected, atol=1e-5, rtol=1e-5)
    # the resets matter, so the test sees them
    without = plain(policy, observations, np.zeros_like(resets))
    assert np.abs(without - expected).max() > 1e-3


@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize("deterministic", [False, True])
def test_c_actions_are_the_trainers(driver, action, deterministic):
    policy, env = make_policy(action=action)
    observations, resets = random_run(env.single_observation_space, 3000)
    flat, width, heads = export.flat_policy(policy, env), policy.decoder.out_features, policy.decoder.heads
    dtype, columns = (np.int32, len(heads)) if heads else (np.float32, width - 1)
    masks = None
    if heads:
        masks = (np.random.default_rng(1).random((3000, width - 1)) < 0.6).astype(np.uint8)
        for first, size in zip(np.cumsum([0, *heads]), heads, strict=False):
            # one is always allowed
            masks[:, first] |= masks[:, first : first + size].sum(axis=1) == 0
    seed, agent = 2**40 + 12345, 77
    outputs, actions = run_c(driver, flat, observations, resets, width,
                             np.empty((3000, columns), dtype), masks=masks,
                             seed=seed, agent=agent, deterministic=deterministic)
    expected, drawn, log_std = np.empty_like(actions), torch.empty(2), policy.decoder.log_std
    layout = {"heads": torch.tensor(heads)} if heads else {
        "log_std": log_std.detach(), "squash": models.squash_of(policy),
        "samples": torch.empty(1, columns)}
    for t in range(3000):
        mask = {} if masks is None else {"masks": torch.from_numpy(masks[t : t + 1])}
        kernels.sample(torch.from_numpy(outputs[t : t + 1]),
                       torch.from_numpy(expected[t : t + 1]), drawn[:1],
                       drawn[1:], seed=seed, step=t, first_agent=agent, deterministic=deterministic,
                       **layout, **mask)
    if heads:  # their exponentials may round otherwise, which moves one draw in millions
        assert (actions == expected).mean() > 0.999
        assert masks[np.arange(3000), actions[:, 0]].all()
    else:
        low, high = env.single_action_space.low, env.single_action_space.high
        np.testing.assert_allclose(actions, expected.clip(low, high), atol=2e-6, rtol=1e-6)
    assert len(np.unique(actions, axis=0)) > 3


def test_c_refuses_damaged_files(driver, tmp_path):
    policy, env = make_policy(action="multi-discrete")
    good = export.flat_policy(policy, env)
    inputs = ctypes.c_int32()

    def problem(contents):
        (tmp_path / "p.bin").write_bytes(contents)
        return (driver.load(str(tmp_path / "p.bin").encode(), ctypes.byref(inputs)) or b"").decode()

    whole = good.tobytes()
    assert problem(whole) == "" and inputs.value == 7
    assert "cut off" in problem(whole[:-4]) and "cut off" in problem(whole[:36])
    assert ("do not belong" in problem(whole + b"\0\0\0\0")
            and "cannot be read" in problem(whole + b"\0"))
    assert "cannot be read" in problem(b"") and "PUFR" in problem(b"xxxx" + whole)
    for place, value, text in [(1, 9, "format"), (1, 2.5, "format"), (1, 2, "cut off"),
                               (2, 10, "damaged"), (3, 0, "damaged"), (4, np.nan, "damaged"),
                               (5, -1, "damaged"), (6, 65, "damaged"), (6, 0, "damaged"),
                               (8, 0.5, "damaged"), (4, 2**20, "cut off")]:
        broken = good.copy()
        broken[place] = value
        assert text in problem(broken.tobytes()), place
    assert "cannot be opened" in driver.load(b"/no/such/file", ctypes.byref(inputs)).decode()


def test_flat_file_is_what_its_comment_says():
    policy, env = make_policy("uint8", "continuous", hidden=6, layers=2)
    flat = export.flat_policy(policy, env)
    assert flat.dtype == "<f4" and flat[:1].tobytes() == b"PUFR"
    assert flat[1:8].tolist() == [5, 3, 121, 6, 2, 0, 2]
    expected = [policy.encoder.weight, policy.encoder.bias]
    for layer in policy.rnn.layers:
        expected += [layer.weight, layer.bias]
    expected += [policy.decoder.weight, policy.decoder.bias, policy.decoder.log_std,
                 torch.tensor([-1.0, -1.0, 1.0, 1.0])]
    np.testing.assert_array_equal(flat[8:], torch.cat([tensor.detach().flatten() for tensor in expected]).numpy())


def test_a_flat_file_of_numbers_that_float32_loses_is_refused():
    space = spaces.Box(0, 2**40, (2,), np.int64)
    env = SimpleNamespace(single_observation_space=space, single_action_space=spaces.Discrete(3))
    policy = models.MinGRUPolicy(env, 8, normalize=True)
    for mean, deviation in ((1e9, 1.0), (1e9, 1e6), (5.0, 1e-4)):
        policy.normalizer.shift.fill_(mean)
        policy.normalizer.scale.fill_(1 / deviation)
        lost = (mean, deviation) == (1e9, 1.0)
        with pytest.raises(pufferl.ConfigError, match=r"--export\.onnx") if lost else contextlib.nullcontext():
            export.flat_policy(policy, env)


def test_flat_file_is_for_the_default_network_only():
    policy, env = make_policy(kind="lstm")
    with pytest.raises(pufferl.ConfigError, match=r"LSTMWrapper over FeedForward.*--export.onnx"):
        export.flat_policy(policy, env)
    policy, _ = make_policy()
    odd = SimpleNamespace(single_observation_space=spaces.Box(-1, 1, (7,), np.float16))
    with pytest.raises(pufferl.ConfigError, match="float16"):
        export.flat_policy(policy, odd)


# --------------------------------------------------------------------------------------------------
# main.c


class Game:
    """What main.c does, in Python: one environment and a policy."""

    def __init__(self, name, settings, policy, seed, deterministic=False):
        self.policy, self.seed, self.deterministic, self.steps, self.total = policy, seed, deterministic, 0, {"n": 0}
        self.envs = envs = ocean.load(name).create(1, seed=seed, settings=settings)
        n = envs.num_agents
        self.observations = np.zeros((n, *envs.observation_shape), envs.observation_dtype)
        self.actions, self.rewards = np.zeros((n, envs.action_dims), envs.action_dtype), np.zeros(n, np.float32)
        self.terminals, self.truncations = np.zeros(n, np.uint8), np.zeros(n, np.uint8)
        self.valid = np.ones(n, np.uint8) if envs.has_valid else None
        self.masks = (np.ones((n, sum(envs.action_heads)), np.uint8) if envs.has_action_masks
                      else None)
        self.rows = ocean.rows(self.observations, self.actions, self.rewards, self.terminals,
                               self.truncations, None, self.valid, self.masks)
        envs.reset(self.rows)
        self.resets, self.state = np.ones(n, np.uint8), policy.initial_state(n)

    def step(self):
        valid, masks = (None if array is None else torch.from_numpy(array)
                        for array in (self.valid, self.masks))
        self.state |= {"resets": torch.from_numpy(self.resets), "valid": valid}
        with torch.no_grad():
            logits, value = models.one_step(self.policy,
                                            torch.from_numpy(self.observations), self.state)
        actions, _, _ = models.sample_logits(logits, value, seed=self.seed, step=self.steps,
                                             masks=masks, heads=self.envs.action_heads,
                                             deterministic=self.deterministic)
        self.actions[:] = actions.numpy()
        self.envs.step(self.rows)
        self.steps += 1
        self.resets = self.terminals | self.truncations
        log = self.envs.log()
        for key, number in log.items():
            self.total[key] = self.total.get(key, 0) + (number if key == "n" else number * log["n"])

    def log(self):
        n = self.total["n"]
        return {key: number / (n if key != "n" else 1) for key, number in self.total.items()} | {"steps": self.steps}


def compile_main(name, folder, *flags):
    subprocess.run([CC, "-std=gnu11", "-O2", "-Wall", "-Wextra", "-Werror", "-Wno-unused-function", "-I",
                    str(ocean.FOLDER), f'-DENV_HEADER="{name}/{name}.h"', *flags, str(ocean.FOLDER / "main.c"), "-o",
                    str(folder / name), "-lm"], check=True)
    return folder / name


def run_main(program, *arguments):
    result = subprocess.run([program, *map(str, arguments)], capture_output=True, text=True,
                            timeout=120)
    return result, {line.split()[0]: float(line.split()[1]) for line in result.stdout.splitlines()}


@pytest.mark.skipif(CC is None, reason="there is no C compiler")
@pytest.mark.parametrize("name,settings,deterministic", [
    ("cartpole", {}, False), ("squared", {"distance": 3}, True), ("masked", {}, False),
    *(pytest.param(name, {}, False, marks=pytest.mark.slow)
      for name in ("pendulum", "target", "drone", "snake"))])
def test_a_c_program_plays_the_same_episodes(tmp_path, name, settings, deterministic):
    torch.manual_seed(1)
    library, seed = ocean.load(name), 5
    envs = library.create(1, settings=settings)
    policy = models.MinGRUPolicy(envs, 32, 2)
    export.flat_policy(policy, envs).tofile(tmp_path / "policy.bin")
    program = compile_main(name, tmp_path)
    result, log = run_main(program, tmp_path / "policy.bin", "--seed", seed, "--episodes", 12,
                           *(["--deterministic"] if deterministic else []),
                           *export.settings_arguments(library, settings))
    assert result.returncode == 0, result.stderr
    game = Game(name, settings, policy, seed, deterministic)
    while game.total["n"] < 12:
        game.step()
    assert log.keys() == game.log().keys()
    for key, number in game.log().items():
        assert log[key] == pytest.approx(number, rel=1e-4, abs=1e-4), key


@pytest.mark.skipif(CC is None, reason="there is no C compiler")
def test_a_c_program_says_what_is_wrong(tmp_path):
    program = compile_main("squared", tmp_path)
    result, log = run_main(program, "--episodes", 5)  # without a policy, at random
    assert result.returncode == 0 and log["n"] == 5
    policy, env = make_policy("uint8", "discrete")
    export.flat_policy(policy, env).tofile(tmp_path / "squared.bin")
    assert run_main(program, tmp_path / "squared.bin")[0].returncode == 0
    for arguments, text in [(["distance=3", tmp_path / "squared.bin"], "other observations"),
                            (["/no/such.bin"], "cannot be opened"),
                            (["distanc=3"], "no such setting: distanc=3"),
                            (["distance=x"], "wants a number"),
                            (["distance=0"], "must lie within 1..256"),
                            (["--speed"], "options: "), (["--steps", "1"], "no episode ended")]:
        result, _ = run_main(program, *arguments)
        assert result.returncode == 1 and text in result.stderr, (arguments, result.stderr)


@pytest.mark.skipif(CC is None, reason="there is no C compiler")
@pytest.mark.parametrize("name", ["breakout", "go", pytest.param("*", marks=pytest.mark.slow)])
def test_main_compiles_with_the_keys_of_each_environment(name):
    for one in ocean.names() if name == "*" else [name]:
        command = [CC, "-std=gnu11", "-fsyntax-only", "-Wall", "-Wextra", "-Werror", "-I",
                   str(ocean.FOLDER), "-DDRAW",
                   f'-DENV_HEADER="{one}/{one}.h"', str(ocean.FOLDER / "main.c")]
        result = subprocess.run(command, capture_output=True, text=True)
        assert result.returncode == 0, f"{one}: {result.stderr}"


@pytest.mark.slow
@pytest.mark.parametrize("name", ocean.names())
def test_compilers_agree_on_the_games(tmp_path, name):
    """Random numbers are drawn in an order that the C standard fixes: gcc and clang
    play the same episodes."""
    clang = next(filter(None, map(shutil.which, ("clang", "clang-14", "clang-16", "clang-19"))),
                 None)
    if clang is None or shutil.which("gcc") is None:
        pytest.skip("needs gcc and clang")
    printed = []
    for compiler in ("gcc", clang):
        subprocess.run([compiler, "-std=gnu11", "-O2", "-ffp-contract=off", "-w", "-I", str(ocean.FOLDER),
                        f'-DENV_HEADER="{name}/{name}.h"', str(ocean.FOLDER / "main.c"), "-o", str(tmp_path / name),
                        "-lm"], check=True)
        printed.append(run_main(tmp_path / name, "--episodes", 20, "--steps", 5000)[0].stdout)
    assert printed[0] == printed[1]


def run_python(*arguments, **options):
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=600, **options)


@pytest.mark.skipif(CC is None, reason="there is no C compiler")
def test_command_line_writes_a_program(tmp_path):
    """As a user: a folder that make builds and runs anywhere, with the settings that the
    policy was exported with."""
    result = run_python(ROOT / "pufferl.py", "export", "squared", "--env.distance", 3, "--export.c",
                        tmp_path / "game",
                     "--export.flat", tmp_path / "p.bin", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "untrained" in result.stdout
    assert (tmp_path / "p.bin").read_bytes() == (tmp_path / "game" / "policy.bin").read_bytes()
    made = subprocess.run(["make", "-C", tmp_path / "game", "run", f"CC={CC}"],
                          capture_output=True, text=True)
    assert made.returncode == 0, made.stderr
    assert re.search(r"^n +100$", made.stdout, re.M)
    for arguments, right in (((), True), (("distance=5",), False)):  # of 3 without a word, as the policy was trained
        done, log = run_main(tmp_path / "game/squared", tmp_path / "game/policy.bin", "--episodes", 5, *arguments)
        assert log.get("n") == 5 if right else "other observations" in done.stderr


def test_errors_say_what_to_do(tmp_path, monkeypatch):
    args = pufferl.load_config("squared") | {"export": {"onnx": None, "flat": None, "c": None,
                                                        "web": str(tmp_path)}}
    monkeypatch.setenv("CC", ocean.find_compiler())
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(pufferl.ConfigError, match="apt-get install emscripten"):
        export.export("squared", args)
    args = pufferl.load_config("gym/CartPole-v1") | {"export": args["export"]}
    with pytest.raises(pufferl.ConfigError, match="not one in C"):
        export.export("gym/CartPole-v1", args)
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(pufferl.ConfigError, match="pip install onnx onnxscript"):
        export.write_onnx(*make_policy(), str(tmp_path / "x.onnx"))


# --------------------------------------------------------------------------------------------------
# ONNX


def need_onnx():
    for package in ("onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(package, reason=f"needs the package {package}")


def check_onnx_run(kind, observation, action, path, steps=100):
    """The file in a loop with its own states, resets by zeroing them, against the
    policy with its `resets`."""
    import onnx
    import onnxruntime

    policy, env = make_policy(observation, action, kind, layers=2)
    assert export.write_onnx(policy, env, str(path), "test") < 1e-5
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    agents, rng = 3, np.random.default_rng(0)
    ours = policy.initial_state(agents) if kind != "feed-forward" else {}
    theirs = {name: np.zeros(tensor.shape, np.float32) for name, tensor in ours.items()}
    assert [entry.name for entry in session.get_inputs()] == ["observation", *ours]
    names = [entry.name for entry in session.get_outputs()]
    given = ["mean", "log_std"] if action in ("continuous", "squashed") else ["logits"]
    assert names == [*given, "action", "value", *(f"new_{name}" for name in ours)]
    heads, _ = models.action_layout(env.single_action_space)
    metadata = {entry.key: entry.value for entry in onnx.load(path).metadata_props}
    bounds = {"action_middle": "0 2.5", "action_half": "1 2.5"} if action == "squashed" else {}
    assert metadata == {"environment": "test",
                        **({"action_heads": " ".join(map(str, heads))} if heads
                            else {"action_dims": "2"}), **bounds}
    observations, _ = random_run(env.single_observation_space, steps * agents)
    for chunk in observations.reshape(steps, agents, *observations.shape[1:]):
        resets = (rng.random(agents) < 0.1).astype(np.uint8)
        for tensor in theirs.values():
            tensor[:, resets == 1] = 0
        ours["resets"] = torch.from_numpy(resets)
        ours_before = {name: tensor.clone() for name, tensor in ours.items()}
        with torch.no_grad():
            outputs, log_std = models.join_outputs(*models.one_step(policy,
                                                                    torch.from_numpy(chunk), ours))
        result = dict(zip(names, session.run(None, {"observation": chunk, **theirs}), strict=True))
        theirs = {name: result[f"new_{name}"] for name in theirs}
        np.testing.assert_allclose(result.get("logits", result.get("mean")),
                                   outputs[:, :-1], atol=1e-5)
        np.testing.assert_allclose(result["value"], outputs[:, -1:], atol=1e-5)
        if log_std is not None:
            np.testing.assert_allclose(result["log_std"], log_std, atol=1e-6)
        if action == "squashed":
            actions, _, _ = models.sample_logits(*models.one_step(policy, torch.from_numpy(chunk), ours_before), seed=0,
                                                 step=0, squash=models.squash_of(policy),
                                                 deterministic=True)
            np.testing.assert_allclose(result["action"], actions, atol=1e-5)
    return policy, env


def test_a_network_that_reads_its_flags_exports():
    """A memory written by hand needs to know where an episode begins; in an exported step none does."""
    class Sums(torch.nn.Module):
        def initial_state(self, num_agents):
            return {"sum": torch.zeros(1, num_agents, 2)}

        def forward(self, observations, state):
            x, keep, live = observations, 1 - state["resets"].unsqueeze(-1), state["valid"].unsqueeze(-1)
            state["sum"] = (state["sum"] * keep + x * live)[-1:]
            return state["sum"], state["sum"][..., :1]

    env = SimpleNamespace(single_observation_space=spaces.Box(-1, 1, (2,)), single_action_space=spaces.Discrete(2))
    logits, _, value, state = export.Step(Sums(), env)(torch.ones(3, 2), torch.full((1, 3, 2), 4.0))
    assert (logits == 5).all() and (value == 5).all() and (state == 5).all()
    agent = models.RecurrentCleanRLAgent(Sums())
    assert (agent.get_value(torch.ones(3, 2)) == 1).all()


def test_onnx_equals_torch(tmp_path):
    """And a file that does not is refused."""
    need_onnx()
    policy, env = check_onnx_run("default", "uint8", "multi-discrete", tmp_path / "policy.onnx")
    for wrong in (0.01, np.nan):
        with torch.no_grad():
            policy.decoder.bias += wrong
        with pytest.raises(pufferl.ConfigError, match="differs from the network"):
            export.check_onnx(export.Step(policy, env).eval(), str(tmp_path / "policy.onnx"))


class Spaces(gymnasium.Env):
    """Any spaces; a mask that forbids every second choice if `masked`."""

    def __init__(self, observations, actions, masked=False):
        self.observation_space, self.action_space = observations, actions
        if masked:
            self.action_masks = lambda: np.arange(sum(emulation.FlatAction(actions).heads)) % 2 == 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.observation_space.sample(), {}

    def step(self, action):
        assert self.action_space.contains(action)
        return self.observation_space.sample(), 0.0, False, False, {}


def image(*shape):
    return spaces.Box(0, 255, shape, np.uint8)


SEEN = {
    "vector": spaces.Box(-np.finfo(np.float32).max, np.finfo(np.float32).max, (6,), np.float32),
    "float64": spaces.Box(-1, 1, (2, 3), np.float64), "float16": spaces.Box(-1, 1, (3,), np.float16),
    "integers": spaces.Box(-300, 300, (5,), np.int64), "uint16": spaces.Box(0, 2**16 - 1, (5,), np.uint16),
    "uint32": spaces.Box(0, 9, (5,), np.uint32), "discrete": spaces.Discrete(5, start=2),
    "choices": spaces.MultiDiscrete([3, 4], start=[1, -2]), "flags": spaces.MultiBinary(7), "text": spaces.Text(6),
    "image first": image(4, 84, 84), "image last": image(84, 84, 3), "one channel": image(84, 84, 1),
    "one channel first": image(1, 84, 84), "grid": image(7, 7, 3), "grid of one": image(7, 7, 1),
    "square": image(16, 16, 16), "pixels": image(84, 84), "board": spaces.Box(-2, 3, (8, 8), np.int8),
    "flags of a board": spaces.Box(0, 1, (6, 6, 1), np.int8), "plane": spaces.Box(0, 1, (6, 6), np.int8),
    "planes": spaces.Box(0, 1, (2, 9, 9), np.uint8), "boards": spaces.Box(0, 4, (5, 5, 1), np.int32),
    "dict": spaces.Dict({"value": spaces.Box(-1, 1, (3,), np.float32), "kind": spaces.Discrete(3, start=1),
                         "mingru": spaces.Box(-9, 9, (2,), np.int16), "eye": image(20, 20, 1),
                         "inner": spaces.Dict({"far": spaces.Box(-9, 9, (), np.float64), "board": spaces.Box(
                             0, 3, (4, 4), np.int8)})}),
    "tuple": spaces.Tuple([spaces.Box(-1, 1, (3,), np.float32), spaces.MultiBinary(4)]),
    "floats": spaces.Dict({"b": spaces.Box(-1, 1, (3,), np.float32), "a": spaces.Box(-1, 1, (2, 2), np.float32)}),
}
TAKEN = {
    "start": spaces.Discrete(5, start=-3), "starts": spaces.MultiDiscrete([[3, 2], [2, 4]], start=[[1, -1], [9, 0]]),
    "masked": spaces.MultiDiscrete([3, 5], start=[2, 0]), "flags": spaces.MultiBinary(3),
    "integers": spaces.Box(-3, 4, (2, 2), np.int16),
    "clipped": spaces.Box(np.array([-0.01, 0, 0.05, -np.inf]), np.array([0.01, np.inf, 0.1, 0.0]), dtype=np.float64),
    "squashed": spaces.Box(np.float32([[-1, 7], [-np.inf, 3]]), np.float32([[5, np.inf], [np.inf, 3]])),
    "dict": spaces.Dict({"a": spaces.Discrete(3, start=5), "b": spaces.Tuple([spaces.MultiBinary(2)])}),
    "box dict": spaces.Dict({"far": spaces.Box(-0.01, 0.01, (2,), np.float64), "near": spaces.Box(-1, 1, ())}),
}


def make_spaces(observations, actions, masked=False, squash=False):
    """(environment, the network that policy.name auto has for it) with these spaces."""
    torch.manual_seed(0)
    with vector.make(partial(Spaces, observations, actions, masked), num_envs=1, backend="serial") as envs:
        env = envs.driver_env
    policy = (models.MinGRUWrapper(env, models.Encoded(env, 12, boards=True, normalize=True), hidden_size=12)
              if models.wants_encoding(env, boards=True) else models.MinGRUPolicy(env, 12, normalize=True))
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if name.endswith("decoder.weight"):
                parameter.uniform_(-2, 2)
    if squash:
        models.squash(policy, env.single_action_space)
    return env, policy


def leaves(space, value):
    """{name of input or output: array} of a value."""
    found = {}
    for keys, names, leaf in emulation.FlatObservation(space).leaves:
        part = value
        for key in keys:
            part = part[key]
        found["/".join(names)] = encode_text(part, leaf.max_length) if isinstance(leaf, spaces.Text) else part
    return found


PAIRS = dict(zip(("one channel", "dict", "board", "discrete", "vector", "image first", "tuple", "text", "float16"),
                 TAKEN, strict=True))


@pytest.mark.parametrize("seen, taken", [
    *PAIRS.items(), *(pytest.param(*pair, marks=pytest.mark.slow) for pair in
                      [*zip(SEEN, itertools.cycle(TAKEN), strict=False), *(("vector", name) for name in TAKEN)])])
def test_onnx_gives_the_environments_own_action(tmp_path, seen, taken):
    """Fed with what the environment returns, one input a key, it gives what the environment takes."""
    need_onnx()
    import onnxruntime
    env, policy = make_spaces(SEEN[seen], TAKEN[taken], taken == "masked", taken == "squashed")
    assert export.write_onnx(policy, env, str(tmp_path / "a.onnx")) < 1e-4
    session = onnxruntime.InferenceSession(str(tmp_path / "a.onnx"), providers=["CPUExecutionProvider"])
    layout, action = emulation.FlatObservation(SEEN[seen]), emulation.FlatAction(TAKEN[taken])
    state, ours = np.zeros((1, 1, 12), np.float32), policy.initial_state(1)
    mask = (np.arange(sum(action.heads)) % 2 == 0)[None].astype(np.uint8) if taken == "masked" else None
    for t in range(5):
        observation = SEEN[seen].sample()
        feed = {name or "observation": np.asarray(part)[None] for name, part in leaves(SEEN[seen], observation).items()}
        feed = {name if name not in ("value", "mingru") else f"observation/{name}": part for name, part in feed.items()}
        feed |= {"mingru": state} | ({} if mask is None else {"action_mask": mask})
        assert feed.keys() == {one.name for one in session.get_inputs()}
        names = [one.name for one in session.get_outputs()]
        result = dict(zip(names, session.run(None, feed), strict=True))
        state = result["new_mingru"]
        with torch.no_grad():
            logits, value = models.one_step(policy, torch.from_numpy(layout.flatten(observation)[None]), ours)
        row, _, values = models.sample_logits(
            logits, value, seed=0, step=t, heads=action.heads or None, deterministic=True,
            squash=models.squash_of(policy), masks=None if mask is None else torch.from_numpy(mask))
        np.testing.assert_allclose(result["value"][:, 0], values, atol=1e-4, rtol=1e-4)
        expected = action.unflatten(row[0].numpy())
        assert TAKEN[taken].contains(expected)
        for name, part in leaves(TAKEN[taken], expected).items():
            found = result[f"action/{name}" if name else "action"]
            assert found.dtype == np.asarray(part).dtype
            np.testing.assert_allclose(found[0], part, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("taken", TAKEN)
def test_c_gives_the_environments_own_action(driver, taken):
    env, policy = make_spaces(OBSERVATIONS["float32"], TAKEN[taken], taken == "masked", taken == "squashed")
    observations, resets = random_run(OBSERVATIONS["float32"], 300)
    action, contents = emulation.FlatAction(TAKEN[taken]), export.flat_policy(policy, env)
    masks = np.tile(np.arange(sum(action.heads)) % 2 == 0, (300, 1)).astype(np.uint8) if taken == "masked" else None
    outputs, actions = run_c(driver, contents, observations, resets, policy.decoder.out_features,
                             np.empty((300, action.columns), np.int32 if action.heads else np.float32), masks=masks)
    layout = {"heads": action.heads} if action.heads else {"squash": models.squash_of(policy)}
    for t in range(300):
        logits, value = policy.decoder.split(torch.from_numpy(outputs[t : t + 1]))
        row, _, _ = models.sample_logits(logits, value, seed=0, step=t, **layout,
                                         masks=None if masks is None else torch.from_numpy(masks[t : t + 1]))
        low, high = (action.starts, np.inf) if action.heads else (action.low, action.high)
        assert (actions[t] >= low).all() and (actions[t] <= high).all()
        expected = action.flatten(action.unflatten(row[0].numpy())) + (action.starts if action.heads else 0)
        np.testing.assert_allclose(actions[t], expected, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("seen, taken", [
    ("one channel", "start"), ("discrete", "start"), ("dict", "clipped"), ("float16", "start"),
    ("vector", spaces.MultiBinary(65)), ("vector", spaces.Discrete(3, start=2**24 + 1))])
def test_what_the_flat_file_cannot_hold_is_refused_with_a_way_that_works(tmp_path, seen, taken):
    need_onnx()
    env, policy = make_spaces(SEEN[seen], TAKEN.get(taken, taken) if isinstance(taken, str) else taken)
    with pytest.raises(pufferl.ConfigError, match=r"--export\.onnx"):
        export.flat_policy(policy, env)
    assert export.write_onnx(policy, env, str(tmp_path / "a.onnx")) < 1e-4


def test_a_network_that_reads_the_bytes_of_a_dict_is_refused(tmp_path):
    """Fields of one type have no bytes of their own: they are numbers side by side."""
    need_onnx()
    for seen in ("dict", "floats"):
        env, _ = make_spaces(SEEN[seen], TAKEN["start"])
        policy = models.FeedForward(env, hidden_size=8)
        if seen == "dict":
            with pytest.raises(pufferl.ConfigError, match=r"FeedForward.*nativize_tensor.*auto"):
                export.write_onnx(policy, env, str(tmp_path / "a.onnx"))
        else:
            assert export.write_onnx(policy, env, str(tmp_path / "a.onnx")) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["default", "lstm", "gru", "feed-forward"])
@pytest.mark.parametrize("action", ACTIONS)
def test_onnx_equals_torch_for_all(tmp_path, kind, action):
    need_onnx()
    check_onnx_run(kind, "float32", action, tmp_path / "policy.onnx")


# --------------------------------------------------------------------------------------------------
# The page


def prototypes(path):
    plain = r"^(?!static|#|typedef)[_A-Za-z]\w*\s+(\w+)\([^;{]*\);"
    listed = r"^    X\(\w+, (\w+),"  # draw.h's list
    return {name for pattern in (plain, listed)
            for name in re.findall(pattern, path.read_text(), re.M)}


def test_the_canvas_has_every_drawing_function():
    wanted = prototypes(ocean.FOLDER / "draw.h") | prototypes(ocean.FOLDER / "main.c")
    # of the window's loop, which a browser has of its own
    wanted -= {"WindowShouldClose", "SetTargetFPS"}
    assert {"DrawRing", "MeasureText", "IsKeyDown", "InitWindow"} <= wanted
    source = (ocean.FOLDER / "web" / "canvas.js").read_text()
    assert wanted == set(re.findall(r"^  ([A-Z]\w*): function", source, re.M))


@pytest.fixture(scope="module")
def browser():
    if shutil.which("emcc") is None:
        pytest.skip("needs emscripten, which was not found (Debian: apt-get install "
                    "emscripten node-acorn)")
    sync_api = pytest.importorskip("playwright.sync_api", reason="needs the package playwright")
    program = find_chromium()
    with sync_api.sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield chromium
        chromium.close()


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


@contextmanager
def open_page(browser, folder):
    """A page of a served folder that has begun to play; fails on errors in the browser."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    page, errors = browser.new_page(), []
    page.set_default_timeout(120_000)
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("console", lambda message: errors.append(message.text))
    try:
        page.goto(f"http://127.0.0.1:{server.server_port}/")
        page.wait_for_function("""document.getElementById('status').textContent.includes('step')
                                  || document.getElementById('problem').textContent""")
        assert page.inner_text("#problem") == ""
        yield page
        assert errors == [] and page.inner_text("#problem") == ""
    finally:
        page.close()
        server.shutdown()


def picture(page):
    """What the canvas shows: (height, width, 3) uint8."""
    data = page.evaluate("Module.canvas.toDataURL()")
    return np.array(Image.open(io.BytesIO(base64.b64decode(data.partition(",")[2]))).convert("RGB"))


def build_page(name, folder, settings=None):
    torch.manual_seed(1)
    library = ocean.load(name)
    policy = models.MinGRUPolicy(library.create(1, settings=settings), 16, 1)
    export.write_web(library, settings or {},
                     export.flat_policy(policy, library.create(1, settings=settings)), folder)
    return policy


@pytest.mark.slow
def test_page_plays_breakout(browser, tmp_path):
    build_page("breakout", tmp_path, {"frameskip": 2})
    assert {"index.html", "breakout.js", "breakout.wasm"} == {path.name
                                                              for path in tmp_path.iterdir()}
    with open_page(browser, tmp_path) as page:
        steps = "Module._demo_steps()"
        first, before = picture(page), page.evaluate(steps)
        page.wait_for_function(f"{steps} > {before} + 5")
        assert (picture(page) != first).any()

        page.click("#pause")
        before, still = page.evaluate(steps), picture(page)
        page.wait_for_timeout(500)
        assert page.evaluate(steps) == before and (picture(page) == still).all()
        page.click("#pause")
        page.select_option("#speed", "16")
        page.wait_for_function("Module._demo_episodes() > 1 && Module._demo_score() > 0")
        page.wait_for_function("!document.getElementById('status').textContent.includes('mean score 0.00')")
        assert page.inner_text("#status").startswith("the policy plays")

        # the player holds the paddle at a wall, then the policy has it back
        page.select_option("#speed", "4")
        page.keyboard.down("ArrowLeft")
        page.wait_for_function("document.getElementById('status').textContent.startsWith('you')")
        for _ in range(300):  # a lost ball puts the paddle back into the middle
            paddle = np.flatnonzero((picture(page)[630] == (0, 187, 204)).all(axis=-1))
            if paddle.min() == 0:
                break
            page.wait_for_timeout(20)
        assert len(paddle) > 50 and paddle.min() == 0
        page.keyboard.up("ArrowLeft")
        page.keyboard.press("Enter")
        page.wait_for_function("document.getElementById('status').textContent.startsWith('the "
                               "policy plays')")
        before = page.evaluate("Module._demo_return()")
        page.click("#restart")
        page.wait_for_function("Module._demo_return() == 0")


@pytest.mark.slow
def test_page_waits_for_the_players_turn(browser, tmp_path):
    build_page("go", tmp_path, {"size": 7})
    with open_page(browser, tmp_path) as page:
        page.select_option("#speed", "0.25")
        page.click("#restart")
        box = page.locator("#canvas").bounding_box()
        page.mouse.click(box["x"] + box["width"] * 2.5 / 7, box["y"] + box["height"] * 3.5 / 7)
        page.wait_for_function("Module._demo_by_player() == 1")
        before = page.evaluate("Module._demo_steps()")
        page.wait_for_timeout(2000)
        assert page.evaluate("Module._demo_steps()") == before  # it is the player's turn
        page.click("#give")
        page.wait_for_function(f"Module._demo_steps() > {before}")


@pytest.mark.slow
@pytest.mark.parametrize("name", ocean.names())
def test_pages_show_the_same_game_as_raylib(browser, tmp_path, monkeypatch, name):
    """After some steps of the same policy the canvas shows what raylib draws: alike but
    for letters and edges."""
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")
    pytest.importorskip("raylib", reason="drawing needs the raylib_software wheel")
    policy = build_page(name, tmp_path)
    with open_page(browser, tmp_path) as page:
        page.evaluate("() => { paused = true; while (Module._demo_steps() < 30) "
                      "Module._demo_frame(); }")
        ours, steps = picture(page), page.evaluate("Module._demo_steps()")
    game = Game(name, {}, policy, 0)
    for _ in range(steps):
        game.step()
    theirs = game.envs.render()
    assert ours.shape == theirs.shape
    # means of 4 × 4 pixels hardly see smoothed edges
    height, width = (size // 4 * 4 for size in ours.shape[:2])
    ours, theirs = (image[:height, :width].reshape(height // 4, 4, width // 4, 4, 3).mean(axis=(1, 3))
                    for image in (ours, theirs))
    far = (np.abs(ours - theirs).max(axis=-1) > 40).mean()
    assert far < 0.035, f"{far:.1%} of the picture differs"


def test_files_go_into_folders_that_are_not_there_yet(tmp_path):
    need_onnx()
    for kind, file in (("flat", tmp_path / "a" / "b" / "policy.bin"), ("onnx", tmp_path / "c" / "d" / "policy.onnx")):
        run_python(ROOT / "pufferl.py", "export", "squared", "--baseline", f"--export.{kind}", file)
        assert file.stat().st_size > 1000
