"""All that is broken on purpose. `run.py` demands that a test notices each."""

from analysis_mutations import ANALYSIS_MUTATIONS
from drafting_mutations import DRAFTING_MUTATIONS
from history_mutations import HISTORY_MUTATIONS
from policy_mutations import POLICY_MUTATIONS
from tree_mutations import TREE_MUTATIONS

MUTATIONS = [
    *TREE_MUTATIONS,
    *DRAFTING_MUTATIONS,
    *HISTORY_MUTATIONS,
    *POLICY_MUTATIONS,
    *ANALYSIS_MUTATIONS,
]
