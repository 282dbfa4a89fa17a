"""Readable YAML: members of enumerations as text, multi-line text as blocks."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

import yaml


class _Dumper(yaml.SafeDumper):
    """The dumper of this module."""

    def ignore_aliases(self, data: Any) -> bool:
        """Write repeated values in full, without aliases."""
        return True


def _text(dumper: _Dumper, value: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", str(value), style="|" if "\n" in value else None)


_Dumper.add_representer(str, _text)
_Dumper.add_multi_representer(StrEnum, _text)


def to_yaml(value: Any) -> str:
    """`value` as a YAML document, in the order of its keys."""
    text: str = yaml.dump(value, Dumper=_Dumper, sort_keys=False, width=120)
    return text
