"""The certificates of an agent's stages: requested when a stage starts, renewed while it lives, deleted with it.

A stage's key never leaves its node: the agent creates it, and the coordinator certifies it if the plan places the stage
here. Each stage has a folder of its own, like any other process.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from hetpipe.certs.authority import STAGE_DAYS, PrivateKey, key_to_pem, new_key, request_for
from hetpipe.certs.files import CA_FILE, CERT_FILE, KEY_FILE
from hetpipe.certs.folders import write_file
from hetpipe.clock import SYSTEM_CLOCK, Clock
from hetpipe.errors import HetpipeError
from hetpipe.observe.log import get_logger
from hetpipe.server.agent.private_folder import PrivateFolder
from hetpipe.values.commands import StageKey
from hetpipe.wire.tls import Material, Tls

_log = get_logger(__name__)

#: Share of its validity after which a certificate is renewed, and the pause before a failed renewal is retried.
_RENEW_AFTER_SECONDS = STAGE_DAYS * 86_400 / 2
_RETRY_SECONDS = 60.0

#: Requests a certificate from the coordinator: key of the stage, request as PEM → certificate as PEM.
Certify = Callable[[StageKey, bytes], bytes]


@dataclass(slots=True)
class _Held:
    folder: Path
    key: PrivateKey
    renew_at: float
    version: int
    """Version of the agent's certificates from which the trust anchors were copied."""


class StageCertificates:
    """The folders of live stages. Thread-safe."""

    def __init__(self, tls: Tls, certify: Certify, *, clock: Clock = SYSTEM_CLOCK) -> None:
        """Create a private folder for them.

        Args:
            tls: the agent's own certificates; its stages have the same trust anchors.
            certify: the request to the coordinator.
            clock: for renewals.
        """
        self._tls = tls
        self._certify = certify
        self._clock = clock
        self._root = PrivateFolder("hetpipe-stages-")
        self._lock = threading.Lock()
        self._held: dict[StageKey, _Held] = {}

    def make(self, stage: StageKey) -> Path:
        """Create the folder of a new stage.

        Raises:
            HetpipeError: the coordinator does not certify it, or the folder cannot be written.
        """
        key = new_key()
        life = f"term-{stage.term}-life-{stage.incarnation}"
        folder = self._root.path / f"{stage.job_id}-vw-{stage.vw}-stage-{stage.stage}-{life}"
        material = self._tls.material
        held = _Held(folder, key, self._clock.monotonic() + _RENEW_AFTER_SECONDS, material.version)
        try:
            write_file(folder / CA_FILE, material.ca, mode=0o644)
            write_file(folder / KEY_FILE, key_to_pem(key), mode=0o600)
            self._write_certificate(stage, held)
        except HetpipeError:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        with self._lock:
            self._held[stage] = held
        return folder

    def forget(self, stage: StageKey) -> None:
        """Delete the folder of a stage that has ended."""
        with self._lock:
            held = self._held.pop(stage, None)
        if held is not None:
            shutil.rmtree(held.folder, ignore_errors=True)

    def renew(self) -> None:
        """Renew the due certificates, and all of them when the agent's own have changed.

        Retried later if the coordinator is unreachable.
        """
        now, material = self._clock.monotonic(), self._tls.material
        with self._lock:
            held_now = list(self._held.items())
        for stage, held in held_now:
            if held.renew_at <= now or held.version != material.version:
                self._renew(stage, held, material, now=now)

    def _renew(self, stage: StageKey, held: _Held, material: Material, *, now: float) -> None:
        try:
            write_file(held.folder / CA_FILE, material.ca, mode=0o644)
            held.version = material.version
            self._write_certificate(stage, held)
            held.renew_at = now + _RENEW_AFTER_SECONDS
        except HetpipeError as error:
            held.renew_at = now + _RETRY_SECONDS
            _log.warning("certificate_not_renewed", stage=str(stage), sentence=str(error))
        with self._lock:
            has_ended = stage not in self._held
        if has_ended:  # during the renewal, which recreated its folder
            shutil.rmtree(held.folder, ignore_errors=True)

    def close(self) -> None:
        """Delete all folders."""
        self._root.close()

    def _write_certificate(self, stage: StageKey, held: _Held) -> None:
        certificate = self._certify(stage, request_for(stage.peer, held.key))
        write_file(held.folder / CERT_FILE, certificate, mode=0o644)
