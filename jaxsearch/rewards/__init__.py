"""Scores what a rollout earns: matching answers, formats, evidence and judges."""
