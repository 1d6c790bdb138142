"""The metadata image of a layer: an EROFS file system without file contents.

`format` knows the bytes, `writer` and `reader` turn a tree (`dsec_store.layer.tree`) into an image and back. Contents
lie on *blob devices*, which the kernel is given at mount time, in the order of the image's device table:

    write_image(root, [Device(tag=blob.hex, blocks=blob_size // 4096)], out)
    mount("layer.erofs", target, "erofs", MS_RDONLY, "device=/path/of/the/blob")
    read_image(Path("layer.erofs").read_bytes()).root.find(b"etc/passwd").address

The format is described in docs/format/metadata-image.md.
"""

from dsec_store.layer.erofs.format import Device
from dsec_store.layer.erofs.reader import Image, read_image
from dsec_store.layer.erofs.writer import write_image

__all__ = ["Device", "Image", "read_image", "write_image"]
