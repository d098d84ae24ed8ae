"""The gRPC faces of IAM. Protobuf messages come no further than this folder."""
