"""Fused operations, one contract, several backends. Knows nothing of models, requests or weights' formats."""
