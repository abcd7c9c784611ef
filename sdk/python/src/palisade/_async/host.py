"""The things of a server's host: templates, snapshots, secrets, events."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, cast
from urllib.parse import quote

from .. import models
from .client import AsyncClient, default_client

if TYPE_CHECKING:
    from typing_extensions import Unpack


class AsyncHost:
    """The host of a server."""

    def __init__(self, client: AsyncClient | None = None) -> None:
        self.client = client or default_client()

    # Templates.

    async def templates(self) -> list[models.Template]:
        """The templates."""
        return [template async for template in self.client.items("/v1/templates")]

    async def template(self, name: str) -> models.TemplateDetail:
        """One template, with its builds."""
        return cast(models.TemplateDetail, await self.client.call("GET", f"/v1/templates/{quote(name, safe='')}"))

    async def build_template(self, **options: Unpack[models.BuildTemplate]) -> models.TemplateDetail:
        """Builds a template from the text of a Dockerfile."""
        return cast(models.TemplateDetail, await self.client.long_work("POST", "/v1/templates/build", options))

    async def import_template(self, **options: Unpack[models.ImportTemplate]) -> models.TemplateDetail:
        """Makes a template of an image, or of an archive on the server's host."""
        return cast(models.TemplateDetail, await self.client.long_work("POST", "/v1/templates/import", options))

    async def remove_template(self, name: str) -> None:
        """Removes a template."""
        await self.client.call("DELETE", f"/v1/templates/{quote(name, safe='')}")

    # Snapshots.

    async def snapshots(self) -> list[models.Snapshot]:
        """The snapshots."""
        return [snapshot async for snapshot in self.client.items("/v1/snapshots")]

    async def snapshot(self, name: str) -> models.Snapshot:
        """One snapshot, by its id or name."""
        return cast(models.Snapshot, await self.client.call("GET", f"/v1/snapshots/{quote(name, safe='')}"))

    async def remove_snapshot(self, name: str) -> None:
        """Removes a snapshot."""
        await self.client.call("DELETE", f"/v1/snapshots/{quote(name, safe='')}")

    # Secrets.

    async def secrets(self) -> list[models.Secret]:
        """The secrets, without their values."""
        return cast("list[models.Secret]", (await self.client.call("GET", "/v1/secrets"))["items"])

    async def set_secret(self, name: str, **options: Unpack[models.NewSecret]) -> models.Secret:
        """Keeps a secret for Bodies, which use it and never see its value."""
        return cast(models.Secret, await self.client.call("PUT", f"/v1/secrets/{quote(name, safe='')}", options))

    async def remove_secret(self, name: str) -> None:
        """Removes a secret; the Bodies that had it lose it."""
        await self.client.call("DELETE", f"/v1/secrets/{quote(name, safe='')}")

    # Events.

    async def events(
        self, *, after: int | None = None, body: str | None = None, limit: int | None = None
    ) -> models.Events:
        """A page of the log; `next` is the `after` of the page behind it."""
        params = {"after": after, "body": body, "limit": limit}
        return cast(models.Events, await self.client.call("GET", "/v1/events", params=params))

    async def follow_events(self, *, after: int | None = None, body: str | None = None) -> AsyncIterator[models.Event]:
        """The log as it grows, from now on or from behind a place; a broken connection goes on without a gap."""
        async for event in self.client.follow("/v1/events/stream", after=after, params={"body": body}):
            if event.name == "message":
                yield cast(models.Event, json.loads(event.data))
