"""The JSON of a run: reads it strictly, checks it, and resolves it for a number of processes.

    read_config(path)                   -> RunConfig, which may have "auto"
    load_run(path, overrides, world)    -> Run, with every value resolved for the processes
    find_problems(document, world)      -> all mistakes

A value passes through these files:

    document (reading, extends, --set) -> acceptance -> hugging_face (from_hf)
        -> validation (each key) -> rules, layout (keys together) -> resolve
"""
