"""What is made once and kept: whole or not at all, by one process at a time."""
