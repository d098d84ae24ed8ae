"""One request core, used by the OpenAI face and by the gRPC face."""
