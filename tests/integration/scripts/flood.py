"""Requests with a wrong token, as fast as they are answered: ``flood.py HOST PORT TOTAL AT_ONCE``. Prints how many got a 401."""

import selectors
import socket
import sys

host, port, total, at_once = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
REQUEST = (
    b"GET /v1/agent HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\nSec-WebSocket-Version: 13\r\nAuthorization: Bearer wrong\r\n\r\n"
)
poll = selectors.DefaultSelector()
refused = begun = ended = 0


def dial() -> None:
    """One more."""
    sock = socket.socket()
    sock.setblocking(False)
    sock.connect_ex((host, port))
    poll.register(sock, selectors.EVENT_WRITE)


while ended < total:
    while begun < total and begun - ended < at_once:
        dial()
        begun += 1
    for key, events in poll.select(30):
        sock = key.fileobj
        assert isinstance(sock, socket.socket)
        try:
            if events & selectors.EVENT_WRITE:
                sock.send(REQUEST)
                poll.modify(sock, selectors.EVENT_READ)
                continue
            refused += sock.recv(65536).startswith(b"HTTP/1.1 401 ")
        except OSError:
            pass
        poll.unregister(sock)
        sock.close()
        ended += 1
sys.stdout.write(str(refused))
