"""Emulation: flattening and unflattening changes nothing, and wrapped environments pass their libraries'
checkers."""

import contextlib
import warnings
from types import SimpleNamespace

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.utils.env_checker import check_env
from hypothesis import given, settings
from hypothesis import strategies as st

import configuration
import emulation
import vector
from emulation import (
    FlatAction,
    FlatObservation,
    GymnasiumPufferEnv,
    GymnasiumVectorPufferEnv,
    PettingZooPufferEnv,
    PufferEnv,
    nativize_dtype,
    nativize_tensor,
    new_rows,
    wrap,
)
from flat_spaces import encode_text

# --------------------------------------------------------------------------------------------------
# Spaces

BOX_DTYPES = [
    np.bool_,
    np.uint8,
    np.int8,
    np.uint16,
    np.int16,
    np.uint32,
    np.int32,
    np.int64,
    np.float16,
    np.float32,
    np.float64,
]


@st.composite
def boxes(draw):
    dtype = draw(st.sampled_from(BOX_DTYPES))
    shape = tuple(draw(st.lists(st.integers(1, 5), max_size=3)))
    low, high = ((-np.inf, np.inf) if np.issubdtype(dtype, np.floating)
                 else (0, 1 if dtype == np.bool_ else 100))
    return spaces.Box(low, high, shape, dtype)


leaves = st.one_of(
    boxes(),
    st.builds(lambda n, start: spaces.Discrete(n, start=start), st.integers(1, 100),
              st.integers(-5, 5)),
    st.builds(spaces.MultiDiscrete, st.lists(st.integers(1, 9), min_size=1, max_size=4)),
    st.builds(spaces.MultiBinary, st.integers(1, 9)),
    st.builds(lambda n: spaces.Text(n, min_length=0), st.integers(1, 12)),
)
keys = st.text(st.characters(codec="ascii", exclude_characters="\0"), max_size=4)
nested = st.recursive(
    leaves,
    lambda sub: st.one_of(
        st.dictionaries(keys, sub, max_size=4).map(spaces.Dict),
        st.lists(sub, max_size=4).map(spaces.Tuple)
    ),
    max_leaves=8,
)


def assert_same(space, a, b):
    if isinstance(space, spaces.Dict):
        assert list(a) == list(space.spaces) and set(b) == set(space.spaces)
        for key, sub in space.spaces.items():
            assert_same(sub, a[key], b[key])
    elif isinstance(space, spaces.Tuple):
        assert isinstance(a, tuple) and len(a) == len(b) == len(space.spaces)
        for sub, x, y in zip(space.spaces, a, b, strict=True):
            assert_same(sub, x, y)
    elif isinstance(space, spaces.Text):
        assert a == b
    else:
        assert a.dtype == b.dtype == space.dtype and a.shape == b.shape
        np.testing.assert_array_equal(a, b)


@settings(max_examples=300)
@given(nested, st.integers(0, 2**31))
def test_flatten_then_unflatten_is_the_identity(space, seed):
    layout = FlatObservation(space)
    space.seed(seed)
    value = space.sample()
    flat = layout.flatten(value)
    assert (flat.shape == layout.shape == layout.flat_space.shape
            and flat.dtype == layout.flat_space.dtype)
    assert layout.flat_space.contains(flat)
    assert_same(space, layout.unflatten(flat), value)


@settings(max_examples=150)
@given(nested, st.integers(0, 2**31))
def test_views_in_numpy_and_torch_hold_the_fields(space, seed):
    layout = FlatObservation(space)
    space.seed(seed)
    values = [space.sample() for _ in range(3)]
    flat = np.stack([layout.flatten(value) for value in values])
    fields = nativize_tensor(torch.from_numpy(flat.copy()), nativize_dtype(layout.dtype))
    for i, value in enumerate(values):
        record = flat[i].view(layout.dtype)
        for keys, names, leaf in layout.leaves:
            part, tensor, original = record, fields, value
            for key, name in zip(keys, names, strict=True):
                part, tensor, original = part[name], tensor[name], original[key]
            if isinstance(leaf, spaces.Text):
                original = encode_text(original, leaf.max_length)
            if names:
                part, tensor = part[0], tensor
            np.testing.assert_array_equal(np.reshape(part, np.shape(original)), original)
            np.testing.assert_array_equal(tensor[i].numpy().reshape(np.shape(original)), original)


def test_a_huge_box_among_small_ones():
    space = spaces.Dict({"image": spaces.Box(0, 255, (512, 512, 3), np.uint8),
                         "x": spaces.Box(-1, 1, (), np.float64)})
    layout = FlatObservation(space)
    value = space.sample()
    assert_same(space, layout.unflatten(layout.flatten(value)), value)


@settings(max_examples=200)
@given(
    st.integers(0, 2**31),
    st.recursive(
        st.one_of(
            st.builds(lambda n, start: spaces.Discrete(n, start=start), st.integers(1, 9),
                      st.integers(-5, 5)),
            st.builds(spaces.MultiDiscrete, st.lists(st.integers(1, 9), min_size=1, max_size=4)),
            st.builds(spaces.MultiBinary, st.integers(1, 9)),
            st.builds(lambda low, n: spaces.Box(low, low + n, (2, 2), np.int16), st.integers(-9, 9),
                      st.integers(0, 9)),
        ),
        lambda sub: st.one_of(
            st.dictionaries(keys, sub, min_size=1, max_size=3).map(spaces.Dict),
            st.lists(sub, min_size=1, max_size=3).map(spaces.Tuple),
        ),
        max_leaves=6,
    ),
)
def test_discrete_actions_there_and_back(seed, space):
    layout = FlatAction(space)
    space.seed(seed)
    action = space.sample()
    row = layout.flatten(action)
    assert row.dtype == np.int32 and ((row >= 0) & (row < layout.heads)).all()
    back = layout.unflatten(row)
    assert space.contains(back)
    np.testing.assert_array_equal(layout.flatten(back), row)


def test_continuous_actions_are_clipped_where_the_environment_is():
    space = spaces.Dict({"a": spaces.Box(-2, 1, (2,), np.float32),
                         "b": spaces.Box(0, 0.1, (), np.float64)})
    layout = FlatAction(space)
    action = layout.unflatten(np.array([-9, 0.5, 9], np.float32))
    assert space.contains(action)
    np.testing.assert_array_equal(action["a"], np.array([-2, 0.5], np.float32))
    assert action["b"] == 0.1 and layout.heads == []


@pytest.mark.parametrize(
    "space, message",
    [
        (spaces.Dict({"a": spaces.Discrete(2), "b": spaces.Box(-1, 1, (1,))}),
         "mixes discrete and continuous"),
        (spaces.Box(-(2**40), 2**40, (1,), np.int64), "too many values"),
        (spaces.Text(3), "policies act in"),
        (spaces.Dict({}), "empty"),
    ],
)
def test_action_spaces_that_cannot_be(space, message):
    with pytest.raises((TypeError, ValueError), match=message):
        FlatAction(space)


def test_an_observation_space_that_cannot_be():
    with pytest.raises(TypeError, match="cannot be made flat"):
        FlatObservation(spaces.Dict({"a": spaces.Sequence(spaces.Discrete(2))}))


# --------------------------------------------------------------------------------------------------
# Gymnasium


class Nested(gymnasium.Env):
    """Structured observations and actions; rewards 1, truncated after `limit`
    steps, terminated at `end`."""

    observation_space = spaces.Dict(
        {
            "step": spaces.Discrete(100),
            "grid": spaces.Box(0, 9, (2, 3), np.uint8),
            "pair": spaces.Tuple([spaces.MultiBinary(2), spaces.Box(-5, 5, (2,), np.float32)]),
        }
    )
    action_space = spaces.Tuple([spaces.Discrete(3, start=-1), spaces.MultiDiscrete([2, 4])])

    def __init__(self, limit=5, end=None, mask=None):
        self.limit, self.end, self.mask = limit, end, mask

    def _observe(self):
        grid = self.np_random.integers(0, 10, (2, 3), np.uint8)
        return {"step": self.t, "grid": grid,
                "pair": (np.array([1, 0], np.int8), np.full(2, self.t / 20, np.float32))}

    def _info(self):
        return {"t": self.t, "nested": {"double": 2.0 * self.t}} | (
            {} if self.mask is None else {"action_mask": self.mask}
        )

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return self._observe(), self._info()

    def step(self, action):
        assert self.action_space.contains(action)
        self.t += 1
        return self._observe(), 1.0, self.t == self.end, self.t == self.limit, self._info()


@pytest.mark.parametrize(
    "creator",
    [
        lambda: gymnasium.make("CartPole-v1"),
        lambda: gymnasium.make("Pendulum-v1"),
        lambda: gymnasium.make("Blackjack-v1"),
        Nested,
    ],
)
def test_a_wrapped_environment_is_a_valid_gymnasium_environment(creator):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        check_env(GymnasiumPufferEnv(env_creator=creator), skip_render_check=True)


def test_obs_dtype_views_what_reset_and_step_return():
    env = GymnasiumPufferEnv(Nested())
    observation, _ = env.reset(seed=0)
    for t in range(3):
        record = observation.view(env.obs_dtype)
        assert record["step"].item() == t and record["grid"].shape == (1, 2, 3)
        np.testing.assert_array_equal(record["pair"]["f1"][0], np.full(2, t / 20, np.float32))
        observation, reward, terminated, truncated, info = env.step([0, 0, 0])
    assert reward == 1.0 and not terminated and not truncated and info["t"] == 3
    env = GymnasiumPufferEnv(env_creator=gymnasium.make, env_args=["CartPole-v1"],
                             env_kwargs={"max_episode_steps": 7})
    observation, _ = env.reset(seed=0)
    assert observation.view(env.obs_dtype).shape == (4,) and env.spec.max_episode_steps == 7


def drive(env, steps, action=0):
    """Step a wrapped environment as a vectorizer does; a list of copies of its row,
    with its infos, a step."""
    env = wrap(env)
    rows = new_rows(env, emulation.slots(env))
    view, history = env.views(rows, 0), []
    env.reset_into(view, 3)
    for _ in range(steps):
        for name in ("rewards", "terminals", "truncations"):
            getattr(rows, name)[:] = 0
        rows.valid[:] = 1
        rows.actions[:] = action
        infos = env.step_into(view)
        history.append(
            SimpleNamespace(
                infos=infos, **{name: None if array is None else array.copy()
                                for name, array in vars(rows).items()}
            )
        )
    return env, history


def test_truncated_episodes_keep_their_final_observation_and_restart():
    env, history = drive(Nested(limit=5), 11)
    steps = [row.observations.view(env.obs_dtype)["step"].item() for row in history]
    assert steps == [1, 2, 3, 4, 0, 1, 2, 3, 4, 0, 1]
    assert [row.truncations.item() for row in history] == [0, 0, 0, 0, 1] * 2 + [0]
    assert not any(row.terminals.item() for row in history)
    assert history[4].final_observations.view(env.obs_dtype)["step"].item() == 5
    assert [row.infos for row in history if row.infos] == [
        [{"t": 5.0, "nested/double": 10.0, "episode_return": 5.0, "episode_length": 5.0}]
    ] * 2


def test_terminated_episodes_are_no_truncations():
    _, history = drive(Nested(limit=9, end=2), 4)
    assert [row.terminals.item() for row in history] == [0, 1, 0, 1] and not any(
        row.truncations.item() for row in history
    )


def test_action_masks_come_from_the_info():
    mask = (np.array([1, 0, 1], np.int8),
            (np.array([1, 1], np.int8), np.array([0, 0, 0, 1], np.int8)))
    with pytest.raises(ValueError, match="entries"):
        drive(Nested(mask=np.ones(3, np.int8)), 1)
    env, history = drive(Nested(mask=np.concatenate([mask[0], *mask[1]])), 1)
    assert (env.has_action_masks
            and history[0].action_masks.tolist() == [[1, 0, 1, 1, 1, 0, 0, 0, 1]])
    assert not wrap(Nested()).has_action_masks
    np.testing.assert_array_equal(drive(Nested(mask=mask), 1)[1][0].action_masks,
                                  history[0].action_masks)


class MaskedByMethod(gymnasium.Env):
    """As sb3-contrib wants it: only the action of the number of the step is allowed."""

    observation_space, action_space = spaces.Box(0, 9, (1,), np.float32), spaces.Discrete(4)

    def reset(self, *, seed=None, options=None):
        self.t = 0
        return np.zeros(1, np.float32), {}

    def step(self, action):
        assert action == self.t
        self.t += 1
        return np.zeros(1, np.float32), 1.0, self.t == 3, False, {}

    def action_masks(self):
        assert self.t < 3, "asked after the last step"
        return np.arange(4) == self.t


def test_action_masks_come_from_a_method_also_through_wrappers():
    env = wrap(gymnasium.wrappers.TimeLimit(MaskedByMethod(), 100))
    rows, seen = new_rows(env, 1), []
    view = env.views(rows, 0)
    env.reset_into(view, 3)
    for _ in range(5):
        seen.append(rows.action_masks[0].tolist())
        rows.actions[:] = rows.action_masks.argmax()
        env.step_into(view)
    assert seen == np.eye(4, dtype=int)[[0, 1, 2, 0, 1]].tolist()


def test_a_method_around_an_environment_goes_before_its_info():
    class Around(gymnasium.Wrapper):
        def action_masks(self):
            return np.array([0, 0, 1, 1], bool)

    env = wrap(Around(gymnasium.make("Taxi-v4")))
    with pytest.raises(ValueError, match="4 entries, the action space has 6"):
        env.reset_into(env.views(new_rows(env, 1), 0), 3)


@pytest.mark.parametrize(("mask", "text"), [
    ({"action_masks": np.ones(4)}, 'has "action_masks"; the mask'),
    ({"action_mask": np.array([0, -1e9, 0, 0])}, "has a -1000000000.0; expected 1"),
])
def test_a_first_mask_that_is_none_is_a_fault(mask, text):
    class Odd(MaskedByMethod):
        action_masks = None

        def reset(self, *, seed=None, options=None):
            return super().reset()[0], mask

    with pytest.raises(ValueError, match=text):
        drive(Odd(), 1)


def test_a_vector_of_environments_with_such_a_method_is_refused():
    env = wrap(gymnasium.vector.SyncVectorEnv([MaskedByMethod] * 2))
    with pytest.raises(ValueError, match="asked of single environments only"):
        _ = env.has_action_masks


def test_a_multidiscrete_mask_may_be_a_list_of_lists():
    action, target = emulation.FlatAction(spaces.MultiDiscrete([2, 3])), np.zeros(5, np.uint8)
    for mask in ([[1, 0], [0, 1, 1]], ([1, 0], [0, 1, 1]), [1, 0, 0, 1, 1]):
        action.write_mask(target, mask)
        assert target.tolist() == [1, 0, 0, 1, 1]


class LateMask(MaskedByMethod):
    action_masks = None

    def __init__(self, first):
        self.first = first  # step with a mask

    def step(self, action):
        self.t += 1
        info = {"action_mask": np.ones(4)} if self.t == self.first else {}
        return np.zeros(1, np.float32), 0.0, self.t == 5, False, info


@pytest.mark.parametrize("backend", ["serial", "multiprocessing"])
@pytest.mark.parametrize("first", [1, 3])
def test_a_mask_that_begins_after_the_reset_is_a_fault(backend, first):
    with (pytest.raises((ValueError, vector.WorkerError), match=r"reset\(\) gave none"),
          vector.make(lambda **_: LateMask(first), num_envs=2, backend=backend) as vecenv):
        vecenv.reset()
        for _ in range(5):
            vecenv.step(np.zeros((2, 1), np.int32))


@pytest.mark.parametrize(
    "space, mask, expected",
    [
        # A Dict space sorts its keys: attack comes first.
        (spaces.Dict({"move": spaces.Discrete(4), "attack": spaces.Discrete(2)}),
         {"move": [0, 0, 0, 1], "attack": [0, 1]}, [0, 1, 0, 0, 0, 1]),
        (spaces.MultiDiscrete([2, 3]), ([1, 0], [0, 0, 0]), [1, 0, 1, 1, 1]),
        (spaces.MultiDiscrete([2, 3]), [0, 0, 0, 2, 0], [1, 1, 0, 1, 0]),
        (spaces.MultiBinary(2), ([1, 0], [0, 1]), [1, 0, 0, 1]),
        (spaces.Discrete(3), [0, 0, 0], [1, 1, 1]),
        (spaces.Discrete(3), None, [1, 1, 1]),
    ],
)
def test_action_masks_go_where_their_heads_are(space, mask, expected):
    target = np.zeros(len(expected), np.uint8)
    FlatAction(space).write_mask(target, mask)
    assert target.tolist() == expected


def test_a_later_info_may_have_no_mask():
    class Once(Nested):
        def _info(self):
            return super()._info() if self.t == 0 else {}

    mask = [1, 0, 1, 1, 1, 0, 0, 0, 1]
    once = lambda: Once(limit=2, mask=np.array(mask))  # noqa: E731
    sync = gymnasium.vector.SyncVectorEnv([once] * 2,
                                          autoreset_mode=gymnasium.vector.AutoresetMode.DISABLED)
    for env in (once(), sync):
        with pytest.warns(UserWarning, match="a later step or reset gives none, so every action counts as allowed"):
            _, history = drive(env, 2)
        assert [row.action_masks[-1].tolist() for row in history] == [[1] * 9, mask]


class Broken(gymnasium.Env):
    observation_space = spaces.Dict({"a": spaces.Tuple([spaces.Box(0, 1, (2,), np.float32)]),
                                     "b": spaces.Discrete(3)})
    action_space = spaces.Discrete(2)

    def __init__(self, value, at="reset"):
        self.value, self.at = value, at

    def _observe(self, call):
        return self.value if call == self.at else {"a": (np.zeros(2, np.float32),), "b": 1}

    def reset(self, *, seed=None, options=None):
        return self._observe("reset"), {}

    def step(self, action):
        return self._observe("step"), 0.0, False, False, {}


@pytest.mark.parametrize("at", ["reset", "step"])
@pytest.mark.parametrize(
    "value, message",
    [
        ({"a": (np.zeros(2, np.float32),)}, r"keys \['a', 'b'\], got keys \['a'\]"),
        ({"a": (np.zeros(3, np.float32),), "b": 0},
         r"\['a'\]\[0\].*shape \(2,\), got shape \(3,\)"),
        ({"a": (np.array([0, 7], np.float32),), "b": 0},
         r"\['a'\]\[0\].*element \(1,\) is 7.0, expected 0.0 to 1.0"),
        ({"a": (np.array([0, np.nan], np.float32),), "b": 0}, r"element \(1,\) is nan"),
        ({"a": np.zeros(2, np.float32), "b": 0}, "expected a tuple of 1"),
        ({"a": (np.zeros(2, np.float32),), "b": 3}, r"\['b'\].*is 3, expected 0 to 2"),
        ({"a": (np.zeros(2, np.complex64),), "b": 0}, "expected dtype float32, got complex64"),
    ],
)
def test_the_first_step_finds_what_breaks_its_space(value, message, at):
    env = GymnasiumPufferEnv(Broken(value, at))
    with pytest.raises(ValueError, match=f"first {at}.*{message}"):
        env.reset()
        env.step(0)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_what_lies_a_hair_outside_its_bounds_is_warned_of_once(dtype):
    class Rounded(gymnasium.Env):
        observation_space, action_space = spaces.Box(0.0, 1.0, (2,), dtype), spaces.Discrete(2)
        seen = np.array([np.nextafter(dtype(1), dtype(2)), -np.finfo(dtype).tiny], dtype)

        def reset(self, *, seed=None, options=None):
            return self.seen, {}

        def step(self, action):
            return self.seen, 0.0, False, False, {}

    emulation.warn_once.cache_clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            env = GymnasiumPufferEnv(Rounded())
            assert (np.array_equal(env.reset()[0], Rounded.seen)
                    and np.array_equal(env.step(0)[0], Rounded.seen))
    assert ["a hair outside its bounds" in str(warning.message) for warning in caught] == [True, True], "reset and step"
    Rounded.seen = np.array([1.001, 0], dtype)
    with pytest.raises(emulation.Fault, match=r"element \(0,\) is 1.001.*expected 0.0 to 1.0"):
        GymnasiumPufferEnv(Rounded()).reset()


@pytest.mark.parametrize("reward", [np.array([1.0, -0.5]), [1.0, -0.5]], ids=["array", "list"])
def test_several_rewards_are_told_the_way_out(reward):
    class Several(Broken):
        def step(self, action):
            observation, _, *rest = super().step(action)
            return observation, reward, *rest

    env = GymnasiumPufferEnv(Several(None, at="nowhere"))
    env.reset()
    with pytest.raises(emulation.Fault,
                       match=r"must be a number.*gymnasium.wrappers.TransformReward\(env, sum\)"):
        env.step(0)
    env = GymnasiumPufferEnv(gymnasium.wrappers.TransformReward(Several(None, at="nowhere"), sum))
    env.reset()
    assert env.step(0)[1] == 0.5


class OldCounter:
    """Old Gym: reset gives the observation alone, step four values, seed() is a method."""

    observation_space = spaces.Box(0, 100, (1,), np.float32)
    action_space = spaces.Discrete(2)
    seeded = None

    def seed(self, seed=None):
        self.seeded = seed

    def reset(self):
        self.t = 0
        return np.zeros(1, np.float32)

    def step(self, action):
        self.t += 1
        done = self.t == 4
        return np.full(1, self.t, np.float32), 1.0, done, {"TimeLimit.truncated": True} if done else {}


def test_old_gym_environments_are_converted():
    old = OldCounter()
    env, history = drive(old, 5)
    assert old.seeded == 3 and isinstance(env.env, emulation.OldGym)
    assert [row.observations.item() for row in history] == [1, 2, 3, 0, 1]
    assert history[3].truncations.item() == 1 and history[3].terminals.item() == 0
    assert history[3].final_observations.item() == 4


def test_wrap_names_what_it_cannot_take():
    with pytest.raises(TypeError, match="is no environment"):
        wrap(3)


# --------------------------------------------------------------------------------------------------
# Gymnasium's vector environments, in their three autoreset modes


class Timed(gymnasium.Env):
    """Observation t, reward 1, truncated at 3 and, where told, terminated at 2."""

    observation_space = spaces.Box(0, 100, (1,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, end=None):
        self.end = end

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.t += 1
        return np.full(1, self.t, np.float32), 1.0, self.t == self.end, self.t == 3, {"t": self.t}


@pytest.mark.parametrize("mode", list(gymnasium.vector.AutoresetMode))
def test_vector_environments_in_every_autoreset_mode(mode):
    env = gymnasium.vector.SyncVectorEnv([Timed, lambda: Timed(2)], autoreset_mode=mode)
    env, history = drive(env, 8)
    assert isinstance(env, GymnasiumVectorPufferEnv)
    column = lambda name, agent: [float(getattr(row, name)[agent].item()) for row in history]  # noqa: E731
    if mode == gymnasium.vector.AutoresetMode.NEXT_STEP:
        assert column("observations", 0) == [1, 2, 3, 0, 1, 2, 3, 0] and column("observations", 1) == [
            1,
            2,
            0,
            1,
            2,
            0,
            1,
            2,
        ]
        assert column("truncations", 0) == [0, 0, 1, 0, 0, 0, 1, 0] and column("terminals", 1) == [
            0,
            1,
            0,
            0,
            1,
            0,
            0,
            1,
        ]
        assert (column("valid", 0) == [1, 1, 0, 1, 1, 1, 0, 1]
                and column("valid", 1) == [1, 0, 1, 1, 0, 1, 1, 0])
        assert column("rewards", 0) == [1, 1, 1, 0, 1, 1, 1, 0]
    else:
        assert (column("observations", 0) == [1, 2, 0] * 2 + [1, 2]
                and column("observations", 1) == [1, 0] * 4)
        assert (column("truncations", 0) == [0, 0, 1] * 2 + [0, 0]
                and column("terminals", 1) == [0, 1] * 4)
        assert all(column("valid", agent) == [1] * 8 for agent in (0, 1))
    assert history[2].final_observations[0].item() == 3
    infos = [info for row in history for info in row.infos]
    assert {"t": 3.0, "episode_return": 3.0, "episode_length": 3} in infos
    assert {"t": 2.0, "episode_return": 2.0, "episode_length": 2} in infos
    assert len(infos) == (5 if mode == gymnasium.vector.AutoresetMode.NEXT_STEP else 6)


def test_infos_in_a_list_are_those_of_a_dict():
    """Masks, last observations and what is logged, nested too."""
    found = []
    for wrapper in (lambda env: env, gymnasium.wrappers.vector.DictInfoToList):
        for mode in gymnasium.vector.AutoresetMode:
            sync = gymnasium.vector.SyncVectorEnv([MaskedVectorPart, MaskedVectorPart], autoreset_mode=mode)
            _, history = drive(wrapper(gymnasium.wrappers.vector.RecordEpisodeStatistics(sync)), 8)
            infos = [{key: value for key, value in info.items() if key != "episode/t"} for row in history
                     for info in row.infos]
            assert infos[0]["episode/r"] == infos[0]["episode_return"] == 3 and infos[0]["t"] == 3
            found.append([infos, *([getattr(row, name).tolist() for row in history]
                                   for name in ("observations", "action_masks", "final_observations", "valid"))])
    assert found[:3] == found[3:]


class MaskedVectorPart(Timed):
    def reset(self, seed=None, options=None):
        observation, _ = super().reset(seed=seed)
        return observation, {"action_mask": np.array([1, 0], np.int8)}

    def step(self, action):
        *result, info = super().step(action)
        return *result, {**info, "action_mask": np.array([self.t % 2, 1], np.int8)}


def test_the_return_of_a_vector_environment_is_the_recorded_one():
    """As with wrappers of single environments: that of the rewards before others changed them."""
    env = gymnasium.wrappers.vector.RecordEpisodeStatistics(gymnasium.vector.SyncVectorEnv([Timed] * 2))
    _, history = drive(gymnasium.wrappers.vector.TransformReward(env, lambda rewards: rewards / 10), 3)
    assert history[2].infos[0]["episode_return"] == 3 and history[2].rewards.tolist() == pytest.approx([0.1, 0.1])



@pytest.mark.parametrize("wrap_in", [
    lambda env: gymnasium.wrappers.vector.TransformObservation(env, lambda seen: seen[:, :1]),
    lambda env: gymnasium.wrappers.vector.TransformObservation(env, lambda seen: seen.reshape(2, 2, 1)),
    lambda env: gymnasium.wrappers.vector.TransformObservation(env, lambda seen: seen / 255),
    lambda env: gymnasium.wrappers.vector.TransformObservation(
        env, lambda seen: seen[:, :1], observation_space=spaces.Box(0, 255, (2, 1), np.uint8)),
    lambda env: gymnasium.wrappers.vector.TransformReward(env, np.sum)])
def test_what_a_vector_wrapper_returns_fits_what_it_declares(wrap_in):
    env = wrap_in(gymnasium.vector.SyncVectorEnv([Returns] * 2))
    with pytest.raises(emulation.Fault, match=r"of the first (reset|step)\(\)"), vector.make(lambda: env) as vecenv:
        vecenv.reset()
        vecenv.step(np.zeros(2, np.int32))


def test_a_wrapper_without_its_package_is_told_in_a_sentence():
    def make():  # as RecordVideo without moviepy
        raise gymnasium.error.DependencyNotInstalled("MoviePy is not installed")

    with pytest.raises(SystemExit, match=r"^pufferl: MoviePy is not installed"), configuration.said_by("pufferl"):
        vector.make(make)


class Unsaid(gymnasium.vector.VectorEnv):
    """Two copies whose episodes take three steps, by numpy; `final`: what the info of a last step has."""

    num_envs, single_observation_space, single_action_space = 2, spaces.Box(0, 9, (1,)), spaces.Discrete(2)

    def __init__(self, final, **metadata):
        self.final, self.metadata = final, metadata

    def reset(self, *, seed=None, options=None):
        self.t = 0
        return np.zeros((2, 1), np.float32), {}

    def step(self, actions):
        self.t += 1
        done, seen = np.full(2, self.t % 3 == 0), np.full((2, 1), self.t % 3, np.float32)
        return seen, np.ones(2), done, np.zeros(2, bool), {self.final: seen} if done.all() and self.final else {}


def test_a_vector_environment_says_its_mode_of_autoreset():
    """As Gymnasium does, or in a word."""
    assert GymnasiumVectorPufferEnv(Unsaid(None, autoreset_mode="same_step")).mode == "same_step"
    with pytest.raises(ValueError, match="has the mode of autoreset 'never': set its metadata"):
        GymnasiumVectorPufferEnv(Unsaid(None, autoreset_mode="never"))
    with pytest.warns(UserWarning, match="does not say its mode of autoreset, and next_step is assumed"):
        drive(Unsaid(None), 4)
    with pytest.raises(Exception, match="does not say its mode: set its metadata"):
        drive(Unsaid("final_obs"), 4)


# --------------------------------------------------------------------------------------------------
# PettingZoo


class Leavers:
    """Agent i leaves after i + 2 steps, the last one by truncation; observations
    are the step's number."""

    render_mode = None

    def __init__(self):
        self.metadata, self.possible_agents = {"name": "leavers"}, ["a", "b", "c"]
        self._observation_space = spaces.Box(0, 100, (1,), np.float32)
        self._action_space = spaces.Discrete(4)

    unwrapped = property(lambda self: self)
    observation_space = lambda self, agent: self._observation_space  # noqa: E731
    action_space = lambda self, agent: self._action_space  # noqa: E731

    def reset(self, seed=None, options=None):
        self.agents, self.t = list(self.possible_agents), 0
        return {a: np.zeros(1, np.float32) for a in self.agents}, {
            a: {"action_mask": np.array([1, 0, 1, 1])} for a in self.agents
        }

    def step(self, actions):
        assert set(actions) == set(self.agents)
        self.t += 1
        acted, gone = self.agents, {a: self.t == i + 2 for i, a in enumerate(self.possible_agents)}
        self.agents = [a for a in acted if not gone[a]]
        flags = {a: gone[a] and a != "c" for a in acted}, {a: gone[a] and a == "c" for a in acted}
        return (
            {a: np.full(1, self.t, np.float32) for a in acted},
            dict.fromkeys(acted, 1.0),
            *flags,
            {a: {"t": self.t, "action_mask": np.array([1, 0, 1, 1])} for a in acted},
        )


def test_masks_of_agents_that_begin_after_the_reset_are_a_fault():
    class Late(Leavers):
        def reset(self, seed=None, options=None):
            return super().reset()[0], {}

    with pytest.raises(ValueError, match=r"reset\(\) gave none"):
        drive(Late(), 1)


def test_agents_keep_their_slots_and_the_dead_are_masked_out():
    env, history = drive(Leavers(), 6)
    assert isinstance(env, PettingZooPufferEnv) and env.has_action_masks
    assert [row.valid.tolist() for row in history] == [[1, 1, 1], [0, 1, 1], [0, 0, 1], [1, 1, 1],
                                                       [1, 1, 1], [0, 1, 1]]
    assert [row.observations[:, 0].tolist() for row in history][:4] == [[1, 1, 1], [0, 2, 2],
                                                                        [0, 0, 3], [0, 0, 0]]
    assert [row.rewards.tolist() for row in history][:4] == [[1, 1, 1], [1, 1, 1],
                                                             [0, 1, 1], [0, 0, 1]]
    assert [row.terminals.tolist() for row in history][:4] == [[0, 0, 0], [1, 0, 0],
                                                               [0, 1, 0], [0, 0, 0]]
    assert (history[3].truncations.tolist() == [0, 0, 1]
            and history[3].final_observations[2].item() == 4)
    assert history[0].action_masks.tolist() == [[1, 0, 1, 1]] * 3
    assert history[3].infos == [{"t": 4.0, "episode_return": 3.0, "episode_length": 4}]


def test_an_agent_that_nobody_knew_of_is_named():
    class Guests(Leavers):
        def step(self, actions):
            observations, *rest = super().step(actions)
            self.agents = [*self.agents, "guest"]
            return {**observations, "guest": next(iter(observations.values()))}, *rest

    env = PettingZooPufferEnv(Guests())
    rows = new_rows(env, env.max_num_agents)
    view = env.views(rows, 0)
    env.reset_into(view)
    env._unchecked.clear()  # later than the first step
    with pytest.raises(emulation.Fault, match=r"the agent guest, who is not in possible_agents \("):
        env.step_into(view)


PARTS = {"observations": np.zeros(1, np.float32), "rewards": 1.0, "terminated": False,
         "truncated": False, "infos": {}}


@pytest.mark.parametrize("late", [0, 2])
@pytest.mark.parametrize(("part", "given", "text"), [
    ("infos", None,
     r"the infos of .* must be a dict with an entry for each agent, got None .* \{\} if there"),
    ("infos", {"a": None}, "in infos of .* the entry of a must be a dict, got None"),
    ("rewards", {"a": None}, "in rewards of .* the entry of a must be a number, got None"),
    ("rewards", {"a": np.ones(2)}, "in rewards of .* the entry of a must be a number, got array"),
    ("rewards", 1.0, "the rewards of .* must be a dict"),
    ("terminated", {"a": np.zeros(2)}, "in terminated of .* the entry of a must be a bool"),
    ("truncated", None, "the truncated of .* must be a dict"),
    ("observations", {"a": "x"}, "in observations of .* the entry of a breaks its space"),
])
def test_what_a_parallel_environment_returns_wrong_is_told(part, given, text, late):
    """At the first step, and later, when nothing is looked at beforehand."""
    class Wrong(Leavers):
        def step(self, actions):
            self.t += 1
            returned = {name: dict.fromkeys(self.agents, value) for name, value in PARTS.items()}
            return *(returned | ({part: given} if self.t > late else {})).values(),

    with vector.make(Wrong, 1, vector.Serial) as vecenv, pytest.raises(emulation.Fault, match=text):
        vecenv.reset()
        for _ in range(4):
            vecenv.step(np.zeros(3, np.int32))


@pytest.mark.parametrize(("change", "text"), [
    ({"reset": lambda self, seed=None: ({}, None), "agents": []},
     "the infos of the first reset.. must be a dict"),
    ({"reset": lambda self, seed=None: {}},
     r"first reset\(\) returned \{\} .*'s returns 2 dicts .*: obs.*, infos"),
    ({"reset": lambda self, seed=None: ({}, {}), "agents": []},
     "no agent is alive after reset.*its `agents` are "),
    ({"reset": lambda self, seed=None: ({}, {})},
     "after reset.. its `agents` must be the list of those who are alive"),
    ({"step": lambda self, actions: ({},) * 4},
     "the first step.* returned 4 values; .* 5 dicts .*: observations"),
])
def test_a_parallel_environment_that_is_none_is_told(change, text):
    kind = type("Odd", (Leavers,), change)
    with pytest.raises(emulation.Fault, match=text), vector.make(kind, 1, vector.Serial) as vecenv:
        vecenv.reset()
        vecenv.step(np.zeros(3, np.int32))


def test_agents_with_different_spaces_are_refused():
    env = Leavers()
    env.action_space = lambda agent: spaces.Discrete(ord(agent))
    with pytest.raises(TypeError, match=r"b has the spaces .* supersuit"):
        PettingZooPufferEnv(env)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("module", ["butterfly.knights_archers_zombies_v11", "classic.rps_v2"])
def test_a_wrapped_environment_is_a_valid_pettingzoo_environment(module):
    test = pytest.importorskip("pettingzoo.test",
                               reason="needs pettingzoo and pygame (requirements/extras.txt)")
    import importlib

    module = importlib.import_module(f"pettingzoo.{module}")
    creator = getattr(module, "parallel_env", None) or module.env
    test.parallel_api_test(PettingZooPufferEnv(env_creator=creator), num_cycles=50)
    test.parallel_seed_test(lambda: PettingZooPufferEnv(env_creator=creator), num_cycles=20)


def test_stepping_past_pettingzoos_checks_changes_nothing():
    kaz = pytest.importorskip("pettingzoo.butterfly.knights_archers_zombies_v11",
                              reason="needs pettingzoo and pygame (requirements/extras.txt)")
    options = {"max_cycles": 300, "spawn_delay": 4, "line_death": True, "render_mode": "rgb_array"}
    slow, quick = kaz.parallel_env(**options), PettingZooPufferEnv(kaz.parallel_env(**options))
    assert type(quick._quick.aec_env) is kaz.raw_env and type(quick.env.aec_env) is not kaz.raw_env
    rows, rng, rewarded, died = new_rows(quick, 4), np.random.default_rng(0), 0, False
    view = quick.views(rows, 0)
    observations, _ = slow.reset(seed=3)
    quick.reset_into(view, 3)
    while slow.agents:
        for slot, agent in enumerate(quick.possible_agents):
            assert rows.valid[slot] == (agent in slow.agents)
            if rows.valid[slot]:
                np.testing.assert_array_equal(rows.observations[slot], observations[agent])
        rows.actions[:, 0] = rng.integers(0, 6, 4)
        actions = {agent: rows.actions[quick.possible_agents.index(agent), 0]
                   for agent in slow.agents}
        observations, rewards, terminated, truncated, _ = slow.step(actions)
        rows.rewards[:], rows.terminals[:], rows.truncations[:] = 0, 0, 0
        quick.step_into(view)
        for agent in actions:
            slot = quick.possible_agents.index(agent)
            expected = rewards[agent], terminated[agent], truncated[agent]
            assert (rows.rewards[slot], rows.terminals[slot], rows.truncations[slot]) == expected
        rewarded, died = rewarded + sum(rewards.values()), died or len(slow.agents) in (1, 2, 3)
    assert rewarded and died
    assert quick.render().ndim == 3


@pytest.mark.filterwarnings("ignore")
def test_turn_based_games_are_converted():
    tictactoe = pytest.importorskip(
        "pettingzoo.classic.tictactoe_v3", reason="needs pettingzoo (requirements/extras.txt)"
    )
    env = wrap(tictactoe.raw_env())
    rows = new_rows(env, emulation.slots(env))
    view, rng, ends = env.views(rows, 0), np.random.default_rng(0), []
    env.reset_into(view, 0)
    for _ in range(60):
        rows.actions[:, 0] = [rng.choice(np.flatnonzero(mask)) for mask in rows.action_masks]
        rows.rewards[:] = 0
        ends += env.step_into(view)
        assert rows.valid.tolist() == [1, 1]
        if rows.rewards.any():
            assert sorted(rows.rewards.tolist()) == [-1, 1]
    assert ends and all(5 <= info["episode_length"] <= 9 and info["episode_return"] == 0
                        for info in ends)


# --------------------------------------------------------------------------------------------------
# PufferEnv


class Guess(PufferEnv):
    def __init__(self, num_agents=8, buf=None, seed=0):
        self.single_observation_space = spaces.Box(0, 1, (1,), np.float32)
        self.single_action_space = spaces.Discrete(2)
        self.num_agents = num_agents
        super().__init__(buf)
        self.rng = np.random.default_rng(seed)

    def reset(self, seed=None):
        self.observations[:, 0] = self.bits = self.rng.integers(0, 2, self.num_agents)
        return self.observations, []

    def step(self, actions):
        self.rewards[:], self.terminals[:] = actions == self.bits, True
        self.reset()
        return self.observations, self.rewards, self.terminals, self.truncations, [{"score": self.rewards.mean()}]


def test_a_puffer_env_works_alone_and_in_anothers_memory():
    env = Guess(4)
    observations, infos = env.reset()
    assert (observations.shape == (4, 1) and infos == [] and env.action_space.shape == (4,)
            and env.masks.all())
    _, rewards, terminals, _, infos = env.step(observations[:, 0])
    assert rewards.tolist() == [1, 1, 1, 1] and terminals.all() and infos == [{"score": 1.0}]
    rows = new_rows(env, 10)
    other = Guess(4, buf=rows)
    other.reset_into(other.views(rows, 3))
    other.step_into(other.views(rows, 3))
    assert (rows.terminals.tolist() == [0, 0, 0, 1, 1, 1, 1, 0, 0, 0]
            and np.shares_memory(other.rewards, rows.rewards))


class Keeps(PufferEnv):
    """PufferLib's manner with C code: it gets the arrays once, and writes
    and reads there for ever."""

    def __init__(self, num_agents=2, buf=None, seed=0, late=False):
        self.single_observation_space = spaces.Box(0, 255, (3,), np.uint8)
        self.single_action_space = spaces.Discrete(5)
        self.num_agents, self.late = num_agents, late
        super().__init__(buf)
        self.c = self.observations, self.actions, self.rewards, self.terminals, self.truncations

    def reset(self, seed=None):
        self.t = 0
        if not self.late:
            self.c[0][:] = 7
        return self.observations, []

    def step(self, actions):
        self.t += 1
        observations, actions, rewards, terminals, _ = self.c
        observations[:], rewards[:], terminals[:] = self.t, actions * 0.5, self.t % 3 == 0
        return self.observations, self.rewards, self.terminals, self.truncations, []


@pytest.mark.parametrize("late", [False, True])
def test_a_puffer_env_that_keeps_its_first_arrays_works_and_is_told(late):
    emulation.warn_once.cache_clear()
    with pytest.warns(UserWarning, match="Keeps writes into the arrays that it was made with") as caught, \
            vector.make(Keeps, 3, backend="serial", env_kwargs={"late": late}) as vecenv:
        assert vecenv.reset()[0].tolist() == [[0 if late else 7] * 3] * 6
        for t in range(1, 8):
            actions = np.arange(6) % 5
            observations, rewards, terminals, _, _ = vecenv.step(actions)
            assert (observations == t).all() and terminals.tolist() == [t % 3 == 0] * 6
            assert rewards.tolist() == (actions * 0.5).tolist()
    assert len(caught) == 1
    with vector.make(Guess, 3, backend="serial") as vecenv:
        vecenv.reset()
        vecenv.step(np.zeros(24, int))
        assert not any(env._keeps or env._unwatched for env in vecenv._envs.envs), (
            "one that writes where it is told to")


class Bandit(Keeps):
    """What is seen never changes, and the first reward comes late."""

    def __init__(self, num_agents=2, buf=None, seed=0, seen=0, keeps=True):
        super().__init__(num_agents, buf, seed)
        self.seen, self.keeps = seen, keeps
        self.observations[:] = seen

    def reset(self, seed=None):
        self.t = 0
        if not self.keeps:
            self.observations[:] = self.seen
        return self.observations, []

    def step(self, actions):
        self.t += 1
        rewards, read = (self.c[2], self.c[1]) if self.keeps else (self.rewards, actions)
        if self.t % 3 == 0:
            rewards[:] = read
        if not self.keeps:
            self.observations[:] = self.seen
        return self.observations, self.rewards, self.terminals, self.truncations, []


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("seen", [0, 5])
@pytest.mark.parametrize("keeps", [True, False])
def test_rewards_arrive_though_nothing_is_seen_to_change(seen, keeps):
    """Whichever arrays it writes into; only one that keeps its first ones is told."""
    emulation.warn_once.cache_clear()
    told = (pytest.warns(UserWarning, match="Bandit writes into the arrays") if keeps
            else contextlib.nullcontext())
    with told, vector.make(Bandit, 3, "serial", env_kwargs={"seen": seen, "keeps": keeps}) as vecenv:
        assert (vecenv.reset()[0] == seen).all()
        for t in range(1, 8):
            observations, rewards, _, _, _ = vecenv.step(np.arange(6) % 5)
            assert ((observations == seen).all()
                    and rewards.tolist() == [[0] * 6, [0, 1, 2, 3, 4, 0]][t % 3 == 0])
        assert all(env._keeps == keeps and "step" not in env._unwatched
                   for env in vecenv.envs if env.t)


@pytest.mark.parametrize("name", ["single_observation_space", "single_action_space", "num_agents"])
def test_a_puffer_env_says_what_it_lacks(name):
    class Lacking(PufferEnv):
        def __init__(self):
            for attribute, value in (
                ("single_observation_space", spaces.Box(0, 1, (1,))),
                ("num_agents", 1),
                ("single_action_space", spaces.Discrete(2)),
            ):
                if attribute != name:
                    setattr(self, attribute, value)
            super().__init__()

    with pytest.raises(AttributeError, match=f"must set self.{name}"):
        Lacking()


# --------------------------------------------------------------------------------------------------
# The network that reads structured observations


@pytest.mark.parametrize(
    "space",
    [
        spaces.Discrete(5, start=2),
        spaces.Box(0, 255, (7, 7, 3), np.uint8),
        spaces.Box(0, 255, (4, 40, 40), np.uint8),
        spaces.Box(0, 255, (70, 64, 3), np.uint8),
        spaces.Dict({"a": spaces.Tuple([spaces.MultiDiscrete([2, 3]),
                                        spaces.Box(-1, 1, (2, 2), np.float64)]),
                     "image": spaces.Box(0, 255, (7, 7, 3), np.uint8), "empty": spaces.Dict({})}),
    ],
)
def test_the_encoded_policy_reads_structured_observations(space):
    import models

    layout = FlatObservation(space)
    env = SimpleNamespace(single_observation_space=layout.flat_space,
                          env_single_observation_space=space,
                          single_action_space=spaces.Discrete(3))
    assert models.wants_encoding(env)
    policy = models.MinGRUWrapper(env, models.Encoded(env, hidden_size=8), hidden_size=8)
    observations = torch.from_numpy(
        np.stack([layout.flatten(space.sample()) for _ in range(6)]).reshape(2, 3, *layout.shape)
    )
    logits, value = policy(observations, policy.initial_state(3))
    assert logits.shape == (2, 3, 3) and value.shape == (2, 3, 1)
    value.sum().backward()
    assert all(torch.isfinite(p.grad).all() for p in policy.policy.encoder.parameters())


def test_one_hot_and_plain_parts_hold_the_values():
    import models

    space = spaces.Dict({"n": spaces.Discrete(3, start=1),
                         "x": spaces.Box(-1, 1, (2,), np.float32)})
    layout = FlatObservation(space)
    env = SimpleNamespace(single_observation_space=layout.flat_space,
                          env_single_observation_space=space,
                          single_action_space=spaces.Discrete(3))
    flat = layout.flatten({"n": 2, "x": np.array([0.5, -0.25], np.float32)})
    features, = models.Encoded(env, hidden_size=8)._features(torch.from_numpy(flat[None]))
    assert features.tolist() == [[0, 1, 0, 0.5, -0.25]]
    assert not models.wants_encoding(SimpleNamespace(single_observation_space=layout.flat_space))


class Returns(gymnasium.Env):
    """An environment that returns what it is told to."""

    observation_space, action_space = spaces.Box(0, 255, (2,), np.uint8), spaces.Discrete(2)

    def __init__(self, step=None, reset=None):
        seen = np.zeros(2, np.uint8)
        self.results = step or (seen, 0.0, False, False, {}), reset or (seen, {})

    def reset(self, seed=None, options=None):
        return self.results[1]

    def step(self, action):
        return self.results[0]


SEEN = np.zeros(2, np.uint8)


@pytest.mark.parametrize("done", [False, True])
@pytest.mark.parametrize(("given", "text"), [
    (lambda done: {"step": (SEEN, 0.0, done, False)},
     r"returned as its info, which comes last, False \(bool\)"),
    (lambda done: {"step": (SEEN, 0.0, done, None)},
     r"returned as its info, which comes last, None \(NoneType\)"),
    (lambda done: {"step": (SEEN, 0.0, done, False, None)},
     r"comes last, None .* \{\} if there is nothing"),
    (lambda done: {"reset": (SEEN, None)}, r"reset returned as its info, which comes last, None"),
    (lambda done: {"reset": (SEEN, 3, {})}, r"expected an array \(2,\), got .*; correct the space"),
    (lambda done: {"step": (SEEN.astype(np.float32), 0.0, done, False, {})},
     r"uint8, got float32; correct the space"),
])
def test_what_an_environment_returns_in_the_wrong_place_is_told(given, text, done):
    with pytest.raises(emulation.Fault, match=text), vector.make(lambda: Returns(**given(done))) as vecenv:
        vecenv.reset()
        vecenv.step(np.zeros(1, np.int32))


def test_a_later_info_that_is_none_is_told():
    env = Returns()
    with vector.make(lambda: env) as vecenv:
        vecenv.reset()
        for _ in range(3):
            vecenv.step(np.zeros(1, np.int32))
        env.results = (SEEN, 0.0, True, False, None), env.results[1]
        with pytest.raises(emulation.Fault,
                           match=r"last step of an episode returned as its info.*None"):
            vecenv.step(np.zeros(1, np.int32))


NOTHING = spaces.Box(-1, 1, (2, 0), np.float32)


@pytest.mark.parametrize("name", ["observation_space", "action_space"])
@pytest.mark.parametrize("space", [NOTHING, spaces.Tuple([spaces.Discrete(2), NOTHING]),
                                   spaces.Dict({"a": spaces.Dict({"none": NOTHING}), "b": spaces.Box(-1, 1, (1,))})])
@pytest.mark.parametrize("kind", [Returns, PufferEnv, gymnasium.vector.VectorEnv])
def test_a_space_without_numbers_is_refused(kind, name, space):
    def make():
        one, own = ("single_", kind.__init__) if kind is not Returns else ("", lambda self: None)
        found = {f"{one}observation_space": spaces.Box(0, 1, (1,)), f"{one}action_space": spaces.Discrete(2)}
        attributes = {**found, one + name: space, "num_agents": 1, "num_envs": 1}
        return type("Empty", (kind,), {**attributes, "__init__": own, "metadata": {"autoreset_mode": "disabled"},
                                       "reset": lambda self, **_: (np.zeros((1, 1)), {})})()

    if kind is PufferEnv and space is not NOTHING:
        pytest.skip("its spaces are no Dict and no Tuple")
    with pytest.raises(TypeError, match=r"\(2, 0\).*: holds no number"):
        vector.make(make)


@pytest.mark.parametrize("name", ["observation_space", "action_space"])
def test_an_environment_without_a_space_is_named(name):
    class NoSpace(gymnasium.Env):
        def reset(self, seed=None, options=None): ...

    other = {"observation_space": "action_space", "action_space": "observation_space"}[name]
    env = NoSpace()
    setattr(env, other, spaces.Discrete(2))
    with pytest.raises(emulation.Fault,
                       match=rf"NoSpace.* has no {name}; a Gymnasium environment declares both"):
        vector.make(lambda: env)
