"""The trainer: a config and a folder in, records, checkpoints and a model folder out.

config       every setting of a run
batches      its data, prepared once and read ahead of the training loop
model        its model: random, or from a folder, with LoRA adapters or without; saved at the end
losses       what it minimises, and the same on held-out data
step         one optimizer step, and when a run has diverged
trainer      the loop; `train(config, folder)` is the whole run
checkpoint, run_folder, records, terminal    what it writes and prints
processes    several processes under torchrun
estimate     what a run would take, without running it
"""
