"""Reads what run folders record, while a run trains and afterwards.

record.py   what a run folder holds, and where two runs differ
charts.py   numbers over steps as SVG
page.py     one HTML page of one or several runs
"""
