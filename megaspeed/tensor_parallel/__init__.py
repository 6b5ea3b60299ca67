"""Layers that are split over the tensor axis, attention over the context axis, the exchange of
tokens over the expert axis, their collectives, and ``parallelize``, which applies them to a GPT.
"""
