"""Tests the papers' claims on frozen weights and on training runs, by the rules of docs/claims/plan.md."""
