from libc.stdint cimport int16_t, int32_t, int64_t, uint64_t

from das._tree cimport Cursor
from das._tree_arrays cimport Tree

cdef enum:
    NUM_ORDERS = 8
    OWN = 0                     # the tree of the request's prompt
    COMMON = 1                  # the tree of what other prompts' requests emit, where a prompt has no useful history
    NUM_TREES = 2
    MAX_LEVELS = NUM_TREES * NUM_ORDERS
    MAX_DRAFT = 64              # the longest draft a budget may ask for
    MAX_CHILDREN = 4            # branches that a tree draft may have at one position
    GROUP_SIZE = 16             # enough for a memory access to finish while the others are served
    NUM_RATES = 1024            # bins of the calibrated probability on [0, 1]
    NUM_FIGURES = 3             # of each: predictions, hits, sum of the probabilities
    NUM_EXPERTS = 9             # of hedged drafting
    NUM_COUNTERS = 5
    DECODE_STEPS = 0            # positions in a request's counters, in the order of metrics.AcceptanceCounters
    VERIFICATION_STEPS = 1
    DRAFTED = 2
    ACCEPTED = 3
    EMITTED = 4

cdef enum Source:               # who ever continued the last token so
    BY_RUNNING = 0
    BY_HISTORY = 1
    BY_BOTH = 2
    BY_OTHERS = 3               # other prompts only
    NUM_SOURCES = 4

cdef double KAPPA
cdef double FIRST_ESTIMATE
cdef double[NUM_TREES] WEIGHTS

cdef struct Chain
cdef struct Request

cdef struct ExpertWeights:      # three rows of an array of das.Hedge
    double[NUM_EXPERTS] weights
    double[NUM_EXPERTS] expected_losses
    double[NUM_EXPERTS] mixture     # by which the experts count now

cdef struct Experts:            # of a hedged request
    ExpertWeights* weights      # shared by all, or its own
    ExpertWeights own
    float[(MAX_DRAFT + 1) * NUM_EXPERTS] opinions   # P of the most probable token, by position and expert

cdef struct RuleParameters:     # `_rule.pyx` explains them
    double* hits
    double* misses
    double* histogram
    double* explained
    double kept                 # of a cell's counts, when it learns
    int32_t max_levels
    int32_t source_mask         # of a prediction's source, for its row of cells: all bits, or none
    double (*mix)(Chain*, int32_t, float*) noexcept nogil   # hedged drafting (`_hedge.pyx`); NULL: one blend
    void (*teach)(Request*, const float*, bint) noexcept nogil
    ExpertWeights* expert_weights
    double learning_rate
    double share
    double hint_rate
    bint is_hedged_by_request

cdef struct Prediction:
    int32_t token
    int16_t cell
    int16_t source
    float rate                  # the calibrated probability that it is right if all before it are

cdef struct Branches:           # a pending draft that is a tree; position 0 is the end of the context, j + 1 behind node j
    int32_t[MAX_DRAFT] token_ids
    int32_t[MAX_DRAFT] parents  # the node before, an earlier one; -1: none
    int32_t[MAX_DRAFT + 1] num_asked    # predictions at each position, the most probable first
    Prediction[(MAX_DRAFT + 1) * MAX_CHILDREN] asked

cdef struct OpenSequence:
    Tree* tree
    int32_t slot

cdef struct Request:
    int32_t num_trees           # 0: this slot is free; 1: only the prompt's; 2: the common one, too
    OpenSequence[NUM_TREES] grows   # the same tokens, in each tree
    int32_t num_drafted         # tokens of the pending draft
    int32_t num_asked           # its predictions: one more where drafting stopped of its own accord; a tree's positions
    bint is_tree                # the pending draft and its predictions are in `branches`, not in `asked`
    Branches* branches          # NULL until the first tree
    Prediction[MAX_DRAFT + 1] asked
    const RuleParameters* rule
    bint has_history            # its prompt has rollouts of earlier epochs
    Experts* experts            # NULL: not hedged
    int64_t num_prompt          # tokens
    int64_t max_total           # prompt and response tokens together
    uint64_t prompt_key
    int64_t number              # of the request, in order of start
    int64_t last_call           # that named the request
    int32_t* response           # all tokens since the prompt
    int64_t num_response
    int64_t response_capacity
    int64_t[NUM_COUNTERS] counters

cdef struct Level:              # what one context in one tree says
    int32_t tree
    int32_t order
    int32_t top_token
    double top_count            # weighted, as all counts here
    double other_count          # of any other token at most
    double share                # 1 / (occurrences with a next token + KAPPA)

cdef struct Evidence:           # what the contexts of one position say, the weakest first
    int32_t num_levels
    Level[MAX_LEVELS] levels

cdef struct Chain:              # a draft being made
    Request* request
    int32_t* token_ids
    int32_t* parents            # of a tree
    double* survival
    int32_t max_draft_tokens
    double min_survival
    double path                 # survival of what has been drafted
    Cursor[NUM_TREES] cursors
    Evidence evidence

cdef int32_t begin_group(Chain* chains, int32_t num_chains, int32_t* active) noexcept nogil
cdef void gather_group(Chain* chains, const int32_t* active, int32_t num_active) noexcept nogil
cdef double blend(Chain* chain, int32_t token) noexcept nogil
cdef void find_cell(Chain* chain, Prediction* prediction, double probability) noexcept nogil
cdef double hit_rate(const RuleParameters* rule, int32_t cell, double probability) noexcept nogil
cdef bint learn(const RuleParameters* rule, const Prediction* prediction, int32_t token) noexcept nogil
cdef void draft_group(Chain* chains, int32_t num_chains) noexcept nogil
cdef void note_asked(Chain* chain, const Prediction* prediction, int32_t position) noexcept nogil
cdef void note_answer(Request* request, const Prediction* prediction, int32_t position, bint was_hit) noexcept nogil
cdef bint explains_nothing(const double* explained) noexcept nogil
cdef void score(Request* request, const int32_t* token_ids, int64_t num_tokens) noexcept nogil
