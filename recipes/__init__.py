"""Makes what ships: the embedded world with its policies, and questions with chains of searches for a real
model.

`python -m recipes world …` and `python -m recipes chains …`, run in the repository; nothing here is needed to
use what ships, and an installed package does not have it. README.md says how to run them.
"""
