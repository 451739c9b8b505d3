"""Search-R1 with PPO (Jin et al. 2025, arXiv 2503.09516, section 3.1): its rollouts, credited by a critic.

Needs `config.critic.enabled`. The KL to the initial policy is a term of the loss, as with GRPO; the authors'
PPO script subtracts it from the rewards instead.
"""

from jaxsearch.methods import Context, Groups
from jaxsearch.methods.credit import credit_with_critic, rewarded
from jaxsearch.methods.search_r1 import grow, reward

__all__ = ['credit', 'grow', 'reward']

JUDGED = True


def credit(groups: Groups, context: Context, *, gamma: float = 1.0, lam: float = 1.0) -> None:
  """Credits tokens by GAE of the outcome reward, which is earned at the last token of the chain."""
  context.metrics.update(credit_with_critic(rewarded(groups, reward), gamma=gamma, lam=lam))
