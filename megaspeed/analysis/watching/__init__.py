"""Shows the records of run folders, while a run trains and afterwards.

record.py   reads a run folder, and finds where two runs differ
charts.py   numbers over steps as SVG
page.py     one HTML page of one or several runs
"""
