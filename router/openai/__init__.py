"""The OpenAI dialect: requests in, answers and streams out. It works nothing out by itself; the core does."""
