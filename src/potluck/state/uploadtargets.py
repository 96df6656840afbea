"""Where checkpoints can be uploaded to: anything that fsspec knows, and the Hugging Face hub.

What is uploaded is a backup as it lies on disk, tensors first and record last, so that a folder elsewhere is itself a
folder of backups: copied back, it can be restored from. Both libraries come with the extra `upload`, and are imported
only here.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Protocol

from potluck.errors import AccessError, ConfigurationError, RetryableError
from potluck.peer import environment
from potluck.state.backupfile import BackupInfo

logger = logging.getLogger(__name__)

MISSING = "{} is not installed, which uploads need: pip install 'potluck-train[upload]'"


class UploadTarget(Protocol):
    """Takes one backup after the other. Its method blocks, and is called from a thread."""

    @property
    def name(self) -> str:
        """What it is called in messages."""
        ...

    def upload(self, info: BackupInfo) -> None:
        """Upload a backup; what is there already is not sent again.

        RetryableError: it may work later. ConfigurationError or AccessError: not until somebody changes something.
        """
        ...

    def upload_folder(self, folder: Path, message: str) -> None:
        """Upload the files of a folder, as of a model that was exported; errors as above."""
        ...


def target_of(text: str, *, keep_last: int) -> UploadTarget:
    """`hf://USER/REPOSITORY`, with the token in HF_TOKEN, or any folder that fsspec knows, where so many stay."""
    if not text.startswith("hf://"):
        return FolderTarget(text, keep_last=keep_last)
    token = environment.huggingface_token()
    if not token:
        raise ConfigurationError("the Hugging Face hub needs a token that may write: set HF_TOKEN")
    endpoint = environment.huggingface_endpoint()
    is_public = endpoint == environment.PUBLIC_HUGGINGFACE
    return HuggingFaceTarget(text.removeprefix("hf://"), token=token, endpoint=None if is_public else endpoint)


class FolderTarget:
    """A folder on whatever fsspec can reach: `s3://bucket/run`, `gs://…`, `sftp://…`, `/mnt/share`."""

    def __init__(self, url: str, *, keep_last: int = 1, **storage_options: Any) -> None:
        """Of what this object has uploaded, the last so many stay there."""
        try:
            import fsspec
        except ImportError as error:
            raise ConfigurationError(MISSING.format("fsspec")) from error
        if keep_last < 1:
            raise ConfigurationError(f"keep_last={keep_last}: at least 1 checkpoint has to stay")
        self.name = url
        try:
            self._system, self._folder = fsspec.url_to_fs(url, **storage_options)
        except (ImportError, ValueError) as error:
            raise ConfigurationError(f"checkpoints cannot be uploaded to {url}: {error}") from error
        self._keep_last = keep_last
        self._uploaded: list[tuple[str, str]] = []  # names of tensors and record

    def upload(self, info: BackupInfo) -> None:
        """Tensors first; the record makes them count."""
        try:
            self._system.makedirs(self._folder, exist_ok=True)
            self._put(info.tensors_path, is_final=False)
            self._put(info.record_path, is_final=True)
            self._remember(info.tensors_path.name, info.record_path.name)
        except PermissionError as error:
            raise AccessError(f"{self.name} does not let us write: {error}") from error
        except OSError as error:
            raise RetryableError(f"epoch {info.epoch} could not be uploaded to {self.name}: {error}") from error

    def upload_folder(self, folder: Path, message: str) -> None:
        """One file after the other."""
        try:
            self._system.makedirs(self._folder, exist_ok=True)
            for path in sorted(folder.iterdir()):
                self._system.put_file(str(path), f"{self._folder}/{path.name}")
        except PermissionError as error:
            raise AccessError(f"{self.name} does not let us write: {error}") from error
        except OSError as error:
            raise RetryableError(f"{folder} could not be uploaded to {self.name}: {error}") from error

    def _put(self, path: Any, *, is_final: bool) -> None:
        remote = f"{self._folder}/{path.name}"
        if not is_final and self._system.exists(remote) and self._system.size(remote) == path.stat().st_size:
            return  # from an attempt that broke off later; its name has the digest in it
        self._system.put_file(str(path), remote)

    def _remember(self, *names: str) -> None:
        pair = (names[0], names[1])
        self._uploaded = [*(other for other in self._uploaded if other != pair), pair]
        while len(self._uploaded) > self._keep_last:
            tensors, record = self._uploaded.pop(0)
            for name in (record, tensors):
                remote = f"{self._folder}/{name}"
                if self._system.exists(remote):
                    self._system.rm_file(remote)


class HuggingFaceTarget:
    """A repository on the Hugging Face hub, or on a server that behaves like it. One commit per checkpoint.

    The repository's newest revision holds the last checkpoint; those before are in its history. Files that the hub has
    already are not sent again, so an upload that broke off goes on at the next attempt.
    """

    def __init__(
        self, repository: str, *, token: str, endpoint: str | None = None, folder: str = "", private: bool | None = None
    ) -> None:
        """`endpoint` is the hub's address, the public one unless given; `folder` is where in the repository.

        The public hub gets large files by its own Xet protocol, others by git-LFS, which they are more likely to know.
        """
        try:
            import huggingface_hub
        except ImportError as error:
            raise ConfigurationError(MISSING.format("huggingface_hub")) from error
        self.name = f"{endpoint or 'huggingface.co'}: {repository}"
        self._hub = huggingface_hub
        self._api = huggingface_hub.HfApi(endpoint=endpoint, token=token, library_name="potluck")
        self._repository = repository
        self._prefix = f"{folder.strip('/')}/" if folder else ""
        self._private = private
        self._uses_xet = endpoint is None
        self._is_made = False

    def upload(self, info: BackupInfo) -> None:
        """One commit with both files, in place of those before."""
        with self._explaining(f"epoch {info.epoch}"):
            self._commit(info)

    def upload_folder(self, folder: Path, message: str) -> None:
        """One commit with all of its files, so that `from_pretrained` finds them by the repository's name."""
        paths = sorted(folder.iterdir())
        with self._explaining(str(folder)), ExitStack() as stack:
            self._api.create_commit(
                self._repository, [self._addition(path, stack) for path in paths], commit_message=message
            )

    @contextmanager
    def _explaining(self, what: str) -> Iterator[None]:
        """With the repository made; whatever the library raises becomes an error that says what to do."""
        errors = self._hub.errors
        try:
            with self._without_progress_bars():
                self._make_repository()
                yield
        except errors.HFValidationError as error:
            raise ConfigurationError(f"{self._repository!r} cannot name a repository: {error}") from error
        except errors.HfHubHTTPError as error:
            raise self._explained(error, what) from error
        except (OSError, RuntimeError) as error:  # the library wraps what fails in its threads
            cause = error.__cause__
            if isinstance(cause, errors.HfHubHTTPError):
                raise self._explained(cause, what) from error
            raise RetryableError(f"{what} could not be uploaded to {self.name}: {error}") from error

    @contextmanager
    def _without_progress_bars(self) -> Iterator[None]:
        # They would be drawn into somebody's console, from a thread in the background.
        utils = self._hub.utils
        were_off = utils.are_progress_bars_disabled()
        utils.disable_progress_bars()
        try:
            yield
        finally:
            if not were_off:
                utils.enable_progress_bars()

    def _make_repository(self) -> None:
        if not self._is_made:
            self._api.create_repo(self._repository, private=self._private, exist_ok=True)
            self._is_made = True

    def _commit(self, info: BackupInfo) -> None:
        paths = (info.tensors_path, info.record_path)
        names = {f"{self._prefix}{path.name}" for path in paths}
        found = self._api.list_repo_files(self._repository)
        old = [name for name in found if self._is_ours(name) and name not in names]
        with ExitStack() as stack:
            operations = [self._addition(path, stack) for path in paths]
            operations += [self._hub.CommitOperationDelete(path_in_repo=name) for name in old]
            self._api.create_commit(self._repository, operations, commit_message=f"Epoch {info.epoch}")

    def _addition(self, path: Path, stack: ExitStack) -> Any:
        return self._hub.CommitOperationAdd(
            path_in_repo=f"{self._prefix}{path.name}",
            # The library sends what is open already by git-LFS, and what it opens itself by Xet.
            path_or_fileobj=path if self._uses_xet else stack.enter_context(path.open("rb")),
        )

    def _is_ours(self, name: str) -> bool:
        short = name.removeprefix(self._prefix)
        return name.startswith(self._prefix) and "/" not in short and short.startswith("epoch-")

    def _explained(self, error: Any, what: str) -> Exception:
        status = error.response.status_code if error.response is not None else 0
        text = f"{what} could not be uploaded to {self.name}: {error}"
        if status in (401, 403):
            return AccessError(f"{text}. Use a token that may write to this repository")
        if status == 429 or status >= 500 or not status:
            return RetryableError(text)
        return ConfigurationError(text)
