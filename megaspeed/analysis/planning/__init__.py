"""Predicts a run before it starts. Makes no tensor, starts no process and needs no GPU.

devices.py     accelerators by name, and how much of their memory a run may use
prediction.py  memory and traffic of every kind of pipeline stage of a run
variants.py    other degrees, ZeRO stages, micro-batches; the cheapest change if a run does not fit
plan.py        the complete plan of one run, with its rank map
what_if.py     every layout of a world size that fits, side by side
report.py      a plan and its what-if as lines and tables
"""
