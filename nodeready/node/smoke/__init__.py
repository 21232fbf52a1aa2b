"""The node's part in a smoke test: run ranks as the job's user, end them, say what they saw."""
