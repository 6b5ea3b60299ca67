"""Where text comes from: sources -> files of every format -> documents -> training | validation."""
