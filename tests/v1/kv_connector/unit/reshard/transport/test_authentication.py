# SPDX-License-Identifier: Apache-2.0
"""Who has the key is served as if there were none, and who has it not learns nothing."""

from __future__ import annotations

import contextlib
import os
import socket

import pytest
import zmq

from tests.v1.kv_connector.unit.reshard.transport.channels import (
    HOST,
    SHORT_S,
    WORKERS,
    ask,
    fetch,
    open_socket,
    serving,
    wait_until,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.errors import (
    LocalChannelError,
    RemoteUnreachableError,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.transport import side_channel
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.transport.authentication import (
    ChannelKey,
    read_channel_key,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.transport.side_channel import (
    ServerCounters,
)


def new_key() -> ChannelKey:
    """A key that nobody else has."""
    return ChannelKey(*zmq.curve_keypair())


KEY = new_key()


@contextlib.contextmanager
def capturing(port: int, secret: bytes | None, public: bytes | None, server_key: bytes | None):
    """A client with these keys that has sent a request; yields its socket."""
    with open_socket(zmq.REQ) as client:
        if server_key is not None:
            client.curve_secretkey, client.curve_publickey = secret, public
            client.curve_serverkey = server_key
        client.immediate = 1
        monitor = client.get_monitor_socket(zmq.EVENT_ALL)
        client.connect(f"tcp://{HOST}:{port}")
        yield client, monitor
        client.disable_monitor()
        monitor.close()


class TestServer:
    """Engines with a key, and who asks them."""

    def test_right_key(self):
        """Its owner is served, again and again."""
        with serving(key=KEY) as server:
            for _ in range(3):
                assert fetch(server.port, key=KEY) == WORKERS
            assert server.counters == ServerCounters(answered=3)

    @pytest.mark.parametrize("key", [None, new_key()], ids=["no key", "another key"])
    def test_others_get_no_connection(self, key, monkeypatch):
        """They are counted and told of, and whoever has the key is served meanwhile."""
        lines: list[str] = []
        monkeypatch.setattr(
            side_channel.logger, "warning", lambda text, *values: lines.append(text % values)
        )
        with serving(key=KEY) as server:
            with pytest.raises(
                RemoteUnreachableError, match="both engines have the same side_channel_key_file"
            ):
                fetch(server.port, key=key, timeout_s=SHORT_S)
            assert fetch(server.port, key=KEY) == WORKERS
            wait_until(lambda: server.counters.locked_out)
            counters = server.counters
        assert (counters.answered, counters.refused, counters.dropped) == (1, 0, 0)
        (line,) = lines
        assert "somebody without this engine's key tried to connect" in line

    def test_client_that_knows_the_public_key_only(self):
        """ZeroMQ lets it shake hands; the gate does not let it in."""
        stranger = new_key()
        with (
            serving(key=KEY) as server,
            capturing(server.port, stranger.secret, stranger.public, KEY.public) as (client, _),
        ):
            wait_until(lambda: server.counters.locked_out)
            assert not client.poll(0, zmq.POLLOUT)
            assert fetch(server.port, key=KEY) == WORKERS
            assert server.counters.answered == 1

    def test_strangers_bytes_are_answered_by_zeromqs_greeting_only(self):
        """Whoever sends a request in the clear hears that CURVE is spoken, and no more."""
        with serving(key=KEY) as server, socket.create_connection((HOST, server.port)) as raw:
            null = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
            ready = b"\x04\x19\x05READY\x0bSocket-Type\x00\x00\x00\x03REQ"
            request = b"\x01\x00\x00\x0e\x92\xc4\x09reshard/2\x00"
            raw.settimeout(20)
            heard = b""
            with contextlib.suppress(ConnectionError):
                raw.sendall(null + ready + request)
                while chunk := raw.recv(4096):
                    heard += chunk
        assert len(heard) <= 64
        assert heard[12:32].rstrip(b"\0") in (b"CURVE", b"")
        assert server.counters.answered == server.counters.dropped == 0

    def test_without_a_key_anybody_is_served(self):
        """As it was before there were keys."""
        with serving() as server:
            assert fetch(server.port) == WORKERS
            assert ask(server.port, b"\x92\xc4\x09reshard/2\x00")

    def test_server_that_broke_down_still_asks_for_the_key(self, monkeypatch):
        """Sockets that are opened anew are guarded like the first ones."""
        relay_all, failed = side_channel.relay_all, []

        async def fail_once(*args: object) -> None:
            if not failed:
                failed.append(True)
                raise zmq.ZMQError(zmq.ENOTSOCK)
            await relay_all(*args)

        monkeypatch.setattr(side_channel, "REOPEN_INTERVAL_S", 0.01)
        monkeypatch.setattr(side_channel, "relay_all", fail_once)
        with serving(key=KEY) as server:
            assert fetch(server.port, key=KEY) == WORKERS
            with pytest.raises(RemoteUnreachableError):
                fetch(server.port, timeout_s=SHORT_S)
            assert server.counters.breakdowns == 1


class TestImpostor:
    """Hosts that a client names, which are no engines of ours."""

    @pytest.mark.parametrize("key", [None, new_key()], ids=["no key", "another key"])
    def test_it_cannot_pose_as_a_peer(self, key):
        """An engine with the key neither asks it nor takes its answer."""
        with serving(key=key) as impostor:
            with pytest.raises(RemoteUnreachableError, match="no connection within"):
                fetch(impostor.port, key=KEY, timeout_s=SHORT_S)
            assert impostor.counters.answered == 0

    def test_knowing_the_public_key_is_not_enough(self):
        """It would have to have the secret one."""
        with open_socket(zmq.REP) as impostor:
            impostor.curve_server = True
            impostor.curve_secretkey = new_key().secret
            port = impostor.bind_to_random_port(f"tcp://{HOST}")
            with pytest.raises(RemoteUnreachableError, match="no connection within"):
                fetch(port, key=KEY, timeout_s=SHORT_S)
            assert not impostor.poll(0)


class TestKeyFile:
    """What a file may be."""

    def write(self, path, text: bytes, mode: int = 0o600) -> str:
        """A file with a mode."""
        path.write_bytes(text)
        path.chmod(mode)
        return str(path)

    @pytest.mark.parametrize("mode", [0o400, 0o600, 0o440, 0o640])
    def test_key_as_the_documented_command_prints_it(self, tmp_path, mode):
        """With a line's end, and readable by its owner and his group at most."""
        public, secret = zmq.curve_keypair()
        key = read_channel_key(self.write(tmp_path / "key", secret + b"\n", mode))
        assert (key.public, key.secret) == (public, secret)
        assert secret.decode() not in repr(key)

    @pytest.mark.parametrize("mode", [0o644, 0o604, 0o606, 0o601])
    def test_file_for_everybody(self, tmp_path, mode):
        """Others on the machine would have the key, too."""
        path = self.write(tmp_path / "key", zmq.curve_keypair()[1], mode)
        with pytest.raises(LocalChannelError, match=f"mode {mode:04o}, .* set 0400"):
            read_channel_key(path)

    @pytest.mark.parametrize(
        "text",
        [
            b"",
            b"short",
            b"x" * 41,
            b"~" * 40,
            b"\xff" * 40,
            b"#" * 40,
            b"two\nlines" * 5,
            b"0" * 9999,
        ],
        ids=lambda text: repr(text[:8]),
    )
    def test_file_without_a_key(self, tmp_path, text):
        """The error has the command that makes one, and does not quote what is there."""
        path = self.write(tmp_path / "key", text)
        with pytest.raises(LocalChannelError, match=r"holds no key.*zmq\.curve_keypair") as caught:
            read_channel_key(path)
        assert "\n" not in str(caught.value)
        assert caught.value.__context__ is None or caught.value.__suppress_context__

    @pytest.mark.parametrize("name", ["missing", "a\0b", "no/such/folder"])
    def test_file_that_cannot_be_read(self, tmp_path, name):
        """The error says where it has to be."""
        with pytest.raises(LocalChannelError, match="where each of this engine's processes runs"):
            read_channel_key(f"{tmp_path}/{name}")

    def test_pipe_is_not_waited_for(self, tmp_path):
        """A file is a file, and no folder either."""
        path = tmp_path / "pipe"
        os.mkfifo(path, 0o600)
        with pytest.raises(LocalChannelError, match="holds no key"):
            read_channel_key(str(path))
        tmp_path.chmod(0o700)
        with pytest.raises(LocalChannelError, match="side_channel_key_file"):
            read_channel_key(str(tmp_path))

    def test_zeromq_without_curve(self, tmp_path, monkeypatch):
        """It is told at the start."""
        path = self.write(tmp_path / "key", zmq.curve_keypair()[1])
        monkeypatch.setattr(zmq, "has", lambda capability: capability != "curve")
        with pytest.raises(LocalChannelError, match=r"ZeroMQ 4.* was built here without CURVE"):
            read_channel_key(path)
