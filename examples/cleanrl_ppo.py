"""Run CleanRL's PPO loop over this project's vector environments.

    python -m examples.cleanrl_ppo

Three things differ from CleanRL's ppo.py: how environments are made, the agent, and that `step`
returns terminals and truncations separately (after an end the observation is the next episode's
first). `models.CleanRLAgent` gives any policy of models.py CleanRL's `get_value` and
`get_action_and_value`.

With a recurrent policy, as in CleanRL's ppo_atari_lstm.py:
`agent = models.RecurrentCleanRLAgent(models.MinGRUPolicy(env))`, `agent.initial_state(num_envs)`,
and `get_action_and_value(x, state, done, action)`, which also returns the new state. A minibatch
then holds whole environments, time first: `state[i][:, environments]`.
"""

import numpy as np
import torch

import models
import vector

num_envs, num_steps, num_iterations = 16, 64, 80
gamma, gae_lambda, clip_coef, ent_coef, vf_coef = 0.98, 0.95, 0.2, 0.005, 0.5

if __name__ == "__main__":
    torch.manual_seed(1)
    torch.set_num_threads(1)  # small products are faster on one thread
    envs = vector.make("gym/CartPole-v1", num_envs=num_envs, backend="serial")
    agent = models.CleanRLAgent(models.FeedForward(envs.driver_env, hidden_size=64))
    optimizer = torch.optim.Adam(agent.parameters(), lr=2e-3, eps=1e-5)

    obs = torch.zeros(num_steps, num_envs, *envs.single_observation_space.shape)
    actions = torch.zeros(num_steps, num_envs, *envs.single_action_space.shape)
    logprobs, rewards, dones, values = torch.zeros(4, num_steps, num_envs)
    next_obs = torch.tensor(envs.reset(seed=1)[0])
    next_done = torch.zeros(num_envs)
    episode_returns = []

    for _ in range(num_iterations):
        for step in range(num_steps):
            obs[step], dones[step] = next_obs, next_done
            with torch.no_grad():
                action, logprobs[step], _, value = agent.get_action_and_value(next_obs)
            values[step], actions[step] = value.flatten(), action
            observation, reward, terminals, truncations, infos = envs.step(action.numpy())
            next_obs, rewards[step] = torch.tensor(observation), torch.tensor(reward)
            next_done = torch.tensor(terminals | truncations).float()
            episode_returns += [info["episode_return"] for info in infos]

        with torch.no_grad():
            next_value, lastgaelam = agent.get_value(next_obs).flatten(), 0.0
            advantages = torch.zeros_like(rewards)
            for t in reversed(range(num_steps)):
                last = t == num_steps - 1
                nonterminal = 1.0 - (next_done if last else dones[t + 1])
                nextvalues = next_value if last else values[t + 1]
                delta = rewards[t] + gamma * nextvalues * nonterminal - values[t]
                lastgaelam = delta + gamma * gae_lambda * nonterminal * lastgaelam
                advantages[t] = lastgaelam
            returns = advantages + values

        b_obs, b_actions, b_logprobs = obs.flatten(0, 1), actions.flatten(0, 1), logprobs.flatten()
        b_advantages, b_returns = advantages.flatten(), returns.flatten()
        for _ in range(4):
            for index in torch.randperm(num_steps * num_envs).split(256):
                _, logprob, entropy, value = agent.get_action_and_value(b_obs[index],
                                                                        b_actions[index])
                ratio = (logprob - b_logprobs[index]).exp()
                a = b_advantages[index]
                a = (a - a.mean()) / (a.std() + 1e-8)
                clipped = ratio.clamp(1 - clip_coef, 1 + clip_coef)
                policy_loss = torch.max(-a * ratio, -a * clipped).mean()
                value_loss = 0.5 * (value.flatten() - b_returns[index]).square().mean()
                loss = policy_loss - ent_coef * entropy.mean() + vf_coef * value_loss
                optimizer.zero_grad()
                loss.backward()
                torch.nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
                optimizer.step()

    envs.close()
    print("mean return of the last 20 episodes:", np.mean(episode_returns[-20:]))
