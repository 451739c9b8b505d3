"""Plans a run on devices that are not here: memory, arithmetic, traffic, and the least time of a step.

`programs.py`: the programs of a config, with shapes as arguments. `costs.py`: what they compute and move.
`plan.py`: compiles them for a target, adds up what lies on a device, and says what fits. `step.py`: from
least times to a step. `report.py`: a plan as text.
"""
