"""One file per system: how its trees grow, what they earn, and which nodes are credited with it."""
