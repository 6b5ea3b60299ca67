"""The fence round DeepSpeed: the only package that imports it."""
