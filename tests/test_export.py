"""Exported policies: the same numbers and the same games as in Python."""

import base64
import contextlib
import ctypes
import functools
import io
import re
import shutil
import subprocess
import sys
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import open_chromium, slow_but
from gymnasium import spaces
from PIL import Image
from small_envs import Drawn, declares, flatten_action
from trainers import Timed

import emulation
import models
import ocean
import pufferl
import vector
from tools import export, watch

ROOT = Path(__file__).resolve().parent.parent
CC = next(filter(None, map(shutil.which, ("gcc", "clang", "cc"))), None)
WARNINGS = ["-Wall", "-Wextra", "-Werror"]
UNUSED = "-Wno-unused-function"  # of headers
pytestmark = [pytest.mark.usefixtures("one_torch_thread"),
              pytest.mark.skipif(CC is None, reason="there is no C compiler")]


def box(low, high, *shape, dtype=np.float32):
    return spaces.Box(low, high, shape, dtype)


LARGEST = np.finfo(np.float32).max
SEEN = {
    "vector": box(-LARGEST, LARGEST, 6),
    "float64": box(-1, 1, 2, 3, dtype=np.float64),
    "float16": box(-1, 1, 3, dtype=np.float16),
    "integers": box(-300, 300, 5, dtype=np.int64),
    "uint8": box(0, 5, 11, 11, dtype=np.uint8),
    "int8": box(-5, 5, 9, dtype=np.int8),
    "int16": box(-3, 3, 8, dtype=np.int16),
    "int32": box(-3, 3, 5, dtype=np.int32),
    "uint16": box(0, 2**16 - 1, 5, dtype=np.uint16),
    "uint32": box(0, 9, 5, dtype=np.uint32),
    "discrete": spaces.Discrete(5, start=2),
    "image": box(0, 255, 4, 84, 84, dtype=np.uint8),
    "one channel": box(0, 255, 84, 84, 1, dtype=np.uint8),
    "board": box(-2, 3, 8, 8, dtype=np.int8),
    "dict": spaces.Dict({
        "value": box(-1, 1, 3), "kind": spaces.Discrete(3, start=1),
        "mingru": box(-9, 9, 2, dtype=np.int16), "eye": box(0, 255, 20, 20, 1, dtype=np.uint8),
        "inner": spaces.Dict({"far": box(-9, 9, dtype=np.float64),
                              "board": box(0, 3, 4, 4, dtype=np.int8)}),
        "pair": spaces.Tuple([box(-1, 1, 3), spaces.MultiBinary(4)])}),
    "floats": spaces.Dict({"b": box(-1, 1, 3), "a": box(-1, 1, 2, 2)}),
}
TAKEN = {
    "clipped": spaces.Box(np.array([-0.01, 0, 0.05, -np.inf]), np.array([0.01, np.inf, 0.1, 0.0]),
                          dtype=np.float64),
    "masked": spaces.MultiDiscrete([3, 5], start=[2, 0]),
    "squashed": spaces.Box(np.float32([[-1, 7], [-np.inf, 3]]),
                           np.float32([[5, np.inf], [np.inf, 3]])),
    "dict": spaces.Dict({
        "a": spaces.Discrete(3, start=5), "b": spaces.Tuple([spaces.MultiBinary(2)]),
        "c": spaces.Box(-3, 4, (2, 2), np.int16),
        "d": spaces.MultiDiscrete([[3, 2], [2, 4]], start=[[1, -1], [9, 0]])}),
    "box dict": spaces.Dict({"far": spaces.Box(-0.01, 0.01, (2,), np.float64),
                             "near": spaces.Box(-1, 1, ())}),
    "plain": spaces.Discrete(5), "start": spaces.Discrete(5, start=-3),
    "integers": spaces.Box(-3, 4, (2, 2), np.int16),
    "far start": spaces.Discrete(3, start=2**24 + 1), "many": spaces.MultiBinary(65),
}


def make_policy(seen="vector", taken="start", kind="auto", hidden=12, layers=1, normalize=True):
    """Return an environment and an untrained policy whose outputs are not near 0."""
    torch.manual_seed(0)
    creator = partial(Drawn, SEEN[seen], TAKEN[taken], taken == "masked")
    with vector.make(creator, num_envs=1, backend="serial") as envs:
        env = envs.driver_env
    if kind == "auto" and models.wants_encoding(env, boards=True):
        encoded = models.MultiInputPolicy(env, hidden, boards=True, normalize=normalize)
        policy = models.MinGRUWrapper(env, encoded, hidden_size=hidden)
    elif kind in ("auto", "mingru"):
        policy = models.MinGRUPolicy(env, hidden, layers, normalize=normalize)
    else:
        policy = models.FeedForward(env, hidden)
        if kind in ("lstm", "gru"):
            wrapper = models.LSTMWrapper if kind == "lstm" else models.GRUWrapper
            policy = wrapper(env, policy, hidden_size=hidden, num_layers=layers)
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if "bias" in name or "log_std" in name:
                parameter.uniform_(-0.5, 0.5)
            elif name.endswith("decoder.weight"):
                parameter.uniform_(-2, 2).div_(hidden**0.5)
    if taken == "squashed":
        models.squash(policy, env.single_action_space)
    return env, policy


# -- policy.h

DRIVER = r"""
#include "policy.h"
const char* run(const float* file, int64_t count, const char* observations, const uint8_t* resets,
                const uint8_t* masks, int64_t steps, uint64_t seed, uint32_t agent,
                int deterministic, float* outputs, char* actions) {
    Policy policy;
    const char* problem = policy_read(&policy, file, (size_t)count);
    if (problem) return problem;
    static const int bytes[POLICY_TYPES] = {4, 8, 1, 1, 2, 2, 4, 4, 8, 8};
    float* state = policy_new_state(&policy, 1);
    for (int64_t t = 0; t < steps; t++) {
        const char* observation = observations + t * policy.inputs * bytes[policy.type];
        policy_forward(&policy, observation, resets[t], state);
        memcpy(outputs + t * policy.width, policy.outputs, (size_t)policy.width * sizeof(float));
        const uint8_t* mask = masks ? masks + t * (policy.width - 1) : NULL;
        char* action = actions + t * 4 * (policy.heads + policy.dims);
        policy_act(&policy, mask, seed, agent, (uint64_t)t, deterministic, action);
    }
    free(state);
    policy_free(&policy);
    return NULL;
}
"""


@pytest.fixture(scope="module")
def driver(tmp_path_factory):
    folder = tmp_path_factory.mktemp("driver")
    (folder / "driver.c").write_text(DRIVER)
    subprocess.run([CC, "-std=c11", "-O2", *WARNINGS, UNUSED, "-shared", "-fPIC", "-I",
                    str(ocean.FOLDER), "driver.c", "-o", "driver.so", "-lm"], check=True, cwd=folder)
    library = ctypes.CDLL(str(folder / "driver.so"))
    library.run.restype = ctypes.c_char_p
    return library


def run_c(driver, policy, env, observations, resets, masks, seed, agent, deterministic):
    """Return outputs (steps, A + 1) and actions (steps, columns) of one agent through policy.h."""
    flat, steps, decoder = export.flat_policy(policy, env), len(observations), policy.decoder
    outputs = np.full((steps, decoder.out_features), np.nan, np.float32)
    actions = (np.zeros((steps, len(decoder.heads)), np.int32) if decoder.heads
               else np.zeros((steps, decoder.out_features - 1), np.float32))
    address = [None if array is None else array.ctypes.data_as(ctypes.c_void_p)
               for array in (flat, observations, resets, masks, outputs, actions)]
    problem = driver.run(address[0], ctypes.c_int64(len(flat)), *address[1:4],
                         ctypes.c_int64(steps), ctypes.c_uint64(seed), ctypes.c_uint32(agent),
                         int(deterministic), *address[4:])
    assert problem is None, problem
    return outputs, actions


def run_torch(policy, observations, resets):
    """Return outputs (T, N, A + 1) and log_std by the policy in Python."""
    state = policy.initial_state(resets.shape[1]) if hasattr(policy, "initial_state") else {}
    state |= {"resets": torch.from_numpy(resets), "valid": torch.ones(resets.shape).byte()}
    with torch.no_grad():
        logits, value = models.over_time(policy, torch.from_numpy(observations), state)
    outputs, log_std = models.join_outputs(logits, value)
    return outputs.numpy(), log_std


def choose(policy, taken, outputs, masks, **options):
    """Return the environment's action of each agent with these outputs (N, A + 1)."""
    action = emulation.FlatAction(TAKEN[taken])
    logits, value = models.inner_policy(policy).decoder.split(torch.from_numpy(outputs))
    rows, _, _ = models.sample_logits(
        logits, value, heads=action.heads or None, squash=models.squash_of(policy),
        masks=None if masks is None else torch.from_numpy(masks), **options)
    return [action.unflatten(row) for row in rows.numpy()]


@pytest.mark.parametrize(("seen", "taken", "hidden", "layers", "normalize", "deterministic"), [
    ("vector", "start", 64, 2, False, False), ("uint8", "masked", 128, 1, False, False),
    ("float64", "clipped", 33, 3, True, False), ("int8", "masked", 1, 1, False, True),
    ("int16", "box dict", 7, 2, False, True), ("uint16", "start", 8, 1, True, True),
    ("int32", "dict", 20, 1, False, True), ("uint32", "integers", 12, 1, True, False),
    ("integers", "dict", 24, 5, True, False), ("vector", "squashed", 8, 2, False, False),
    ("vector", "squashed", 16, 1, True, True)])
def test_c_has_the_networks_outputs_and_the_environments_action(
        driver, seen, taken, hidden, layers, normalize, deterministic):
    env, policy = make_policy(seen, taken, "mingru", hidden, layers, normalize)
    action, rng = emulation.FlatAction(TAKEN[taken]), np.random.default_rng(0)
    steps, seed, agent, heads, masks = 1000, 2**40 + 12345, 77, policy.decoder.heads, None
    space = SEEN[seen]
    observations = (rng.uniform(-1, 1, (steps, *space.shape)).astype(space.dtype)
                    if space.dtype.kind == "f" else rng.integers(
        int(space.low.min()), int(space.high.max()) + 1, (steps, *space.shape), space.dtype))
    resets = (rng.random(steps) < 0.03).astype(np.uint8)
    resets[0] = 1
    if taken == "masked":
        masks = (rng.random((steps, sum(heads))) < 0.6).astype(np.uint8)
        masks[:, action.firsts] = 1  # one of a head is allowed
    outputs, actions = run_c(driver, policy, env, observations, resets, masks, seed, agent,
                             deterministic)
    expected, without = (run_torch(policy, observations[:, None], flags[:, None])[0][:, 0]
                         for flags in (resets, np.zeros_like(resets)))
    np.testing.assert_allclose(outputs, expected, atol=1e-5, rtol=1e-5)
    assert np.abs(without - expected).max() > 1e-3, "the resets matter, so the test sees them"
    expected = np.array([flatten_action(action, *choose(
        policy, taken, outputs[t : t + 1], None if masks is None else masks[t : t + 1], seed=seed,
        step=t, first_agent=agent, deterministic=deterministic)) for t in range(steps)])
    if heads:  # their exponentials may round otherwise, which moves one draw in millions
        assert (actions != expected + action.starts).sum() <= 1
        assert masks is None or masks[np.arange(steps), actions[:, 0] - action.starts[0]].all()
    else:
        np.testing.assert_allclose(actions, expected, atol=2e-5, rtol=1e-5)
        assert (actions >= action.low).all() and (actions <= action.high).all()
    assert len(np.unique(actions, axis=0)) > (1 if deterministic else 3)


@pytest.mark.parametrize(("seen", "taken", "mean", "deviation", "is_refused"), [
    ("one channel", "start", 0, 1, True), ("discrete", "start", 0, 1, True),
    ("dict", "clipped", 0, 1, True), ("float16", "start", 0, 1, True),
    ("vector", "many", 0, 1, True), ("vector", "far start", 0, 1, True),
    ("vector", "start", 1e9, 1, True), ("vector", "start", 1e9, 1e6, False),
    ("vector", "start", 5, 1e-4, False)])
def test_what_the_flat_file_cannot_hold_is_refused(seen, taken, mean, deviation, is_refused):
    env, policy = make_policy(seen, taken)
    if mean:
        policy.normalizer.shift.fill_(mean)
        policy.normalizer.scale.fill_(1 / deviation)
    refusal = pytest.raises(pufferl.ConfigError, match=r"--export\.onnx")
    with refusal if is_refused else contextlib.nullcontext():
        export.flat_policy(policy, env)


def test_an_edited_network_is_refused(monkeypatch):
    """ocean/policy.h would play another policy."""
    for edit in ("source", "method"):
        env, policy = make_policy("vector", "start")
        if edit == "source":
            monkeypatch.setattr(export.verify, "digest", lambda: "edited")
        else:
            monkeypatch.undo()
            policy.encoder.forward = torch.tanh
        with pytest.raises(pufferl.ConfigError, match=r"implements.*--export\.onnx"):
            export.flat_policy(policy, env)


def test_a_c_program_has_the_files_that_its_header_includes(tmp_path):
    squared = (ROOT / "ocean" / "squared" / "squared.h").read_text()
    for path, text in (("rules/mine.h", ""), ("squared.h", '#include "rules/mine.h"\n' + squared), ("main.c", "#error"),
                       ("policy.h", "")):
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text(text)
    play = make_play(str(tmp_path / "squared.h"), {}, 8, 1, 0)
    flat = export.flat_policy(play.policy, play.vecenv)
    export.write_c(play.vecenv.library, {}, flat, tmp_path / "out")
    subprocess.run(["make", "-C", tmp_path / "out", "squared"], check=True, capture_output=True)
    (tmp_path / "squared.h").write_text('#include "../squared.h"\n')
    (tmp_path.parent / "squared.h").write_text(squared)
    with pytest.raises(pufferl.ConfigError, match="includes"):
        export.write_c(ocean.load(str(tmp_path / "squared.h")), {}, flat, tmp_path / "out")


# -- main.c


def make_play(name, settings, hidden, layers, seed, kind=watch.Play):
    """A policy that is not trained in one environment, or a View of it."""
    torch.manual_seed(1)
    args = pufferl.load_config(name, ["--policy.hidden-size", str(hidden),
                                      "--rnn.num-layers", str(layers)])
    args["env"] |= settings
    return kind(name, args, *[1] * (kind is watch.Play), seed)


def main_command(name, *flags, compiler=CC):
    return [compiler, "-std=gnu11", "-I", str(ocean.FOLDER), f'-DENV_HEADER="{name}/{name}.h"',
            *flags, str(ocean.FOLDER / "main.c")]


def compile_main(name, folder):
    subprocess.run([*main_command(name, "-O2", *WARNINGS, UNUSED), "-o", folder / name,
                    "-lm"], check=True)
    return folder / name


def run_main(program, *arguments):
    result = subprocess.run([program, *map(str, arguments)], capture_output=True, text=True,
                            timeout=120)
    return result, {line.split()[0]: float(line.split()[1]) for line in result.stdout.splitlines()}


@pytest.mark.parametrize(("name", "settings", "deterministic"), [
    ("cartpole", {}, False), ("squared", {"distance": 3}, True), ("masked", {}, False),
    *(pytest.param(name, {}, False, marks=pytest.mark.slow)
      for name in ("pendulum", "target", "drone", "snake"))])
def test_a_c_program_plays_the_same_episodes(tmp_path, name, settings, deterministic):
    library, play = ocean.load(name), make_play(name, settings, 32, 2, seed=5)
    play.options["deterministic"] = deterministic
    export.flat_policy(play.policy, play.vecenv.driver_env).tofile(tmp_path / "policy.bin")
    result, log = run_main(compile_main(name, tmp_path), tmp_path / "policy.bin", "--seed", 5,
                           "--episodes", 12, *["--deterministic"] * deterministic,
                           *export.settings_arguments(library, settings))
    assert result.returncode == 0, result.stderr
    logs = []
    while sum(one["n"] for one in logs) < 12:
        play.decide()
        play.advance()
        logs += filter(None, [play.vecenv.log(0)])
    play.close()
    n = sum(one["n"] for one in logs)
    means = {key: sum(one[key] * one["n"] for one in logs) / n for key in logs[0] if key != "n"}
    assert log == {key: pytest.approx(value, rel=1e-4, abs=1e-4)
                   for key, value in {**means, "n": n, "steps": play.step}.items()}


def test_a_c_program_refuses_what_is_wrong(tmp_path):
    program, path = compile_main("squared", tmp_path), tmp_path / "p.bin"
    result, log = run_main(program, "--episodes", 5)  # without a policy, at random
    assert result.returncode == 0 and log["n"] == 5
    for words in (["--episodes", "five"], ["--seed", "-1"], ["--steps"]):
        assert f"a whole number must follow {words[0]}" in run_main(program, *words)[0].stderr
    env, policy = make_policy("uint8", "plain", "mingru", normalize=False)
    good = export.flat_policy(policy, env)
    assert good[:9].tolist()[1:] == [1, 3, 121, 12, 1, 1, 0, 5] and good.dtype == "<f4"
    whole = good.tobytes()
    files = [(whole[:-4], "cut"), (whole[:36], "cut"), (whole + bytes(4), "belong"),
             (whole + b"\0", "read"), (b"", "read"), (b"xxxx" + whole, "PUFR")]
    for place, value, word in [(1, 9, "format"), (1, 2.5, "format"), (1, 2, "cut"),
                               (2, 10, "damaged"), (3, 0, "damaged"), (4, np.nan, "damaged"),
                               (5, -1, "damaged"), (6, 65, "damaged"), (6, 0, "damaged"),
                               (8, 0.5, "damaged"), (4, 2**20, "cut"), (99, np.nan, "weights")]:
        broken = good.copy()
        broken[place] = value
        files.append((broken.tobytes(), word))
    cases = [([path], word, contents) for contents, word in files] + [
        (arguments, word, whole) for arguments, word in (
            (["distance=3", path], "observations"), (["/no/such.bin"], "opened"),
            (["distanc=3"], "distanc=3"), (["distance=x"], "number"), (["distance=0"], "1..256"),
            (["--speed"], "options"), (["--steps", "1"], "episode"))]
    for arguments, word, contents in cases:
        path.write_bytes(contents)
        result, _ = run_main(program, *arguments)
        assert result.returncode == 1 and word in result.stderr, (arguments, result.stderr)
    assert run_main(program, path)[0].returncode == 0


@pytest.mark.parametrize("name", slow_but(ocean.names(), "breakout", "go"))
def test_main_compiles_with_the_keys_of_each_environment(name):
    command = main_command(name, "-fsyntax-only", "-DDRAW", *WARNINGS)
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


@pytest.mark.slow
@pytest.mark.parametrize("name", ocean.names())
def test_compilers_agree_on_the_games(tmp_path, name):
    compilers = shutil.which("gcc"), next(filter(None, map(
        shutil.which, ("clang", "clang-14", "clang-16", "clang-19"))), None)
    if None in compilers:
        pytest.skip("needs gcc and clang")
    printed = []
    for compiler in compilers:
        subprocess.run([*main_command(name, "-O2", "-ffp-contract=off", "-w", compiler=compiler),
                        "-o", tmp_path / name, "-lm"], check=True)
        printed.append(run_main(tmp_path / name, "--episodes", 20, "--steps", 5000)[0].stdout)
    assert printed[0] == printed[1]


def test_command_line_writes_a_program_and_files_into_new_folders(tmp_path):
    need_onnx()
    flat, onnx, game = (tmp_path / name for name in ("a/b/p.bin", "c/d/p.onnx", "game"))
    result = subprocess.run(
        [sys.executable, ROOT / "pufferl.py", "export", "squared", "--env.distance", "3",
         "--export.c", game, "--export.flat", flat, "--export.onnx", onnx],
        capture_output=True, text=True, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "untrained" in result.stdout and onnx.stat().st_size > 1000
    assert flat.read_bytes() == (game / "policy.bin").read_bytes()
    made = subprocess.run(["make", "-C", game, "run", f"CC={CC}"], capture_output=True, text=True)
    assert made.returncode == 0, made.stderr
    assert re.search(r"^n +100$", made.stdout, re.M)
    for arguments, episodes in (((), 5), (("distance=5",), None)):  # it was trained with 3
        log = run_main(game / "squared", game / "policy.bin", "--episodes", 5, *arguments)[1]
        assert log.get("n") == episodes


def test_what_is_missing_for_an_export_is_named(tmp_path, monkeypatch):
    library = ocean.load("squared")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(pufferl.ConfigError, match="emscripten"):
        export.write_web(library, {}, None, tmp_path)
    with pytest.raises(ImportError, match="onnxscript"):
        export.write_onnx(*reversed(make_policy()), str(tmp_path / "x.onnx"))


# -- ONNX


def need_onnx():
    for package in ("onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(package, reason=f"needs the package {package}")


def leaves(space, value):
    """{name of input or output: array} of a value."""
    arrays = {}
    for keys, names, _ in emulation.FlatObservation(space).leaves:
        part = functools.reduce(lambda part, key: part[key], keys, value)
        arrays["/".join(names)] = np.asarray(part)
    return arrays


FAST = [("dict", "clipped", "auto"), ("one channel", "masked", "auto"),
        ("board", "squashed", "auto"), ("discrete", "dict", "auto"),
        ("float16", "box dict", "auto"), ("vector", "far start", "auto")]
MORE = [("image", "integers", "auto"), ("vector", "many", "auto"), ("int8", "start", "gru"),
        ("int8", "clipped", "lstm"), ("int8", "squashed", "feed-forward")]


class ActsByNormal(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.actor, self.critic = torch.nn.Linear(6, 4), torch.nn.Linear(6, 1)

    def forward(self, observations):
        return torch.distributions.Normal(self.actor(observations), 0.3), self.critic(observations)


def test_onnx_takes_a_network_that_returns_a_normal(tmp_path):
    need_onnx()
    env, _ = make_policy("vector", "clipped")
    assert export.write_onnx(ActsByNormal(), env, str(tmp_path / "a.onnx"), "test") < 1e-4


@pytest.mark.parametrize("case", slow_but(FAST + MORE, *FAST), ids=str)
def test_onnx_has_the_networks_outputs_and_the_environments_action(tmp_path, case):
    """Feed what the environment returns, and its own states, which a reset zeroes."""
    need_onnx()
    import onnx
    import onnxruntime

    seen, taken, kind = case
    env, policy = make_policy(seen, taken, kind, layers=2)
    path, steps, agents = str(tmp_path / "a.onnx"), 20, 3
    assert export.write_onnx(policy, env, path, "test") < 1e-4
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    layout, action = emulation.FlatObservation(SEEN[seen]), emulation.FlatAction(TAKEN[taken])
    state = policy.initial_state(agents) if kind != "feed-forward" else {}
    state = {name: np.zeros(tensor.shape, np.float32) for name, tensor in state.items()}
    parts = [f"action/{name}" if name else "action" for name in
             leaves(TAKEN[taken], TAKEN[taken].sample())]
    names = [*(["logits"] if action.heads else ["mean", "log_std"]), *parts, "value",
             *(f"new_{name}" for name in state)]
    assert [entry.name for entry in session.get_outputs()] == names
    metadata = {entry.key: entry.value for entry in onnx.load(path).metadata_props}
    bounds = {"action_middle": "2 7 0 3", "action_half": "3 -7 -1 -3"} if taken == "squashed" else {}
    assert metadata == {"environment": "test", **(
        {"action_heads": " ".join(map(str, action.heads))} if action.heads
        else {"action_dims": str(action.columns), **bounds})}
    masks = np.tile(np.arange(sum(action.heads)) % 2 == 0, (agents, 1)).astype(np.uint8)
    masks = masks if taken == "masked" else None
    SEEN[seen].seed(0)
    values = [[SEEN[seen].sample() for _ in range(agents)] for _ in range(steps)]
    resets = (np.random.default_rng(0).random((steps, agents)) < 0.1).astype(np.uint8)
    rows = np.stack([[layout.flatten(value) for value in step] for step in values])
    expected, log_std = run_torch(policy, rows, resets)
    for t in range(steps):
        fields = [leaves(SEEN[seen], value) for value in values[t]]
        feed = {f"observation/{name}" if name in ("value", "mingru") else name or "observation":
                np.stack([field[name] for field in fields]) for name in fields[0]}
        for array in state.values():
            array[:, resets[t] == 1] = 0
        feed |= state if masks is None else state | {"action_mask": masks}
        assert {*feed} == {entry.name for entry in session.get_inputs()}
        result = dict(zip(names, session.run(None, feed), strict=True))
        state = {name: result[f"new_{name}"] for name in state}
        outputs = np.hstack([result[names[0]], result["value"]])
        np.testing.assert_allclose(outputs, expected[t], atol=1e-4, rtol=1e-4)
        if not action.heads:
            np.testing.assert_allclose(result["log_std"], log_std[t], atol=1e-6)
        chosen = choose(policy, taken, outputs, masks, seed=0, step=t, deterministic=True)
        for agent, value in enumerate(chosen):
            assert TAKEN[taken].contains(value)
            for output, part in zip(parts, leaves(TAKEN[taken], value).values(), strict=True):
                assert result[output].dtype == part.dtype
                np.testing.assert_allclose(result[output][agent], part, atol=1e-4, rtol=1e-4)
    if case == FAST[-1]:  # a file that differs is refused
        for wrong in (0.01, np.nan):
            with torch.no_grad():
                policy.decoder.bias += wrong
            with pytest.raises(pufferl.ConfigError, match=r"a\.onnx"):
                export.check_onnx(export.Step(policy, env).eval(), path)


def test_a_network_that_reads_its_flags_exports():
    env = declares(spaces.Box(-1, 1, (2,)), spaces.MultiDiscrete([2, 3]))
    env.action_heads = [2, 3]
    policy, x = Timed(env), torch.ones(3, 2)
    outputs = export.Step(policy, env)(x, torch.full((1, 3, 16), 4.0))
    assert torch.allclose(outputs[-1][0], 2 + torch.tanh(policy.body(x)))
    assert models.RecurrentCleanRLAgent(policy).get_value(x).shape == (3, 1)


@pytest.mark.parametrize("seen", ["dict", "floats"])
def test_a_network_that_reads_the_bytes_of_a_dict_is_refused(tmp_path, seen):
    """Fields of one type have no bytes of their own: they are numbers side by side."""
    need_onnx()
    env, policy = make_policy(seen, "start", "feed-forward")
    path = str(tmp_path / "a.onnx")
    if seen == "floats":
        assert export.write_onnx(policy, env, path) < 1e-5
    else:
        with pytest.raises(pufferl.ConfigError, match=r"FeedForward.*nativize_tensor"):
            export.write_onnx(policy, env, path)


# -- the page


def test_the_canvas_has_every_drawing_function():
    patterns = (r"^(?!static|#|typedef)[_A-Za-z]\w*\s+(\w+)\([^;{]*\);",
                r"^    X\(\w+, (\w+),")  # draw.h's list
    names = {name for file in ("draw.h", "main.c") for pattern in patterns
             for name in re.findall(pattern, (ocean.FOLDER / file).read_text(), re.M)}
    names -= {"WindowShouldClose", "SetTargetFPS"}  # of the window's loop, which a browser has
    assert {"DrawRing", "MeasureText", "IsKeyDown", "InitWindow"} <= names
    source = (ocean.FOLDER / "web" / "canvas.js").read_text()
    assert names == set(re.findall(r"^  ([A-Z]\w*): function", source, re.M))


needs_emscripten = pytest.mark.skipif(
    shutil.which("emcc") is None,
    reason="needs emscripten, which was not found (Debian: apt-get install emscripten)")


@contextlib.contextmanager
def open_page(folder):
    """A page of a served folder that has begun to play; fails on errors in the browser."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(SimpleHTTPRequestHandler,
                                                           directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        with open_chromium("MAP * ~NOTFOUND, EXCLUDE 127.0.0.1") as (page, _, problems):
            page.goto(f"http://127.0.0.1:{server.server_port}/")
            page.wait_for_function(
                """document.getElementById('status').textContent.includes('step')
                   || document.getElementById('problem').textContent""")
            assert page.inner_text("#problem") == ""
            yield page
            assert problems == [] and page.inner_text("#problem") == ""
    finally:
        server.shutdown()


def picture(page):
    """What the canvas shows: (height, width, 3) uint8."""
    data = page.evaluate("Module.canvas.toDataURL()")
    return np.array(Image.open(io.BytesIO(base64.b64decode(data.partition(",")[2]))).convert("RGB"))


def build_page(name, folder, settings):
    """A View of what the page in the folder plays."""
    view = make_play(name, settings, 16, 1, seed=0, kind=watch.View)
    flat = export.flat_policy(view.policy, view.vecenv.driver_env)
    export.write_web(ocean.load(name), settings, flat, folder)
    return view


def wait_for_status(page, beginning):
    page.wait_for_function("text => document.getElementById('status').textContent.startsWith(text)",
                           arg=beginning)


@needs_emscripten
@pytest.mark.slow
def test_page_plays_breakout(tmp_path):
    build_page("breakout", tmp_path, {"frameskip": 2}).close()
    names = {path.name for path in tmp_path.iterdir()}
    assert {"index.html", "breakout.js", "breakout.wasm"} == names
    with open_page(tmp_path) as page:
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
        page.wait_for_function(
            "!document.getElementById('status').textContent.includes('mean score 0.00')")
        wait_for_status(page, "the policy plays")

        page.keyboard.down("ArrowLeft")
        wait_for_status(page, "you")
        page.wait_for_function("Module._demo_by_player() == 1")
        page.keyboard.up("ArrowLeft")
        page.keyboard.press("Enter")
        wait_for_status(page, "the policy plays")
        page.click("#restart")
        page.wait_for_function("Module._demo_return() == 0")


@needs_emscripten
@pytest.mark.slow
def test_page_waits_for_the_players_turn(tmp_path):
    build_page("go", tmp_path, {"size": 7}).close()
    with open_page(tmp_path) as page:
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


@needs_emscripten
@pytest.mark.slow
@pytest.mark.parametrize("name", ocean.names())
def test_pages_show_the_same_game_as_raylib(tmp_path, monkeypatch, name):
    """Compare the canvas with raylib, but for letters and edges."""
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")
    pytest.importorskip("raylib", reason="drawing needs the raylib_software wheel")
    view = build_page(name, tmp_path, {})
    with open_page(tmp_path) as page:
        page.evaluate("() => { paused = true; while (Module._demo_steps() < 30) "
                      "Module._demo_frame(); }")
        ours, steps = picture(page), page.evaluate("Module._demo_steps()")
    for _ in range(steps):
        view.decide()
        view.advance()
    theirs = view.picture()
    view.close()
    assert ours.shape == theirs.shape
    height, width = (size // 4 for size in ours.shape[:2])
    # means of 4 × 4 pixels hardly see smoothed edges
    ours, theirs = (image[: 4 * height, : 4 * width].reshape(height, 4, width, 4, 3)
                    .mean(axis=(1, 3)) for image in (ours, theirs))
    assert (np.abs(ours - theirs).max(axis=-1) > 40).mean() < 0.035
