"""Tokens on disk: written once, mapped into memory, checked when they are read."""
