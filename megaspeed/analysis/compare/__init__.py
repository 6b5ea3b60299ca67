"""`megaspeed compare`: one run, trained at each ZeRO stage and with torch's own DDP and FSDP2.

rows           which rows there are, and how one is launched, watched and ended
rank_program   what each process of a row does and reports
baselines      a training step with DDP or FSDP2
result         the figures of all rows, and whether their losses agree     pure
verdict        which row to use here, and why                              pure
report         the figures as tables, Markdown and JSON                    pure
charts         the figures as two pictures
"""
