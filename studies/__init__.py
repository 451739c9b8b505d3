"""What frozen weights can decide of the papers' claims; docs/claims/plan.md says what was decided beforehand."""
