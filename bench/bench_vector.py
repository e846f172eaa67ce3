"""Measure steps per second of the Python backends next to Gymnasium's vectorizers.

    python bench/bench_vector.py           # CartPole with 8 and 64 environments, one that sleeps
    python bench/bench_vector.py --repeats 9 --seconds 1
    python bench/bench_vector.py --atari --nethack      # with ALE Pong and NetHack, if installed

Numbers are medians over interleaved repeats; ratios are to Gymnasium's vectorizer of the same kind,
medians of the repeats' pairs, and between the fastest repeat of each (best), which other work on
the machine changes less. Gymnasium's vectorizers spend one call after each episode on its reset,
which ours do not need, so their calls are counted in two ways: all of them (calls) and without
these (steps). Where both sides step in this process alone the last column compares their processor
seconds per step. Each vector's first rewards, observations and ends are compared with those of
environments that are stepped in sequence.
"""

import argparse
import json
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import gymnasium
import numpy as np

import environments
import vector


class Uneven(gymnasium.Env):
    """One step sleeps Exp(5 ms), from the environment's own seeded generator."""

    def __init__(self):
        self.observation_space = gymnasium.spaces.Box(-1, 1, (4,), np.float32)
        self.action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(4, np.float32), {}

    def step(self, action):
        time.sleep(self.np_random.exponential(0.005))
        return np.zeros(4, np.float32), 0.0, False, False, {}


def cartpole():
    return gymnasium.make("CartPole-v1", disable_env_checker=True)


def pong():
    import ale_py

    gymnasium.register_envs(ale_py)
    env = gymnasium.make("ALE/Pong-v5", frameskip=1, disable_env_checker=True)
    env = gymnasium.wrappers.AtariPreprocessing(env)
    return gymnasium.wrappers.FrameStackObservation(env, 4)


def nethack():
    import nle  # noqa: F401 - registers the id

    return gymnasium.make("NetHackScore-v0", disable_env_checker=True)


def check(creator, vecenv, steps=30):
    """Compare a vector with environments that are stepped in sequence.

    Raises AssertionError if they differ.
    """
    rng, n = np.random.default_rng(0), vecenv.num_envs
    envs = [creator() for _ in range(n)]
    expected = [env.reset(seed=3 + i)[0] for i, env in enumerate(envs)]
    observations, _ = vecenv.reset(seed=3)
    np.testing.assert_array_equal(observations, np.stack(expected))
    for _ in range(steps):
        actions = rng.integers(0, envs[0].action_space.n, n)
        observations, rewards, terminals, truncations, _ = vecenv.step(actions)
        for i, (env, action) in enumerate(zip(envs, actions, strict=True)):
            observation, reward, terminated, truncated, _ = env.step(action)
            assert (rewards[i], terminals[i], truncations[i]) == (reward, terminated, truncated)
            if terminated or truncated:
                observation, _ = env.reset()
            np.testing.assert_array_equal(observations[i], observation)
    for env in envs:
        env.close()


class Ours:
    def __init__(self, creator, num_envs, *, compared=True, **options):
        self.vecenv = vector.make(creator, num_envs, **options)
        if compared:
            check(creator, self.vecenv)
        self.asynchronous = self.vecenv.agents_per_batch < num_envs
        self.actions = [self.vecenv.action_space.sample() for _ in range(16)]
        self.vecenv.async_reset(seed=0) if self.asynchronous else self.vecenv.reset(seed=0)

    def run(self, seconds):
        """Return (calls, steps) per second, and steps per processor second."""
        count, begun, i, busy = 0, time.perf_counter(), 0, time.process_time()
        while (now := time.perf_counter()) - begun < seconds:
            i += 1
            if self.asynchronous:
                count += len(self.vecenv.recv()[1])
                self.vecenv.send(self.actions[i % 16])
            else:
                self.vecenv.step(self.actions[i % 16])
                count += self.vecenv.num_agents
        return (count / (now - begun),) * 2 + (count / (time.process_time() - busy),)

    def close(self):
        self.vecenv.close()


class Gymnasium:
    def __init__(self, creator, num_envs, kind):
        self.vecenv = kind([creator] * num_envs)
        self.actions = [self.vecenv.action_space.sample() for _ in range(16)]
        self.vecenv.reset(seed=0)

    def run(self, seconds):
        count, resets, begun, i, busy = 0, 0, time.perf_counter(), 0, time.process_time()
        while (now := time.perf_counter()) - begun < seconds:
            i += 1
            _, _, terminated, truncated, _ = self.vecenv.step(self.actions[i % 16])
            count += len(terminated)
            resets += int((terminated | truncated).sum())
        steps = count - resets
        return count / (now - begun), steps / (now - begun), steps / (time.process_time() - busy)

    def close(self):
        self.vecenv.close()


def compare(title, contestants, repeats, seconds):
    """Print and return {name: (calls, steps) a second}, medians; contestants {name:
    (maker, name of its peer)}."""
    made = {name: maker() for name, (maker, _) in contestants.items()}
    results = {name: [] for name in made}
    for one in made.values():
        one.run(seconds / 4)
    for _ in range(repeats):
        for name, one in made.items():
            results[name].append(one.run(seconds))
    for one in made.values():
        one.close()
    medians = {name: np.median(values, axis=0).tolist() for name, values in results.items()}
    print(f"\n{title}\n{'':44}{'steps/s':>12}{'ratio, steps':>14}{'best':>14}{'ratio, calls':>14}{'ratio, CPU':>14}")
    figures = {}
    for name, (_, peer) in contestants.items():
        calls, steps, _ = medians[name]
        figures[name] = {"steps": round(steps), "calls": round(calls)}
        ratios = ""
        if peer:
            # Ratios of each repeat's pair, so that what the machine does meanwhile falls out.
            ours, theirs = np.array(results[name]), np.array(results[peer])
            pairs, best = ours / theirs, ours.max(0) / theirs.max(0)
            figures[name] |= {"peer": peer, "ratio_calls": round(float(np.median(pairs[:, 0])), 3),
                              "ratio_steps": round(float(np.median(pairs[:, 1])), 3),
                              "ratio_best": round(float(best[1]), 3)}
            ratios = "".join(f"{figures[name][f'ratio_{kind}']:13.2f}×"
                             for kind in ("steps", "best", "calls"))
            if name == "Serial":
                figures[name]["ratio_cpu"] = round(float(np.median(pairs[:, 2])), 3)
                ratios += f"{figures[name]['ratio_cpu']:13.2f}×"
        print(f"{name:44}{steps:12,.0f}{ratios}")
    return figures


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.5)
    parser.add_argument("--atari", action="store_true")
    parser.add_argument("--nethack", action="store_true")
    args = parser.parse_args()
    cores, figures = vector.physical_cores(), {}
    sync, asynchronous = gymnasium.vector.SyncVectorEnv, gymnasium.vector.AsyncVectorEnv

    def games(creator, n, compared=True):
        workers = max(w for w in range(1, cores + 1) if n % w == 0)
        contestants = {
            "gymnasium SyncVectorEnv": (lambda: Gymnasium(creator, n, sync), None),
            "gymnasium AsyncVectorEnv": (lambda: Gymnasium(creator, n, asynchronous), None),
            "Serial": (lambda: Ours(creator, n, compared=compared, backend="serial"),
                       "gymnasium SyncVectorEnv"),
            f"Multiprocessing, {workers} workers": (
                lambda: Ours(creator, n, compared=compared, backend="multiprocessing",
                             num_workers=workers),
                "gymnasium AsyncVectorEnv"),
        }
        if workers > 1:
            contestants[f"Multiprocessing, {workers} workers, batch {n // workers}"] = (
                lambda: Ours(creator, n, compared=compared, backend="multiprocessing",
                             num_workers=workers, batch_size=n // workers),
                "gymnasium AsyncVectorEnv")
        return contestants

    for n in (8, 64):
        figures[f"cartpole {n}"] = compare(
            f"CartPole-v1, {n} environments", games(cartpole, n), args.repeats, args.seconds
        )
    figures["uneven 8"] = compare("a step sleeps Exp(5 ms), 8 environments, 8 workers", {
        "Multiprocessing, synchronous": (
            lambda: Ours(Uneven, 8, compared=False, backend="multiprocessing", num_workers=8),
            None),
        "Multiprocessing, batch 4": (
            lambda: Ours(Uneven, 8, compared=False, backend="multiprocessing", num_workers=8,
                         batch_size=4),
            "Multiprocessing, synchronous"),
        "gymnasium AsyncVectorEnv": (lambda: Gymnasium(Uneven, 8, asynchronous), None),
    }, args.repeats, max(args.seconds, 1.0))
    if args.atari:
        creator = environments.load_creator("gym/ALE/Pong-v5")
        contestants = games(pong, 8) | {"ALE's own vector environment (package)": (
            lambda: Ours(creator, 8, compared=False, backend="package"), "gymnasium AsyncVectorEnv")}
        figures["pong 8"] = compare("ALE/Pong-v5, 8 environments", contestants, args.repeats,
                                    args.seconds)
    if args.nethack:  # its heroes differ under one seed, so there is nothing to compare with
        figures["nethack 8"] = compare(
            "NetHackScore-v0, 8 environments", games(nethack, 8, compared=False), args.repeats,
            args.seconds
        )
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
