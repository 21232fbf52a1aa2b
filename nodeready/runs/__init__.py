"""RUN a command: from its options to its document, a package or a module for each command.

A run asks the nodes through `targets`, tells the user by `tell`, and knows neither click nor the
screen. Only `deploy` changes the settings of a node. `cores` takes a core of a live process only
on request.
"""
