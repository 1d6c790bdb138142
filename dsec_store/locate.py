"""From the URL of a store to the store.

    open_store("file:///srv/store", create=True)
    open_store("s3://bucket/some/prefix")

The server and keys of an S3 store come from the usual AWS_... variables, so that no URL ever holds a secret.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final
from urllib.parse import SplitResult, unquote, urlsplit

from dsec_store.blobs import BlobStore, check_key
from dsec_store.errors import Invalid

FORMS: Final = "file:///folder or s3://bucket/prefix"
"""The accepted forms, for messages."""


def open_store(url: str, *, create: bool = False, environment: Mapping[str, str] = os.environ) -> BlobStore:
    """The bare backend at `url`; wrappers are the caller's affair.

    `create` makes a folder that does not exist (else `NotFound`); buckets are never made. Raises `Invalid` for anything
    that is not one of the accepted forms, `Denied` when an S3 server's keys are not in `environment`.
    """
    try:
        parts = urlsplit(url)
    except ValueError:  # such as an unclosed bracket
        parts = SplitResult("", "", "", "", "")
    if parts.query or parts.fragment or "@" in parts.netloc:
        raise Invalid(f"the address of a store has no ?, # or user (expected {FORMS}, keys in AWS_ACCESS_KEY_ID...)")
    if parts.scheme == "file" and parts.netloc in ("", "localhost") and parts.path.startswith("/"):
        from dsec_store.backends.folder import FolderBlobs

        return FolderBlobs(Path(unquote(parts.path)), create=create)
    if parts.scheme == "s3" and parts.netloc:
        from dsec_store.backends.s3 import S3Blobs, S3Settings

        prefix = parts.path.strip("/")
        return S3Blobs(parts.netloc, prefix and check_key(prefix), S3Settings.from_environment(environment))
    raise Invalid(f"not the address of a store: {url!r} (expected {FORMS})")
