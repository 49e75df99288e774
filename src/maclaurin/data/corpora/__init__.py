"""Where text comes from: the standard library, files, data sets of the Hugging Face hub."""
