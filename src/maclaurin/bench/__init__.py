"""Speed and memory compared with peers. A result is checked before it is timed; a wrong one is not timed."""
