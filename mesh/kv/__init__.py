"""The worker's side of the KV store: pages, layouts, the arena, and the client."""
