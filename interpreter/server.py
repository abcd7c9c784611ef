#!/usr/bin/env python3
"""The code interpreter of template code-interpreter-v1: E2B's protocol on port 49999, in the standard library only.

    python3 server.py [--host 127.0.0.1] [--port 49999] [--envd 127.0.0.1:49983] [--cwd /home/user]

This file is the HTTP side. Contexts and executions are in contexts.py, the processes that run code in kernels.py.

Invariant: every request is bounded in size and time, and the number of connections too.
Absent on purpose: authentication. The token of /execute is handed on to envd, as E2B does; who may reach this port is
decided outside the sandbox.
"""

import argparse
import asyncio
import json
import os
import signal
import sys
from urllib.parse import unquote

from contexts import Contexts, Envd, Execution, NotSupported, Refused, checked_variables
from kernels import KernelFailed

HEAD_BYTES_MAX = 64 * 1024
BODY_BYTES_MAX = 32 * 1024 * 1024
REQUEST_SECONDS_MAX = 60.0
# Longer than the idle time of any proxy in front of us, so that it is the proxy that closes.
IDLE_SECONDS_MAX = 640.0
CONNECTIONS_MAX = 512
REASONS = {200: "OK", 400: "Bad Request", 404: "Not Found", 413: "Content Too Large",
           429: "Too Many Requests", 500: "Internal Server Error", 503: "Service Unavailable"}
CORS = "access-control-allow-origin: *\r\naccess-control-allow-methods: *\r\naccess-control-allow-headers: *\r\n"


class Request:
    """One HTTP request, whole."""

    def __init__(self, method, path, headers, body):
        self.method = method
        self.path = path
        self.headers = headers
        self.body = body

    def json(self):
        """The body as an object; an empty body is an empty one."""
        try:
            value = json.loads(self.body or b"{}")
        except ValueError as error:
            raise Refused(400, f"The body is not JSON: {error}") from error
        if not isinstance(value, dict):
            raise Refused(400, "The body must be a JSON object")
        return value


class Server:
    """Answers requests about contexts."""

    def __init__(self, contexts):
        self._contexts = contexts
        self._connections = 0

    async def connection(self, reader, writer):
        """Serve one connection until either side ends it."""
        self._connections += 1
        try:
            if self._connections > CONNECTIONS_MAX:
                writer.write(_answer(503, "Too many connections", keep=False))
                return
            while await self._serve_one(reader, writer):
                pass
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.TimeoutError, asyncio.CancelledError):
            # It broke, was idle for too long, or the server stops; the connection is all that this task has.
            pass
        finally:
            self._connections -= 1
            writer.close()

    async def _serve_one(self, reader, writer):
        try:
            request = await _read_request(reader, writer)
            if request is None:
                return False
            keep = request.headers.get("connection", "").lower() != "close"
            return await self._route(request, reader, writer, keep)
        except Refused as refused:
            # After a request that was not read to its end, the connection cannot be used again.
            keep = refused.status not in (400, 413)
            writer.write(_answer(refused.status, str(refused), keep))
            await writer.drain()
            return keep

    async def _route(self, request, reader, writer, keep):
        parts = [unquote(part) for part in request.path.split("?", 1)[0].strip("/").split("/")]
        match (request.method, *parts):
            case ("OPTIONS", *_):
                answer = "OK"
            case ("GET", "health"):
                answer = "OK"
            case ("GET", "contexts"):
                answer = self._contexts.list()
            case ("POST", "contexts"):
                answer = await self._create(request.json())
            case ("POST", "contexts", context_id, "restart"):
                answer = await self._contexts.get(context_id).restart()
            case ("DELETE", "contexts", context_id):
                answer = await self._contexts.remove(context_id)
            case ("POST", "execute"):
                return await self._execute(request, reader, writer, keep)
            case _:
                raise Refused(404, f"There is no {request.method} {request.path}")
        writer.write(_answer(200, json.dumps(answer), keep, "application/json"))
        await writer.drain()
        return keep

    async def _create(self, wish):
        language, cwd = _text(wish, "language"), _text(wish, "cwd")
        return (await self._contexts.create(language, cwd)).describe()

    async def _execute(self, request, reader, writer, keep):
        wish = request.json()
        code, context_id, language = _text(wish, "code"), _text(wish, "context_id"), _text(wish, "language")
        if code is None:
            raise Refused(400, "code is missing")
        if context_id and language:
            raise Refused(400, "Only one of context_id or language can be provided")
        try:
            once = checked_variables(wish.get("env_vars"))
        except ValueError as error:
            raise Refused(400, str(error)) from error
        execution = self._start(code, once, context_id, language, request.headers.get("x-access-token"))
        gone = asyncio.create_task(reader.read(1))
        try:
            await _stream(execution, writer, gone)
        finally:
            execution.abandon()
            gone.cancel()
            # Only when it has really ended may the next request be read.
            await asyncio.wait({gone})
        # Somebody who sends the next request early gets it unanswered, and repeats it on a new connection.
        return keep and gone.cancelled()


    def _start(self, code, once, context_id, language, token):
        try:
            context = self._contexts.get(context_id) if context_id else self._contexts.default(language)
        except NotSupported as error:
            # E2B's JavaScript client shows nobody the text of an HTTP error, but everybody sees an execution's.
            return Execution.failed("LanguageNotSupported", str(error))
        return context.execute(code, once, token)


async def _stream(execution, writer, gone):
    """Write what the execution says, chunk by chunk. Raises ConnectionError when the client has gone."""
    writer.write(f"HTTP/1.1 200 OK\r\ncontent-type: application/x-ndjson\r\n{CORS}transfer-encoding: chunked\r\n\r\n".encode())
    while True:
        said = asyncio.create_task(execution.read())
        watched = {said} if gone.done() else {said, gone}
        await asyncio.wait(watched, return_when=asyncio.FIRST_COMPLETED)
        if gone.done() and not gone.result():
            said.cancel()
            raise ConnectionResetError
        data = await said
        writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        await writer.drain()
        if not data:
            return


async def _read_request(reader, writer):
    """The next request, or None when the client has closed."""
    try:
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), IDLE_SECONDS_MAX)
    except asyncio.IncompleteReadError:
        return None
    except asyncio.LimitOverrunError as error:
        raise Refused(413, f"The request's head is longer than {HEAD_BYTES_MAX} bytes") from error
    lines = head.decode("latin-1").split("\r\n")
    words = lines[0].split(" ")
    if len(words) != 3 or not words[2].startswith("HTTP/1."):
        raise Refused(400, "This is not an HTTP/1.1 request")
    headers = {}
    for line in filter(None, lines[1:]):
        name, colon, value = line.partition(":")
        if not colon:
            raise Refused(400, "A header has no colon")
        headers[name.strip().lower()] = value.strip()
    if words[2] == "HTTP/1.0":
        headers["connection"] = "close"
    if headers.get("expect", "").lower() == "100-continue":
        writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    body = await asyncio.wait_for(_read_body(reader, headers), REQUEST_SECONDS_MAX)
    return Request(words[0], words[1], headers, body)


async def _read_body(reader, headers):
    if headers.get("transfer-encoding", "").lower() != "chunked":
        return await reader.readexactly(_size(headers.get("content-length", "0"), 10, 0))
    body = bytearray()
    while True:
        size = _size((await reader.readline()).split(b";")[0].strip().decode("latin-1"), 16, len(body))
        body += await reader.readexactly(size)
        end = await reader.readline()
        if size == 0:
            # Trailers, which nobody needs, end with an empty line.
            while end.strip():
                end = await reader.readline()
            return bytes(body)


def _size(text, base, already):
    try:
        size = int(text, base)
    except ValueError as error:
        raise Refused(400, f"{text[:40]!r} is not a size") from error
    if size < 0 or already + size > BODY_BYTES_MAX:
        raise Refused(413, f"A body may have at most {BODY_BYTES_MAX} bytes")
    return size


def _text(wish, name):
    value = wish.get(name)
    if value is not None and (not isinstance(value, str) or "\0" in value):
        raise Refused(400, f"{name} must be text without NUL")
    return value


def _answer(status, text, keep, kind="text/plain; charset=utf-8"):
    body = text.encode()
    head = f"HTTP/1.1 {status} {REASONS[status]}\r\ncontent-type: {kind}\r\ncontent-length: {len(body)}\r\n{CORS}"
    return (head + ("" if keep else "connection: close\r\n") + "\r\n").encode() + body


async def _warm(contexts, stop):
    """Start the kernel that nearly everybody asks for, before they do."""
    try:
        await contexts.default("python").start()
    except KernelFailed as error:
        # Not the end: the first execution tries again and tells its client.
        if not stop.is_set():
            print(f"code interpreter: {error}", file=sys.stderr, flush=True)


async def serve(arguments):
    host, _, port = arguments.envd.rpartition(":")
    contexts = Contexts(Envd(host, int(port)), arguments.cwd)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    listener = await asyncio.start_server(
        Server(contexts).connection, arguments.host, arguments.port, limit=HEAD_BYTES_MAX, reuse_address=True
    )
    warm = asyncio.create_task(_warm(contexts, stop))
    await stop.wait()
    listener.close()
    await contexts.close()
    await warm


def main():
    parser = argparse.ArgumentParser(description="The code interpreter of a sandbox: E2B's protocol over HTTP.")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument("--port", type=int, default=49999, help="port to listen on (default: %(default)s)")
    parser.add_argument("--envd", default="127.0.0.1:49983", help="where envd is, for /envs (default: %(default)s)")
    parser.add_argument("--cwd", help="directory of contexts that name none (default: /home/user if it exists)")
    arguments = parser.parse_args()
    if arguments.cwd and not os.path.isdir(arguments.cwd):
        parser.error(f"--cwd {arguments.cwd}: there is no such directory")
    asyncio.run(serve(arguments))


if __name__ == "__main__":
    main()
