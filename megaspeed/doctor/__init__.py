"""Checks whether a run can start here, under its own launcher, before it creates process groups.

    every rank     record: versions, configuration, data, limits, GPUs      record.py
        |             over a store, with a time limit for each answer       checks.py
    rank 0         which ranks are missing
        |
    all ranks      clock, run folder, ports                                 checks.py
        |
    all ranks      the run's own process groups: latency, bandwidth         examination.py
        |
    rank 0         what differs and what is wrong, on which rank            diagnosis.py, report.py

`examination.py` runs these steps. Every step has a time limit, and a rank that does not respond is
named.
"""
