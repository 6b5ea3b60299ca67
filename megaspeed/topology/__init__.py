"""Ranks: their arithmetic, what the launcher states of them, and their process groups.

grid.py, launch.py       rank <-> (pp, dp, cp, tp); rank and world size from launchers
devices.py               the table of accelerators
process_settings.py      environment variables and limits of this process
store.py, context.py     all ranks connect to one store, and then create the process groups
activity.py              what a rank is doing, and how long the parts of a step take
"""
