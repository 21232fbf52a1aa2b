"""The ports on which jobs meet: who holds them, and what a packet filter drops."""
