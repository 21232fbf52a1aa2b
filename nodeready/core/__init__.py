"""What every package builds on: values, judging, text, files, exit codes. It imports no other."""
