"""The operating system: files, signals, streams, and what this machine has."""
