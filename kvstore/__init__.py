"""The KV store of a node: who may hold which page, and which page holds which block."""
