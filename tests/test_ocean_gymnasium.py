"""The environments in C as Gymnasium's and PettingZoo's: their own checkers, and episodes
held to our own stepping."""

import re
import warnings

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env
from gymnasium.vector import AutoresetMode
from ocean_vector import ROOT, VARIANTS, Vector, count, run_python

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


# What others check


@pytest.mark.parametrize("name", ALONE)
def test_gymnasium_checks_it(name):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        env = gymnasium.make(environment_id(name))
        check_env(env.unwrapped)
        env.close()
    # bounds at infinity
    rest = [str(w.message) for w in caught if "This is probably too" not in str(w.message)]
    assert not rest


@pytest.mark.parametrize("name", SEVERAL)
def test_pettingzoo_checks_it(name):
    test = pytest.importorskip("pettingzoo.test")
    settings = {"num_agents": 64} if name == "nmmo3" else {}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        test.parallel_api_test(ocean.gymnasium.parallel_env(name, **settings), 200)
        test.parallel_seed_test(lambda: ocean.gymnasium.parallel_env(name, **settings), 30)


def test_a_gymnasium_environment_has_one_agent():
    for make in (gymnasium.make, gymnasium.make_vec):
        with pytest.raises(ValueError, match=r"target has 8 "
                           r"agents.*ocean\.gymnasium\.parallel_env\('target'\)"):
            make("puffer/Target-v0")
    env = gymnasium.make("puffer/Target-v0", num_agents=1)
    env.reset(seed=0)
    assert env.step(env.action_space.sample())[0].shape == env.observation_space.shape


# The registry, settings, errors


def test_all_are_registered_by_the_import_alone():
    ids = {spec for spec in gymnasium.registry if spec.startswith("puffer/")}
    assert ids == {environment_id(name) for name in ocean.names()}
    assert {"puffer/Breakout-v0", "puffer/DoublePendulum-v0", "puffer/G2048-v0"} <= ids
    by_module = "import gymnasium; print(gymnasium.make('ocean.gymnasium:puffer/Squared-v0').observation_space.shape)"
    assert "(11, 11)" in run_python(by_module)
    alone = "import sys, ocean; print('ocean.gymnasium' in sys.modules)"
    assert "False" in run_python(alone)


def test_settings_are_keywords():
    env = gymnasium.make("puffer/Squared-v0", distance=3)
    assert env.observation_space.shape == (7, 7) and env.spec.kwargs["distance"] == 3
    envs = gymnasium.make_vec("puffer/Breakout-v0", num_envs=3, continuous=True)
    assert (envs.action_space == gymnasium.spaces.Box(-1, 1, (3, 1))
            and envs.observation_space.shape == (3, 118))
    for make in (gymnasium.make, gymnasium.make_vec):
        with pytest.raises(ValueError,
                           match=r"no setting 'framskip': did you mean frameskip.* paddle_width"):
            make("puffer/Breakout-v0", framskip=4)
    with pytest.raises(ValueError, match=r"no setting 'goal'.*There are: .*num_agents"):
        ocean.gymnasium.parallel_env("target", goal=4)
    with pytest.raises(TypeError, match="frameskip must be an integer"):
        gymnasium.make("puffer/Breakout-v0", frameskip=4.5)


def test_wrong_actions_and_calls_are_refused():
    env, envs = gymnasium.make("puffer/Breakout-v0").unwrapped, gymnasium.make_vec("puffer/Enduro-v0", num_envs=2)
    for one in (env, envs):
        with pytest.raises(gymnasium.error.ResetNeeded):
            one.step(one.action_space.sample())
        with pytest.raises(ValueError, match="reset has no options"):
            one.reset(options={"reset_mask": np.array([True, False])})
        one.reset(seed=0)
    for action in (3, -1):
        with pytest.raises(ValueError, match=f"actions lie within 0 and 2, got {action}$"):
            env.step(action)
    with pytest.raises(TypeError, match="same_kind"):
        env.step(1.0)
    with pytest.raises(ValueError, match=re.escape("shape (2, 2), got (2,)")):
        envs.step(np.zeros(2, int))
    with pytest.raises(ValueError, match=re.escape("0 and [2, 2], got 0 to 3")):
        envs.step(np.array([[0, 0], [0, 3]]))
    with pytest.raises(ValueError, match="render_mode is 'ansi'"):
        ocean.gymnasium.OceanEnv("breakout", render_mode="ansi")
    envs.close()
    with pytest.raises(RuntimeError, match="closed"):
        envs.step(np.zeros((2, 2), int))


def test_a_nan_is_refused_and_a_float_out_of_bounds_is_clamped():
    env, envs = gymnasium.make("puffer/Pendulum-v0").unwrapped, gymnasium.make_vec("puffer/Pendulum-v0", num_envs=2)
    shape = env.action_space.shape
    for one, lead in ((env, ()), (envs, (2,))):
        one.reset(seed=0)
        with pytest.raises(ValueError, match="pendulum: an action is NaN"):
            one.step(np.full((*lead, *shape), np.nan, np.float32))
    far = env.step(np.full(shape, 50, np.float32))
    env.reset(seed=0)
    np.testing.assert_array_equal(far[0], env.step(env.action_space.high)[0])
    envs.close()


def test_an_action_is_missing():
    pytest.importorskip("pettingzoo")
    world = ocean.gymnasium.parallel_env("target", num_agents=2)
    world.reset(seed=0)
    with pytest.raises(ValueError, match=r"there is none of \['agent_1'\]"):
        world.step({"agent_0": np.array([0, 0])})


# Episodes


def own_steps(name, num_envs, steps, settings):
    """Our own stepping: the first observations, and [(actions, observations, rewards, terminals,
    truncations, final observations)] of each step."""
    own, rng = Vector(name, num_envs, settings, seed=3), np.random.default_rng(0)
    first, taken = own.observations.copy(), []
    for _ in range(steps):
        actions = random_actions(own.envs.single_action_space, rng, num_envs)
        own.step(actions)
        taken.append((actions,
                      *(array.copy() for array in (*own.outputs()[:4], own.final_observations))))
    return first, taken


@pytest.mark.parametrize(
    ("name", "settings"),
    [("breakout", {"max_steps": 150}), ("cartpole", {"max_steps": 30}), ("squared", {}),
     ("pong", {"max_score": 2}), ("masked", {}), ("double_pendulum", {})],
)
def test_a_vector_plays_what_we_play(name, settings):
    """SAME_STEP: the new episode's first observation at once, the old one's last in final_obs."""
    first, taken = own_steps(name, 8, 3000, settings)
    envs = gymnasium.make_vec(environment_id(name), num_envs=8, **settings)
    assert envs.metadata["autoreset_mode"] is AutoresetMode.SAME_STEP
    observations, infos = envs.reset(seed=3)
    np.testing.assert_array_equal(observations, first)
    episodes, returns = 0, np.zeros(8)
    for action, seen, reward, terminal, truncation, last in taken:
        observations, rewards, terminals, truncations, infos = envs.step(action)
        np.testing.assert_array_equal(observations, seen)
        np.testing.assert_array_equal(rewards, reward)
        np.testing.assert_array_equal(terminals, terminal.astype(bool))
        np.testing.assert_array_equal(truncations, truncation.astype(bool))
        returns += rewards
        done = terminals | truncations
        assert done.any() == ("final_obs" in infos)
        if done.any():
            np.testing.assert_array_equal(infos["_final_obs"], done)
            assert [one is not None for one in infos["final_obs"]] == done.tolist()
            for i in np.flatnonzero(truncations):
                np.testing.assert_array_equal(infos["final_obs"][i], last[i])
            np.testing.assert_allclose(infos["final_info"]["episode_return"][done],
                                       returns[done], 1e-4, 1e-5)
            np.testing.assert_array_equal(infos["final_info"]["_score"], done)
            returns[done] = 0
            episodes += np.count_nonzero(done)
    assert episodes > 8
    envs.close()


def test_the_last_observation_of_a_terminated_episode_is_what_was_reached():
    """CartPole's next state by its own equations; squared's agent on the target, or gone."""
    rng, envs = np.random.default_rng(0), gymnasium.make_vec("puffer/Cartpole-v0", num_envs=4)
    before, _ = envs.reset(seed=0)
    falls = 0
    for _ in range(300):
        now, _, terminals, _, infos = envs.step(rng.integers(0, 2, 4))
        for i in np.flatnonzero(terminals):
            last = infos["final_obs"][i]
            assert abs(last[0]) > 2.4 or abs(last[2]) > 0.2094
            np.testing.assert_allclose(last[[0, 2]],
                                       before[i][[0, 2]] + 0.02 * before[i][[1, 3]], 1e-5, 1e-6)
            assert np.abs(now[i]).max() <= 0.05
            falls += 1
        before = now
    assert falls > 20
    env, ends = gymnasium.make("puffer/Squared-v0", distance=1), set()
    env.reset(seed=0)
    for action in rng.integers(0, 5, 2000):
        last, reward, terminated, _, _ = env.step(action)
        if terminated:
            counts = np.bincount(last.ravel(), minlength=3)[1:].tolist()
            assert counts in ([1, 0], [1, 1], [0, 1])
            assert (counts == [1, 0]) == (reward == 1)  # the agent stands on the target
            ends.add(tuple(counts))
            env.reset()
    assert ends == {(1, 0), (1, 1), (0, 1)}


@pytest.mark.parametrize("name", ["breakout", "squared", "masked"])
def test_one_environment_plays_what_the_first_of_a_vector_plays(name):
    """Its last step has the last observation, reset() the next episode's first."""
    rng, envs = np.random.default_rng(1), gymnasium.make_vec(environment_id(name), num_envs=3)
    env = gymnasium.make(environment_id(name))
    many, one = envs.reset(seed=5), env.reset(seed=5)
    episodes = 0
    for _ in range(3000):
        np.testing.assert_array_equal(many[0][0], one[0])
        if "action_mask" in one[1]:
            np.testing.assert_array_equal(many[1]["action_mask"][0], one[1]["action_mask"])
        actions = random_actions(env.action_space, rng, 3)
        observations, rewards, terminals, truncations, infos = envs.step(actions)
        observation, reward, terminated, truncated, info = env.step(actions[0])
        assert (reward, terminated, truncated) == (rewards[0], terminals[0], truncations[0])
        many, one = (observations, infos), (observation, info)
        if terminated or truncated:
            np.testing.assert_array_equal(observation, infos["final_obs"][0])
            assert info["score"] == infos["final_info"]["score"][0]
            with pytest.raises(gymnasium.error.ResetNeeded):
                env.unwrapped.step(actions[0])
            one, episodes = env.reset(), episodes + 1
    assert episodes > 5 or name == "breakout"


@pytest.mark.parametrize("name", ["drone", "target", "trash_pickup", "snake"])
def test_a_parallel_environment_plays_what_we_play(name):
    """Until its agent's episode ends; then the agent has gone, with its last observation."""
    pytest.importorskip("pettingzoo")
    world, own = ocean.gymnasium.parallel_env(name), Vector(name, 1, seed=3)
    rng, numbers, ended = np.random.default_rng(0), {}, 0
    observations, _ = world.reset(seed=3)
    numbers = {agent: i for i, agent in enumerate(world.possible_agents)}
    assert world.agents == world.possible_agents == list(observations)
    while world.agents and ended < 200:
        there = list(world.agents)
        for agent in there:
            np.testing.assert_array_equal(observations[agent], own.observations[numbers[agent]])
        actions = random_actions(own.envs.single_action_space, rng, len(numbers))
        actions[[i for agent, i in numbers.items() if agent not in there]] = 0
        own.step(actions)
        observations, rewards, terminations, truncations, infos = world.step(
            {agent: actions[numbers[agent]] for agent in there}
        )
        assert there == list(observations) == list(rewards) == list(terminations) == list(truncations) == list(infos)
        for agent in there:
            i, gone = numbers[agent], agent not in world.agents
            assert rewards[agent] == own.rewards[i] and gone == (terminations[agent]
                                                                 or truncations[agent])
            assert (terminations[agent], truncations[agent]) == (own.terminals[i],
                                                                 own.truncations[i])
            if truncations[agent]:
                np.testing.assert_array_equal(observations[agent], own.final_observations[i])
            ended += gone
    assert ended >= 4
    if world.agents == []:
        assert world.reset()[0].keys() == numbers.keys()


@pytest.mark.parametrize(("name", "settings"), VARIANTS,
                         ids=[f"{name}-{i}" for i, (name, _) in enumerate(VARIANTS)])
def test_final_observations_of_the_terminated_change_nothing_else(name, settings):
    """With every_final each episode's end has one, within the declared bounds;
    all else is as without."""
    number, rng = count(name, settings, 16), np.random.default_rng(0)
    plain, full = (Vector(name, number, settings, seed=1) for _ in range(2))
    full.envs.every_final()
    space = plain.envs.single_observation_space
    for _ in range(150):
        plain.random_actions(rng)
        full.final_observations.view(np.uint8)[...] = 0xA5
        plain.step()
        full.step(plain.actions)
        for one, other in zip(plain.outputs(), full.outputs(), strict=True):
            np.testing.assert_array_equal(one, other)
        cut, ended = full.truncations == 1, (full.truncations | full.terminals) == 1
        np.testing.assert_array_equal(full.final_observations[cut], plain.final_observations[cut])
        finals = full.final_observations.view(np.uint8).reshape(len(ended), -1)
        assert not (finals[ended] == 0xA5).all(axis=1).any() and (finals[~ended] == 0xA5).all()
        last = full.final_observations[ended]
        assert ((last >= space.low) & (last <= space.high)).all()
    full.check_guards()


def test_seeds():
    envs = gymnasium.make_vec("puffer/Breakout-v0", num_envs=4)
    actions = random_actions(envs.single_action_space, np.random.default_rng(0), 4 * 100).reshape(100, 4)

    def play(seed):
        envs.reset(seed=seed)
        return np.array([envs.step(action)[0] for action in actions])

    first, other = play(1), play(2)
    assert np.array_equal(first, play(1)) and not np.array_equal(first, other)
    assert not np.array_equal(first[:, 0], first[:, 1])
    unseeded = [gymnasium.make("puffer/Squared-v0", distance=64).reset()[0] for _ in range(4)]
    assert any(not np.array_equal(unseeded[0], other) for other in unseeded[1:])


def test_what_a_step_returned_stays():
    envs = gymnasium.make_vec("puffer/Connect4-v0", num_envs=16)
    envs.reset(seed=0)
    kept, rng = [], np.random.default_rng(0)
    for _ in range(40):
        step = envs.step(rng.integers(0, 7, 16))
        kept.append((step, [np.copy(part) for part in (*step[:4], step[4]["action_mask"])]))
    for step, copies in kept:
        for part, copied in zip((*step[:4], step[4]["action_mask"]), copies, strict=True):
            np.testing.assert_array_equal(part, copied)


def test_gymnasium_wrappers_of_a_vector():
    envs = gymnasium.make_vec("puffer/Squared-v0", num_envs=8)
    envs = gymnasium.wrappers.vector.RecordEpisodeStatistics(envs)
    rng, returns = np.random.default_rng(0), []
    envs.reset(seed=0)
    for _ in range(60):
        *_, infos = envs.step(rng.integers(0, 5, 8))
        if "episode" in infos:
            done = infos["_episode"]
            np.testing.assert_array_equal(infos["episode"]["r"][done],
                                          infos["final_info"]["episode_return"][done])
            np.testing.assert_array_equal(infos["episode"]["l"][done],
                                          infos["final_info"]["episode_length"][done])
            returns += infos["episode"]["r"][done].tolist()
    assert len(returns) > 20


def test_pictures():
    env = gymnasium.make("puffer/Breakout-v0", render_mode="rgb_array")
    env.reset(seed=0)
    picture = env.render()
    assert (picture.dtype == np.uint8 and picture.shape == (660, 1152, 3)
            and env.metadata["render_fps"] == 15)
    envs = gymnasium.make_vec("puffer/Squared-v0", num_envs=2, render_mode="rgb_array")
    envs.reset(seed=0)
    pictures = envs.render()
    assert len(pictures) == 2 and not np.array_equal(*pictures)


def test_a_header_without_final_observations_is_refused(tmp_path):
    """Stale memory is never handed out as an observation."""
    text = (ocean.FOLDER / "squared" / "squared.h").read_text()
    line = "    if (WANTS_FINAL(env, false)) write_observation(env, env->final_observations);\n"
    assert line in text
    (tmp_path / "mine.h").write_text(text.replace(line, ""))
    env = ocean.gymnasium.OceanEnv(str(tmp_path / "mine.h"))
    env.reset(seed=0)
    with pytest.raises(RuntimeError, match=r"mine\.h writes no final observation"):
        for _ in range(16):
            env.step(0)


def test_the_example_of_the_page_runs():
    pytest.importorskip("pettingzoo")
    text = (ROOT / "docs" / "ocean.md").read_text()
    (example,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    names = {}
    exec(compile(example, "ocean.md", "exec"), names)
    assert names["world"].agents == [] and names["observations"]
