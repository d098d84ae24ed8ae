"""Weights: where they come from and how stored formats become float32. Formats stay at this border."""
