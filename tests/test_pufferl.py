"""The trainer: resume, settings, custom losses and optimizers, what ends a run."""

import contextlib
import math
import re
import tracemalloc
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import reference
import torch
from small_envs import Walk
from trainers import ACTIONS, NETWORKS, learn, make_trainer, run_epochs

import kernels
import models
import pufferl
from errors import ConfigError, error_text
from tools import watch

pytestmark = pytest.mark.usefixtures("one_torch_thread")


SMALL = ["--train.horizon", "8", "--train.minibatch-size", "128", "--logger", "none"]


@pytest.fixture
def quick(monkeypatch):
    """Settings that are auto are measured for a moment."""
    monkeypatch.setattr(pufferl, "MEASURED_SECONDS", 0.0)


@pytest.fixture(scope="module")
def shared():
    """A trainer for what needs no training, or little."""
    trainer = make_trainer(norm_reward=True, log_interval=1e9)
    yield trainer
    trainer.release()


# -- resume


class Momentum(torch.optim.SGD):
    def __init__(self, parameters, lr):
        super().__init__(parameters, lr=lr, momentum=0.9)


def push(minibatch):
    return 100 * minibatch.values.mean()


RESUMED = {
    "muon": {"env_kwargs": {"max_steps": 30}, "replay_ratio": 1.3},
    "adam": {"env_kwargs": {"max_steps": 30}, "replay_ratio": 1.3, "optimizer": "adam"},
    "a script's optimizer": {"optimizer": Momentum},
    "a script's loss": {"loss": push},
    "masks": ACTIONS["masks"],
    "agents": {**ACTIONS["heads"], "norm_reward": True, "normalize": True, "total_timesteps": 3000},
    "lstm": {"policy": NETWORKS["lstm"]},
    "heap": {"env": "nmmo3", "num_envs": 2, "num_buffers": 1, "env_kwargs": {
        "num_agents": 32, "num_foes": 16, "width": 32, "height": 24, "villages": 2, "max_steps": 20}},
    "bfloat16": {"precision": "bfloat16"},
    "rnd": {"bonus": "rnd", "norm_reward": True, "env_kwargs": {"max_steps": 30}},
    "count": {"env": "squared", "bonus": "count", "env_kwargs": {"distance": 2}},
    "single steps": {"draw": "steps", "minibatch_size": 40, "policy": NETWORKS["feed-forward"]},
}


@pytest.mark.parametrize("settings", RESUMED.values(), ids=RESUMED)
def test_every_kind_of_run_resumes_bit_for_bit(tmp_path, settings):
    """And repeats bit for bit, although the allocator hands out other places."""
    trainer = make_trainer(**settings)
    whole = run_epochs(trainer, 4)
    trainer.release()
    shift = [np.empty(n) for n in range(1, 200, 7)]
    first = make_trainer(**settings)
    assert len(shift) and first.vecenv.storage.observations.ctypes.data % 256 == 0
    run_epochs(first, 2)
    first.save_checkpoint(tmp_path / "half.pt")
    first.release()
    second = make_trainer(**settings)
    second.load_checkpoint(tmp_path / "half.pt")
    assert second.epoch == 2 and second.global_step == first.global_step
    resumed = run_epochs(second, 2)
    second.release()
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


@pytest.mark.parametrize("optimizer", ["muon", "adam"])
def test_settings_that_changed_count_after_a_resume(tmp_path, capsys, optimizer):
    """They alone are printed."""
    first = make_trainer(optimizer=optimizer, momentum=0.9)
    run_epochs(first, 1)
    first.save_checkpoint(tmp_path / "half.pt")
    weights = [learn(first, 1)]
    for changed in ({"momentum": 0.5}, {"weight_decay": 0.1}):
        second = make_trainer(optimizer=optimizer, **{"momentum": 0.9, **changed})
        capsys.readouterr()
        second.load_checkpoint(tmp_path / "half.pt")
        printed = capsys.readouterr().out
        assert printed.count(" is now ") == 1 and "episodes" not in printed
        weights.append(learn(second, 1))
    assert not any(torch.equal(weights[0], others) for others in weights[1:])


@pytest.mark.usefixtures("quick")
def test_resume_auto_is_the_latest_run_or_a_new_one(tmp_path, capsys):
    options = ["--resume", "auto", "--data-dir", str(tmp_path)]
    for folder in (str(tmp_path), "none"):
        assert pufferl.load_config("squared", ["--resume", "auto", "--data-dir", folder])["resume"] is None
    for start in range(2):
        pufferl.main(["train", "squared", *options, *SMALL, "--env.num-envs", "64", "--train.total-timesteps",
                      str(1024 * (start + 1))])
        text = capsys.readouterr().out
        assert (f"resumed {tmp_path}" in text) == bool(start), text
    assert len(list(tmp_path.glob("squared_*"))) == 1


# -- from one epoch to the next


def test_evaluate_and_train_take_turns_until_the_trainer_is_closed(tmp_path):
    trainer = make_trainer(tmp_path)
    trainer.evaluate()
    trainer.evaluate()
    assert trainer.arena["steps"].tolist() == list(range(8, 16)), "a second rollout has other random words"
    trainer.train()
    assert trainer.global_step == trainer.batch_size
    with pytest.raises(RuntimeError):
        trainer.train()
    trainer.evaluate()
    trainer.close()
    with pytest.raises(RuntimeError):
        trainer.train()


@pytest.mark.parametrize("rollouts", [0, 1])
def test_a_trainer_that_learnt_nothing_closes(tmp_path, rollouts):
    trainer = make_trainer(tmp_path)
    for _ in range(rollouts):
        trainer.evaluate()
    assert Path(trainer.close()).exists() and (trainer.run_folder / "config.json").exists()
    assert trainer.vecenv.closed


@pytest.mark.parametrize("anneal", [True, False])
def test_schedules_follow_the_steps_and_an_assigned_rate_overrides_them(anneal):
    trainer = make_trainer(learning_rate=0.1, min_lr_ratio=0.2, ent_coef=0.01, prio_beta0=0.4, anneal_lr=anneal,
                           anneal_ent_coef=anneal, total_timesteps=192 * 5)
    for done in (0.0, 0.2, 0.4, 0.6):
        rate = trainer.learning_rate
        run_epochs(trainer, 1)
        assert rate == pytest.approx(reference.cosine_lr(done, 1, 0.1, 0.2) if anneal else 0.1)
        assert trainer.buffers.settings[kernels.ENT_COEF].item() == pytest.approx(0.01 * (1 - done) if anneal else 0.01)
        assert trainer.arena["beta"].item() == pytest.approx(0.4 + 0.6 * done)
    trainer.learning_rate = 0.0
    before = trainer.arena.flat("weights").clone()
    assert torch.equal(before, learn(trainer, 1))


def test_a_rate_in_the_settings_ends_an_override():
    trainer = make_trainer(learning_rate=0.1, anneal_lr=False)
    trainer.learning_rate = 0.3
    trainer.config["learning_rate"] = 0.2
    assert trainer.learning_rate == pytest.approx(0.2)
    trainer.evaluate()
    assert trainer.train()["learning_rate"] == pytest.approx(0.2)
    trainer.config["learning_rate"] = 0.2
    trainer.learning_rate = 0.3
    trainer.evaluate()
    assert trainer.train()["learning_rate"] == pytest.approx(0.3)
    trainer.close()


def test_entries_are_logged_once_and_rewards_as_they_were_before_clipping():
    trainer = make_trainer(reward_clip=0.1, env_kwargs={"max_steps": 5})
    trainer.logger, logs = mock.Mock(spec=pufferl.NoLogger()), []
    for _ in range(3):
        run_epochs(trainer, 1)
        logs.append(trainer.mean_and_log())
    entries = [call.args for call in trainer.logger.log.call_args_list]
    assert [step for _, step in entries] == [192, 384, 576]
    assert all(isinstance(value, int | float) for metrics, _ in entries for value in metrics.values())
    assert logs[-1]["environment/episode_return"] == 5
    trainer.release()


def test_nothing_is_allocated_after_the_first_epochs():
    """In one thread, because torch's profiler sees one thread's memory."""
    trainer = make_trainer(env="breakout", num_envs=256, horizon=64, minibatch_size=4096,
                           hidden_size=64, num_threads=1)
    run_epochs(trainer, 2)
    options = {"activities": [torch.profiler.ProfilerActivity.CPU], "profile_memory": True}
    with torch.profiler.profile(**options):  # its first use imports what it needs
        pass
    tracemalloc.start()
    with torch.profiler.profile(**options) as profile:
        trainer.evaluate()
        trainer.train()
        torch.empty(100_000)  # shows that the profiler sees allocations
    peak = tracemalloc.get_traced_memory()[1]  # numpy's and Python's
    tracemalloc.stop()
    events = profile.profiler.kineto_results.events()
    sizes = sorted(event.nbytes() for event in events if event.name() == "[memory]")
    assert sizes[-1] == 400_000, "the profiler saw no allocation"
    assert sizes[-2] < 65536
    assert peak < 10 * 65536  # the profiler's own events are in it
    trainer.release()


# -- settings that are assigned between epochs


def test_a_setting_that_would_do_nothing_cannot_be_assigned(shared):
    for name in shared.args["train"].keys() - set(pufferl.MUTABLE):
        shared.config[name] = shared.config[name]
        for assign in (shared.config.__setitem__, lambda key, value: shared.config.update({key: value})):
            with pytest.raises(ConfigError, match=rf"train\.{name}"):
                assign(name, 12345)


@pytest.mark.parametrize(("name", "value"), [
    ("learning_rate", "fast"), ("gamma", 1.5), ("total_timesteps", 0), ("clip_coef", None)])
def test_an_assigned_value_must_be_one_that_could_be_given(shared, name, value):
    before = dict(shared.config)
    with pytest.raises(ConfigError, match=name):
        shared.config[name] = value
    assert shared.config == before


def test_an_assigned_value_is_converted_and_saved(shared):
    shared.config["learning_rate"] = "0.25"  # as from a command line
    assert shared.config["learning_rate"] == 0.25
    shared.config["learning_rate"] = 0.0  # where a custom schedule ends
    shared.config |= {"gamma": 0.5}
    run_epochs(shared, 1)
    assert shared.reward_scale.gamma == shared.args["train"]["gamma"] == 0.5


def test_what_is_assigned_between_epochs_takes_effect(tmp_path):
    trainer = make_trainer(anneal_lr=False, total_timesteps=1000)
    run_epochs(trainer, 2)
    trainer.save_checkpoint(tmp_path / "half.pt")
    values = {"learning_rate": 0.1, "gamma": 0.2, "gae_lambda": 0.1, "vtrace_rho_clip": 0.5, "vtrace_c_clip": 0.5,
              "clip_coef": 0.001, "vf_coef": 0.0, "vf_clip_coef": 0.001, "ent_coef": 1.0, "prio_alpha": 1.0,
              "reward_clip": 0.1, "anneal_lr": True}
    weights, captured = {}, False
    for name in (None, *values):
        trainer.load_checkpoint(tmp_path / "half.pt")
        before = dict(trainer.config)
        trainer.engine.refresh = mock.Mock()  # what a GPU has captured with the old value
        if name is not None:
            trainer.config[name] = values[name]
        captured, before_that = name in pufferl.IN_GRAPHS, captured
        run_epochs(trainer, 2)
        assert trainer.engine.refresh.call_count == (captured or before_that)
        weights[name] = trainer.arena.flat("weights").clone()
        trainer.config.update({key: before[key] for key in values})
    trainer.load_checkpoint(tmp_path / "half.pt")
    assert torch.equal(learn(trainer), weights[None])
    assert not [name for name in values if torch.equal(weights[name], weights[None])]


# -- a loss and an optimizer of the user's


class Zeroes(torch.optim.SGD):
    def step(self):
        super().step()
        self.zero_grad()


class Centres(torch.optim.SGD):
    def step(self):
        for p in self.param_groups[0]["params"]:
            p.grad = p.grad - 0.0
        super().step()


class Replaces(torch.optim.SGD):
    def step(self):
        for p in self.param_groups[0]["params"]:
            p.data = p.data - self.param_groups[0]["lr"] * p.grad


def test_values_go_where_a_custom_loss_takes_them(capsys):
    trainer = make_trainer(loss=f"{__file__}:push", minibatch_size=192, max_minibatch_size=32, replay_ratio=1.0)
    assert "train.loss" in capsys.readouterr().err
    values = []
    for _ in range(15):
        trainer.evaluate()
        logs = trainer.train()
        values.append(trainer.buffers.values.mean().item())
        mean = trainer.buffers.new_values.mean().item()
        assert logs["custom_push_loss"] == pytest.approx(100 * mean, rel=1e-3, abs=1e-3)
    assert values[-1] < values[0] - 0.5
    trainer.release()


def test_what_a_custom_loss_gets():
    """The network's memory at the start, so that it can be run again; of squashed actions, the samples
    before the tanh with their log-probabilities; of single steps, T = 1."""
    gaps = []

    def leash(minibatch):
        with torch.no_grad():
            normal, _ = models.over_time(trainer.policy, minibatch.observations, minibatch.state)
        logprobs = minibatch.logits.log_prob(minibatch.actions).sum(-1).detach()
        gaps.append([(normal.loc - minibatch.logits.loc.detach()).abs().max(),
                     (logprobs - minibatch.logprobs).abs().max() if len(gaps) == 0 else 0])
        assert torch.equal(minibatch.returns, minibatch.advantages + minibatch.old_values)
        return 0 * minibatch.values.mean()

    trainer = make_trainer(**ACTIONS["squashed"], loss=leash)
    learn(trainer, 3)
    assert len(gaps) >= 9 and np.max(gaps) < 1e-4
    assert trainer.arena["initial_state/mingru"].abs().max() > 0.01
    lengths = []
    learn(make_trainer(policy=NETWORKS["tanh"], draw="steps", minibatch_size=60, loss=lambda minibatch: (
        lengths.append(len(minibatch.observations)) or 0 * minibatch.values.sum())), 1)
    assert set(lengths) == {1}


def test_a_loss_and_an_optimizer_given_as_objects_are_those_of_a_file():
    given = make_trainer(optimizer=Zeroes, loss=push)
    weights = learn(given)
    settings = given.args["train"]
    assert settings["optimizer"].endswith("test_pufferl.Zeroes") and settings["loss"].endswith("test_pufferl.push")
    by_file = make_trainer(optimizer=f"{__file__}:Zeroes", loss=f"{__file__}:push")
    torch.testing.assert_close(weights, learn(by_file))
    assert given.losses["custom_push_loss"] == pytest.approx(by_file.losses["custom_push_loss"])


def test_an_optimizer_may_write_weights_and_gradients_as_it_likes():
    expected = learn(make_trainer(optimizer=torch.optim.SGD, learning_rate=0.1))
    assert not torch.equal(expected, learn(make_trainer(), 0))
    for optimizer in (Zeroes, Centres, Replaces):
        weights = learn(make_trainer(optimizer=optimizer, learning_rate=0.1))
        torch.testing.assert_close(weights, expected, msg=optimizer.__name__)


class Groups(torch.optim.SGD):
    def __init__(self, params, lr, weight_decay=0.0):
        one, *others = params
        super().__init__([{"params": [one], "lr": lr / 10}, {"params": others}], lr, weight_decay=weight_decay)


def test_groups_of_an_optimizer_keep_their_ratio_and_get_this_runs_settings(tmp_path):
    trainer = make_trainer(optimizer=Groups, learning_rate=0.1, anneal_lr=False)
    learn(trainer, 1)
    assert [group["lr"] for group in trainer.optimizer.optimizer.param_groups] == pytest.approx([0.01, 0.1])
    trainer.save_checkpoint(tmp_path / "a.pt")
    again = make_trainer(optimizer=Groups, learning_rate=0.1, weight_decay=0.5)
    again.load_checkpoint(tmp_path / "a.pt")
    assert [group["weight_decay"] for group in again.optimizer.optimizer.param_groups] == [0.5, 0.5]


def test_an_advantage_in_other_numbers():
    weights = [learn(make_trainer(advantage=lambda args, ends, rewards, *_, kind=kind: kind(rewards)))
               for kind in (lambda rewards: rewards, lambda rewards: rewards.double().numpy())]
    torch.testing.assert_close(*weights)


# -- statistics


@pytest.mark.parametrize(("logs", "best", "weight", "environment"), [
    # the best weights are those of a hundred episodes or more
    ([{"score": 1.0, "n": 60}, {}, {"score": 3.0, "n": 60}], 2.0, 2, {"score": 2.0, "n": 120}),
    # of equal scores the newest: if one's gain is the other's loss, the mean of all is always 0
    ([{"score": 0.0, "n": 100}, {"score": 0.0, "n": 100}], 0.0, 1, {"score": 0.0, "n": 200}),
    ([{"score": 0.0, "n": 100}, {"score": -0.1, "n": 100}], 0.0, 0, {"score": -0.05, "n": 200}),
    # what is not in every log has a weight of its own
    ([{"score": 0.0, "n": 90}, {"score": 1.0, "success": 1.0, "n": 10}, {}, {"score": 1.0, "n": 100}], 1.0, 3,
     {"score": 110 / 200, "success": 1.0, "n": 200})])
def test_statistics_of_episodes(logs, best, weight, environment):
    """A network of one weight, the number of the log."""
    policy, statistics = torch.nn.Linear(1, 1, bias=False), pufferl.Statistics(1)
    for i, log in enumerate(logs):
        torch.nn.init.constant_(policy.weight, i)
        statistics.add_episodes([log], policy)
    assert statistics.best_score == best and statistics.best["weight"].item() == weight
    assert statistics.best_unsaved and statistics.environment == pytest.approx(environment)
    ranks = pufferl.Statistics(4)
    ranks.add_episodes(logs[::-1], policy)
    assert ranks.environment == pytest.approx(environment)


# -- what ends a run


def root(minibatch):
    """A finite loss whose gradient is not."""
    return (minibatch.values * 0).sum() ** 0.5


@pytest.mark.parametrize(("epochs", "settings", "broken", "name"), [
    (1, {"prio_beta0": 0.4}, math.nan, "rewards"), (0, {"prio_beta0": 0.0}, math.inf, "rewards"),
    (1, {"norm_reward": True}, math.inf, "rewards"), (0, {"loss": root}, 0.0, r"train\.loss"),
    (1, {"replay_ratio": 0.1}, math.nan, "rewards")])  # an epoch without minibatches
def test_what_is_not_finite_stops_the_run_and_leaves_the_weights(epochs, settings, broken, name):
    trainer = make_trainer(**settings)
    run_epochs(trainer, epochs)
    trainer.evaluate()
    trainer.storage["rewards"][3, 2] = broken
    before = trainer.arena.flat("weights").clone()
    with pytest.raises(FloatingPointError, match=name):
        trainer.train()
    assert torch.equal(trainer.arena.flat("weights"), before)
    trainer.release()


def test_an_infinite_observation_stops_the_run_before_it_is_a_moment():
    trainer = make_trainer(normalize=True)
    run_epochs(trainer, 1)
    trainer.evaluate()
    trainer.storage["observations"][3, 2, 1] = math.inf  # clipped after it is normalised
    with pytest.raises(FloatingPointError, match=r"(?s)observations not finite.*step 3.*agent 2"):
        trainer.train()
    assert all(tensor.isfinite().all() for tensor in trainer.policy.state_dict().values())
    trainer.release()


def test_batch_norms_see_no_batch_of_final_observations():
    trainer = make_trainer(policy=FeedForwardWithNorm, env_kwargs={"max_steps": 20})
    calls = set()  # (in training mode, of a whole buffer)
    trainer.policy.norm.register_forward_hook(
        lambda norm, inputs, _: calls.add((norm.training, len(inputs[0]) >= 12)))
    run_epochs(trainer, 4)
    trainer.release()
    assert calls == {(True, True), (False, False)}


class FeedForwardWithNorm(models.FeedForward):
    def __init__(self, env):
        super().__init__(env, 16)
        self.norm = torch.nn.BatchNorm1d(16)

    def encode_observations(self, observations, state=None):
        return self.norm(super().encode_observations(observations))


def test_masks_of_agents_that_are_not_valid_are_no_cause():
    """Such a mask may forbid everything: the log-probability is not finite, and never used."""
    trainer = make_trainer(env="masked")
    for broken in (0.0, math.nan):
        trainer.evaluate()
        trainer.storage["valid"][2, 1] = 0
        trainer.storage["action_masks"][2, 1] = 0
        trainer.buffers.logprobs[2, 1] = math.inf
        if math.isnan(broken):
            trainer.storage["rewards"][5, 2] = broken
            with pytest.raises(FloatingPointError, match="rewards"):
                trainer.train()
        else:
            assert all(map(math.isfinite, trainer.train().values()))
    trainer.release()


class Fails(Walk):
    def __init__(self, at=10):
        super().__init__()
        self.at, self.steps = at, 0

    def step(self, action):
        self.steps += 1
        if self.steps == self.at:
            raise ConnectionError("the simulator hung up")
        return super().step(action)


def test_an_error_in_an_environment_says_what_is_left_of_the_run(tmp_path):
    name = f"{__file__}:Fails"
    args = pufferl.load_config(name, [
        "--env.at", "400", "--train.replay-ratio", "1", "--train.gamma", "0.9",
        "--train.checkpoint-interval", "1", "--vec.backend", "serial", "--logger", "none",
        "--train.total-timesteps", "30_000", "--data-dir", str(tmp_path)])
    with pytest.raises(ConnectionError) as failed:
        pufferl.train(name, args)
    assert re.search("checkpoint.*--resume.*test_pufferl_", error_text(failed.value))


# -- what the commands make of a network


def test_a_convolution_is_worth_threads():
    """Its weights work on every cell."""
    trainer = make_trainer(env="minesweeper", policy=lambda env: models.Board(env, hidden_size=8))
    assert trainer.engine._count_torch_threads(4096) == trainer.vecenv.num_threads
    trainer.release()


@contextlib.contextmanager
def loaded(name, *options, **changes):
    """The network that a command line makes."""
    args = pufferl.load_config(name, ["--env.num-envs", "2", *options])
    for key, value in changes.items():
        args[key] = {**args[key], **value} if isinstance(value, dict) else value
    with contextlib.closing(pufferl.load_env(name, args)) as vecenv:
        yield pufferl.load_policy(args, vecenv, name)


@pytest.mark.parametrize("options", [[], ["--policy.name", "feed-forward"], ["--policy.name", "separate"],
                                     ["--rnn.name", "lstm"]])
def test_continuous_actions_begin_with_the_deviation_that_is_set(options):
    with loaded("pendulum", "--policy.log-std-init", "-2", *options) as policy:
        found = [weight for name, weight in policy.named_parameters() if name.endswith("log_std")]
        assert len(found) == 1 and found[0].tolist() == [-2.0]


@pytest.mark.usefixtures("quick")
def test_a_tanh_is_saved_with_the_weights(tmp_path):
    options = [*SMALL, "--env.num-envs", "16", "--rnn.num-layers", "2", "--data-dir", str(tmp_path)]

    def train(steps, *more):
        more = ["--train.total-timesteps", str(steps), *more]
        return pufferl.train("pendulum", pufferl.load_config("pendulum", [*options, *more]))

    def load(path, squash):
        return loaded("pendulum", load_model_path=str(path), train={"norm_obs": False},
                      policy={"squash": squash, "hidden_size": 64}, rnn={"num_layers": 2})

    trainer = train(256, "--policy.squash", "tanh")
    folder = str(trainer.run_folder)
    assert trainer.engine.name == "compiled"
    resumed = train(512, "--resume", folder)
    assert resumed.global_step == 512 and models.squash_of(resumed.policy) is not None
    with load(folder, "none") as policy:  # as it was trained
        weights = policy.state_dict()
    bounds, path = weights.pop("action_squash"), tmp_path / "model_0.pt"
    for changes, name in (({"action_squash": 3 * bounds}, "bounds"), ({}, "action_squash")):
        torch.save(weights | changes, path)
        with pytest.raises(ConfigError, match=name), load(path, "tanh"):
            pass
    with load(path, "none") as policy:
        assert models.squash_of(policy) is None
    played = ["--load-model-path", folder, "--eval.episodes", "4", "--eval.deterministic", "True"]
    assert watch.evaluate("pendulum", pufferl.load_config("pendulum", played))["score"].mean < 0


@pytest.mark.parametrize("env", ["cartpole", Walk])
def test_environments_that_a_script_resets_or_shares(env):
    """A rollout would go on in arrays that are gone, or end in a segmentation fault."""
    trainer = make_trainer(env=env, backend="native" if env == "cartpole" else "serial", num_envs=4,
                           minibatch_size=16)
    trainer.evaluate()
    trainer.train()
    trainer.vecenv.reset()
    with pytest.raises(RuntimeError, match="reset by a script"):
        trainer.evaluate()
    second = pufferl.PuffeRL({"data_dir": None, "horizon": 8, "minibatch_size": 16}, trainer.vecenv, trainer.policy)
    second.evaluate()
    second.close()
    with pytest.raises(RuntimeError, match="closed"):
        trainer.evaluate()
