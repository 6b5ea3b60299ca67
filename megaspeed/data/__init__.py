"""From text on disk to the rows that a rank trains on. Nothing here communicates between processes.

Data flows from top to bottom, and a file imports only from files above it:

    errors          the one error of bad data
    pieces          the output of each format: documents in pieces, and bad records
    formats         plain text, JSON lines, Parquet, and datasets of the ``datasets`` library
    sources         what ``data.train`` lists -> files and their formats
    documents       files -> documents, by their hashes
    token_file      ids on disk, mapped into memory
    tokenizer       load, save and train a tokenizer; documents -> ids
    cache           a folder on disk, one writer at a time
    token_sources   sources that are token ids already
    tokenize        files -> a token folder
    token_stream    a stream -> shards of ids, made while a run trains on earlier ones
    background      the process that makes these shards
    hold_out        documents and token files -> training | validation
    selection       a ``data`` section -> its files, checked; its tokenizer
    text_cache      files of text -> token folders and a tokenizer in the cache
    mixture         token files in components with weights
    corpus          a ``data`` section -> a prepared corpus
    sampler         sample i -> its tokens
    loader          the samples of a step -> the micro-batches of one data-parallel rank
"""
