"""What can go wrong in the chunk store: five errors, one base.

`permanent` says whether the same call can succeed later without anybody changing something: the retry wrapper repeats
what is not permanent, and every edge (errno, exit code) maps from the class, never from the text. Texts are one line,
name the thing and, where there is one, the way out.
"""

from __future__ import annotations


class StoreError(Exception):
    """Base of all errors of this package."""

    permanent = True


class NotFound(StoreError):
    """The named object, reference, chunk or member does not exist."""


class Corrupt(StoreError):
    """Bytes do not match their digest, size or format. Never served, never cached."""


class Unavailable(StoreError):
    """The backend could not be reached, timed out or answered with a passing failure. Worth a retry."""

    permanent = False


class Denied(StoreError):
    """The backend refuses for good: no permission, read-only, full, or a wrong configuration."""


class Invalid(StoreError):
    """The caller's input cannot be accepted: a name, a tar entry, an option, a format version of another release."""
