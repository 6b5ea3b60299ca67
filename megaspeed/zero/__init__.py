"""The fence round DeepSpeed: the only package that imports it."""

from megaspeed.zero.workarounds.process_environment import name_the_accelerator

name_the_accelerator()  # before any module of this package imports deepspeed
