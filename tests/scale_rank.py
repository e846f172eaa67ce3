"""One rank of test_scale.py's fast tests: python tests/scale_rank.py FOLDER; its results go to
FOLDER/rank{R}.pt."""

import sys
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import data_parallel
import kernels
import models
import pufferl
import vector

AGENTS, HORIZON, DRAWN = 12, 8, 10  # of a rank; agents an environment times 12, steps, segments

CASES = {  # name -> (environment, its settings, network, train settings)
    "fused": ("cartpole", {"max_steps": 5}, "fused", {}),
    "continuous": ("cartpole", {"continuous": True}, "fused", {"optimizer": "adam"}),
    "lstm": ("cartpole", {"max_steps": 5}, "lstm", {"max_minibatch_size": 3 * HORIZON}),
    "dead agents": ("target", {"num_agents": 4, "patience": 6}, "fused", {}),
}


def make_trainer(case, num_envs, folder, **settings):
    env, env_kwargs, network, train = CASES[case]
    torch.manual_seed(5)
    vecenv = vector.make(env, num_envs, num_buffers=1, num_threads=1, seed=7, env_kwargs=env_kwargs)
    if network == "fused":
        policy = models.MinGRUPolicy(vecenv, hidden_size=16, num_layers=2)
    else:
        policy = models.LSTMWrapper(vecenv, models.FeedForward(vecenv, hidden_size=16),
                                    hidden_size=16)
    if data_parallel.connect().rank > 0:  # rank 0's weights must win
        for parameter in policy.parameters():
            parameter.data.add_(1.0)
    config = {"horizon": HORIZON, "minibatch_size": 2 * DRAWN * HORIZON,
              "total_timesteps": 10**5, "seed": 7,
              "log_interval": 1e9, "env": env, "data_dir": str(folder), **train, **settings}
    return pufferl.PuffeRL(config, vecenv, policy)


def learn_from_given_segments(trainer, members):
    """One minibatch of fixed draws of these ranks (of all of them in one process): its
    gradient and statistics."""
    found, agents = {}, trainer.num_agents // len(members)
    generators = [np.random.default_rng(rank) for rank in members]
    index = [np.sort(generator.integers(0, agents, DRAWN)) + i * agents
             for i, generator in enumerate(generators)]
    weights = [generator.uniform(0.5, 2.0, DRAWN).astype(np.float32) for generator in generators]

    def draw(masses, cumulative, out, out_weights, **options):
        out.copy_(torch.from_numpy(np.concatenate(index)))
        out_weights.copy_(torch.from_numpy(np.concatenate(weights)))
        found["first"] = options["first"]

    def update():
        found["gradient"] = trainer.arena.flat("gradients").clone()
        found["settings"] = trainer.settings.clone()

    before = kernels.draw, trainer._update
    kernels.draw, trainer._update = draw, update
    trainer._minibatches_owed = 1.0
    dict.__setitem__(trainer.config, "replay_ratio", 0.0)
    found["losses"] = trainer.train()
    kernels.draw, trainer._update = before
    return found


def keep(trainer):
    """What a rollout is made of."""
    arrays = {name: tensor.clone() for name, tensor in trainer.storage.items()
              if tensor is not None}
    arrays |= {name: getattr(trainer, name).clone()
               for name in ("logprobs", "values", "bootstraps")}
    return arrays, {name: tensor.clone() for name, tensor in trainer.engine.initial_state.items()}


def run_epochs(trainer, epochs):
    for _ in range(epochs):
        trainer.evaluate()
        trainer.train()
    return trainer.arena.flat("weights").clone()


def message(function):
    try:
        function()
    except Exception as error:
        return f"{type(error).__name__}: {error}", getattr(error, "elsewhere", False)


def fail():
    raise pufferl.ConfigError("it cannot be")


def full_disk(*_):
    raise OSError("No space left on device")


def main(folder):
    group, seen = data_parallel.connect(), {}
    for case in CASES:
        num_envs = AGENTS // 4 if case == "dead agents" else AGENTS
        trainer = make_trainer(case, num_envs, folder)
        weights = trainer.arena.flat("weights").clone()
        trainer.evaluate()
        # many more on one rank than on the other: the mean is over all that live
        if case == "dead agents":
            trainer.storage["valid"][2:, : 10 * group.rank + 1] = 0
        arrays, state = keep(trainer)
        seen[case] = {"weights": weights, "arrays": arrays, "state": state,
                      **learn_from_given_segments(trainer, [group.rank])}
        trainer.release()

    whole = make_trainer("fused", AGENTS, folder, replay_ratio=1.3)
    seen["whole"] = run_epochs(whole, 4)
    seen["environment"], seen["global_step"] = dict(whole.environment), whole.global_step
    whole.run.save = full_disk  # which rank 0 calls
    seen["lost"] = message(whole.close)
    half = make_trainer("fused", AGENTS, folder, replay_ratio=1.3)
    run_epochs(half, 2)
    half.save_checkpoint(folder / "half.pt")
    resumed = make_trainer("fused", AGENTS, folder, replay_ratio=1.3)
    resumed.load_checkpoint(folder / "half.pt")
    seen["resumed"] = run_epochs(resumed, 2)
    if group.rank == 1:  # what only a mistake in a user's code can do
        resumed.arena.flat("weights")[3] += 1e-6
    seen["unequal"] = message(lambda: group.check_equal(resumed.arena.flat("weights"),
                                                        "the weights"))

    seen["sum"] = group.sum(np.array([1.0 + group.rank, 1e-17]))
    seen["max"] = group.max(np.array([0.0 - group.rank, group.rank, -np.inf]))
    seen["any"] = [group.any(flag) for flag in (False, group.rank == 1, True)]
    seen["first"] = group.first(lambda: "only " + "once"), message(lambda: group.first(fail))
    seen["shared"] = group.share(group.rank), group.gather(group.rank), group.scatter(["a", "b"])
    logs = [{}, {"score": 4.0, "n": 1}], [{"score": 1.0, "n": 3}, {}], [{"extra": 2.0, "n": 1},
                                                                        {"score": 5.0, "n": 2}]
    seen["logs"] = [group.merge_log(log[group.rank]) for log in (*logs, ({}, {}))]
    seen["seeds"] = message(lambda: make_trainer("fused", AGENTS, folder, seed=group.rank))
    seen["few"] = message(lambda: make_trainer("fused", AGENTS, folder, minibatch_size=HORIZON))
    seen["gpus"] = message(lambda: make_trainer("fused", AGENTS, folder, gpus=5))
    torch.save(seen, folder / f"rank{group.rank}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
