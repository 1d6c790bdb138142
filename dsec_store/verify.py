"""Trust nothing that comes back: a blob whose key names its bytes must hold those bytes.

S3 clients hand on short, long, flipped and stale bodies without an error, so the check is ours. It is complete for
whole blobs with a digest in their key. A range cannot be checked against the digest of the whole: here it must have the
right length, and whoever asked for it checks the digest of the chunk inside.

    VerifyBlobs(S3Blobs(...)).get("packs/ab/ab12…")     # these bytes, or Corrupt
"""

from __future__ import annotations

from dsec_store.around import AroundBlobs
from dsec_store.bounds import check_length
from dsec_store.keys import verbatim_digest


class VerifyBlobs(AroundBlobs):
    """Raises `Corrupt` for whole blobs that do not match their key, `Unavailable` for ranges of a wrong length."""

    def get(self, key: str, limit: int | None = None) -> bytes:
        digest = verbatim_digest(key)
        data = self.inner.get(key, limit)
        if digest is not None:
            digest.verify(data, f"{self.location}/{key}")
        return data

    def get_range(self, key: str, offset: int, length: int) -> bytes:
        data = self.inner.get_range(key, offset, length)
        return check_length(f"{self.location}/{key}", data, length)
