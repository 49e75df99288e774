"""Shipped oracles, tolerances, strategies and the laws that every spec inherits."""
