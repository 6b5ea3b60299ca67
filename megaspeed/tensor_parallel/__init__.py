"""Tensor parallelism: layers, collectives, and ``parallelize``, which puts them into a GPT."""
