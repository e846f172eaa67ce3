"""Continue a training that a cluster stops and starts again.

    python -m examples.preemption                                       # run it again to continue
    torchrun --standalone --nproc-per-node 2 -m examples.preemption

SIGTERM or Ctrl-C stops all ranks at the end of an epoch, and `close` saves a checkpoint. A fixed
run_id gives each start the same folder, from whose checkpoint it continues.
"""

import processes
from models import FeedForward
from pufferl import PuffeRL, make

if __name__ == "__main__":
    env = make("cartpole", num_envs=64)
    trainer = PuffeRL(env=env, policy=FeedForward(env), learning_rate=0.01,
                      total_timesteps=2_000_000, run_id="preemptible")
    if (trainer.run_folder / "trainer_state.pt").exists():
        trainer.load_checkpoint(trainer.run_folder)
    begin = trainer.global_step
    with processes.Interrupts() as interrupts:
        while (trainer.epoch < trainer.total_epochs
               and not trainer.ranks.any(interrupts.requested)):
            trainer.evaluate()
            trainer.train()
    trainer.close()
    print(f"trained from step {begin:,} to {trainer.global_step:,}")
