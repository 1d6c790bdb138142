"""Every backend keeps the contract; and what each does that the contract does not say."""

from __future__ import annotations

import socket
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar

import pytest
from hypothesis import settings, strategies
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, rule

from dsec_store.backends.folder import FolderBlobs
from dsec_store.backends.memory import MemoryBlobs
from dsec_store.backends.s3 import DEFAULT_REGION, S3Blobs, S3Settings
from dsec_store.blobs import BlobStore
from dsec_store.errors import Corrupt, Denied, Invalid, NotFound, StoreError, Unavailable
from dsec_store.locate import open_store
from dsec_store.retry import RetryBlobs
from dsec_store.testing import USES, BlobStoreContract, listed
from tests.s3server import S3Server


class TestMemoryBlobs(BlobStoreContract):
    @pytest.fixture
    def store(self) -> BlobStore:
        return MemoryBlobs()


class TestFolderBlobs(BlobStoreContract):
    @pytest.fixture
    def store(self, tmp_path: Path) -> BlobStore:
        return FolderBlobs(tmp_path)


@pytest.mark.component
class TestS3Blobs(BlobStoreContract):
    rounds = 15

    @pytest.fixture
    def store(self, s3_store: BlobStore) -> BlobStore:
        """With retries: of two writers of a key that meet, Swift answers one without an ETag, which obstore refuses."""
        return RetryBlobs(s3_store)


# Memory


def test_every_memory_store_is_another_one() -> None:
    assert MemoryBlobs().location != MemoryBlobs().location


class AgainstDict(RuleBasedStateMachine):
    """Whatever is done to a store in whatever order, it answers like a dictionary."""

    keys = Bundle("keys")

    def make_store(self) -> BlobStore:
        return MemoryBlobs()

    @initialize()
    def begin(self) -> None:
        self.store = self.make_store()
        self.model: dict[str, bytes] = {}

    @rule(target=keys, key=strategies.from_regex(r"(refs|packs)/[a-c]{1,2}(/[a-c%.]x)?", fullmatch=True))
    def name(self, key: str) -> str:
        return key.replace("/.", "/_")

    @rule(key=keys, data=strategies.binary(max_size=50))
    def put(self, key: str, data: bytes) -> None:
        self.store.put(key, data)
        self.model[key] = data

    @rule(key=keys)
    def delete(self, key: str) -> None:
        self.store.delete(key)
        self.model.pop(key, None)

    @rule(key=keys)
    def get(self, key: str) -> None:
        if key in self.model:
            assert self.store.get(key) == self.model[key]
        else:
            with pytest.raises(NotFound):
                self.store.get(key)

    @rule(prefix=strategies.sampled_from(["", "refs/", "packs/", "packs/a/", "packs/ab/"]))
    def list(self, prefix: str) -> None:
        expected = {key: len(data) for key, data in self.model.items() if key.startswith(prefix)}
        assert listed(self.store, prefix) == expected


TestMemoryAgainstDict = AgainstDict.TestCase
TestMemoryAgainstDict.settings = settings(max_examples=60, deadline=None)


# Folder


def test_a_folder_that_does_not_exist_is_not_found_and_not_made(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match=f"file://{tmp_path}/none"):
        FolderBlobs(tmp_path / "none")
    assert not (tmp_path / "none").exists()


def test_a_folder_is_made_when_asked_for_with_those_above_it(tmp_path: Path) -> None:
    FolderBlobs(tmp_path / "a" / "b", create=True).put("refs/x", b"1")
    assert FolderBlobs(tmp_path / "a" / "b").get("refs/x") == b"1"


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    for create in (False, True):
        for path in (tmp_path / "file", tmp_path / "file" / "below"):
            with pytest.raises(NotFound):
                FolderBlobs(path, create=create)


def test_two_objects_and_a_relative_path_see_the_same_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    FolderBlobs(tmp_path / "s", create=True).put("a", b"1")
    monkeypatch.chdir(tmp_path)
    again = FolderBlobs(Path("s"))
    assert again.get("a") == b"1"
    assert again.location == f"file://{tmp_path}/s"


def test_a_name_cannot_be_blob_and_folder(tmp_path: Path) -> None:
    store = FolderBlobs(tmp_path)
    store.put("packs/a", b"1")
    for key in ("packs", "packs/a/b", "packs/a/b/c"):
        with pytest.raises(Invalid, match="both"):
            store.put(key, b"2")
    assert listed(store) == {"packs/a": 1}
    assert not list((tmp_path / ".tmp").iterdir())


def test_what_is_no_blob_is_not_listed(tmp_path: Path) -> None:
    store = FolderBlobs(tmp_path)
    store.put("a", b"1")
    for name in ("lost+found", "with space", ".hidden"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "x").write_bytes(b"2")
    assert listed(store) == {"a": 1}


def test_blobs_can_be_read_by_those_whom_the_umask_lets(tmp_path: Path) -> None:
    store = FolderBlobs(tmp_path)
    store.put("packs/a", b"1")
    (tmp_path / "plain").write_bytes(b"")
    assert (tmp_path / "packs" / "a").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_a_new_store_is_its_owners_alone_and_one_that_exists_keeps_its_mode(tmp_path: Path) -> None:
    path = tmp_path / "above" / "store"
    FolderBlobs(path, create=True)
    assert stat.S_IMODE(path.stat().st_mode) == 0o700
    (tmp_path / "plain").mkdir()
    assert path.parent.stat().st_mode == (tmp_path / "plain").stat().st_mode
    path.chmod(0o750)
    FolderBlobs(path, create=True)
    assert stat.S_IMODE(path.stat().st_mode) == 0o750


# S3


def endpoint_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()
    return f"http://{host}:{port}"


def settings_for(server: S3Server, **changes: str) -> S3Settings:
    return S3Settings.from_environment({**server.environment, **changes})


@pytest.mark.component
def test_prefixes_that_begin_alike_are_different_stores(s3_server: S3Server, s3_url: str) -> None:
    store, other = (open_store(s3_url + end, environment=s3_server.environment) for end in ("", "0"))
    store.put("a", b"1")
    assert listed(other) == {}
    other.put("a", b"22")
    assert listed(store) == {"a": 1}
    assert store.location == s3_url


@pytest.mark.component
def test_a_listing_has_more_entries_than_a_page(s3_store: BlobStore) -> None:
    """Amazon lists 1,000 objects at a time, the test's server 100."""
    keys = {f"refs/{number}" for number in range(205)}
    for key in keys:
        s3_store.put(key, b"")
    assert set(listed(s3_store, "refs/")) == keys


@pytest.mark.component
@pytest.mark.parametrize("use", USES)
def test_a_missing_bucket_is_denied(s3_server: S3Server, use: Callable[[BlobStore, str], object]) -> None:
    store = S3Blobs("no-such-bucket", "", settings_for(s3_server))
    with pytest.raises(Denied, match=r"s3://no-such-bucket/a?: The specified bucket does not exist"):
        use(store, "a")


@pytest.mark.component
@pytest.mark.parametrize(
    ("variable", "value"),
    [("AWS_SECRET_ACCESS_KEY", "wrong"), ("AWS_ACCESS_KEY_ID", "nobody"), ("AWS_REGION", "elsewhere")],
)
def test_wrong_keys_and_regions_are_denied_and_not_repeated(s3_server: S3Server, variable: str, value: str) -> None:
    store = S3Blobs("dsec", "", settings_for(s3_server, **{variable: value}))
    uses: list[Callable[[], object]] = [
        lambda: store.get("a"),
        lambda: store.get_range("a", 0, 1),
        lambda: store.stat("a"),
        lambda: list(store.list("")),
        lambda: store.put("a", b""),
        lambda: store.delete("a"),
    ]
    for use in uses:
        with pytest.raises(Denied) as caught:
            use()
        assert "\n" not in str(caught.value)
        assert "Debug" not in str(caught.value)


def test_nobody_at_the_endpoint_is_unavailable() -> None:
    with socket.socket() as idle:  # bound and not listening: nobody else can take the port
        idle.bind(("127.0.0.1", 0))
        store = S3Blobs("bucket", "", S3Settings(endpoint_of(idle), "x", "key", "secret"))
        for use in USES:
            with pytest.raises(Unavailable, match="s3://bucket/a"):
                use(store, "a")
        with pytest.raises(Unavailable):
            list(store.list(""))


@contextmanager
def lying_server(*answers: bytes) -> Iterator[S3Blobs]:
    """A store whose server answers the requests with `answers` in turn, whatever was asked, and hangs up after each."""

    def serve(listener: socket.socket) -> None:
        for reply in answers:
            try:
                connection, _ = listener.accept()
            except OSError:  # fewer requests than answers
                return
            with connection:
                connection.recv(65536)
                connection.sendall(reply)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve, args=(listener,))
        thread.start()
        try:
            yield S3Blobs("bucket", "", S3Settings(endpoint_of(listener), "x", "key", "secret"))
        finally:
            listener.shutdown(socket.SHUT_RDWR)  # wakes a waiting accept
            thread.join()


def answer(status: str, body: bytes = b"", *headers: str, length: int | None = None) -> bytes:
    """An HTTP answer; `length` is what it claims."""
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body) if length is None else length}", "Connection: close"]
    lines += ['ETag: "x"', "Last-Modified: Wed, 01 Jan 2025 00:00:00 GMT", *headers]
    return "\r\n".join([*lines, "", ""]).encode() + body


@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        (b"", Unavailable),
        (b"nonsense\r\n\r\n", Unavailable),
        (answer("500 Internal Server Error"), Unavailable),
        (answer("503 Slow Down"), Unavailable),
        (answer("429 Too Many Requests"), Unavailable),
        (answer("400 Bad Request", b"<Error><Code>RequestTimeout</Code></Error>"), Unavailable),
        (answer("400 Bad Request", b"<Error><Code>ExpiredToken</Code></Error>"), Denied),
        (answer("401 Unauthorized"), Denied),
        (answer("403 Forbidden"), Denied),
        (answer("200 OK", b"12345", length=10), Unavailable),
    ],
)
def test_bad_answers_to_a_get(reply: bytes, expected: type[StoreError]) -> None:
    with lying_server(reply) as store, pytest.raises(expected):
        store.get("a")


def test_expired_keys_are_told_with_where_a_node_has_its_keys_from() -> None:
    body = b"<Error><Code>ExpiredToken</Code><Message>The provided token has expired.</Message></Error>"
    told = "s3://bucket/a: The provided token has expired: set new keys; .* dsec node stop, then dsec node start"
    with lying_server(answer("400 Bad Request", body)) as store, pytest.raises(Denied, match=told):
        store.get("a")


def test_a_blob_beyond_the_limit_is_refused_by_its_announced_size() -> None:
    with lying_server(answer("200 OK", b"", length=1 << 40)) as store, pytest.raises(Corrupt, match="1099511627776"):
        store.get("a", 10)


@pytest.mark.parametrize(
    "reply",
    [
        answer("206 Partial Content", b"123", "Content-Range: bytes 0-4/9"),  # fewer bytes than it says
        answer("206 Partial Content", b"12345", "Content-Range: bytes 1-5/9"),  # another range
        answer("200 OK", b"123456789"),  # no range at all
    ],
)
def test_bad_answers_to_a_get_range(reply: bytes) -> None:
    with lying_server(reply, answer("200 OK", length=9)) as store, pytest.raises(Unavailable):
        store.get_range("a", 0, 5)


# URLs


def test_a_url_opens_a_folder(tmp_path: Path) -> None:
    url = (tmp_path / "with space").as_uri()
    with pytest.raises(NotFound):
        open_store(url)
    store = open_store(url, create=True)
    assert store.location == url
    assert (tmp_path / "with space").is_dir()
    assert open_store(url.replace("file://", "file://localhost")).location == url


def test_a_url_opens_a_bucket() -> None:
    keys = {"AWS_ACCESS_KEY_ID": "k", "AWS_SECRET_ACCESS_KEY": "s"}
    for url in ("s3://bucket/some/prefix", "s3://bucket/some/prefix/"):
        assert open_store(url, environment=keys).location == "s3://bucket/some/prefix"
    assert open_store("s3://bucket", environment=keys).location == "s3://bucket"


@pytest.mark.parametrize(
    "url",
    [
        "",
        "/srv/store",
        "srv/store",
        "file:",
        "file://srv/store",
        "file:srv/store",
        "s3:bucket",
        "s3://",
        "s3:///prefix",
        "s3://bucket/a//b",
        "s3://bucket/../b",
        "memory:",
        "https://host/bucket",
        "s3://[bucket",
        "s3://bucket/a?endpoint=x",
        "s3://bucket#a",
    ],
)
def test_other_urls_are_invalid_and_the_message_says_what_is_accepted(url: str) -> None:
    with pytest.raises(Invalid, match=r"file:///folder or s3://bucket/prefix|not a key"):
        open_store(url, environment={})


def test_a_secret_in_a_url_is_refused_and_not_repeated() -> None:
    with pytest.raises(Invalid) as caught:
        open_store("s3://key:secret@bucket/prefix", environment={})
    assert "secret" not in str(caught.value)


class TestS3Settings:
    keys: ClassVar = {"AWS_ACCESS_KEY_ID": "k", "AWS_SECRET_ACCESS_KEY": "s"}

    def test_the_more_special_variable_wins(self) -> None:
        special = {"AWS_ENDPOINT_URL_S3": "http://s3", "AWS_REGION": "here"}
        general = {"AWS_ENDPOINT_URL": "http://all", "AWS_DEFAULT_REGION": "there", "AWS_SESSION_TOKEN": "t"}
        both = S3Settings.from_environment(self.keys | special | general)
        assert both == S3Settings("http://s3", "here", "k", "s", "t")
        assert S3Settings.from_environment(self.keys | general) == S3Settings("http://all", "there", "k", "s", "t")

    def test_defaults(self) -> None:
        assert S3Settings.from_environment(self.keys) == S3Settings(None, DEFAULT_REGION, "k", "s", None)

    def test_without_keys_only_amazon_itself_can_be_asked(self) -> None:
        S3Settings.from_environment({})
        for lonely in ("AWS_ENDPOINT_URL", *self.keys):
            with pytest.raises(Denied, match="AWS_SECRET_ACCESS_KEY"):
                S3Settings.from_environment({lonely: "x"})

    @pytest.mark.parametrize(
        "endpoint",
        [
            *(
                "127.0.0.1:9000",
                "notaurl",
                "http://",
                "http:///x",
                "ftp://host",
                "//host",
                "http://:80",
                " http://host",
            ),
            *("http://a b", "http://host:port", "http://host:65536", "http://[::1", "http://[:::]", "http://1.2.3.999"),
            *("http://user:secret@host", "http://host?x=1", "http://host#x", "http://h%zz", "http://host\n"),
        ],
    )
    def test_the_address_of_no_server_is_refused_and_not_repeated(self, endpoint: str) -> None:
        for variable in ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"):
            with pytest.raises(Invalid) as caught:
                S3Settings.from_environment({**self.keys, variable: endpoint})
            form = "expected http://HOST:PORT or https://HOST"
            assert str(caught.value) == f"{variable} is not the address of a server ({form})"

    @pytest.mark.parametrize(
        "endpoint", ["http://[::1]:9000", "https://s3.host.org", "HTTP://host_1:65535/a/~b/", "http://127.0.0.1"]
    )
    def test_addresses_of_servers(self, endpoint: str) -> None:
        assert S3Settings.from_environment({**self.keys, "AWS_ENDPOINT_URL": endpoint}).endpoint == endpoint

    def test_secrets_are_not_shown(self) -> None:
        assert "topsecret" not in repr(S3Settings(None, "r", "k", "topsecret", "topsecret"))
