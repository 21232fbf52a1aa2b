"""Where a crash leaves its core, and for how long."""
