"""Imported last by the process that ranks are forked from.

What is imported by now stays forever. Frozen, it is not looked at again by any rank's garbage
collector, which would write to every object and so copy all of the memory that forks share: most of
a second for each collection of each rank, and building an engine asks for one.
"""

import gc

gc.collect()
gc.freeze()
