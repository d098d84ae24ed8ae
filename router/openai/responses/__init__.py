"""`/v1/responses`: items in, items and typed events out. A conversation is what chat makes of it."""
