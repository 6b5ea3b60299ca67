"""Tensor parallelism: layers, collectives, and ``parallelize``, which applies them to a GPT."""
