"""Mutual TLS with certificates from a folder, reloaded when the files change.

A process has one folder with `ca.pem` (the trusted authority), `cert.pem` and `key.pem` (its own identity). Replacing
the files rotates them: a server uses the new certificates for new connections, and a client opens a new connection for
new calls and finishes pending ones on the old one (`wire.channel.Connection`).
"""

from __future__ import annotations

import ssl
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import grpc

from hetpipe.certs.files import CA_FILE, CERT_FILE, KEY_FILE
from hetpipe.clock import SYSTEM_CLOCK, Clock
from hetpipe.errors import UserError
from hetpipe.observe.log import get_logger

_log = get_logger(__name__)

#: Environment variable with the default for the folder.
TLS_VARIABLE = "HETPIPE_TLS"

#: Minimum seconds between two checks for changed files.
CHECK_SECONDS = 1.0

_Stamp = tuple[tuple[int, int, int], ...]


@dataclass(frozen=True, slots=True)
class Material:
    """The contents of the files at one moment. Equal versions mean equal files."""

    version: int
    ca: bytes
    cert: bytes
    key: bytes


class Tls:
    """A folder of certificates. Thread-safe."""

    def __init__(self, folder: Path, *, clock: Clock = SYSTEM_CLOCK) -> None:
        """Read the folder.

        Raises:
            UserError: a file is missing or unreadable, or certificate and key do not belong together.
        """
        self.folder = folder
        self._clock = clock
        self._lock = threading.Lock()
        self._checked_at = clock.monotonic()
        self._stamp = self._stamps()
        self._material = self._read(version=0)

    @property
    def material(self) -> Material:
        """The newest consistent set of files. A change is noticed within `CHECK_SECONDS`."""
        with self._lock:
            now = self._clock.monotonic()
            if now - self._checked_at >= CHECK_SECONDS:
                self._checked_at = now
                self._check_files()
            return self._material

    def channel_credentials(self, material: Material) -> grpc.ChannelCredentials:
        """Credentials of a client channel; an empty certificate means none."""
        return grpc.ssl_channel_credentials(material.ca, material.key or None, material.cert or None)

    def server_credentials(self) -> grpc.ServerCredentials:
        """Credentials of a server: clients must present a certificate; changed files apply to new connections."""
        given = self.material
        served = given.version

        def fetch() -> grpc.ServerCertificateConfiguration | None:
            nonlocal served
            newest = self.material
            if newest.version == served:
                return None
            served = newest.version
            return _configuration(newest)

        return grpc.dynamic_ssl_server_credentials(
            _configuration(given),
            fetch,  # type: ignore[arg-type]  # None is its word for "no change", which the stubs do not know
            require_client_authentication=True,
        )

    def _check_files(self) -> None:
        try:
            stamp = self._stamps()
            if stamp == self._stamp:
                return
            self._material = self._read(version=self._material.version + 1)
            self._stamp = stamp
            _log.info("certificates_changed", folder=str(self.folder))
        except UserError as error:
            # Only some files were replaced; the next check sees the others.
            _log.warning("certificates_unusable", sentence=str(error))

    def _stamps(self) -> _Stamp:
        try:
            found = [(self.folder / name).stat() for name in (CA_FILE, CERT_FILE, KEY_FILE)]
        except OSError as error:
            raise self._unreadable(error) from error
        return tuple((stat.st_mtime_ns, stat.st_ino, stat.st_size) for stat in found)

    def _read(self, *, version: int) -> Material:
        try:
            ca, cert, key = ((self.folder / name).read_bytes() for name in (CA_FILE, CERT_FILE, KEY_FILE))
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_verify_locations(cadata=ca.decode("ascii"))
            # An encrypted key is refused: there is no prompt for a password.
            context.load_cert_chain(self.folder / CERT_FILE, self.folder / KEY_FILE, password="")
        except (ssl.SSLError, ValueError) as error:
            raise UserError(
                f"the certificates in {self.folder} cannot be used ({error}); {CERT_FILE} and {KEY_FILE} must "
                "belong together, as `hetpipe certs issue` makes them"
            ) from error
        except OSError as error:
            raise self._unreadable(error) from error
        return Material(version, ca, cert, key)

    def _unreadable(self, error: OSError) -> UserError:
        return UserError(
            f"--tls {self.folder}: cannot read {error.filename or 'the folder'} ({error.strerror}); it must hold "
            f"{CA_FILE}, {CERT_FILE} and {KEY_FILE}, as `hetpipe certs issue` makes them"
        )


def tls_from_environment(environment: Mapping[str, str]) -> Tls | None:
    """The folder named by the environment; None: plaintext.

    Raises:
        UserError: its files cannot be used.
    """
    folder = environment.get(TLS_VARIABLE)
    return Tls(Path(folder)) if folder else None


def _configuration(material: Material) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(material.key, material.cert)], root_certificates=material.ca)
