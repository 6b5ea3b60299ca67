"""`megaspeed compare`: one run, trained at each ZeRO stage and with torch's own DDP and FSDP2.

rows        makes the rows, trains each of them on ranks of this machine, and measures it
baselines   a training step with DDP or FSDP2
result      the figures of all rows, whether their losses agree, and the row to use here
report      the figures as tables, Markdown and JSON
charts      the figures as two pictures
"""
