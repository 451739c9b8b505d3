"""Plans a run on devices that are not here: memory, arithmetic, traffic, and the least time of a step.

`programs.py`: the programs of a config, with shapes as arguments. `costs.py`: what they compute and move.
`step.py`: from least times to a step. `plan.py`: compiles them for a target, adds up what lies on a device,
says what fits, and prints it.
"""
