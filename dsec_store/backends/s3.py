"""Blobs as objects of an S3 bucket, through obstore.

obstore was chosen for its speed (four times boto3's GETs a second at a sixth of the CPU time). It retries nothing here:
that is `RetryBlobs`' work. It hands on whatever the server sends, so wrong bytes are `VerifyBlobs`' to find. Uploads
are signed with the digest of their body, so a server refuses a body that was damaged on the way.

Every blob is written by one PUT: atomic, and no parts of killed uploads stay behind. (S3's limit for that is 5 GiB.)
Nothing here relies on conditional requests: several servers accept and ignore them.

    S3Blobs("bucket", "some/prefix", S3Settings.from_environment(os.environ))

obstore starts threads: a process that has used a store must not fork and then use it in the child.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from ipaddress import AddressValueError, IPv4Address, IPv6Address
from typing import TYPE_CHECKING, Final

import obstore
from obstore.exceptions import BaseError
from obstore.store import S3Store

from dsec_store.blobs import BlobStat, check_key, check_prefix
from dsec_store.bounds import check_end, check_length, check_limit, check_range
from dsec_store.errors import Denied, Invalid, NotFound, StoreError, Unavailable

if TYPE_CHECKING:
    from obstore.store import S3Config

CONNECT_TIMEOUT: Final = timedelta(seconds=5)
READ_TIMEOUT: Final = timedelta(seconds=20)
"""Without one byte from the server."""
REQUEST_TIMEOUT: Final = timedelta(minutes=5)
"""From connecting to the last byte: enough for a blob of 300 MB at 1 MB/s."""

DEFAULT_REGION: Final = "us-east-1"

_FAILURES: Final = (BaseError, OSError, ValueError)
"""What obstore raises: its own errors, and FileNotFoundError, TimeoutError or ValueError."""

_ENDPOINTS: Final = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
_ENDPOINT: Final = re.compile(
    r"https?://(?:(?P<name>[\w-]+(?:\.[\w-]+)*)|\[(?P<ip>[0-9a-f:.]+)\])(?::(?P<port>\d{1,5}))?(?:/[\w.~/-]*)?",
    re.ASCII | re.IGNORECASE,
)
_NUMERIC: Final = re.compile(r"(?:.*\.)?(?:\d+|0x[0-9a-f]*)", re.ASCII | re.IGNORECASE)
"""What obstore can use; its HTTP client panics on much of the rest."""
_PORT_MAX: Final = 65535

_NO_KEYS: Final = "no keys for S3: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
_ROLE_SERVICE: Final = "http://169.254.169.254/"
"""Where obstore asks for the keys of the machine's role when it has none; only some clouds answer there."""

_UNANSWERED: Final = re.compile(r"Error performing [A-Z]+ (https?://[^/\s]+).* - HTTP error: ([^\n]*)")
_STATUS: Final = re.compile(r"status code: (\d{3})\b")
_MESSAGE: Final = re.compile(r"<Message>([^<]*)</Message>")
_EXPIRED_CODE: Final = "<Code>ExpiredToken</Code>"
_EXPIRED: Final = (
    "set new keys; a node that runs has those of the shell that started it: dsec node stop, then dsec node start"
)
_PASSING_CODE: Final = "<Code>RequestTimeout</Code>"
_PASSING_STATUS: Final = frozenset({408, 409, 425, 429})
"""Answers of the 4xx kind that another try may change; RequestTimeout is such a one that comes as 400."""


@dataclass(frozen=True, slots=True)
class S3Settings:
    """Where the server is and who asks."""

    endpoint: str | None = None
    """None: Amazon's own, in `region`."""
    region: str = DEFAULT_REGION
    access_key_id: str | None = None
    """None: obstore looks for the credentials of the machine's role, if it has one."""
    secret_access_key: str | None = field(default=None, repr=False)
    session_token: str | None = field(default=None, repr=False)

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> S3Settings:
        """From the variables that every S3 client reads.

        Raises `Denied` when keys lack that nothing else can give, `Invalid` for what is not the address of a server.
        """

        def first(*names: str) -> str | None:
            return next((environment[name] for name in names if environment.get(name)), None)

        settings = cls(
            endpoint=first(*_ENDPOINTS),
            region=first("AWS_REGION", "AWS_DEFAULT_REGION") or DEFAULT_REGION,
            access_key_id=first("AWS_ACCESS_KEY_ID"),
            secret_access_key=first("AWS_SECRET_ACCESS_KEY"),
            session_token=first("AWS_SESSION_TOKEN"),
        )
        keys = [settings.access_key_id, settings.secret_access_key]
        if None in keys and (settings.endpoint or keys != [None, None]):
            raise Denied(_NO_KEYS)
        if settings.endpoint and not _is_endpoint(settings.endpoint):
            variable = next(name for name in _ENDPOINTS if environment.get(name))
            raise Invalid(f"{variable} is not the address of a server (expected http://HOST:PORT or https://HOST)")
        return settings

    def config(self) -> S3Config:
        """The same in obstore's words; what is not set is left out."""
        config: S3Config = {"region": self.region}
        if self.endpoint:
            config |= {"endpoint": self.endpoint, "virtual_hosted_style_request": False}
        if self.access_key_id and self.secret_access_key:
            config |= {"access_key_id": self.access_key_id, "secret_access_key": self.secret_access_key}
        if self.session_token:
            config["session_token"] = self.session_token
        return config


def _is_endpoint(text: str) -> bool:
    match = _ENDPOINT.fullmatch(text)
    if not match or int(match["port"] or 0) > _PORT_MAX:
        return False
    try:
        if match["ip"]:
            IPv6Address(match["ip"])
        elif _NUMERIC.fullmatch(match["name"]):
            IPv4Address(match["name"])
    except AddressValueError:
        return False
    return True


class S3Blobs:
    """The store in `bucket` below `prefix`. The bucket must exist: `Denied` at the first use when it does not."""

    def __init__(self, bucket: str, prefix: str, settings: S3Settings) -> None:
        self._location = f"s3://{bucket}/{prefix}".rstrip("/")
        self._bucket_seen = False
        with self._failures(self._location):
            self._store = S3Store(
                bucket,
                prefix=prefix or None,
                config=settings.config(),
                client_options={
                    "allow_http": (settings.endpoint or "").startswith("http://"),
                    "connect_timeout": CONNECT_TIMEOUT,
                    "read_timeout": READ_TIMEOUT,
                    "timeout": REQUEST_TIMEOUT,
                },
                retry_config={"max_retries": 0, "retry_timeout": REQUEST_TIMEOUT},
            )

    @property
    def location(self) -> str:
        return self._location

    def put(self, key: str, data: bytes | memoryview) -> None:
        with self._failures(self._name(key)):
            obstore.put(self._store, key, data, use_multipart=False)

    def get(self, key: str, limit: int | None = None) -> bytes:
        name = self._name(key)
        with self._reading(name):
            answer = obstore.get(self._store, key)
            size = answer.meta["size"]
            check_limit(name, size, limit)
            return check_length(name, bytes(answer.bytes()), size)

    def get_range(self, key: str, offset: int, length: int) -> bytes:
        check_range(offset, length)
        name = self._name(key)
        try:
            with self._reading(name):
                data = bytes(obstore.get_range(self._store, key, start=offset, length=length))
        except Denied:  # 416, perhaps: servers refuse a range that begins behind the end...
            self._check_end(key, offset, length)
            raise
        if len(data) < length:  # ...and clip one that reaches beyond it
            self._check_end(key, offset, length)
        return check_length(name, data, length)

    def stat(self, key: str) -> BlobStat | None:
        name = self._name(key)
        try:
            with self._reading(name):
                head = obstore.head(self._store, key)
                return BlobStat(key, head["size"], head["last_modified"].timestamp())
        except NotFound:
            return None

    def list(self, prefix: str) -> Iterator[BlobStat]:
        check_prefix(prefix)
        return self._pages(prefix)

    def delete(self, key: str) -> None:
        with self._failures(self._name(key)):
            obstore.delete(self._store, key)

    def _name(self, key: str) -> str:
        return f"{self._location}/{check_key(key)}"

    def _check_end(self, key: str, offset: int, length: int) -> None:
        if stat := self.stat(key):
            check_end(self._name(key), stat.size, offset, length)

    def _pages(self, prefix: str) -> Iterator[BlobStat]:
        with self._failures(f"{self._location}/{prefix}"):
            for page in obstore.list(self._store, prefix=prefix or None):
                for entry in page:
                    yield BlobStat(entry["path"], entry["size"], entry["last_modified"].timestamp())

    @contextmanager
    def _reading(self, name: str) -> Iterator[None]:
        """`NotFound` for a missing object; a missing bucket, which answers in the same way, is `Denied`."""
        with self._failures(name):
            try:
                yield
            except FileNotFoundError as error:
                self._check_bucket()
                raise NotFound(f"{name} does not exist") from error

    def _check_bucket(self) -> None:
        """Ask once whether there is a bucket at all: listing a missing one fails."""
        if not self._bucket_seen:
            next(self._pages(""), None)
            self._bucket_seen = True

    @contextmanager
    def _failures(self, name: str) -> Iterator[None]:
        try:
            yield
        except _FAILURES as error:
            raise _translated(error, name) from error


def _translated(error: Exception, name: str) -> StoreError:
    """Our error for one of obstore's.

    obstore has classes for few of the ways to fail: a refused listing, a wrong region and a dead network are all
    `GenericError`. The HTTP status is only in its text, so it is read from there; when that fails, the error counts as
    passing and is repeated in vain, which costs time and nothing else.
    """
    text = str(error)
    if _ROLE_SERVICE in text:
        return Denied(f"{name}: {_NO_KEYS}")
    found = _STATUS.search(text)
    status = int(found[1]) if found else 0
    passing = status in _PASSING_STATUS or _PASSING_CODE in text
    return (Denied if 400 <= status < 500 and not passing else Unavailable)(f"{name}: {_reason(text)}")


def _reason(text: str) -> str:
    """The server's own message, else the first line of obstore's, which is followed by a dump of its internals."""
    if message := _MESSAGE.search(text):
        return f"{message[1].rstrip('.')}: {_EXPIRED}" if _EXPIRED_CODE in text else message[1]
    if unanswered := _UNANSWERED.search(text):
        return f"no answer from {unanswered[1]} ({unanswered[2]}): does AWS_ENDPOINT_URL name the right server?"
    return text.partition("\n")[0].partition("<?xml")[0].rstrip(": ")
