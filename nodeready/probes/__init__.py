"""OBSERVE: per subject, a POSIX sh text that only reads, and the parser of what it prints."""
