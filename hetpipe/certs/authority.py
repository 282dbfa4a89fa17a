"""Private certificate authority of one cluster, and the signer with which its coordinator certifies stages.

The root signs every certificate issued by an operator, and the coordinator's *signer*. Stages live as long as their
job, so their certificates cannot be issued in advance: the agent that starts a stage creates a key and a signing
request, and the coordinator signs it if the plan places that stage on that agent's node. A name constraint limits the
signer to the domain of stages: a stolen signer can impersonate stages, but no coordinator, shard, agent or operator.

Needs the extra `tls`. Keys are on the curve P-256: small, fast, and supported by every TLS library.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Self

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from hetpipe.errors import UserError
from hetpipe.values.identity import STAGE_DOMAIN, Peer, StagePeer, identity_from_uri

#: Validity: of the root and the signer, of certificates issued by an operator, and of a stage's.
AUTHORITY_DAYS = 3_650
PROCESS_DAYS = 365
STAGE_DAYS = 7

#: Certificates are backdated by this much, because clocks differ.
_SKEW = timedelta(minutes=5)

PrivateKey = ec.EllipticCurvePrivateKey
PublicKey = ec.EllipticCurvePublicKey


@dataclass(frozen=True, slots=True)
class Authority:
    """CA certificate with its private key."""

    certificate: x509.Certificate
    key: PrivateKey

    @classmethod
    def new_root(cls, *, now: datetime | None = None) -> Self:
        """Create the root of a new cluster."""
        key = new_key()
        name = _name("hetpipe root")
        builder = _builder(name, key.public_key(), now, AUTHORITY_DAYS).issuer_name(name)
        builder = _may_sign(builder, key.public_key(), path_length=1)
        return cls(builder.sign(key, hashes.SHA256()), key)

    def new_signer(self, *, now: datetime | None = None) -> Authority:
        """Create a signer restricted to stages."""
        key = new_key()
        builder = _builder(_name("hetpipe stage signer"), key.public_key(), now, AUTHORITY_DAYS)
        builder = _may_sign(builder, key.public_key(), path_length=0).add_extension(
            x509.NameConstraints(
                permitted_subtrees=[
                    x509.DNSName(STAGE_DOMAIN),
                    x509.UniformResourceIdentifier(STAGE_DOMAIN),
                ],
                excluded_subtrees=None,
            ),
            critical=True,
        )
        return Authority(self._sign(builder), key)

    def issue(self, peer: Peer, public_key: PublicKey, *, days: float, now: datetime | None = None) -> bytes:
        """Issue a certificate for `peer`, the holder of the private half of `public_key`, as PEM."""
        builder = _builder(_name(str(peer)[:_LONGEST_NAME]), public_key, now, days)
        for extension, critical in (
            (x509.SubjectAlternativeName([_uri(peer), *map(x509.DNSName, peer.server_names)]), False),
            (x509.BasicConstraints(ca=False, path_length=None), True),
            (_key_usage(signs_certificates=False), True),
            (x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]), False),
        ):
            builder = builder.add_extension(extension, critical=critical)
        return _pem(self._sign(builder))

    def sign_stage(self, request_pem: bytes, peer: StagePeer, *, now: datetime | None = None) -> bytes:
        """Issue a certificate for the stage with the request `request_pem`, followed by the signer's own, as PEM.

        Only the key is taken from the request; the caller supplies the stage's identity.

        Raises:
            UserError: the request cannot be parsed, is not signed by its own key, or has another type of key.
        """
        leaf = self.issue(peer, _key_of_request(request_pem), days=STAGE_DAYS, now=now)
        return leaf + self.certificate_pem

    @property
    def certificate_pem(self) -> bytes:
        """The certificate, as PEM."""
        return _pem(self.certificate)

    @property
    def key_pem(self) -> bytes:
        """The private key, as PEM without a password."""
        return key_to_pem(self.key)

    def _sign(self, builder: x509.CertificateBuilder) -> x509.Certificate:
        issuer_key = x509.AuthorityKeyIdentifier.from_issuer_public_key(self.key.public_key())
        builder = builder.issuer_name(self.certificate.subject).add_extension(issuer_key, critical=False)
        return builder.sign(self.key, hashes.SHA256())


def authority_from_pem(certificate: bytes, key: bytes) -> Authority:
    """Load an authority from its certificate and key.

    Raises:
        UserError: they cannot be parsed, or do not match.
    """
    found = _certificate(certificate)
    try:
        private = serialization.load_pem_private_key(key, password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise UserError(f"a private key cannot be read ({type(error).__name__})") from error
    if not isinstance(private, ec.EllipticCurvePrivateKey) or private.public_key() != found.public_key():
        raise UserError("a certificate and the private key beside it do not match")
    return Authority(found, private)


def new_key() -> PrivateKey:
    """Generate a private key."""
    return ec.generate_private_key(ec.SECP256R1())


def key_to_pem(key: PrivateKey) -> bytes:
    """A private key, as PEM without a password."""
    encoding, form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    return key.private_bytes(encoding, form, serialization.NoEncryption())


def request_for(peer: Peer, key: PrivateKey) -> bytes:
    """Create a certificate signing request, as PEM."""
    subject = x509.CertificateSigningRequestBuilder().subject_name(_name(str(peer)[:_LONGEST_NAME]))
    return subject.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


@dataclass(frozen=True, slots=True)
class CertificateFacts:
    """Subject and expiry of a certificate."""

    peer: Peer
    expires: datetime
    """UTC."""
    server_names: tuple[str, ...] = ()
    """Server names that it is valid for."""


def facts_of(certificate: bytes) -> CertificateFacts:
    """Identity and expiry of the first certificate of a PEM file.

    Raises:
        UserError: it cannot be parsed, or its subject is not a hetpipe process.
    """
    found = _certificate(certificate)
    try:
        names = found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        uris = names.get_values_for_type(x509.UniformResourceIdentifier)
        hosts = names.get_values_for_type(x509.DNSName)
    except (x509.ExtensionNotFound, ValueError):
        uris, hosts = [], []
    peers = [peer for peer in map(identity_from_uri, uris) if peer is not None]
    if len(peers) != 1:
        raise UserError("a certificate does not name a process of hetpipe; create one with `hetpipe certs issue`")
    return CertificateFacts(peers[0], found.not_valid_after_utc, tuple(hosts))


_LONGEST_NAME = 64


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _uri(peer: Peer) -> x509.UniformResourceIdentifier:
    return x509.UniformResourceIdentifier(peer.uri)


def _builder(subject: x509.Name, public_key: PublicKey, now: datetime | None, days: float) -> x509.CertificateBuilder:
    begins = (now or datetime.now(UTC)) - _SKEW
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .public_key(public_key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(begins)
        .not_valid_after(begins + _SKEW + timedelta(days=days))
    )


def _may_sign(builder: x509.CertificateBuilder, key: PublicKey, *, path_length: int) -> x509.CertificateBuilder:
    return (
        builder.add_extension(x509.BasicConstraints(ca=True, path_length=path_length), critical=True)
        .add_extension(_key_usage(signs_certificates=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
    )


def _key_usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def _certificate(pem: bytes) -> x509.Certificate:
    try:
        return x509.load_pem_x509_certificate(pem)
    except ValueError as error:
        raise UserError("a certificate cannot be read; it must be a PEM file") from error


def _key_of_request(pem: bytes) -> PublicKey:
    try:
        request = x509.load_pem_x509_csr(pem)
        signed, key = request.is_signature_valid, request.public_key()
    except (ValueError, UnsupportedAlgorithm) as error:
        raise UserError("a certificate request cannot be read") from error
    if not signed or not isinstance(key, ec.EllipticCurvePublicKey) or key.curve.name != ec.SECP256R1.name:
        raise UserError("a certificate request must be signed by its own key, which must be on the curve P-256")
    return key
