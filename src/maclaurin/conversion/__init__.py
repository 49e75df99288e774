"""Give pretrained models another attention: choose it layer by layer, calibrate, measure, recover."""
