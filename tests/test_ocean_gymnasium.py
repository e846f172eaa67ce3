"""The environments in C as Gymnasium's and PettingZoo's."""

import re
import warnings

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env
from gymnasium.vector import AutoresetMode
from ocean_vector import ROOT, Vector, run_python

import ocean
import ocean.gymnasium
from ocean.gymnasium import environment_id

SEVERAL = ["boids", "drone", "moba", "multiagent", "nmmo3", "snake", "target", "trash_pickup"]
ALONE = [name for name in ocean.names() if name not in SEVERAL]


def random_actions(space, rng, num_envs):
    """(num_envs, ...) of an action space of one agent."""
    if isinstance(space, gymnasium.spaces.Box):
        return rng.uniform(-1.2, 1.2, (num_envs, *space.shape)).astype(np.float32)
    if isinstance(space, gymnasium.spaces.Discrete):
        return rng.integers(0, space.n, num_envs)
    return rng.integers(0, space.nvec, (num_envs, len(space.nvec)))


@pytest.mark.parametrize("name", ALONE)
def test_gymnasium_checks_it(name):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        env = gymnasium.make(environment_id(name))
        check_env(env.unwrapped)
        env.close()
    # bounds at infinity
    assert not [w for w in caught if "This is probably too" not in str(w.message)]


@pytest.mark.parametrize("name", SEVERAL)
def test_pettingzoo_checks_it(name):
    test = pytest.importorskip("pettingzoo.test")
    settings = {"num_agents": 64} if name == "nmmo3" else {}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        test.parallel_api_test(ocean.gymnasium.parallel_env(name, **settings), 200)
        test.parallel_seed_test(lambda: ocean.gymnasium.parallel_env(name, **settings), 30)


def test_all_are_registered_by_the_import_alone():
    ids = {spec for spec in gymnasium.registry if spec.startswith("puffer/")}
    assert ids == {environment_id(name) for name in ocean.names()}
    assert {"puffer/Breakout-v0", "puffer/DoublePendulum-v0", "puffer/G2048-v0"} <= ids
    code = ("import sys, ocean, gymnasium; print('ocean.gymnasium' in sys.modules); "
            "print(gymnasium.make('ocean.gymnasium:puffer/Squared-v0').observation_space.shape)")
    assert run_python(code).split("\n")[:2] == ["False", "(11, 11)"]


def test_settings_are_keywords():
    env = gymnasium.make("puffer/Squared-v0", distance=3)
    assert env.observation_space.shape == (7, 7) and env.spec.kwargs["distance"] == 3
    envs = gymnasium.make_vec("puffer/Breakout-v0", num_envs=3, continuous=True)
    assert envs.action_space == gymnasium.spaces.Box(-1, 1, (3, 1))
    for make in (gymnasium.make, gymnasium.make_vec):
        with pytest.raises(ValueError, match="framskip"):
            make("puffer/Breakout-v0", framskip=4)
        with pytest.raises(ValueError, match="parallel_env"):
            make("puffer/Target-v0")
    with pytest.raises(ValueError, match="goal"):
        ocean.gymnasium.parallel_env("target", goal=4)
    env = gymnasium.make("puffer/Target-v0", num_agents=1)
    env.reset(seed=0)
    assert env.step(env.action_space.sample())[0].shape == env.observation_space.shape


def test_wrong_actions_and_calls_are_refused():
    env = gymnasium.make("puffer/Breakout-v0").unwrapped
    envs = gymnasium.make_vec("puffer/Enduro-v0", num_envs=2)
    for one in (env, envs):
        with pytest.raises(gymnasium.error.ResetNeeded):
            one.step(one.action_space.sample())
        with pytest.raises(ValueError, match="options"):
            one.reset(options={"reset_mask": np.array([True, False])})
        one.reset(seed=0)
    with pytest.raises(TypeError):
        env.step(1.0)
    for one, action in ((env, -1), (envs, np.zeros(2, int)), (envs, np.array([[0, 0], [0, 3]]))):
        with pytest.raises(ValueError, match="shape"):
            one.step(action)
    with pytest.raises(ValueError, match="render_mode"):
        ocean.gymnasium.OceanEnv("breakout", render_mode="ansi")
    envs.close()
    with pytest.raises(RuntimeError, match="closed"):
        envs.step(np.zeros((2, 2), int))


# Episodes


@pytest.mark.parametrize(
    ("name", "settings"),
    [("breakout", {"max_steps": 150}), ("cartpole", {"max_steps": 30}), ("squared", {}),
     ("pong", {"max_score": 2}), ("masked", {}), ("double_pendulum", {})],
)
def test_a_vector_and_one_environment_play_what_we_play(name, settings):
    """In SAME_STEP the new episode begins at once. One environment is the first of a vector."""
    own, rng = Vector(name, 8, settings, seed=3), np.random.default_rng(0)
    own.envs.every_final()
    envs = gymnasium.make_vec(environment_id(name), num_envs=8, **settings)
    env = gymnasium.make(environment_id(name), **settings)
    assert envs.metadata["autoreset_mode"] is AutoresetMode.SAME_STEP
    observations, infos = envs.reset(seed=3)
    np.testing.assert_array_equal(observations, own.observations)
    one, one_info = env.reset(seed=3)
    episodes, returns = 0, np.zeros(8)
    for _ in range(1200):
        np.testing.assert_array_equal(observations[0], one)
        if "action_mask" in one_info:
            np.testing.assert_array_equal(infos["action_mask"][0], one_info["action_mask"])
        actions = random_actions(env.action_space, rng, 8)
        own.step(actions)
        observations, rewards, terminals, truncations, infos = envs.step(actions)
        one, *result, one_info = env.step(actions[0])
        np.testing.assert_array_equal(observations, own.observations)
        np.testing.assert_array_equal(rewards, own.rewards)
        np.testing.assert_array_equal(terminals, own.terminals == 1)
        np.testing.assert_array_equal(truncations, own.truncations == 1)
        assert result == [rewards[0], terminals[0], truncations[0]]
        returns += rewards
        done = terminals | truncations
        assert done.any() == ("final_obs" in infos)
        if not done.any():
            continue
        np.testing.assert_array_equal(infos["_final_obs"], done)
        assert [last is not None for last in infos["final_obs"]] == done.tolist()
        for i in np.flatnonzero(done):
            np.testing.assert_array_equal(infos["final_obs"][i], own.final_observations[i])
        final = infos["final_info"]
        np.testing.assert_allclose(final["episode_return"][done], returns[done], 1e-4, 1e-5)
        np.testing.assert_array_equal(final["_score"], done)
        returns[done] = 0
        episodes += np.count_nonzero(done)
        if done[0]:
            np.testing.assert_array_equal(one, infos["final_obs"][0])
            assert one_info["score"] == final["score"][0]
            with pytest.raises(gymnasium.error.ResetNeeded):
                env.unwrapped.step(actions[0])
            one, one_info = env.reset()
    assert episodes > 8
    envs.close()


@pytest.mark.parametrize("name", ["drone", "target", "trash_pickup", "snake"])
def test_a_parallel_environment_plays_what_we_play(name):
    """Until its agent's episode ends; then the agent has gone, with its last observation."""
    pytest.importorskip("pettingzoo")
    world, own = ocean.gymnasium.parallel_env(name), Vector(name, 1, seed=3)
    rng, ended = np.random.default_rng(0), 0
    observations, _ = world.reset(seed=3)
    numbers = {agent: i for i, agent in enumerate(world.possible_agents)}
    assert world.agents == world.possible_agents == list(observations)
    while world.agents and ended < 100:
        there = list(world.agents)
        for agent in there:
            np.testing.assert_array_equal(observations[agent], own.observations[numbers[agent]])
        actions = random_actions(own.envs.single_action_space, rng, len(numbers))
        actions[[i for agent, i in numbers.items() if agent not in there]] = 0
        own.step(actions)
        result = world.step({agent: actions[numbers[agent]] for agent in there})
        assert all(list(part) == there for part in result)
        observations, rewards, terminations, truncations, _ = result
        for agent in there:
            i, ends = numbers[agent], (terminations[agent], truncations[agent])
            assert rewards[agent] == own.rewards[i]
            assert ends == (own.terminals[i], own.truncations[i])
            assert (agent not in world.agents) == any(ends)
            if truncations[agent]:
                np.testing.assert_array_equal(observations[agent], own.final_observations[i])
            ended += any(ends)
    assert ended >= 4
    if world.agents == []:
        assert world.reset()[0].keys() == numbers.keys()
    with pytest.raises(KeyError, match="agent_1"):
        world.reset(seed=0)
        world.step({"agent_0": actions[0]})


def test_without_a_seed_episodes_differ():
    first, *others = [gymnasium.make("puffer/Squared-v0", distance=64).reset()[0] for _ in range(4)]
    assert any(not np.array_equal(first, other) for other in others)


def test_what_a_step_returned_stays():
    envs = gymnasium.make_vec("puffer/Connect4-v0", num_envs=16)
    envs.reset(seed=0)
    results, rng = [], np.random.default_rng(0)
    for _ in range(40):
        *arrays, info = envs.step(rng.integers(0, 7, 16))
        arrays.append(info["action_mask"])
        results.append((arrays, [np.copy(array) for array in arrays]))
    for arrays, copies in results:
        assert all(map(np.array_equal, arrays, copies))


def test_pictures():
    pytest.importorskip("raylib", reason="drawing needs the raylib_software wheel")
    env = gymnasium.make("puffer/Breakout-v0", render_mode="rgb_array")
    env.reset(seed=0)
    picture = env.render()
    assert picture.dtype == np.uint8 and picture.shape == (660, 1152, 3)
    assert env.metadata["render_fps"] == 15
    envs = gymnasium.make_vec("puffer/Squared-v0", num_envs=2, render_mode="rgb_array")
    envs.reset(seed=0)
    assert not np.array_equal(*envs.render())


def test_a_header_without_final_observations_is_refused(tmp_path):
    """Stale memory is never handed out as an observation."""
    text = (ocean.FOLDER / "squared" / "squared.h").read_text()
    line = "    if (WANTS_FINAL(env, false)) write_observation(env, env->final_observations);\n"
    assert line in text
    (tmp_path / "mine.h").write_text(text.replace(line, ""))
    env = ocean.gymnasium.OceanEnv(str(tmp_path / "mine.h"))
    env.reset(seed=0)
    with pytest.raises(RuntimeError, match=r"mine\.h"):
        for _ in range(16):
            env.step(0)


def test_the_example_of_the_page_runs():
    pytest.importorskip("pettingzoo")
    text = (ROOT / "docs" / "ocean.md").read_text()
    (example,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    names = {}
    exec(compile(example, "ocean.md", "exec"), names)
    assert names["world"].agents == [] and names["observations"]
