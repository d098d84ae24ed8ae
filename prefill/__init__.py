"""A prefill worker: computes whole blocks of prompts, in chunks, and commits them."""
