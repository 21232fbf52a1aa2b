"""Checks of other tools, as checks of a site's own (`checks.d`)."""
