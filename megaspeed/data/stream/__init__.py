"""Which tokens sample i is, and how one rank's rows of a step become micro-batches."""
