"""Profile training, and find the fastest way to step an environment.

    python pufferl.py profile breakout
    python pufferl.py profile breakout --profile.epochs 1 --profile.output trace.json
    python pufferl.py autotune gym/LunarLander-v3               # a table, and the flags of the best
    python pufferl.py autotune breakout --vec.num-threads 4     # with settings that it does not try
    python pufferl.py autotune my_env.py:make_env --seconds 3   # seconds a measurement, default 1

profile prints tables and writes a trace for https://ui.perfetto.dev (nothing leaves the browser) or
chrome://tracing: one row a thread, with torch's operations, the kernels of kernels.py by their
names, and the engine's parts: `act`, a step of the network, and `learn`, a learner's share of a
minibatch. A rollout that is one call otherwise is traced step by step.

autotune times the trainer's rollout, the policy included, because the gain is in stepping some
environments while the policy acts on others. The number of environments stays as it is: it belongs
to the learning, not to the machine. All candidates are timed once, then the best ones interleaved,
so that other programs slow all of them alike. If a simpler one (fewer processes or buffers) is
within 3% of the fastest, it is chosen.
"""

import argparse
import contextlib
import functools
import inspect
import shlex
import statistics
import time
from pathlib import Path

import torch

import configuration
import environments
import kernels
import pufferl
import vector
from errors import exit_on_error, require
from tools.options import read_command

# --------------------------------------------------------------------------------------------------
# Where the time goes

WARM_UP = 2  # epochs that learn, without the compiling


def recorded(function, name):
    """Give a function a name in torch's profile; threads may call it."""
    def call(*arguments, **options):
        with torch.profiler.record_function(name):
            return function(*arguments, **options)

    return call


def profile(env_name, args):
    """Trace some epochs and print where their time went; returns the trace's path."""
    configuration.check_names(args)
    settings, activities = args["profile"], [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    require(settings["output"] or args["data_dir"],
            "profile writes a trace, but --data-dir is none: --profile.output says where else.")
    args["train"]["log_interval"] = 1e9
    trainer = pufferl.make_trainer(env_name, args)
    trainer.run.folder = None  # nothing but the trace is written
    config = trainer.config

    def run_epochs(count):
        for _ in range(count):
            trainer.evaluate()
            trainer.train()

    while config["norm_obs"] and trainer.normalizer.is_warmup(trainer.global_step,
                                                                     config["total_timesteps"]):
        run_epochs(1)
    # on a GPU until the CUDA graphs are captured
    run_epochs(WARM_UP + (max(0, config["cudagraphs"]) if config["device"] == "cuda" else 0))
    everywhere = torch.profiler._ExperimentalConfig(profile_all_threads=True)
    with contextlib.ExitStack() as stack:
        # torch's profiler names its operations only
        calls = [name for name, function in vars(kernels).items() if inspect.isfunction(function)
                 and function.__module__ == "kernels" and name[0] != "_"
                 and name != "narrow"]
        engine = trainer.engine
        for owner, names in ((kernels, calls),
                             (engine, ("rollout", "backward", "_backward_share")),
                             (engine.loop, ("_step",)), (trainer.vecenv, ("wait", "advance"))):
            for name in filter(functools.partial(hasattr, owner), names):
                function = getattr(owner, name)
                stack.callback(setattr, owner, name, function)
                setattr(owner, name, recorded(function, name.strip("_")))
        trace = stack.enter_context(torch.profiler.profile(activities=activities,
                                                           experimental_config=everywhere))
        trainer.mean_and_log()  # starts the stages' times from 0
        run_epochs(settings["epochs"])
        trainer.mean_and_log()
    path = Path(settings["output"] or Path(args["data_dir"]) / f"profile_{trainer.env_name}.json")
    path.parent.mkdir(parents=True, exist_ok=True)
    trace.export_chrome_trace(str(path))
    print(trace.key_averages().table(sort_by="self_cpu_time_total", row_limit=20,
                                     max_name_column_width=40))
    print(f"{trainer.env_name}: {settings['epochs']} epochs of {trainer.batch_size:,} steps, "
          "tracing included")
    total = sum(trainer.statistics.stages.values())
    for name, seconds in trainer.statistics.stages.items():
        print(f"{name:12} {seconds:8.3f} s  {100 * seconds / total:5.1f}%")
    print(f"trace        {path}   (open it in https://ui.perfetto.dev or chrome://tracing)")
    trainer.release()
    return path


# --------------------------------------------------------------------------------------------------
# The settings with which this machine steps an environment fastest

FINALISTS, REPEATS, TOLERANCE = 4, 5, 0.03


def candidates(num_envs, python, package=False, cores=None, agents_per_env=1):
    """List settings of the vec section to try, the simplest first.

    python: whether the environment steps in Python (serial, and multiprocessing with each sensible
    number of workers and batch) or in C (native, with each sensible number of buffers). package:
    whether its package has a vector environment.
    """
    cores = cores or vector.physical_cores()
    divisors = [n for n in range(1, num_envs + 1) if num_envs % n == 0]
    if not python:
        # from one buffer to 128 agents in each: below that the calls cost more than the work
        most = max(cores, num_envs * agents_per_env // 128)
        return [{"backend": "native", "num_buffers": n}
                for n in _spread([n for n in divisors if n <= most])]
    plain = {"num_workers": None, "batch_size": None}
    tried = [{"backend": "serial", **plain}]
    tried += [{"backend": "package", **plain}] if package else []
    for workers in _spread([n for n in divisors if n <= 4 * cores]):
        each = num_envs // workers
        for parts in (1, 2, 4):
            batch = num_envs // parts
            if num_envs % parts == 0 and batch % each == 0 and (workers > 1 or parts == 1):
                tried.append({"backend": "multiprocessing", "num_workers": workers,
                              "batch_size": batch})
    return tried


def _spread(numbers):
    """Choose numbers that cover a range, each 1.5 times the one before or more."""
    chosen = []
    for number in numbers:
        if not chosen or number >= 1.5 * chosen[-1] or number == numbers[-1]:
            chosen.append(number)
    return chosen


@contextlib.contextmanager
def timed_rollouts(env_name, args, vec):
    """Make a trainer with settings `vec` over those of `args`.

    Yields a function of seconds, which measures the steps of all agents a second.
    """
    # nothing is kept of the learning, so any minibatch will do
    train = {**args["train"], "minibatch_size": "auto", "max_minibatch_size": None,
             "replay_ratio": 1.0, "gamma": 0.99}
    trainer = pufferl.make_trainer(env_name, {
        **args, "train": train, "vec": {**args["vec"], **vec}, "load_model_path": None,
        "data_dir": None})

    def measure(seconds):
        rollouts, begin = 0, time.perf_counter()
        while (now := time.perf_counter()) - begin < seconds or rollouts == 0:
            trainer.evaluate()
            rollouts += 1
        return rollouts * trainer.batch_size / (now - begin)

    try:
        trainer.evaluate()  # compiles the kernels and fills the caches
        for _ in range(max(0, train["cudagraphs"]) if trainer.config["device"] == "cuda" else 0):
            trainer.train()  # after these epochs a GPU's rollout is a replayed CUDA graph
            trainer.evaluate()
        yield measure
    finally:
        trainer.release()


def describe(vec):
    """Describe a candidate."""
    return ", ".join(f"{name} {value}" for name, value in vec.items() if value is not None)


def flags(vec, present):
    """Return the options that turn the present vec section into a candidate's."""
    return " ".join(f"--vec.{name.replace('_', '-')} {value}" for name, value in vec.items()
                    if value != present[name])


def search(tried, make, seconds, report=print):
    """Return (best candidate, {index in `tried`: a finalist's steps a second}).

    make(candidate) -> a context manager, as `timed_rollouts`. It may raise ValueError or
    RuntimeError for a candidate that cannot work, which is printed and left out. Raises
    RuntimeError if none works.
    """
    first = {}
    for i, vec in enumerate(tried):
        try:
            with make(vec) as measure:
                first[i] = measure(seconds)
            report(f"{describe(vec):56}{first[i]:14,.0f}")
        except (ValueError, RuntimeError) as error:
            report(f"{describe(vec):56} cannot: {str(error).splitlines()[0]}")
    if not first:
        raise RuntimeError("no backend can step this environment; see above.")
    finalists = sorted(sorted(first, key=first.get, reverse=True)[:FINALISTS])
    report(f"\nthe best {len(finalists)} interleaved, medians of {REPEATS}")
    with contextlib.ExitStack() as stack:
        measures = {i: stack.enter_context(make(tried[i])) for i in finalists}
        rounds = [{i: measure(seconds) for i, measure in measures.items()} for _ in range(REPEATS)]
    medians = {i: statistics.median(speeds[i] for speeds in rounds) for i in finalists}
    fastest = max(medians.values())
    for i, speed in medians.items():
        report(f"{describe(tried[i]):56}{speed:14,.0f}{speed / fastest:8.2f}")
    best = next(i for i in finalists if medians[i] >= (1 - TOLERANCE) * fastest)
    return tried[best], medians


def autotune(env_name, args, seconds, argv):
    """Time what can step an environment; returns the best vec section.

    argv: the command line that `args` are of.
    """
    creator = environments.load_creator(args["env_name"])
    vec = {**args["vec"], "backend": "auto" if creator is None else "serial", "num_workers": None,
           "batch_size": None}
    probe = vector.load_env(env_name, {**args, "vec": vec})
    num_envs, agents = probe.num_envs, probe.num_agents // probe.num_envs
    probe.close()
    tried = candidates(num_envs, creator is not None, getattr(creator, "has_vector", False),
                       agents_per_env=agents)
    print(f"{args['env_name']}: {num_envs} environments, {vector.physical_cores()} cores; steps of "
          "all agents a second in rollouts, the policy included")
    best, _ = search(tried, lambda vec: timed_rollouts(env_name, args, vec), seconds)
    print(f"\nbest here:  python pufferl.py train {shlex.join(argv)} "
          f"{flags(best, args['vec'])}".rstrip())
    return best


def main(argv, program="pufferl.py profile"):
    """Run `profile` or `autotune`; `program` is what errors begin with."""
    parser = argparse.ArgumentParser(prog=program, add_help=False)
    parser.add_argument("--seconds", type=float, default=1.0)
    with exit_on_error(program, RuntimeError):
        if program.endswith("profile"):
            return profile(*read_command(argv, program, __doc__))
        options, argv = parser.parse_known_args(argv)
        env_name, args = read_command(argv, program, __doc__)
        return autotune(env_name, args, options.seconds, argv)
