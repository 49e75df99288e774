"""Projections, positions, gate parameters around one spec: hidden states in, hidden states out."""
