"""The embedded world: real facts as an encyclopedia, questions on them, and small policies."""
