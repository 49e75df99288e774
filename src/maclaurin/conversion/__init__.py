"""Pretrained models with another attention: chosen layer by layer, calibrated, measured, recovered."""
