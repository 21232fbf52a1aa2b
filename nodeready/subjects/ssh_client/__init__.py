"""ssh between the nodes: host keys, and the options that answer its questions."""
