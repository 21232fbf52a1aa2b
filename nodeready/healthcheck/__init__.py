"""ON THE NODE: look, prove, judge and report on this machine alone; carried there as one file."""
