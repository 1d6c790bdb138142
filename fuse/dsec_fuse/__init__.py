"""The data daemon of a node: serves each layer's blob device as a lazily filled file over the kernel's FUSE protocol.

A read that the node cache cannot answer is fetched from the chunk store, verified, and only then handed to the kernel.
The daemon runs as a process of its own and mounts nothing but its FUSE file system, so that it can be restarted alone.
"""
