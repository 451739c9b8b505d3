"""What frozen weights decide of the papers' claims, by the rules of docs/claims/plan.md."""
