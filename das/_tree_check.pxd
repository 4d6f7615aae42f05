from das._tree_arrays cimport Tree

cdef int check_tree(Tree* tree) except -1
