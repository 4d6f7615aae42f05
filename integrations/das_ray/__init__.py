"""das on Ray: one history for many rollout workers.

    python -m das_ray start NAME --directory DIR --shards 4      # once; or das_ray.service.start_history(...)
    "shared_history": "ray:NAME"                                 # in the settings of das_vllm or das_sglang

Importing it imports no Ray: only das_ray.service does.
"""

from das_ray.settings import SharedHistorySettings, read_shared_history
from das_ray.shared_history import SharedHistory

__all__ = ["SharedHistory", "SharedHistorySettings", "read_shared_history"]
