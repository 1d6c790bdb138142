"""The sandboxes of a node: environments, runtimes, sessions, network and checkpoints, behind one edge process.

Commands are run from outside: a sandbox holds no agent, socket or secret of the platform.
"""
