from das._draft cimport RuleParameters

cdef class Rule:
    cdef RuleParameters parameters
    cdef object arrays          # keeps alive what the parameters point to
