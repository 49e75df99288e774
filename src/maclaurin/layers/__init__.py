"""Attention layers: projections, positions and gates around one spec, from hidden states to hidden states."""
