"""Putting an exported folder on a hub, by huggingface_hub's client or one that stands in for it."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

OURS = ["*.safetensors", "*.safetensors.index.json", "*.py"]
"""What of an earlier export goes from the repository: transformers would take its model.safetensors before new shards.
"""


def refuse_no_client(repo: str) -> None:
    """Raise ValueError where `repo` can't be pushed to, before anything is written."""
    if find_spec("huggingface_hub") is None:
        raise ValueError(f"--push {repo}: huggingface_hub isn't installed; pip install huggingface_hub, or export only")
    parts = repo.split("/")
    if len(parts) > 2 or not all(parts):
        raise ValueError(f"--push {repo}: must be NAME or OWNER/NAME")


def push(folder: Path, repo: str, private: bool, client: Any = None) -> str:
    """Upload `folder` to the model repository `repo`, made where it isn't there yet; returns where it is.

    client   what stands in for huggingface_hub.HfApi()
    Raises ValueError with the client's own reason; the folder stays.
    """
    api = client if client is not None else _client()
    try:
        made = api.create_repo(repo_id=repo, repo_type="model", private=private, exist_ok=True)
        api.upload_folder(
            repo_id=repo,
            repo_type="model",
            folder_path=str(folder),
            commit_message="Export by miras-to-hf",
            delete_patterns=OURS,
        )
    except Exception as error:  # the client's errors share no class of their own with those of its transports
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ValueError(f"--push {repo}: {reason}; {folder} is complete, push it again with hf upload") from error
    return str(made)


def _client() -> Any:
    from huggingface_hub import HfApi

    return HfApi()
