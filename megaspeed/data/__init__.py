"""From text on disk to the rows that a rank trains on.

Sources of text become files, documents, and a validation split; a tokenizer turns the documents
into token files, which are prepared once for each machine and mapped into memory; other sources
are token files already. A mixture says in which shares they are drawn from, and the sampler which
tokens sample i is; the loaders cut the samples of a step into one data-parallel rank's
micro-batches. Nothing here communicates between processes.
"""
