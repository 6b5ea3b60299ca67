"""Freeze all imported objects. The process that ranks are forked from imports this module last.

Objects that exist now live until the process ends. The garbage collector of a rank skips frozen
objects. Otherwise each collection would write to every object, and the rank would copy all of the
memory that forked processes share. This would take most of a second, and building an engine starts
a collection.
"""

import gc

gc.collect()
gc.freeze()
