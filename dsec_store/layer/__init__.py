"""Layers: from a tar or a folder to an EROFS metadata image over a blob address space, and back."""
