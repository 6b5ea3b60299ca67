"""``megaspeed compare``: one run, trained at each ZeRO stage and with torch's own DDP and FSDP2.

rows      the rows, and the figures of each
result    whether the losses of all rows agree, and the row to use here
report    the figures as text, JSON and picture
"""
