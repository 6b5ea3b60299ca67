"""Reads what run folders record, while a run trains and afterwards.

record.py        what a run folder holds: steps, validations, starts, the configuration
differences.py   where two runs differ: the first step and quantity, the keys of the configuration
charts.py        numbers over steps as SVG
page.py          one HTML page of one or several runs
"""
