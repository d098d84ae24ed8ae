"""A decode worker: reserves pages, computes the tail of each prompt, generates."""
