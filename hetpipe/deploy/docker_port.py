"""What `deploy.engine` needs of the docker SDK, which ships no types: its own names, in so far as they are used."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol


class ContainerPort(Protocol):
    """`docker.models.containers.Container`."""

    @property
    def name(self) -> str:
        """Its name."""
        ...

    @property
    def labels(self) -> Mapping[str, str]:
        """Its labels."""
        ...

    @property
    def status(self) -> str:
        """`created`, `running`, `exited`, …, as of the last `reload`."""
        ...

    @property
    def attrs(self) -> Mapping[str, Any]:
        """Its attributes in the engine, as of the last `reload`."""
        ...

    def reload(self) -> None:
        """Refresh from the engine."""
        ...

    def start(self) -> None:
        """Start it."""
        ...

    def kill(self, signal: str) -> None:
        """Send a signal."""
        ...

    def update(self, *, restart_policy: Mapping[str, str]) -> object:
        """Change when the engine starts it again."""
        ...

    def remove(self, *, v: bool, force: bool) -> None:
        """Remove it, with its anonymous volumes."""
        ...

    def logs(self, **options: Any) -> Any:
        """Its output: bytes, or an iterator of pieces with `stream=True`."""
        ...


class ContainersPort(Protocol):
    """`client.containers`."""

    def create(self, image: str, command: Sequence[str], **options: Any) -> ContainerPort:
        """Make a container."""
        ...

    def list(self, *, all: bool, filters: Mapping[str, str]) -> Sequence[ContainerPort]:  # noqa: A002 - the SDK's word
        """Find containers."""
        ...


class NetworkPort(Protocol):
    """`docker.models.networks.Network`."""

    @property
    def name(self) -> str:
        """Its name."""
        ...

    def remove(self) -> None:
        """Remove it."""
        ...


class NetworksPort(Protocol):
    """`client.networks`."""

    def create(self, name: str, **options: Any) -> NetworkPort:
        """Make a network."""
        ...

    def list(self, *, filters: Mapping[str, str]) -> Sequence[NetworkPort]:
        """Find networks."""
        ...


class ImagesPort(Protocol):
    """`client.images`."""

    def get(self, name: str) -> object:
        """Find an image."""
        ...


class DockerPort(Protocol):
    """`docker.DockerClient`."""

    @property
    def containers(self) -> ContainersPort:
        """Containers."""
        ...

    @property
    def networks(self) -> NetworksPort:
        """Networks."""
        ...

    @property
    def images(self) -> ImagesPort:
        """Images."""
        ...

    def close(self) -> None:
        """End the connection."""
        ...
