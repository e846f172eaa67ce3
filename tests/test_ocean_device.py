"""Environments in C on a GPU, without one: their kernels compile for it, and run as host C++ they do what the C library
does, byte for byte, alone and in a trainer (fast/fused.py) whose rollout is played from graphs."""

import functools
import os
import re
import subprocess
import sys

import cuda_on_a_cpu
import device_steps
import numpy as np
import nvrtc
import pytest
import test_devices
import torch
from conftest import slow_but
from device_steps import act, both, step_both
from test_devices import Recorder, all_equal, install, launches, on_a_cpu, released, skip_without_gpu  # noqa: F401

import configuration
import data_parallel
import environments
import models
import ocean
import vector
from errors import ConfigError, EnvError
from fast import rollout
from ocean import device as on_device

STAY = {"performance": "<time.h>"}  # on the host, and why
NAMES = [name for name in ocean.names() if name not in STAY]
ARCHS = ("sm_80", "sm_90", "sm_120")


@pytest.fixture(autouse=True)
def stand_in(request, monkeypatch):
    if request.node.get_closest_marker("gpu"):
        pytest.importorskip("cupy", reason="pip install -r requirements/cuda.txt")
        skip_without_gpu()
    else:
        cuda_on_a_cpu.install(monkeypatch)


def test_most_environments_are_plain_data():
    for name, why in STAY.items():
        assert why in on_device.why_not(ocean.load(name))
    assert len(NAMES) >= 30


# ---------------------------------------------------------------------------------------------------------------------
# The compiler

@nvrtc.needed
@pytest.mark.parametrize("arch", slow_but(["syntax", *ARCHS], "syntax"))
@pytest.mark.parametrize("name", NAMES)
def test_a_header_is_cuda_too(name, arch):
    """The fast test reads its words only: no code is made."""
    source, options = on_device.source(device_steps.library(name)), on_device.OPTIONS
    if arch == "syntax":
        nvrtc.compile(source, f"{name}.cu", "sm_90", (*options, "--fdevice-syntax-only"))
        return
    ptx, _ = nvrtc.compile(source, f"{name}.cu", arch, options)
    assert f".target {arch}" in ptx
    assert all(f".entry device_{kernel}(" in ptx for kernel in ("step", "reset", "log"))


@nvrtc.needed
def test_products_and_sums_stay_apart_and_another_layout_is_an_error():
    source = on_device.source(device_steps.library("continuous"))
    joined = [option for option in on_device.OPTIONS if "fmad" not in option]
    assert "fma.rn.f32" in nvrtc.compile(source, options=joined)[0]
    assert "fma.rn.f32" not in nvrtc.compile(source, options=on_device.OPTIONS)[0]
    library = device_steps.library("squared")
    library.log_offset += 4
    with pytest.raises(RuntimeError, match="laid out"):
        nvrtc.compile(on_device.source(library), options=on_device.OPTIONS)


HEADER = r"""
#pragma once
#define OBSERVATION float
#define LOG(X) X(perf) X(score) X(episode_return) X(episode_length) X(n)
#define SETTINGS(X) X(int, size, 3, "a (Pair){1, 2} in a text")
#include "env.h"
#include <limits.h>
%s
struct Pair_ { int a; };
typedef struct { int a, b; } Pair;
struct Env { ENV_COMMON Pair pair; int new; uint8_t bytes[8]; };
static Pair sum(Pair one, Pair other) { return (Pair){one.a + other.a, one.b + other.b}; }
static const char* c_init(Env* env) { env->pair = (struct Pair_){0}.a ? (Pair){1, 1} : (Pair) {1, 2}; return NULL; }
static void c_spaces(const Env* env, Spaces* spaces) {
    *spaces = (Spaces){.num_agents = 1, .observation_shape = {env->size}, .observation_high = 1, .action_heads = {2}};
}
static void c_reset(Env* env) { for (int i = 0; i < env->size; i++) env->observations[i] = (float)env->new; }
static void c_step(Env* env) {
    if (env->size){ env->pair = sum(env->pair, (Pair){1, -1}); }
    for (int i = 0; i < 8; i++) env->bytes[i] = (uint8_t)(env->pair.a + i);
    memmove(env->bytes + 1, env->bytes, 6); memmove(env->bytes, env->bytes + 2, 6);
    uint8_t* at = memchr(env->bytes, env->pair.a & 255, 8);
    unsigned long long word = (unsigned long long)env->pair.a << 33 | 8;
    env->new = __builtin_ctz((unsigned)word) + 10 * __builtin_ctzll(word) + __builtin_clz((unsigned)env->pair.a)
        + __builtin_clzll(word) + __builtin_popcount(env->pair.a) + 7 * __builtin_popcountll(word)
        + 100 * memcmp(env->bytes, env->bytes + 4, 2) + (at ? (int)(at - env->bytes) : 50);
    env->rewards[0] = env->new > INT_MAX / 2 ? INFINITY : (float)M_PI;
    env->terminals[0] = env->truncations[0] = 0;
    c_reset(env);
}
static void c_render(Env* env) { (void)env; }
"""


RECURSION = [  # functions, and the one that calls itself
    ("static int fall(int n) { return n ? fall(n - 1) : 0; }", "fall"),
    ("static int up(int n);\nstatic int down(int n)\n{\n    return n ? up(n - 1) : 0;\n}\n"
     "static int top(int n) {\n    if (n > 1) { return down(n); }\n    return 0;\n}\n"
     "static int up(int n) { return down(n - 1); }", "down"),
    ("static int fall(int n) { return n; } /* fall(n) */\nstatic int top(int n) { return fall(fall(n)); }", None),
]
ARRAY = "static int* list(void) { return (int[]){1}; }"  # no C++


def test_a_custom_header_may_be_c(tmp_path, monkeypatch):
    """Names that C++ takes for words, compound literals, bits and memory, all of them as in C."""
    path = tmp_path / "custom.h"

    def why_not(functions="", struct=""):
        path.write_text((HEADER % functions).replace("struct Env { ENV_COMMON", f"struct Env {{ ENV_COMMON {struct}"))
        return on_device.why_not(device_steps.library(path)) or ""

    assert why_not() == "" and not on_device.truncates(device_steps.library(path))
    assert on_device.truncates(ocean.load("cartpole"))
    device_steps.compare(path, 200)
    nvrtc.compile(on_device.source(device_steps.library(path)), options=on_device.OPTIONS)
    for struct, pointer in (("int *now;", True), ("int (*act)(int);", True), ("int a[2 * 3]; /* int *x; */", False)):
        assert ("pointer" in why_not(struct=struct)) == pointer
    assert "<time.h>" in why_not("#include <time.h>")
    for functions, caller in RECURSION:
        assert (caller is not None) == (f" {caller} " in why_not(functions))
        assert on_device._recursion(path.read_text()) == caller
    monkeypatch.delitem(sys.modules, "cupy")
    monkeypatch.setattr(on_device.importlib.util, "find_spec", lambda name: None)
    assert "CuPy" in why_not()


def broken(folder):
    """A library whose header is no C++."""
    (folder / "broken.h").write_text(HEADER % ARRAY)
    return ocean.load(folder / "broken.h")


# ---------------------------------------------------------------------------------------------------------------------
# The same steps


STEPS = [*((name, 300, "-O0") for name in NAMES[::5]),  # compiling lasts longest
         *(pytest.param(name, 10_000, "-O3", marks=pytest.mark.slow) for name in NAMES)]


@pytest.mark.parametrize("name, steps, level", STEPS)
def test_steps_are_those_of_the_c_library(name, steps, level, monkeypatch):
    monkeypatch.setattr(cuda_on_a_cpu, "FLAGS", [level])
    many = name in ("squared", "cartpole")
    assert device_steps.compare(name, steps, num_envs=70 if many else 3, seed=7) > 0 or steps == 300


@pytest.mark.slow
@pytest.mark.parametrize("names", [("squared", "breakout", "cartpole"), ("go", "tetris", "g2048"), ("moba", "boids"),
                                   ("maze", "snake", "nmmo3")],
                         ids=" ".join)
def test_steps_stay_within_their_memory(names):
    """Under the address and the undefined-behaviour sanitizer."""
    found = [subprocess.run(["g++", f"-print-file-name=lib{kind}.so"], capture_output=True, text=True).stdout.strip()
             for kind in ("asan", "ubsan")]
    environment = {**os.environ, "PYTHONPATH": str(on_device.FOLDER.parent), "LD_PRELOAD": " ".join(found),
                   "ASAN_OPTIONS": "detect_leaks=0:detect_stack_use_after_return=0"}
    done = subprocess.run([sys.executable, device_steps.__file__, "500", *names], env=environment,
                          capture_output=True, text=True)
    assert done.returncode == 0 and "runtime error" not in done.stderr, done.stderr[-4000:]
    assert len(done.stdout.split()) == 2 * len(names)


# ---------------------------------------------------------------------------------------------------------------------
# vector.GpuEnvs


@pytest.mark.parametrize("name", ["cartpole", "target", "masked", "drone", "maze", "snake"])
def test_a_vector_is_saved_for_the_host_and_starts_as_there(name):
    """A state loads in both kinds; another seed and another rank's numbers count in both."""
    (host, other), random = both(name), np.random.default_rng(0)
    assert type(other) is vector.GpuEnvs and other.num_buffers == 1 and not other.can_step_in_kernels
    for seed in (3, 5):
        for vecenv in (host, other):
            vecenv.reset(seed=seed)
        for _ in range(60):
            step_both(host, other, random)
    saved = other.save()
    assert np.array_equal(host.save(), saved)
    step_both(host, other, random)
    for vecenv in (host, other):
        vecenv.load(saved)
    for _ in range(5):
        step_both(host, other, random)
    for vecenv in (host, other):
        vecenv.set_first_env(100)  # as those of another rank, from the next reset on
    assert np.array_equal(host.reset()[0], other.reset()[0])


def test_the_log_and_the_picture_of_one_environment():
    host, other = both("cartpole", max_steps=3)
    for vecenv in (host, other):
        vecenv.allocate(5)
        for _ in range(5):
            vecenv.advance(0)
    assert other.log(2) == host.log(2) and other.log(2) == {}
    assert other.log() == host.log() and other.log() == {}
    pytest.importorskip("raylib", reason="pip install raylib_software")
    assert np.array_equal(host.render(1), other.render(1))
    pictures = []
    for vecenv in both("maze"):  # drawn from the arrays of HEAP
        vecenv.reset()
        pictures.append(vecenv.render(1))
    assert np.array_equal(*pictures) and len(np.unique(pictures[0])) > 5


# ---------------------------------------------------------------------------------------------------------------------
# The trainer


@pytest.fixture
def recorder(monkeypatch):
    """The recorder of test_devices.py. What an environment's kernel changes while it is captured would not be put
    back, so it is noted and not run."""
    cupy = sys.modules["cupy"]
    run = cupy.execute
    install(monkeypatch, on_a_cpu)
    recorded = cupy.execute

    def execute(kernel, *call):
        if Recorder.capturing is not None and kernel.name.startswith("device_"):
            Recorder.capturing.calls.append((run, (kernel, *call), {}, None))
        else:
            recorded(kernel, *call)

    monkeypatch.setattr(cupy, "execute", execute)
    return cupy


def make_trainer(name, there, **settings):
    place = {"device": "cpu"} if there else {"num_buffers": 1}
    return test_devices.make_trainer(device_steps.library(name), 32, vec={"num_threads": 1, **place},
                                     **{"cudagraphs": 2, **settings})


def train(trainer, epochs):
    logs = [(trainer.evaluate(), trainer.train()) for _ in range(epochs)]
    return test_devices.copies(trainer), logs


CASES = {
    "squared": {},
    "cartpole": {"env_kwargs": {"max_steps": 11}},
    "masked": {},
    "drone": {},  # several agents, continuous
    "pendulum": {"env_kwargs": {"max_steps": 11}, "squash": True, "precision": "bfloat16", "horizon": 8},
    "maze": {"env_kwargs": {"size": 2, "max_steps": 11}},  # HEAP
    "breakout": {"network": models.FeedForward, "norm_reward": True},
}


@pytest.mark.parametrize("name", slow_but(CASES, "masked", "pendulum", "breakout"))
def test_a_trainer_learns_the_same_from_them(recorder, name, monkeypatch):
    """Bit for bit, whether they step on the host or there, in a rollout of one kernel, from graphs and without."""
    results, is_default = [], "network" not in CASES[name]
    for there, graphs, is_whole in ((False, 2, False), (True, 2, True), (True, 2, False), (True, -1, False)):
        monkeypatch.setattr(rollout.Rollout, "is_supported", lambda vecenv, is_whole=is_whole: is_whole)
        trainer = make_trainer(name, there, **CASES[name], cudagraphs=graphs)
        assert trainer.buffers.envs_on_gpu == there
        recorder.launches.clear()
        results.append(train(trainer, 5))
        if there:
            stepped = [launch for launch in recorder.launches if launch.startswith("device_")]
            one = is_whole and is_default
            assert stepped == [*(["device_rollout"] if one else ["device_step"] * 8), "device_log"] * 5
            captured = ("rollout", 0, 8) in trainer.buffers.gpu.graphs
            assert captured == (graphs == 2 and not one)
            if captured and name == "squared":  # a step: the policy's, the environments'; at the end V
                assert [len(launches(trainer, ("rollout", 0, first))) for first in (0, 8)] == [8 * 2, 2]
            assert not trainer.buffers.gpu.pinned[2:]  # nothing of a rollout is on the host
    for tensors, logs in results[1:]:
        assert all_equal(tensors, results[0][0])
        assert logs == results[0][1]
    assert name != "cartpole" or results[0][0][3].any(), "no final values"


@pytest.mark.parametrize("processors, backwards", [(1, False), (5, True), (40, False)])
def test_a_rollout_is_the_same_on_any_number_of_blocks(recorder, processors, backwards, monkeypatch):
    """256 agents are eight tiles of 32 on one block or five, also from the last thread to the first, or 32 of 8."""
    expected = train(make_trainer("drone", True), 3)
    monkeypatch.setattr(cuda_on_a_cpu, "PROCESSORS", processors)
    monkeypatch.setattr(recorder, "backwards", backwards)
    tensors, logs = train(make_trainer("drone", True), 3)
    assert all_equal(tensors, expected[0]) and logs == expected[1]


def test_a_header_that_does_not_compile_with_a_policy_is_stepped(recorder, monkeypatch, capsys):
    expected = train(make_trainer("squared", True), 3)
    monkeypatch.setattr(rollout, "KERNEL", "nonsense")
    recorder.launches.clear()
    assert all_equal(train(make_trainer("squared", True), 3)[0], expected[0])
    assert "device_rollout" not in recorder.launches and "squared" in capsys.readouterr().err


def test_who_has_a_rollout_of_one_kernel():
    """Environments of 8 agents do, of 64 do not, nor do those whose numbers of agents differ."""
    for name, settings, is_supported in (("squared", {}, True), ("drone", {}, True), ("boids", {}, False),
                                         ("drone", {"env_kwargs": [{"num_agents": 1}, {"num_agents": 2}]}, False)):
        with vector.make(name, 2, num_threads=1, **settings) as vecenv:
            assert rollout.Rollout.is_supported(vecenv) == is_supported


@nvrtc.needed
@pytest.mark.parametrize("name, generation", [("breakout", "sm_90"), *(
    pytest.param(name, generation, marks=pytest.mark.slow)
    for name in NAMES for generation in ("sm_80", "sm_90", "sm_120") if (name, generation) != ("breakout", "sm_90"))])
def test_a_rollout_compiles_with_each_environment(name, generation):
    text = rollout.source(device_steps.library(name))
    _, log = nvrtc.compile(text, "rollout.cu", generation, (*on_device.OPTIONS, "--ptxas-options=-v"), assembles=True)
    log = log[log.index("device_rollout"):]
    assert int(re.search(r"(\d+) bytes spill stores", log)[1]) < 512  # 344 for enduro on sm_120


def test_a_run_goes_on_bit_for_bit(recorder, tmp_path):
    """From a checkpoint, in another trainer, in the same one from graphs that were made before, and on the host."""
    settings = {"env_kwargs": {"max_steps": 11}, "cudagraphs": 1}
    whole = make_trainer("cartpole", True, **settings)
    train(whole, 3)
    whole.save_checkpoint(tmp_path / "state.pt")
    expected, _ = train(whole, 2)
    saved = torch.load(tmp_path / "state.pt", weights_only=True)
    assert len(saved["environments"]) and saved["tensors"]["observations"].any()
    for trainer in (whole, make_trainer("cartpole", True, **settings), make_trainer("cartpole", False, **settings)):
        trainer.load_checkpoint(tmp_path / "state.pt")
        assert all_equal(train(trainer, 2)[0], expected)


def test_a_policy_on_the_cpu_may_act_in_them():
    results = [train(make_trainer("cartpole", there, device="cpu"), 3) for there in (False, True)]
    assert all_equal(results[0][0], results[1][0])


# ---------------------------------------------------------------------------------------------------------------------
# What only a GPU can show


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
def test_a_gpu_steps_as_the_host(name):
    """A few steps: the last bits of a sine may differ, and what follows from them."""
    vectors, random = both(name, 256, device="cuda"), np.random.default_rng(0)
    first, second = (vecenv.reset()[0] for vecenv in vectors)
    np.testing.assert_allclose(second, first, rtol=1e-4, atol=1e-4)
    for _ in range(8):
        actions = act(vectors[0], random)
        for a, b in zip(*(vecenv.step(actions)[:4] for vecenv in vectors), strict=True):
            assert np.isclose(a.astype(float), b.astype(float), rtol=1e-3, atol=1e-3).mean() > 0.99


@pytest.mark.gpu
def test_a_gpu_searches_as_deep_as_the_host():
    """Connect Four's opponent looks eight moves ahead, which takes more memory than a thread has for calls."""
    vectors = both("connect4", 64, device="cuda", env_kwargs={"depth": 8})
    random = np.random.default_rng(0)
    for vecenv in vectors:
        vecenv.reset()
    for _ in range(6):
        actions = act(vectors[0], random)
        for a, b in zip(*(vecenv.step(actions)[:4] for vecenv in vectors), strict=True):
            assert np.array_equal(a, b)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["squared", "cartpole", "drone", "breakout"])
def test_a_gpu_plays_the_rollout_in_one_kernel_and_in_graphs(name, monkeypatch):
    """Which leaves, bit for bit, what the same calls leave one after the other."""
    results, place = [], {"num_threads": 1, "device": torch.device("cuda", torch.cuda.current_device())}
    for graphs, is_whole in ((2, True), (2, False), (-1, False)):
        monkeypatch.setattr(rollout.Rollout, "is_supported", lambda vecenv, is_whole=is_whole: is_whole)
        trainer = test_devices.make_trainer(device_steps.library(name), 256, vec=place, horizon=16,
                                            minibatch_size=1024, cudagraphs=graphs)
        results.append(train(trainer, 6)[0])
        assert (trainer.engine.whole_rollout is not None) == is_whole
        assert (("rollout", 0, 16) in trainer.buffers.gpu._graphs) == (graphs == 2 and not is_whole)
    assert all_equal(results[0], results[1]) and all_equal(results[1], results[2])


# ---------------------------------------------------------------------------------------------------------------------
# vec.device


def choose(name, asked, train="cuda", **vec):
    vec = {"device": asked, "backend": "auto", "num_buffers": None, **vec}
    env = environments.find_maker(name)
    return vector.choose_device(env, vec, {"device": train})


def test_where_environments_step(monkeypatch, capsys):
    refused = pytest.raises(ConfigError, match=r"vec\.device|train\.device")
    assert choose("squared", "host") is None and choose("squared", "auto", "cpu") is None
    assert choose("gym/CartPole-v1", "auto") is None and choose("squared", "auto", backend="serial") is None
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose("squared", "auto") is None and not capsys.readouterr().err  # the trainer names it
    with refused:
        choose("squared", "cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(data_parallel.Ranks, "choose_gpu", lambda group: 1)
    for name, asked, vec, why in (
            ("performance", "auto", {}, "<time.h>"),
            ("squared", "auto", {"num_buffers": 4}, "4"), ("gym/CartPole-v1", "cuda", {}, "in C")):
        settings = configuration.load_config(name, ["--train.device", "cuda"])
        settings["vec"] |= {"device": asked, **vec}
        make = functools.partial(vector.make_from, environments.find_maker(name), 4, settings, {})
        if asked == "auto":
            with make() as vecenv:
                assert type(vecenv) is vector.Native
            text = capsys.readouterr().err
            assert text.count("\n") == 1 and name in text and why in text
            settings["vec"]["device"] = "cuda"
        with pytest.raises(EnvError, match=rf"vec\.device.*{name}.*{why}"):
            make()
    with refused:
        choose("squared", "cuda", "cpu")
    assert choose("squared", "auto") == choose("squared", "cuda") == torch.device("cuda", 1)


def test_a_header_that_is_no_cpp_steps_on_the_host(tmp_path, monkeypatch, capsys):
    library, settings = broken(tmp_path), configuration.load_config("squared", [])
    monkeypatch.setattr(vector, "choose_device", lambda *call: torch.device("cpu"))
    with vector.make_from(library, 2, settings, {}) as vecenv:
        assert type(vecenv) is vector.Native
    text = capsys.readouterr().err
    assert "broken" in text and text.count("the host steps it\n") == 1
    settings["vec"]["device"] = "cuda"
    with pytest.raises(EnvError, match="broken"):
        vector.make_from(library, 2, settings, {})


@pytest.mark.parametrize("faster", ["cuda", "host"])
def test_the_faster_of_gpu_and_host_steps_them(faster, monkeypatch):
    cuda_on_a_cpu.install(monkeypatch)
    settings = configuration.load_config("squared", [])
    monkeypatch.setattr(vector, "choose_device", lambda *call: torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *call: None)
    measured = vector.time_steps

    def times(gpu, host):
        assert all(0 < seconds < 1 for seconds in measured(gpu, host).values())
        return {"cuda": 0.002, "host": 0.003 if faster == "cuda" else 0.001}

    monkeypatch.setattr(vector, "time_steps", times)
    with vector.make_from(device_steps.library("squared"), 4, settings, {}) as vecenv:
        assert type(vecenv) is {"cuda": vector.GpuEnvs, "host": vector.Native}[faster]
        fresh = device_steps.both("squared", 4, settings["train"]["seed"])[0]
        assert np.array_equal(vecenv.reset()[0], fresh.reset()[0]) and not vecenv.log()
        assert np.array_equal(vecenv.allocate(8).observations[0], fresh.allocate(8).observations[0])
    assert settings["vec"]["device"] == faster
    assert settings["auto"]["vec.device"].startswith("a step takes 2 ms on cuda, ")
