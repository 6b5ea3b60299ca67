"""A run worked out before it starts: where its ranks stand, what it holds and sends, does it fit.

devices.py     accelerators by name, and how much of their memory a run may count on
variants.py    other degrees, ZeRO stages, micro-batches; the cheapest change if a run does not fit
prediction.py  memory and traffic of every kind of pipeline stage of a run
plan.py        the rank map, and all of it together, for one run
what_if.py     every layout of a world size that fits, side by side
report.py      a plan and the rankings of layouts as lines and tables

Nothing here makes a tensor, starts a process or needs a GPU.
"""
