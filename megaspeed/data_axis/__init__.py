"""What the data axis does in a step, as plain data: what is reduced and gathered, when and how.

    run, pipeline stage --axis.py--> DataAxis     its parameters, buckets and gathers
        zero/       makes DeepSpeed's parameter groups from it, reduces and gathers as it states
        planning/   counts the memory and traffic of it
        steps.py    walks over a step: checks it, and prints it

No torch, so a plan of a thousand ranks is made in milliseconds.
"""
