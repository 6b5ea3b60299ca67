"""Tensor parallelism: layers, collectives, and the plan that applies them to the plain model."""
