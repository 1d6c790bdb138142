"""The chunk store: layers as digest-named chunks, packs, chunk maps and descriptors on any blob store.

Everything that has a digest is written once and never changes; references alone are mutable. The package knows nothing
of OCI registries, FUSE or containerd: those are front ends, which import it and are never imported by it.
"""
