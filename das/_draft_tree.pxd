from libc.stdint cimport int32_t, int64_t

from das._draft cimport MAX_CHILDREN, MAX_DRAFT, NUM_TREES, Chain, Request
from das._tree cimport Cursor

cdef struct Offer:              # a token that may become a node
    double survival
    int32_t number              # of the offers made, this one's: the earlier of equals is taken
    int32_t position            # what it follows
    int32_t token

cdef struct Search:             # a tree being drafted, beside its Chain, which stands at the position reached last
    int32_t max_children
    int32_t num_offers          # of them open, a heap: the best one first
    int32_t num_made
    Offer[(MAX_DRAFT + 1) * MAX_CHILDREN] offers
    Cursor[(MAX_DRAFT + 1) * NUM_TREES] cursors     # of each position

cdef void draft_tree_group(Chain* chains, Search* searches, int32_t num_chains) noexcept nogil
cdef int64_t score_tree(Request* request, const int32_t* token_ids, int64_t num_tokens,
                        int64_t num_verified) noexcept nogil
