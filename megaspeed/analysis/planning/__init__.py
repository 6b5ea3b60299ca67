"""Predicts a run before it starts, without tensors, processes or a GPU.

machines.py    accelerators by name, and the placement of ranks on nodes
prediction.py  memory and traffic of every kind of pipeline stage of a run
variants.py    other degrees, ZeRO stages, micro-batches; the cheapest change if a run does not fit
plan.py        the complete plan of one run, and every layout of its world size that fits
report.py      a plan and its what-if as lines and tables
"""
