# SPDX-License-Identifier: Apache-2.0
"""The key by which engines authenticate each other, and its use on ZeroMQ's sockets.

All cryptography is ZeroMQ's CURVE, which encrypts a connection once both ends have proved that they
have the expected secret keys. All engines that read from each other share one pair of keys, derived
from one secret in one file:

    a client    connects only to a server that has the secret key
    a server    accepts clients that have it: ZeroMQ asks a `ZapHandler`, in the server's own thread

Others get no further than ZeroMQ's own handshake, which reveals only that CURVE is used. To make a
new key:

    python -c "import zmq; print(zmq.curve_keypair()[1].decode())"
"""

from __future__ import annotations

import os
import stat
import struct
from dataclasses import dataclass, field
from typing import Any, NoReturn

import zmq
import zmq.asyncio
from zmq.utils import z85

from ..errors import LocalChannelError, one_line, quote

_KEY_CHARACTERS = 40
_MAX_FILE_BYTES = 1 << 10
_DOMAIN = b"reshard"
_REMEDY = (
    'make one with python -c "import zmq; print(zmq.curve_keypair()[1].decode())", and give all '
    "engines the same"
)


@dataclass(frozen=True, slots=True)
class ChannelKey:
    """A pair of keys in ZeroMQ's encoding (Z85, 40 characters).

    Attributes:
        public: Derived from the secret key.
        secret: Known to the engines only.
    """

    public: bytes
    secret: bytes = field(repr=False)

    def configure_server(self, server: zmq.Socket[Any]) -> None:
        """Have a socket reject clients without this key; its context must have a `ZapHandler`."""
        server.curve_server = True
        server.curve_secretkey = self.secret
        server.zap_domain = _DOMAIN

    def configure_client(self, client: zmq.Socket[Any]) -> None:
        """Have a socket connect only to servers with this key, and prove that we have it."""
        client.curve_serverkey = self.public
        client.curve_publickey = self.public
        client.curve_secretkey = self.secret


def read_channel_key(path: str) -> ChannelKey:
    """Read the key that all engines share.

    Raises:
        LocalChannelError: ZeroMQ has no CURVE here, or the file cannot be read, can be read by all,
            or holds no key.
    """
    what = f"side_channel_key_file {quote(str(path))}"
    if not zmq.has("curve"):
        raise LocalChannelError(
            f"{what} cannot be used, as ZeroMQ {one_line(zmq.zmq_version())} was built here "
            "without CURVE: install pyzmq from its wheel, or leave the option out on all engines"
        )
    try:
        # Do not block on a pipe without a writer.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        try:
            mode = os.fstat(descriptor).st_mode
            text = os.read(descriptor, _MAX_FILE_BYTES) if stat.S_ISREG(mode) else b""
        finally:
            os.close(descriptor)
    except (OSError, ValueError) as error:
        raise LocalChannelError(
            f"{what} cannot be read ({one_line(error)}): put it where each of this engine's "
            "processes runs, readable by their user"
        ) from None
    if mode & stat.S_IRWXO:
        raise LocalChannelError(
            f"{what} has mode {stat.S_IMODE(mode):04o}, which lets every user of this machine use "
            "it: set 0400, or 0440 where a group has to read it"
        )
    try:
        secret = text.strip()
        if len(secret) != _KEY_CHARACTERS or len(z85.decode(secret)) != 32:
            raise ValueError
        return ChannelKey(zmq.curve_public(secret), secret)
    except (ValueError, KeyError, struct.error, zmq.ZMQError):
        # Do not quote a secret, even an invalid one.
        raise LocalChannelError(
            f"{what} holds no key of {_KEY_CHARACTERS} characters in one line: {_REMEDY}"
        ) from None


class ZapHandler:
    """Answers ZeroMQ which clients have the key (RFC 27, ZAP). Belongs to the server's thread.

    Args:
        context: Context of the server's socket, to which nothing is connected yet: without a
            handler, ZeroMQ accepts every client.
        key: The key that clients must have.

    Raises:
        ZMQError: There are no more sockets.
    """

    def __init__(self, context: zmq.asyncio.Context, key: ChannelKey) -> None:
        self._admitted = z85.decode(key.public)
        self._socket = context.socket(zmq.REP)
        self._socket.bind("inproc://zeromq.zap.01")

    async def answer_all(self) -> NoReturn:
        """Answer ZeroMQ's requests until cancelled."""
        while True:
            (
                version,
                request_id,
                domain,
                _,
                _,
                mechanism,
                *credentials,
            ) = await self._socket.recv_multipart()
            passes = (domain, mechanism, credentials) == (_DOMAIN, b"CURVE", [self._admitted])
            status = (b"200", b"OK") if passes else (b"400", b"not a key of these engines")
            await self._socket.send_multipart([version, request_id, *status, b"", b""])
