"""An exported folder on the Hub, by huggingface_hub."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from luthier.check.golden import PARITY_FILE
from luthier.errors import UserError, install_hint


def check_push(repo: str) -> None:
    """Raise `UserError` where a folder could not be pushed: before anything is exported."""
    hub = _hub()
    try:
        hub.utils.validate_repo_id(repo)
    except ValueError as error:
        raise UserError(f"export.push: {error}", hint="write it like NAME/MODEL", key="export.push") from error
    try:
        hub.HfApi().whoami()
    except Exception as error:
        hint = "log in with: hf auth login; or set HF_TOKEN. HF_ENDPOINT names another Hub"
        raise UserError(f"export.push: the Hub does not know you: {error}", hint=hint, key="export.push") from error


def push(folder: Path, repo: str, *, public: bool, with_parity: bool) -> str:
    """Upload a folder; where it is then, in words. A repository that is new is private unless ``public``.

    Raises `UserError` where that fails: the folder is whole all the same.
    """
    hub = _hub()
    left_out = [] if with_parity else [PARITY_FILE]
    try:
        api = hub.HfApi()
        api.create_repo(repo, private=not public, exist_ok=True)
        done = api.upload_folder(
            repo_id=repo, folder_path=str(folder), ignore_patterns=left_out, commit_message="Upload model"
        )
    except Exception as error:
        hint = f"the folder is whole and proven; push it again with: hf upload {repo} {folder}"
        raise UserError(f"{folder} was not pushed to {repo}: {error}", hint=hint) from error
    beside = "" if with_parity else f"; {PARITY_FILE} stays here, as it holds rows that no --data has chosen"
    return f"pushed to {done.repo_url}{beside}"


def _hub() -> Any:
    try:
        import huggingface_hub
    except ImportError as error:
        raise UserError(
            "pushing needs the package huggingface_hub, which is not installed", hint=install_hint("hub")
        ) from error
    return huggingface_hub
