"""Text of any size to a folder of token files: many processes, flat memory, able to go on.

              batches          worker process          shards            tokens-00000.bin
    files --> of pieces -->    worker process    -->   and       -->     tokens-00001.bin ...
              in order         worker process          journal           index.json, at the very end

    batches   one reader; a batch is about half a million characters
    workers   encode batches side by side; so many are under way at a time and no more
    shards    the ids are written in the order of the text, whichever worker was done first
    journal   every few seconds: how much of the input is on the disk as ids. After a kill the
              files are cut back to it and the same command goes on

The ids are those of training on the text directly, whatever the number of processes and however
often the work was cut off.
"""
