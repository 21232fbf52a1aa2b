"""OBSERVE and JUDGE: a folder per subject, its facts (what a node shows) and its checks.

Facts are read by POSIX sh text that changes nothing and are parsed into frozen dataclasses, never
judged; checks are pure functions of an observation and a policy, without I/O.
"""
