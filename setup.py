"""The stub that lets every pip install the project; the metadata is in setup.cfg."""

from setuptools import setup

setup()
