"""The work of a Body in its repositories: what it changed, and how that leaves it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, cast

from .. import models
from .client import AsyncClient

if TYPE_CHECKING:
    from typing_extensions import Unpack


class AsyncWork(ABC):
    """The part of a Body that is about repositories. `workspace` names one, if the Body has several."""

    @property
    @abstractmethod
    def client(self) -> AsyncClient:
        """The server of this Body."""

    @property
    @abstractmethod
    def id(self) -> str:
        """Its id."""

    async def _work(self, method: str, name: str, body: Any = None, workspace: str | None = None) -> Any:
        path = f"/v1/bodies/{self.id}/{name}"
        return await self.client.call(method, path, body, params={"workspace": workspace})

    async def diff(self, *, workspace: str | None = None) -> models.Diff:
        """The files that it changed."""
        return cast(models.Diff, await self._work("GET", "diff", workspace=workspace))

    async def patch(self, *, workspace: str | None = None) -> bytes:
        """Its changes as a patch for `git apply`."""
        return await self.client.request("GET", f"/v1/bodies/{self.id}/patch", params={"workspace": workspace})

    async def save(self) -> list[models.SavedRepository]:
        """Saves its work under `refs/palisade/` in the repositories of the host."""
        return cast("list[models.SavedRepository]", (await self._work("POST", "save"))["items"])

    async def log(self, *, workspace: str | None = None) -> models.CommitList:
        """Saves its work, and lists its commits."""
        return cast(models.CommitList, await self._work("POST", "log", workspace=workspace))

    async def land(self, **options: Unpack[models.LandBody]) -> models.LandedBranch:
        """Puts its work onto a branch of the repository."""
        return cast(models.LandedBranch, await self.client.long_work("POST", f"/v1/bodies/{self.id}/land", options))

    async def sync(self, **options: Unpack[models.SyncBody]) -> models.SyncedBranch:
        """Brings a branch of the repository in."""
        return cast(models.SyncedBranch, await self.client.long_work("POST", f"/v1/bodies/{self.id}/sync", options))

    async def prepare(self, *, all: bool = False) -> None:
        """Runs the prepare steps again; with `all` also those that are up to date."""
        await self.client.long_work("POST", f"/v1/bodies/{self.id}/prepare", {"all": all})
