"""Compares a layout with one process of plain torch: `megaspeed verify`."""
