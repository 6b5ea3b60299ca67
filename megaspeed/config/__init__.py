"""The JSON of a run: read strictly, checked whole, made definite for a number of processes.

    read_config(path)                          -> RunConfig, which may say "auto"
    load_run(path, world_size=8, ...)          -> Run, definite for 8 processes
    check_config(path, world_size=8)           -> every problem, or nothing

A value travels through these files in this order:

    strict_json -> document (extends, --set) -> validation (each key) -> rules (keys together)
        -> resolve (what depends on the number of processes)
"""
