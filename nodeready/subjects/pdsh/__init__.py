"""pdsh: its remote command, and the ~/.pdshrc of the policy's users."""
