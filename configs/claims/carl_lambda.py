"""CARL's table 10: lambda, and nothing else. With 1 all segments of a rollout share the sign of its outcome.

    jaxsearch sweep --config configs/claims/carl_lambda.py        # after the commands in carl.py, but for its last
"""

from configs.claims import carl


def get_config():
  config = carl.get_config()
  config.unlock()
  config.title = "CARL's lambda"
  config.variants = {f'lambda {lam}': carl.WARM | {'credit.lam': lam} for lam in (0.0, 0.5, 0.95, 1.0)}
  config.baseline = 'lambda 0.0'
  config.out = 'runs/claims/carl_lambda'
  return config.lock()
