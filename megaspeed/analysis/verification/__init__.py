"""One layout against one process of plain torch: `megaspeed verify`."""
