"""Works a run out before it starts; makes no tensor, starts no process and needs no GPU.

devices.py     accelerators by name, and how much of their memory a run may use
prediction.py  memory and traffic of every kind of pipeline stage of a run
variants.py    other degrees, ZeRO stages, micro-batches; the cheapest change if a run does not fit
plan.py        the rank map, and all of it together, for one run
what_if.py     every layout of a world size that fits, side by side
report.py      a plan and its what-if as lines and tables
"""
