"""Predict memory, traffic and step time of a run from its configuration alone.

Pure arithmetic over shapes: no code here makes a tensor or imports DeepSpeed.
"""
