"""`/v1/messages`: the dialect of Anthropic's clients. A request is what chat makes of it."""
