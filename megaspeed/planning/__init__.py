"""Predict a run before it starts, without tensors, processes or a GPU.

costs/               memory, traffic and step time, from shapes
cluster.py           the machines, as the user states them
measured_cpu.py      this machine as a cluster; another process measures it
prediction.py        memory and traffic of every kind of pipeline stage of a run
forecast.py          the step time of a run: throughput, utilization, days, cost
plan.py              the complete plan of one run
variants.py          the same training with other settings
changes.py           the cheapest change with which a run fits
what_if.py           every variant that fits
longest_sequence.py  the longest sequence that fits
report.py            a plan and a what-if as lines and tables
"""
