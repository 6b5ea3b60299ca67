"""The JSON of a run: read strictly, checked, and resolved for a number of processes.

    read_config(path)                   -> RunConfig, which may have "auto"
    load_run(path, overrides, world)    -> Run, with every value resolved for the processes
    check_document(document, world)     -> all mistakes, or a RunConfig and notes

A value passes through these files:

    document (reading, extends, --set) -> foreign_keys -> hugging_face (from_hf)
        -> loading (each key) -> rules, layout (keys together) -> resolve
"""
