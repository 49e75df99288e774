"""Speed and memory beside peers: a result is checked before it is timed, and a wrong one gets no number."""
