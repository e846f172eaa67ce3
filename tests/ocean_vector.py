"""A vector between guard zones, and the settings that tests try."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np

import ocean
from ocean.__main__ import Agents

ROOT = Path(__file__).resolve().parent.parent
# Settings that end episodes soon enough for a short test, and those that change
# what agents see or do.
SHORT = {
    "freeway": {"seconds": 20.0},
    "enduro": {"day": 20.0, "first_day": 1},
    "double_pendulum": {"max_steps": 4},
    "boids": {"max_steps": 64},
    "moba": {"max_ticks": 200},
    "nmmo3": {"num_agents": 32, "num_foes": 16, "width": 32, "height": 24, "villages": 2,
              "max_steps": 99},
}
VARIANTS = [
    *[(name, SHORT.get(name, {})) for name in ocean.names()],
    ("breakout", {"continuous": True, "frameskip": 1}),
    ("breakout", {"frameskip": 60, "max_steps": 7, "ball_speed": 448.0, "paddle_width": 576.0}),
    ("cartpole", {"continuous": True, "max_steps": 5}),
    ("memory", {"length": 1, "cues": 5}),
    ("squared", {"distance": 1}),
    ("target", {"num_agents": 3, "num_goals": 1, "patience": 4}),
    ("bandit", {"arms": 2, "good_arm": 0}),
    ("password", {"length": 2, "password": 1}),
    ("stochastic", {"length": 7, "share": 0.5}),
    ("continuous", {"dims": 1, "max_steps": 5}),
    ("continuous", {"dims": 16, "max_steps": 5}),
    ("multiagent", {"num_agents": 7}),
    ("masked", {"choices": 3, "length": 4}),
    ("pendulum", {"continuous": False, "max_steps": 5}),
    ("acrobot", {"continuous": True, "gravity": 1.0, "length_1": 1.2, "mass_1": 0.3, "mass_2": 0.2,
                 "inertia": 0.2, "reward_scale": 0.1, "max_steps": 60}),
    ("mountaincar", {"scaled": True, "max_steps": 9}),
    ("mountaincar", {"continuous": True, "goal": 0.2, "power": 0.02, "max_steps": 90}),
    ("double_pendulum", {"continuous": False}),
    ("lander", {"wind": True, "max_steps": 30}),
    ("lander", {"continuous": True}),
    ("drone", {"race": True, "num_agents": 1, "max_steps": 20}),
    ("drone", {"race": True, "rings": 1, "ring_radius": 9.0, "safe_distance": 0.9}),
    ("pong", {"continuous": True, "max_score": 1, "opponent_speed": 0.0, "max_steps": 20}),
    ("snake",
     {"num_agents": 3, "width": 5, "height": 4, "vision": 2, "num_food": 3, "max_length": 3}),
    ("snake",
     {"num_agents": 20, "width": 10, "height": 8, "num_food": 9, "corpses": False, "patience": 30}),
    ("freeway", {"seconds": 5.0, "level": 7, "hard": True, "frameskip": 1}),
    ("enduro", {"day": 2.0, "first_day": 1, "later_days": 1, "days": 1}),
    ("asteroids", {"first_rocks": 11, "saucer_seconds": 1.0, "max_steps": 20, "ships": 2}),
    ("tetris", {"height": 4, "lines": 1, "max_steps": 20}),
    ("tetris", {"first_level": 20, "reward_piece": 0.1, "reward_hole": -0.1, "reward_bump": -0.1}),
    ("tetris", {"placements": True}),
    ("g2048", {"max_steps": 50}),
    ("connect4", {"depth": 0}),
    ("connect4", {"depth": 6}),
    ("go", {"size": 5, "komi": 0.5}),
    ("go", {"size": 9, "skill": 0.0, "max_moves": 60}),
    ("minesweeper", {"width": 4, "height": 2, "mines": 2, "max_steps": 2}),
    ("minesweeper", {"width": 30, "height": 16, "mines": 99, "max_steps": 8}),
    ("maze", {"size": 2, "vision": 1, "trail": False}),
    ("maze", {"size": 9, "loops": 0.3, "max_steps": 60}),
    ("cube", {"size": 2, "max_steps": 3}),
    ("boids", {"num_agents": 2, "neighbours": 1, "max_steps": 7}),
    ("boids", {"num_agents": 40, "width": 900.0, "height": 90.0, "vision": 20.0, "continuous": True,
               "max_steps": 60}),
    ("trash_pickup",
     {"num_agents": 1, "num_trash": 7, "num_bins": 1, "width": 3, "height": 3, "vision": 1,
      "max_steps": 230}),
    ("trash_pickup",
     {"num_agents": 30, "width": 30, "height": 10, "num_trash": 200, "vision": 8, "max_steps": 40}),
    ("moba", {"self_play": True, "frameskip": 3, "max_ticks": 500}),
    ("moba", {"bot_skill": 0.5, "bot_range": 0.4, "max_ticks": 600, "frameskip": 2}),
    ("moba", {"demo": True, "self_play": True, "frameskip": 8, "tower_health": 20.0,
              "ancient_health": 20.0}),
    ("nmmo3", {"num_agents": 3, "num_foes": 0, "width": 12, "height": 12, "villages": 1,
               "vision": 1, "max_steps": 20}),
    ("nmmo3",
     {"num_agents": 20, "num_foes": 30, "width": 24, "height": 20, "villages": 2, "home": 1,
      "tier_distance": 1, "vision": 7, "max_steps": 150, "market_everywhere": False,
      "hunger": 1}),
    ("performance", {"num_agents": 3, "observation_size": 5, "length": 4, "delay": 1.0}),
]


class Vector(Agents):
    """Environments with one row of buffers, each between two guard zones."""

    def __init__(self, name, num_envs=4, options=None, seed=0, first_env=0, debug=False,
                 library=None):
        library = library or ocean.load(name, debug=debug)
        super().__init__(library, num_envs, options, seed, first_env)
        if self.valid is None:
            self.valid = np.ones(self.envs.num_agents, np.uint8)

    def step(self, *actions):
        if actions:
            self.actions[:] = np.reshape(actions[0], (-1, self.envs.action_dims))
        super().step()
        return self


def count(name, options, large):
    """Fewer environments of those with many agents."""
    return max(2, large // ocean.load(name).create(1, settings=options).num_agents)


def run_python(code, *arguments, **environment):
    result = subprocess.run([sys.executable, "-c", code, *arguments],
                            env={**os.environ, **environment}, cwd=ROOT,
                            capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def run_sanitized(code):
    """What Python prints that was started with the address and undefined-behaviour sanitizers."""
    compiler = os.environ.get("CC") or "gcc"
    libraries = [subprocess.run([compiler, f"-print-file-name={name}"], capture_output=True, text=True).stdout.strip()
                 for name in ("libasan.so", "libubsan.so")]
    return run_python(code, LD_PRELOAD=" ".join(libraries), ASAN_OPTIONS="detect_leaks=0",
                      UBSAN_OPTIONS="halt_on_error=1:print_stacktrace=1")
