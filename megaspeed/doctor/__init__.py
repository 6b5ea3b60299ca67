"""Checks whether a run can start here, under its own launcher, before it creates process groups.

    every rank     its record: versions, configuration, data, GPU                  record.py
        |              over a store, with a time limit for each answer             examination.py
    rank 0         which ranks are missing; whether the others have one layout
        |
    all ranks      run folder; the run's own process groups
        |              each rank adds this to its record and sends it again
    rank 0         table, problems by rank, remarks, JSON                          checks.py

Every step has a time limit, and a rank that does not respond is named.
"""
