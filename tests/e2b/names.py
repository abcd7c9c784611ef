"""A name server on 127.0.0.1: every name below the given domain is this host, and no other name exists."""

import socket
import struct
import sys

domain = sys.argv[1]
server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
server.bind(("127.0.0.1", 53))
while True:
    query, client = server.recvfrom(4096)
    at, labels = 12, []
    while query[at]:
        labels.append(query[at + 1 : at + 1 + query[at]].decode())
        at += query[at] + 1
    (kind,) = struct.unpack(">H", query[at + 1 : at + 3])
    known = ".".join(labels).lower().endswith("." + domain)
    # One address record, whose name is the one of the question.
    answer = b"\xc0\x0c\0\x01\0\x01\0\0\0\x3c\0\x04\x7f\0\0\x01" if known and kind == 1 else b""
    flags = 0x8180 if known else 0x8183
    head = query[:2] + struct.pack(">HHHHH", flags, 1, bool(answer), 0, 0)
    server.sendto(head + query[12 : at + 5] + answer, client)
