"""How to step an environment fastest on this machine: backend, workers, batch size.

    python pufferl.py autotune gym/LunarLander-v3                   # prints a table and the flags of the best one
    python pufferl.py autotune breakout --vec.num-threads 4         # any setting of train; it holds for all candidates
    python pufferl.py autotune my_env.py:make_env --seconds 3       # seconds a measurement, default 1

What is timed is the trainer's own rollout, the policy included, because what pays is to step some environments while
the policy acts on others. The number of environments stays as it is: it belongs to the learning, not to the machine.
All candidates are timed once, then the best of them against each other in turns, so that what else the machine does
falls on all of them. Where a simpler one (fewer processes) is within 3% of the fastest, it is the answer.
"""

import argparse
import shlex
import statistics
import sys
import time

import vector

FINALISTS, REPEATS, TOLERANCE = 4, 5, 0.03


def candidates(num_envs, python, native=False, cores=None, agents_per_env=1):
    """Settings of the vec section to try, the simplest first.

    python: whether the environment steps in Python (serial, and multiprocessing with each sensible number of workers
    and batch) or in C (native, with each sensible number of buffers); native: whether it has a vector environment of
    its own.
    """
    cores = cores or vector.physical_cores()
    divisors = [n for n in range(1, num_envs + 1) if num_envs % n == 0]
    if not python:
        # From one buffer to 128 agents in each: below that the calls cost more than the work.
        most = max(cores, num_envs * agents_per_env // 128)
        return [{"backend": "native", "num_buffers": n} for n in _spread([n for n in divisors if n <= most])]
    plain = {"num_workers": None, "batch_size": None}
    found = [{"backend": "serial", **plain}] + ([{"backend": "native", **plain}] if native else [])
    for workers in _spread([n for n in divisors if n <= 4 * cores]):
        each = num_envs // workers
        for parts in (1, 2, 4):
            batch = num_envs // parts
            if num_envs % parts == 0 and batch % each == 0 and (workers > 1 or parts == 1):
                found.append({"backend": "multiprocessing", "num_workers": workers, "batch_size": batch})
    return found


def _spread(numbers):
    """Of ascending numbers those that are at least 1.5 times the one before, and the last: few that cover the range."""
    chosen = []
    for number in numbers:
        if not chosen or number >= 1.5 * chosen[-1] or number == numbers[-1]:
            chosen.append(number)
    return chosen


class Rollouts:
    """A trainer that is timed rolling out, with some settings of the vec section over those of `args`."""

    def __init__(self, env_name, args, vec):
        import pufferl

        # What it learns is thrown away, so that the minibatch need not be the one that is configured.
        train = {**args["train"], "minibatch_size": "auto", "max_minibatch_size": None}
        args = {**args, "train": train, "vec": {**args["vec"], **vec}, "load_model_path": None}
        vecenv = pufferl.load_env(env_name, args)
        try:
            policy = pufferl.load_policy(args, vecenv, env_name)
            self.trainer = pufferl.PuffeRL({**args["train"], "env": args["env_name"]}, vecenv, policy)
            self.trainer.evaluate()  # compiles, and fills caches
            for _ in range(max(0, args["train"]["cudagraphs"]) if self.trainer.device.separate else 0):
                self.trainer.train()  # after which a GPU's rollout comes from graphs
                self.trainer.evaluate()
        except BaseException:
            vecenv.close()
            raise

    def run(self, seconds):
        """Environment steps of all agents a second."""
        rollouts, begun = 0, time.perf_counter()
        while (now := time.perf_counter()) - begun < seconds or rollouts == 0:
            self.trainer.evaluate()
            rollouts += 1
        return rollouts * self.trainer.batch_size / (now - begun)

    def close(self):
        self.trainer.release()


def describe(vec):
    """One candidate in words."""
    if vec["backend"] != "multiprocessing":
        buffers = f", {vec['num_buffers']} buffers" if "num_buffers" in vec else ""
        return vec["backend"] + buffers
    return f"multiprocessing, {vec['num_workers']} workers, batch {vec['batch_size']}"


def flags(vec, present):
    """The command line's options that turn the present vec section into one candidate's."""
    return " ".join(f"--vec.{name.replace('_', '-')} {value}" for name, value in vec.items() if value != present[name])


def search(tried, make, seconds, report=print):
    """(best candidate, {index in `tried`: median steps a second of a finalist}).

    make(candidate) -> an object with run(seconds) and close(); it may raise ValueError or RuntimeError for a candidate
    that cannot work, which is reported and left out. Raises RuntimeError where none can.
    """
    first = {}
    for i, vec in enumerate(tried):
        try:
            contestant = make(vec)
            try:
                first[i] = contestant.run(seconds)
            finally:
                contestant.close()
            report(f"{describe(vec):48}{first[i]:14,.0f}")
        except (ValueError, RuntimeError) as error:
            report(f"{describe(vec):48} cannot: {str(error).splitlines()[0]}")
    if not first:
        raise RuntimeError("no backend can step this environment; see above.")
    finalists = sorted(sorted(first, key=first.get, reverse=True)[:FINALISTS])
    report(f"\nthe best {len(finalists)} in turns, medians of {REPEATS}")
    contestants, speeds = {}, {i: [] for i in finalists}
    try:
        for i in finalists:
            contestants[i] = make(tried[i])
        for _ in range(REPEATS):
            for i, contestant in contestants.items():
                speeds[i].append(contestant.run(seconds))
    finally:
        for contestant in contestants.values():
            contestant.close()
    medians = {i: statistics.median(values) for i, values in speeds.items()}
    fastest = max(medians.values())
    for i, speed in medians.items():
        report(f"{describe(tried[i]):48}{speed:14,.0f}{speed / fastest:8.2f}")
    best = next(i for i in finalists if medians[i] >= (1 - TOLERANCE) * fastest)
    return tried[best], medians


def main(argv=None):
    """The command line; returns the best settings of the vec section."""
    import configuration

    parser = argparse.ArgumentParser(prog="pufferl.py autotune", description=__doc__, add_help=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("env", nargs="?")
    parser.add_argument("--seconds", type=float, default=1.0)
    options, rest = parser.parse_known_args(sys.argv[1:] if argv is None else argv)
    if options.env is None or options.env.startswith("-"):
        print(__doc__)
        sys.exit(None if rest[:1] in (["-h"], ["--help"]) else "autotune.py: which environment?")
    try:
        args = configuration.load_config(options.env, rest)
        creator = configuration.load_creator(args["env_name"])
        vec = {**args["vec"], "backend": "auto" if creator is None else "serial", "num_workers": None,
               "batch_size": None}
        probe = configuration.load_env(options.env, {**args, "vec": vec})
        num_envs, agents = probe.num_envs, probe.num_agents // probe.num_envs
        probe.close()
        tried = candidates(num_envs, creator is not None, getattr(creator, "has_native", False), agents_per_env=agents)
        print(f"{args['env_name']}: {num_envs} environments, {vector.physical_cores()} cores; steps of all agents a "
              "second in rollouts, the policy included")  # fmt: skip
        best, _ = search(tried, lambda vec: Rollouts(options.env, args, vec), options.seconds)
    except (configuration.ConfigError, RuntimeError) as error:
        sys.exit(f"pufferl.py autotune: {error}")
    command = f"train {shlex.join([options.env, *rest])} {flags(best, args['vec'])}"
    print(f"\nbest here:  python pufferl.py {command}".rstrip())
    return best


if __name__ == "__main__":
    main()
