"""Evaluation of policies and baselines, their metrics and reports."""
