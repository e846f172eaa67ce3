"""Environments are solved with the settings that ship with them: with a fixed seed, perf or score must
reach a threshold."""

import re

import pytest

import configuration
import ocean
import pufferl
from tools import watch

SOLVED = {name: configuration.solved(name) for name in (*ocean.names(), "drone_race")
          if configuration.solved(name)}
SANITY = [name for name, solved in SOLVED.items() if solved.perf is not None]
FRESH = ["squared", "cartpole", "memory", "target", "breakout", "enduro", "freeway"]
LONGER = [name for name in SOLVED if name not in (*SANITY, *FRESH)]


class Keep(pufferl.NoLogger):
    def log(self, metrics, step):
        self.metrics = metrics


def learn(name, folder, *options):
    """(statistics of the last epochs of a training, {detector: (step, sentence)} of its warnings)."""
    args = pufferl.load_config(name, options)
    vecenv = pufferl.load_env(name, args)
    policy = pufferl.load_policy(args, vecenv, name)
    config = {**args["train"], "env": name, "data_dir": str(folder), "log_interval": 0.1}
    logger = Keep()
    trainer = pufferl.PuffeRL(config, vecenv, policy, logger)
    last = trainer.total_epochs - max(3, trainer.total_epochs // 20)
    while trainer.epoch < trainer.total_epochs:
        if trainer.epoch == last:
            trainer.mean_and_log()
            trainer.config["log_interval"] = 1e9
        trainer.evaluate()
        trainer.train()
    trainer.mean_and_log()
    trainer.close()
    return logger.metrics, trainer.warnings.reported


def test_the_page_says_what_the_settings_say():
    """docs/ocean.md has the same thresholds, steps and seconds as config/."""
    rows = re.findall(r"^\| !\[(\w+)\](?:[^|]*\|){7}([^|]*)",
                      (configuration.ROOT / "docs/ocean.md").read_text(), re.M)
    cell = re.compile(r"(race |)(?:perf |)(-?[\d.,]+): ([\d.]+) M, ([\d.]+) s")
    page = {f"{name}_race" if race
            else name: (float(least.replace(",", "")), round(float(steps) * 1e6), float(seconds))
            for name, text in rows for race, least, steps, seconds in cell.findall(text)}
    assert page == {name: (one.metric[1], one.steps, one.seconds) for name, one in SOLVED.items()}


@pytest.mark.parametrize("name", SANITY)
def test_the_sanity_suite_is_learnt(name, tmp_path):
    log, said = learn(name, tmp_path)
    assert log["environment/perf"] > SOLVED[name].perf, log
    assert not said, "what is learnt shows no sign of not being learnt"


def score_of_fresh_episodes(name, folder, seed, episodes, *options):
    """Train, then play new episodes, as a user would."""
    args = pufferl.load_config(name, ["--data-dir", str(folder), "--logger", "none",
                                      "--train.seed", str(seed), *options])
    trainer = pufferl.train(name, args)
    args["eval"]["episodes"] = episodes
    return watch.evaluate(name, {**args, "load_model_path": str(trainer.run_folder)})["score"][0]


@pytest.mark.slow
def test_catch_is_learnt_from_pictures(tmp_path):
    """84 × 84 pixels and no setting but the steps."""
    name = f"{configuration.ROOT}/tests/user_envs.py:CatchImage"
    assert score_of_fresh_episodes(name, tmp_path, 0, 100, "--train.total-timesteps", "60000") >= 0.9


def test_actions_that_a_tanh_squashes_are_learnt(tmp_path):
    log, said = learn("continuous", tmp_path, "--policy.squash", "tanh", "--train.seed", "0")
    assert log["environment/perf"] > SOLVED["continuous"].perf and not said, log


@pytest.mark.slow
@pytest.mark.parametrize("name", LONGER)
def test_is_solved(name, tmp_path):
    log, _ = learn(name, tmp_path)
    assert log["environment/score"] > SOLVED[name].score, log


@pytest.mark.slow
@pytest.mark.parametrize(("name", "seed"),
                         [*((name, 0) for name in FRESH), ("breakout", 1), ("breakout", 2)])
def test_is_solved_in_fresh_episodes(name, seed, tmp_path):
    """Enduro's are so long that none ends in the last epochs."""
    episodes = 32 if name in ("enduro", "freeway") else 256
    assert score_of_fresh_episodes(name, tmp_path, seed, episodes) > SOLVED[name].score
