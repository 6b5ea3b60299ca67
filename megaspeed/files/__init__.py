"""Files that are whole or absent, whatever a process or a machine dies of."""
