"""Emulation: flat spaces, what an environment may return, and the rows that it writes."""

import importlib
import sys
import warnings
from types import SimpleNamespace
from unittest import mock

import gymnasium
import numpy as np
import pytest
import small_envs
import torch
from gymnasium import spaces
from gymnasium.utils.env_checker import check_env
from gymnasium.wrappers import vector as vector_wrappers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from small_envs import ACTIONS, MASK, Counters, Leavers, Steps, declares, several

import emulation
import models
import vector
from emulation import FlatAction, FlatObservation, GymnasiumPufferEnv, new_rows, wrap
from errors import EnvError

# -- Spaces ----------------------------------------------------------------------------------------

DTYPES = ["bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "int64", "float16",
          "float32", "float64"]


@st.composite
def boxes(draw):
    dtype = np.dtype(draw(st.sampled_from(DTYPES)))
    shape = tuple(draw(st.lists(st.integers(1, 5), max_size=3)))
    high = np.inf if dtype.kind == "f" else 1 if dtype.kind == "b" else 100
    return spaces.Box(-np.inf if dtype.kind == "f" else 0, high, shape, dtype)


def trees(leaves):
    keys = st.text(st.characters(codec="ascii", exclude_characters="\0"), min_size=1, max_size=4)
    return st.recursive(leaves, lambda sub: st.one_of(
        st.dictionaries(keys, sub, min_size=1, max_size=4).map(spaces.Dict),
        st.lists(sub, min_size=1, max_size=4).map(spaces.Tuple)), max_leaves=8)


choices = st.one_of(
    st.builds(lambda n, start: spaces.Discrete(n, start=start), st.integers(1, 100),
              st.integers(-5, 5)),
    st.builds(spaces.MultiDiscrete, st.lists(st.integers(1, 9), min_size=1, max_size=4)),
    st.sampled_from([spaces.MultiDiscrete([[2, 3], [4, 5]]), spaces.MultiBinary([2, 3])]),
    st.builds(spaces.MultiBinary, st.integers(1, 9)))
nested = trees(st.one_of(boxes(), choices))
integers = st.builds(lambda low, n: spaces.Box(low, low + n, (2, 2), np.int16), st.integers(-9, 9),
                     st.integers(0, 9))
HUGE = spaces.Dict({"image": spaces.Box(0, 255, (512, 512, 3), np.uint8),
                    "x": spaces.Box(-1, 1, (), np.float64)})


@settings(max_examples=200)
@given(nested, st.integers(0, 2**31))
@example(HUGE, 0)
def test_a_flat_observation_is_the_same_unflattened_and_as_views(space, seed):
    layout = FlatObservation(space)
    space.seed(seed)
    values = [space.sample() for _ in range(3)]
    flat = np.stack([layout.flatten(value) for value in values])
    assert flat.shape[1:] == layout.shape == layout.flat_space.shape
    assert flat.dtype == layout.flat_space.dtype
    fields = emulation.nativize_tensor(torch.from_numpy(flat.copy()),
                                       emulation.nativize_dtype(layout.dtype))
    for i, value in enumerate(values):
        again = layout.unflatten(flat[i])
        assert layout.flat_space.contains(flat[i]) and space.contains(again)
        np.testing.assert_array_equal(layout.flatten(again), flat[i])
        for keys, names, _ in layout.leaves:
            part, tensor, original = flat[i].view(layout.dtype), fields, value
            for key, name in zip(keys, names, strict=True):
                part, tensor, original = part[name], tensor[name], original[key]
            part = part[0] if names else part
            np.testing.assert_array_equal(np.reshape(part, np.shape(original)), original)
            np.testing.assert_array_equal(tensor[i].numpy().reshape(np.shape(original)), original)


@settings(max_examples=150)
@given(st.integers(0, 2**31), trees(st.one_of(choices, integers)))
def test_discrete_actions_there_and_back(seed, space):
    layout = FlatAction(space)
    row = np.random.default_rng(seed).integers(0, layout.heads)
    action = layout.unflatten(row)
    assert space.contains(action)
    np.testing.assert_array_equal(small_envs.flatten_action(layout, action), row)


PAIR = spaces.MultiDiscrete([2, 3])


@pytest.mark.parametrize(("space", "mask", "expected"), [
    # A Dict space sorts its keys: attack comes first.
    (spaces.Dict({"move": spaces.Discrete(4), "attack": spaces.Discrete(2)}),
     {"move": [0, 0, 0, 1], "attack": [0, 1]}, [0, 1, 0, 0, 0, 1]),
    (PAIR, ([1, 0], [0, 0, 0]), [1, 0, 1, 1, 1]),  # nothing allowed is everything
    (PAIR, [0, 0, 0, 2, 0], [1, 1, 0, 1, 0]),
    (PAIR, [[1, 0], [0, 1, 1]], [1, 0, 0, 1, 1]),
    (spaces.Discrete(3), None, [1, 1, 1]),
    (ACTIONS, (MASK[:3], (MASK[3:5], np.array([0, 0, 0, 1]))), MASK.tolist()),
])
def test_action_masks_go_where_their_heads_are(space, mask, expected):
    target = np.zeros(len(expected), np.uint8)
    FlatAction(space).write_mask(target, mask)
    assert target.tolist() == expected


NOTHING = spaces.Box(-1, 1, (2, 0), np.float32)


@pytest.mark.parametrize(("layout", "space"), [
    (FlatAction, spaces.Dict({"a": spaces.Discrete(2), "b": spaces.Box(-1, 1, (1,))})),
    (FlatAction, spaces.Box(-(2**40), 2**40, (1,), np.int64)),
    (FlatAction, spaces.Text(3)),
    (FlatAction, spaces.Dict({})),
    (FlatAction, NOTHING),
    (FlatObservation, spaces.Tuple([spaces.Discrete(2), NOTHING])),
    (FlatObservation, spaces.Dict({"a": spaces.Sequence(spaces.Discrete(2))})),
])
def test_spaces_that_cannot_be_flat(layout, space):
    with pytest.raises(EnvError):
        layout(space)


# -- What an environment returns that it may not ---------------------------------------------------

TREE = spaces.Dict({"a": spaces.Tuple([spaces.Box(0, 1, (2,), np.float32)]),
                    "b": spaces.Discrete(3)})
FINE = {"a": (np.zeros(2, np.float32),), "b": 1}
SEEN = np.zeros(2, np.uint8)
BYTES, FLOATS = spaces.Box(0, 255, (2,), np.uint8), spaces.Box(-9, 9, (3,), np.float32)


def at(step, space=FLOATS, **parts):
    """A creator: one step of the environment returns other parts."""
    fine = {"observation": FINE} if space is TREE else {}

    def change(t):
        return parts if t == step else fine

    return lambda: Steps(limit=None, change=change, observation_space=space)


def replace_returns(**results):
    """A creator: a method returns a given tuple."""
    def make():
        env = Steps(observation_space=BYTES)
        for name, result in results.items():
            setattr(env, name, lambda *_, result=result, **__: result)
        return env

    return make


def transform_observations(observe, **options):
    """A creator: a vector environment whose observations a function changes."""
    sync = [lambda: Steps(observation_space=BYTES)] * 2
    return lambda: vector_wrappers.TransformObservation(
        gymnasium.vector.SyncVectorEnv(sync), observe, **options)


WRONG_PARTS = [  # of an observation in TREE
    ({"a": (np.zeros(3, np.float32),)}, r"\['a'\]\[0\].*\(3,\)"),
    ({"a": (np.array([0, 7], np.float32),)}, r"\['a'\]\[0\].*\(1,\).*7"),
    ({"a": (np.array([0, np.nan], np.float32),)}, r"\(1,\).*nan"),
    ({"a": np.zeros(2, np.float32)}, r"\['a'\]\[0\].*\(2,\)"),
    ({"b": 3}, r"\['b'\].*3"),
    ({"a": (np.zeros(2, np.complex64),)}, "float32.*complex64"),
    ({"a": 0}, r"\['a'\]\[0\].*Box"),
    ({"c": 0}, r"\['c'\].*not in its space"),
]
FAULTS = [
    *((at(step, TREE, observation=FINE | parts), name)
      for parts, name in WRONG_PARTS for step in (0, 1)),
    (at(0, TREE, observation={"a": FINE["a"]}), "b"),
    *((at(step, reward=reward), "reward") for step in (1, 5)
      for reward in ([1.0, -0.5], 10**400)),
    (at(5, terminated=np.zeros(2)), "terminated"),
    (at(5, terminated=True, info=None), "info"),
    *((at(5, observation=value), "observation")
      for value in ({"a": 1}, [[1], [2, 3]], "text", np.zeros(5))),
    (replace_returns(step=(SEEN, 0.0, False, False, None)), "info"),
    (replace_returns(reset=(SEEN, None)), "info.*reset"),
    (replace_returns(reset=(SEEN, 3, {})), "reset.*3 values"),
    (replace_returns(reset=SEEN), "reset.*observation, info"),
    (replace_returns(step=(SEEN.astype(np.float32), 0.0, False, False, {})), "uint8.*float32"),
    (transform_observations(lambda seen: seen[:, :1]), "reset"),
    (transform_observations(lambda seen: seen / 255), "reset"),
    (transform_observations(lambda seen: seen[:, :1],
                            observation_space=spaces.Box(0, 255, (2, 1), np.uint8)), "reset"),
    (lambda: vector_wrappers.TransformReward(gymnasium.vector.SyncVectorEnv([Steps] * 2), np.sum),
     "step"),
]


def run_to_fault(creator, steps=6):
    with vector.make(creator, 1, "serial") as vecenv:
        vecenv.reset(seed=0)
        for _ in range(steps):
            vecenv.step(np.zeros(vecenv.storage.actions[0].shape, np.int32))


@pytest.mark.parametrize(("creator", "name"), FAULTS)
def test_a_wrong_return_is_a_fault(creator, name):
    with pytest.raises(EnvError, match=f"(?s){name}"):
        run_to_fault(creator)


PARTS = {"observations": np.zeros(1, np.float32), "rewards": 1.0, "terminated": False,
         "truncated": False, "infos": {}}


def step_with(late, part, value):
    """Return a `step` of which a part is wrong, at once or when nothing is checked beforehand."""
    def step(self, actions):
        self.t += 1
        parts = {name: dict.fromkeys(self.agents, value) for name, value in PARTS.items()}
        return *(parts | ({part: value} if self.t > late else {})).values(),

    return {"step": step}


def step_with_a_guest(self, actions):
    """From the third step on, when all that a step returns is no longer checked."""
    observations, *rest = Leavers.step(self, actions)
    return {**observations, **({"guest": observations["c"]} if self.t > 2 else {})}, *rest


WRONG_RESULTS = [
    ("infos", None), ("infos", {"a": None}), ("rewards", {"a": None}), ("rewards", 1.0),
    ("rewards", {"a": np.ones(2)}), ("terminated", {"a": np.zeros(2)}), ("truncated", None),
    ("observations", {"a": "x"})]


@pytest.mark.parametrize(("change", "name"), [
    *((step_with(late, part, value), part[:4]) for part, value in WRONG_RESULTS
      for late in (0, 2)),
    ({"step": step_with_a_guest}, "guest.*possible_agents"),
    ({"reset": lambda self, seed=None: ({}, None), "agents": []}, "infos"),
    ({"reset": lambda self, seed=None: {}}, "reset.*infos"),
    ({"reset": lambda self, seed=None: ({}, {}), "agents": []}, "agents"),
    ({"step": lambda self, actions: ({},) * 4}, "step.*observations"),
    ({"reset": lambda self, seed=None: (Leavers.reset(self)[0], {})}, "reset"),  # late masks
])
def test_a_wrong_return_of_a_parallel_environment_is_a_fault(change, name):
    with pytest.raises(EnvError, match=name):
        run_to_fault(type("Odd", (Leavers,), change))


@pytest.mark.parametrize("name", ["observation_space", "action_space"])
def test_an_environment_without_spaces_is_an_error(name):
    with pytest.raises(EnvError, match=f"Mine.*{name}"):
        vector.make(type("Mine", (Steps,), {name: None}))


def test_agents_of_different_spaces_are_an_error():
    env = Leavers()
    env.action_space = lambda agent: spaces.Discrete(ord(agent))
    with pytest.raises(EnvError, match="supersuit"):
        wrap(env)


def test_old_gym_environments_are_converted_by_shimmy(monkeypatch):
    class Old:
        def reset(self): ...

    class Later(Old):
        def reset(self, seed=None): ...

    monkeypatch.setitem(sys.modules, "gym", SimpleNamespace(Env=Old))
    monkeypatch.setitem(sys.modules, "shimmy", None)
    with pytest.raises(EnvError, match="shimmy"):
        emulation.gymnasium_form(Old())
    shims = {name: mock.Mock(return_value=Steps())
             for name in ("GymV21CompatibilityV0", "GymV26CompatibilityV0")}
    monkeypatch.setitem(sys.modules, "shimmy", SimpleNamespace(**shims))
    for old, shim in zip((Old(), Later()), shims.values(), strict=True):
        assert emulation.gymnasium_form(old) is shim.return_value
        shim.assert_called_once_with(env=old)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_value_may_be_a_hair_outside_its_bounds(dtype):
    seen = np.array([np.nextafter(dtype(1), dtype(2)), -np.finfo(dtype).tiny], dtype)
    env = GymnasiumPufferEnv(Steps(change=lambda t: {"observation": seen},
                                   observation_space=spaces.Box(0.0, 1.0, (2,), dtype)))
    np.testing.assert_array_equal(env.reset()[0], seen)
    np.testing.assert_array_equal(env.step(0)[0], seen)


# -- Rows of single environments -------------------------------------------------------------------


def drive(env, steps, actions=0):
    """Step a wrapped environment as a vectorizer does; return it and its rows."""
    env = wrap(env)
    rows = new_rows(env, emulation.slots(env))
    view, history = env.views(rows, 0), []
    env.reset_into(view, 3)
    for t in range(steps):
        for name in ("rewards", "terminals", "truncations"):
            getattr(rows, name)[:] = 0
        rows.valid[:] = 1
        rows.actions[:] = actions[t] if np.ndim(actions) else actions
        infos = env.step_into(view)
        copies = {name: None if array is None else array.copy()
                  for name, array in vars(rows).items()}
        history.append(SimpleNamespace(infos=infos, **copies))
    return env, history


@pytest.mark.parametrize("creator", [
    lambda: gymnasium.make("CartPole-v1"), lambda: gymnasium.make("Pendulum-v1"),
    lambda: gymnasium.make("Blackjack-v1"), *small_envs.creators_of("nested", 1)])
def test_a_wrapped_environment_is_a_valid_gymnasium_environment(creator):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        check_env(GymnasiumPufferEnv(env_creator=creator), skip_render_check=True)


def test_a_creator_has_arguments_and_its_environment_a_spec():
    env = GymnasiumPufferEnv(env_creator=gymnasium.make, env_args=["CartPole-v1"],
                             env_kwargs={"max_episode_steps": 7})
    observation, _ = env.reset(seed=0)
    assert observation.view(env.obs_dtype).shape == (4,) and env.spec.max_episode_steps == 7


def test_a_wrapper_may_end_an_episode_before_the_environment_within():
    env = gymnasium.wrappers.TimeLimit(GymnasiumPufferEnv(Steps(limit=5)), 2)
    _, history = drive(env, 2)
    assert history[1].infos[0]["episode_return"] == 2 and history[1].truncations.all()


def test_infos_of_an_episode_are_flat_numbers():
    def nested(t):
        return {"info": {"t": t, "nested": {"double": 2.0 * t}}}

    env, history = drive(Steps(limit=5, change=nested), 11)
    assert [row.observations.item() for row in history] == [1, 2, 3, 4, 0, 1, 2, 3, 4, 0, 1]
    info = {"t": 5.0, "nested/double": 10.0, "episode_return": 5.0, "episode_length": 5.0}
    assert [row.infos for row in history if row.infos] == [[info]] * 2 and not env.has_action_masks


# -- Action masks ----------------------------------------------------------------------------------


class Masked(Steps):
    """As sb3-contrib: only the action of the number of the step is allowed."""

    action_space = spaces.Discrete(4)

    def step(self, action):
        assert action == self.t
        return super().step(action)

    def action_masks(self):
        assert self.t < 3, "asked after the last step"
        return np.arange(4) == self.t


def test_action_masks_come_from_a_method_also_through_wrappers():
    actions = np.array([0, 1, 2, 0, 1]).reshape(5, 1, 1)
    _, history = drive(gymnasium.wrappers.TimeLimit(Masked(), 100), 5, actions)
    masks = [row.action_masks[0].tolist() for row in history]
    assert masks == np.eye(4, dtype=int)[[1, 2, 0, 1, 2]].tolist()


class Around(gymnasium.Wrapper):
    """Its method goes before the environment's info, though it has too few entries."""

    def action_masks(self):
        return np.array([0, 0, 1, 1], bool)


def first_mask(info):
    return Steps(change=lambda t: {"info": info}, action_space=spaces.Discrete(4))


@pytest.mark.parametrize(("creator", "name"), [
    (lambda: first_mask({"action_mask": np.ones(3, np.int8)}), "entries"),
    (lambda: Around(gymnasium.make("Taxi-v4")), "6"),
    (lambda: first_mask({"action_masks": np.ones(4)}), "action_mask"),
    (lambda: first_mask({"action_mask": np.array([0, -1e9, 0, 0])}), "-1000000000.0"),
    (lambda: gymnasium.vector.SyncVectorEnv([Masked] * 2), "action_masks"),
    (at(1, info={"action_mask": np.ones(2)}), "reset")])
def test_a_wrong_or_late_mask_is_an_error(creator, name):
    with pytest.raises(ValueError, match=name):
        run_to_fault(creator)


def test_a_later_info_may_have_no_mask():
    def once():
        mask = {"action_mask": MASK}
        return Steps(limit=2, change=lambda t: {"info": {} if t else mask},
                     action_space=ACTIONS)

    sync = gymnasium.vector.SyncVectorEnv([once] * 2,
                                          autoreset_mode=gymnasium.vector.AutoresetMode.DISABLED)
    for env in (once(), sync):
        _, history = drive(env, 2)
        assert [row.action_masks[-1].tolist() for row in history] == [[1] * 9, MASK.tolist()]


# -- Gymnasium's vector environments, in their three autoreset modes -------------------------------

NEXT_STEP = {  # with a row after each end that is not valid
    "observations": ([1, 2, 3, 0, 1, 2, 3, 0], [1, 2, 0, 1, 2, 0, 1, 2]),
    "truncations": ([0, 0, 1, 0, 0, 0, 1, 0], [0] * 8),
    "terminals": ([0] * 8, [0, 1, 0, 0, 1, 0, 0, 1]),
    "valid": ([1, 1, 0, 1, 1, 1, 0, 1], [1, 0, 1, 1, 0, 1, 1, 0]),
    "rewards": ([1, 1, 1, 0, 1, 1, 1, 0], [1, 1, 0, 1, 1, 0, 1, 1])}
OTHERS = {
    "observations": ([1, 2, 0, 1, 2, 0, 1, 2], [1, 0] * 4),
    "truncations": ([0, 0, 1, 0, 0, 1, 0, 0], [0] * 8),
    "terminals": ([0] * 8, [0, 1] * 4), "valid": ([1] * 8,) * 2, "rewards": ([1] * 8,) * 2}


@pytest.mark.parametrize("mode", gymnasium.vector.AutoresetMode)
def test_vector_environments_in_every_autoreset_mode(mode):
    next_step = mode == gymnasium.vector.AutoresetMode.NEXT_STEP
    env, history = drive(several(mode), 8)
    assert isinstance(env, emulation.GymnasiumVectorPufferEnv)
    for name, columns in (NEXT_STEP if next_step else OTHERS).items():
        rows = [getattr(row, name).reshape(2).tolist() for row in history]
        assert [*map(list, zip(*rows, strict=True))] == list(columns), name
    assert history[2].final_observations[0].item() == 3
    infos = [info for row in history for info in row.infos]
    for info in infos:
        assert info == dict.fromkeys(("t", "episode_return", "episode_length"), info["t"])
    assert sorted(info["t"] for info in infos) == [2.0] * (3 if next_step else 4) + [3.0] * 2


class IntegerFlags(gymnasium.vector.VectorWrapper):
    def step(self, actions):
        observations, rewards, *ends, info = self.env.step(actions)
        return observations, rewards, *(flags.astype(np.uint8) for flags in ends), info


def test_a_vector_environment_may_return_flags_of_any_integer_type():
    next_step = gymnasium.vector.AutoresetMode.NEXT_STEP
    histories = [drive(env, 8)[1] for env in (several(next_step), IntegerFlags(several(next_step)))]
    for row, expected in zip(*histories, strict=True):
        assert row.rewards.tolist() == expected.rewards.tolist()
        assert row.valid.tolist() == expected.valid.tolist() and row.infos == expected.infos


def in_dict(env):
    space = spaces.Dict({"x": env.observation_space, "action_mask": spaces.MultiBinary(4)})
    return gymnasium.wrappers.TransformObservation(
        env, lambda x: {"x": x.copy(), "action_mask": np.arange(4) == x}, space)


@pytest.mark.parametrize("creator", [
    lambda *ends: Steps(*ends, action_space=spaces.Discrete(4), change=lambda t: {
        "info": {"action_mask": np.arange(4) == t}}),
    lambda *ends: in_dict(Steps(*ends, action_space=spaces.Discrete(4)))], ids=["info", "Dict"])
@pytest.mark.parametrize("mode", gymnasium.vector.AutoresetMode)
def test_vector_environments_give_each_copy_its_mask(mode, creator):
    env = gymnasium.vector.SyncVectorEnv([creator, lambda: creator(2)], autoreset_mode=mode)
    _, history = drive(env, 8)
    table = NEXT_STEP if mode == gymnasium.vector.AutoresetMode.NEXT_STEP else OTHERS
    for i, columns in enumerate(zip(table["observations"], table["valid"], strict=True)):
        for row, t, valid in zip(history, *columns, strict=True):
            assert not valid or row.action_masks[i].tolist() == np.eye(4)[t].tolist()


@pytest.mark.parametrize("mode", gymnasium.vector.AutoresetMode)
def test_recorded_episodes_of_vector_environments(mode):
    _, history = drive(vector_wrappers.RecordEpisodeStatistics(several(mode)), 8)
    infos = [info for row in history for info in row.infos]
    assert len(infos) > 4 and all(info["episode_return"] == info["t"] for info in infos)


def test_the_return_of_a_vector_environment_is_the_recorded_one():
    env = vector_wrappers.RecordEpisodeStatistics(gymnasium.vector.SyncVectorEnv([Steps] * 2))
    _, history = drive(vector_wrappers.TransformReward(env, lambda rewards: rewards / 10), 3)
    assert history[2].infos[0]["episode_return"] == 3
    assert history[2].rewards.tolist() == pytest.approx([0.1, 0.1])


def test_a_vector_environment_has_a_mode_of_autoreset():
    env = gymnasium.vector.SyncVectorEnv([Steps])
    env.metadata = {"autoreset_mode": "same_step"}  # Gymnasium's, or a word
    assert emulation.GymnasiumVectorPufferEnv(env).mode == "same_step"
    for env.metadata in ({"autoreset_mode": "never"}, {}):
        with pytest.raises(EnvError, match="autoreset_mode"):
            emulation.GymnasiumVectorPufferEnv(env)


# -- PettingZoo ------------------------------------------------------------------------------------


def test_agents_keep_their_slots_and_inactive_ones_are_not_valid():
    env, history = drive(Leavers(), 6)
    assert isinstance(env, emulation.PettingZooPufferEnv) and env.has_action_masks
    expected = {
        "valid": [[1, 1, 1], [0, 1, 1], [0, 0, 1], [1, 1, 1], [1, 1, 1], [0, 1, 1]],
        "observations": [[1, 1, 1], [0, 2, 2], [0, 0, 3], [0, 0, 0], [1, 1, 1], [0, 2, 2]],
        "rewards": [[1, 1, 1], [1, 1, 1], [0, 1, 1], [0, 0, 1], [1, 1, 1], [1, 1, 1]],
        "terminals": [[0, 0, 0], [1, 0, 0], [0, 1, 0], [1, 1, 0], [0, 0, 0], [1, 0, 0]],
        "truncations": [[0, 0, 0]] * 3 + [[0, 0, 1]] + [[0, 0, 0]] * 2}
    for name, rows in expected.items():
        assert [getattr(row, name).reshape(3).tolist() for row in history] == rows, name
    assert history[3].final_observations[2].item() == 4
    for row in history:
        assert row.action_masks.tolist() == [[1, 1 - valid, 1, 1] for valid in row.valid]
    # t of each agent's last step: 2, 3, 4
    returns = {"episode_return_a": 2, "episode_return_b": 3, "episode_return_c": 4}
    assert history[3].infos == [{"t": 3, "episode_return": 3, "episode_length": 4, **returns}]


class Blinking(Leavers):
    def step(self, actions):
        observations, *others = super().step({"c": 0, **actions})
        if self.t == 1:
            del observations["c"]
        return observations, *others


def test_an_agent_that_does_not_act_gets_its_reward():
    _, history = drive(Blinking(), 4)
    assert [row.valid[2] for row in history] == [0, 1, 1, 1]
    assert [row.rewards[2] for row in history] == [1, 1, 1, 1]
    assert history[3].infos[0]["episode_return"] == 3


class Unfinished(Leavers):
    """The last agent is truncated without an observation, or leaves without a flag."""

    def __init__(self, flag):
        super().__init__()
        self.flag = flag

    def step(self, actions):
        observations, rewards, terminated, truncated, infos = super().step(actions)
        if truncated["c"]:
            del observations["c"]
            truncated["c"] = self.flag
        return observations, rewards, terminated, truncated, infos


@pytest.mark.parametrize("flag", [True, False])
def test_an_agent_without_a_final_observation_is_terminated(flag):
    _, history = drive(Unfinished(flag), 4)
    assert [row.terminals.reshape(3)[2] for row in history] == [0, 0, 0, 1]
    assert not any(row.truncations.any() for row in history)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("module", ["butterfly.knights_archers_zombies_v11", "classic.rps_v2"])
def test_a_wrapped_environment_is_a_valid_pettingzoo_environment(module):
    test = pytest.importorskip("pettingzoo.test", reason="requirements/extras.txt")
    module = importlib.import_module(f"pettingzoo.{module}")
    creator = getattr(module, "parallel_env", None) or module.env
    test.parallel_api_test(emulation.PettingZooPufferEnv(env_creator=creator), num_cycles=50)
    test.parallel_seed_test(lambda: emulation.PettingZooPufferEnv(env_creator=creator), num_cycles=20)


def test_stepping_past_pettingzoos_checks_changes_nothing():
    kaz = pytest.importorskip("pettingzoo.butterfly.knights_archers_zombies_v11",
                              reason="requirements/extras.txt")
    options = {"max_cycles": 300, "spawn_delay": 4, "line_death": True}
    slow, quick = (emulation.PettingZooPufferEnv(kaz.parallel_env(**options)) for _ in range(2))
    assert type(quick._unguarded_env.aec_env) is kaz.raw_env is not type(quick.env.aec_env)
    slow._unguarded_env = slow.env
    actions = np.random.default_rng(0).integers(0, 6, (300, 4, 1))
    history, expected = (drive(env, 300, actions)[1] for env in (quick, slow))
    for row, expected_row in zip(history, expected, strict=True):
        for name, array in vars(expected_row).items():
            np.testing.assert_array_equal(getattr(row, name), array, err_msg=name)
    assert any(row.rewards.any() for row in history) and not all(row.valid.all() for row in history)


@pytest.mark.filterwarnings("ignore")
def test_turn_based_games_are_converted():
    tictactoe = pytest.importorskip("pettingzoo.classic.tictactoe_v3",
                                    reason="requirements/extras.txt")
    rng, ends = np.random.default_rng(0), []
    with vector.make(tictactoe.raw_env, 1, "serial") as vecenv:
        vecenv.reset(seed=0)
        for _ in range(60):
            _, rewards, *_, infos = vecenv.step(small_envs.allowed_actions(vecenv, rng)[:, 0])
            assert vecenv.storage.valid[-1].tolist() == [1, 1]
            assert sorted(rewards.tolist()) in ([-1, 1], [0, 0])
            ends += infos
    assert ends and all(5 <= info["episode_length"] <= 9 and info["episode_return"] == 0
                        for info in ends)


# -- PufferEnv -------------------------------------------------------------------------------------


def test_a_puffer_env_works_alone_and_in_memory_that_is_given():
    rows = new_rows(Counters(4))
    env = Counters(4, buf=rows)
    first = env.reset(seed=0)[0][:, 0].copy()
    _, rewards, terminals, _, infos = env.step(np.arange(4))
    assert rewards.tolist() == [0, 1, 2, 3] and not terminals.any() and infos == []
    assert (rows.observations[:, 0] == first + np.arange(4)).all() and env.action_space.shape == (4,)


def test_a_puffer_env_writes_the_arrays_that_it_is_given():
    class Stale(Counters):
        def step(self, actions):
            self.observations = self.observations.copy()
            return super().step(actions)

    with pytest.raises(EnvError, match=r"Stale: step.*observations"):
        run_to_fault(Stale)


@pytest.mark.parametrize(("number", "value", "name"), [
    (slice(3, 4), [], "4 values"), (slice(1, 2), [np.ones(3)], "reward"),
    (slice(4, 5), [None], "info")])
def test_a_wrong_return_of_a_puffer_env_is_a_fault(number, value, name):
    class Wrong(Counters):
        def step(self, actions):
            returned = list(super().step(actions))
            returned[number] = value
            return tuple(returned)

    with pytest.raises(EnvError, match=f"Wrong.*{name}"):
        run_to_fault(Wrong)


def test_one_hot_and_plain_parts_hold_the_values():
    space = spaces.Dict({"n": spaces.Discrete(3, start=1),
                         "x": spaces.Box(-1, 1, (2,), np.float32)})
    env = declares(space)
    flat = FlatObservation(space).flatten({"n": 2, "x": np.array([0.5, -0.25], np.float32)})
    features, = models.MultiInputPolicy(env, hidden_size=8)._features(torch.from_numpy(flat[None]))
    assert features.tolist() == [[0, 1, 0, 0.5, -0.25]]
    plain = SimpleNamespace(single_observation_space=env.single_observation_space)
    assert not models.wants_encoding(plain)
