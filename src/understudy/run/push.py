"""Uploads an exported model folder to the hub as one commit. No torch.

`HF_ENDPOINT`, `HF_TOKEN` and `HF_HUB_OFFLINE` have the same effect as for huggingface_hub.
"""

from __future__ import annotations

import re
from pathlib import Path

from huggingface_hub import HfApi, constants, get_token
from huggingface_hub.errors import HfHubHTTPError, HTTPError, OfflineModeIsEnabled

from understudy.errors import ConfigError, UnderstudyError

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def check_pushable(name: str) -> None:
    """Raises for what can be known before anything is written: the name, no token, offline mode."""
    if not _NAME.fullmatch(name):
        raise ConfigError(f"--push {name}: expected ORG/NAME, for example my-org/my-student")
    if constants.HF_HUB_OFFLINE:
        raise ConfigError("--push: HF_HUB_OFFLINE is set; unset it to upload")
    if get_token() is None:
        raise ConfigError("--push: there is no token of the hub; set HF_TOKEN, or run `hf auth login`")


def push(folder: Path, name: str, *, public: bool = False) -> str:
    """Uploads every file of `folder`; returns the address and whether it is private. A repository that exists
    keeps its visibility."""
    api = HfApi()
    left = f"the exported folder is complete: {folder}"
    try:
        repository = api.create_repo(name, private=not public, exist_ok=True)
        api.upload_folder(
            repo_id=name, folder_path=folder, commit_message="Upload a student trained with Understudy"
        )
        private = api.model_info(name).private
    except HfHubHTTPError as error:
        reason = error.server_message or str(error).splitlines()[0]
        raise UnderstudyError(
            f"--push {name}: the hub ({constants.ENDPOINT}) refused with {error.response.status_code}: {reason}; {left}"
        ) from error
    except (HTTPError, OfflineModeIsEnabled, OSError) as error:
        raise UnderstudyError(
            f"--push {name}: the hub ({constants.ENDPOINT}) was not reached ({type(error).__name__}: {error}); {left}; "
            f"once online: hf upload {name} {folder}"
        ) from error
    return f"{repository} ({'private' if private else 'public'})"
