"""A run worked out before it starts: where its ranks stand, what it holds and sends, does it fit.

devices.py          accelerators by name, and how much of their memory a run may count on
rank_map.py         which axis stays within a node and which crosses nodes
variants.py         the same training under other degrees, ZeRO stages, micro-batches
prediction.py       memory and traffic of every kind of pipeline stage of a run
cheapest_change.py  what to change where a run does not fit
plan.py             all of it together, for one run
what_if.py          every layout of a world size that fits, side by side
units.py            bytes and counts as people read them
report.py           a plan as lines and tables; what_if_report.py: the rankings

Nothing here makes a tensor, starts a process or needs a GPU.
"""
