"""What is proved by acting in a session of the job's user, not by looking."""
