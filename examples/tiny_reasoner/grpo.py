"""One gradient step of GRPO: advantages normalised within the samples of a prompt, no reference model, no clipping.

With one step on each batch of rollouts the ratio of new to old probabilities is 1, so there is nothing to clip.
Source: DeepSeekMath, arXiv 2402.03300, Eq. 3 without its KL term; the mean is over all tokens of the batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from model import Weights, logits
from task import END
from torch import Tensor
from torch.nn import functional


def policy_step(
    weights: Weights,
    optimizer: torch.optim.Optimizer,
    *,
    prompts: Sequence[list[int]],
    responses: Sequence[list[int]],
    rewards: Sequence[float],
    num_samples: int,
) -> None:
    """Update the weights once.

    Args:
        weights, optimizer: updated in place; the optimizer is over `trained(weights)`.
        prompts: of each response; the samples of a prompt follow each other.
        responses, rewards: of each response.
        num_samples: of each prompt, >= 2.
    """
    advantages = advantages_of(rewards, num_samples=num_samples)
    texts = [prompt + response for prompt, response in zip(prompts, responses, strict=True)]
    mask = padded([[0.0] * (len(p) - 1) + [1.0] * len(r) for p, r in zip(prompts, responses, strict=True)])
    loss = (negative_logprobs(weights, texts) * mask * advantages[:, None]).sum() / mask.sum()
    descend(optimizer, loss)


def advantages_of(rewards: Sequence[float], *, num_samples: int) -> Tensor:
    """Return how much better each response is than the samples of its prompt, in their standard deviations."""
    groups = torch.tensor(rewards).view(-1, num_samples)
    return ((groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-3)).flatten()


def negative_logprobs(weights: Weights, texts: Sequence[list[int]]) -> Tensor:
    """Return -log p of each token but the first, [texts, longest - 1]."""
    longest = max(map(len, texts))
    token_ids = torch.tensor([text + [END] * (longest - len(text)) for text in texts])
    predicted = logits(weights, token_ids[:, :-1])
    return functional.cross_entropy(predicted.flatten(0, 1), token_ids[:, 1:].flatten(), reduction="none").view(
        len(texts), -1
    )


def padded(rows: Sequence[list[float]]) -> Tensor:
    """Return the rows with zeros behind them, [rows, longest]."""
    longest = max(map(len, rows))
    return torch.tensor([row + [0.0] * (longest - len(row)) for row in rows])


def descend(optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    """Take one step, of a gradient no longer than 1."""
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 1.0)
    optimizer.step()


def trained(weights: Weights) -> list[Tensor]:
    """Return the tensors of the weights, with gradients from now on."""
    return [tensor.requires_grad_() for tensor in weights.values()]
