"""Checks whether a run can start here, under its own launcher, before it creates process groups.

    every rank     its record: versions, configuration, data, limits, GPUs         record.py
        |              over a store, with a time limit for each answer             messages.py
    rank 0         which ranks are missing; whether the others have one layout
        |
    all ranks      clock, run folder, ports; the run's own process groups          examination.py
        |              each rank adds this to its record and sends it again
    rank 0         one list of checks: what was found, and what is wrong on which rank   checks.py
        |
    rank 0         table, problems, remarks, JSON                                  report.py

Every step has a time limit, and a rank that does not respond is named.
"""
