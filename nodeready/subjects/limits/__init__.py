"""The resource limits of jobs: at login, in services, in what runs already."""
