"""A small PPO. Advantages come from a pooled value network; all else is what every PPO does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from environments import Environments
from policies import Policy
from torch import Tensor, nn

from potluck.fleet import Fragment, PooledValue

CHUNK = 16  # steps over which a recurrent policy is trained at a time


@dataclass(frozen=True, kw_only=True)
class PPOConfig:
    """PPO's own settings."""

    steps: int = 64
    """Of each environment, between two updates."""
    learning_rate: float = 1e-3
    passes: int = 6
    minibatches: int = 4
    clip: float = 0.2
    entropy: float = 0.01
    max_gradient_norm: float = 0.5


class PPO:
    """One policy in its environments."""

    def __init__(
        self, policy: Policy, environments: Environments, pooled: PooledValue, config: PPOConfig, seed: int = 0
    ) -> None:
        self.policy, self.environments, self.pooled, self.config = policy, environments, pooled, config
        self.num_steps = 0
        self._optimizer = torch.optim.Adam(policy.parameters(), config.learning_rate, eps=1e-5, fused=True)
        self._generator = torch.Generator().manual_seed(seed)
        self._observations = torch.from_numpy(environments.observe())
        self._memory = torch.zeros(environments.number, policy.memory_size)
        self._begins = torch.ones(environments.number, dtype=torch.bool)

    def iterate(self) -> None:
        """Act for a while, then learn from it."""
        fragment, actions, begins, memories = self._act()
        advantages = self.pooled.advantages(fragment)
        observations = torch.from_numpy(fragment.observations[:-1])
        self._learn(observations, actions, begins, memories, torch.from_numpy(fragment.log_probs), advantages)

    def state(self) -> dict[str, Any]:
        """What a checkpoint needs."""
        return {"policy": self.policy.state_dict(), "optimizer": self._optimizer.state_dict(), "steps": self.num_steps}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from a checkpoint."""
        self.policy.load_state_dict(state["policy"])
        self._optimizer.load_state_dict(state["optimizer"])
        self.num_steps = int(state["steps"])

    @torch.no_grad()
    def evaluate(self, episodes: int, seed: int) -> float:
        """The mean return of fresh episodes, with the policy as it is; none of it is learnt from."""
        environments = type(self.environments)(episodes, seed)
        generator = torch.Generator().manual_seed(seed)
        memory = torch.zeros(episodes, self.policy.memory_size)
        returns, running = np.zeros(episodes), np.ones(episodes, bool)
        observations = torch.from_numpy(environments.observe())
        while running.any():
            logits, memory = self.policy(observations, memory)
            came = environments.step(torch.multinomial(logits.softmax(-1), 1, generator=generator).squeeze(-1).numpy())
            returns += came.rewards * running
            running &= ~(came.terminated | came.truncated)
            observations = torch.from_numpy(came.observations)
        return float(returns.mean())

    @torch.no_grad()
    def _act(self) -> tuple[Fragment, Tensor, Tensor, Tensor]:
        seen, actions, log_probs, begins, memories = [self._observations.numpy()], [], [], [], []
        rewards, terminated, truncated, finals = [], [], [], []
        for _ in range(self.config.steps):
            self._memory = self._memory * ~self._begins[:, None]
            memories.append(self._memory)
            begins.append(self._begins)
            logits, self._memory = self.policy(self._observations, self._memory)
            log_probabilities = logits.log_softmax(-1)
            action = torch.multinomial(log_probabilities.exp(), 1, generator=self._generator)
            actions.append(action.squeeze(-1))
            log_probs.append(log_probabilities.gather(-1, action).squeeze(-1))
            came = self.environments.step(actions[-1].numpy())
            self._observations = torch.from_numpy(came.observations)
            self._begins = torch.from_numpy(came.terminated | came.truncated)
            seen.append(came.observations)
            rewards.append(came.rewards)
            terminated.append(came.terminated)
            truncated.append(came.truncated)
            finals.append(came.last_observations[came.truncated])
        self.num_steps += self.config.steps * self.environments.number
        fragment = Fragment(
            observations=np.stack(seen),
            rewards=np.stack(rewards).astype(np.float32),
            terminated=np.stack(terminated),
            truncated=np.stack(truncated),
            final_observations=np.concatenate(finals),
            log_probs=torch.stack(log_probs).numpy(),
        )
        return fragment, torch.stack(actions), torch.stack(begins), torch.stack(memories)

    def _learn(
        self,
        observations: Tensor,
        actions: Tensor,
        begins: Tensor,
        memories: Tensor,
        log_probs: Tensor,
        advantages: Tensor,
    ) -> None:
        """Update the policy."""
        # Pieces of the fragment as columns: [steps of a piece, number of pieces, …].
        length = CHUNK if self.policy.memory_size else 1
        number = actions.numel() // length

        def pieces(tensor: Tensor) -> Tensor:
            split = tensor.reshape(len(tensor) // length, length, *tensor.shape[1:]).transpose(0, 1)
            return split.reshape(length, number, *tensor.shape[2:])

        columns = [pieces(each) for each in (observations, actions, begins, log_probs, advantages)]
        memory = pieces(memories)[0]
        for _ in range(self.config.passes):
            order = torch.randperm(columns[0].shape[1], generator=self._generator)
            for chosen in order.chunk(self.config.minibatches):
                self._update(memory[chosen], *(each[:, chosen] for each in columns))

    def _update(
        self, memory: Tensor, observations: Tensor, actions: Tensor, begins: Tensor, before: Tensor, advantages: Tensor
    ) -> None:
        now, entropy = self._log_probs(memory, observations, actions, begins)
        ratio = (now - before).exp()
        scaled = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
        clipped = ratio.clamp(1 - self.config.clip, 1 + self.config.clip)
        loss = -torch.minimum(ratio * scaled, clipped * scaled).mean() - self.config.entropy * entropy
        self._optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(self.policy.parameters(), self.config.max_gradient_norm)
        self._optimizer.step()

    def _log_probs(
        self, memory: Tensor, observations: Tensor, actions: Tensor, begins: Tensor
    ) -> tuple[Tensor, Tensor]:
        log_probabilities = self.policy.sequence(observations, memory, begins).log_softmax(-1)
        entropy = -(log_probabilities.exp() * log_probabilities).sum(-1).mean()
        return log_probabilities.gather(-1, actions[..., None]).squeeze(-1), entropy
