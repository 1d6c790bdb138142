"""Snapshots of layered images: what layers a root file system has, how they are mounted, and who still needs them.

It is a library first, which the sandbox edge uses in its own process, and a containerd proxy plugin second.
"""
