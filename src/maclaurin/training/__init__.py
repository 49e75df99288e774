"""The trainer: from a config, it writes records, checkpoints and a model to a folder.

config          every setting of a run
trainer         the loop; `train(config, out)` is the whole run
batches         its data, prepared once and read ahead of the loop
model           its model: random or from a folder, with or without LoRA adapters; saved at the end
losses          training objectives, and their evaluation on held-out data
optimizer_step  gradients, learning rate, AdamW, and the check for divergence
compiling       torch.compile of that step
checkpoint      the checkpoints of a run
run_folder      its other files, and records of every step
rate_sweep      one short run at several learning rates
trackers        TensorBoard and Weights & Biases
processes       several processes under torchrun
estimate        the cost of a run, without running it
"""
