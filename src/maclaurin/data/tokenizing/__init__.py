"""Text ⇄ tokens: bytes, pairs learned from the corpus, or any Hugging Face tokenizer."""
