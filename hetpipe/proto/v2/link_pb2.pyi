from hetpipe.proto.v2 import values_pb2 as _values_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class LinkHello(_message.Message):
    __slots__ = ("requester", "room", "memory")
    REQUESTER_FIELD_NUMBER: _ClassVar[int]
    ROOM_FIELD_NUMBER: _ClassVar[int]
    MEMORY_FIELD_NUMBER: _ClassVar[int]
    requester: _values_pb2.Requester
    room: int
    memory: _containers.RepeatedCompositeFieldContainer[_values_pb2.MemoryOffer]
    def __init__(self, requester: _Optional[_Union[_values_pb2.Requester, _Mapping]] = ..., room: _Optional[int] = ..., memory: _Optional[_Iterable[_Union[_values_pb2.MemoryOffer, _Mapping]]] = ...) -> None: ...

class LinkTransport(_message.Message):
    __slots__ = ("refusal",)
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    refusal: str
    def __init__(self, refusal: _Optional[str] = ...) -> None: ...
