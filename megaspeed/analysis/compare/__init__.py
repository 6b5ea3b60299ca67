"""One training, once for each ZeRO stage and under torch's own DDP and FSDP2: `megaspeed compare`.

variants      which rows there are                       pure
launching     one row as processes, from start to end    rank_program runs in each of them
comparing     row after row, however they end
result        the figures, and whether the losses agree  pure
table, markdown, memory_chart, trade_off_chart           the figures to look at
"""
