"""Trees of token spans: a rollout (tree), its training rows (layout), how it is written (grammar)."""
