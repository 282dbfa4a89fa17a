from hetpipe.proto.v2 import values_pb2 as _values_pb2
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class LinkHello(_message.Message):
    __slots__ = ("requester", "room")
    REQUESTER_FIELD_NUMBER: _ClassVar[int]
    ROOM_FIELD_NUMBER: _ClassVar[int]
    requester: _values_pb2.Requester
    room: int
    def __init__(self, requester: _Optional[_Union[_values_pb2.Requester, _Mapping]] = ..., room: _Optional[int] = ...) -> None: ...
