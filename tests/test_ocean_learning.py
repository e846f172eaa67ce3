"""Environments are solved with the configurations that they ship with: a fixed seed, a threshold of perf or score."""

import pytest

import pufferl
import watch

SANITY = {"bandit": 0.97, "password": 0.97, "stochastic": 0.91, "continuous": 0.97, "multiagent": 0.97, "spaces": 0.96,
          "masked": 0.97}  # fmt: skip
LONGER = {"pendulum": -200.0, "acrobot": -100.0, "mountaincar": -110.0, "lander": 200.0, "double_pendulum": 9100.0,
          "drone": 41.0, "drone_race": 6.0, "pong": 18.0, "asteroids": 10_000.0, "tetris": 120_000.0, "snake": 17.0,
          "g2048": 40_000.0, "connect4": 0.7, "go": 8.0, "minesweeper": 0.96, "maze": 0.54, "cube": 0.83,
          "boids": 0.8, "trash_pickup": 38.0, "moba": 0.8, "nmmo3": 11.5}  # fmt: skip
FRESH = {"squared": 0.95, "cartpole": 475.0, "memory": 0.95, "target": 1.9, "breakout": 800.0,
         "enduro": 1000.0, "freeway": 33.5}  # fmt: skip


class Keep(pufferl.NoLogger):
    """Keeps the last entry of the log."""

    def log(self, metrics, step):
        self.metrics = metrics


def learn(name, folder, *options):
    """Statistics of the last epochs of a training, and what its signs said, {detector: (step, sentence)}."""
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
    return logger.metrics, trainer.signs.said


@pytest.mark.parametrize("name", SANITY)
def test_the_sanity_suite_is_learnt(name, tmp_path):
    log, said = learn(name, tmp_path)
    assert log["environment/perf"] > SANITY[name], log
    assert not said, "what is learnt shows no sign of not being learnt"


def test_actions_that_a_tanh_squashes_are_learnt(tmp_path):
    log, said = learn("continuous", tmp_path, "--policy.squash", "tanh", "--train.seed", "0")
    assert log["environment/perf"] > SANITY["continuous"] and not said, log


@pytest.mark.slow
@pytest.mark.parametrize("name", LONGER)
def test_is_solved(name, tmp_path):
    log, _ = learn(name, tmp_path)
    assert log["environment/score"] > LONGER[name], log


@pytest.mark.slow
@pytest.mark.parametrize(("name", "seed"), [*((name, 0) for name in FRESH), ("breakout", 1), ("breakout", 2)])
def test_is_solved_in_fresh_episodes(name, seed, tmp_path):
    """As a user would: train, then play new episodes (enduro's are so long that none ends in the last epochs)."""
    args = pufferl.load_config(name, ["--data-dir", str(tmp_path), "--logger", "none", "--train.seed", str(seed)])
    trainer = pufferl.train(name, args)
    args["eval"]["episodes"] = 32 if name in ("enduro", "freeway") else 256
    results = watch.evaluate(name, {**args, "load_model_path": str(trainer.run_folder)})
    assert results["score"][0] > FRESH[name], results
