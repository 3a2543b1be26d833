"""Fetches a hub model's small files (config, tokenizer, chat template). No weights, no torch.

They come from the hub if it is reachable, else from the local hub cache. `HF_ENDPOINT`, `HF_HOME`,
`HF_HUB_OFFLINE` and tokens have the same effect as for transformers.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import httpx
from huggingface_hub import constants, hf_hub_download
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HTTPError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from understudy.errors import DataError
from understudy.planning.models.folder import HubNotReached, ModelFolder

_NEEDED = ("config.json", "tokenizer.json")
_FURTHER = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "generation_config.json",
    "chat_template.jinja",
    "additional_chat_templates/tool_use.jinja",
    "added_tokens.json",
)
_TIMEOUT_S = 4.0
"""Timeout for the hub's first answer: without a network, huggingface_hub would try for half a minute per file."""


def hub_folder(model: str, role: str, revision: str | None = None) -> ModelFolder | None:
    """The model's folder in the local hub cache, with its small files; None if they cannot be fetched.

    Also None if the model has no tokenizer.json. Raises `DataError` if the hub has no such model, and
    `HubNotReached` if the model is not in the cache and the hub cannot be asked.
    """
    answers = may_ask_hub()

    def fetched(name: str) -> Path | None:
        try:
            found = hf_hub_download(
                model, name, revision=revision, local_files_only=not answers, etag_timeout=_TIMEOUT_S
            )
        except (EntryNotFoundError, LocalEntryNotFoundError):
            return None
        return Path(found)

    needed: list[Path | None] = []
    try:
        needed = [fetched(name) for name in _NEEDED]
        if needed[0] is not None and needed[1] is not None:
            for name in _FURTHER:
                fetched(name)
            return ModelFolder(needed[0].parent)
    except GatedRepoError:
        raise DataError(
            f"{role} = {model!r}: the hub asks for access to this model; accept its terms there and set HF_TOKEN"
        ) from None
    except RevisionNotFoundError:
        raise DataError(f"{role} = {model!r}: the hub has no revision {revision!r} of it") from None
    except RepositoryNotFoundError:
        raise DataError(
            f"{role} = {model!r}: no such folder here, and the hub has no such model (or HF_TOKEN may not see it); give a folder with "
            "config.json, or a hub id like 'Qwen/Qwen3-0.6B'"
        ) from None
    except (HTTPError, OSError, ValueError):
        return None  # loading the model will raise the full error
    if not answers and needed[0] is None:
        why = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else "was not reached"
        # A name without an organisation is more likely a mistyped folder.
        raise (HubNotReached if "/" in model else DataError)(
            f"{role} = {model!r}: no such folder here, no such model in the local hub cache ({constants.HF_HUB_CACHE}), and the hub "
            f"({constants.ENDPOINT}) cannot be asked ({why}); give a folder with config.json, or download the model first"
        )
    return None


def may_ask_hub() -> bool:
    """Whether the hub is reachable and `HF_HUB_OFFLINE` is not set."""
    return not constants.HF_HUB_OFFLINE and hub_answers(constants.ENDPOINT)


@lru_cache(maxsize=4)
def hub_answers(endpoint: str) -> bool:
    """Whether the hub's address answers; asked once."""
    try:
        httpx.head(endpoint, timeout=_TIMEOUT_S)
    except (httpx.HTTPError, OSError, ValueError):
        return False
    return True
