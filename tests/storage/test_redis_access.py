"""Who may do what in Redis, and who proves what to whom: against real servers."""

from __future__ import annotations

import re
import socket
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from importlib import resources
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import pytest
import redis
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from redis.backoff import NoBackoff
from redis.retry import Retry
from structlog.testing import capture_logs

from hetpipe.certs.authority import Authority, key_to_pem, new_key
from hetpipe.errors import StoreUnavailable, UserError
from hetpipe.storage import redis_acl
from hetpipe.storage.redis_access import RedisAccess, read_password, read_url
from hetpipe.storage.redis_acl import acl_lines
from hetpipe.storage.store import Store
from hetpipe.storage.stores import open_store
from hetpipe.values.ids import Term
from tests.storage.redis_server import Server, needs_redis
from tests.storage.store_contract import Advance, DurableStoreContract, StoreContract

PASSWORD = "a long password"
ADMIN = "admin"


def password_file(folder: Path, text: str = f"{PASSWORD}\n") -> Path:
    path = folder / "password"
    path.write_text(text)
    path.chmod(0o600)
    return path


# -- the ACL user ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def shared_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("redis")
    acl = folder / "users.acl"
    acl.write_text("\n".join([*acl_lines("hetpipe", PASSWORD), f"user {ADMIN} on >{ADMIN} ~* &* +@all", ""]))
    server = Server(folder, "--aclfile", str(acl), user=ADMIN)
    yield server
    server.stop()


@pytest.fixture
def server(shared_server: Server) -> Server:
    shared_server.redis.flushall()
    shared_server.redis.acl_log_reset()
    return shared_server


def url_of(server: Server, user: str = "hetpipe") -> str:
    return f"unix://{user}@{server.socket}"


@needs_redis
class TestAsTheUserOfTheAcl(StoreContract):
    @pytest.fixture
    def advance(self, server: Server) -> Advance:
        return server.advance

    @pytest.fixture
    def store(self, server: Server, tmp_path: Path) -> Iterator[Store]:
        store = open_store(url_of(server), access=RedisAccess(password_file=password_file(tmp_path)))
        yield store
        store.close()
        refused = [entry["object"] for entry in server.redis.acl_log()]
        assert set(refused) <= {"client|setinfo"}  # redis-py introduces itself to servers that know it


@needs_redis
class TestRestarted(DurableStoreContract):
    """With the ACL as it is rendered, and an append-only file."""

    @pytest.fixture
    def server(self, tmp_path: Path) -> Iterator[Server]:
        acl = tmp_path / "users.acl"
        acl.write_text("\n".join([*acl_lines("hetpipe", PASSWORD), ""]))
        server = Server(tmp_path, "--aclfile", str(acl), "--appendonly", "yes", "--appendfsync", "always")
        yield server
        server.stop()

    @pytest.fixture
    def restart(self, server: Server) -> Callable[[bool], None]:
        return lambda kill: server.restart(kill=kill)

    @pytest.fixture
    def store(self, server: Server, tmp_path: Path) -> Iterator[Store]:
        store = open_store(url_of(server), access=RedisAccess(password_file=password_file(tmp_path)))
        yield store
        store.close()


def nobody(server: Server) -> redis.Redis:
    """Somebody who has not said who it is."""
    return redis.Redis(unix_socket_path=str(server.socket), protocol=2, retry=Retry(NoBackoff(), 0))


@needs_redis
class TestTheDefaultUser:
    """It has every right, for the replay of the append-only file, and nobody can be it."""

    def test_it_has_no_password(self, server: Server) -> None:
        user: Any = server.redis.acl_getuser("default")
        assert (user["passwords"], "off" in user["flags"], "nopass" in user["flags"]) == ([], True, False)

    @pytest.mark.parametrize("password", ["", " ", "default", PASSWORD, ADMIN])
    def test_nobody_can_authenticate_as_it(self, server: Server, password: str) -> None:
        for words in (["AUTH", "default", password], ["AUTH", password], ["HELLO", "2", "AUTH", "default", password]):
            client = nobody(server)
            with pytest.raises(redis.AuthenticationError, match="invalid username-password pair or user is disabled"):
                run(client, *words)
            with pytest.raises(redis.AuthenticationError, match="Authentication required"):
                run(client, "GET", "{hetpipe}:term")
            client.close()

    @pytest.mark.parametrize("command", ["PING", "GET x", "SET x y", "ACL WHOAMI", "EVAL return(1) 0", "RESET"])
    def test_nobody_is_it_without_authentication(self, server: Server, command: str) -> None:
        client = nobody(server)
        if command == "RESET":
            run(client, command)
            command = "GET x"
        with pytest.raises(redis.AuthenticationError, match="Authentication required"):
            run(client, *command.split())
        client.close()


def run(user: redis.Redis, *command: str) -> None:
    user.execute_command(*command)  # type: ignore[no-untyped-call]


def set_password(server: Server, password: str) -> None:
    server.redis.acl_setuser(
        "moved", enabled=True, reset_passwords=True, passwords=[f"+{password}"], keys=["*"], commands=["+@all"]
    )


def cut_off(server: Server, user: str) -> None:
    for client in server.redis.client_list():
        if client["user"] == user:
            server.redis.client_kill_filter(_id=client["id"])


@needs_redis
class TestWhatTheUserMayNot:
    @pytest.fixture
    def user(self, server: Server) -> Iterator[redis.Redis]:
        user = redis.Redis(unix_socket_path=str(server.socket), username="hetpipe", password=PASSWORD)
        yield user
        user.close()

    def test_other_keys(self, user: redis.Redis) -> None:
        for key in ("other", "hetpipe:jobs", "{hetpipe}", "x{hetpipe}:jobs"):
            with pytest.raises(redis.exceptions.NoPermissionError):
                user.set(key, "x")
            with pytest.raises(redis.ResponseError, match="no permissions to access one of the keys"):
                user.evalsha(user.script_load("return redis.call('GET', KEYS[1])"), 1, key)
        assert user.set("{hetpipe}:term", "1")

    @pytest.mark.parametrize(
        "command",
        [
            "FLUSHALL",
            "KEYS *",
            "CONFIG GET *",
            "ACL LIST",
            "EVAL 0 0",
            "SCRIPT FLUSH",
            "SHUTDOWN",
            "MONITOR",
            "TYPE other",
        ],
    )
    def test_other_commands(self, user: redis.Redis, command: str) -> None:
        with pytest.raises(redis.exceptions.NoPermissionError):
            run(user, *command.split())

    def test_channels(self, user: redis.Redis) -> None:
        with pytest.raises(redis.exceptions.NoPermissionError):
            run(user, "PUBLISH", "{hetpipe}:x", "x")

    def test_nobody_else_is_let_in(self, server: Server) -> None:
        store = open_store(server.url)
        with pytest.raises(StoreUnavailable, match="rejects the password of the default user"):
            store.jobs()
        store.close()

    def test_a_wrong_password_names_the_fix(self, server: Server, tmp_path: Path) -> None:
        store = open_store(url_of(server), access=RedisAccess(password_file=password_file(tmp_path, "wrong")))
        with pytest.raises(StoreUnavailable) as caught:
            store.next_term(above=Term(0))
        assert "rejects the password of user hetpipe" in str(caught.value)
        assert "compare --store-password-file" in str(caught.value)
        store.close()

    def test_a_user_without_rights_names_the_fix(self, server: Server, tmp_path: Path) -> None:
        server.redis.acl_setuser("poor", enabled=True, passwords=[f"+{PASSWORD}"], commands=["-@all"])
        store = open_store(url_of(server, "poor"), access=RedisAccess(password_file=password_file(tmp_path)))
        with pytest.raises(StoreUnavailable, match=r"denies user poor .* `hetpipe render redis-acl`"):
            store.jobs()
        store.close()

    def test_a_changed_password_needs_no_restart(self, server: Server, tmp_path: Path) -> None:
        path = password_file(tmp_path, "first")
        set_password(server, "first")
        store = open_store(url_of(server, "moved"), access=RedisAccess(password_file=path))
        assert store.next_term(above=Term(0)) == 1
        set_password(server, "second")
        path.write_text("second")
        cut_off(server, "moved")

        assert store.next_term(above=Term(0)) == 2
        path.unlink()
        cut_off(server, "moved")
        with pytest.raises(StoreUnavailable, match=r"--store-password-file .* cannot be read"):
            store.jobs()
        store.close()


class TestTheLines:
    def test_they_hold_no_password(self) -> None:
        lines = acl_lines("hetpipe", PASSWORD)
        assert lines[0] == "user default off resetpass ~* &* +@all"
        assert re.fullmatch(
            r"user hetpipe on #[0-9a-f]{64} ~\{hetpipe\}:\* resetchannels -@all( \+[a-z]+(\|[a-z]+)?)+", lines[1]
        )
        assert PASSWORD not in "".join(lines)

    def test_the_page_says_the_first_one(self) -> None:
        page = (Path(__file__).parents[2] / "docs" / "security-redis.md").read_text(encoding="utf-8")
        assert f"Its first line is `{acl_lines('hetpipe', PASSWORD)[0]}`" in page

    def test_they_have_the_commands_of_the_scripts(self) -> None:
        scripts = (resources.files("hetpipe.storage") / "lua").iterdir()
        said = {name.lower() for script in scripts for name in re.findall(r"redis\.call\('(\w+)'", script.read_text())}
        assert said == redis_acl._SCRIPT_COMMANDS

    @pytest.mark.parametrize("user", ["", "default", "a b", "a\nuser b on nopass +@all", "~*"])
    def test_no_user_can_smuggle_rights_in(self, user: str) -> None:
        with pytest.raises(UserError, match="--user"):
            acl_lines(user, PASSWORD)


# -- URLs and files ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "url",
    ["redis://user:secret@h:1/0", "redis://:secret@127.0.0.1:1", "rediss://h?password=secret", "unix://u:secret@/x"],
)
def test_a_password_in_the_url_is_refused_and_never_told(url: str) -> None:
    with pytest.raises(UserError, match="pass that with --store-password-file") as caught:
        open_store(url)
    assert "secret" not in str(caught.value)


def test_nothing_in_the_url_switches_checks_off() -> None:
    with pytest.raises(UserError, match="'ssl_cert_reqs'"):
        open_store("rediss://h:1/0?ssl_cert_reqs=none")


def test_what_a_url_says() -> None:
    target = read_url("rediss://het%20pipe@h.example:1/3")
    assert (target.url, target.user, target.place) == ("rediss://h.example:1/3", "het pipe", "h.example:1/3")
    local = {url: read_url(url).is_local for url in ("redis://127.0.0.9", "redis://[::1]:1", "unix:///x?db=2")}
    assert set(local.values()) == {True}
    assert not read_url("redis://redis:6379/0").is_local


@pytest.mark.parametrize(
    ("text", "sentence"),
    [("", "is empty"), (" \n", "is empty"), ("a\nb\n", "has several lines"), (None, "cannot be read")],
)
def test_an_unusable_password_file_names_the_fix(tmp_path: Path, text: str | None, sentence: str) -> None:
    path = tmp_path / "password" if text is None else password_file(tmp_path, text)
    with pytest.raises(UserError, match=f"--store-password-file {path}: {sentence}.*store the password of Redis in it"):
        open_store("redis://u@127.0.0.1:1/0", access=RedisAccess(password_file=path))


def test_a_password_file_may_end_with_a_newline(tmp_path: Path) -> None:
    assert read_password(password_file(tmp_path, "secret\n")) == "secret"


@pytest.mark.parametrize(("mode", "warns"), [(0o600, False), (0o400, False), (0o640, True), (0o604, True)])
def test_an_open_password_file_is_warned_of(tmp_path: Path, mode: int, warns: bool) -> None:  # noqa: FBT001 - a table
    path = password_file(tmp_path)
    path.chmod(mode)
    with capture_logs() as logs:
        open_store("redis://u@127.0.0.1:1/0", access=RedisAccess(password_file=path)).close()
    assert [entry["event"] for entry in logs] == ["password_file_is_open"] * warns


def test_a_password_that_would_travel_in_the_clear_is_warned_of(tmp_path: Path) -> None:
    access = RedisAccess(password_file=password_file(tmp_path))
    with capture_logs() as logs:
        open_store("redis://u@redis.example:1/0", access=access).close()
        open_store("rediss://u@redis.example:1/0", access=access).close()
    assert [entry["event"] for entry in logs] == ["password_in_the_clear"]


def test_options_that_do_not_go_together(tmp_path: Path) -> None:
    path = password_file(tmp_path)
    with pytest.raises(UserError, match="names the user 'u'; give its password by --store-password-file"):
        open_store("redis://u@127.0.0.1:1/0")
    with pytest.raises(UserError, match=r"write --store rediss://127\.0\.0\.1:1/0"):
        open_store("redis://127.0.0.1:1/0", access=RedisAccess(ca=path))
    with pytest.raises(UserError, match="--store memory takes no password"):
        open_store("memory", access=RedisAccess(password_file=path))


def test_certificates_that_cannot_be_used_are_told_at_once(tmp_path: Path) -> None:
    path = password_file(tmp_path)
    for ca in (path, tmp_path / "missing"):
        with pytest.raises(UserError, match=r"--store-ca .* is not a readable PEM file"):
            open_store("rediss://127.0.0.1:1/0", access=RedisAccess(ca=ca))
    with pytest.raises(UserError, match="cannot be used to authenticate to Redis"):
        open_store("rediss://127.0.0.1:1/0", access=RedisAccess(client_cert=path, client_key=path))


# -- TLS ---------------------------------------------------------------------------------------------------------------


def certificate_for_this_machine(authority: Authority, folder: Path) -> tuple[Path, Path]:
    """A certificate and its key for 127.0.0.1, as any private authority would issue it."""
    key, now = new_key(), datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([]))
        .issuer_name(authority.certificate.subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(minutes=1))
        .not_valid_after(now + timedelta(minutes=10))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1"))]), critical=True)
        .sign(authority.key, hashes.SHA256())
    )
    cert_path, key_path = folder / "cert.pem", folder / "key.pem"
    cert_path.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    key_path.write_bytes(key_to_pem(key))
    return cert_path, key_path


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@needs_redis
def test_tls_both_ways(tmp_path: Path) -> None:
    right, wrong = tmp_path / "right.pem", tmp_path / "wrong.pem"
    authority = Authority.new_root()
    right.write_bytes(authority.certificate_pem)
    wrong.write_bytes(Authority.new_root().certificate_pem)
    cert, key = certificate_for_this_machine(authority, tmp_path)
    port = free_port()
    tls = ("--tls-port", port, "--tls-cert-file", cert, "--tls-key-file", key, "--tls-ca-cert-file", right)
    server = Server(tmp_path, *map(str, tls), "--tls-auth-clients", "yes")

    def first_term(host: str, **access: Path) -> int:
        store = open_store(f"rediss://{host}:{port}/0", access=RedisAccess(**access))
        try:
            return store.next_term(above=Term(0))
        finally:
            store.close()

    try:
        own = {"client_cert": cert, "client_key": key}
        assert first_term("127.0.0.1", ca=right, **own) == 1
        for ca in ({"ca": wrong}, {}):
            with pytest.raises(StoreUnavailable, match=r"could not be verified .*; give --store-ca"):
                first_term("127.0.0.1", **ca, **own)
        with pytest.raises(StoreUnavailable, match=r"could not be verified .*that it names this host"):
            first_term("localhost", ca=right, **own)
        with pytest.raises(StoreUnavailable):
            first_term("127.0.0.1", ca=right)
        plain = open_store(f"redis://127.0.0.1:{port}/0")
        with pytest.raises(StoreUnavailable):
            plain.jobs()
        plain.close()
    finally:
        server.stop()
