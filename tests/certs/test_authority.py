"""What the authority signs, for whom, for how long; and what its signer cannot."""

from __future__ import annotations

import ssl
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509.oid import NameOID

from hetpipe.certs.authority import (
    STAGE_DAYS,
    Authority,
    authority_from_pem,
    facts_of,
    key_to_pem,
    new_key,
    request_for,
)
from hetpipe.errors import UserError
from hetpipe.values.identity import Peer
from tests.certs.cluster import AGENT, COORDINATOR, OPERATOR, SHARD, stage_peer

NOW = datetime(2030, 1, 2, tzinfo=UTC)
STAGE = stage_peer()


@pytest.fixture(scope="module")
def root() -> Authority:
    return Authority.new_root()


@pytest.fixture(scope="module")
def signer(root: Authority) -> Authority:
    return root.new_signer()


def loaded(pem: bytes) -> x509.Certificate:
    return x509.load_pem_x509_certificate(pem)


class Posing:
    """Somebody whose URI and DNS name belong to different processes."""

    def __init__(self, uri: str, server_name: str) -> None:
        self.uri, self.server_name, self.server_names = uri, server_name, (server_name,)


def signed_by(authority: Authority, subject: str) -> Authority:
    """An authority without bounds of its own, made with another's key."""
    key, name = new_key(), x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, subject)])
    issuer_key = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.key.public_key())
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder(authority.certificate.subject, name, key.public_key(), 1)
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(issuer_key, critical=False)
        .sign(authority.key, hashes.SHA256())
    )
    return Authority(certificate, key)


def handshake(root: Authority, chain: bytes, key: bytes, server_name: str, folder: Path) -> str:
    """What Python's TLS says of a server with this certificate; empty if nothing."""
    both = folder / "both.pem"
    both.write_bytes(key + chain)
    serving, calling = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    serving.load_cert_chain(both)
    calling.load_verify_locations(cadata=root.certificate_pem.decode())
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    server = serving.wrap_bio(to_server, to_client, server_side=True)
    client = calling.wrap_bio(to_client, to_server, server_hostname=server_name)
    for end in (client, server, client):
        try:
            end.do_handshake()
        except ssl.SSLWantReadError:
            continue
        except ssl.SSLCertVerificationError as error:
            return error.verify_message
    return ""


class TestIssued:
    @pytest.mark.parametrize("peer", [COORDINATOR, SHARD, AGENT, OPERATOR, STAGE], ids=str)
    def test_it_says_who_and_until_when(self, root: Authority, peer: Peer) -> None:
        pem = root.issue(peer, new_key().public_key(), days=3, now=NOW)
        facts = facts_of(pem)
        assert (facts.peer, facts.expires) == (peer, NOW + timedelta(days=3))
        assert loaded(pem).not_valid_before_utc == NOW - timedelta(minutes=5), "clocks differ"
        names = loaded(pem).extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        assert names.get_values_for_type(x509.DNSName) == list(peer.server_names)

    def test_it_signs_nothing_itself(self, root: Authority) -> None:
        found = loaded(root.issue(AGENT, new_key().public_key(), days=1)).extensions
        assert not found.get_extension_for_class(x509.BasicConstraints).value.ca
        assert not found.get_extension_for_class(x509.KeyUsage).value.key_cert_sign

    def test_servers_and_clients_both_use_it(self, root: Authority, tmp_path: Path) -> None:
        key = new_key()
        pem = root.issue(SHARD, key.public_key(), days=1)
        assert handshake(root, pem, key_to_pem(key), SHARD.server_name, tmp_path) == ""
        said = handshake(root, pem, key_to_pem(key), COORDINATOR.server_name, tmp_path)
        assert "certificate is not valid for 'coordinator.hetpipe'" in said
        other = handshake(Authority.new_root(), pem, key_to_pem(key), SHARD.server_name, tmp_path)
        assert "unable to get local issuer certificate" in other or "certificate signature failure" in other


class TestSigner:
    def test_it_certifies_stages(self, root: Authority, signer: Authority, tmp_path: Path) -> None:
        key = new_key()
        chain = signer.sign_stage(request_for(STAGE, key), STAGE, now=NOW)
        assert chain.endswith(signer.certificate_pem)
        assert facts_of(chain).expires == NOW + timedelta(days=STAGE_DAYS)
        assert loaded(chain).public_key() == key.public_key()
        chain = signer.sign_stage(request_for(STAGE, key), STAGE)
        assert handshake(root, chain, key_to_pem(key), STAGE.server_name, tmp_path) == ""

    def test_who_the_stage_is_says_the_caller_and_not_the_request(self, signer: Authority) -> None:
        chain = signer.sign_stage(request_for(OPERATOR, new_key()), STAGE)
        assert facts_of(chain).peer == STAGE

    @pytest.mark.parametrize(
        "posing",
        [
            Posing(OPERATOR.uri, OPERATOR.server_name),
            Posing(COORDINATOR.uri, STAGE.server_name),
            Posing(STAGE.uri, COORDINATOR.server_name),
        ],
        ids=["both names", "the URI", "the DNS name"],
    )
    def test_it_certifies_nobody_else(self, root: Authority, signer: Authority, posing: Posing, tmp_path: Path) -> None:
        key = new_key()
        leaf = signer.issue(posing, key.public_key(), days=1)  # type: ignore[arg-type]  # a thief need not be a Peer
        chain = leaf + signer.certificate_pem
        said = handshake(root, chain, key_to_pem(key), posing.server_name, tmp_path)
        assert said == "permitted subtree violation"

    @pytest.mark.parametrize(
        ("subject", "peer", "refusal"),
        [
            ("another signer", STAGE, "path length constraint exceeded"),
            # Under the signer's own name it does not count for the length of the path, but it is bound all the same.
            ("hetpipe stage signer", OPERATOR, "permitted subtree violation"),
        ],
    )
    def test_it_makes_no_other_authority(
        self, root: Authority, signer: Authority, subject: str, peer: Peer, refusal: str, tmp_path: Path
    ) -> None:
        thief, key = signed_by(signer, subject), new_key()
        chain = thief.issue(peer, key.public_key(), days=1) + thief.certificate_pem + signer.certificate_pem
        assert handshake(root, chain, key_to_pem(key), peer.server_name, tmp_path) == refusal


class TestRequests:
    @pytest.mark.parametrize("text", [b"", b"garbage", b"-----BEGIN CERTIFICATE REQUEST-----\nAAAA\n"])
    def test_garbage(self, signer: Authority, text: bytes) -> None:
        with pytest.raises(UserError, match="a certificate request cannot be read"):
            signer.sign_stage(text, STAGE)

    @pytest.mark.parametrize(
        "key",
        [ec.generate_private_key(ec.SECP384R1()), rsa.generate_private_key(65537, 1024)],
        ids=["another curve", "RSA"],
    )
    def test_keys_of_other_kinds(self, signer: Authority, key: ec.EllipticCurvePrivateKey) -> None:
        with pytest.raises(UserError, match="which must be on the curve P-256"):
            signer.sign_stage(request_for(STAGE, key), STAGE)

    def test_a_key_that_somebody_else_has(self, signer: Authority) -> None:
        """The signature under the request is not of the key in it."""
        request = x509.load_pem_x509_csr(request_for(STAGE, new_key()))
        der = bytearray(request.public_bytes(serialization.Encoding.DER))
        der[-1] ^= 1
        begin, end = b"-----BEGIN CERTIFICATE REQUEST-----\n", b"-----END CERTIFICATE REQUEST-----\n"
        pem = begin + ssl.DER_cert_to_PEM_cert(bytes(der)).encode().split(b"\n", 1)[1].rsplit(b"-----END", 1)[0] + end
        with pytest.raises(UserError, match="must be signed by its own key"):
            signer.sign_stage(pem, STAGE)


class TestReading:
    def test_an_authority_comes_back(self, root: Authority) -> None:
        again = authority_from_pem(root.certificate_pem, root.key_pem)
        assert (again.certificate, again.key_pem) == (root.certificate, root.key_pem)

    def test_pairs_that_do_not_belong_together(self, root: Authority) -> None:
        encoding, form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
        old = rsa.generate_private_key(65537, 1024).private_bytes(encoding, form, serialization.NoEncryption())
        for key in (key_to_pem(new_key()), old):
            with pytest.raises(UserError, match="do not match"):
                authority_from_pem(root.certificate_pem, key)

    def test_keys_that_cannot_be_read(self, root: Authority) -> None:
        encoding, form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
        locked = root.key.private_bytes(encoding, form, serialization.BestAvailableEncryption(b"secret"))
        for key in (b"garbage", locked):
            with pytest.raises(UserError, match="a private key cannot be read"):
                authority_from_pem(root.certificate_pem, key)

    def test_certificates_that_name_nobody(self, root: Authority) -> None:
        with pytest.raises(UserError, match="create one with `hetpipe certs issue`"):
            facts_of(root.certificate_pem)
        with pytest.raises(UserError, match="must be a PEM file"):
            facts_of(b"garbage")

    def test_a_certificate_names_one_process(self, root: Authority) -> None:
        names = [x509.UniformResourceIdentifier(peer.uri) for peer in (AGENT, OPERATOR)]
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "two")])
        certificate = (
            x509.CertificateBuilder(subject, subject, new_key().public_key(), 1, NOW, NOW + timedelta(days=1))
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .sign(root.key, hashes.SHA256())
        )
        with pytest.raises(UserError, match="does not name a process of hetpipe"):
            facts_of(certificate.public_bytes(serialization.Encoding.PEM))
