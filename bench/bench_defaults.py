r"""Measure how well runs learn with default settings, next to two other libraries.

    python bench/bench_defaults.py                        # measure what is missing, print the table
    python bench/bench_defaults.py --only Catch Taxi-v4 --seeds 0 1
    python bench/bench_defaults.py --sides sb3 cleanrl --peer-python .venv-bench/bin/python \
        --cleanrl FOLDER --core 1
    python bench/bench_defaults.py --draw docs/defaults.png # and the picture
    python bench/bench_defaults.py --table --profiles docs/profiles.png

The environments have no .ini here. Each run is a process on one core and gets only the number of
steps and the seed. Ours is the command line in a copy of the project whose config/ has default.ini
alone. The peers are Stable-Baselines3's PPO and CleanRL's ppo.py and ppo_continuous_action.py as
published (FOLDER has both files: `pip download --no-deps --ignore-requires-python cleanrl`,
unzipped); a few lines here provide the older Gymnasium that they import. An observation that a peer
cannot read is flattened by Gymnasium's wrapper. A score is the mean return of the episodes in the
last tenth of the steps, of the policy as it explores, normalised between a random policy (0) and
the best known (1).

bench_defaults.json beside this file has the results, by seed and with the machine; finished runs
are not repeated (--again does). Its `timed` are our runs on the peers' machine, for the column
of seconds, which count from the start of the process. All environments need `pip install
"gymnasium[box2d,mujoco]" minigrid minatar mpe2 pettingzoo pygame`, for the peers too.
"""

import argparse
import json
import os
import platform
import re
import runpy
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import zlib
from pathlib import Path
from types import SimpleNamespace

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import diagnostics  # noqa: E402

RESULTS = Path(__file__).with_suffix(".json")
BINS = 20  # of a curve
K = 1000
# name: (what the command line calls it, steps, the best known score, where the latter is from)
OWN, LIMIT, RULE = "what it can bring", "the environment's own threshold or limit", "its best policy, computed"
CHOSEN = {  # the rules were chosen on these
    "Catch": ("tests/user_envs.py:Catch", 300 * K, 1, OWN),
    "PointMass": ("tests/user_envs.py:PointMass", 300 * K, -4, "the best run here"),
    "Colour": ("bench/default_envs.py:Colour", 300 * K, 1, OWN),
    "Sokoban": ("bench/default_envs.py:Sokoban", 300 * K, 0.93, "the shortest ways"),
    "Thousands": ("bench/default_envs.py:Thousands", 300 * K, 10_000, OWN),
    "CartPole-v1": ("gym/CartPole-v1", 200 * K, 500, LIMIT),
    "Pendulum-v1": ("gym/Pendulum-v1", 200 * K, -145, "SAC, rl-baselines3-zoo"),
    "FrozenLake-v1": ("gym/FrozenLake-v1", 200 * K, 0.74, RULE),
    "Taxi-v4": ("gym/Taxi-v4", 300 * K, 7.9, RULE),
    "LunarLander-v3": ("gym/LunarLander-v3", 200 * K, 280, "rl-baselines3-zoo"),
    "HalfCheetah-v5": ("gym/HalfCheetah-v5", 300 * K, 10_000, "SAC, Haarnoja et al. 2018"),
    "Walker2d-v5": ("gym/Walker2d-v5", 300 * K, 5_000, "SAC, Haarnoja et al. 2018"),
    "MiniGrid-DoorKey-5x5-v0": ("gym/MiniGrid-DoorKey-5x5-v0", 300 * K, 0.965, RULE),
    "MinAtar/Breakout-v0": ("gym/MinAtar/Breakout-v0", 300 * K, 20, "above any run here"),
    "squared": ("squared", 300 * K, 1, OWN),
    "simple_spread": ("pettingzoo/mpe/simple_spread_v3", 300 * K, -13, "the best run here"),
}
UNTOUCHED = {  # these were only looked at when the rules stood
    "TicTacToe": ("bench/default_envs.py:TicTacToe", 300 * K, 0.99, RULE),
    "Acrobot-v1": ("gym/Acrobot-v1", 200 * K, -70, "rl-baselines3-zoo"),
    "MountainCar-v0": ("gym/MountainCar-v0", 200 * K, -100, "the best run here"),
    "MountainCarContinuous-v0": ("gym/MountainCarContinuous-v0", 200 * K, 95, "rl-baselines3-zoo"),
    "Blackjack-v1": ("gym/Blackjack-v1", 200 * K, -0.045, RULE),
    "BipedalWalker-v3": ("gym/BipedalWalker-v3", 300 * K, 300, LIMIT),
    "Hopper-v5": ("gym/Hopper-v5", 300 * K, 3_500, "SAC, Haarnoja et al. 2018"),
    "MiniGrid-Empty-8x8-v0": ("gym/MiniGrid-Empty-8x8-v0", 200 * K, 0.96, RULE),
    "MiniGrid-MemoryS7-v0": ("gym/MiniGrid-MemoryS7-v0", 300 * K, 0.95, RULE),
    "MinAtar/Asterix-v0": ("gym/MinAtar/Asterix-v0", 300 * K, 15, "DQN, Young and Tian 2019"),
    "memory": ("memory", 300 * K, 1, OWN),
    "pong": ("pong", 300 * K, 21, OWN),
}
ENVIRONMENTS = {**CHOSEN, **UNTOUCHED}
SIDES = {"ours": "ours", "sb3": "Stable-Baselines3", "cleanrl": "CleanRL",
         "random": "random policy"}


# --------------------------------------------------------------------------------------------------
# One run, in a separate process: [[step, seconds, mean return, episodes], ...] a bin


def curve(episodes, steps):
    """Return bins of episodes (step, seconds, return, count)."""
    bins = [[] for _ in range(BINS)]
    for episode in episodes:
        bins[min(BINS - 1, int(episode[0] * BINS / (steps + 1)))].append(episode)
    rows = []
    for k, result in enumerate(bins):
        if result:
            count = sum(n for *_, n in result)
            mean = sum(value * n for _, _, value, n in result) / count
            rows.append([(k + 1) * steps // BINS, round(result[-1][1], 2), float(f"{mean:.5g}"),
                         round(count)])
    return rows


def ours(name, steps, seed, options):
    called, _, keyword = ENVIRONMENTS[name][0].partition(" ")
    if ".py:" in called:
        called = f"{ROOT}/{called}"
    extra = ["--env." + keyword] if keyword else []
    # compiled once
    bare = Path(tempfile.gettempdir()) / f"bare_{os.getuid()}_{zlib.crc32(str(ROOT).encode()):08x}"
    shutil.copytree(ROOT, bare, dirs_exist_ok=True, ignore=shutil.ignore_patterns(
        ".*", "__pycache__", "config", "docs", "tests", "bench", "experiments", "*.safetensors"))
    (bare / "config").mkdir(exist_ok=True)
    for name in ("default.ini", "foreign_options.json"):
        shutil.copy(ROOT / "config" / name, bare / "config")
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(bare / "pufferl.py"), "train", called, *extra,
                   "--train.total-timesteps",
                   str(steps), "--train.seed", str(seed), "--train.log-interval", "0.05",
                   "--logger", "none", "--data-dir", f"{folder}/runs", *options]
        begun = time.perf_counter()
        done = subprocess.run(command, capture_output=True, text=True, cwd=folder)
        seconds = time.perf_counter() - begun
        if done.returncode:
            raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr[-3000:]}")
        entries = diagnostics.read_metrics(next(Path(folder).glob("runs/*/metrics.jsonl")))
        chosen = [line for line in done.stdout.splitlines() if line.startswith("auto: ")]
        warnings = [line for line in done.stderr.splitlines() if line.startswith("warning: ")]
    before = seconds - entries[-1]["performance/uptime"]
    episodes = [(entry["step"], before + entry["performance/uptime"], entry["environment/episode_return"],
                 entry["environment/n"]) for entry in entries if "environment/n" in entry]
    return {"curve": curve(episodes, entries[-1]["step"]), "seconds": round(seconds, 1),
            "auto": chosen, "warnings": warnings}


class Recorder:
    """A counter of the steps of a run's environments, and of the episodes that end.

    `wrap` is the innermost wrapper, so that returns are the environment's.
    """

    def __init__(self, limit):
        import psutil

        self.begun, self.steps, self.episodes, self.limit = psutil.Process().create_time(), 0, [], limit

    def count(self, rewards, dones, sums):
        self.steps += len(rewards)
        for i, (reward, done) in enumerate(zip(rewards, dones, strict=True)):
            sums[i] += reward
            if done:
                self.episodes.append((self.steps, time.time() - self.begun, float(sums[i]), 1))
                sums[i] = 0.0

    def wrap(self, env):
        import gymnasium

        recorder, sums = self, [0.0]

        class Recorded(gymnasium.Wrapper):
            def step(self, action):
                result = self.env.step(action)
                recorder.count([result[1]], [result[2] or result[3]], sums)
                return result

        return Recorded(env)


def make(name):
    """Make the environment without wrappers; a parallel_env for simple_spread."""
    sys.path.insert(0, str(ROOT))
    called, _, keyword = ENVIRONMENTS[name][0].partition(" ")
    if "/" not in called:
        return ocean_env(called)
    import environments

    if ".py:" in called:
        return environments.load_creator(f"{ROOT}/{called}")()
    if called.startswith("pettingzoo/"):
        return environments.load_creator(called)._module().parallel_env()
    return environments.load_creator(called)(**({keyword: True} if keyword else {}))


def ocean_env(name):
    """Make one environment in C with Gymnasium's interface."""
    import gymnasium

    import vector

    vecenv = vector.make(name, num_envs=1)

    class Ocean(gymnasium.Env):
        observation_space, action_space = vecenv.single_observation_space, vecenv.single_action_space
        fresh = None

        def reset(self, seed=None, options=None):
            if self.fresh is None:
                self.fresh = vecenv.reset()[0][0].copy()
            return self.fresh, {}

        def step(self, action):
            observations, rewards, terminals, truncations, _ = vecenv.step([action])
            self.fresh = observations[0].copy()  # of the next episode, if this step has ended one
            return self.fresh, float(rewards[0]), bool(terminals[0]), bool(truncations[0]), {}

    return Ocean()


def sb3(name, steps, seed, folder):
    import gymnasium
    import numpy as np
    import torch
    from stable_baselines3 import PPO
    from stable_baselines3.common.preprocessing import is_image_space
    from stable_baselines3.common.vec_env import VecEnv

    torch.set_num_threads(1)
    recorder, env = Recorder(steps), make(name)
    if hasattr(env, "possible_agents"):
        parallel = env  # `env` is another one when the methods run

        class Together(VecEnv):
            """The agents of a parallel environment as a vector of environments."""

            def __init__(self):
                agents = parallel.possible_agents
                spaces = parallel.observation_space(agents[0]), parallel.action_space(agents[0])
                super().__init__(len(agents), *spaces)
                self.sums = [0.0] * self.num_envs

            def reset(self):
                return np.stack(list(parallel.reset(seed=seed)[0].values()))

            def step_async(self, actions):
                self.actions = dict(zip(parallel.possible_agents, actions, strict=True))

            def step_wait(self):
                observations, rewards, terminations, truncations, _ = parallel.step(self.actions)
                rewards = np.array(list(rewards.values()), np.float32)
                cut = np.array(list(truncations.values()))
                dones, infos = cut | np.array(list(terminations.values())), [{} for _ in rewards]
                observations = np.stack(list(observations.values()))
                recorder.count(rewards, dones, self.sums)
                if dones.any():
                    for i, info in enumerate(infos):
                        info |= {"terminal_observation": observations[i], "TimeLimit.truncated": bool(cut[i])}
                    observations = np.stack(list(parallel.reset()[0].values()))
                return observations, rewards, dones, infos

            def close(self):
                parallel.close()

            def get_attr(self, name, indices=None):
                return [None] * self.num_envs

            def set_attr(self, *arguments):
                pass

            def env_method(self, *arguments, **keywords):
                return [None] * self.num_envs

            def env_is_wrapped(self, *arguments):
                return [False] * self.num_envs

        env = Together()
    else:
        env = recorder.wrap(env)
        if isinstance(env.observation_space, gymnasium.spaces.Tuple):
            env = gymnasium.wrappers.FlattenObservation(env)
    space = env.observation_space
    picture = is_image_space(space) and min(space.shape[:2]) >= 36
    kind = "MultiInputPolicy" if isinstance(space, gymnasium.spaces.Dict) else "CnnPolicy" if picture else "MlpPolicy"
    PPO(kind, env, seed=seed, device="cpu").learn(steps)
    return recorder


class OldVector:
    """The old forms of SyncVectorEnv's reset and step that CleanRL's scripts use.

    It resets within a step.
    """

    def __init__(self, functions, four):
        self.envs, self.four = [function() for function in functions], four
        self.single_observation_space = self.envs[0].observation_space
        self.single_action_space = self.envs[0].action_space
        self.num_envs = len(self.envs)

    def reset(self, seed=None):
        import numpy as np

        result = [env.reset(seed=None if seed is None else seed + i)
                 for i, env in enumerate(self.envs)]
        observations = np.stack([observation for observation, _ in result])
        return observations if self.four else (observations, {})

    def step(self, actions):
        import numpy as np

        observations, rewards, ends, cuts = [], [], [], []
        for env, action in zip(self.envs, actions, strict=True):
            observation, reward, end, cut, _ = env.step(action)
            if end or cut:
                observation = env.reset()[0]
            for values, value in zip((observations, rewards, ends, cuts),
                                     (observation, reward, end, cut), strict=True):
                values.append(value)
        observations, rewards, ends, cuts = map(np.array, (observations, rewards, ends, cuts))
        if self.four:
            return observations, rewards, ends | cuts, []
        return observations, rewards, ends, cuts, {}

    def close(self):
        pass


def cleanrl(name, steps, seed, folder):
    import gymnasium
    import torch

    torch.set_num_threads(1)
    recorder, probe = Recorder(steps), make(name)
    if hasattr(probe, "possible_agents"):
        raise SystemExit("CleanRL's ppo.py takes one agent")
    discrete = isinstance(probe.action_space, gymnasium.spaces.Discrete)

    class Seeded(gymnasium.Wrapper):  # ppo.py calls env.seed
        first = None

        def seed(self, seed):
            self.first = seed

        def reset(self, **keywords):
            first, self.first = self.first, None
            return self.env.reset(**({"seed": first} if first is not None else keywords))

    def make_one(*_, **__):
        return Seeded(gymnasium.wrappers.FlattenObservation(recorder.wrap(make(name))))

    def changed(env, function):
        space = env.observation_space
        return gymnasium.wrappers.TransformObservation(env, function, space)

    def like(module, **others):
        return SimpleNamespace(**{**vars(module), **others})

    wrappers = like(gymnasium.wrappers, TransformObservation=changed,
                    RecordEpisodeStatistics=lambda env: env)
    vectors = SimpleNamespace(SyncVectorEnv=lambda functions: OldVector(functions, discrete))
    module = like(gymnasium, make=make_one, wrappers=wrappers, vector=vectors)
    sys.modules["gym" if discrete else "gymnasium"] = module
    script = "ppo.py" if discrete else "ppo_continuous_action.py"
    sys.argv = [script, "--total-timesteps", str(steps), "--seed", str(seed), "--cuda", "False"]
    with tempfile.TemporaryDirectory() as scratch:
        os.chdir(scratch)
        runpy.run_path(str(Path(folder, script)), run_name="__main__")
        os.chdir("/")
    return recorder


def random(name, steps, seed, folder):
    import numpy as np

    recorder, env = Recorder(steps), make(name)
    if hasattr(env, "possible_agents"):
        sums, spaces = [0.0] * len(env.possible_agents), [env.action_space(agent)
                                                          for agent in env.possible_agents]
        for i, space in enumerate(spaces):
            space.seed(seed + i)
        env.reset(seed=seed)
        while recorder.steps < steps:
            actions = {agent: space.sample()
                       for agent, space in zip(env.possible_agents, spaces, strict=True)}
            _, rewards, ends, cuts, _ = env.step(actions)
            dones = np.array(list(ends.values())) | np.array(list(cuts.values()))
            recorder.count(list(rewards.values()), dones, sums)
            if dones.any():
                env.reset()
        return recorder
    env = recorder.wrap(env)
    env.action_space.seed(seed)
    env.reset(seed=seed)
    while recorder.steps < steps:
        _, _, end, cut, _ = env.step(env.action_space.sample())
        if end or cut:
            env.reset()
    return recorder


def child(side, name, seed, folder):
    steps = ENVIRONMENTS[name][1] if side != "random" else 30 * K
    begun = time.perf_counter()
    recorder = {"sb3": sb3, "cleanrl": cleanrl, "random": random}[side](name, steps, seed, folder)
    print(json.dumps({"curve": curve(recorder.episodes, steps),
                      "seconds": round(time.perf_counter() - begun, 1)}))


# --------------------------------------------------------------------------------------------------
# All runs, and the table


def machine():
    text = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    result = [re.search(rf"{key}\s*: (.*)", text) for key in ("model name", "cpu family", "model")]
    return ", ".join(each[1] for each in result if each) or platform.processor()


def load(path=RESULTS):
    return json.loads(path.read_text()) if path.exists() else {}


def store(side, name, seed, result, path=RESULTS):
    """Add one run; other processes may do so too."""
    import fcntl

    with open(path.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        results = load(path)
        results.setdefault(side, {}).setdefault(name, {})[str(seed)] = {"machine": machine(),
                                                                        **result}
        text = json.dumps(results, indent=1, sort_keys=True)
        text = re.sub(r"\[\s+([^\[\]]*?)\s+\]",
                      lambda match: "[" + re.sub(r"\s+", " ", match[1]) + "]", text)
        part = path.with_suffix(".part")
        part.write_text(text + "\n")
        part.replace(path)


def measure(side, name, seed, a):
    if side == "ours":
        return ours(name, ENVIRONMENTS[name][1], seed, a.options)
    command = [a.peer_python, __file__, "--child", side, name, str(seed), str(a.cleanrl or "")]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)
    if done.returncode:
        return {"failed": (done.stderr.strip().splitlines() or ["without a word"])[-1][:200]}
    return json.loads(done.stdout.splitlines()[-1])


def score(run):
    """Return the mean return of the last tenth of the steps, or of the last bin."""
    if "failed" in run or not run["curve"]:
        return None
    rows = [row for row in run["curve"] if row[0] > 0.9 * run["curve"][-1][0]]
    return sum(row[2] * row[3] for row in rows) / sum(row[3] for row in rows)


def seconds_to(run, target):
    """Return the seconds until a bin's mean reaches `target`; None: never."""
    return next((row[1] for row in run["curve"] if row[2] >= target), None)


def timed_runs(results, side, name):
    """Return the runs whose seconds are compared.

    They ran on the machines of our "timed" runs, if there are any.
    """
    timed = results.get("timed", {}).get(name, {})
    runs = (timed if side == "ours" else None) or results.get(side, {}).get(name, {})
    machines = {run["machine"] for run in (timed or runs).values()}
    return [run for run in runs.values()
            if run["machine"] in machines and score(run) is not None]


def summary(results):
    """Return {environment: {side: {"score", "normalised", "seconds", "share"}}}.

    Scores are means over seeds, seconds medians.
    """
    table = {}
    for name, (_, _, best, _) in ENVIRONMENTS.items():
        runs = {side: [run for run in results.get(side, {}).get(name, {}).values()
                       if score(run) is not None]
                for side in SIDES}
        if not runs["random"]:
            continue
        timed = {side: timed_runs(results, side, name) for side in SIDES}
        low = statistics.mean(map(score, runs["random"]))
        table[name] = {"random": low}
        for side in ("ours", "sb3", "cleanrl"):
            if runs[side]:
                mean = statistics.mean(map(score, runs[side]))
                table[name][side] = {"score": mean, "normalised": (mean - low) / (best - low),
                                     "seeds": len(runs[side]),
                                     "seconds": statistics.median(run["seconds"] for run in timed[side])}
        for peer in ("sb3", "cleanrl"):
            if "ours" in table[name] and peer in table[name]:
                goal = table[name][peer]["score"]
                times = [seconds_to(run, goal) for run in timed["ours"]]
                reached = [t for t in times if t is not None]
                if len(reached) * 2 > len(times):
                    table[name][peer]["share"] = statistics.median(reached) / table[name][peer]["seconds"]
    return table


def normalised(results, side):
    """Return {environment: [normalised score of each seed]} of a side."""
    table = {}
    for name, (_, _, best, _) in ENVIRONMENTS.items():
        runs = {each: [score(run) for run in results.get(each, {}).get(name, {}).values()
                       if score(run) is not None] for each in (side, "random")}
        if all(runs.values()):
            low = statistics.mean(runs["random"])
            table[name] = [(value - low) / (best - low) for value in runs[side]]
    return table


def show_statistics(results):
    """Print interquartile means with 95% bootstrap intervals."""
    from bench import scores

    ours, report = normalised(results, "ours"), {}
    for peer in ("sb3", "cleanrl"):
        theirs = normalised(results, peer)
        shared = [name for name in ours if name in theirs]
        if not shared:
            continue
        print(f"\n{len(shared)} environments, interquartile mean of the normalised scores:")
        for side, table in (("ours", ours), (peer, theirs)):
            seeds = sorted({len(table[name]) for name in shared})
            low, value, high = scores.interval({name: table[name] for name in shared})
            report[f"{side} beside {peer}"] = low, value, high
            print(f"    {SIDES[side]:18} {value:.3f} [{low:.3f}, {high:.3f}], "
                  f"{'-'.join(map(str, seeds))} seeds")
        ahead = [name for name in shared
                 if statistics.mean(theirs[name]) > statistics.mean(ours[name])]
        level = [name for name in ahead if scores.overlap(ours[name], theirs[name])]
        report[f"behind {peer}"] = [name for name in ahead if name not in level]
        print(f"    level with or ahead of {SIDES[peer]}: {len(shared) - len(ahead) + len(level)} "
              f"of {len(shared)}; {SIDES[peer]}'s mean is higher in {', '.join(ahead) or 'none'}")
    print(json.dumps({"benchmark": "defaults, statistics", **report}))


def draw_profiles(results, path):
    """Draw the share of runs above each normalised score, for each side."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    import numpy as np

    from bench import scores

    thresholds = np.linspace(0, 1.05, 200)
    ours, theirs = normalised(results, "ours"), normalised(results, "sb3")
    shared = [name for name in ours if name in theirs]
    figure, axis = plt.subplots(figsize=(5, 3.2), layout="constrained")
    for side, table, colour in (("ours", ours, "tab:blue"), ("sb3", theirs, "tab:orange")):
        table = {name: table[name] for name in shared}
        axis.plot(thresholds, scores.profile(table, thresholds), colour, label=SIDES[side])
        low, value, high = scores.interval(table)
        axis.axvspan(low, high, color=colour, alpha=0.15, lw=0)
        axis.axvline(value, color=colour, lw=0.8, ls="--")
    axis.set_xlabel("normalised score (0: random policy, 1: best known)")
    axis.set_ylabel("share of runs above")
    axis.set_title(f"{len(shared)} environments; dashed: interquartile mean, 95% interval", fontsize=8)
    axis.grid(alpha=0.3)
    axis.legend()
    figure.savefig(path, dpi=110)
    print(f"wrote {path}")


def show(table):
    heads = ("environment", "random", "ours", "SB3", "CleanRL", "ours", "SB3", "CleanRL",
             "s ours", "s SB3", "s CleanRL", "time to SB3's")
    row = "{:26} {:>9} {:>9} {:>9} {:>9}  {:>6} {:>6} {:>7}  {:>6} {:>6} {:>9}  {:>13}"
    print(row.format(*heads))
    for title, names in (("chosen on", CHOSEN), ("untouched", UNTOUCHED)):
        result = {name: table[name] for name in names if name in table}
        for name, entry in result.items():
            cells = [entry.get(side, {}) for side in ("ours", "sb3", "cleanrl")]
            scores = [f"{cell['score']:.4g}" if cell else "" for cell in cells]
            normal = [f"{cell['normalised']:.2f}" if cell else "" for cell in cells]
            times = [f"{cell['seconds']:.0f}" if cell else "" for cell in cells]
            share = cells[1].get("share")
            print(row.format(name, f"{entry['random']:.4g}", *scores, *normal, *times,
                             "" if share is None else f"{share:.2f}"))
        whole = [entry for entry in result.values()
                 if all(side in entry for side in ("ours", "sb3"))]
        if whole:
            means = {side: statistics.mean(e[side]["normalised"] for e in whole)
                     for side in ("ours", "sb3")}
            both = [entry for entry in whole if "cleanrl" in entry]
            text = f"{title}: mean normalised score of {len(whole)}: ours {means['ours']:.3f}, SB3 {means['sb3']:.3f}"
            if both:
                text += "; of the {} that CleanRL was run on: ours {:.3f}, CleanRL {:.3f}".format(
                    len(both), *(statistics.mean(e[side]["normalised"] for e in both)
                                 for side in ("ours", "cleanrl")))
            print(text)
    for peer in ("sb3", "cleanrl"):
        entries = [entry for entry in table.values() if "ours" in entry and peer in entry]
        shares = [entry[peer].get("share", float("inf")) for entry in entries]
        if shares:
            middle = statistics.median(shares)
            print(f"time to {SIDES[peer]}'s final score, median of {len(shares)}: "
                  f"{middle:.2f} of its own")
    print(json.dumps({"benchmark": "defaults", "environments": table}))


def draw(results, path):
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    import matplotlib.ticker

    names = [name for name in ENVIRONMENTS if results.get("ours", {}).get(name)]
    rows = -(-len(names) // 2)
    figure, axes = plt.subplots(rows, 4, figsize=(14, 1.8 * rows), squeeze=False, layout="constrained")
    for axis in axes.flat[2 * len(names) :]:
        axis.set_visible(False)
    for name, (left, right) in zip(names, axes.reshape(-1, 2), strict=False):
        for side, colour in (("ours", "tab:blue"), ("sb3", "tab:orange"), ("cleanrl", "tab:green")):
            for run in results.get(side, {}).get(name, {}).values():
                if score(run) is not None:
                    steps, _, means, _ = zip(*run["curve"], strict=True)
                    left.plot([step / 1e3 for step in steps], means, colour, lw=1)
            for run in timed_runs(results, side, name):
                _, seconds, means, _ = zip(*run["curve"], strict=True)
                right.plot(seconds, means, colour, lw=1)
        left.set_ylabel(name.removeprefix("MiniGrid-"), fontsize=7)
        for axis in (left, right):
            axis.tick_params(labelsize=6)
            axis.grid(alpha=0.3)
        right.set_xscale("log")
        right.xaxis.set_minor_formatter(matplotlib.ticker.NullFormatter())
    for left, right in axes[0].reshape(2, 2):
        left.set_title("over thousands of steps", fontsize=8)
        right.set_title("over seconds", fontsize=8)
    figure.suptitle("mean return; blue: ours, orange: Stable-Baselines3, green: CleanRL",
                    fontsize=9)
    figure.savefig(path, dpi=80)
    print(f"wrote {path}")


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(ENVIRONMENTS), metavar="NAME",
                        default=list(ENVIRONMENTS))
    parser.add_argument("--sides", nargs="+", choices=list(SIDES), default=["ours"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--core", type=int,
                        help="the one that all runs have (default: the first that is allowed)")
    parser.add_argument("--peer-python", default=str(ROOT / ".venv-bench/bin/python"),
                        help="has stable_baselines3")
    parser.add_argument("--cleanrl", help="the folder with ppo.py and ppo_continuous_action.py")
    parser.add_argument("--again", action="store_true", help="repeat runs that are there")
    parser.add_argument("--draw", help="also draw the curves into this file")
    parser.add_argument("--profiles", help="also draw performance profiles into this file")
    parser.add_argument("--table", action="store_true", help="measure nothing, show what is there")
    parser.add_argument("--scratch", action="store_true", help="show the runs and keep nothing")
    parser.add_argument("--options", nargs=argparse.REMAINDER, default=[],
                        help="more options of pufferl.py train")
    a = parser.parse_args()
    os.sched_setaffinity(0, {a.core if a.core is not None else min(os.sched_getaffinity(0))})
    for seed in [] if a.table else a.seeds:
        for name in a.only:
            for side in a.sides:
                there = load().get(side, {}).get(name, {}).get(str(seed))
                whole = there and "failed" not in there
                if (whole and not a.again and not a.scratch) or (side == "random"
                                                                 and seed != a.seeds[0]):
                    continue
                result = measure(side, name, seed, a)
                if not a.scratch:
                    store(side, name, seed, result)
                last = score(result)
                low = [score(run) for run in load().get("random", {}).get(name, {}).values()]
                best = ENVIRONMENTS[name][2]
                normal = ("" if not low or last is None
                          else f"{(last - low[0]) / (best - low[0]):6.2f}")
                output = (result.get("failed")
                        or f"{last if last is None else format(last, '10.4g')} {normal}")
                print(f"{SIDES[side]:18} {name:26} seed {seed}  {output}  "
                      f"{result.get('seconds', '')} s", flush=True)
                for line in ([*result.get("auto", []), *result.get("warnings", [])] if a.scratch
                             else []):
                    print(f"    {line}", flush=True)
    if not a.scratch:
        show(summary(load()))
        show_statistics(load())
    if a.profiles:
        draw_profiles(load(), a.profiles)
    if a.draw:
        draw(load(), a.draw)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(sys.argv[2], sys.argv[3], int(sys.argv[4]), sys.argv[5])
    else:
        main()
