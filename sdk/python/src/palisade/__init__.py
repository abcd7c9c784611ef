"""Computers for AI agents: Bodies, their commands, files, terminals and ports, and the agents in them.

    from palisade import Body

    with Body() as body:
        print(body.run("uname -a").stdout)

Each class has an asynchronous twin: `AsyncBody`, `AsyncAgent`, `AsyncHost`, `AsyncClient`.
"""

from . import models
from ._async.agents import AsyncAgent
from ._async.body import AsyncBody
from ._async.client import AsyncClient
from ._async.files import AsyncFiles
from ._async.host import AsyncHost
from ._async.process import AsyncProcess
from ._async.terminal import AsyncTerminal
from ._sync.agents import Agent
from ._sync.body import Body
from ._sync.client import Client
from ._sync.files import Files
from ._sync.host import Host
from ._sync.process import Process
from ._sync.terminal import Terminal
from .errors import (
    CommandFailed,
    Conflict,
    Denied,
    HostFailure,
    InvalidRequest,
    LimitReached,
    NotFound,
    PalisadeError,
    RestoreIncomplete,
    ServerUnavailable,
    StreamInterrupted,
    TimedOut,
    Unauthorized,
)
from .results import AgentEvent, Entry, FileEvent, Output, Port, Result, ServerEvent, TerminalOutput

__version__ = "0.1.0"

__all__ = [
    "Agent",
    "AgentEvent",
    "AsyncAgent",
    "AsyncBody",
    "AsyncClient",
    "AsyncFiles",
    "AsyncHost",
    "AsyncProcess",
    "AsyncTerminal",
    "Body",
    "Client",
    "CommandFailed",
    "Conflict",
    "Denied",
    "Entry",
    "FileEvent",
    "Files",
    "Host",
    "HostFailure",
    "InvalidRequest",
    "LimitReached",
    "NotFound",
    "Output",
    "PalisadeError",
    "Port",
    "Process",
    "RestoreIncomplete",
    "Result",
    "ServerEvent",
    "ServerUnavailable",
    "StreamInterrupted",
    "Terminal",
    "TerminalOutput",
    "TimedOut",
    "Unauthorized",
    "models",
]
